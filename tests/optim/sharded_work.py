"""What the ranks of the tests of a sharded optimizer do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megafp8.parallel.mesh import Mesh
from megafp8.train.report.header import StateBytes, state_bytes
from megafp8.train.validate import evaluate
from tests.kit.cases import Case
from tests.kit.runs import Steps, train
from tests.kit.tensors import Piece, Tables, saved, tables, weight_bytes
from tests.tiny import microbatch


@dataclass
class Run(Steps):
    """What one rank has after some steps."""

    weights: dict[str, torch.Tensor]  # compute weights as bytes, by local parameter name
    saved: list[Piece]  # what a checkpoint gets from this rank
    tables: Tables
    held: StateBytes
    validation: tuple[float, int]
    buckets: list[tuple[int, list[int]]]  # padded length, elements of each parameter


def run(case: Case, mesh: Mesh) -> Run:
    state = case.build(mesh)
    steps = train(state, case)
    buffers = getattr(state.masters, "buffers", [])  # FSDP has none
    return Run(
        **vars(steps),
        validation=evaluate(state, [microbatch(9000 + i) for i in range(3)]),
        weights=weight_bytes(state),
        saved=saved(state),
        tables=tables(state),
        held=state_bytes(state),
        buckets=[(b.flat.numel(), [p.numel() for p in b.index_of]) for b in buffers],
    )


@dataclass
class Loaded:
    """A state after its steps or after loading, and the losses of its next steps."""

    saved: list[Piece]
    weights: dict[str, torch.Tensor]
    tables: Tables
    next_losses: list[float]


def continued(case: Case, mesh: Mesh) -> Loaded:
    state = case.build(mesh)
    assert all(result.is_finite for result in train(state, case).results)
    before = saved(state), weight_bytes(state), tables(state)
    return Loaded(*before, train(state, replace(case, saves=None), 3).losses)
