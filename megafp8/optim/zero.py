"""Shard the optimizer's state over replicas: ZeRO, stage 1 (arXiv 1910.02054).

Gradients lie in buckets of consecutive parameters. Each rank owns one range of every bucket: it
receives the summed gradients of that range (reduce-scatter), keeps the FP32 master weights and
Adam's moments of it, and sends the updated weights to the other ranks (all-gather). Weights lie in
flat buffers of the buckets' shape, in their compute dtype, so that they are sent without a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megafp8 import torch_private
from megafp8.models.init import pieces_of
from megafp8.optim.masters import Masters, Segment, initial_master
from megafp8.parallel.collectives import Axis
from megafp8.parallel.data import Bucket
from megafp8.precision.cast import amax_of
from megafp8.precision.weights import StoredFp8
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


class ShardedMasters(Masters):
    """Hold the master weights, moments and summed gradients of the ranges that this rank owns."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        stores: Mapping[nn.Parameter, StoredFp8],
        shards: Axis,
        *,
        bucket_bytes: int,
        alone: Collection[nn.Parameter] = frozenset(),
    ) -> None:
        """Move the parameters into flat buffers and make the masters of this rank's ranges.

        `stores` are the parameters kept in FP8. `bucket_bytes` is the size of a bucket in FP32.
        `alone` are parameters that get a bucket of their own, so that ranks whose other parameters
        differ divide these in the same way.
        """
        self.shards, self._fp8, alone = shards, dict(stores), frozenset(alone)
        self.params = sorted(
            params, key=lambda p: (not pieces_of(p)[0].is_sharded, str(p.dtype), p in alone)
        )
        self.device = self.params[0].device
        size = bucket_bytes // torch.float32.itemsize
        groups = _groups(self.params, size, alone)
        lengths = [_rounded_up(sum(map(_padded_size, g)), ALIGNMENT * shards.size) for g in groups]
        self.flat_grad = torch.zeros(sum(lengths), device=self.device)
        gradients = self.flat_grad.split(lengths)
        self.buckets = [_bucket(*pair) for pair in zip(groups, gradients, strict=True)]
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

    def _take(self, bucket: FlatBucket) -> None:
        """Move a bucket's parameters into its buffer; keep the masters of this rank's range."""
        length = bucket.gradient.numel() // self.shards.size
        own_begin = self.shards.rank * length
        for param, at in bucket.begins.items():
            master = initial_master(param).detach().flatten()
            weights = bucket.weights[at : at + param.numel()]
            weights.copy_(param.detach().flatten())
            param.data = weights.view_as(param)
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
        if self._fp8:
            self._quantize([row for row in rows if self._is_fp8(row[0])])
        pending = [
            self.shards.start_all_gather_in_place(_as_sent(bucket.weights))
            for bucket in self.buckets
        ]
        for gathering in pending:
            gathering.wait()

    def _is_fp8(self, segment: Segment) -> bool:
        return segment.param in self._fp8

    def _quantize(self, rows: Sequence[tuple[Segment, nn.Parameter, torch.Tensor]]) -> None:
        """Quantize this rank's parts with the scale of each whole weight.

        The ranks first agree on all amaxes, in one reduction.
        """
        fp8_params = [param for param in self.params if param in self._fp8]  # the same everywhere
        row_of = {param: row for row, param in enumerate(fp8_params)}
        amaxes = torch.zeros(len(fp8_params), device=self.device)
        parts: dict[nn.Parameter, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for segment, master, place in rows:
            dtype = self._fp8[segment.param].compute_dtype
            rounded, at = master.detach().to(dtype), row_of[segment.param]
            amaxes[at] = torch.maximum(amaxes[at], amax_of(rounded))
            parts[segment.param] = list(_rectangles(segment, rounded, place))
        self.shards.all_reduce_max(amaxes)
        for param, row in row_of.items():
            self._fp8[param].store_parts(amaxes[row], parts.get(param, ()))


def _rectangles(
    segment: Segment, *flat: torch.Tensor
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of a segment's two flat tensors, as rectangles of the parameter's matrix."""
    begin = 0
    for rectangle in boxes_of_run(tuple(segment.param.shape), segment.begin, segment.end):
        size = torch.Size(rectangle.shape).numel()
        first, second = (tensor[begin : begin + size].view(rectangle.shape) for tensor in flat)
        yield first, second
        begin += size


def _groups(
    params: Sequence[nn.Parameter], size: int, alone: Collection[nn.Parameter]
) -> list[list[nn.Parameter]]:
    """Return groups of consecutive parameters of one kind; each is full at `size` elements."""
    groups: list[list[nn.Parameter]] = []
    for param in params:
        group = groups[-1] if groups else []
        if group and _kind(group[0], alone) == _kind(param, alone):
            if sum(map(_padded_size, group)) < size:
                group.append(param)
                continue
        groups.append([param])
    return groups


def _kind(param: nn.Parameter, alone: Collection[nn.Parameter]) -> tuple[object, ...]:
    return (pieces_of(param)[0].is_sharded, param.dtype, id(param) if param in alone else None)


def _bucket(params: Sequence[nn.Parameter], gradient: torch.Tensor) -> FlatBucket:
    begins, begin = {}, 0
    for param in params:
        begins[param] = begin
        begin += _padded_size(param)
    weights = torch.zeros(gradient.numel(), dtype=params[0].dtype, device=gradient.device)
    return FlatBucket(gradient, weights, begins, not pieces_of(params[0])[0].is_sharded)


def _padded_size(param: nn.Parameter) -> int:
    return _rounded_up(param.numel(), ALIGNMENT)


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _as_sent(weights: torch.Tensor) -> torch.Tensor:
    """Return FP8 weights as bytes, since no communication backend knows FP8 dtypes."""
    return weights.view(torch.uint8) if weights.itemsize == 1 else weights
