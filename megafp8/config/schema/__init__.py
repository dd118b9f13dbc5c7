"""The tree of settings under NeMo's names: the one place where a key is named and explained.

What is `???` (`MISSING`) shapes the job: a YAML must give it (`conf/pretrain_gpt.yaml` does).
`nemo=` is the default in NeMo's `megatron_gpt_config.yaml`; keys of our own leave it out.
`needs=` is what a key depends on: without it, the key has no effect (`megafp8.config.rules`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache

from omegaconf import DictConfig, OmegaConf

from megafp8.config.keys import PATH, Key, at_least, between, key, keys_of, or_null
from megafp8.config.schema.data import Data, Tokenizer
from megafp8.config.schema.exp_manager import ExpManager, NsysProfile
from megafp8.config.schema.model import Architecture
from megafp8.config.schema.optim import Optim, Sched
from megafp8.config.schema.parallel import Parallel
from megafp8.config.schema.precision import Precision
from megafp8.config.schema.trainer import Trainer

__all__ = [
    "Config",
    "ExpManager",
    "Model",
    "NsysProfile",
    "Sched",
    "Trainer",
    "all_keys",
    "all_sections",
    "schema_tree",
]


@dataclass
class Model(Precision, Architecture, Parallel):
    """The GPT, its batches, its FP8 recipe, its data and its optimizer."""

    seed: int = key(
        1234,
        "Seed of initial weights, dropout and the order of samples.",
        nemo=1234,
        kind="model",
        valid=between(0, 2**32 - 1),
    )
    resume_from_checkpoint: str | None = key(
        None,
        "The checkpoint, or the run, whose state a new run goes on from: weights, optimizer, "
        "scales, step and place in the data. A run that has a checkpoint of its own continues it.",
        nemo=None,
        kind="policy",
        valid=or_null(PATH),
    )
    gc_interval: int = key(
        0,
        "Collect Python's garbage every so many steps and at no other time, on all ranks at once; "
        "0: when Python does.",
        nemo=0,
        kind="layout",
        valid=at_least(0),
    )
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    nsys_profile: NsysProfile = field(default_factory=NsysProfile)


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
