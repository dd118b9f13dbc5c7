"""Shard the optimizer's state over replicas: ZeRO, stage 1 (arXiv 1910.02054).

Gradients lie in buckets of consecutive parameters. Each rank owns one range of every bucket: it
receives the summed gradients of that range (reduce-scatter), keeps the FP32 master weights and
Adam's moments of it, and sends the updated weights to the other ranks (all-gather). Weights lie in
flat buffers of the buckets' shape, in their compute dtype, so that they are sent without a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from megafp8.fp8.cast import raise_amax
from megafp8.fp8.weights import StoredFp8
from megafp8.models.init import pieces_of
from megafp8.ops import torch_private
from megafp8.optim.masters import Masters, Segment, initial_master
from megafp8.parallel.collectives import Axis, as_bytes
from megafp8.parallel.data import Bucket
from megafp8.specs.geometry import boxes_of_run

ALIGNMENT = 64
"""Parameters and ranges begin at multiples of this number of elements. So no cache line has two
owners, and a vectorized update treats an element in the same way on every rank."""


@dataclass(frozen=True)
class FlatBucket:
    """Hold consecutive parameters of one dtype in two flat buffers, of gradients and of weights."""

    gradient: torch.Tensor  # FP32
    weights: torch.Tensor
    begins: dict[nn.Parameter, int]  # where each parameter begins in both buffers
    is_replicated: bool  # whether every tensor-parallel rank has them whole


@dataclass(frozen=True)
class MasterPart:
    """Hold the part of a weight's FP32 master that this rank owns, flat, and its place."""

    param: nn.Parameter
    begin: int  # of its elements, in the weight's memory order
    master: torch.Tensor
    place: torch.Tensor  # where its bytes belong, in the buffer that ranks gather


