"""Measure what FP8 does to each tensor of a step: how large it is, and what it loses.

A probe works in single steps only. `HealthProbe` sees each cast, with extra passes over tensors.
`UpdateProbe` has the same numbers of delayed scaling from the updates of its tables, for one small
copy an update.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fp8_numerics.cast import Fp8Tensor, amax_of
from megafp8.fp8.scaling import Direction, ScaleTable, ScalingState
from megafp8.specs.precision import Fp8Recipe
from megafp8.specs.recipes import traits_of
from megafp8.specs.run import HealthMode, TensorHealth


@dataclass
class _Sums:
    """Running totals of one tensor over a step's microbatches, 0-d tensors on its device."""

    amax: torch.Tensor
    quant_scale: torch.Tensor  # the smallest one
    nonzero: torch.Tensor
    underflow: torch.Tensor
    elements: int
    overflow: torch.Tensor
    noise: torch.Tensor  # of `noise_in_products`, the largest

    def on_device(self) -> tuple[torch.Tensor, ...]:
        """Return the totals that the host does not know."""
        known = (self.amax, self.quant_scale, self.nonzero, self.underflow)
        return (*known, self.overflow, self.noise)


class HealthProbe:
    """Measure tensors while it is attached; `full` also compares each with its FP8 values.

    Casts that leave no trace in the scales (evaluations, recomputations) are left out, unless
    `with_untraced` asks for them.
    """

    def __init__(
        self, state: ScalingState, mode: HealthMode, *, with_untraced: bool = False
    ) -> None:
        self._state, self._mode, self._with_untraced = state, mode, with_untraced
        self._sums: dict[str, _Sums] = {}

    def attach(self) -> None:
        """Start to measure."""
        self._sums.clear()
        self._state.observers.append(self._see)

    def detach(self) -> dict[str, TensorHealth]:
        """Stop measuring, and return the health of each tensor seen since `attach`.

        This waits for the device, once.
        """
        self._state.observers.remove(self._see)
        names, sums = list(self._sums), list(self._sums.values())
        self._sums = {}
        if not names:
            return {}
        # As FP64 all of them are exact, so that one copy can bring counts and amaxes.
        columns = zip(*(each.on_device() for each in sums), strict=True)
        table = torch.stack([torch.stack(column).double() for column in columns]).tolist()
        rows = zip(names, sums, zip(*table, strict=True), strict=True)
        return {name: self._health(each.elements, *row) for name, each, row in rows}

    @torch.no_grad()
    def _see(
        self, name: str, x: torch.Tensor, last: Fp8Tensor | None, first: Fp8Tensor | None
    ) -> None:
        """Add a cast of the tensor `name` to its sums; `last` and `first` are what it gave."""
        x_fp8 = last if last is not None else first
        if x_fp8 is not None and x_fp8.rotation is not None:
            return  # its numbers are not those of the tensor itself
        is_counted = self._state.recording or self._with_untraced
        if x_fp8 is None or x.numel() == 0 or not is_counted:
            return
        zero = torch.zeros((), dtype=torch.float32, device=x.device)
        largest = x_fp8.dequant_scale.amax()
        largest = largest if x_fp8.outer is None else largest * x_fp8.outer
        new = _Sums(amax_of(x), largest.reciprocal(), zero, zero, x.numel(), zero, zero)
        if self._mode == "full":
            wide, scale = x.float(), x_fp8.scale_over(x.shape)
            numbers = x_fp8.numbers(torch.float32)
            new.nonzero = wide.count_nonzero()
            new.underflow = new.nonzero - numbers.count_nonzero()  # zero stays zero
            new.overflow = (wide.abs() > x_fp8.fmt.max * scale).sum()
            new.noise = noise_in_products(wide, numbers * scale)
        self._sums[name] = _joined(self._sums[name], new) if name in self._sums else new

    def _health(
        self,
        elements: int,
        amax: float,
        quant_scale: float,
        nonzero: float,
        underflow: float,
        overflow: float,
        noise: float,
    ) -> TensorHealth:
        """Return the health of a tensor that was cast, of its sums as numbers of the host."""
        if self._mode != "full":
            return TensorHealth(amax=amax, quant_scale=quant_scale)
        return TensorHealth(
            amax=amax,
            quant_scale=quant_scale,
            underflow=underflow / max(1.0, nonzero),
            overflow=overflow / max(1.0, float(elements)),
            snr_db=-_decibel(noise),
        )


