"""Transformer Engine's own classes for the tests in `real_*.py`, which run in a process of their
own (`test_real.py` starts it): loading them patches torch for the whole process.

    python -m pytest tests/backends/te/real_layers.py
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import te_cpu
from megafp8.backends.te.state import TeRegion
from megafp8.parallel.mesh import Mesh, single_rank
from megafp8.specs import Fp8Recipe, ParallelSpec, RunSpec
from megafp8.specs.te_versions import HEAD_NORMS, is_before
from megafp8.train.build import build
from megafp8.train.state import TrainState
from megafp8.train.step import StepResult, train_step
from tests.tiny import gpt_spec, microbatch, optim_spec, run_spec

VARIABLE = "MEGAFP8_TESTED_TE"
VERSION = os.environ.get(VARIABLE, te_cpu.DEFAULT_VERSION)
DELAYED = Fp8Recipe(amax_history_len=4)
te: Any = te_cpu.load(VERSION)

recipes: Any = importlib.import_module("transformer_engine.common.recipe")


def need_head_norms() -> None:
    """Skip where this version cannot normalize queries and keys; the settings refuse it."""
    if is_before(VERSION, HEAD_NORMS):
        pytest.skip(f"norms of queries and keys begin with {HEAD_NORMS}")


@pytest.fixture(autouse=True)
def forget_other_models() -> Iterator[None]:
    """Transformer Engine updates the scales of all models of a process together."""
    manager = te.module.base.FP8GlobalStateManager
    manager.reset()
    yield
    TeRegion.close_left_open()
    manager.reset()


def linears(
    dtype: torch.dtype, octaves: int
) -> tuple[Any, torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """Transformer Engine's linear and ours with the same weights, an input and a gradient.

    Weights spread over twice so many octaves; inputs and gradients over about as many.
    """
    torch.manual_seed(0)
    theirs = te.Linear(96, 64, bias=False, params_dtype=dtype)
    ours = torch.nn.Linear(96, 64, bias=False, dtype=dtype)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(64, 96) * 2.0 ** torch.randint(-octaves, octaves, (64, 96)))
        theirs.weight.copy_(ours.weight)
    decades = octaves / 2
    x = (torch.randn(128, 96) * torch.logspace(-decades, decades, 96)).to(dtype)
    grad = (torch.randn(128, 64) * torch.logspace(-2 * decades, 0, 128)[:, None]).to(dtype)
    return theirs, ours, x, grad


def autocast(recipe: object, enabled: bool = True) -> AbstractContextManager[Any]:
    """The FP8 region by the name that this version has for it."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)


def spec_of(
    backend: str,
    fp8: Fp8Recipe | None,
    compute: str = "fp32",
    parallel: ParallelSpec | None = None,
    **changes: Any,
) -> RunSpec:
    """A tiny GPT; Adam's eps is large, so that roundings of tiny gradients do not matter."""
    model = gpt_spec(**({"activation": "gelu-tanh"} | changes))
    optim = optim_spec(eps=1e-2)
    spec = run_spec(compute=compute, fp8=fp8, model=model, optim=optim, parallel=parallel)
    precision = dataclasses.replace(spec.precision, backend=backend)  # type: ignore[arg-type]
    return dataclasses.replace(spec, precision=precision)


def run_of(
    backend: str, fp8: Fp8Recipe | None, *args: Any, mesh: Mesh | None = None, **changes: Any
) -> TrainState:
    return build(spec_of(backend, fp8, *args, **changes), mesh or single_rank())


def step(
    state: TrainState, number: int, *, replica: int = 0, replicas: int = 1, count: int = 2
) -> StepResult:
    """Two microbatches a replica: so an update of scales is in between."""
    first = count * (number * replicas + replica)
    result = train_step(state, [microbatch(first + index) for index in range(count)])
    state.step += 1
    return result


def tables_of(state: TrainState) -> dict[str, Any]:
    return {
        f"{direction}/{name}": tensor.clone()
        for direction, table in state.scaling.tables.items()
        for name, tensor in table.tensors().items()
    }
