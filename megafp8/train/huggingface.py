"""Write a model of another library as a folder that a run can start from.

Those of Hugging Face's transformers are read here, and those of Megatron in `megafp8_migrate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import yaml

from megafp8.checkpoint import store
from megafp8.checkpoint.huggingface import end_of_text, from_config, notes_on
from megafp8.checkpoint.huggingface_files import StoredTensor, read_config, read_tensors
from megafp8.checkpoint.manifest import Placement
from megafp8.checkpoint.store import ShardEntry
from megafp8.config.architecture import tree_of_spec
from megafp8.files import (
    run_errors_reported,
    whole_folder,
    write_atomically,
)
from megafp8.runs.find import CHECKPOINTS_DIR
from megafp8.runs.imported_tokenizer import import_files
from megafp8.runs.tokenizer import find_tokenizer
from megafp8.specs import GPTSpec
from megafp8.specs.model import padded_vocab_size
from megafp8.train.load_model import MODEL
from megafp8.train.scaling_dict import RECIPE_OF_SCALING

CONFIG = "model.yaml"
SHARD_BYTES = 4 << 30
OPTIM = {"lr": 2e-5, "sched": {"min_lr": 2e-6}}
"""The rate at which the folder's YAML continues to train, a tenth and less of the highest rates at
which GPT-2 and Llama were trained; the default job's is for a model of width 256 from the start."""


class Original(NamedTuple):
    """Describe a model to import.

    Attributes:
        family: The kind of model, which the checkpoint records.
        spec: Its shape.
        tensors: Returns where its tensors are.
        files: The folder with its tokenizer.
        eod_id: The token that ends a document.
        vocab_size: The tokenizer's vocabulary, where the folder has no tokenizer.
        scaling: FP8's scales and histories, if there are some, by their names in a checkpoint.
        recipe: The settings below `model` under which they are of use.
    """

    family: str
    spec: GPTSpec
    tensors: Callable[[], Iterable[StoredTensor]]
    files: Path
    eod_id: int | None
    vocab_size: int
    scaling: Mapping[str, torch.Tensor] = MappingProxyType({})
    recipe: Mapping[str, Any] = MappingProxyType({})


class Imported(NamedTuple):
    """Say what was imported: a model of which family and shape, and where it and its files are."""

    family: str
    spec: GPTSpec
    checkpoint: Path
    tokenizer_files: list[str]
    notes: list[str]
    has_tokenizer: bool


def import_model(model: Path, folder: Path) -> Imported:
    """Write the model of one folder as a checkpoint of step 0, with tokenizer and YAML, to another.

    Args:
        model: A folder with config.json and safetensors files.
        folder: A new or empty folder.

    Raises:
        UserError: The model cannot be read or is of another kind, or the folder is not empty.
    """
    config = read_config(model)
    spec = from_config(config, model / "config.json")
    eod_id = end_of_text(config, model / "config.json")
    tensors = partial(read_tensors, model, spec)
    kind = config["model_type"]
    return write_folder(Original(kind, spec, tensors, model, eod_id, spec.vocab_size), folder)


def write_folder(original: Original, folder: Path) -> Imported:
    """Write a model as a checkpoint of step 0, with tokenizer and YAML, to a new or empty folder.

    Raises:
        UserError: The tensors or the tokenizer cannot be read, or the folder is not empty.
    """
    with whole_folder(folder, last=CHECKPOINTS_DIR) as build:
        imported = _build(original, folder, build)
    return imported._replace(checkpoint=folder / imported.checkpoint.relative_to(build))


