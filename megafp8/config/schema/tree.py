"""The whole tree, and its keys in the order of these files."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache

from omegaconf import DictConfig, OmegaConf

from megafp8.config.keys import Key, key, keys_of, or_null
from megafp8.config.schema.accepted import PATH
from megafp8.config.schema.exp_manager import ExpManager
from megafp8.config.schema.model import Model
from megafp8.config.schema.trainer import Trainer


@dataclass
class Config:
    """The whole tree."""

    restore_from_path: str | None = key(
        None,
        "Weights to start from: a run's directory, one of its checkpoints, or what "
        "`megafp8.cli.import_hf` wrote. A run that has a checkpoint of its own continues it.",
        nemo=None,
        kind="model",
        valid=or_null(PATH),
    )
    trainer: Trainer = field(default_factory=Trainer)
    exp_manager: ExpManager = field(default_factory=ExpManager)
    model: Model = field(default_factory=Model)


def schema_tree() -> DictConfig:
    """Every key at its default, each node of the type that the schema gives it."""
    return copy.deepcopy(_schema_tree())


@cache
def _schema_tree() -> DictConfig:
    tree = OmegaConf.structured(Config)  # six times as long as a copy of it
    assert isinstance(tree, DictConfig)
    return tree


@cache
def all_keys() -> dict[str, Key]:
    """Every setting by its dotted path, in the order of the files."""
    return keys_of(Config)


@cache
def all_sections() -> frozenset[str]:
    """Every inner node by its dotted path: `model`, `model.optim`, …"""
    parents = (path.rpartition(".")[0] for path in all_keys() if "." in path)
    return frozenset(p[:end] for p in parents for end in _ends(p))


def _ends(path: str) -> list[int]:
    return [i for i, letter in enumerate(path) if letter == "."] + [len(path)]
