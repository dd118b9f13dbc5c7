"""Runs on ranks of their own whose layers are Transformer Engine's, on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megafp8.parallel.mesh import Mesh, join
from megafp8.specs import Fp8Recipe, ParallelSpec
from megafp8.train.state import TrainState
from tests.ranks import Rank


@dataclass
class Found:
    """Of one engine: (loss, gradient norm) of each step, tables after the first, FLOPs counted, the
    sizes of the groups over which Transformer Engine took a MAX in the first step."""

    results: list[tuple[float, float]] = field(default_factory=list)
    tables: dict[str, Any] = field(default_factory=dict)
    flops: dict[Any, int] = field(default_factory=dict)
    maxima: list[int] = field(default_factory=list)


def train(rank: Rank, tp: int, steps: int) -> dict[str, dict[str, Found]]:
    """By what is run, by engine. Sequence parallelism needs no other mesh."""
    mesh = join(ParallelSpec(devices_per_node=rank.size, tp=tp))
    from tests.backends.te.real import DELAYED

    found = {"delayed": _engines(mesh, rank, DELAYED, tp, False, steps)}
    if tp == 1:
        own = join(ParallelSpec(devices_per_node=rank.size, tp_only_amax_red=True))
        found["own amaxes"] = _engines(own, rank, DELAYED, tp, False, steps)
    else:
        found["sequence parallel"] = _engines(mesh, rank, DELAYED, tp, True, steps)
        tensorwise = Fp8Recipe(name="tensorwise")
        found["tensorwise"] = _engines(mesh, rank, tensorwise, tp, False, steps)
    return found


def _engines(
    mesh: Mesh, rank: Rank, recipe: Fp8Recipe, tp: int, sequence_parallel: bool, steps: int
) -> dict[str, Found]:
    from tests.backends.te.real import run_of, te

    parallel = ParallelSpec(devices_per_node=rank.size, tp=tp, sequence_parallel=sequence_parallel)
    found = {}
    for backend in ("te", "native"):
        te.module.base.FP8GlobalStateManager.reset()
        state = run_of(backend, recipe, "fp32", parallel, mesh=mesh)
        found[backend] = _train(state, mesh, recipe, steps)
    return found


def _train(state: TrainState, mesh: Mesh, recipe: Fp8Recipe, steps: int) -> Found:
    from tests.backends.te.real import step, tables_of

    found = Found()
    with counted_maxima(found.maxima):
        for number in range(steps):
            one = step(state, number, replica=mesh.dp.rank, replicas=mesh.dp.size)
            found.results.append((one.loss, one.grad_norm))
            if number == 0 and recipe.name == "delayed":
                found.tables, maxima = tables_of(state), list(found.maxima)
    found.flops = dict(state.counter.flops)
    found.maxima = maxima if found.tables else []
    return found


@contextmanager
def counted_maxima(sizes: list[int]) -> Iterator[None]:
    """The size of the group of each MAX that Transformer Engine's code asks for."""
    run = dist.all_reduce

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **more: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("transformer_engine") and op == dist.ReduceOp.MAX:
            sizes.append(dist.get_world_size(group))
        return run(tensor, op=op, group=group, **more)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = run
