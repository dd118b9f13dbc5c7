"""Load the model alone from a checkpoint: for fine-tuning, generation, export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from megafp8.checkpoint import store
from megafp8.checkpoint.manifest import Placement
from megafp8.checkpoint.reader import Reader
from megafp8.config.architecture import function_differences, spec_of_tree
from megafp8.config.base_model import is_megatrons
from megafp8.errors import CheckpointError, ConfigError
from megafp8.files import expanded, remove_tree, run_errors_reported
from megafp8.fp8.scaling import ScalingState
from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.neighbours import part_in_another_package
from megafp8.parallel.agreement import on_main, wait_for_all
from megafp8.specs import GPTSpec, RunSpec
from megafp8.train import state_dict
from megafp8.train.load import Notify, find_checkpoint
from megafp8.train.scaling_dict import load_imported_scaling
from megafp8.train.state import TrainState

MODEL = "model/"
IMPORTED = ".imported"
"""The folder of a run with the model of Megatron that it starts from, until all ranks have it."""
WORD = f"{MODEL}embedding.word.weight"
# These keys may change on purpose: weights are trained further to read longer texts.
MAY_DIFFER = (
    "rotary_base",
    "seq_len_interpolation_factor",
    "scale_positional_embedding",
    "rope_scaling_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "yarn_rotary_scaling_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_attention_factor",
    "original_max_position_embeddings",
)


def shape_of(reader: Reader) -> GPTSpec:
    """Return the architecture of the model in a checkpoint.

    Raises:
        CheckpointError: The checkpoint does not describe its model.
    """
    config = reader.meta.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        raise CheckpointError(reader.path, "does not describe its model", "Use another checkpoint")
    try:
        return spec_of_tree(model, reader.global_shape(WORD)[0])
    except (OmegaConfBaseException, ValueError, TypeError, KeyError) as error:
        reason = f"does not describe its model ({str(error).splitlines()[0]})"
        raise CheckpointError(reader.path, reason, "Use another checkpoint") from error


def read_tensor(reader: Reader, name: str) -> torch.Tensor:
    """Return one logical tensor of the model in FP32; `name` is its name in the model."""
    return reader.read_values(MODEL + name)


def load_model(reader: Reader, dtype: torch.dtype, device: torch.device) -> GPT:
    """Return the model of a checkpoint on one rank, without FP8, for evaluation."""
    parts = Parts(shape_of(reader), dtype, 0, RandomStreams(0))
    model = GPT(parts)
    for name, buffer in parts.buffers().items():
        place = (0,) * buffer.dim()
        reader.load_into([Placement(MODEL + name, tuple(buffer.shape), place, buffer)])
    for param in model.parameters():
        loaded = torch.empty(param.shape)
        reader.load_into(list(_placements(param, loaded)))
        with torch.no_grad():
            param.copy_(loaded)
    return model.to(device).eval()


def start_from(spec: RunSpec, state: TrainState, notify: Notify, copies: Path) -> None:
    """Fill a new run's master weights and weights from `restore_from_path`.

    All ranks call it together. A checkpoint of Megatron or NeMo is imported first, into a folder
    that is removed when all ranks have read it.

    Args:
        spec: The run.
        state: Its state.
        notify: Shows a line.
        copies: The folder in which an import is made; all ranks see it.

    Raises:
        CheckpointError: There is no good checkpoint.
        ConfigError: The checkpoint's model has another shape or vocabulary.
        RunError: The package that reads checkpoints of Megatron is missing.
    """
    assert spec.restore_from_path is not None
    named, copy = Path(spec.restore_from_path), copies / IMPORTED
    try:
        checkpoint = on_main(state.mesh, lambda: _to_read(named, copy, notify))
        reader = Reader(checkpoint)
        shown = named if copy in checkpoint.parents else checkpoint
        for line in check_fits(spec.model, reader, shown):
            notify(line)
        state_dict.load_weights(reader, state, notify)
        if isinstance(state.scaling, ScalingState):
            state.scaling.forget_staged()  # amaxes of the initial weights, which nothing has read
        if (said := load_imported_scaling(reader, state)) is not None:
            notify(said)
        state.masters.write_back()
        wait_for_all(state.mesh)  # before the copy goes
    finally:
        if state.mesh.is_main:
            remove_tree(copy)
    notify(f"loaded the weights from {shown}")


def _to_read(named: Path, copy: Path, notify: Notify) -> Path:
    """Return the checkpoint that a path names, or that of an import of it into `copy`."""
    remove_tree(copy)  # of a process that was killed
    if not is_megatrons(expanded(named)):
        return find_checkpoint(named, notify)
    part = part_in_another_package(f"restore_from_path={named}", "megafp8_migrate.weights")
    with run_errors_reported(copy, "making the folder"):
        copy.mkdir()
    imported, lines = part.write_import(expanded(named), copy)
    for line in lines:
        notify(line)
    store.verify(imported.checkpoint)
    return Path(imported.checkpoint)


def check_fits(spec: GPTSpec, reader: Reader, shown: Path | None = None) -> list[str]:
    """Return a message for each setting that differs from the stored model's and may differ.

    Messages name the path `shown`, or that of the reader.

    Raises:
        ConfigError: A setting differs that must be the same.
    """
    stored, notes, path = shape_of(reader), list[str](), shown or reader.path
    for key, (now, was) in function_differences(spec, stored).items():
        if key in MAY_DIFFER:
            notes.append(f"model.{key}={now}: the weights were trained with {was}")
        elif key != "max_position_embeddings" or spec.position_embedding_type == (
            "learned_absolute"
        ):
            raise _misfit(f"model.{key}", now, path, was)
    if spec.vocab_size != stored.vocab_size:
        raise ConfigError(
            "restore_from_path",
            path,
            f"its vocabulary has {stored.vocab_size} rows, padding included, and this run's has "
            f"{spec.vocab_size}",
            "Train on data of the model's own tokenizer, with the model's values of "
            "model.make_vocab_size_divisible_by and model.override_vocab_size; if the tokenizer "
            f"has more tokens than these rows, give model.override_vocab_size={stored.vocab_size}",
        )
    return notes


def _misfit(key: str, now: Any, path: Path, was: Any) -> ConfigError:
    return ConfigError(
        key, now, f"the model in {path} has {was}", f"Set {key}={was}, or start from another model"
    )


def _placements(param: nn.Parameter, tensor: torch.Tensor) -> Iterator[Placement]:
    for piece in pieces_of(param):
        yield Placement(MODEL + piece.name, piece.global_shape, piece.offset, tensor[piece.local])
