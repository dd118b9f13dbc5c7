"""Layers that torch compiles, on several ranks, beside eager ones on the same ranks."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from megafp8.parallel.mesh import Mesh, join
from megafp8.train.build import build
from megafp8.train.compile import CompileCounter
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.ranks import Rank
from tests.tiny import microbatch, run_spec

Found = dict[str, Any]


def without_inductor(self: CompileCounter, graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Run the graphs of forward and backward operation by operation: nothing rounds otherwise."""
    self.graphs += 1
    return lookup_backend("aot_eager")(graph, inputs)


def state_of(choices: dict[str, Any], compile: str, mesh: Mesh) -> TrainState:
    choices = dict(choices)
    backend = choices.pop("backend", "native")
    spec = run_spec(**choices, compile=compile)
    return build(replace(spec, precision=replace(spec.precision, backend=backend)), mesh)


def compare(rank: Rank, cases: dict[str, dict[str, Any]], with_inductor: bool) -> dict[str, Found]:
    """Return losses and norms of three steps of each case, eager and compiled, and the graphs."""
    found: dict[str, Found] = {}
    with pytest.MonkeyPatch.context() as patch:
        if not with_inductor:
            patch.setattr(CompileCounter, "backend", without_inductor)
        for name, choices in cases.items():
            try:
                found[name] = _pair(choices)
            except Exception:  # of one case: the others are compared all the same
                found[name] = {"error": traceback.format_exc()[-3000:]}
    return found


def _pair(choices: dict[str, Any]) -> Found:
    torch._dynamo.reset()
    counters.clear()
    mesh = join(choices["parallel"])
    results: dict[str, list[tuple[float, float]]] = {}
    for compile in ("off", "block"):
        state = state_of(choices, compile, mesh)
        results[compile] = []
        for step in range(3):
            batches = [microbatch(10 * step + 2 * mesh.dp.rank + index) for index in range(2)]
            result = train_step(state, batches)
            results[compile].append((result.loss, result.grad_norm))
            state.step += 1
    assert state.compiled is not None
    return {
        "eager": results["off"],
        "compiled": results["block"],
        "graphs": state.compiled.graphs,
        "breaks": [*state.compiled.breaks, *counters["graph_break"]],
    }
