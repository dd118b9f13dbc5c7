"""Shard stored tensors element by element: each rank owns an equal range of every bucket.

This is the alternative to whole tensors (`stored_zero.py`) where a rank would own too few of them
to balance. The parts of a tensor have one scale: ranks agree on the amax of the whole before any
of them quantizes its part. So the stored numbers are those of whole tensors bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megafp8.models.init import pieces_of
from megafp8.optim.masters import Segment, initial_master
from megafp8.optim.stored import StoredMasters, groups_of
from megafp8.optim.zero import ALIGNMENT, MasterPart, rectangles
from megafp8.parallel.collectives import Axis, as_bytes
from megafp8.parallel.data import GradBucket
from megafp8.parallel.scaled_data import FlatGrads, lay_out
from megafp8.precision.cast import amax_of
from megafp8.precision.formats import STORAGE_FORMATS
from megafp8.precision.scaled import ScaledTensor
from megafp8.precision.weights import StoredFp8
from megafp8.specs import StorageSpec


@dataclass(frozen=True)
class Group:
    """Hold the gradients and the weights of some parameters, at the same places of two tensors."""

    grads: FlatGrads
    weights: torch.Tensor
    is_replicated: bool  # whether every tensor-parallel rank has these parameters whole


@dataclass(frozen=True)
class Kind:
    """Say what the parameters of one group have in common."""

    is_replicated: bool
    has_few_bits: bool  # of the gradient
    dtype: torch.dtype  # of the weight
    alone: int  # not 0: the parameter has a group of its own


class SplitStoredMasters(StoredMasters):
    """Hold the stored masters, moments and summed gradients of the elements that a rank owns.

    They are flat, with the scales of whole tensors. `row_of` numbers the parameters.
    """

    row_of: Mapping[nn.Parameter, int]

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        storage: StorageSpec,
        linears: Collection[nn.Parameter],
        in_fp8: Mapping[nn.Parameter, StoredFp8],
        shards: Axis,
        *,
        bucket_bytes: int,
        alone: Collection[nn.Parameter] = frozenset(),
        frees_grads: bool = False,
    ) -> None:
        """Divide `params` among the ranks of `shards`.

        `in_fp8` are the weights kept in FP8. `alone` are parameters that get a bucket of their own,
        so that pipeline stages whose other parameters differ divide these in the same way. With
        `frees_grads` a rank frees the gradients that it does not own (ZeRO, stage 2).
        """
        self._fp8, self.frees_grads = dict(in_fp8), frees_grads and shards.size > 1
        self._alone = frozenset(alone)
        stores = {param: form.store for param, form in in_fp8.items()}
        super().__init__(params, storage, linears, stores, data=shards, bucket_bytes=bucket_bytes)

    def _lay_out(self) -> None:
        self.shards = self.data
        self.row_of = {param: row for row, param in enumerate(self.params)}
        few = STORAGE_FORMATS[self.storage.main_params]
        own = [p for p in self.params if p in self.linears and p not in self._fp8]
        selves = frozenset(own if few.name != "fp32" else ())
        kinds: dict[Kind, list[nn.Parameter]] = {}
        for param in self.params:
            dtype = few.dtype if param in selves else param.dtype
            kinds.setdefault(self._kind(param, dtype), []).append(param)
        self.segments = []
        self.groups: list[Group] = []
        self._places: list[torch.Tensor] = []  # each segment's part of the weights
        for kind, params in kinds.items():
            for group in groups_of(params, self.bucket_size):
                self._take_group(kind, group, selves)
        self.grad_of = {}
        self.scaled_groups = [g.grads for g in self.groups if g.grads.fmt.name != "fp32"]
        self.plain_groups = [g.grads for g in self.groups if g.grads.fmt.name == "fp32"]
        self._group_of = {p: group.grads for group in self.groups for p in group.grads.params}
        self._collect(group.grads for group in self.groups)
        rank = self.data.rank
        plain = [group for group in self.groups if group.grads.fmt.name == "fp32"]
        self.own_grads = [group.scales for group in self.scaled_groups]
        self.own_grads += [group.grads.own_range(rank) for group in plain]
        self.replicated_grads = [g.grads.own_range(rank) for g in plain if g.is_replicated]

    def _kind(self, param: nn.Parameter, dtype: torch.dtype) -> Kind:
        few = param in self.linears and self.storage.main_grads != "fp32"
        alone = self.row_of[param] + 1 if param in self._alone else 0
        return Kind(not pieces_of(param)[0].is_sharded, few, dtype, alone)

    def _take_group(
        self, kind: Kind, params: Sequence[nn.Parameter], selves: Collection[nn.Parameter]
    ) -> None:
        """Move parameters into a buffer, and keep the masters of this rank's part of them."""
        fmt = STORAGE_FORMATS[self.storage.main_grads if kind.has_few_bits else "fp32"]
        size, rank = self.data.size, self.data.rank
        grads = lay_out(params, fmt, self.device, size, unit=ALIGNMENT)
        if self.frees_grads:
            grads.free_early(rank)
        weights = torch.zeros(grads.bounds[-1], dtype=kind.dtype, device=self.device)
        own = dict(grads.own_parts(rank))
        low = grads.bounds[rank]
        for index, (param, begin) in enumerate(zip(params, grads.begins, strict=True)):
            place = weights[begin : begin + param.numel()]
            part = own.get(index)
            bounds = None if part is None else (low + part.start - begin, low + part.stop - begin)
            self._take_part(param, place, bounds, is_own_master=param in selves)
        self.groups.append(Group(grads, weights, kind.is_replicated))

    def _take_part(
        self,
        param: nn.Parameter,
        place: torch.Tensor,
        bounds: tuple[int, int] | None,
        *,
        is_own_master: bool,
    ) -> None:
        """Move a parameter to `place` (flat); keep its master from `bounds[0]` to `bounds[1]`."""
        name = self.storage.main_params if param in self.linears else "fp32"
        fmt, whole = STORAGE_FORMATS[name], initial_master(param).detach()
        stored = ScaledTensor(whole, torch.ones((), device=self.device), fmt)
        if fmt.name != "fp32":
            stored = ScaledTensor.of(whole, fmt)
        if is_own_master:
            place.copy_(stored.payload.flatten())
            stored.payload = place.view(param.shape)
            self.own_weights[param] = stored
        else:
            place.copy_(param.detach().flatten())
        param.data = place.view(param.shape)
        if bounds is None:
            return
        begin, end = bounds
        payload = stored.payload.view(-1)[begin:end]
        if not is_own_master:
            payload = payload.clone()
        self.segments.append(Segment(param, begin, end))
        self.stored.append(ScaledTensor(payload, stored.dequant_scale, fmt))
        self.masters.append(nn.Parameter(payload))
        self._places.append(place[begin:end])

    def _collect(self, groups: Iterable[FlatGrads]) -> None:
        """Take the gradients of `groups`; those of the segments are the sums of this rank."""
        groups = list(groups)
        super()._collect(groups)
        own = {
            group.params[index]: grad
            for group in groups
            for index, grad in group.own_sums(self.data.rank)
        }
        flat = [own[segment.param] for segment in self.segments]
        self.stored_grads = [
            ScaledTensor(grad.payload.view(-1), grad.dequant_scale, grad.fmt) for grad in flat
        ]
        self.grads = [stored.payload for stored in self.stored_grads]

    def hold_grad(self, param: nn.Parameter) -> None:
        """Allocate the memory of a parameter's gradient, if it is freed between uses."""
        self._group_of[param].hold()

    def begin_step(self) -> None:
        """Free the sums of the last step, if a step allocates new ones."""
        for group in self.groups:
            group.grads.begin_step()

    def is_finite(self, param: nn.Parameter) -> bool:
        """Whether this rank's part of the gradient of `param` is finite.

        A NaN of any rank is in the sum of the rank that owns the element.
        """
        both = zip(self.segments, self.stored_grads, strict=True)
        return all(
            bool(grad.values().isfinite().all()) for segment, grad in both if segment.param is param
        )

    def reducer_buckets(self) -> list[GradBucket]:
        """Return the buckets for the gradient reducer."""
        return self.owned_buckets(self.plain_groups, frees_grads=self.frees_grads)

    def agree(self, amaxes: torch.Tensor) -> torch.Tensor:
        """Return the amaxes of whole tensors, from those of this rank's parts, in place.

        A row is a parameter's, in the order of `row_of`; parts of other ranks count as 0.
        """
        return self.shards.all_reduce_max(amaxes)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round this rank's masters into its part of the weights, and gather all ranks' parts."""
        for segment, stored, place in zip(self.segments, self.stored, self._places, strict=True):
            if segment.param not in self.own_weights and segment.param not in self._fp8:
                place.copy_(stored.payload)  # FP32, rounded
        if self._fp8:
            self._quantize()
        pending = [
            self.shards.start_all_gather_in_place(as_bytes(group.weights)) for group in self.groups
        ]
        self._share_scales()
        for gathering in pending:
            gathering.wait()

    def _quantize(self) -> None:
        """Quantize this rank's parts of weights in FP8, by the scales of the whole ones."""
        amaxes = torch.zeros(len(self._fp8), device=self.device)
        row_of = {param: row for row, param in enumerate(self._fp8)}
        parts: dict[nn.Parameter, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for segment, stored, place in zip(self.segments, self.stored, self._places, strict=True):
            if (form := self._fp8.get(segment.param)) is not None:
                rounded = stored.values().to(form.compute_dtype)
                amaxes[row_of[segment.param]] = amax_of(rounded)
                part = MasterPart(segment.param, segment.begin, rounded, place)
                parts[segment.param] = list(rectangles(part, rounded))
        self.shards.all_reduce_max(amaxes)
        for param, row in row_of.items():
            self._fp8[param].store_parts(amaxes[row], parts.get(param, ()))

    def _share_scales(self) -> None:
        """Tell all ranks the scales of weights that are their own masters."""
        if not self.own_weights or self.shards.size == 1:
            return
        own = {segment.param for segment in self.segments}
        scales = torch.stack(
            [
                weight.dequant_scale if param in own else torch.zeros_like(weight.dequant_scale)
                for param, weight in self.own_weights.items()
            ]
        )
        shared = self.shards.all_reduce_max(scales.nan_to_num(nan=torch.inf))
        shared = torch.where(shared.isfinite(), shared, torch.nan)
        for weight, scale in zip(self.own_weights.values(), shared.unbind(), strict=True):
            weight.dequant_scale.copy_(scale)

    @property
    def padding(self) -> float:
        """Return the padding of all weights, as a fraction of their elements."""
        whole: int = sum(param.numel() for param in self.params)
        held: int = sum(group.weights.numel() for group in self.groups)
        return held / whole - 1
