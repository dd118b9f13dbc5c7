"""Shard stored tensors over replicas: FP8-LM's ZeRO (arXiv 2310.18313, section 2.3, Algorithm 1).

A part of a tensor would be apart from its scale. So each rank owns whole parameters: it receives
their summed gradients, keeps their moments, and at O3 their master weights, updates them, and sends
them to the other ranks. Weights lie in one flat tensor for each dtype; each rank owns a range.

In stage 1 a rank has memory for all gradients. In stage 2 a bucket's memory is freed once its
gradients were sent, and the owner keeps its sums apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megafp8.fp8.formats import STORAGE_FORMATS, StorageFormat
from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.scaling import Pending
from megafp8.models.init import pieces_of
from megafp8.optim.masters import Segment, initial_master
from megafp8.optim.stored import groups_of
from megafp8.optim.stored_owned import OwnedStoredMasters
from megafp8.optim.zero import ALIGNMENT, MasterPart
from megafp8.parallel.collectives import Axis, as_bytes
from megafp8.parallel.scaled_data import FlatGrads, lay_out_whole
from megafp8.specs.parallel import owners_of


@dataclass(frozen=True)
class WeightBuffer:
    """Hold weights of one dtype in the order of their owners.

    Rank r owns the elements from `bounds[r]` to `bounds[r + 1]`. The linears' ranges are padded to
    one size, which an all-gather needs. Those of embeddings, norms and biases are not, because one
    embedding may be most of what there is; each owner broadcasts its range.
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

    def view(self, param: nn.Parameter) -> torch.Tensor:
        """Return the place of a parameter's weights, of its shape."""
        begin = self.begins[param]
        return self.flat[begin : begin + param.numel()].view(param.shape)

    def start_gathering(self, shards: Axis) -> Pending | None:
        """Fill the buffer with the ranges of all ranks, now or when the result is waited for."""
        sent = as_bytes(self.flat)
        if self.is_padded:
            return shards.start_all_gather_in_place(sent)
        for rank in range(shards.size):
            if len(part := sent[self.bounds[rank] : self.bounds[rank + 1]]):
                shards.broadcast(part, source=rank)
        return None


