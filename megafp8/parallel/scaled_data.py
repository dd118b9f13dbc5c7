"""Sum gradients in low precision over data-parallel replicas (FP8-LM, arXiv 2310.18313, 2.1).

Bytes are all that ranks exchange, so every backend that moves bytes will do. A bucket's gradients
lie in one flat tensor, of which each rank adds up one range; there are two ways to add:

    ExchangedBucket   in FP32, from each rank's own scales; the sum is quantized once
    Fp8SumBucket      in FP8, rounding after each rank, from a scale that the ranks share

With both all ranks have the same bytes and scales afterwards. Under FSDP `ScatteredGrads` adds up a
module's gradients as the first one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fp8_numerics.cast import amax_of
from megafp8.fp8.scaled import ScaledTensor, add_up, cast_stored, resize_memory, scales_for
from megafp8.fp8.scaling import Pending
from megafp8.fp8.stored_formats import STORAGE_FORMATS, StorageFormat
from megafp8.parallel.collectives import Axis, as_sendable
from megafp8.specs.division import Places, ScatteredRow

SATURATED = 1e-5
"""The fraction of values of the largest magnitude above which the factor is halved."""
GROWTH = 2.0 ** (1 / 1000)
"""The growth of the factor in a step: by 2 in 1,000 steps."""


@dataclass
class FlatGrads:
    """Hold gradients of several parameters in one flat tensor, and say which rank sums what.

    `scales` holds the gradients' `dequant_scale`, FP32 [gradients].

    With `sums` (ZeRO, stage 2) the memory of `flat` is there from a step's first gradient until the
    other ranks have theirs, and that of `sums`, this rank's range, from then to the next step.
    """

    places: Places
    params: Sequence[nn.Parameter]
    grads: Sequence[ScaledTensor]
    flat: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor | None = None

    @property
    def fmt(self) -> StorageFormat:
        """Return the format of all the gradients."""
        return self.grads[0].fmt

    def own_range(self, rank: int) -> torch.Tensor:
        """Return a view of what `rank`, which is this rank where there are `sums`, sums."""
        if self.sums is not None:
            return self.sums
        return self.flat[self.places.bounds[rank] : self.places.bounds[rank + 1]]

    def own_sums(self, rank: int) -> Iterator[tuple[int, ScaledTensor]]:
        """Yield the gradients that lie in the range of `rank`, as this rank has their sums.

        A gradient that lies whole in the range has its parameter's shape; another part is flat.
        """
        range_sums = self.own_range(rank)
        for index, place in self.places.owned_by(rank):
            grad, sums = self.grads[index], range_sums[place]
            if sums.numel() == grad.payload.numel():
                sums = sums.view(grad.payload.shape)
            yield index, ScaledTensor(sums, grad.dequant_scale, grad.fmt)

    def free_early(self, rank: int) -> None:
        """Keep the sums of `rank` apart, so that all other memory is freed once it was sent."""
        size = self.places.parts[rank]
        self.sums = torch.zeros(size, dtype=self.flat.dtype, device=self.flat.device)
        self.free()

    def begin_step(self) -> None:
        """Free the sums of the last step."""
        if self.sums is not None:
            resize_memory(self.sums, has_memory=False)

    def hold(self) -> None:
        """Allocate the memory of `flat`, if it was freed; its numbers are undefined."""
        if self.sums is not None:
            resize_memory(self.flat, has_memory=True)

    def hold_sums(self) -> None:
        """Allocate the memory of the sums, if they are apart and it was freed."""
        if self.sums is not None:
            resize_memory(self.sums, has_memory=True)

    def free(self) -> None:
        """Free the memory of `flat`, if the sums are apart."""
        if self.sums is not None:
            resize_memory(self.flat, has_memory=False)


def lay_out(places: Places, params: Sequence[nn.Parameter], fmt: StorageFormat) -> FlatGrads:
    """Return gradients of zero for `params`, which lie as `places` says."""
    device = params[0].device
    flat = torch.zeros(places.elements, dtype=fmt.dtype, device=device)
    scales = torch.ones(1 if fmt.max is None else len(params), device=device).expand(len(params))
    grads = [
        ScaledTensor(flat[begin : begin + param.numel()].view(param.shape), scale, fmt)
        for begin, param, scale in zip(places.begins, params, scales.unbind(), strict=True)
    ]
    return FlatGrads(places, params, grads, flat, scales)


class Exchange:
    """Send each rank, from all ranks, the numbers of its range of a bucket, round by round.

    The first round is under way at once; each other one starts when the one before was read.
    """

    def __init__(self, held: FlatGrads, sent: torch.Tensor, axis: Axis) -> None:
        """Start to send `sent`, flat numbers that lie as those of `held.flat` do."""
        self._sent, self._axis, self._rounds = sent, axis, held.places.rounds()
        self._begin = held.places.bounds[axis.rank]
        self._pending = self._start(0, None)

    def _start(self, number: int, memory: torch.Tensor | None) -> Pending:
        """Start the round `number`, of which the parts arrive in `memory` if that is given."""
        places = self._rounds[number]
        parts = [place.stop - place.start for place in places]
        sent = self._sent
        if sum(parts) < sent.numel():  # with several rounds: a message lies in one piece
            filled = [sent[place] for place, size in zip(places, parts, strict=True) if size]
            sent = filled[0] if len(filled) == 1 else torch.cat(filled)
        return self._axis.start_all_to_all(as_sendable(sent), parts, memory)

    def read(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what arrives, [ranks, elements], and where it begins in this rank's range.

        It must not be kept: the next round is written to the same memory.
        """
        memory = self._pending.tensor.view(-1)  # the first round is the largest
        for number, places in enumerate(self._rounds):
            if number:
                self._pending = self._start(number, memory)
            received = self._pending.wait().view(dtype)
            yield places[self._axis.rank].start - self._begin, received


