"""A trained model's weights alone: found, checked, and loaded into another state or model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megafp8.checkpoint import store
from megafp8.checkpoint.manifest import MANIFEST_NAME
from megafp8.checkpoint.placement import Placement
from megafp8.checkpoint.reader import Reader
from megafp8.config.architecture import same_shape, spec_of_tree
from megafp8.errors import CheckpointError, ConfigError
from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.parallel.agreement import on_main
from megafp8.runs.directory import CHECKPOINTS_DIR
from megafp8.specs import GPTSpec, RunSpec
from megafp8.train import state_dict
from megafp8.train.state import TrainState

Notify = Callable[[str], None]

MODEL = "model/"
WORD = f"{MODEL}embedding.word.weight"

# Reading longer texts changes these on purpose: the weights are trained further under them.
_MAY_DIFFER = ("rotary_base", "seq_len_interpolation_factor")


def find_checkpoint(path: Path, notify: Notify) -> Path:
    """The verified checkpoint that `path` is, or the newest good one of the run that it is.

    Raises:
        CheckpointError: There is none, or what there is is damaged.
    """
    if (path / MANIFEST_NAME).is_file():
        store.verify(path)
        return path
    found = store.newest_valid(path / CHECKPOINTS_DIR, notify) if path.is_dir() else None
    if found is None:
        raise CheckpointError(
            path,
            "has no checkpoint",
            "Give a run's directory, one of its checkpoints, or what import_hf wrote",
        )
    return found


def shape_of(reader: Reader) -> GPTSpec:
    """The model that a checkpoint holds."""
    config = reader.meta.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        raise CheckpointError(reader.path, "does not say its model's shape", "Use another one")
    return spec_of_tree(model, reader.global_shape(WORD)[0])


def read_tensor(reader: Reader, name: str) -> torch.Tensor:
    """One logical tensor of the model, FP32."""
    return reader.read(MODEL + name)


def load_model(reader: Reader, dtype: torch.dtype, device: torch.device) -> GPT:
    """The model alone, plain and without FP8, for evaluation."""
    model = GPT(Parts(shape_of(reader), dtype, 0, RandomStreams(0)))
    for param in model.parameters():
        loaded = torch.empty(param.shape)
        reader.load_into(list(_placements(param, loaded)))
        with torch.no_grad():
            param.copy_(loaded)
    return model.to(device).eval()


def start_from(spec: RunSpec, state: TrainState, notify: Notify) -> None:
    """Fill a new run's masters and weights from `restore_from_path`; all ranks together.

    Raises:
        CheckpointError: There is no good checkpoint.
        ConfigError: It holds a model of another shape or vocabulary.
    """
    assert spec.restore_from_path is not None
    named = Path(spec.restore_from_path)
    found = on_main(state.mesh, lambda: find_checkpoint(named, notify))
    reader = Reader(found)
    for line in check_fits(spec.model, reader):
        notify(line)
    reader.load_into(list(state_dict.model_placements(state)))
    state.masters.write_back()
    notify(f"weights from {found}")


def check_fits(asked: GPTSpec, reader: Reader) -> list[str]:
    """Raise `ConfigError` if the stored model is another; returns what differs and may."""
    stored, notes = shape_of(reader), []
    for key, (now, was) in same_shape(asked, stored).items():
        if key in _MAY_DIFFER:
            notes.append(f"model.{key}={now}: the weights were trained with {was}")
        elif key != "max_position_embeddings" or asked.position_embedding_type == (
            "learned_absolute"
        ):
            raise _misfit(f"model.{key}", now, reader.path, was)
    if asked.vocab_size != stored.vocab_size:
        raise ConfigError(
            "restore_from_path",
            reader.path,
            f"its vocabulary has {stored.vocab_size} rows, padding included, and this run's "
            f"{asked.vocab_size}",
            "Train on data of the model's own tokenizer, with the "
            "model.make_vocab_size_divisible_by that it was made with",
        )
    return notes


def _misfit(key: str, now: Any, path: Path, was: Any) -> ConfigError:
    return ConfigError(
        key, now, f"the model in {path} has {was}", f"Set {key}={was}, or start from another"
    )


def _placements(param: nn.Parameter, tensor: torch.Tensor) -> Iterator[Placement]:
    for piece in pieces_of(param):
        yield Placement(MODEL + piece.name, piece.global_shape, piece.offset, tensor[piece.local])
