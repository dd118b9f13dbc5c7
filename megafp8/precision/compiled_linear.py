"""Show a linear to torch.compile as one operation of a graph, without a graph break.

Casts and products are kernels already, so a graph needs to know only what goes in, what comes out
and what is kept for backward. The rest of a linear (amaxes, the weight that is quantized once a
step, observers, counts, the sink, what crosses ranks) happens when the operation runs, with the
live objects: the linear itself is an input of the graph. So layers share their graphs, and no scale
and no microbatch's number is compiled in.
"""

# T tokens (batch x sequence)   I in features   O out features

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megafp8.precision.recipes.base import SavedForm

PROVEN_FROM = (2, 13)
"""The first version of torch in which objects may be inputs of a graph and of its backward."""


def unavailable() -> str | None:
    """Return why linears cannot be traced here, or None if they can."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < PROVEN_FROM:
        return f"torch {torch.__version__} cannot trace linears, 2.13 can: each breaks the graph"
    return None


@dataclass(frozen=True)
class TracedLinear:
    """Represent a linear in a graph; all fields but `handle` are equal where layers are alike.

    `saved` says how the input is kept for backward; `tokens_out` gives the number of the output's
    tokens from the input's.
    """

    handle: Any  # compiled_linear_ops.Handle
    out_features: int
    saved: SavedForm
    tokens_out: Callable[[int], int]

    def __call__(self, input_TI: torch.Tensor) -> torch.Tensor:
        """Return the linear's output: [T, I] -> [T', O]."""
        tokens, features = input_TI.shape
        output_TO: torch.Tensor = torch.ops.megafp8.linear(
            input_TI,
            self.handle,
            [self.tokens_out(tokens), self.out_features],
            self.saved.payload_shape(tokens, features),
            self.saved.dtype,
            self.saved.scale_shape(tokens, features),
        )[0]
        return output_TO