class UpdateProbe:
    """Measure `scales` of delayed scaling, in the updates of its tables.

    The numbers are those of a `HealthProbe`, without a pass over any tensor: an update has the
    amaxes of a microbatch's casts, and the scales that they used. A tensor of which no update has
    an amax was zero, or had no rows, which a `HealthProbe` leaves out. A weight that is kept in FP8
    counts with the step that reads it.
    """

    def __init__(self, state: ScalingState) -> None:
        self._state = state

    def attach(self) -> None:
        """Start to measure."""
        for table in self._state.tables.values():  # after the update under way
            table.updates = []

    def detach(self) -> None:
        """Stop measuring, and forget what was measured."""
        for table in (self._state.forward, self._state.backward):
            table.updates = None

    @torch.no_grad()
    def numbers(self) -> torch.Tensor:
        """Stop measuring, and return the numbers for `measures`, FP64 [4 x tensors], on the device.

        For each table they are the tensors' amaxes, scales, and counts of updates and of those that
        were not finite. The host does not wait for them.
        """
        numbers = [torch.zeros(0, dtype=torch.float64, device=self._state.forward.amax.device)]
        for table in self._named_tables():
            assert table.updates, f"no update of {table.names[0]} since `attach`"
            amaxes, scales = (torch.stack(part) for part in zip(*table.updates, strict=True))
            is_cast = amaxes != 0  # a weight is cast in one microbatch of a step
            is_cast |= ~is_cast.any(0)
            # the largest factor is the worst, as a `HealthProbe` has it, which sees the factors
            worst = torch.where(is_cast, scales.reciprocal(), 0.0).amax(0)
            numbers += [amaxes.amax(0).double(), worst.reciprocal().double()]
            numbers += [table.num_updates.double(), table.num_nonfinite.double()]
        self.detach()
        return torch.cat(numbers)

    def measures(self, numbers: Sequence[float]) -> tuple[dict[str, TensorHealth], dict[str, int]]:
        """Return the health of all tensors, and how many non-finite updates the tensors have met.

        `numbers` are the values of `numbers()`. Counts are since the run began, without zeros. A
        tensor that has never had an amax is left out: its linear does not cast it.
        """
        health: dict[str, TensorHealth] = {}
        counts: dict[str, int] = {}
        for name, amax, scale, updates, count in self._rows(numbers):
            if amax or updates:
                health[name] = TensorHealth(amax=amax, quant_scale=scale)
            if count:
                counts[name] = int(count)
        return health, counts

    def num_updates(self, numbers: Sequence[float]) -> dict[str, int]:
        """Return how many updates each tensor has had since the run began, of `numbers()`."""
        return {name: int(updates) for name, _, _, updates, _ in self._rows(numbers)}

    def _rows(self, numbers: Sequence[float]) -> Iterator[tuple[str, float, float, float, float]]:
        """Yield each tensor's name and its four numbers, in the order of `numbers`."""
        begin = 0
        for table in self._named_tables():
            size = len(table.names)
            columns = (numbers[begin + i * size : begin + (i + 1) * size] for i in range(4))
            yield from zip(table.names, *columns, strict=True)
            begin += 4 * size

    def _named_tables(self) -> list[ScaleTable]:
        return [table for table in self._state.tables.values() if table.names]


