"""Do something with described cases, on ranks or in this process, and return what each rank saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from megafp8.parallel.mesh import Mesh, join
from megafp8.specs import ParallelSpec
from megafp8.train.nonfinite import first_nonfinite
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import StepResult, train_step
from tests.kit.cases import Case, spoil_gradient
from tests.kit.faults import planted
from tests.ranks import Rank, run_ranks

T = TypeVar("T")
Traffic = dict[tuple[str, str, str], int]
"""Bytes, or numbers of messages, by axis, operation and dtype."""


@dataclass
class Steps:
    """What a rank saw of some steps."""

    results: list[StepResult]
    traffic: Traffic  # the bytes of the last step
    named: str | None  # the first tensor that was not finite in the spoiled step

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]

    @property
    def norms(self) -> list[float]:
        return [result.grad_norm for result in self.results]


def train(state: TrainState, case: Case, steps: int | None = None) -> Steps:
    """Train on the text of a case, from the step on at which the state is; save it if asked to."""
    mesh, seen = state.mesh, Steps([], {}, None)
    for _ in range(case.steps if steps is None else steps):
        batches, before = case.microbatches(state.step, mesh), dict(mesh.traffic.num_bytes)
        hook = None
        if state.step == case.spoiled and mesh.data.rank == 1:
            model: Any = state.model
            hook = model.layers[0].register_forward_hook(spoil_gradient)
        seen.results.append(train_step(state, batches))
        if hook is not None:
            hook.remove()
        if state.step == case.spoiled:
            seen.named = first_nonfinite(state, batches)
        after = mesh.traffic.num_bytes
        seen.traffic = {k: n - before.get(k, 0) for k, n in after.items() if n > before.get(k, 0)}
        state.step += 1
    if case.saves is not None:
        Saver(case.saves, keep=1, meta={}).save(state)
    return seen


def each_case(
    rank: Rank, work: Callable[..., T], cases: Mapping[str, Case], **more: Any
) -> dict[str, T]:
    """Do `work(case, mesh)` with every case, on the mesh that it names; equal ones are made once.

    A rank's function for `run_ranks`.
    """
    meshes: dict[tuple[int, ...], Mesh] = {}
    found, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have: sums have the same order
    for name, case in cases.items():
        spec = replace(case.parallel, devices_per_node=rank.size // case.parallel.num_nodes)
        sizes = (spec.tp, spec.cp, spec.pp, spec.ep, spec.num_nodes, spec.tp_only_amax_red)
        if sizes not in meshes:
            meshes[sizes] = join(spec)
        with planted(*case.faults, rank=rank.index):
            found[name] = work(replace(case, parallel=spec), meshes[sizes], **more)
    torch.set_num_threads(threads)
    return found


def on_ranks(
    work: Callable[..., T], cases: Mapping[str, Case], size: int, **more: Any
) -> dict[str, list[T]]:
    """Do `work(case, mesh)` with every case on `size` ranks; return the results by case and rank.

    `work` and `more` are pickled: `work` is a function of a module. Results may have tensors, but
    none in FP8.
    """
    ranks = run_ranks(each_case, size, {"work": work, "cases": cases, **more})
    return {name: [rank[name] for rank in ranks] for name in cases}


def alone(work: Callable[..., T], cases: Mapping[str, Case], **more: Any) -> dict[str, T]:
    """Do `work` with the same cases in this process, undivided."""
    whole = {name: replace(case, parallel=ParallelSpec()) for name, case in cases.items()}
    return each_case(Rank(0, 1), work, whole, **more)


def on_mesh(
    work: Callable[..., T], size: int, parallel: ParallelSpec | None = None, **more: Any
) -> list[T]:
    """Do `work(mesh)` on the mesh of `size` ranks, and return the results by rank."""
    given = {"work": work, "parallel": parallel or ParallelSpec(), "more": more}
    return run_ranks(_in_mesh, size, given)


def _in_mesh(
    rank: Rank, work: Callable[..., T], parallel: ParallelSpec, more: Mapping[str, Any]
) -> T:
    return work(join(replace(parallel, devices_per_node=rank.size // parallel.num_nodes)), **more)
