"""Measure on ranks what a step sends and what the state holds, for the tests of `plan`."""

from __future__ import annotations

from typing import NamedTuple

from megafp8.parallel.mesh import join
from megafp8.train.dryrun import held_bytes
from megafp8.train.step import train_step
from tests.kit.cases import Case
from tests.ranks import Rank


class Measured(NamedTuple):
    """What one rank did in the second step of a case."""

    sent: dict[tuple[str, str, str], int]  # bytes by axis, operation and dtype
    held: int  # bytes of the state


def measure(rank: Rank, cases: dict[str, Case]) -> dict[str, Measured]:
    """Return what this rank sent and holds; all cases have one number of ranks."""
    return {name: second_step(case) for name, case in cases.items()}


def second_step(case: Case) -> Measured:
    mesh = join(case.parallel)
    state = case.build(mesh)
    train_step(state, case.microbatches(0, mesh))
    before = dict(mesh.traffic.num_bytes)
    train_step(state, case.microbatches(1, mesh))
    after = mesh.traffic.num_bytes
    sent = {key: n - before.get(key, 0) for key, n in after.items() if n > before.get(key, 0)}
    return Measured(sent, held_bytes(state).total)
