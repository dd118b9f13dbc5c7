"""Quantize masters, whole or in parts on several ranks, into weights that are kept in FP8."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from fp8_numerics.cast import raise_amax
from megafp8.fp8.weights import StoredFp8
from megafp8.optim.partitions import largest_of_parts
from megafp8.parallel.collectives import Axis
from megafp8.specs.geometry import boxes_of_run

# Quantizes a master's values into a parameter that cannot take a copy of them.
Store = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class MasterPart:
    """Hold the part of a weight's FP32 master that this rank owns, flat, and its place."""

    param: nn.Parameter
    begin: int  # of its elements, in the weight's memory order
    master: torch.Tensor
    place: torch.Tensor  # where its bytes belong, in the buffer that ranks gather


class Fp8Weights(Protocol):
    """Keep weights in FP8 whose masters lie in parts on several ranks, or whole on each."""

    @property
    def params(self) -> Collection[nn.Parameter]:
        """Return these weights, in one order on all ranks."""

    def dtype_of(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype of the memory that the weight occupies."""

    def move(self, param: nn.Parameter, place: torch.Tensor) -> None:
        """Let the weight occupy `place`, a flat tensor of that dtype."""

    def store(self, parts: Iterable[MasterPart], shards_of: Mapping[str, Axis]) -> None:
        """Quantize this rank's parts by the scales of whole weights; all ranks call it together.

        `shards_of` are the ranks that have the parts, by group of replicas. The weights are
        complete once the ranks' places have been gathered.
        """


class WholeFp8Weights:
    """Keep weights in FP8 of which this rank has the whole masters; each is quantized by itself."""

    def __init__(self, stores: Mapping[nn.Parameter, Store] | None = None) -> None:
        """Take the function that quantizes a master of each weight's shape into it."""
        self._stores = dict(stores or {})
        self.params = list(self._stores)

    def dtype_of(self, param: nn.Parameter) -> torch.dtype:
        """Return the weight's dtype."""
        return param.dtype

    def move(self, param: nn.Parameter, place: torch.Tensor) -> None:
        """Let the weight occupy `place`."""
        move(param, place)

    def store(self, parts: Iterable[MasterPart], shards_of: Mapping[str, Axis]) -> None:
        """Quantize the masters, one after the other."""
        for part in parts:
            self._stores[part.param](part.master.view(part.param.shape))


class OwnFp8Weights:
    """Keep the weights of our own linears in FP8."""

    def __init__(self, forms: Mapping[nn.Parameter, StoredFp8]) -> None:
        self.params = list(forms)
        self._forms = dict(forms)

    def dtype_of(self, param: nn.Parameter) -> torch.dtype:
        """Return the weight's FP8 dtype."""
        return param.dtype

    def move(self, param: nn.Parameter, place: torch.Tensor) -> None:
        """Let the weight occupy `place`."""
        move(param, place)

    def store(self, parts: Iterable[MasterPart], shards_of: Mapping[str, Axis]) -> None:
        """Agree on all amaxes, in one reduction for each group, and quantize this rank's parts."""
        amaxes = torch.zeros(len(self.params), device=self.params[0].device)
        row_of = {param: row for row, param in enumerate(self.params)}  # the same everywhere
        rounded_parts: dict[nn.Parameter, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for part in parts:
            dtype = self._forms[part.param].compute_dtype
            # The weight is first rounded as it would be without FP8: its amax and its FP8 numbers
            # are those of the rounded weight, as where a rank holds the whole weight.
            rounded, at = part.master.to(dtype), row_of[part.param]
            raise_amax(amaxes[at], rounded)
            rounded_parts[part.param] = list(rectangles(part, rounded))
        largest_of_parts(amaxes, self.params, shards_of)
        for param, row in row_of.items():
            self._forms[param].store_parts(amaxes[row], rounded_parts.get(param, ()))


def move(param: nn.Parameter, place: torch.Tensor) -> None:
    """Let a parameter occupy `place`, a flat tensor of its dtype, with its values."""
    place.copy_(param.detach().flatten())
    param.data = place.view_as(param)


def rectangles(
    part: MasterPart, rounded: torch.Tensor
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of a part's flat values and of its place, as rectangles of the weight's matrix.

    `rounded` are the values that are to be quantized.
    """
    begin = 0
    shape, end = tuple(part.param.shape), part.begin + rounded.numel()
    for rectangle in boxes_of_run(shape, part.begin, end):
        size = torch.Size(rectangle.shape).numel()
        first, second = (
            tensor[begin : begin + size].view(rectangle.shape) for tensor in (rounded, part.place)
        )
        yield first, second
        begin += size
