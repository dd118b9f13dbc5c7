"""Runs on two ranks, of Transformer Engine's layers, on documents that do not see each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megafp8.data.loader import Microbatch
from megafp8.parallel.mesh import Mesh, join, single_rank
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec
from megafp8.train.build import build
from megafp8.train.step import train_step
from tests.backends.te.rank_work import LLAMA
from tests.kit.cases import together, with_documents
from tests.ranks import Rank
from tests.tiny import microbatch

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tp": 2}),
    "sequence": (1, {"tp": 2, "sequence_parallel": True}),
    "pipeline": (2, {"pp": 2}),
    "replicas": (2, {}),
    "FSDP": (2, {"fsdp": FsdpSpec()}),
}
"""The samples of a microbatch, and the layout."""
MICROBATCHES = 2

Results = dict[str, list[tuple[float, float]]]


def documents(rank: Rank, steps: int, layouts: list[str]) -> dict[tuple[str, str], Results]:
    """Losses and norms by precision and layout: of both engines in it, and of Transformer Engine's
    in one process, whose microbatches hold what those of all replicas do."""
    found: dict[tuple[str, str], Results] = {}
    for layout in layouts:
        batch, axes = LAYOUTS[layout]
        parallel = ParallelSpec(devices_per_node=rank.size, **axes)
        mesh, alone = join(parallel), single_rank()
        for precision, fp8 in {"FP32": None, "FP8": Fp8Recipe(amax_history_len=4)}.items():
            found[precision, layout] = {
                "te": _train("te", fp8, parallel, mesh, mesh, batch, steps),
                "native": _train("native", fp8, parallel, mesh, mesh, batch, steps),
                "one process": _train("te", fp8, ParallelSpec(), alone, mesh, batch, steps),
            }
    return found


def _train(
    backend: str,
    fp8: Fp8Recipe | None,
    parallel: ParallelSpec,
    mesh: Mesh,
    beside: Mesh,
    batch: int,
    steps: int,
) -> list[tuple[float, float]]:
    from tests.backends.te.real import spec_of, te

    te.module.base.FP8GlobalStateManager.reset()
    spec = spec_of(backend, fp8, "fp32", parallel, **(LLAMA | {"init_method_std": 0.1}))
    spec = replace(
        spec,
        data=replace(spec.data, reset_attention_mask=True),
        train=replace(spec.train, micro_batch_size=batch),
    )
    state, found = build(spec, mesh), []
    replicas = range(beside.dp.size) if mesh is not beside else [mesh.dp.rank]
    for number in range(steps):
        given = [
            together([_drawn(number, of, replica, batch) for replica in replicas])
            for of in range(MICROBATCHES)
        ]
        one = train_step(state, given)
        state.step += 1
        found.append((one.loss, one.grad_norm))
    return found


def _drawn(step: int, number: int, replica: int, batch: int) -> Microbatch:
    return with_documents(microbatch(100 * step + 10 * number + replica, batch))