class Fp8Weights(Protocol):
    """Keep weights in FP8 whose masters lie in parts on several ranks."""

    @property
    def params(self) -> Collection[nn.Parameter]:
        """Return these weights, in one order on all ranks."""
        ...

    def dtype_of(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype of the memory that the weight occupies."""
        ...

    def move(self, param: nn.Parameter, place: torch.Tensor) -> None:
        """Let the weight occupy `place`, a flat tensor of that dtype."""
        ...

    def store(self, parts: Sequence[MasterPart], shards: Axis) -> None:
        """Quantize this rank's parts by the scales of whole weights; all ranks call it together.

        The weights are complete once the ranks' places have been gathered.
        """
        ...


class OwnFp8Weights:
    """Keeps the weights of our own linears in FP8."""

    def __init__(self, forms: Mapping[nn.Parameter, StoredFp8]) -> None:
        self.params = list(forms)
        self._forms = dict(forms)

    def dtype_of(self, param: nn.Parameter) -> torch.dtype:
        """Return the weight's FP8 dtype."""
        return param.dtype

    def move(self, param: nn.Parameter, place: torch.Tensor) -> None:
        """Let the weight occupy `place`."""
        move(param, place)

    def store(self, parts: Iterable[MasterPart], shards: Axis) -> None:
        """Agree on all amaxes in one reduction, and quantize this rank's parts."""
        amaxes = torch.zeros(len(self.params), device=self.params[0].device)
        row_of = {param: row for row, param in enumerate(self.params)}  # the same everywhere
        held: dict[nn.Parameter, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for part in parts:
            dtype = self._forms[part.param].compute_dtype
            rounded, at = part.master.to(dtype), row_of[part.param]
            raise_amax(amaxes[at], rounded)
            held[part.param] = list(rectangles(part, rounded))
        shards.all_reduce_max(amaxes)
        for param, row in row_of.items():
            self._forms[param].store_parts(amaxes[row], held.get(param, ()))


class ShardedMasters(Masters):
    """Hold the master weights, moments and summed gradients of the ranges that this rank owns."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        fp8: Fp8Weights,
        shards: Axis,
        *,
        bucket_bytes: int,
        alone: Collection[nn.Parameter] = frozenset(),
    ) -> None:
        """Move the parameters into flat buffers and make the masters of this rank's ranges.

        `fp8` has the parameters kept in FP8. `bucket_bytes` is the size of a bucket in FP32.
        `alone` are parameters that get a bucket of their own, so that ranks whose other parameters
        differ divide these in the same way.
        """
        self.shards, self._fp8, self._in_fp8 = shards, fp8, frozenset(fp8.params)
        alone = frozenset(alone)
        kinds = {param: self._kind(param, is_alone=param in alone) for param in params}
        self.params = sorted(kinds, key=lambda p: kinds[p][:3])
        self.device = self.params[0].device
        size = bucket_bytes // torch.float32.itemsize
        groups = _groups(self.params, size, kinds)
        lengths = [_rounded_up(sum(map(_padded_size, g)), ALIGNMENT * shards.size) for g in groups]
        self.flat_grad = torch.zeros(sum(lengths), device=self.device)
        gradients = self.flat_grad.split(lengths)
        self.buckets = [
            _bucket(group, self._dtype_of(group[0]), gradient)
            for group, gradient in zip(groups, gradients, strict=True)
        ]
        self.param_grads = [
            bucket.gradient[begin : begin + param.numel()].view_as(param)
            for bucket in self.buckets
            for param, begin in bucket.begins.items()
        ]
        self.own_grads = [shards.own_part(bucket.gradient) for bucket in self.buckets]
        both = list(zip(self.buckets, self.own_grads, strict=True))
        self.replicated_grads = [grad for bucket, grad in both if bucket.is_replicated]
        self.segments, self.masters, self.grads = [], [], []
        self._places: list[torch.Tensor] = []  # each segment's view of the weight buffers
        for bucket in self.buckets:
            self._take(bucket)

    def _dtype_of(self, param: nn.Parameter) -> torch.dtype:
        return self._fp8.dtype_of(param) if param in self._in_fp8 else param.dtype

    def _kind(self, param: nn.Parameter, *, is_alone: bool) -> tuple[bool, str, bool, int]:
        """Return what the parameters of one bucket have in common; they are sorted by it."""
        is_replicated = not pieces_of(param)[0].is_sharded
        return is_replicated, str(self._dtype_of(param)), is_alone, id(param) if is_alone else 0

    def _take(self, bucket: FlatBucket) -> None:
        """Move a bucket's parameters into its buffer; keep the masters of this rank's range."""
        length = bucket.gradient.numel() // self.shards.size
        own_begin = self.shards.rank * length
        for param, at in bucket.begins.items():
            master = initial_master(param).detach().flatten()
            weights = bucket.weights[at : at + param.numel()]
            if param in self._in_fp8:
                self._fp8.move(param, weights)
            else:
                move(param, weights)
            begin = max(own_begin - at, 0)
            end = min(own_begin + length - at, param.numel())
            if begin < end:
                self.segments.append(Segment(param, begin, end))
                self.masters.append(nn.Parameter(master[begin:end].clone()))
                self.grads.append(bucket.gradient[at + begin : at + end])
                self._places.append(bucket.weights[at + begin : at + end])

    def reducer_buckets(self) -> list[Bucket]:
        """Return the gradient buckets for the gradient reducer, each to be reduce-scattered."""
        return [Bucket(b.gradient, frozenset(b.begins), is_scattered=True) for b in self.buckets]

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into this rank's ranges of the weights and gather all ranks'."""
        rows = list(zip(self.segments, self.masters, self._places, strict=True))
        plain = [(place, master) for segment, master, place in rows if not self._is_fp8(segment)]
        if plain:
            places, masters = zip(*plain, strict=True)
            torch_private.copy_all_(places, masters)
        if self._in_fp8:
            parts = [
                MasterPart(segment.param, segment.begin, master.detach(), place)
                for segment, master, place in rows
                if self._is_fp8(segment)
            ]
            self._fp8.store(parts, self.shards)
        pending = [
            self.shards.start_all_gather_in_place(as_bytes(bucket.weights))
            for bucket in self.buckets
        ]
        for gathering in pending:
            gathering.wait()

    def _is_fp8(self, segment: Segment) -> bool:
        return segment.param in self._in_fp8


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


def _groups(
    params: Sequence[nn.Parameter], size: int, kinds: Mapping[nn.Parameter, object]
) -> list[list[nn.Parameter]]:
    """Return groups of consecutive parameters of one kind; each is full at `size` elements."""
    groups: list[list[nn.Parameter]] = []
    for param in params:
        group = groups[-1] if groups else []
        if group and kinds[group[0]] == kinds[param]:
            if sum(map(_padded_size, group)) < size:
                group.append(param)
                continue
        groups.append([param])
    return groups


def _bucket(
    params: Sequence[nn.Parameter], dtype: torch.dtype, gradient: torch.Tensor
) -> FlatBucket:
    begins, begin = {}, 0
    for param in params:
        begins[param] = begin
        begin += _padded_size(param)
    weights = torch.zeros(gradient.numel(), dtype=dtype, device=gradient.device)
    return FlatBucket(gradient, weights, begins, not pieces_of(params[0])[0].is_sharded)


def _padded_size(param: nn.Parameter) -> int:
    return _rounded_up(param.numel(), ALIGNMENT)


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
