"""The noise of a weight's gradient against the error that its casts really make."""

from __future__ import annotations

import pytest
import torch

from fp8_numerics.cast import Fp8Tensor, spread
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.noise import NoiseProbe
from megafp8.fp8.scaling import ScalingState
from megafp8.observe.accuracy import noise_of_gradient
from megafp8.specs import Fp8Recipe

TOKENS, IN, OUT = 512, 64, 128


def values_of(operand: object) -> torch.Tensor:
    assert isinstance(operand, Fp8Tensor)
    plain = operand.plain()
    assert plain.rotation is None
    scale = spread(plain.dequant_scale, plain.payload.shape, plain.block).double()
    return (
        plain.numbers(torch.float32).double() * scale * (1 if plain.outer is None else plain.outer)
    )


@pytest.mark.parametrize(
    ("name", "scale"),
    [("delayed", 1.0), ("delayed", 2.0**-8), ("tensorwise", None), ("mxfp8", None),
     ("nvfp4", None)],
)  # fmt: skip
def test_the_noise_of_a_gradient_is_what_its_casts_add(name: str, scale: float | None) -> None:
    """The square of an error of 512 independent ones in 8192 elements scatters by 1.6 %.

    It is a sum over pairs of tokens; pairs of different ones have the mean 0, and the ratio of
    their scatter to the sum is sqrt(2 / 8192). The bound is six times that. Scales of 2**-8 leave
    the smallest numbers of E4M3 for the inputs.
    """
    generator = torch.Generator().manual_seed(3)
    state = ScalingState(Fp8Recipe(name=name))
    quantizer = linear_quantizer(state, "linear")
    assert quantizer is not None
    if scale is not None:
        for table in state.tables.values():
            table.quant_scale.fill_(scale)
    probe = NoiseProbe(state)
    probe.attach()
    exact = cast = torch.zeros(OUT, IN, dtype=torch.float64)
    for _ in range(2):  # microbatches
        x = torch.randn(TOKENS // 2, IN, generator=generator)
        g = torch.randn(TOKENS // 2, OUT, generator=generator) / 64
        made = [quantizer.operands("input", x)[0], quantizer.operands("grad_output", g)[0]]
        x_cast, g_cast = (values_of(last if name == "nvfp4" else first) for last, first in made)
        exact = exact + g.double().T @ x.double()
        cast = cast + g_cast.T @ x_cast
    found = probe.detach()
    assert state.observers == [] and found.keys() == {"linear.input", "linear.grad_output"}
    assert all(tensor.rows == TOKENS for tensor in found.values())
    noise = noise_of_gradient(found["linear.input"], found["linear.grad_output"])
    assert (cast - exact).square().sum().item() == pytest.approx(noise, rel=6 * (2 / 8192) ** 0.5)
