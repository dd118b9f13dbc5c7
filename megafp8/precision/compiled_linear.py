"""The linear as torch.compile sees it: one operation of a graph, and no break of it.

Casts and products are kernels already, so all that a graph needs to know is what goes in, what
comes out and what is kept for backward. The rest of a linear (amaxes, the weight that is quantized
once a step, observers, counts, the sink, what crosses ranks) happens when the operation runs, with
the live objects: the linear itself is an input of the graph. So layers share their graphs, and no
scale and no microbatch's number is compiled in.
"""

# T tokens (batch x sequence)   I in features   O out features

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megafp8.precision.recipes.base import SavedForm

PROVEN_FROM = (2, 13)
"""The torch from which objects are known to be inputs of a graph and of its backward."""


def unavailable() -> str | None:
    """Why linears cannot be traced here; None if they can."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < PROVEN_FROM:
        return f"torch {torch.__version__} cannot trace linears, 2.13 can: each parts the graph"
    return None


@dataclass(frozen=True)
class TracedLinear:
    """Stands for a linear in a graph. All but `handle` is equal where layers are alike.

    `saved`: how the input is kept for backward; `tokens_out`: of the output, given the input's.
    """

    handle: Any  # compiled_linear_ops.Handle
    out_features: int
    saved: SavedForm
    tokens_out: Callable[[int], int]

    def __call__(self, input_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O]."""
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
