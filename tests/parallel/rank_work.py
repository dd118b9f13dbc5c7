"""What the ranks of the tests do; with one rank the same code is the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megafp8.fp8.scaling import ScaleTable
from megafp8.parallel.collectives import Axis
from megafp8.parallel.context import whole_logits
from megafp8.parallel.mesh import Mesh, join
from megafp8.specs import ParallelSpec
from megafp8.train.step import forward_backward, reduce_gradients, train_step
from megafp8.train.validate import evaluate
from tests.kit.cases import Case
from tests.kit.runs import Steps, train
from tests.kit.tensors import Piece, pieces, weights
from tests.ranks import Rank
from tests.tiny import SEQ


@dataclass
class Outcome(Steps):
    """What one rank saw of a case."""

    first_gradients: list[Piece]
    weights: list[Piece]
    sizes: dict[str, int]  # bytes by local parameter name
    names: dict[str, list[str]]  # the tensors of each table
    updates: dict[str, list[dict[str, torch.Tensor]]]  # tables after each, `staged` before it
    validation: tuple[float, int]
    logits: torch.Tensor


def run_case(case: Case, mesh: Mesh) -> Outcome:
    """Train; every update of the scaling tables is looked at."""
    gradients = case.build(mesh)
    forward_backward(gradients, case.microbatches(0, mesh))
    reduce_gradients(gradients)
    state = case.build(mesh)
    updates: dict[str, list[dict[str, torch.Tensor]]] = {}
    for direction, table in state.scaling.tables.items():
        watch(table, updates.setdefault(direction, []))
    steps = train(state, case)
    if case.backend == "te":  # its updates are its own: their result is compared
        for direction, table in state.scaling.tables.items():
            after = {name: tensor.clone() for name, tensor in table.tensors().items()}
            updates[direction].append({"staged": table.amax.clone(), **after})
    named = state.model.named_parameters()
    validation = evaluate(state, [case.microbatch(9000 + i, 0.0) for i in range(3)])
    state.model.eval()
    with torch.no_grad(), state.scaling.evaluation():
        # Blocks of tokens must be whole on each rank, in the recipes whose microbatches are larger.
        samples = torch.arange(SEQ).repeat(case.batch if case.batch > 2 else 1, 1)
        logits = whole_logits(state.model, samples, mesh.cp)
    return Outcome(
        **vars(steps),
        first_gradients=pieces(gradients, gradients.masters.stored_grads),
        weights=weights(state),
        sizes={name: param.numel() * param.element_size() for name, param in named},
        names={direction: table.names for direction, table in state.scaling.tables.items()},
        updates=updates,
        validation=validation,
        logits=logits,
    )


@dataclass
class Sums:
    """One rank's gradients of a step, and the operation and dtype of each message of its sums."""

    whole: list[Piece]
    rounds: list[list[Piece]]  # of each microbatch of a replica alone; of two for two stages
    of_axes: set[tuple[str, str, str]]  # while the passes run, by axis
    at_the_end: set[tuple[str, str, str]]


def sums_of(case: Case, mesh: Mesh) -> Sums:
    """Add up gradients once for all microbatches, and once for each, or as few as stages take."""
    state, batches = case.build(mesh), case.microbatches(0, mesh)
    messages = [set(mesh.traffic.num_calls)]

    def gradients(some: list[Any]) -> list[Piece]:
        mesh.traffic.num_calls.clear()
        forward_backward(state, some)
        messages.append(set(mesh.traffic.num_calls))
        mesh.traffic.num_calls.clear()
        reduce_gradients(state)
        messages.append(set(mesh.traffic.num_calls))
        return pieces(state, state.masters.stored_grads)

    whole = gradients(batches)
    _, of_axes, at_the_end = messages
    fewest = case.parallel.pp
    rounds = [batches[first : first + fewest] for first in range(0, len(batches), fewest)]
    return Sums(whole, [gradients(some) for some in rounds], of_axes, at_the_end)


def first_update(case: Case, mesh: Mesh) -> tuple[float, list[Piece]]:
    """The norm of the first step, and the gradients that its update was given, clipped."""
    state = case.build(mesh)
    norm = train_step(state, case.microbatches(0, mesh)).grad_norm
    return norm, pieces(state, state.masters.stored_grads)


def watch(table: ScaleTable, updates: list[dict[str, torch.Tensor]]) -> None:
    """Note the amaxes staged before each update and the table after it."""
    update = table.update

    def noted(*args: Any, **kwargs: Any) -> None:
        staged = table.amax.clone()
        update(*args, **kwargs)
        after = {name: tensor.clone() for name, tensor in table.tensors().items()}
        updates.append({"staged": staged, **after})

    table.update = noted  # type: ignore[method-assign]


def fail_on_rank_1(rank: Rank) -> None:
    """The others wait for it."""
    join(ParallelSpec(devices_per_node=rank.size, tp=rank.size))
    if rank.index == 1:
        raise ValueError("the number is 42")
    dist.barrier()


def members(rank: Rank, spec: ParallelSpec) -> dict[str, tuple[int, int, list[int]]]:
    """Size, own place and the global ranks of every axis, by a reduction over it."""
    mesh = join(spec)
    found = {}
    for name, axis in vars(mesh).items():
        if isinstance(axis, Axis):
            present = torch.zeros(rank.size)
            present[rank.index] = 1
            axis.all_reduce_sum(present)
            found[name] = (axis.size, axis.rank, present.nonzero().flatten().tolist())
    return found
