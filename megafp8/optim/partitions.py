"""Divide master weights, moments and summed gradients among the replicas of the same weights.

    Replicated   every rank updates every parameter
    ByElements   a rank updates an equal range of each bucket: ZeRO (arXiv 1910.02054)
    ByTensors    a rank updates whole parameters: FP8-LM's ZeRO (arXiv 2310.18313, section 2.3,
                 Algorithm 1), where a part of a tensor would be apart from its scale

A partition says in which flat tensors gradients lie, which range of them a rank sums, and in which
flat tensors the weights lie that ranks send each other. `Masters` does the rest. Parts of a tensor
have the scale of the whole one, which the ranks agree on, so that both divisions store the same
numbers bit for bit, but for stochastic rounding and, once clipping acts, its factor: norms of parts
are rounded apart (1e-7).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from megafp8.fp8.formats import STORAGE_FORMATS, StorageFormat
from megafp8.fp8.scaling import Pending
from megafp8.models.init import pieces_of
from megafp8.parallel.collectives import Axis, as_sendable
from megafp8.parallel.scaled_data import FlatGrads, lay_out, lay_out_whole
from megafp8.specs import StorageSpec
from megafp8.specs.geometry import Piece
from megafp8.specs.parallel import owners_of

ALIGNMENT = 64
"""Parameters and ranges begin at multiples of this number of elements. So no cache line has two
owners, and a vectorized update treats an element in the same way on every rank."""


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


@dataclass(frozen=True)
class Divided:
    """Hold what a partition divides: parameters, and the formats of their gradients and weights."""

    params: Sequence[nn.Parameter]
    linears: Collection[nn.Parameter]  # their weights, among the parameters
    storage: StorageSpec
    weight_dtypes: Mapping[nn.Parameter, torch.dtype]  # of the memory that ranks send
    bucket_size: int  # elements

    @property
    def device(self) -> torch.device:
        """Return the device of all parameters."""
        return self.params[0].device

    def grad_format(self, param: nn.Parameter) -> StorageFormat:
        """Return the format of a parameter's gradient."""
        return STORAGE_FORMATS[self.storage.main_grads if param in self.linears else "fp32"]

    def by_grad_format(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters whose gradients are in FP32, and the others."""
        plain = [p for p in self.params if self.grad_format(p).name == "fp32"]
        return plain, [p for p in self.params if self.grad_format(p).name != "fp32"]


@dataclass(frozen=True)
class WeightBuffer:
    """Hold weights of one dtype in a flat tensor, in the order of their owners.

    Rank r owns the elements from `bounds[r]` to `bounds[r + 1]`. Ranges of one size are gathered
    in one operation. Others are broadcast by their owners: those of embeddings, norms and biases,
    where one embedding may be most of what there is.
    """

    flat: torch.Tensor
    begins: Mapping[nn.Parameter, int]
    bounds: Sequence[int]
    is_padded: bool

    @classmethod
    def of(
        cls,
        params: Sequence[nn.Parameter],
        owner_of: Mapping[nn.Parameter, int],
        num_ranks: int,
        dtype: torch.dtype,
        *,
        is_padded: bool,
    ) -> WeightBuffer:
        """Return a buffer of zeros for `params`; padded ones begin at multiples of `ALIGNMENT`."""
        held, places = [0] * num_ranks, {}
        unit = ALIGNMENT if is_padded else 1
        for param in params:
            places[param] = held[owner_of[param]]
            held[owner_of[param]] += -(-param.numel() // unit) * unit
        if is_padded:
            held = [max(held)] * num_ranks
        bounds = [sum(held[:rank]) for rank in range(num_ranks + 1)]
        begins = {param: bounds[owner_of[param]] + place for param, place in places.items()}
        flat = torch.zeros(bounds[-1], dtype=dtype, device=params[0].device)
        return cls(flat, begins, bounds, is_padded)

    def place(self, param: nn.Parameter) -> torch.Tensor:
        """Return the place of a parameter's weights, flat."""
        begin = self.begins[param]
        return self.flat[begin : begin + param.numel()]

    def owned_by(self, rank: int, param: nn.Parameter) -> slice:
        """Return which elements of a parameter a rank owns; the slice may be empty."""
        begin, size = self.begins[param], param.numel()
        low, high = (min(max(self.bounds[at] - begin, 0), size) for at in (rank, rank + 1))
        return slice(low, high)

    def start_gathering(self, shards: Axis) -> Pending | None:
        """Fill the buffer with the ranges of all ranks, now or when the result is waited for."""
        sent = as_sendable(self.flat)
        if self.is_padded:
            return shards.start_all_gather_in_place(sent)
        for rank in range(shards.size):
            if len(part := sent[self.bounds[rank] : self.bounds[rank + 1]]):
                shards.broadcast(part, source=rank)
        return None


@dataclass(frozen=True)
class FlatLayout:
    """Hold where gradients and weights lie.

    order      the parameters, in the order in which their segments follow each other
    grads      the gradients, those in FP32 first
    buffers    the weights that ranks send each other; the others stay where they are
    """

    order: Sequence[nn.Parameter]
    grads: Sequence[FlatGrads]
    buffers: Sequence[WeightBuffer] = ()


class Partition(Protocol):
    """Divide parameters among ranks.

    data         the replicas that sum gradients
    shards       the ranks that update the other segments
    divides      whether ranks own parts of tensors, which are flat and have common scales
    stays        whether only its owner needs the sum of a gradient
    frees_grads  whether a gradient's memory is freed once it was sent (ZeRO, stage 2)
    """

    data: Axis
    shards: Axis
    divides: bool
    stays: bool
    frees_grads: bool

    def lay_out(self, divided: Divided) -> FlatLayout:
        """Return where gradients and weights lie."""
        ...


class Replicated:
    """Let every rank update every parameter, from gradients that all ranks of `data` sum.

    FP32 gradients lie in one buffer, sharded parameters first, so that the gradient norm needs two
    ranges, and one division and clip serve all.
    """

    divides = stays = frees_grads = False

    def __init__(self, data: Axis | None = None) -> None:
        self.data, self.shards = data or Axis("data"), Axis("shards")

    def lay_out(self, divided: Divided) -> FlatLayout:
        """Return gradients alone; the weights stay where they are."""
        plain, few = divided.by_grad_format()
        plain.sort(key=lambda param: not is_sharded(param))
        grads = [lay_out(plain, STORAGE_FORMATS["fp32"], divided.device, 1)] if plain else []
        for group in groups_of(few, divided.bucket_size):
            fmt = divided.grad_format(group[0])
            grads.append(lay_out(group, fmt, divided.device, self.data.size))
        return FlatLayout(divided.params, grads)


class Sharded(ABC):
    """Let each rank of `shards` update a part of the parameters and keep the sums of that part.

    `tied` are parameters that other pipeline stages have too: all of these divide them in the same
    way, though their other parameters differ. With `frees_grads` a rank frees the gradients that it
    does not own (stage 2).
    """

    divides: bool
    stays = True

    def __init__(
        self,
        shards: Axis,
        tied: Collection[nn.Parameter] = frozenset(),
        *,
        frees_grads: bool = False,
    ) -> None:
        self.data = self.shards = shards
        self.tied = frozenset(tied)
        self.frees_grads = frees_grads and shards.size > 1

    @abstractmethod
    def lay_out(self, divided: Divided) -> FlatLayout:
        """Return where gradients and weights lie."""


@dataclass(frozen=True)
class BucketKind:
    """Say what the parameters of one bucket have in common."""

    is_replicated: bool  # every tensor-parallel rank has them whole
    dtype: torch.dtype  # of the weights
    grad_format: StorageFormat
    alone: int  # not 0: the parameter has a bucket of its own


class ByElements(Sharded):
    """Give each rank an equal range of every bucket of consecutive parameters.

    A bucket's gradients and weights lie at the same places of two flat tensors.
    """

    divides = True

    def lay_out(self, divided: Divided) -> FlatLayout:
        """Return buckets, each of parameters of one kind."""
        order: list[nn.Parameter] = []
        grads, buffers = [], []
        for kind, params in self._kinds(divided):
            # the bounds of buckets decide the order of additions, so both ways of counting stay
            unit = ALIGNMENT if divided.storage.is_plain else 1
            for group in groups_of(params, divided.bucket_size, unit):
                flat = lay_out(
                    group, kind.grad_format, divided.device, self.shards.size, unit=ALIGNMENT
                )
                weights = torch.zeros(flat.bounds[-1], dtype=kind.dtype, device=divided.device)
                begins = dict(zip(group, flat.begins, strict=True))
                buffers.append(WeightBuffer(weights, begins, flat.bounds, is_padded=True))
                grads.append(flat)
                order += group
        grads.sort(key=lambda flat: flat.fmt.name != "fp32")
        return FlatLayout(order, grads, buffers)

    def _kinds(self, divided: Divided) -> list[tuple[BucketKind, list[nn.Parameter]]]:
        kinds: dict[BucketKind, list[nn.Parameter]] = {}
        for number, param in enumerate(divided.params, start=1):
            alone = number if param in self.tied else 0
            dtype, fmt = divided.weight_dtypes[param], divided.grad_format(param)
            kinds.setdefault(BucketKind(not is_sharded(param), dtype, fmt, alone), []).append(param)
        if not divided.storage.is_plain:  # the gradient norm adds squares in this order
            return list(kinds.items())
        return sorted(
            kinds.items(),
            key=lambda item: (item[0].is_replicated, str(item[0].dtype), item[0].alone),
        )


class ByTensors(Sharded):
    """Give each rank whole parameters, of about equal sizes; rank 0 owns the tied ones.

    Weights lie in one flat tensor for each dtype; each rank owns a range.
    """

    divides = False

    def owners(self, divided: Divided) -> dict[nn.Parameter, int]:
        """Return the rank that owns each parameter."""
        return assign_owners(divided.params, divided.linears, self.shards.size, self.tied)

    def lay_out(self, divided: Divided) -> FlatLayout:
        """Return weights and gradients, each in the order of their owners."""
        owner_of = self.owners(divided)
        kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for param in divided.params:
            kind = divided.weight_dtypes[param], param in divided.linears
            kinds.setdefault(kind, []).append(param)
        buffers = [
            WeightBuffer.of(group, owner_of, self.shards.size, dtype, is_padded=is_linear)
            for (dtype, is_linear), group in kinds.items()
        ]
        grads = []
        for params in divided.by_grad_format():
            for group in groups_of(params, divided.bucket_size):
                group.sort(key=lambda param: (owner_of[param], not is_sharded(param)))
                owners, fmt = [owner_of[param] for param in group], divided.grad_format(group[0])
                size = self.shards.size
                grads.append(lay_out_whole(group, owners, fmt, divided.device, size))
        return FlatLayout(divided.params, grads, buffers)


PARTITIONS: dict[str, type[Sharded]] = {"elements": ByElements, "tensors": ByTensors}
"""The ways to divide, by their names in `OptimSpec.shard_by`."""


def groups_of(params: Sequence[nn.Parameter], size: int, unit: int = 1) -> list[list[nn.Parameter]]:
    """Return groups of consecutive parameters; each is full at `size` elements.

    A parameter counts as its elements, rounded up to a multiple of `unit`.
    """
    groups: list[list[nn.Parameter]] = []
    held = size
    for param in params:
        if held >= size:
            groups.append([])
            held = 0
        groups[-1].append(param)
        held += -(-param.numel() // unit) * unit
    return groups


def assign_owners(
    params: Sequence[nn.Parameter],
    linears: Collection[nn.Parameter],
    num_ranks: int,
    first: Collection[nn.Parameter] = frozenset(),
) -> dict[nn.Parameter, int]:
    """Return the rank that owns each parameter; `first` are parameters of rank 0."""
    held, in_linears = [0] * num_ranks, frozenset(linears)
    owner_of: dict[nn.Parameter, int] = {}
    for kind in (True, False):  # linears first: their ranges are padded to one size
        group = [param for param in params if (param in in_linears) == kind]
        at_rank_0 = [index for index, param in enumerate(group) if param in frozenset(first)]
        owners = owners_of([param.numel() for param in group], held, at_rank_0)
        owner_of |= dict(zip(group, owners, strict=True))
    return owner_of


def replicated_range(group: FlatGrads, rank: int) -> torch.Tensor | None:
    """Return what a rank sums of parameters that tensor-parallel ranks have whole, if anything.

    They lie behind the sharded ones.
    """
    own = [(is_sharded(group.params[index]), place) for index, place in group.own_parts(rank)]
    if all(sharded for sharded, _ in own):
        return None
    begin = max((place.stop for sharded, place in own if sharded), default=0)
    return group.own_range(rank)[begin:]
