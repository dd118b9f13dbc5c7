"""Overrides and YAML to one typed, checked tree. All problems are reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from megafp8.config.compose import (
    COMPOSE_ERRORS,
    DEFAULT_CONFIG,
    Source,
    compose,
    find_source,
    has_hydra_settings,
    preset_settings,
    tree_with_nemo_keys,
    yaml_presets,
    yaml_problems,
    yaml_settings,
)
from megafp8.config.nemo import nemo_keys
from megafp8.config.overrides import (
    ParsedOverride,
    Setting,
    flatten,
    known_sections,
    parse_overrides,
    put_in,
    unknown_key,
)
from megafp8.config.problems import COMMAND_LINE, DEFAULT, SettingError, raise_if_any
from megafp8.config.schema import all_keys, schema_tree
from megafp8.config.secrets import HIDDEN, variable_in
from megafp8.config.validate import check_values, read_value, read_values
from megafp8.config.values import one_line

HYDRA = "hydra"
"""The section of a YAML that is Hydra's own."""


@dataclass(frozen=True)
class Loaded:
    """A checked tree, who set what in it, and what was given and changes nothing."""

    cfg: DictConfig
    origins: Mapping[str, str]
    inert: tuple[Setting, ...]

    def inert_lines(self) -> list[str]:
        """The settings that were given and change nothing here; a line for those of one reason."""
        groups: dict[tuple[str, str], list[str]] = {}
        for s in self.inert:
            if s.key == HYDRA:
                text, note = HYDRA, "Hydra's own settings mean something in a sweep (-m) only"
            else:
                text, note = f"{s.key}={one_line(s.value)}", nemo_keys()[s.key].note
            groups.setdefault((s.origin, note), []).append(text)
        return [f"inert: {', '.join(g)} ({origin}): {note}" for (origin, note), g in groups.items()]


def load(
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    config_name: str = DEFAULT_CONFIG,
) -> DictConfig:
    """The tree of settings, with every check that needs no device passed.

    Raises `SettingError` or `CombinedConfigError`, both a `ConfigError`.
    """
    return load_all(overrides, config_dir, config_name).cfg


def load_all(
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    config_name: str = DEFAULT_CONFIG,
) -> Loaded:
    """What `load` gives, with origins and inert settings."""
    source = find_source(config_dir, config_name)
    good, problems = parse_overrides(overrides, source.directories)
    try:
        composed = compose(source, [override.text for override in good])
    except SettingError as problem:
        in_yaml = yaml_problems(source)
        problems += in_yaml or [problem]
        raise_if_any(problems + (_problems_beside(source, good, problems) if in_yaml else []))
        raise
    origins = find_origins(source, good)
    problems += _extra_keys(composed, source)
    values, unreadable = read_values(composed, origins)
    problems += unreadable + _secret_problems(values, origins)
    bad = {problem.key for problem in problems}
    problems += check_values({k: v for k, v in values.items() if k not in bad}, origins)
    inert, refused = _nemo_settings(composed, values, origins)
    raise_if_any(problems + refused)
    if has_hydra_settings(source):
        inert.append(Setting(HYDRA, None, source.file.name))
    return Loaded(_typed(composed), origins, tuple(inert))


