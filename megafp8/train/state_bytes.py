"""Bytes of a run's state on this rank, counted from the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megafp8.optim.adamw import STATES
from megafp8.train.state import TrainState


@dataclass(frozen=True)
class StateBytes:
    """An FP32 weight that is its own master counts in both."""

    weights: int
    masters: int
    moments: int
    gradients: int


def bytes_of(state: TrainState) -> StateBytes:
    masters, optimizer = state.masters, state.optimizer
    return StateBytes(
        weights=storage_bytes(masters.held_params),
        masters=storage_bytes(masters.masters),
        moments=storage_bytes(t for name in STATES for t in optimizer.state_tensors(name)),
        gradients=storage_bytes([*masters.own_grads, *masters.param_grads]),
    )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the memory behind them, padding included, each piece of it once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
