"""What the ranks of the tests of a sharded optimizer do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megafp8.optim.adamw import STATES
from megafp8.parallel.mesh import Mesh, join
from megafp8.train.evaluate import evaluate
from megafp8.train.saving import placements
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.parallel.rank_work import Case, Piece
from tests.ranks import Rank
from tests.tiny import microbatch, optim_spec


def zero(**changes: object) -> object:
    return optim_spec(name="distributed_fused_adam", **changes)


@dataclass
class Run:
    """What one rank has after some steps."""

    losses: list[float]
    norms: list[float]
    finite: list[bool]
    weights: dict[str, torch.Tensor]  # compute weights as bytes, by local parameter name
    saved: list[Piece]  # what a checkpoint gets from this rank
    tables: dict[str, dict[str, torch.Tensor]]
    num_bytes: dict[str, int]  # of live tensors, by what they are
    traffic: dict[tuple[str, str, str], int]  # of the last step
    validation: tuple[float, int]
    layout: list[tuple[int, list[int]]]  # of each bucket: padded length, parameters' sizes


def run(case: Case, mesh: Mesh) -> Run:
    state = case.build(mesh)
    losses, norms, finite, traffic = [], [], [], {}
    for step in range(case.steps):
        before = dict(mesh.traffic.num_bytes)
        result = train_step(state, case.microbatches(step, mesh))
        traffic = {key: n - before.get(key, 0) for key, n in mesh.traffic.num_bytes.items()}
        state.step += 1
        losses.append(result.loss)
        norms.append(result.grad_norm)
        finite.append(result.is_finite)
    validation = evaluate(state, [microbatch(9000 + i) for i in range(3)])
    return Run(
        losses,
        norms,
        finite,
        weights(state),
        saved(state),
        {d: {n: t.clone() for n, t in table.tensors().items()}
         for d, table in state.scaling.tables.items()},
        live_bytes(state),
        {key: count for key, count in traffic.items() if count},
        validation,
        [(b.gradient.numel(), [p.numel() for p in b.begins])
         for b in getattr(state.masters, "buckets", [])],
    )  # fmt: skip


def weights(state: TrainState) -> dict[str, torch.Tensor]:
    return {
        name: param.detach().contiguous().view(torch.uint8).clone()
        for name, param in state.model.named_parameters()
    }


def saved(state: TrainState) -> list[Piece]:
    return [
        Piece(p.name, p.global_shape, p.offset, p.tensor.detach().clone())
        for p in placements(state)
        if p.replica == 0 and not p.name.startswith("rng/")
    ]


def live_bytes(state: TrainState) -> dict[str, int]:
    """Of storages, each counted once."""
    moments = [t for name in STATES for t in state.optimizer.state_tensors(name)]
    return {
        "weights": storage_bytes(list(state.model.parameters())),
        "masters": storage_bytes(list(state.masters.masters)),
        "moments": storage_bytes(moments),
        "gradients": storage_bytes([state.masters.flat_grad, *state.masters.grads]),
    }


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def runs(rank: Rank, cases: dict[str, Case]) -> dict[str, Run]:
    """Every case on the mesh that it names; equal meshes are made once."""
    torch.set_num_threads(1)
    meshes: dict[tuple[int, ...], Mesh] = {}
    found = {}
    for name, case in cases.items():
        spec = replace(case.parallel, devices_per_node=rank.size)
        sizes = (spec.tp, spec.cp, spec.pp)
        if sizes not in meshes:
            meshes[sizes] = join(spec)
        found[name] = run(replace(case, parallel=spec), meshes[sizes])
    return found