def _secret_problems(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[SettingError]:
    """Settings are written into the run's directory and shown by trackers: no place for a token."""
    return [
        SettingError(
            path,
            HIDDEN,
            f"holds the secret of the environment's {name}, and would be recorded",
            f"Leave it out; what needs {name} reads it from the environment",
            origin=origins.get(path, DEFAULT),
        )
        for path, value in values.items()
        if isinstance(value, str) and (name := variable_in(value))
    ]


def find_origins(source: Source, overrides: Sequence[ParsedOverride]) -> dict[str, str]:
    """Where each key that somebody set was set; the default job's own YAML counts as default."""
    origins: dict[str, str] = {}
    if not source.is_default:
        for group, option in yaml_presets(source):
            origins |= {s.key: s.origin for s in preset_settings(source, group, option)}
        origins |= {setting.key: setting.origin for setting in yaml_settings(source)}
    for group, option in (override.preset for override in overrides if override.preset):
        origins |= {s.key: s.origin for s in preset_settings(source, group, option)}
    for override in overrides:
        origins |= {setting.key: COMMAND_LINE for setting in override.settings}
    return origins


def _problems_beside(
    source: Source, good: Sequence[ParsedOverride], known: Sequence[SettingError]
) -> list[SettingError]:
    """What else is wrong where Hydra cannot compose: of the keys that the user gave, alone."""
    bad = {problem.key for problem in known}
    given = [*yaml_settings(source), *(s for override in good for s in override.settings)]
    tree = tree_with_nemo_keys()
    unfit = [put_in(tree, setting) for setting in given if setting.key not in bad]
    origins = find_origins(source, good)
    values, problems = read_values(tree, origins)
    values = {key: value for key, value in values.items() if key in origins and key not in bad}
    problems += check_values(values, origins) + _nemo_settings(tree, values, origins)[1]
    problems = [problem for problem in unfit if problem] + problems
    return [problem for problem in problems if problem.key in origins and problem.key not in bad]


def _nemo_settings(
    composed: DictConfig, values: Mapping[str, Any], origins: Mapping[str, str]
) -> tuple[list[Setting], list[SettingError]]:
    """NeMo's keys that do nothing here: those that were given, and those that do not pass."""
    inert: list[Setting] = []
    refused: list[SettingError] = []
    for path, key in nemo_keys().items():
        origin = origins.get(path, DEFAULT)
        try:
            value = read_value(composed, path)
        except (OmegaConfBaseException, ValueError, OverflowError, RecursionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            refused.append(SettingError(path, None, reason, key.way_out, origin=origin))
            continue
        if not key.passes(value, values):
            refused.append(key.problem(value, origin))
        elif path in origins:
            inert.append(Setting(path, value, origin))
    return inert, refused


def _typed(composed: DictConfig) -> DictConfig:
    """The tree of the schema alone, closed to new keys."""
    try:
        cfg: Any = OmegaConf.merge(
            schema_tree(), OmegaConf.masked_copy(composed, list(schema_tree()))
        )
        for path in nemo_keys():
            _delete(cfg, path)
        _fill_in(cfg, composed)
    except COMPOSE_ERRORS as error:  # nothing is known to come here: sections are checked before
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingError("config", None, line, "Mend the value it names") from error
    OmegaConf.set_struct(cfg, True)
    assert isinstance(cfg, DictConfig)
    return cfg


def _delete(cfg: DictConfig, path: str) -> None:
    """Take out a key, and the sections that it leaves empty."""
    names = path.split(".")
    for end in range(len(names) - 1, -1, -1):
        node = OmegaConf.select(cfg, ".".join(names[:end])) if end else cfg
        if not isinstance(node, DictConfig):
            return
        if names[end] in node.keys() and (end == len(names) - 1 or not node._get_node(names[end])):
            with open_dict(node):
                node.pop(names[end])


def _fill_in(cfg: DictConfig, composed: DictConfig) -> None:
    """Give keys their values that refer to a key which is no longer there."""
    for path in all_keys():
        value = read_value(composed, path)
        try:
            stands = read_value(cfg, path) == value
        except OmegaConfBaseException:
            stands = False
        if not stands:
            OmegaConf.update(cfg, path, value)


def _extra_keys(composed: DictConfig, source: Source) -> list[SettingError]:
    """Keys that Hydra let in although the schema has none of them."""
    tree = OmegaConf.to_container(composed, resolve=False)
    settings = flatten("", tree, source.file.name)
    known = all_keys().keys() | nemo_keys().keys() | known_sections()
    return [unknown_key(setting) for setting in settings if setting.key not in known]