def dealt(
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


class ShardedStoredMasters(OwnedStoredMasters):
    """Hold the stored masters, moments and summed gradients of the parameters that a rank owns.

    Rank 0 owns the tied ones.
    """

    def _lay_out(self) -> None:
        self.shards = self.data
        self.owner_of = dealt(self.params, self.linears, self.data.size, self._tied)
        own = [param for param in self.params if self._is_own(param)]
        self.segments = [Segment(param, 0, param.numel()) for param in own]
        self._lay_out_weights()
        self._lay_out_grads()

    def _is_own(self, param: nn.Parameter) -> bool:
        return self.owner_of[param] == self.data.rank

    def _lay_out_weights(self) -> None:
        """Move all weights into buffers, and make the masters of this rank's."""
        few, size = STORAGE_FORMATS[self.storage.main_params], self.data.size
        selves = [p for p in self.params if p in self.linears and few.name != "fp32"]
        selves = [param for param in selves if not self._is_fp8(param)]
        kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        in_few = frozenset(selves)
        for param in self.params:
            dtype = few.dtype if param in in_few else self._dtype_of(param)
            kinds.setdefault((dtype, param in self.linears), []).append(param)
        self.buffers = []
        for (dtype, padded), group in kinds.items():
            buffer = WeightBuffer.of(group, self.owner_of, size, dtype, is_padded=padded)
            self.buffers.append(buffer)
            for param in group:
                self._place(param, buffer, is_own_master=param in in_few)
        most = max([0, *(self._count(selves, rank) for rank in range(size))])
        self._scales = torch.ones(size * most, device=self.device)
        seen = [0] * size
        for param in selves:  # each owner's in the model's order, as in the buffers
            owner = self.owner_of[param]
            row, stored = owner * most + seen[owner], self.own_weights[param]
            seen[owner] += 1
            self._scales[row].copy_(stored.dequant_scale)
            stored.dequant_scale = self._scales[row]

    def _count(self, params: Sequence[nn.Parameter], rank: int) -> int:
        return sum(self.owner_of[param] == rank for param in params)

    def _place(self, param: nn.Parameter, buffer: WeightBuffer, *, is_own_master: bool) -> None:
        """Move a parameter into its buffer; keep its master if this rank owns it."""
        view = buffer.view(param)
        if is_own_master:
            stored = ScaledTensor.of(
                initial_master(param).detach(), STORAGE_FORMATS[self.storage.main_params]
            )
            view.copy_(stored.payload)
            param.data = stored.payload = view
            self.own_weights[param] = stored
        else:
            self._move(param, view.view(-1))
        if not self._is_own(param):
            param.initial_master = None  # type: ignore[attr-defined]

    def _lay_out_grads(self) -> None:
        """Make the gradients of all parameters, and the masters of this rank's."""
        for segment in self.segments:
            if (own := self.own_weights.get(segment.param)) is not None:
                self.stored.append(own)
                self.masters.append(segment.param)
            else:
                self._take(segment.param)
        self.grad_of = {}
        in_fp8 = frozenset(self.in_fp8)
        plain = [param for param in self.params if param not in in_fp8]
        self.plain_groups = self._groups(plain, STORAGE_FORMATS["fp32"])
        self.scaled_groups = self._groups(self.in_fp8, STORAGE_FORMATS[self.storage.main_grads])
        groups = [*self.plain_groups, *self.scaled_groups]
        self._collect(groups)
        self.replicated_grads = []
        self.own_grads = [group.scales for group in self.scaled_groups]
        for group in self.plain_groups:
            flat = group.own_range(self.data.rank)
            self.own_grads.append(flat)
            whole = [
                grad.payload.numel()
                for param, grad in zip(group.params, group.grads, strict=True)
                if self._is_own(param) and not pieces_of(param)[0].is_sharded
            ]
            self.replicated_grads.append(flat[flat.numel() - sum(whole) :])

    def _groups(self, params: Sequence[nn.Parameter], fmt: StorageFormat) -> list[FlatGrads]:
        """Return gradients of zero in buckets of consecutive parameters, each in owners' order."""
        made = []
        for group in groups_of(params, self.bucket_size):
            group.sort(key=lambda p: (self.owner_of[p], not pieces_of(p)[0].is_sharded))
            owners = [self.owner_of[param] for param in group]
            laid_out = lay_out_whole(group, owners, fmt, self.device, self.data.size)
            if self.frees_grads:
                laid_out.free_early(self.data.rank)
            made.append(laid_out)
        return made

    @torch.no_grad()
    def write_back(self) -> None:
        """Round this rank's masters into its weights, and gather all ranks' weights."""
        self._round_plain()
        self._quantize(self._parts_in_fp8())
        pending = [buffer.start_gathering(self.shards) for buffer in self.buffers]
        if self._scales.numel():
            pending.append(self.shards.start_all_gather_in_place(self._scales))
        for gathering in pending:
            if gathering is not None:
                gathering.wait()

    def _parts_in_fp8(self) -> Iterator[MasterPart]:
        """Yield the masters of this rank's weights in FP8."""
        for segment, stored in zip(self.segments, self.stored, strict=True):
            if self._is_fp8(param := segment.param):
                (place,) = (b.view(param) for b in self.buffers if param in b.begins)
                yield MasterPart(param, 0, stored.values().flatten(), place.view(-1))

    @property
    def padding(self) -> float:
        """Return the padding of all weights, as a fraction of their elements."""
        held = [(b.flat.numel(), sum(p.numel() for p in b.begins)) for b in self.buffers]
        whole = sum(own for _, own in held)
        return sum(size - own for size, own in held) / max(whole, 1)
