"""Make dropout's mask one operation of a compiled graph.

This module is imported only if torch can take objects as inputs of a graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from megafp8.models.parts import Dropout


class Handle(OpaqueBase):
    """Carries a dropout module into a graph as an input, because its key changes each
    microbatch.
    """

    def __init__(self, dropout: Dropout) -> None:
        self.dropout = dropout


register_opaque_type(Handle, typ="reference")


def traced_mask(dropout: Dropout) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from a tensor to its boolean mask: True where an element is kept.

    The mask is the one that `Dropout.forward` draws.
    """
    handle = Handle(dropout)
    return lambda x: torch.ops.megafp8.dropout_mask(x, handle)


@torch.library.custom_op("megafp8::dropout_mask", mutates_args=())
def _dropout_mask(x: torch.Tensor, handle: Handle) -> torch.Tensor:
    dropout = handle.dropout
    with dropout.streams.keyed(dropout.site, x.device, sharded=dropout.sharded):
        return F.dropout(torch.ones_like(x), dropout.p) != 0


@_dropout_mask.register_fake
def _(x: torch.Tensor, handle: Handle) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.bool)
