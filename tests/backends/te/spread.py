"""How far our engine's runs move from a rounding, which bounds how far Transformer Engine's may.

The two engines add up in different orders and round at different places, so that a rounding to FP8
may fall the other way. So it does in a run of ours whose embeddings differ by one rounding step in
a random half of their elements. The bounds are three times the largest distance of five such runs,
as those of the layouts of ranks (`tests/parallel/matrix.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megafp8.data.loader import Microbatch
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.parallel.rank_work import perturb
from tests.tiny import microbatch

PERTURBATIONS = 5
TIMES = 3


@dataclass(frozen=True)
class Run:
    """What a run saw: loss and norm of each step, and the tables of scales after the last."""

    losses: list[float]
    norms: list[float]
    tables: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Bounds:
    """Relative distances of losses, of gradient norms, and of scales and histories."""

    losses: float
    norms: float
    tables: float

    def check(self, one: Run, other: Run) -> None:
        """Assert that two runs are within the bounds."""
        found = distances(one, other)
        assert found.losses <= self.losses, (found, self)
        assert found.norms <= self.norms, (found, self)
        assert found.tables <= self.tables, (found, self)


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


def bounds_of(make: Callable[[], TrainState], steps: int) -> Bounds:
    """Return the bounds of a run of our engine, which `make` builds."""
    one, found = run(make(), steps), []
    for seed in range(PERTURBATIONS):
        state = make()
        perturb(state, seed)
        found.append(distances(run(state, steps), one))
    return Bounds(
        TIMES * max(each.losses for each in found),
        TIMES * max(each.norms for each in found),
        TIMES * max(each.tables for each in found),
    )


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
