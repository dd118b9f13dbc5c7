"""Read overrides such as `model.fp8=True` one by one, so that every wrong one is reported.

Hydra's parser reads each override. Hydra alone would stop at the first problem, and would silently
add a misspelt key that is given with `+` or `++`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from antlr4 import CommonTokenStream, InputStream
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

from megafp8.config.errors import COMMAND_LINE, SettingError
from megafp8.config.hydra_section import GROUPS, IN_A_FILE, ON_THE_COMMAND_LINE, is_hydras
from megafp8.config.megatron_names import REFUSED_PRESETS
from megafp8.config.nemo import nemo_keys
from megafp8.config.schema import all_keys
from megafp8.config.settings import (
    DATA_PREFIX,
    Setting,
    flatten,
    is_text,
    known_sections,
    section_problem,
    setting_problem,
    similar_keys,
    unknown_key,
)
from megafp8.secrets import hide, one_line, redacted

PRESET_GROUPS = ("model", "precision")
"""The folders of presets, which are files of settings: `model=gpt3_125m` chooses one."""

_LONGEST_KEPT = 200  # characters of an override that is read once
_LONGEST_NAME = 255  # bytes of a file's name; no file system asks for a longer one
_PLAIN_PATH = re.compile(
    r"(?:[A-Za-z0-9_.-]*/[A-Za-z0-9_./-]*|[A-Za-z_][A-Za-z0-9_.-]*\.py)(?::[A-Za-z_][A-Za-z0-9_]*)?"
)
"""A path, or the name of a recipe's file, with a class after it."""

_NUMBERS = [[OverrideLexer.INT], [OverrideLexer.FLOAT], [OverrideLexer.BOOL]]
_RANGES = ("range", "interval")  # the functions of Hydra that take numbers alone

_OF_THE_JOB = re.compile(r"\$\{(?!(oc\.env|now):)")
"""An interpolation of other settings, not of the environment or the time."""

_CLOSING = {"[": "]", "{": "}"}


@dataclass(frozen=True)
class ParsedOverride:
    """Hold one override that can be passed to Hydra.

    Attributes:
        text: The override without a leading `+`.
        settings: What the override sets; empty if it chooses a preset, is Hydra's own, or holds
            several values.
        sweep: The parsed form, if the override holds several values.
        is_group: Whether it chooses a file of settings.
        is_hydra: Whether it is a setting of Hydra itself.
    """

    text: str
    settings: tuple[Setting, ...]
    sweep: Override | None
    is_group: bool = False
    is_hydra: bool = False

    @property
    def given(self) -> list[tuple[str, Any]]:
        """Return the keys that the override sets, with their values; a mapping sets several."""
        if self.settings:
            return [(setting.key, setting.value) for setting in self.settings]
        key, _, value = self.text.lstrip("+").partition("=")
        return [(key.strip(), value)]


def last_given(overrides: Sequence[ParsedOverride]) -> tuple[list[ParsedOverride], list[str]]:
    """Return the overrides without what later ones replace, and a line for each such key.

    The last value of a key counts, as in Hydra. A mapping that has other keys too stays with these.
    """
    values: dict[str, list[Any]] = {}
    for key, value in (given for override in overrides for given in override.given):
        values.setdefault(key, []).append(value)
    lines, seen, kept = list[str](), set[str](), list[ParsedOverride]()
    for key, (*others, last) in values.items():
        if replaced := [other for other in others if other != last]:
            text = ", ".join(one_line(redacted(other, key)) for other in replaced)
            end = f"{key}={one_line(redacted(last, key))}, the last, counts"
            lines.append(f"given twice: {key}={text} ({COMMAND_LINE}): {end}")
    for override in reversed(overrides):
        keys = {key for key, _ in override.given}
        if not keys <= seen:
            counting = tuple(s for s in override.settings if s.key not in seen)
            kept.insert(0, replace(override, settings=counting))
        seen |= keys
    return kept, lines


