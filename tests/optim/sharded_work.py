"""What the ranks of the tests of a sharded optimizer do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megafp8.backends.te.quantized import memory_of
from megafp8.models.gpt import GPT
from megafp8.parallel.mesh import Mesh, join
from megafp8.specs import LossScaleSpec, ParallelSpec
from megafp8.train.build import build
from megafp8.train.nonfinite import first_nonfinite
from megafp8.train.report.header import StateBytes, state_bytes
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.state_dict import load_checkpoint, placements
from megafp8.train.step import StepResult, train_step
from megafp8.train.validate import evaluate
from tests.kit.cases import Case
from tests.kit.tensors import Piece
from tests.ranks import Rank
from tests.tiny import microbatch, run_spec

Tables = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Job:
    """A case; `grows`: later steps have twice the microbatches. `spoiled`: the step (from 0) in
    which rank 1's gradients become NaN below the second layer."""

    case: Case
    grows: bool = False
    spoiled: int | None = None
    loss_scale: LossScaleSpec | None = None
    backend: str = "native"


@dataclass
class Run:
    """What one rank has after some steps."""

    results: list[StepResult]
    weights: dict[str, torch.Tensor]  # compute weights as bytes, by local parameter name
    saved: list[Piece]  # what a checkpoint gets from this rank
    tables: Tables
    held: StateBytes
    traffic: dict[tuple[str, str, str], int]  # of the last step
    validation: tuple[float, int]
    buckets: list[tuple[int, list[int]]]  # padded length, elements of each parameter
    named: str | None  # the first tensor that was not finite

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]


def build_job(job: Job, mesh: Mesh) -> TrainState:
    if job.loss_scale is None and job.backend == "native":
        return job.case.build(mesh)
    case = job.case
    spec = run_spec(
        compute=case.compute,
        fp8=case.fp8,
        model=case.model,
        parallel=case.parallel,
        optim=case.optim,
    )
    precision = replace(spec.precision, loss_scale=job.loss_scale, backend=job.backend)  # type: ignore[arg-type]
    return build(replace(spec, precision=precision), mesh)


def run(job: Job, mesh: Mesh) -> Run:
    state, case = build_job(job, mesh), job.case
    results, traffic, named = [], {}, None
    for step in range(case.steps):
        before = dict(mesh.traffic.num_bytes)
        count = case.num_microbatches * (1 + (job.grows and step >= case.steps // 2))
        batches = replace(case, num_microbatches=count).microbatches(step, mesh)
        hook = None
        if step == job.spoiled and mesh.data.rank == 1:
            assert isinstance(state.model, GPT)
            hook = state.model.layers[0].register_forward_hook(spoil_gradient)
        results.append(train_step(state, batches))
        if hook is not None:
            hook.remove()
        if not results[-1].is_finite:
            named = first_nonfinite(state, batches)
        traffic = {key: n - before.get(key, 0) for key, n in mesh.traffic.num_bytes.items()}
        state.step += 1
    validation = evaluate(state, [microbatch(9000 + i) for i in range(3)])
    buffers = getattr(state.masters, "buffers", [])  # FSDP has none
    return Run(
        results,
        weights(state),
        saved(state),
        tables(state),
        state_bytes(state),
        {key: count for key, count in traffic.items() if count},
        validation,
        [(b.flat.numel(), [p.numel() for p in b.index_of]) for b in buffers],
        named,
    )


def spoil_gradient(module: object, inputs: object, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: grad * math.nan)


def tables(state: TrainState) -> Tables:
    return {
        direction: {name: tensor.clone() for name, tensor in table.tensors().items()}
        for direction, table in state.scaling.tables.items()
    }


def weights(state: TrainState) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in state.model.named_parameters():
        first = next(iter(memory_of(param)))  # Transformer Engine may keep bytes beside others
        if state.masters.holds_rows:  # FSDP's shards may have no memory
            first = state.masters.rows_of(param)
        found[name] = first.detach().contiguous().view(torch.uint8).clone()
    return found


def saved(state: TrainState) -> list[Piece]:
    return [
        Piece(p.name, p.global_shape, p.offset, p.tensor.detach().clone())
        for p in placements(state)
        if p.replica == 0 and p.name.startswith(("model/", "optimizer/"))
    ]


def on_ranks(spec: ParallelSpec, rank: Rank) -> ParallelSpec:
    return replace(spec, devices_per_node=rank.size // spec.num_nodes)


def runs(rank: Rank, jobs: dict[str, Job]) -> dict[str, Run]:
    """Every job on the mesh that it names; equal meshes are made once."""
    torch.set_num_threads(1)
    meshes: dict[tuple[int, ...], Mesh] = {}
    found = {}
    for name, job in jobs.items():
        spec = on_ranks(job.case.parallel, rank)
        sizes = (spec.tp, spec.cp, spec.pp, spec.num_nodes)
        if sizes not in meshes:
            meshes[sizes] = join(spec)
        case = replace(job.case, parallel=spec)
        found[name] = run(replace(job, case=case), meshes[sizes])
    return found


@dataclass
class Loaded:
    """A state after loading, and the losses of its next steps."""

    saved: list[Piece]
    weights: dict[str, torch.Tensor]
    tables: Tables
    next_losses: list[float]


def continued(state: TrainState, case: Case, mesh: Mesh) -> Loaded:
    before = saved(state), weights(state), tables(state)
    losses = []
    for _ in range(3):
        losses.append(train_step(state, case.microbatches(state.step, mesh)).loss)
        state.step += 1
    return Loaded(*before, losses)


def save(rank: Rank, cases: dict[str, Case], root: Path) -> dict[str, Loaded]:
    """Train each case, save it under its name, and go on."""
    found = {}
    for name, case in cases.items():
        spec = on_ranks(case.parallel, rank)
        mesh = join(spec)
        state = replace(case, parallel=spec).build(mesh)
        for step in range(case.steps):
            assert train_step(state, case.microbatches(step, mesh)).is_finite
            state.step += 1
        Saver(root / name, keep=1, meta={}).save(state)
        found[name] = continued(state, case, mesh)
    return found


def load_all(rank: Rank, cases: dict[str, tuple[Path, Case]]) -> dict[str, Loaded]:
    found = {}
    for name, (step_dir, case) in cases.items():
        spec = on_ranks(case.parallel, rank)
        mesh = join(spec)
        state = replace(case, parallel=spec).build(mesh)
        load_checkpoint(step_dir, state, print)
        found[name] = continued(state, case, mesh)
    return found


def save_and_load(
    rank: Rank, root: Path, saves: dict[str, Case], loads: dict[str, tuple[Path, Case]]
) -> tuple[dict[str, Loaded], dict[str, Loaded]]:
    torch.set_num_threads(1)
    return save(rank, saves, root), load_all(rank, loads)


def everything(
    rank: Rank,
    jobs: dict[str, Job],
    root: Path,
    saves: dict[str, Case],
    loads: dict[str, tuple[Path, Case]],
) -> tuple[dict[str, Run], dict[str, Loaded], dict[str, Loaded]]:
    return runs(rank, jobs), *save_and_load(rank, root, saves, loads)
