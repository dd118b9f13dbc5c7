"""Keep master weights and gradients of a model, in any format and partition.

`StorageSpec` says in which formats (FP8-LM), and `optim/partitions.py` what a rank has of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

import torch
from torch import nn

from megafp8.fp8.scaled import ScaledTensor, sums_of_squares
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.ops import torch_private
from megafp8.optim.fp8_weights import Fp8Weights, MasterPart, WholeFp8Weights, move
from megafp8.optim.partitions import (
    Partition,
    Segment,
    WeightBuffer,
    by_group,
    group_of,
    is_sharded,
    largest_of_parts,
    replicated_range,
)
from megafp8.parallel.collectives import Axis
from megafp8.parallel.fsdp import local_of
from megafp8.parallel.grad_reduce import Bucket, GradBucket, buckets_of
from megafp8.parallel.scaled_data import ExchangedBucket, FlatGrads, Fp8SumBucket, lay_out
from megafp8.specs import StorageSpec
from megafp8.specs.division import Divided, Member
from megafp8.specs.geometry import DENSE
from megafp8.specs.optim import ParamKind

ALL_IN_FP32 = StorageSpec()


class Masters:
    """Hold the master weights and the summed gradients of what a rank updates.

    The partition says what that is: everything, or a part. The storage says in which formats
    masters and gradients of linears are; those of embeddings, norms and biases are FP32. For an
    FP32 parameter of which the rank has everything the master *is* the parameter. If the master of
    a linear's weight has fewer bits than FP32, it is the weight itself: the parameter's data are
    its bits, and the linear reads them through a `LowPrecisionWeight`. A weight that is kept in
    FP8 alone has a master besides. A tensor-parallel rank's part of a weight is a tensor with a
    scale of its own.

        params         all parameters of this rank
        params_of      those of each group of replicas, by its name
        segments       what this rank updates: whole parameters, or ranges of their elements
        masters        the master weight of each segment, as torch's optimizers take it
        stored         the same with its format and scale
        stored_grads   the gradient of each segment, valid after the reduction
        grads          the memory of these
        grad_of        the gradient of each parameter, as the backward pass fills it
        plain_flats    the gradients in FP32, in the flat tensors in which ranks reduce them
        scaled_flats   those below FP32
        own_grads      flat tensors; to multiply them multiplies all of `stored_grads`
        own_weights    the parameters that are their own masters in low precision
        row_of         the number of each parameter, where segments are parts of tensors; or None
        shards         the ranks that update the other segments of dense parameters
        shards_of      the same for each group of replicas, by name
        partitions     what divides the parameters of each group
        holds_rows     whether a rank has rows of each parameter (FSDP)
    """

    holds_rows = False

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        storage: StorageSpec = ALL_IN_FP32,
        partition: Partition | None = None,
        *,
        others: Mapping[str, Partition] = MappingProxyType({}),
        linears: Collection[nn.Parameter] = (),
        fp8: Fp8Weights | None = None,
        bucket_bytes: int = 125 << 20,
    ) -> None:
        """Take the initial values of `params`; `linears` are the linears' weights among them.

        `partition` divides the dense parameters, and `others` those of other groups of replicas, by
        name: each flat tensor and each message is of one group. `fp8` has the weights that are kept
        in FP8; `bucket_bytes` is a bucket's size in FP32.
        """
        self.storage, self.partition = storage, partition or Partition()
        self.shards = self.partition.shards
        self.partitions = {DENSE: self.partition, **others}
        self.shards_of = {name: each.shards for name, each in self.partitions.items()}
        self.params, self.linears = list(params), frozenset(linears)
        if storage.is_plain:  # the gradient norm adds squares in this order
            self.params.sort(key=lambda param: not is_sharded(param))
        self.params_of = by_group(self.params, self.shards_of)
        self.device, self.bucket_bytes = self.params[0].device, bucket_bytes
        self._one = torch.ones((), device=self.device)
        self._fp8 = fp8 or WholeFp8Weights()
        self._in_fp8 = frozenset(self._fp8.params)
        formats = {str(name): fmt for name, fmt in STORAGE_FORMATS.items()}
        self.buffers: list[WeightBuffer] = []
        grads: list[FlatGrads] = []
        order: list[nn.Parameter] = []
        for name, each in self.partitions.items():
            members = self.params_of[name]
            division = each.way.divide(self._divided(members, each))
            for places in division.weights:
                self.buffers.append(WeightBuffer.of(places, [members[row] for row in places.rows]))
            for places in division.grads:
                there = [members[row] for row in places.rows]
                grads.append(lay_out(places, there, formats[places.kind]))
            order += (members[row] for row in division.order)
        self.plain_flats = [flat for flat in grads if flat.fmt.name == "fp32"]
        self.scaled_flats = [flat for flat in grads if flat.fmt.name != "fp32"]
        self.row_of = None
        if self.partition.divides:
            self.row_of = {param: row for row, param in enumerate(self.params)}
        self.segments: list[Segment] = []
        self.stored: list[ScaledTensor] = []
        self.masters: list[nn.Parameter] = []
        self._places: list[torch.Tensor] = []  # where each segment's weights belong
        self._rounded: list[tuple[torch.Tensor, nn.Parameter]] = []  # from masters there
        self.own_weights: dict[nn.Parameter, ScaledTensor] = {}
        buffer_of = {param: buffer for buffer in self.buffers for param in buffer.index_of}
        for param in order:
            self._take(param, buffer_of.get(param))
        self._collect(grads)
        sizes = [len(flat.params) for flat in self.scaled_flats]
        self.factors = torch.ones(sum(sizes), device=self.device)
        self._factors_of = self.factors.split(sizes)
        for flat, factors in zip(self.scaled_flats, self._factors_of, strict=True):
            count = self._partition_of(flat.params).data.size
            factors.fill_({"pre": 1 / count, "post": 1.0}.get(storage.reduction, count**-0.5))

    def _divided(self, params: Sequence[nn.Parameter], partition: Partition) -> Divided:
        """Return what a partition divides: the `params` of its group of replicas."""
        storage_format, main = STORAGE_FORMATS[self.storage.main_params], self.storage.main_grads
        members = []
        for param in params:
            dtype = storage_format.dtype if self._is_own_master(param) else param.dtype
            if self._is_fp8(param):
                dtype = self._fp8.dtype_of(param)
            member = Member(
                elements=param.numel(),
                weight=str(dtype).removeprefix("torch."),
                grad=main if param in self.linears else "fp32",
                is_linear=param in self.linears,
                is_sharded=is_sharded(param),
                is_tied=param in partition.tied,
            )
            members.append(member)
        size = self.bucket_bytes // torch.float32.itemsize
        return Divided(tuple(members), partition.data.size, size, self.storage.is_plain)

    def _partition_of(self, params: Iterable[nn.Parameter]) -> Partition:
        """Return what divides these parameters, which belong to one group of replicas."""
        return self.partitions[group_of(next(iter(params)))]

    def _is_fp8(self, param: nn.Parameter) -> bool:
        """Whether the weight is kept in FP8 alone, and has a master besides."""
        return param in self._in_fp8

    def _is_own_master(self, param: nn.Parameter) -> bool:
        """Whether the weight is its own master in low precision."""
        is_low_precision = param in self.linears and self.storage.main_params != "fp32"
        return is_low_precision and not self._is_fp8(param)

    def _take(self, param: nn.Parameter, buffer: WeightBuffer | None) -> None:
        """Move a parameter to its place in the buffer; keep the master of this rank's part."""
        master = initial_master(param)
        fmt = STORAGE_FORMATS[self.storage.main_params if param in self.linears else "fp32"]
        owned, place = slice(0, param.numel()), None
        if buffer is not None:
            rank = self._partition_of((param,)).shards.rank
            owned, place = buffer.owned_by(rank, param), buffer.place(param)
        if self._is_own_master(param):
            stored = ScaledTensor.of(master.detach(), fmt)
            if place is not None:
                stored.payload = place.view(param.shape).copy_(stored.payload)
            param.data, master = stored.payload, param
            self.own_weights[param] = stored
        elif place is not None:
            (self._fp8.move if self._is_fp8(param) else move)(param, place)
        if owned.start == owned.stop:
            return
        if not self._is_own_master(param):
            values = master.detach()  # the parameter itself may have been moved
            stored = ScaledTensor(values, self._one, fmt)
            if fmt.name != "fp32":
                stored = ScaledTensor.of(values, fmt)
                master = nn.Parameter(stored.payload)
        if self.partition.divides:
            part = stored.payload.view(-1)[owned]
            if not self._is_own_master(param):
                part = part.clone()
            stored, master = ScaledTensor(part, stored.dequant_scale, fmt), nn.Parameter(part)
        self.segments.append(Segment(param, owned.start, owned.stop))
        self.stored.append(stored)
        self.masters.append(master)
        self._places.append(param if place is None else place[owned])
        if not (param is master or self._is_own_master(param) or self._is_fp8(param)):
            self._rounded.append((param if place is None else place[owned].view_as(master), master))

    def _collect(self, flats: Sequence[FlatGrads]) -> None:
        """Take the gradients in `flats`, and find those of the segments."""
        own: dict[nn.Parameter, ScaledTensor] = {}
        self.grad_of: dict[nn.Parameter, ScaledTensor] = {}
        for flat in flats:
            self.grad_of |= dict(zip(flat.params, flat.grads, strict=True))
            partition = self._partition_of(flat.params)
            if partition.frees_grads:
                flat.free_early(partition.shards.rank)
            is_whole = partition.shards.size == 1
            sums = enumerate(flat.grads) if is_whole else flat.own_sums(partition.shards.rank)
            own |= {flat.params[index]: grad for index, grad in sums}
        self._flat_of = {param: flat for flat in flats for param in flat.params}
        self.param_grads = [self.grad_of[param].payload for param in self.params]
        self.stored_grads = [
            replace(own[segment.param], payload=own[segment.param].payload.view_as(master))
            for segment, master in zip(self.segments, self.masters, strict=True)
        ]
        self.grads = [grad.payload for grad in self.stored_grads]
        ranks = [self._partition_of(flat.params).shards.rank for flat in self.plain_flats]
        both = list(zip(self.plain_flats, ranks, strict=True))
        self.own_grads = [flat.own_range(rank) for flat, rank in both]
        ranges = (replicated_range(flat, rank) for flat, rank in both)
        self.replicated_grads = [x for x in ranges if x is not None]  # whole on every TP rank
        # to multiply a scale multiplies its gradient
        self.own_grads += [flat.scales for flat in self.scaled_flats]

    def kind_of(self, param: nn.Parameter) -> ParamKind:
        """Return what the optimizer of a parameter depends on."""
        return ParamKind(param in self.linears, is_vector=param.dim() < 2)

    @property
    def held_params(self) -> Sequence[torch.Tensor]:
        """Return the memory that parameters occupy on this rank."""
        return self.params

    @property
    def padding(self) -> float:
        """Return the padding of the weights that ranks send, as a fraction of their elements."""
        held = sum(buffer.flat.numel() for buffer in self.buffers)
        return held / sum(p.numel() for b in self.buffers for p in b.index_of) - 1

    @property
    def factors_adapt(self) -> bool:
        """Whether the factors of sums in FP8 change, and belong to the state of a run."""
        if self.storage.reduction != "auto":
            return False
        return any(partition.data.size > 1 for partition in self.partitions.values())

    def factor_of(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the parameters with gradients below FP32, and the factor of each, a 0-d view."""
        for flat, factors in zip(self.scaled_flats, self._factors_of, strict=True):
            yield from zip(flat.params, factors.unbind(), strict=True)

    def plain_grads(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the parameters whose gradients are in FP32, with these."""
        for flat in self.plain_flats:
            yield from zip(flat.params, (grad.payload for grad in flat.grads), strict=True)

    def scaled_grads(self) -> Iterator[tuple[nn.Parameter, ScaledTensor]]:
        """Yield the parameters whose gradients are in low precision, with these."""
        for flat in self.scaled_flats:
            yield from zip(flat.params, flat.grads, strict=True)

    def reducer_buckets(self) -> Iterator[tuple[Axis, Sequence[GradBucket]]]:
        """Yield buckets for the gradient reducer, with the ranks that sum their gradients.

        In stage 2 of ZeRO those of linears are reduced early in the first step too, since each
        linear gives one gradient in a microbatch.
        """
        storage = self.storage
        for flat in self.plain_flats:
            partition = self._partition_of(flat.params)
            if not partition.stays:  # each rank needs all sums
                yield partition.data, buckets_of(flat.flat, flat.params, self.bucket_bytes)
            elif storage.is_plain and partition.divides:  # ranks own equal ranges
                scattered = Bucket(flat.flat, frozenset(flat.params), is_scattered=True)
                yield partition.data, [scattered]
            else:
                yield partition.data, [ExchangedBucket(flat, stays=True)]
        for flat, factors in zip(self.scaled_flats, self._factors_of, strict=True):
            partition = self._partition_of(flat.params)
            stays, starts_early = partition.stays, not storage.sums_in_fp32
            bucket = ExchangedBucket(flat, stays, starts_early)
            if storage.reduction != "fp32":
                adapts = storage.reduction == "auto"
                bucket = Fp8SumBucket(flat, stays, starts_early, factors=factors, adapts=adapts)
            if partition.frees_grads:
                bucket.num_gradients = len(flat.params)
            yield partition.data, [bucket]

    def begin_step(self) -> None:
        """Free the sums of the last step, if a step allocates new ones."""
        for flat in (*self.plain_flats, *self.scaled_flats):
            flat.begin_step()

    def hold_grad(self, param: nn.Parameter) -> None:
        """Allocate the memory of a parameter's gradient, if it is freed between uses."""
        self._flat_of[param].hold()

    def collect_grads(self) -> None:
        """Make `grads` valid; called after the gradients have been reduced over ranks."""

    def reshard(self) -> None:
        """Free the weights that were gathered for a forward pass without a backward pass."""

    def grads_of(self, param: nn.Parameter) -> list[torch.Tensor]:
        """Return the gradients of the segments of `param` that this rank updates."""
        both = zip(self.segments, self.grads, strict=True)
        return [grad for segment, grad in both if segment.param is param]

    @property
    def grads_of_heads(self) -> list[torch.Tensor]:
        """Return the gradients of what acts on each head, of the segments that this rank updates.

        A tensor-parallel rank's gradient is that of its own heads; the sum is over its ranks.
        """
        both = zip(self.segments, self.grads, strict=True)
        return [grad for segment, grad in both if segment.piece.is_of_heads]

    def squared_norms(self) -> torch.Tensor:
        """Return the squared L2 norm of each segment's gradient, of its values, FP64 [segments]."""
        in_fp32 = [grad.payload for grad in self.stored_grads if grad.fmt.name == "fp32"]
        scaled = [grad for grad in self.stored_grads if grad.fmt.name != "fp32"]
        found = []
        if in_fp32:  # a shard may have none
            found.append(torch.stack(torch_private.norms_of(in_fp32)).double().square())
        if scaled:
            found.append(sums_of_squares(scaled))
        return found[0] if len(found) == 1 else torch.cat(found)[self._rows_by_format]

    @cached_property
    def _rows_by_format(self) -> torch.Tensor:
        """Return the row of each segment where FP32 comes before others, int64 on the device."""
        is_scaled = [grad.fmt.name != "fp32" for grad in self.stored_grads]
        order = sorted(range(len(is_scaled)), key=is_scaled.__getitem__)
        rows = torch.tensor([order.index(row) for row in range(len(order))], dtype=torch.int64)
        return rows.to(self.device, non_blocking=True)

    @cached_property
    def rows_of_norm(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the rows of `squared_norms` to count here, by group of replicas.

        They are those of sharded and of whole parameters, int64 [rows], on the device. A list as an
        index would be copied there in every step, and that copy waits until the device has done all
        that was started before.
        """
        rows_of = {name: (list[int](), list[int]()) for name in self.shards_of}
        for row, segment in enumerate(self.segments):
            if not segment.piece.replica:  # another stage counts a replica
                rows_of[segment.piece.group][not segment.piece.is_sharded].append(row)
        on_device: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, lists in rows_of.items():
            both = (torch.tensor(rows, dtype=torch.int64) for rows in lists)
            first, second = (rows.to(self.device, non_blocking=True) for rows in both)
            on_device[name] = first, second
        return on_device

    def is_finite(self, param: nn.Parameter) -> bool:
        """Whether this rank's part of the gradient of `param` holds neither NaN nor infinity.

        A NaN of any rank is in the sum of the rank that owns the element.
        """
        both = zip(self.segments, self.stored_grads, strict=True)
        found = (grad.values() for segment, grad in both if segment.param is param)
        return all(bool(values.isfinite().all()) for values in found)

    def rows_of(self, param: nn.Parameter) -> torch.Tensor:
        """Return this rank's part of a parameter, as it is stored or in FP32; not to be changed."""
        return local_of(param.detach())

    def agree(self, amaxes: torch.Tensor) -> torch.Tensor:
        """Return the amaxes of whole tensors, from those of this rank's parts, in place.

        A row is a parameter's, in the order of `row_of`; parts of other ranks count as 0.
        """
        return largest_of_parts(amaxes, self.params, self.shards_of)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the weights that the model computes with, on all ranks."""
        if self._rounded:
            places, masters = zip(*self._rounded, strict=True)
            torch_private.copy_all_(places, masters)
        if self._in_fp8:
            self._fp8.store(self._parts_in_fp8(), self.shards_of)
        pending = [
            buffer.start_gathering(self._partition_of(buffer.index_of).shards)
            for buffer in self.buffers
        ]
        self._share_scales()
        for gathering in pending:
            if gathering is not None:
                gathering.wait()

    def _parts_in_fp8(self) -> Iterator[MasterPart]:
        """Yield the masters of this rank's parts of the weights in FP8."""
        for segment, stored, place in zip(self.segments, self.stored, self._places, strict=True):
            if self._is_fp8(segment.param):
                in_fp32 = stored.fmt.name == "fp32"
                values = stored.payload if in_fp32 else stored.values()
                yield MasterPart(segment.param, segment.begin, values.flatten(), place)

    def _share_scales(self) -> None:
        """Tell all ranks the scales of weights that are their own masters."""
        own, weights = {segment.param for segment in self.segments}, self.own_weights
        for name, shards in self.shards_of.items():
            params = [param for param in self.params_of[name] if param in weights]
            if not params or shards.size == 1:
                continue
            scales = {param: weights[param].dequant_scale for param in params}
            told = [x if param in own else torch.zeros_like(x) for param, x in scales.items()]
            # Only a weight's owner knows its scale: the others send 0. A maximum may drop a NaN, so
            # a NaN travels as infinity.
            shared = shards.all_reduce_max(torch.stack(told).nan_to_num(nan=torch.inf))
            shared = torch.where(shared.isfinite(), shared, torch.nan)
            for scale, found in zip(scales.values(), shared.unbind(), strict=True):
                scale.copy_(found)


def initial_master(param: nn.Parameter) -> nn.Parameter:
    """Return the FP32 master weight of `param`: its initial values from before any rounding.

    An FP32 parameter that was not rounded is returned itself.
    """
    initial = getattr(param, "initial_master", None)
    if param.dtype == torch.float32 and initial is None:
        return param
    master = param.detach().float() if initial is None else initial.to(param.device)
    param.initial_master = None  # type: ignore[attr-defined]
    return nn.Parameter(master)
