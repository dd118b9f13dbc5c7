"""Overrides and YAML to one typed, checked tree. All problems are reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megafp8.config.compose import (
    COMPOSE_ERRORS,
    DEFAULT_CONFIG,
    Source,
    compose,
    find_source,
    yaml_problems,
    yaml_settings,
)
from megafp8.config.overrides import ParsedOverride, flatten, parse_overrides, unknown_key
from megafp8.config.problems import COMMAND_LINE, SettingError, raise_if_any
from megafp8.config.schema import Config, all_keys, all_sections
from megafp8.config.validate import check_values, read_values


def load(
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    config_name: str = DEFAULT_CONFIG,
) -> DictConfig:
    """The tree of settings, with every check that needs no device passed.

    Raises `SettingError` or `CombinedConfigError`, both a `ConfigError`.
    """
    source = find_source(config_dir, config_name)
    good, problems = parse_overrides(overrides, source.directories)
    try:
        composed = compose(source, [override.text for override in good])
    except SettingError as problem:
        raise_if_any(problems + (yaml_problems(source) or [problem]))
        raise
    origins = find_origins(source, good)
    problems += _extra_keys(composed, source)
    cfg = None if problems else _typed(composed)
    values, unreadable = read_values(composed if cfg is None else cfg, origins)
    problems += unreadable
    bad = {problem.key for problem in problems}
    problems += check_values({k: v for k, v in values.items() if k not in bad}, origins)
    raise_if_any(problems)
    assert cfg is not None
    return cfg


def find_origins(source: Source, overrides: Sequence[ParsedOverride]) -> dict[str, str]:
    """Where each key that somebody set was set; the default job's own YAML counts as default."""
    origins: dict[str, str] = {}
    if not source.is_default:
        origins |= {setting.key: setting.origin for setting in yaml_settings(source)}
    for override in overrides:
        origins |= {setting.key: COMMAND_LINE for setting in override.settings}
    return origins


def _typed(composed: DictConfig) -> DictConfig:
    """The same tree with the schema at its root, closed to new keys."""
    try:
        cfg: Any = OmegaConf.merge(OmegaConf.structured(Config), composed)
    except COMPOSE_ERRORS as error:  # nothing is known to come here: sections are checked before
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingError("config", None, line, "Mend the value it names") from error
    OmegaConf.set_struct(cfg, True)
    assert isinstance(cfg, DictConfig)
    return cfg


def _extra_keys(composed: DictConfig, source: Source) -> list[SettingError]:
    """Keys that Hydra let in although the schema has none of them."""
    tree = OmegaConf.to_container(composed, resolve=False)
    settings = flatten("", tree, source.file.name)
    known = all_keys().keys() | all_sections()
    return [unknown_key(setting) for setting in settings if setting.key not in known]
