"""An infinity or a NaN is never hidden by a cast: loss scalers and users see it in what comes out.

The recipes' own casts saturate infinities, as their specifications say (tests/spec).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megafp8 import fp8
from megafp8.fp8 import quantizer
from megafp8.fp8.recipes.delayed import Delayed
from megafp8.fp8.recipes.tensorwise import Tensorwise
from megafp8.specs.recipes import RECIPES
from tests.fp8.models import mlp, noise

OWN = Path(__file__).parents[1] / "own_recipes"
OWN_NAMES = ("simulated_int8", "blocks_of_32", "smoothed", "four_bits")
ALL = (*RECIPES, *(str(OWN / f"{name}.py") for name in OWN_NAMES))
WIDTH = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear_of(recipe: str | type[fp8.Recipe], dtype: torch.dtype) -> tuple[nn.Linear, fp8.Fp8State]:
    """A linear that has trained a step, so that a history has its scales."""
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
    state = fp8.convert(linear, recipe)
    run(linear, state, noise(16, WIDTH, seed=1, dtype=dtype), noise(16, WIDTH, seed=2, dtype=dtype))
    return linear, state


def run(
    linear: nn.Linear, state: fp8.Fp8State, x: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, input gradient and weight gradient."""
    x = x.clone().requires_grad_()
    linear.weight.grad = None
    with state.microbatch():
        out = linear(x)
        out.backward(grad)
    assert x.grad is not None and linear.weight.grad is not None
    return out.detach(), x.grad, linear.weight.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", ALL, ids=lambda name: Path(name).stem)
def test_what_is_not_finite_stays_so(recipe: str, dtype: torch.dtype) -> None:
    """In one token's row of an input or an output gradient, or in one row of the weight."""
    for value in (torch.inf, -torch.inf, torch.nan):
        linear, state = linear_of(recipe, dtype)
        x, grad = (noise(16, WIDTH, seed=seed, dtype=dtype) for seed in (3, 4))
        bad_x, bad_grad = x.clone(), grad.clone()
        bad_x[5, 7] = bad_grad[5, 7] = value
        out, grad_input, _ = run(linear, state, bad_x, grad)
        assert not out[5].isfinite().any()
        assert grad_input.isfinite().all()
        rest = torch.arange(16) != 5
        if "nvfp4" not in recipe:  # it has one factor for the whole tensor
            assert out[rest].isfinite().all()
        out, grad_input, grad_weight = run(linear, state, x, bad_grad)
        assert out.isfinite().all()
        assert not grad_input[5].isfinite().any() and not grad_weight[7].isfinite().any()
        with torch.no_grad():
            linear.weight[9, 2] = value
        with state.evaluation(), torch.no_grad():
            assert not linear(x)[:, 9].isfinite().any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_infinity_is_seen_in_evaluation_in_recomputation_and_by_a_bias(recipe: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
    state = fp8.convert(linear, recipe)
    x, grad = (noise(16, WIDTH, seed=seed, dtype=torch.bfloat16) for seed in (3, 4))
    run(linear, state, x, grad)
    bad_x, bad_grad = x.clone(), grad.clone()
    bad_x[5, 7] = bad_grad[5, 7] = torch.inf
    with state.evaluation(), torch.no_grad():
        assert not linear(bad_x)[5].isfinite().any()
    assert linear.bias.grad is not None
    linear.bias.grad = None
    run(linear, state, x, bad_grad)
    assert (~linear.bias.grad.isfinite()).tolist() == [n == 7 for n in range(WIDTH)]
    assert linear.bias.grad[7].isnan()
    linear.weight.grad = None
    with state.microbatch():
        checkpoint(linear, bad_x, use_reentrant=False).backward(grad)
    assert linear.weight.grad is not None and not linear.weight.grad[:, 7].isfinite().any()


class Clipped(Delayed):
    """Casts another tensor than the one that it is given."""

    def operands(self, tensor: Any, x_MN: torch.Tensor, *args: Any, **options: Any) -> Any:
        return super().operands(tensor, x_MN.clamp(-1e4, 1e4), *args, **options)


class Own(Tensorwise):
    """Casts another tensor, by a scale of its own."""

    def operands(self, tensor: Any, x_MN: torch.Tensor, need: Any, **options: Any) -> Any:
        return quantizer.cast_whole(tensor, x_MN.clamp(-1e4, 1e4), torch.ones(()), need, **options)


@pytest.mark.parametrize("recipe", [Clipped, Own])
def test_a_class_with_its_own_operands_hides_no_infinity(recipe: type[fp8.Recipe]) -> None:
    linear, state = linear_of(recipe, torch.bfloat16)
    x, grad = (noise(16, WIDTH, seed=seed, dtype=torch.bfloat16) for seed in (3, 4))
    x[5, 7] = torch.inf
    out, _, grad_weight = run(linear, state, x, grad)
    assert not out[5].isfinite().any() and not grad_weight[:, 7].isfinite().any()


@pytest.mark.parametrize("recipe", ALL, ids=lambda name: Path(name).stem)
def test_a_loss_scaler_sees_that_a_gradient_has_overflowed(recipe: str) -> None:
    """Neither biases nor norms, whose gradients are not cast, tell the scaler of it."""

    def steps(state: fp8.Fp8State | None) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
        scales, before = [], model[0].weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            context = state.microbatch() if state else contextlib.nullcontext()
            with context, torch.autocast("cpu", torch.float16):
                loss = model(noise(16, WIDTH, seed=1)).square().mean()
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert torch.equal(model[0].weight, before)
        return scales

    model = mlp(WIDTH, bias=False)
    expected = steps(None)
    assert expected == [2.0**29, 2.0**28, 2.0**27]
    assert steps(fp8.convert(model, recipe)) == expected


def test_a_high_precision_evaluation_keeps_infinities() -> None:
    plain, model = mlp(), mlp()
    settings: Any = {"fp8_in_evaluation": False}
    state = fp8.convert(model, fp8.Fp8Recipe(**settings))
    x = noise(8, 32, seed=0)
    x[3, 4] = torch.inf
    with state.evaluation(), torch.no_grad():
        assert torch.equal(model[0](x), plain[0](x))
