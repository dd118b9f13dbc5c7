"""Shard stored tensors element by element: each rank owns an equal range of every bucket.

This is the alternative to whole tensors (`stored_zero.py`) where a rank would own too few of them
to balance. The parts of a tensor have one scale: ranks agree on the amax of the whole before any
of them quantizes its part. So the stored numbers are those of whole tensors bit for bit, but for
stochastic rounding and, once clipping acts, its factor: norms of parts are rounded apart (1e-7).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megafp8.fp8.formats import STORAGE_FORMATS
from megafp8.fp8.scaled import ScaledTensor
from megafp8.models.init import pieces_of
from megafp8.optim.masters import Segment, initial_master
from megafp8.optim.stored import groups_of
from megafp8.optim.stored_owned import OwnedStoredMasters
from megafp8.optim.zero import ALIGNMENT, MasterPart
from megafp8.parallel.collectives import as_bytes
from megafp8.parallel.scaled_data import FlatGrads, lay_out


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


class SplitStoredMasters(OwnedStoredMasters):
    """Hold the stored masters, moments and summed gradients of the elements that a rank owns.

    They are flat, with the scales of whole tensors. `row_of` numbers the parameters. Each tied one
    has a bucket of its own.
    """

    row_of: Mapping[nn.Parameter, int]

    def _lay_out(self) -> None:
        self.shards = self.data
        self.row_of = {param: row for row, param in enumerate(self.params)}
        few = STORAGE_FORMATS[self.storage.main_params]
        own = [p for p in self.params if p in self.linears and not self._is_fp8(p)]
        selves = frozenset(own if few.name != "fp32" else ())
        kinds: dict[Kind, list[nn.Parameter]] = {}
        for param in self.params:
            dtype = few.dtype if param in selves else self._dtype_of(param)
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
        self._collect(group.grads for group in self.groups)
        rank = self.data.rank
        plain = [group for group in self.groups if group.grads.fmt.name == "fp32"]
        self.own_grads = [group.scales for group in self.scaled_groups]
        self.own_grads += [group.grads.own_range(rank) for group in plain]
        self.replicated_grads = [g.grads.own_range(rank) for g in plain if g.is_replicated]

    def _kind(self, param: nn.Parameter, dtype: torch.dtype) -> Kind:
        few = param in self.linears and self.storage.main_grads != "fp32"
        alone = self.row_of[param] + 1 if param in self._tied else 0
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
            param.data = stored.payload = place.view(param.shape)
            self.own_weights[param] = stored
        else:
            self._move(param, place)
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

    def _of_segment(self, grad: ScaledTensor) -> ScaledTensor:
        return ScaledTensor(grad.payload.view(-1), grad.dequant_scale, grad.fmt)

    def agree(self, amaxes: torch.Tensor) -> torch.Tensor:
        """Return the amaxes of whole tensors, from those of this rank's parts, in place.

        A row is a parameter's, in the order of `row_of`; parts of other ranks count as 0.
        """
        return self.shards.all_reduce_max(amaxes)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round this rank's masters into its part of the weights, and gather all ranks' parts."""
        for segment, stored, place in zip(self.segments, self.stored, self._places, strict=True):
            if segment.param not in self.own_weights and not self._is_fp8(segment.param):
                place.copy_(stored.payload)  # FP32, rounded
        self._quantize(self._parts_in_fp8())
        pending = [
            self.shards.start_all_gather_in_place(as_bytes(group.weights)) for group in self.groups
        ]
        self._share_scales()
        for gathering in pending:
            gathering.wait()

    def _parts_in_fp8(self) -> Iterator[MasterPart]:
        """Yield the masters of this rank's parts of the weights in FP8."""
        for segment, stored, place in zip(self.segments, self.stored, self._places, strict=True):
            if self._is_fp8(segment.param):
                yield MasterPart(segment.param, segment.begin, stored.values(), place)

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