@dataclass(eq=False)
class ExchangedBucket:
    """Sum a bucket in FP32 on the ranks that own its ranges.

    1. Each rank sends every other rank the numbers of that rank's range, and its scales. Where a
       rank owns more than an equal share it receives that in several rounds (`Exchange`).
    2. A rank adds up the values in its range, in the order of the ranks, and finds the amaxes.
    3. The ranks agree on the amaxes of gradients in several ranges; each rank quantizes its range.
    4. Each rank gathers all ranges. With `stays` this step is left out: a range is then valid on
       its owner alone (ZeRO). If gradients lie whole in ranges, so is the agreement of step 3.

    FP32 gradients go the same way, in FP32 or `dtype`, without scales.
    """

    held: FlatGrads
    stays: bool = False
    starts_early: bool = True  # False: gradients are complete at the end of a step alone
    num_gradients: int = 0
    _under_way: Iterator[None] | None = field(default=None)

    @property
    def params(self) -> frozenset[nn.Parameter]:
        return frozenset(self.held.params)

    @property
    def has_started(self) -> bool:
        return self._under_way is not None

    def start(self, axis: Axis, dtype: torch.dtype) -> None:
        self._under_way = self._stages(axis, dtype)
        next(self._under_way)

    def advance(self, axis: Axis) -> bool:
        """Take the next step, whose messages should have arrived; return whether there are more.

        All ranks call it at the same points of a step.
        """
        assert self._under_way is not None
        return next(self._under_way, "ended") != "ended"

    def finish(self, axis: Axis) -> None:
        while self.advance(axis):
            pass
        self._under_way = None

    def _stages(self, axis: Axis, dtype: torch.dtype) -> Iterator[None]:
        """Do the steps of the class; yield where the caller may compute while messages travel."""
        held, rank = self.held, axis.rank
        has_scale = held.fmt.max is not None
        fmt = held.fmt
        if not has_scale:
            fmt = next(each for each in STORAGE_FORMATS.values() if each.dtype == dtype)
        sent = held.flat if held.flat.dtype == fmt.dtype else held.flat.to(fmt.dtype)
        exchange = Exchange(held, sent, axis)
        del sent
        # Each rank's gradients have scales of their own, which the owner of a part needs to add up.
        all_scales = held.scales.repeat(axis.size, 1)
        gathering = None
        if has_scale:
            gathering = axis.start_all_gather_in_place(all_scales.view(-1))
        yield
        if gathering is not None:
            gathering.wait()
        if has_scale:
            total = torch.empty(held.places.parts[rank], device=held.flat.device)
        else:  # sums in FP32 are not quantized
            held.hold_sums()
            total = held.own_range(rank)
        amaxes = torch.zeros_like(held.scales)
        for begin, received in exchange.read(fmt.dtype):
            self._add_up(
                received, all_scales, fmt, begin + held.places.bounds[rank], total[begin:], amaxes
            )
        del exchange, received
        held.free()
        if has_scale:
            if not self.stays or held.places.is_split:
                # Several ranks need one scale: all read the sums, or own parts of one tensor.
                agreeing = axis.start_all_reduce_max(amaxes)
                yield
                amaxes = agreeing.wait()
            quant_scales, dequant_scales = scales_for(amaxes, held.fmt)
            held.hold_sums()
            own_sums = held.own_range(rank)
            for index, place in held.places.owned_by(rank):
                own_sums[place].copy_(cast_stored(total[place], quant_scales[index], held.fmt))
            held.scales.copy_(dequant_scales)
        if not self.stays:
            gathered = axis.start_all_gather_in_place(as_sendable(held.flat))
            yield
            gathered.wait()

    def _add_up(
        self,
        received: torch.Tensor,
        all_scales: torch.Tensor,
        fmt: StorageFormat,
        begin: int,
        total: torch.Tensor,
        amaxes: torch.Tensor,
    ) -> None:
        """Write the sums of `received` [ranks, n], from `begin` in the bucket on, into `total`.

        `all_scales` are the ranks', [ranks, gradients]. `amaxes` [gradients] are raised.
        """
        for index, place in self.held.places.between(begin, begin + received.shape[1]):
            parts = [
                ScaledTensor(numbers[place], scales[index], fmt)
                for numbers, scales in zip(received, all_scales, strict=True)
            ]
            amaxes[index] = torch.maximum(amaxes[index], add_up(parts, total[place]))


