"""Merge the settings of all layers into one tree of the schema, and read its values once.

The tree also has NeMo's keys without effect, to which settings may refer as `${model.seed}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override

from megafp8.config.errors import DEFAULT, Origin, SettingError
from megafp8.config.layers import Layer, default_job
from megafp8.config.nemo import nemo_keys
from megafp8.config.schema import copied, schema_tree
from megafp8.config.settings import (
    UNDECIDED,
    UNREADABLE,
    Setting,
    flatten,
    interpolated_keys,
    is_unused_section,
    nested,
    put_in,
    read_value,
    read_values,
)

NO_LAYER = Origin("no layer")
"""The origin of a setting that replaces another one and is reported as no layer's."""


@dataclass
class Merged:
    """Hold one tree of all layers' settings.

    Attributes:
        tree: The tree.
        origins: The layer that set each key, for all keys that a layer after the default job set.
        problems: What could not be merged.
        known: Values of keys that no layer after the default job has set.
        is_shared: Whether others have the tree, too. It is copied before it is changed then: a copy
            takes half of the time in which the default job is loaded again.
    """

    tree: DictConfig
    known: dict[str, Any]
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[SettingError] = field(default_factory=list)
    is_shared: bool = False

    def put(self, setting: Setting) -> None:
        """Put one setting over those that are there."""
        if self.is_shared:
            self.tree, self.is_shared = copied(self.tree), False
        key, origin = setting.key, setting.origin
        self.known.pop(key, None)
        problem = put_in(self.tree, setting)
        if problem is not None:
            self.problems.append(problem)
        elif key == UNDECIDED:
            pass
        elif is_unused_section(setting):
            for keys in (self.origins, self.known):
                for inside in [other for other in keys if other.startswith(key + ".")]:
                    del keys[inside]
            self.origins[key] = origin
        elif origin is NO_LAYER:
            self.origins.pop(key, None)
        elif origin != DEFAULT:
            self.origins[key] = origin

    def read(self, path: str) -> Any:
        """Return a key's value; None if it has none, which `values` reports."""
        try:
            return read_value(self.tree, path)
        except UNREADABLE:
            return None

    def copy(self) -> Merged:
        """Return a copy, to which other settings can be put."""
        tree = copied(self.tree)
        return Merged(tree, dict(self.known), dict(self.origins), list(self.problems))

    def values(self) -> tuple[dict[str, Any], list[SettingError]]:
        """Return the values of the schema's keys, and the keys that cannot be read."""
        return read_values(self.tree, self.origins, self.known)


def merge(layers: Iterable[Layer]) -> Merged:
    """Return the settings of all layers, from the weakest to the strongest."""
    settings = [setting for layer in layers for setting in layer.settings]
    job = default_settings()
    begins_with_job = tuple(settings[: len(job)]) == job
    merged = _start(begins_with_job)
    for setting in settings[len(job) if begins_with_job else 0 :]:
        merged.put(setting)
    return merged


def default_settings() -> tuple[Setting, ...]:
    """Return the settings of `conf/pretrain_gpt.yaml`."""
    return tuple(Setting(key, value, DEFAULT) for key, value in default_job().items())


def default_values() -> Mapping[str, Any]:
    """Return the values of the default job by their keys, which all callers share."""
    return _read_start(True)[1]


def default_tree() -> DictConfig:
    """Return a new tree of the default job, with NeMo's keys without effect."""
    return copied(_read_start(True)[0])


def _start(with_job: bool) -> Merged:
    """Return the tree of the schema, with the default job or without, and NeMo's keys."""
    tree, values, interpolated = _read_start(with_job)
    known = {key: value for key, value in values.items() if key not in interpolated}
    return Merged(tree, known, is_shared=True)


@cache
def _read_start(with_job: bool) -> tuple[DictConfig, dict[str, Any], frozenset[str]]:
    """Return the tree that `_start` shares, its values, and the keys that are interpolated."""
    tree = schema_tree()
    _add(tree, nested({path: key.ours for path, key in nemo_keys().items()}))
    for setting in default_settings() if with_job else ():
        put_in(tree, setting)
    return tree, read_values(tree)[0], interpolated_keys(tree)


def _add(section: DictConfig, more: Mapping[str, Any]) -> None:
    """Add keys to a section, which is opened once: opening it for each key takes twice as long."""
    with flag_override(section, "struct", False):
        for name, value in more.items():
            below = section.get(name) if isinstance(value, dict) else None
            if isinstance(below, DictConfig):
                _add(below, value)
            else:
                section[name] = value


def closed_tree(tree: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """Return a merged tree without NeMo's keys, closed to new keys, and with interpolations.

    An interpolation of a key that is not there becomes its value.

    Args:
        tree: The tree.
        values: The values of the schema's keys.
    """
    closed = schema_tree()
    for setting in flatten("", OmegaConf.to_container(tree, resolve=False)):
        if setting.key in values:
            OmegaConf.update(closed, setting.key, setting.value, merge=False)
    stands = read_values(closed)[0]
    for path, value in values.items():
        if path not in stands or stands[path] != value:
            OmegaConf.update(closed, path, value, merge=False)
    OmegaConf.set_struct(closed, True)
    return closed