class TableProbe:
    """Measure `scales` from the tables of another program, which has made the updates itself.

    The amax is the largest of the updates since `attach`, as many of them as the history holds; the
    scale is the smaller one of before and after.
    """

    def __init__(self, state: ScalingState) -> None:
        self._state = state
        self._before: dict[Direction, tuple[torch.Tensor, torch.Tensor]] = {}

    def attach(self) -> None:
        """Remember the present scales and counts of updates."""
        self._before = {
            direction: (table.quant_scale.clone(), table.num_updates.clone())
            for direction, table in self._state.tables.items()
        }

    def detach(self) -> dict[str, TensorHealth]:
        """Return the health of each tensor that was updated since `attach`.

        This waits for the device, once for each kind of a table's tensors.
        """
        health: dict[str, TensorHealth] = {}
        for direction, table in self._state.tables.items():
            old_scales, old_updates = (x.cpu() for x in self._before[direction])
            scales, history = table.quant_scale.cpu(), table.history.cpu()
            num_updates = (table.num_updates.cpu() - old_updates).tolist()
            for index, (name, num_new) in enumerate(zip(table.names, num_updates, strict=True)):
                if num_new <= 0:  # below zero once the state has gone back to a checkpoint
                    continue
                scale = scales[index]
                recent = history[index, -num_new:]
                if recent.numel() == 0:  # a history of one update is kept in its scale alone
                    recent = table.fmt.max * 2.0**-self._state.recipe.margin / scale[None]
                smallest = torch.minimum(old_scales[index], scale)
                health[name] = TensorHealth(amax=recent.max().item(), quant_scale=smallest.item())
        self._before = {}
        return health


def num_nonfinite(state: ScalingState) -> dict[str, int]:
    """Return how many updates of each tensor met a NaN or an infinity since the run began.

    Tensors without such an update are left out.
    """
    counts: dict[str, int] = defaultdict(int)
    for table in state.tables.values():
        for name, count in zip(table.names, table.num_nonfinite.tolist(), strict=True):
            counts[name] += count
    return {name: count for name, count in counts.items() if count}


def num_updates(state: ScalingState) -> dict[str, int]:
    """Return how many updates each tensor of the tables has had since the run began."""
    return {
        name: count
        for table in state.tables.values()
        for name, count in zip(table.names, table.num_updates.tolist(), strict=True)
    }


def _joined(old: _Sums, new: _Sums) -> _Sums:
    """Return the counts and extremes of two casts of one tensor together."""
    return _Sums(
        torch.maximum(old.amax, new.amax),
        torch.minimum(old.quant_scale, new.quant_scale),
        old.nonzero + new.nonzero,
        old.underflow + new.underflow,
        old.elements + new.elements,
        old.overflow + new.overflow,
        torch.maximum(old.noise, new.noise),
    )


def noise_in_products(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return what a cast adds to the products of a tensor, as noise over signal: the harm of FP8.

    This is the one measure by which tensors are compared; everything shown of it is in decibel.
    A row of the one product that reads the tensor has in the mean the relative error of a row of
    the tensor, and a row of the other product that of a column (the other operand knows nothing of
    the error). So the squares of the errors of each row are divided by those of its values, and
    averaged over the rows, each counted alike; so are those of the columns; the larger mean counts.
    A value that became zero or was clipped is an error as any other. Rows and columns count alike
    because a norm scales each token, and Adam each weight, by its own size: beside one channel that
    is far larger than the others, the sum over the whole tensor would see that channel alone.

    Args:
        x: The tensor, FP32 [..., k].
        values: The values of its cast, of the same shape.

    Returns:
        The mean of |error|^2 / |x|^2, a 0-d tensor; 0 for a tensor of zeros. Rows and columns of
        zeros do not count, nor values below 1e-19 of the largest, whose squares FP32 does not have.
    """
    x, values = x.reshape(-1, x.shape[-1]), values.reshape(-1, x.shape[-1])
    peak = x.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    signal, noise = (x / peak).square_(), (x - values).div_(peak).square_()
    means = []
    for dim in (0, 1):
        of_slice = signal.sum(dim)
        is_counted = of_slice != 0
        ratios = torch.where(is_counted, noise.sum(dim) / of_slice, 0.0)
        means.append(ratios.sum() / is_counted.sum().clamp_min(1))
    return torch.maximum(*means)


def _decibel(ratio: float) -> float:
    if math.isnan(ratio):
        return math.inf
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf


def normally_saturated(recipe: Fp8Recipe, tensor: str) -> float:
    """Return which fraction of the values of `linear.role` its recipe may saturate in health."""
    traits = traits_of(recipe.precision_of(tensor.rpartition(".")[0]))
    return 0.0 if traits is None else traits.max_saturated
