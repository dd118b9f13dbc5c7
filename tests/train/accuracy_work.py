"""Measure the squares of gradients and noise of a step, on any number of ranks."""

from __future__ import annotations

from megafp8.parallel.agreement import gather
from megafp8.parallel.mesh import join
from megafp8.train.build import build
from megafp8.train.report.accuracy import AccuracyCheck
from megafp8.train.step import train_step
from tests.ranks import Rank
from tests.tiny import microbatch
from tests.train.precision_schedule_work import spec_of


def squares_of_a_step(rank: Rank, settings: list[str]) -> dict[str, tuple[float, float]]:
    """Return the sums over the ranks, after one step of two microbatches."""
    spec = spec_of(*settings, f"trainer.devices={rank.size}")
    state = build(spec, join(spec.parallel))
    check = AccuracyCheck(state, measures=True)
    dp = state.mesh.dp
    batches = [microbatch(n, 4) for n in range(dp.rank, 2, dp.size)]
    result = train_step(state, batches, more=check.begin())
    parts = gather(state.mesh, check.squares(result.more))
    return {
        name: tuple(sum(part[name][n] for part in parts if name in part) for n in (0, 1))
        for name in dict.fromkeys(name for part in parts for name in part)
    }
