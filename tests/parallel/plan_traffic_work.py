"""Measure on ranks what a step sends, for the tests of `plan/traffic.py`."""

from __future__ import annotations

from megafp8.parallel.mesh import join
from megafp8.train.step import train_step
from tests.parallel.rank_work import Case
from tests.ranks import Rank

Sent = dict[tuple[str, str, str], int]


def measure(rank: Rank, cases: dict[str, Case]) -> dict[str, Sent]:
    """Return the bytes that this rank hands to collectives in the second step of each case.

    All cases have one number of ranks.
    """
    return {name: second_step(case) for name, case in cases.items()}


def second_step(case: Case) -> Sent:
    """Return the bytes by axis, operation and dtype."""
    mesh = join(case.parallel)
    state = case.build(mesh)
    train_step(state, case.microbatches(0, mesh))
    before = dict(mesh.traffic.num_bytes)
    train_step(state, case.microbatches(1, mesh))
    after = mesh.traffic.num_bytes
    return {key: n - before.get(key, 0) for key, n in after.items() if n > before.get(key, 0)}