def _build(original: Original, folder: Path, build: Path) -> Imported:
    """Write all of the folder to `build`; return what was imported, with the checkpoint there."""
    spec = original.spec
    tokenizer, copied, notes = import_files(original.files, build)
    tree = {
        "encoder_seq_length": spec.max_position_embeddings,  # fine-tuning takes it from here
        **tree_of_spec(spec),
        "init_method_std": spec.init_method_std,
        "hidden_dropout": spec.hidden_dropout,
        "attention_dropout": spec.attention_dropout,
        "make_vocab_size_divisible_by": divisor(
            spec.vocab_size, original.vocab_size if tokenizer is None else tokenizer.vocab_size
        ),
    }
    if spec.moe is not None:
        tree["moe_aux_loss_coeff"] = spec.moe.router_loss_coeff
    if tokenizer is not None and tokenizer.vocab_size > spec.vocab_size:
        tree["override_vocab_size"] = spec.vocab_size
    meta = {
        "config": {"model": tree}, "eod_id": original.eod_id, "imported_from": original.family,
        **({RECIPE_OF_SCALING: dict(original.recipe)} if original.recipe else {}),
    }  # fmt: skip
    checkpoint = _write_checkpoint(original, build / CHECKPOINTS_DIR, meta)
    settings = {
        "defaults": ["pretrain_gpt", "_self_"],
        "restore_from_path": str(folder.absolute()),
        "model": {**tree, "optim": OPTIM},
    }
    with run_errors_reported(build / CONFIG, "writing the settings"):
        write_atomically(build / CONFIG, yaml.safe_dump(settings, sort_keys=False))
    has_tokenizer = tokenizer is not None
    return Imported(original.family, spec, checkpoint, copied, notes, has_tokenizer)


def notes_on_import(model: Path, folder: Path, spec: GPTSpec) -> list[str]:
    """Return what the user should know of a model that has been imported to a folder."""
    notes, tokenizer = notes_on(read_config(model)), find_tokenizer(folder)
    if tokenizer is not None and tokenizer.vocab_size > spec.vocab_size:
        without = range(spec.vocab_size, tokenizer.vocab_size)
        shown = ", ".join(repr(tokenizer.decode([token])) for token in without[:3])
        notes.append(
            f"note: the tokenizer has {tokenizer.vocab_size} tokens and the model "
            f"{spec.vocab_size} rows: {shown}{', …' if len(without) > 3 else ''} have none. A text "
            "with such a token is refused"
        )
    return notes


def divisor(rows: int, vocab_size: int) -> int:
    """Return the `make_vocab_size_divisible_by` that pads a vocabulary to the embedding's rows.

    The result is the largest power of two up to 128 that does, or `rows` if none does.
    """
    powers = (2**n for n in range(7, -1, -1))
    fits = (n for n in powers if padded_vocab_size(vocab_size, n) == rows)
    return next(fits, rows)


def _write_checkpoint(original: Original, root: Path, meta: dict[str, Any]) -> Path:
    """Write the model's tensors, some gigabytes at a time, and return the checkpoint's path.

    A part of the checkpoint has `SHARD_BYTES` at most, or one tensor. It is written before a tensor
    that does not fit into it is read, so that no more than a part is in memory at a time. The
    checkpoint is verified when a run starts from it.
    """
    staging = store.begin(root, 0)
    entries: list[ShardEntry] = []
    waiting = [
        Placement(name, tuple(row.shape), (0,) * row.dim(), row)
        for name, row in original.scaling.items()
    ]
    size = 0

    def write() -> None:
        nonlocal waiting, size
        name = f"model{len(entries)}.safetensors"
        entries.append(store.write_shard(staging, name, waiting))
        waiting, size = [], 0

    try:
        for stored in original.tensors():
            num_bytes = math.prod(stored.shape) * torch.float32.itemsize
            if waiting and size + num_bytes > SHARD_BYTES:
                write()
            begin = (0,) * len(stored.shape)
            waiting.append(Placement(MODEL + stored.name, stored.shape, begin, stored.read()))
            size += num_bytes
        if waiting:
            write()
    except BaseException:
        store.discard(staging)
        raise
    return store.commit(staging, root, 0, entries, meta)
