"""Runs of Transformer Engine's layers on two nodes of two ranks: FSDP shards them within a node."""

from __future__ import annotations

from typing import Any

import torch

from megafp8.parallel.fsdp import local_of
from megafp8.parallel.mesh import Mesh, join, single_rank
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec, RunSpec
from megafp8.train.build import build
from megafp8.train.step import train_step
from tests.backends.te.rank_work import LLAMA
from tests.kit.cases import together
from tests.ranks import Rank
from tests.tiny import microbatch

DELAYED = Fp8Recipe(amax_history_len=4)
CASES: dict[str, tuple[str, Fp8Recipe | None]] = {
    "FP32": ("fp32", None),
    "delayed": ("fp32", DELAYED),
    "alone": ("bf16", Fp8Recipe(amax_history_len=4, params_in_fp8=True)),
    "mxfp8": ("fp32", Fp8Recipe(name="mxfp8", backward_format="e4m3")),
}
MICROBATCHES = 2
Run = tuple[list[tuple[float, float]], dict[str, tuple[int, ...]], dict[str, torch.Tensor]]


def runs(rank: Rank, names: list[str], steps: int) -> dict[str, dict[str, Run]]:
    """By case and layout: losses and norms, the shapes of the weights' shards, and the scales.

    The microbatches of one process hold what those of all four ranks do.
    """
    hybrid = ParallelSpec(num_nodes=2, devices_per_node=2, fsdp=FsdpSpec(strategy="hybrid"))
    mesh, alone = join(hybrid), single_rank()
    found = {}
    for name in names:
        compute, fp8 = CASES[name]
        found[name] = {
            "hybrid": _train(_spec(compute, fp8, hybrid), mesh, [mesh.dp.rank], steps),
            "one process": _train(
                _spec(compute, fp8, ParallelSpec()), alone, range(rank.size), steps
            ),
        }
    return found


def _spec(compute: str, fp8: Fp8Recipe | None, parallel: ParallelSpec) -> RunSpec:
    from tests.backends.te.real import spec_of, te

    te.module.base.FP8GlobalStateManager.reset()
    return spec_of("te", fp8, compute, parallel, **(LLAMA | {"init_method_std": 0.1}))


def _train(spec: RunSpec, mesh: Mesh, replicas: Any, steps: int) -> Run:
    from tests.backends.te.real import tables_of

    state, found = build(spec, mesh), []
    for step in range(steps):
        given = [
            together([microbatch(100 * step + 10 * number + replica) for replica in replicas])
            for number in range(MICROBATCHES)
        ]
        one = train_step(state, given)
        state.step += 1
        found.append((one.loss, one.grad_norm))
    weights = {name: tuple(local_of(param).shape) for name, param in state.model.named_parameters()}
    has_tables = spec.precision.fp8 is not None and spec.precision.fp8.name == "delayed"
    return found, weights, tables_of(state) if has_tables else {}
