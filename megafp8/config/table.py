"""What a run does not take from the default job, and who said so."""

from __future__ import annotations

from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from megafp8.config.compose import DEFAULT_CONFIG, conf_dir
from megafp8.config.load import Loaded
from megafp8.config.problems import DEFAULT
from megafp8.config.schema import all_keys
from megafp8.config.validate import read_value
from megafp8.config.values import one_line


class Changed(NamedTuple):
    """One setting that is not the default job's."""

    key: str
    value: Any
    origin: str  # a preset, a file or the command line; what follows from another key says so
    usual: Any


def resolved_table(loaded: Loaded) -> list[str]:
    """One line for each setting that is not the default job's: `key = value (origin)`."""
    return [
        f"{c.key} = {one_line(c.value)} ({c.origin}; default job: {one_line(c.usual)})"
        for c in changed(loaded)
    ]


def record(loaded: Loaded) -> dict[str, object]:
    """The same for `summary.json`, and the settings that were given and change nothing."""
    return {
        "non_default": [
            {"key": c.key, "value": c.value, "origin": c.origin, "default": c.usual}
            for c in changed(loaded)
        ],
        "inert_keys": [{"key": s.key, "value": s.value, "origin": s.origin} for s in loaded.inert],
    }


def changed(loaded: Loaded) -> list[Changed]:
    """The settings that are not the default job's, in the schema's order."""
    job = OmegaConf.load(conf_dir() / f"{DEFAULT_CONFIG}.yaml")
    assert isinstance(job, DictConfig)
    found = []
    for path in all_keys():
        value, usual = read_value(loaded.cfg, path), read_value(job, path)
        if value != usual:
            origin = loaded.origins.get(path, _origin_of_default(loaded.cfg, path))
            found.append(Changed(path, value, origin, usual))
    return found


def _origin_of_default(cfg: DictConfig, path: str) -> str:
    section, _, leaf = path.rpartition(".")
    node = OmegaConf.select(cfg, section)._get_node(leaf)
    text = node._value() if node is not None else None
    return f"{DEFAULT}, from {text}" if isinstance(text, str) and "${" in text else DEFAULT
