"""What stands between the two linears of an MLP."""

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
    """[..., F] -> [..., F]; a gated one [..., 2F] (gate, then up) -> [..., F]."""
    return Elementwise(_FUNCTIONS[name], is_gated=name in GATED)


class Elementwise(nn.Module):
    """f(x), or f(gate) * up (Shazeer, arXiv 2002.05202)."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], is_gated: bool) -> None:
        super().__init__()
        self.function, self.is_gated = function, is_gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_gated:
            return self.function(x)
        gate, up = x.chunk(2, dim=-1)
        return self.function(gate) * up