def parse_overrides(
    texts: Sequence[str], config_dirs: Sequence[Path], *, multirun: bool = False
) -> tuple[list[ParsedOverride], list[SettingError]]:
    """Return the overrides that can be composed, and what is wrong with the others.

    Args:
        texts: The overrides as they were typed.
        config_dirs: The directories in which presets are searched.
        multirun: Whether an override may hold several values, as `model.fp8=True,False`.
    """
    good: list[ParsedOverride] = []
    problems: list[SettingError] = []
    for text in texts:
        parsed = _parse(text, config_dirs, multirun)
        if isinstance(parsed, SettingError):
            problems.append(parsed)
            continue
        wrong = [problem for s in parsed.settings if (problem := setting_problem(s))]
        problems += wrong
        if not wrong:
            good.append(parsed)
    return good, problems


def quoted(text: str) -> str:
    """Return a text that Hydra reads as one value: in quotes, unless it is an ordinary path."""
    if _PLAIN_PATH.fullmatch(text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


@cache
def hydras_parser() -> OverridesParser:
    """Return Hydra's parser of overrides, which keeps nothing of what it reads."""
    return OverridesParser.create()


def _read(text: str) -> Override:
    """Return an override as Hydra reads it; jobs of a sweep or a comparison share most of them."""
    if len(text) > _LONGEST_KEPT:
        return hydras_parser().parse_override(text)
    return copy.deepcopy(_read_once(text))  # a caller may change its lists


@lru_cache(maxsize=512)
def _read_once(text: str) -> Override:
    return hydras_parser().parse_override(text)


def _parse(text: str, config_dirs: Sequence[Path], multirun: bool) -> ParsedOverride | SettingError:
    """Return what an override means, or why it is refused; its values are not checked yet."""
    if text.startswith("="):
        hint = "Write KEY=VALUE without blanks around the equals sign"
        return SettingError(text, None, "has no key", hint, origin=COMMAND_LINE)
    try:
        override = _read(text)
        if (with_quotes := texts_quoted(text, config_dirs)) != text:
            text, override = with_quotes, _read(with_quotes)
    except (HydraException, ValueError, RecursionError) as error:
        return _grammar_problem(text, error)
    key = override.key_or_group
    if (name := _doubled_key(text)) is not None:
        reason = f"has {name} twice in one mapping, and only the last would count"
        value = text.partition("=")[2]
        return SettingError(key, value, reason, "Leave one of them out", origin=COMMAND_LINE)
    if override.is_delete():
        hint = "Settings cannot be deleted; give the key another value, or null where it may be"
        return SettingError(text, None, "deletes a setting", hint, origin=COMMAND_LINE)
    sweeps = override.is_sweep_override()
    if sweeps and not multirun:
        return _sweep_problem(text, key)
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        reason = "names files by a pattern, and a sweep takes values or the names of presets"
        hint = "Give them one by one, as 1,2,3"
        return SettingError(key, text.partition("=")[2], reason, hint, origin=COMMAND_LINE)
    if is_hydras(key):
        return _hydra_setting(override, text, multirun)
    if key in PRESET_GROUPS and _names_preset(override):
        return _preset(override, config_dirs)
    is_group = key not in PRESET_GROUPS and any(
        (folder / key).is_dir()
        for folder in config_dirs
        if "\0" not in key and len(key.encode()) < _LONGEST_NAME
    )
    if is_group:
        return ParsedOverride(text, (), override if sweeps else None, is_group=True)
    if override.package is not None:
        return unknown_key(Setting(key, None, COMMAND_LINE))
    if sweeps:
        # Only the key is checked here. Each job of the sweep checks its own value.
        known = key in all_keys() or key in nemo_keys() or key in known_sections()
        if not known:
            return unknown_key(Setting(key, override.get_value_string(), COMMAND_LINE))
        return ParsedOverride(text.lstrip("+"), (), override)
    settings = tuple(flatten(key, override.value(), COMMAND_LINE))
    if key in PRESET_GROUPS and not any(setting_problem(setting) for setting in settings):
        return section_problem(Setting(key, override.get_value_string(), COMMAND_LINE))
    # `+` and `++` would add a key. All keys exist already, so both are accepted without effect.
    return ParsedOverride(text.lstrip("+"), settings, None)


def texts_quoted(text: str, config_dirs: Sequence[Path]) -> str:
    """Put quotes around numbers, True and False where a valid override asks for a text.

    Hydra would read the name `3.10` as the number 3.1, and `12e5` as 1200000.0.
    """
    key = text.partition("=")[0].lstrip("+")
    folders = [folder / key for folder in config_dirs] if key in PRESET_GROUPS else []
    if not (is_text(key) or key in known_sections() or folders):
        return text
    tokens = CommonTokenStream(OverrideLexer(InputStream(text)))
    left: list[tuple[str, Any]] = [(key, OverrideParser(tokens).override())]
    found: list[tuple[int, int, str]] = []
    while left:
        path, node = left.pop()
        if isinstance(node, OverrideParser.PrimitiveContext):
            parts = [c.symbol for c in node.getChildren() if c.symbol.type != OverrideLexer.WS]
            if [part.type for part in parts] in _NUMBERS and (
                is_text(path) or any((f / f"{parts[0].text}.yaml").is_file() for f in folders)
            ):
                found.append((node.start.start, node.stop.stop + 1, parts[0].text))
            continue
        if isinstance(node, OverrideParser.DictKeyValuePairContext):
            path = f"{path}.{node.dictKey().getText().strip()}"
        elif isinstance(node, OverrideParser.ListContainerContext) and path == DATA_PREFIX:
            continue  # a blend has weights
        elif isinstance(node, OverrideParser.FunctionContext) and node.ID().getText() in _RANGES:
            continue
        left += ((path, child) for child in getattr(node, "children", None) or ())
    for start, stop, number in sorted(found, reverse=True):
        text = f"{text[:start]}'{number}'{text[stop:]}"
    return text


def _doubled_key(text: str) -> str | None:
    """Return a key that one mapping of a valid override has twice, which Hydra does not refuse."""
    if "{" not in text:
        return None
    tokens = CommonTokenStream(OverrideLexer(InputStream(text)))
    left: list[Any] = [OverrideParser(tokens).override()]
    while left:
        node = left.pop()
        if isinstance(node, OverrideParser.DictContainerContext):
            names = [str(pair.dictKey().getText()).strip() for pair in node.dictKeyValuePair()]
            if twice := [name for name in names if names.count(name) > 1]:
                return twice[0]
        left += getattr(node, "children", None) or ()
    return None


def _hydra_setting(override: Override, text: str, multirun: bool) -> ParsedOverride | SettingError:
    """Check a setting of Hydra itself, which may choose a sweep's directory, launcher or sweeper.

    Settings that name code to run, and those that have no effect here, are refused.
    """
    key = override.key_or_group
    value = text.partition("=")[2]
    if key == "hydra.searchpath":
        reason = "would replace the directories in which YAML files are searched"
        hint = "Use --config-dir DIR for a directory of your own YAML files"
    elif not multirun:
        reason = "Hydra's own settings have an effect in a sweep (-m) only"
        hint = _hint_in_a_single_run(key)
    elif key.startswith("hydra.run"):
        reason = "is for single runs; the jobs of a sweep have directories in the sweep's directory"
        hint = "Use hydra.sweep.dir=DIR"
    elif override.is_sweep_override():
        reason = "Hydra's own settings cannot differ between the jobs of a sweep"
        hint = "Give one value"
    elif "callbacks" in key or "_target_" in text:
        reason = "settings must not name code to run"
        hint = "Leave it out; hydra/launcher=NAME chooses among the installed launchers"
    elif key not in IN_A_FILE and _OF_THE_JOB.search(value):
        reason = "takes what a YAML file may say, which must not give Hydra this setting"
        hint = "Write the value itself, without ${…}"
    elif hide(text) != text:
        reason = "Hydra would write a secret into the sweep's multirun.yaml"
        hint = "Set it in the environment, which jobs inherit"
    elif not (key in GROUPS and override.package is None) and not _acts_in_a_sweep(key):
        reason = "has no effect in a sweep"
        hint = f"Leave it out; {', '.join(ON_THE_COMMAND_LINE)} and {', '.join(GROUPS)} have one"
    else:
        return ParsedOverride(text, (), None, is_hydra=True)
    return SettingError(key, value, reason, hint, origin=COMMAND_LINE)


def _acts_in_a_sweep(key: str) -> bool:
    whole = ("hydra.sweep", "hydra.launcher", "hydra.sweeper", "hydra.job.env_set")
    return key.startswith(ON_THE_COMMAND_LINE) or key in whole


def _hint_in_a_single_run(key: str) -> str:
    if key.startswith(("hydra/launcher", "hydra.launcher", "hydra.sweep", "hydra/sweeper")):
        return "Add -m, with several values for some key"
    if key.startswith(("hydra.run", "hydra.output_subdir", "hydra.job.chdir")):
        return "Leave it out; exp_manager.explicit_log_dir=DIR sets the run's directory"
    if "verbose" in key or "logging" in key:
        return "Leave it out; trainer.log_every_n_steps sets how often a run prints its progress"
    return "Leave it out"


def _names_preset(override: Override) -> bool:
    """Whether `model=…` names a preset; a dict, null or a number is a value for the section."""
    if override.is_sweep_override():
        return override.is_discrete_sweep() and not override.is_range_sweep()
    return isinstance(override.value(), str)


def _preset(override: Override, config_dirs: Sequence[Path]) -> ParsedOverride | SettingError:
    group, text = override.key_or_group, str(override.input_line).lstrip("+")
    there, sweeps = preset_names(group, config_dirs), override.is_sweep_override()
    if sweeps:
        options = [str(getattr(one, "text", one)) for one in override.sweep_iterator()]
    else:
        options = [str(override.value())]
    unknown = [option for option in options if option not in there]
    refused = [one for one in unknown if group == "precision" and one in REFUSED_PRESETS]
    if refused:
        reason, hint = REFUSED_PRESETS[refused[0]]
        return SettingError(group, refused[0], reason, hint, origin=COMMAND_LINE)
    if unknown or override.package is not None:
        return SettingError(
            group,
            unknown[0] if unknown else text,
            "there is no such preset",
            f"The presets are {', '.join(there)}",
            origin=COMMAND_LINE,
        )
    return ParsedOverride(text, (), override if sweeps else None, is_group=True)


def preset_names(group: str, config_dirs: Sequence[Path]) -> list[str]:
    """Return the names of a group's presets in the directories, sorted."""
    files = (file for folder in config_dirs for file in (folder / group).glob("*.yaml"))
    return sorted({file.name.removesuffix(".yaml") for file in files})


def _grammar_problem(text: str, error: Exception) -> SettingError:
    if "=" not in text:
        matches = [] if text.startswith("-") else similar_keys(text.strip())
        hint = f"Write {matches[0]}=VALUE" if matches else "Write KEY=VALUE"
        return SettingError(text, None, "is not of the form KEY=VALUE", hint, origin=COMMAND_LINE)
    key, _, value = text.partition("=")
    detail = str(error).strip().splitlines()[0] if str(error).strip() else "cannot be read"
    hint = f"Quote the value: '{key}=\"…\"'"
    is_split = value[:1] in _CLOSING and value.count(value[0]) != value.count(_CLOSING[value[0]])
    if is_split:  # by a shell, at a blank
        hint = f"Quote the whole setting for the shell: '{key}={value[0]}…{_CLOSING[value[0]]}'"
    return SettingError(key, value, f"Hydra cannot read it: {detail}", hint, origin=COMMAND_LINE)


def _sweep_problem(text: str, key: str) -> SettingError:
    value = text.partition("=")[2]
    known = all_keys().get(key)
    if known is not None and isinstance(known.default, list):
        as_one = f"'{key}=[{value}]'"
    else:
        as_one = f"'{key}=\"{value}\"'"
    return SettingError(
        key,
        value,
        "several values ask for a sweep of several runs",
        f"Add -m to run a job for each value, or write {as_one} for one value",
        origin=COMMAND_LINE,
    )
