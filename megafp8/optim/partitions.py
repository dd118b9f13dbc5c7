"""Divide master weights, moments and summed gradients among the replicas of the same weights.

The ways to do that are in `specs/division.py`: it says in which flat tensors gradients lie, which
range of them a rank sums, and in which flat tensors the weights lie that ranks send each other.
`Masters` does the rest. Parts of a tensor have the scale of the whole one, which the ranks agree
on, so that both divisions store the same numbers bit for bit, but for stochastic rounding and, once
clipping acts, its factor: norms of parts are rounded apart (1e-7).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from megafp8.fp8.scaling import Pending
from megafp8.models.init import pieces_of
from megafp8.parallel.collectives import Axis, as_sendable
from megafp8.parallel.scaled_data import FlatGrads
from megafp8.specs.division import WAYS, Places
from megafp8.specs.geometry import Piece


@dataclass(frozen=True)
class Segment:
    """Name the elements `begin` to `end` (exclusive) of a parameter, in memory order.

    `piece` is the parameter's first one: all of them are sharded or replicas, or none is.
    """

    param: nn.Parameter
    begin: int
    end: int
    piece: Piece = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "piece", pieces_of(self.param)[0])


def is_sharded(param: nn.Parameter) -> bool:
    """Whether tensor-parallel ranks have parts of a parameter; others have all of it."""
    return pieces_of(param)[0].is_sharded


def group_of(param: nn.Parameter) -> str:
    """Return the name of the group of replicas that a parameter belongs to."""
    return pieces_of(param)[0].group


def by_group(
    params: Collection[nn.Parameter], groups: Iterable[str]
) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each of the `groups` of replicas, by its name."""
    return {name: [param for param in params if group_of(param) == name] for name in groups}


def largest_of_parts(
    amaxes: torch.Tensor, params: Sequence[nn.Parameter], shards_of: Mapping[str, Axis]
) -> torch.Tensor:
    """Return the amaxes of whole tensors, from those of this rank's parts, in place.

    A row is that of one of `params`, which has one scale. `shards_of` are the ranks that have parts
    of the parameters of each group of replicas.
    """
    if len(shards_of) == 1:
        return next(iter(shards_of.values())).all_reduce_max(amaxes)
    for name, shards in shards_of.items():
        if rows := [row for row, param in enumerate(params) if group_of(param) == name]:
            amaxes[rows] = shards.all_reduce_max(amaxes[rows])
    return amaxes


@dataclass(frozen=True)
class WeightBuffer:
    """Hold weights of one dtype in a flat tensor, which lie as `places` says."""

    places: Places
    flat: torch.Tensor
    index_of: Mapping[nn.Parameter, int]

    @classmethod
    def of(cls, places: Places, params: Sequence[nn.Parameter]) -> WeightBuffer:
        """Return a buffer of zeros for `params`, whose dtype is `places.kind`."""
        dtype = getattr(torch, places.kind)
        flat = torch.zeros(places.elements, dtype=dtype, device=params[0].device)
        return cls(places, flat, {param: index for index, param in enumerate(params)})

    def place(self, param: nn.Parameter) -> torch.Tensor:
        """Return the place of a parameter's weights, flat."""
        begin = self.places.begins[self.index_of[param]]
        return self.flat[begin : begin + param.numel()]

    def owned_by(self, rank: int, param: nn.Parameter) -> slice:
        """Return which elements of a parameter a rank owns; the slice may be empty."""
        begin, size = self.places.begins[self.index_of[param]], param.numel()
        low, high = (min(max(self.places.bounds[at] - begin, 0), size) for at in (rank, rank + 1))
        return slice(low, high)

    def start_gathering(self, shards: Axis) -> Pending | None:
        """Fill the buffer with the ranges of all ranks, now or when the result is waited for.

        Ranges that are not padded differ in size, and are broadcast by their owners one by one.
        """
        sent, bounds = as_sendable(self.flat), self.places.bounds
        if self.places.is_padded:
            return shards.start_all_gather_in_place(sent)
        for rank in range(shards.size):
            if len(part := sent[bounds[rank] : bounds[rank + 1]]):
                shards.broadcast(part, source=rank)
        return None


class Partition:
    """Divide parameters among ranks, in the way `name` of `WAYS`.

    data         the replicas that sum gradients
    shards       the ranks that update the other segments
    tied         parameters that other pipeline stages have too
    divides      whether ranks own parts of tensors, which are flat and have common scales
    stays        whether only its owner needs the sum of a gradient
    frees_grads  whether a gradient's memory is freed once it was sent (ZeRO, stage 2)
    """

    def __init__(
        self,
        name: str = "replicated",
        data: Axis | None = None,
        tied: Collection[nn.Parameter] = frozenset(),
        *,
        frees_grads: bool = False,
    ) -> None:
        """Divide among the ranks of `data`; without it this rank is alone."""
        self.way, self.data, self.tied = WAYS[name], data or Axis("data"), frozenset(tied)
        self.stays, self.divides = name != "replicated", self.way.splits
        self.shards = self.data if self.stays else Axis("shards")
        self.frees_grads = frees_grads and self.stays and self.data.size > 1


def replicated_range(group: FlatGrads, rank: int) -> torch.Tensor | None:
    """Return what a rank sums of parameters that tensor-parallel ranks have whole, if anything.

    They lie behind the sharded ones.
    """
    own = [(is_sharded(group.params[index]), place) for index, place in group.places.owned_by(rank)]
    if all(sharded for sharded, _ in own):
        return None
    begin = max((place.stop for sharded, place in own if sharded), default=0)
    return group.own_range(rank)[begin:]
