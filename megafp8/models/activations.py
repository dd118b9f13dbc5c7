"""Define the activations between the two linears of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from megafp8.specs.model import GATED, Activation

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "squared-relu": lambda x: F.relu(x).square(),
    "geglu": F.gelu,
    "swiglu": F.silu,
    "reglu": F.relu,
}


def activation(name: Activation) -> nn.Module:
    """Return the module of an activation by its configuration name.

    A plain activation maps [..., F] to [..., F]. A gated one maps [..., 2F] (gate, then up) to
    [..., F].
    """
    return Elementwise(_FUNCTIONS[name], is_gated=name in GATED)


class Elementwise(nn.Module):
    """Computes f(x), or f(gate) * up for a gated activation (Shazeer, arXiv 2002.05202)."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], is_gated: bool) -> None:
        super().__init__()
        self.function, self.is_gated = function, is_gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of `x`: [..., F] -> [..., F], or [..., 2F] -> [..., F] if it is
        gated.
        """
        if not self.is_gated:
            return self.function(x)
        gate, up = x.chunk(2, dim=-1)
        return self.function(gate) * up
