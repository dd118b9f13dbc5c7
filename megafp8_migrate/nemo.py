"""Translate NeMo's configuration file: each key is kept, dropped as inert, or must be decided.

A configuration of megafp8 may be given too.
"""

from __future__ import annotations

import re
from typing import Any

from megafp8.config.api import (
    DEFAULT_CONFIG,
    FUSION,
    GELU,
    HYBRID,
    Layer,
    Origin,
    Setting,
    all_keys,
    check_values,
    dialects,
    flatten,
    merge,
    nemo_keys,
    plain,
    unused,
    why_not_hybrid,
)
from megafp8.specs.data import MOCK_DATA
from megafp8_migrate.ignored import note_of
from megafp8_migrate.report import Migration, set_in

_KEPT_AS_THEY_ARE = ("defaults", "hydra")
_ACT_IF_FALSE = {
    dialects.MASK_FUSION: "a mask of documents acts",
    FUSION: "NeMo's default is the tanh form of GELU",
}
"""NeMo's keys whose absence means True."""
_NAME = re.compile(r"[\w.]+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def translate_nemo(tree: dict[Any, Any], m: Migration) -> None:
    """Translate the tree of a NeMo file into the migration `m`."""
    m.out |= {name: tree[name] for name in _KEPT_AS_THEY_ARE if name in tree}
    origin = Origin("file")
    ours = {str(name): item for name, item in tree.items() if name not in _KEPT_AS_THEY_ARE}
    spelled = dialects.translate([Layer(origin, tuple(flatten("", ours, origin)))])
    settings = [_with_number(setting, m) for layer in spelled.layers for setting in layer.settings]
    new_names = {t.setting.key: t.setting for t in spelled.translated}
    mock = next((s for s in settings if (s.key, s.value) == (dialects.IMPL, MOCK_DATA)), None)
    if mock is not None:
        settings = _with_mock_data(settings, mock, m)
        new_names[dialects.PREFIX] = mock
    layers = [Layer(origin, tuple(settings))]
    merged = merge(layers)
    wrong = {problem.key: problem for problem in reversed([*spelled.problems, *merged.problems])}
    given = {setting.key for setting in settings}
    values, unreadable = merged.values()
    values = {key: value for key, value in values.items() if key in given}
    merged.origins = {key: origin for key in [*nemo_keys(), *values] if key in given}
    _, refused = dialects.inert_settings(merged, values)
    problems = [*unreadable, *check_values(values, merged.origins), *refused]
    for refusal in dialects.launcher_paths_once(problems):
        if refusal.reason.startswith(dialects.LAUNCHER_GIVES):
            m.decide(refusal.key, "???", refusal.reason, refusal.hint)
        if refusal.key in given:
            wrong.setdefault(refusal.key, refusal)
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
    beside = dialects.Translation()
    dialects.with_tanh_gelu(merged, beside, origin if is_nemos else None)
    fused = beside.translated[0].setting if beside.translated else None
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
        if setting.key == dialects.PREFIX:
            m.drop(setting.key, setting.value, f"no data are read with {mock.key}={MOCK_DATA}")
    others = [s for s in settings if s.key not in (dialects.IMPL, dialects.PREFIX)]
    return [*others, Setting(dialects.PREFIX, MOCK_DATA, mock.origin)]


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
