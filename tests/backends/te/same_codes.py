"""Two engines side by side with the same FP8 codes, so that no rounding falls the other way.

The engines add up in different orders, so that their numbers differ by FP32's roundings. Where one
of them lies at a tie between two numbers of FP8, one engine rounds it up and the other down: that
moves a loss by 1e-6 to 1e-5 and an amax by some percent, on some CPUs and not on others. Therefore
the second run takes its codes from the first. Each of its casts looks for the cast of these numbers
there, which must be as near as roundings are and have the same scale. All that follows then differs
by roundings alone, on any CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch

from fp8_numerics import cast
from fp8_numerics.cast import Quantized
from megafp8.data.loader import Microbatch
from megafp8.fp8 import quantizer, weights
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.tiny import microbatch

Result = TypeVar("Result")


@dataclass(frozen=True)
class Bounds:
    """Relative distances of losses, of gradient norms, and of scales and histories.

    That of `numbers` that are cast is relative to the largest of the tensor; `codes` is the share
    of codes that are others before the second run takes the first one's.
    """

    losses: float
    norms: float
    tables: float
    numbers: float = 0.0
    codes: float = 0.0

    def check(self, one: Run, other: Run) -> None:
        """Assert that two runs are within the bounds."""
        found = distances(one, other)
        assert found.losses <= self.losses, (found, self)
        assert found.norms <= self.norms, (found, self)
        assert found.tables <= self.tables, (found, self)


IN_FP32 = Bounds(losses=1e-5, norms=1e-5, tables=1e-3, numbers=1e-3, codes=2.0**-5)
"""Some fifty times what ten steps had on CPUs with SSE2, AVX2 and AVX-512: sums and means of
thousands of FP32's roundings, and single numbers that are small sums of large ones."""
IN_BF16 = Bounds(losses=2.0**-11, norms=2.0**-6, tables=2.0**-4, numbers=2.0**-3, codes=2.0**-2)
"""The same for BF16's roundings of 2^-9, which add up over layers and steps as random ones do."""
OF_A_FLIP = Bounds(losses=1e-4, norms=1e-2, tables=2.0**-2)
"""Of the first step of runs with codes of their own. One code of a step at its neighbour moved a
loss by up to 2e-5, a norm by 2e-3 and an amax by 5e-2, of 120 to 240 codes in each recipe."""
OF_A_FLIP_IN_FP4 = Bounds(losses=1e-3, norms=2e-2, tables=2.0**-2)
"""The same with steps of E2M1, which moved a loss by 3e-4 and a norm by 4e-3."""


@dataclass(frozen=True)
class Run:
    """What a run saw: loss and norm of each step, and the tables of scales after the last."""

    losses: list[float]
    norms: list[float]
    tables: dict[str, torch.Tensor]


@dataclass
class Casts:
    """The numbers, the scale and the codes of each cast of a run, by format and shape."""

    made: dict[Any, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = field(
        default_factory=dict
    )
    total: int = 0
    other_codes: int = 0  # of the second run, before it took those of the first

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note the casts of a run."""

        def noted(x: torch.Tensor, scale: torch.Tensor, fmt: Any, **more: Any) -> Quantized:
            made = exact(x, scale, fmt, **more)
            numbers = x.detach().clone().flatten()
            self.made.setdefault(_key(x, fmt), []).append((numbers, scale.clone(), made.payload))
            return made

        exact = cast.quantize
        with _casting_by(noted):
            yield

    @contextmanager
    def followed(self, bounds: Bounds) -> Iterator[None]:
        """Let the casts of another run return the codes of this one; it makes as many."""

        def found(x: torch.Tensor, scale: torch.Tensor, fmt: Any, **more: Any) -> Quantized:
            own, numbers = exact(x, scale, fmt, **more).payload, x.detach().flatten()
            rest = self.made[_key(x, fmt)]
            apart = [float((numbers - other).abs().max()) for other, _, _ in rest[:LATER]]
            nearest = apart.index(min(apart))
            others, other_scale, codes = rest.pop(nearest)
            assert apart[nearest] <= bounds.numbers * others.abs().max(), (apart, x.shape)
            assert scale.item() == pytest.approx(other_scale.item(), rel=bounds.tables)
            codes = codes.view(own.shape)
            self.total += own.numel()
            self.other_codes += int((own.view(torch.uint8) != codes.view(torch.uint8)).sum())
            grid = more["grid_dtype"]
            return Quantized(codes, None if grid is None else codes.to(grid))

        exact = cast.quantize
        with _casting_by(found):
            yield
        assert not any(self.made.values()), "the first run has made more casts"


LATER = 4
"""A cast is among the next few of its shape: engines have other orders in a layer."""


def _key(x: torch.Tensor, fmt: Any) -> tuple[str, int, int]:
    return fmt.name, x.numel(), x.shape[-1]


@contextmanager
def _casting_by(function: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (cast, quantizer, weights):
            patch.setattr(module, "quantize", function)
        yield


def with_same_codes(
    one: Callable[[], Result], other: Callable[[], Result], bounds: Bounds
) -> tuple[Result, Result]:
    """Return the results of both; `other` casts to the codes of `one`.

    Its own codes are these, too, but for the few at a tie.
    """
    casts = Casts()
    with casts.recorded():
        first = one()
    with casts.followed(bounds):
        second = other()
    assert casts.total > 0 and casts.other_codes <= bounds.codes * casts.total
    return first, second


def batches(number: int) -> list[Microbatch]:
    """Two microbatches, as `real.step` has them: an update of scales is in between."""
    return [microbatch(2 * number + index) for index in range(2)]


def run(state: TrainState, steps: int) -> Run:
    """Train, with the microbatches of `batches`."""
    results = []
    for number in range(steps):
        results.append(train_step(state, batches(number)))
        state.step += 1
    tables = {
        f"{direction}/{name}": tensor.clone()
        for direction, table in state.scaling.tables.items()
        for name, tensor in table.tensors().items()
    }
    return Run([one.loss for one in results], [one.grad_norm for one in results], tables)


def check_together(one: TrainState, other: TrainState, steps: int, bounds: Bounds) -> None:
    """Train both with the codes of the first; assert that they stay within the bounds."""
    first, second = with_same_codes(lambda: run(one, steps), lambda: run(other, steps), bounds)
    bounds.check(first, second)
    assert not first.tables or first.tables.keys() == second.tables.keys()


def distances(one: Run, other: Run) -> Bounds:
    """Return the largest relative distances of two runs, of tables that both have."""
    names = one.tables.keys() & other.tables.keys()
    tables = [_distance(one.tables[name].double(), other.tables[name].double()) for name in names]
    pairs = (one.losses, other.losses), (one.norms, other.norms)
    losses, norms = (_distance(*(torch.tensor(n).double() for n in pair)) for pair in pairs)
    return Bounds(losses, norms, max(tables, default=0.0))


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    apart = (one - other).abs() / other.abs().clamp(min=1e-30)
    return float(apart.max()) if apart.numel() else 0.0
