"""Define the tree of settings under NeMo's names: every key with its default and explanation.

A key whose default is `???` (`MISSING`) must be given in a YAML; `conf/pretrain_gpt.yaml` does.
`megafp8.config.keys.key` explains what a field says of its key.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from omegaconf import DictConfig, Node, OmegaConf

from megafp8.config.keys import (
    PATH,
    Key,
    Values,
    at_least,
    between,
    key,
    keys_of,
    needs_above,
    or_null,
)
from megafp8.config.schema.data import OF_EXAMPLES, Data, TokenizerKeys
from megafp8.config.schema.exp_manager import ExpManager, NsysProfile
from megafp8.config.schema.experts import Experts
from megafp8.config.schema.model import Architecture
from megafp8.config.schema.optim import Optim
from megafp8.config.schema.parallel import Parallel
from megafp8.config.schema.precision import Precision
from megafp8.config.schema.trainer import Trainer

Tree = TypeVar("Tree", bound=Node)


@dataclass
class Model(Precision, Experts, Architecture, Parallel):
    """Define the keys below `model`: GPT, experts, batches, FP8, ranks, data and optimizer."""

    seed: int = key(
        1234,
        "Seed of the initial weights, of dropout and of the order of samples.",
        nemo=1234,
        group="failures",
        kind="model",
        spec="train.seed",
        valid=between(0, 2**32 - 1),
    )
    resume_from_checkpoint: str | None = key(
        None,
        "A checkpoint or a run whose whole state a new run starts with: weights, optimizer, FP8 "
        "scales, step and position in the data. A run that already has a checkpoint continues from "
        "its own and ignores this key.",
        nemo=None,
        group="start",
        spec="resume_from_checkpoint",
        valid=or_null(PATH),
    )
    answer_only_loss: bool = key(
        True,
        "Fine-tune on the answers' tokens alone. False: prompts are learned too.",
        group="finetuning",
        spec="data.instructions.answer_only_loss",
        needs=OF_EXAMPLES,
    )
    gc_interval: int = key(
        0,
        "Steps between two runs of Python's garbage collector, on all ranks at once and at no "
        "other time. 0: Python decides when it runs.",
        nemo=0,
        group="memory",
        spec="train.gc_interval",
        valid=at_least(0),
    )
    do_layer_norm_weight_decay: bool = key(
        False,
        "Norms and biases have weight decay too.",
        nemo=False,
        group="optimizer",
        spec="optim.decays_vectors",
        needs=needs_above("model.optim.weight_decay", 0),
    )
    tokenizer: TokenizerKeys = field(default_factory=TokenizerKeys)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    nsys_profile: NsysProfile = field(default_factory=NsysProfile)


@dataclass
class Config:
    """Define the whole tree of settings."""

    restore_from_path: str | None = key(
        None,
        "Weights that a new run starts with: a run's directory, one of its checkpoints, a folder "
        "that `megafp8 import` wrote, or a distributed checkpoint of Megatron or NeMo. A run that "
        "already has a checkpoint continues from its own, also if this path is gone by then.",
        nemo=None,
        group="start",
        kind="model",
        spec="restore_from_path",
        valid=or_null(PATH),
    )
    trainer: Trainer = field(default_factory=Trainer)
    exp_manager: ExpManager = field(default_factory=ExpManager)
    model: Model = field(default_factory=Model)


def schema_tree() -> DictConfig:
    """Return a new tree with every key at its default; each node takes values of its type only."""
    return copied(_schema())  # takes a part of the time of making it


def copied(tree: Tree) -> Tree:
    """Return a copy of a tree, which takes a fifth of the time of `copy.deepcopy`."""
    made: Tree = _copied(tree, None)
    return made


def _copied(node: Any, parent: Any) -> Any:
    """Copy what is ever changed in place: nodes, and their flags and caches."""
    made, metadata = object.__new__(type(node)), object.__new__(type(node._metadata))
    fields, of_metadata = vars(made), vars(metadata)
    of_metadata.update(vars(node._metadata))
    flags, resolved = of_metadata["flags"], of_metadata["resolver_cache"]
    of_metadata["flags"] = None if flags is None else dict(flags)
    of_metadata["resolver_cache"] = copy.deepcopy(resolved) if resolved else defaultdict(dict)
    fields.update(vars(node), _metadata=metadata, _parent=parent, _flags_cache=None)
    content = fields.get("_content")
    if isinstance(content, dict):
        fields["_content"] = {name: _copied(below, made) for name, below in content.items()}
    elif isinstance(content, list):
        fields["_content"] = [_copied(below, made) for below in content]
    elif isinstance(content, Node):
        fields["_content"] = _copied(content, made)
    return made


@cache
def _schema() -> DictConfig:
    unshared = "no_deepcopy_set_nodes"  # the nodes are new: without this, each is copied once more
    schema: DictConfig = OmegaConf.structured(Config, flags={unshared: True})
    schema._set_flag(unshared, None)
    return schema


@cache
def all_keys() -> dict[str, Key]:
    """Return every key by its dotted path, in the order of the schema's files."""
    return keys_of(Config)


@cache
def _keys_by_spec() -> dict[str, dict[str, str]]:
    """Return the fields of each spec in the `RunSpec`, by its path, with the keys they are from."""
    by_spec: dict[str, dict[str, str]] = {}
    for path, described in all_keys().items():
        if described.spec is not None:
            section, _, name = described.spec.rpartition(".")
            by_spec.setdefault(section, {})[name] = path
    return by_spec


def spec_fields(section: str, values: Values) -> dict[str, Any]:
    """Return the fields of a spec that keys name with `spec=`.

    Args:
        section: The path of the spec in the `RunSpec`, as `optim.schedule`.
        values: All settings by their dotted paths.
    """
    given = {name: values[path] for name, path in _keys_by_spec()[section].items()}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}


@cache
def all_sections() -> frozenset[str]:
    """Return the dotted path of every section: `model`, `model.optim`, …"""
    parents = (path.rpartition(".")[0] for path in all_keys() if "." in path)
    return frozenset(p[:end] for p in parents for end in _ends(p))


def _ends(path: str) -> list[int]:
    return [i for i, letter in enumerate(path) if letter == "."] + [len(path)]
