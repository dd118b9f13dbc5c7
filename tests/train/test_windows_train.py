"""Training with windows: in every recipe, and with layers that the backward pass recomputes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, GPTSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.recipes import RECIPES
from megafp8.train.step import train_step
from tests.kit.cases import Case
from tests.tiny import SEQ, gpt_spec

STEPS = 2
WINDOW = gpt_spec(num_layers=2, window_size=(3, 0))


def trained(model: GPTSpec, recipe: str | None, **changes: Any) -> list[torch.Tensor]:
    """Return the losses of some steps on one rank, and the weights after them."""
    fp8 = None if recipe is None else Fp8Recipe(name=recipe)
    case, mesh = Case("bf16", fp8, model=model, **changes), single_rank()
    state, losses = case.build(mesh), []
    for step in range(STEPS):
        losses.append(train_step(state, case.microbatches(step, mesh)).loss)
        state.step += 1
    return [torch.tensor(losses), *(param.detach().clone() for param in state.model.parameters())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_window_hides_tokens_in_every_recipe(recipe: str | None) -> None:
    """One that hides none changes no bit, and a short one trains to other finite losses."""
    without = trained(replace(WINDOW, window_size=None), recipe)
    assert same(trained(replace(WINDOW, window_size=(SEQ - 1, 0)), recipe), without)
    short = trained(WINDOW, recipe)
    assert bool(short[0].isfinite().all()) and not torch.equal(short[0], without[0])


@pytest.mark.parametrize("skips", [None, (1, 0)])
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputed_windows_have_the_same_bits(granularity: Any, skips: Any) -> None:
    """Also where the second layer has no window."""
    model = replace(WINDOW, window_attn_skip_freq=skips)
    again = RecomputeSpec(granularity=granularity, method="block", num_layers=2)
    kept = trained(model, "delayed")
    assert same(trained(replace(model, recompute=again), "delayed"), kept)
