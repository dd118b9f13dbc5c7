"""A run over tensor-parallel ranks whose layers are Transformer Engine's stand-in."""

from __future__ import annotations

import dataclasses

from megafp8.parallel.mesh import join
from megafp8.precision.backends import te_names
from megafp8.specs import ParallelSpec
from megafp8.train.build import build
from megafp8.train.step import train_step
from tests.precision.backends.te_double import VERSIONS, Double
from tests.ranks import Rank
from tests.tiny import gpt_spec, microbatch, optim_spec, run_spec


def losses_and_norms(
    rank: Rank, backends: list[str], sequence_parallel: bool, steps: int
) -> dict[str, list[tuple[float, float]]]:
    """(loss, gradient norm) of each step, by backend; all ranks are of one tensor."""
    double = Double(VERSIONS[-1])
    names = te_names.names_in(double.pytorch, double.recipe, double.extension, double.version)
    te_names.load = lambda: names  # type: ignore[assignment]
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
