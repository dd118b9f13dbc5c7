"""Translate NeMo's configuration file: each key is kept, dropped as inert, or must be decided.

A configuration of megafp8 may be given too.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from megafp8.config.api import (
    DEFAULT_CONFIG,
    FUSION,
    GELU,
    HYBRID,
    LAUNCHER_GIVES,
    MASK_FUSION,
    Origin,
    Setting,
    SettingError,
    all_keys,
    asks_for_tanh,
    check_values,
    flatten,
    launcher_paths_once,
    nemo_keys,
    plain,
    put_in,
    read_value,
    read_values,
    spellings,
    tree_with_nemo_keys,
    unused,
    why_not_hybrid,
)
from megafp8.specs.data import MOCK_DATA
from megafp8_migrate.ignored import note_of
from megafp8_migrate.report import Migration, set_in

_KEPT_AS_THEY_ARE = ("defaults", "hydra")
_ACT_IF_FALSE = {
    MASK_FUSION: "a mask of documents acts",
    FUSION: "NeMo's default is the tanh form of GELU",
}
"""NeMo's keys whose absence means True."""
_NAME = re.compile(r"[\w.]+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def translate_nemo(tree: dict[Any, Any], m: Migration) -> None:
    """Translate the tree of a NeMo file into the migration `m`."""
    m.out |= {name: tree[name] for name in _KEPT_AS_THEY_ARE if name in tree}
    ours = {str(name): item for name, item in tree.items() if name not in _KEPT_AS_THEY_ARE}
    given_there = list(flatten("", ours, ""))
    contradicting = spellings.contradictions(given_there)
    spelled, translated = spellings.translate_spellings(given_there)
    settings = [_with_number(setting, m) for setting in spelled]
    new_names = {t.setting.key: t.setting for t in translated}
    mock = next((s for s in settings if (s.key, s.value) == (spellings.IMPL, MOCK_DATA)), None)
    if mock is not None:
        settings = _with_mock_data(settings, mock, m)
        new_names[spellings.PREFIX] = mock
    whole = tree_with_nemo_keys()
    wrong = {problem.key: problem for problem in contradicting}
    for setting in settings:
        problem = put_in(whole, setting)
        if problem is not None:
            wrong.setdefault(setting.key, problem)
    given = {setting.key for setting in settings}
    values, unreadable = read_values(whole)
    values = {key: value for key, value in values.items() if key in given}
    origins = dict.fromkeys(given, Origin("file"))
    problems = launcher_paths_once(
        [*unreadable, *check_values(values, origins), *_nemo_problems(whole, values, given)]
    )
    for problem in problems:
        if problem.reason.startswith(LAUNCHER_GIVES):
            m.decide(problem.key, "???", problem.reason, problem.hint)
        if problem.key in given:
            wrong.setdefault(problem.key, problem)
    idle = {
        found.key: f"it has no effect with {found.setting}"
        for found in unused(values)
        if found.key not in wrong
    }
    if (reason := why_not_hybrid(values)) is not None:
        idle[HYBRID] = reason
    named = tree.get("defaults")
    ours_is_below = isinstance(named, list) and DEFAULT_CONFIG in named
    is_nemos = bool(given & nemo_keys().keys()) and not ours_is_below
    fused = asks_for_tanh(partial(_value, whole), origins, Origin("file") if is_nemos else None)
    if fused is not None:
        default = "" if fused.key in given else ", by NeMo's default"
        m.change(fused.key, fused.value, {GELU: True}, f"the tanh form of GELU{default}")
    for setting in settings:
        if fused is not None and setting.key in (FUSION, GELU):
            continue
        problem = wrong.get(setting.key)
        if problem is not None:
            m.decide(setting.key, setting.value, problem.reason, problem.hint)
        elif setting.key in nemo_keys():
            if setting.key in _ACT_IF_FALSE and setting.value is False:
                set_in(m.out, setting.key, setting.value)
                m.kept.append(f"{setting.key}: False ({_ACT_IF_FALSE[setting.key]})")
            elif _is_referred_to(setting.key, settings):
                set_in(m.out, setting.key, setting.value)
                m.kept.append(f"{setting.key}: {plain(setting.value)} (other keys refer to it)")
            else:
                m.drop(setting.key, setting.value, nemo_keys()[setting.key].note)
        elif setting.key in idle:
            m.drop(setting.key, setting.value, idle[setting.key])
        else:
            set_in(m.out, setting.key, setting.value)
            if setting.key in new_names:
                old = new_names[setting.key]
                m.change(old.key, old.value, {setting.key: setting.value})
            elif note := note_of(setting.key, setting.value):
                m.change(setting.key, setting.value, {setting.key: setting.value}, note)
            else:
                m.kept.append(f"{setting.key}: {plain(setting.value)}")
    if "defaults" not in tree:
        for path, key in all_keys().items():
            if key.required and path not in given:
                m.decide(path, "???", "must be given", f"Give {key.valid_text}")


def _with_mock_data(settings: list[Setting], mock: Setting, m: Migration) -> list[Setting]:
    """Return the settings with random tokens as their data; NeMo then reads no other."""
    for setting in settings:
        if setting.key == spellings.PREFIX:
            m.drop(setting.key, setting.value, f"no data are read with {mock.key}={MOCK_DATA}")
    others = [s for s in settings if s.key not in (spellings.IMPL, spellings.PREFIX)]
    return [*others, Setting(spellings.PREFIX, MOCK_DATA, mock.origin)]


def _value(whole: Any, path: str) -> Any:
    """Return the value of a key; None if it cannot be read."""
    try:
        return read_value(whole, path)
    except (OmegaConfBaseException, ValueError, OverflowError, RecursionError):
        return None


def _nemo_problems(whole: Any, values: dict[str, Any], given: set[str]) -> list[SettingError]:
    problems = []
    for path, key in nemo_keys().items():
        if path not in given:
            continue
        try:
            value = read_value(whole, path)
        except (OmegaConfBaseException, ValueError, OverflowError, RecursionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            problems.append(SettingError(path, None, reason, key.hint))
            continue
        if not key.passes(value, values):
            problems.append(key.problem(value, ""))
    return problems


def _with_number(setting: Setting, m: Migration) -> Setting:
    """Convert a text such as 1e-5 to a float if the setting is a number.

    YAML 1.1 does not read such a text as a number. Any other setting is returned unchanged.
    """
    key, value = all_keys().get(setting.key), setting.value
    if key is None or key.type_text.removesuffix(", or null") != "a number":
        return setting
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return setting
    return Setting(setting.key, float(value), setting.origin)


def _is_referred_to(path: str, settings: list[Setting]) -> bool:
    """Whether a setting that is kept refers to `path`, which must then be kept too."""
    ending = "." + path.rpartition(".")[2]
    live = (s.value for s in settings if s.key in all_keys())
    names = (name for value in live if "${" in str(value) for name in _NAME.findall(str(value)))
    return any(name == path or (name[0] == "." and name.endswith(ending)) for name in names)
