"""Lend Transformer Engine's layers weights whose masters are stored in few bits (FP8-LM).

Outside of a layer's passes each parameter has its master's stored bits, as those of our own linears
have. So no other code needs to know whose layer it is, and no second copy of a weight stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum

import torch
from torch import nn

from megafp8.fp8.scaled import ScaledTensor, resize_memory


class Lent(IntEnum):
    """Say what a parameter has: its stored bits, a shape in the compute dtype, or values in it."""

    NOTHING = 0
    SHAPE = 1
    VALUES = 2


class LentWeights:
    """Puts values, or shapes without memory, in the place of stored weights while a layer runs.

    Transformer Engine reads a weight's values when it casts the weight, which is once in a step,
    and for products in high precision. Otherwise it reads only the shape and the dtype.
    """

    def __init__(self, stored: Mapping[nn.Parameter, ScaledTensor], dtype: torch.dtype) -> None:
        """Lend the parameters of `stored`, rounded to the compute dtype `dtype`."""
        self._stored = dict(stored)
        self._dtype = dtype
        self._now = Lent.NOTHING
        self._shapes: dict[nn.Parameter, torch.Tensor] = {}
        for param in self._stored:
            shape = torch.empty(param.shape, dtype=dtype, device=param.device)
            resize_memory(shape, has_memory=False)
            self._shapes[param] = shape

    def __bool__(self) -> bool:
        """Whether there are such weights."""
        return bool(self._stored)

    @contextmanager
    def lent(self, what: Lent) -> Iterator[None]:
        """Lend `what` inside the context, unless more has been lent before."""
        before = self._now
        self.set(max(before, what))
        try:
            yield
        finally:
            self.set(before)

    @torch.no_grad()
    def set(self, what: Lent) -> None:
        """Let the parameters have `what` from now on."""
        if what == self._now:
            return
        for param, stored in self._stored.items():
            if what is Lent.NOTHING:
                param.data = stored.payload
            elif what is Lent.SHAPE:
                param.data = self._shapes[param]
            else:
                param.data = stored.values().to(self._dtype)
        self._now = what