@dataclass(eq=False)
class Fp8SumBucket(ExchangedBucket):
    """Sum a bucket in FP8, as FP8-LM does.

    1. The ranks share the smallest of their scales of each gradient.
    2. Each rank quantizes its gradients again, with the shared scale times the factor.
    3. Each rank sends every other rank the bytes of that rank's range. A rank adds up its range
       in the order of the ranks, and rounds to FP8 after each; a sum beyond the largest number
       saturates.
    4. The ranks gather all ranges, and count the saturated values of each gradient.

    With `adapts` the factor of a gradient is halved for the next step if more than `SATURATED` of
    its values have the largest magnitude, and otherwise grows by `GROWTH`; it stays from 1/4N to 1
    for N ranks. With 1/N ranks of equal gradients reach what one of them did; above 1 a rank alone
    would saturate.
    """

    factors: torch.Tensor = field(default_factory=lambda: torch.ones(()))  # FP32 [gradients]
    adapts: bool = True

    def __post_init__(self) -> None:
        sizes = [float(grad.payload.numel()) for grad in self.held.grads]
        self._sizes = torch.tensor(sizes, device=self.held.flat.device)

    def _stages(self, axis: Axis, dtype: torch.dtype) -> Iterator[None]:
        held, rank = self.held, axis.rank
        fmt = held.fmt
        filled = torch.stack([_codes(grad.payload).any() for grad in held.grads])
        # The MAX over ranks treats NaN by the order of ranks; infinity stands for it on all.
        shared = held.scales.nan_to_num(nan=torch.inf, posinf=torch.inf) * filled
        sharing = axis.start_all_reduce_max(shared)  # a gradient of zeros has no scale to share
        yield
        shared = sharing.wait()
        shared = torch.where(shared > 0, shared, 1.0)
        factors = self.factors.clone()  # `adapts` changes them below, for the next step
        quant_scales = factors / shared
        for grad, quant_scale in zip(held.grads, quant_scales, strict=True):
            grad.payload.copy_(cast_stored(grad.values(), quant_scale, fmt))
        exchange = Exchange(held, held.flat, axis)
        yield
        held.hold_sums()
        sums = held.own_range(rank)
        saturated = torch.zeros_like(shared)
        for begin, received in exchange.read(fmt.dtype):
            self._add_rounded(received, begin + held.places.bounds[rank], sums[begin:], saturated)
        del exchange, received
        held.free()
        # A gradient may lie in the ranges of several ranks, and its factor is the same on all.
        counting = axis.start_all_reduce_sum(saturated)
        gathered = None
        if not self.stays:
            gathered = axis.start_all_gather_in_place(as_sendable(held.flat))
        yield
        counts = counting.wait()
        if gathered is not None:
            gathered.wait()
        # A gradient that is not finite on one rank is NaN on all.
        held.scales.copy_(torch.where(shared.isfinite(), shared / factors, torch.nan))
        if self.adapts:
            many = counts / self._sizes > SATURATED
            moved = torch.where(many, factors / 2, factors * GROWTH)
            self.factors.copy_(moved.clamp_(0.25 / axis.size, 1.0))

    def _add_rounded(
        self, received: torch.Tensor, begin: int, sums: torch.Tensor, saturated: torch.Tensor
    ) -> None:
        """Write the sums of `received` [ranks, n], from `begin` in the bucket on, into `sums`.

        They are rounded after each rank. `saturated` [gradients] counts the largest numbers.
        """
        fmt, unit_scale = self.held.fmt, torch.ones_like(saturated[0])
        for index, place in self.held.places.between(begin, begin + received.shape[1]):
            total = received[0, place]
            for numbers in received[1:]:
                pair = [ScaledTensor(x, unit_scale, fmt) for x in (total, numbers[place])]
                add_up(pair, values := torch.empty(total.shape, device=total.device))
                total = cast_stored(values, unit_scale, fmt)
            sums[place].copy_(total)
            saturated[index] += (_codes(total) == _code_of_max(fmt)).sum()


