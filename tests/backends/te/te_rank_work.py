"""Runs over several ranks whose layers are Transformer Engine's stand-in."""

from __future__ import annotations

import dataclasses

import torch

from megafp8.backends.te import names as te_names
from megafp8.parallel.mesh import join
from megafp8.specs import Fp8Recipe, ParallelSpec
from megafp8.specs.precision import BackendName
from megafp8.train.build import build
from megafp8.train.step import train_step
from tests.backends.te.te_double import VERSIONS, Double
from tests.ranks import Rank
from tests.tiny import gpt_spec, microbatch, optim_spec, run_spec


def stand_in() -> None:
    """The double takes Transformer Engine's place in this process."""
    double = Double(VERSIONS[-1])
    names = te_names.names_in(double.pytorch, double.recipe, double.extension, double.version)
    te_names.load = lambda: names  # type: ignore[assignment]


def histories(rank: Rank, tp_only_amax_red: bool) -> dict[str, torch.Tensor]:
    """Delayed scaling over replicas: the newest amaxes of both directions after a step."""
    stand_in()
    parallel = ParallelSpec(devices_per_node=rank.size, tp_only_amax_red=tp_only_amax_red)
    mesh = join(parallel)
    found = {}
    backends: tuple[BackendName, ...] = ("native", "te")
    for backend in backends:
        model = gpt_spec(activation="gelu-tanh", num_layers=2)
        recipe = Fp8Recipe(amax_history_len=4)
        spec = run_spec(compute="fp32", fp8=recipe, model=model, parallel=parallel)
        precision = dataclasses.replace(spec.precision, backend=backend)
        state = build(dataclasses.replace(spec, precision=precision), mesh)
        train_step(state, [microbatch(rank.index)])
        tables = state.scaling.tables.values()
        found[backend] = torch.cat([table.history[:, -1].clone() for table in tables])
    return found


def losses_and_norms(
    rank: Rank, backends: list[str], sequence_parallel: bool, steps: int
) -> dict[str, list[tuple[float, float]]]:
    """(loss, gradient norm) of each step, by backend; all ranks are of one tensor."""
    stand_in()
    parallel = ParallelSpec(
        devices_per_node=rank.size, tp=rank.size, sequence_parallel=sequence_parallel
    )
    mesh = join(parallel)
    found = {}
    for backend in backends:
        model = gpt_spec(activation="gelu-tanh", num_layers=2)
        spec = run_spec(compute="fp32", model=model, optim=optim_spec(eps=1e-2), parallel=parallel)
        precision = dataclasses.replace(spec.precision, backend=backend)  # type: ignore[arg-type]
        state = build(dataclasses.replace(spec, precision=precision), mesh)
        found[backend] = []
        for step in range(steps):
            result = train_step(state, [microbatch(2 * step), microbatch(2 * step + 1)])
            state.step += 1
            found[backend].append((result.loss, result.grad_norm))
    return found
