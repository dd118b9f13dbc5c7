"""Let Transformer Engine's layers read weights whose masters are stored in low precision (FP8-LM).

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


class ParameterData(IntEnum):
    """Say what a parameter's `data` is; inside a layer, `VALUES` serve where a shape is enough."""

    STORED_BITS = 0  # the master's bits in low precision, outside of the layer's passes
    SHAPE = 1  # a shape in the compute dtype without memory
    VALUES = 2  # the weight's values in the compute dtype


class StoredWeights:
    """Put values, or shapes without memory, in the place of stored weights while a layer runs.

    Transformer Engine reads a weight's values when it casts the weight, which is once in a step,
    and for products in high precision. Otherwise it reads only the shape and the dtype.
    """

    def __init__(self, stored: Mapping[nn.Parameter, ScaledTensor], dtype: torch.dtype) -> None:
        """Prepare the parameters of `stored`; `dtype` is what the layer computes in."""
        self._stored = dict(stored)
        self._dtype = dtype
        self._now = ParameterData.STORED_BITS
        self._shapes: dict[nn.Parameter, torch.Tensor] = {}
        for param in self._stored:
            shape = torch.empty(param.shape, dtype=dtype, device=param.device)
            resize_memory(shape, has_memory=False)
            self._shapes[param] = shape

    def __bool__(self) -> bool:
        """Whether there are such weights."""
        return bool(self._stored)

    @contextmanager
    def holding(self, form: ParameterData) -> Iterator[None]:
        """Let the parameters have at least the data of `form` inside the context."""
        before = self._now
        self.hold(max(before, form))
        try:
            yield
        finally:
            self.hold(before)

    @torch.no_grad()
    def hold(self, form: ParameterData) -> None:
        """Let the parameters have the data of `form` from now on."""
        if form == self._now:
            return
        for param, stored in self._stored.items():
            if form is ParameterData.STORED_BITS:
                param.data = stored.payload
            elif form is ParameterData.SHAPE:
                param.data = self._shapes[param]
            else:
                # One rounding to what the layer computes in, as our own linears round them.
                param.data = stored.values().to(self._dtype)
        self._now = form
