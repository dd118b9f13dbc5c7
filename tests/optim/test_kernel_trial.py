"""A kernel over stored tensors is used only if a trial gives the bits of torch's operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megafp8.optim import scaled_adam
from megafp8.optim.scaled_adam import NO_DITHERS, Constants, Dithers, Tensors

Wrong = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PLACES: dict[str, Wrong] = {  # of the parameter and the gradient before a step
    "positive parameters": lambda param, grad: param > 0,
    "negative parameters": lambda param, grad: param < 0,
    "large parameters": lambda param, grad: param.abs() > 0.9,
    "small parameters": lambda param, grad: param.abs() < 1e-3,
    "positive gradients": lambda param, grad: grad > 0,
    "negative gradients": lambda param, grad: grad < 0,
    "the last element": lambda param, grad: torch.arange(len(param)) == len(param) - 1,
    "the first element": lambda param, grad: torch.arange(len(param)) == 0,
}


def halving(where: Wrong, step: int | None = None) -> Callable[..., None]:
    """Return an update that halves the first moments at some places, in each or in one step."""

    def kernel(tensors: Tensors, constants: Constants, dithers: Dithers = NO_DITHERS) -> None:
        chosen = where(tensors.param.values(), tensors.grad.values())
        scaled_adam.update_torch(tensors, constants, dithers)
        if step in (None, kernel_steps[0]):
            moment = tensors.exp_avg.values()
            tensors.exp_avg.store(torch.where(chosen, moment / 2, moment))
        kernel_steps[0] += 1

    kernel_steps = [1]
    return kernel


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", [None, 1, 2, 3])
def test_a_kernel_that_is_wrong_somewhere_is_found(place: str, step: int | None) -> None:
    kernel = halving(PLACES[place], step)
    assert not scaled_adam._same(("fp16", "fp8", "fp16"), False, False, kernel=kernel)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("is_l2", [False, True])
def test_a_right_kernel_is_not(is_l2: bool, stochastic: bool) -> None:
    kernel = halving(lambda param, grad: torch.zeros_like(param, dtype=torch.bool), step=9)
    assert scaled_adam._same(("fp16", "fp8", "fp16"), is_l2, stochastic, kernel=kernel)


def test_a_kernel_that_ignores_random_numbers_is_found() -> None:
    def kernel(tensors: Tensors, constants: Constants, dithers: Dithers) -> None:
        scaled_adam.update_torch(tensors, constants)

    assert not scaled_adam._same(("fp16", "fp8", "fp16"), False, True, kernel=kernel)
