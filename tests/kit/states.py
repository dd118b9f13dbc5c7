"""The states of an optimizer by their names."""

from __future__ import annotations

import torch

from megafp8.fp8.scaled import ScaledTensor
from megafp8.optim.protocol import Optimizers


def stored_states(optimizer: Optimizers, name: str) -> list[ScaledTensor]:
    """Return the states of one name in the order of the masters that have it."""
    return [state for _, state in dict(optimizer.states())[name]]


def state_tensors(optimizer: Optimizers, name: str) -> list[torch.Tensor]:
    """Return the payloads of `stored_states`."""
    return [state.payload for state in stored_states(optimizer, name)]