class ScatteredGrads:
    """Sum what FSDP reduce-scatters of a module, of which some gradients cross ranks in FP8.

    A rank has the same number of elements of each gradient, padded. It casts its own gradient with
    a scale of its own, and sends each rank that rank's elements as bytes, those of the rest in
    FP32, and the scales, all in one message (`ScatteredRow`). Each rank adds up its elements in
    FP32, in the order of the ranks. No scale is shared, since a sum is stored by its owner alone.
    """

    def __init__(self, sizes: Sequence[int], in_fp8: Sequence[bool], shards: Axis) -> None:
        """Take each gradient's elements on a rank, and whether it is sent in FP8, in order."""
        self.shards, self.elements = shards, sum(sizes)
        self.row = ScatteredRow.of(sizes, in_fp8)

    @torch.no_grad()
    def reduce(self, output: torch.Tensor, grads_by_owner: torch.Tensor) -> None:
        """Write the sums of this rank's elements into `output`, both flat FP32.

        `grads_by_owner` [ranks * elements] has this rank's gradients, in the order of their owners.
        """
        ranks, row, fmt = self.shards.size, self.row, STORAGE_FORMATS["fp8"]
        assert grads_by_owner.dtype == output.dtype == torch.float32, grads_by_owner.dtype
        assert grads_by_owner.numel() == ranks * self.elements, "a parameter has no gradient"
        grads = grads_by_owner.view(ranks, -1)
        sent = torch.zeros(ranks, row.num_bytes, dtype=torch.uint8, device=grads_by_owner.device)
        for place, at in row.plain:
            sent[:, at] = grads[:, place].contiguous().view(torch.uint8)
        scales = []
        for place, at in row.in_fp8:
            quant_scale, dequant_scale = scales_for(amax_of(grads[:, place]), fmt)
            sent[:, at] = cast_stored(grads[:, place], quant_scale, fmt).view(torch.uint8)
            scales.append(dequant_scale)
        sent[:, row.scales] = torch.stack(scales).view(torch.uint8)
        parts = [row.num_bytes] * ranks
        received = self.shards.start_all_to_all(sent.view(-1), parts).wait()
        of_ranks = received[:, row.scales].contiguous().view(torch.float32)
        unit_scale, fp32 = torch.ones((), device=grads_by_owner.device), STORAGE_FORMATS["fp32"]
        for place, at in row.plain:
            numbers = received[:, at].contiguous().view(torch.float32)
            add_up([ScaledTensor(x, unit_scale, fp32) for x in numbers], output[place])
        for index, (place, at) in enumerate(row.in_fp8):
            parts_and_scales = zip(received[:, at].view(fmt.dtype), of_ranks[:, index], strict=True)
            add_up([ScaledTensor(x, scale, fmt) for x, scale in parts_and_scales], output[place])


def _codes(payload: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes' codes of FP8 numbers, uint8."""
    return payload.view(torch.uint8) & 0x7F


def _code_of_max(fmt: StorageFormat) -> int:
    return 0x7E if fmt.name == "fp8" else 0x7B
