"""The parts of `fp8.check` by themselves: floors, shapes, and what its reasons name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megafp8 import fp8
from megafp8.fp8 import Cast, blocks
from megafp8.fp8.probe import Probe
from megafp8.fp8.quantizer import Role
from megafp8.fp8.refute import SIMULATED_FLOOR, floor_of, wrong_scales
from megafp8.specs import Fp8Recipe
from tests.fp8.test_check import SIMULATED_RANDOM, lie, traits

FOUR_BITS = str(Path(__file__).parents[1] / "own_recipes" / "four_bits.py")


@pytest.mark.parametrize(
    ("recipe", "role", "largest_error"),
    [
        (Fp8Recipe(), "input", 2.0**-4),  # E4M3: 3 bits after the point, to nearest
        (Fp8Recipe(backward_format="e5m2"), "grad_output", 2.0**-3),
        (Fp8Recipe(backward_format="e4m3"), "grad_output", 2.0**-4),
        (Fp8Recipe(name="nvfp4", backward_format="e4m3"), "input", 2.0**-2),  # E2M1
        (Fp8Recipe(name="nvfp4", backward_format="e4m3"), "grad_output", 2.0**-1),  # either way
    ],
    ids=str,
)
def test_the_floor_is_the_largest_relative_error(
    recipe: Fp8Recipe, role: Role, largest_error: float
) -> None:
    """Noise that is this part of every number has its square as a part of the power."""
    floor = floor_of(Probe(recipe, role))
    assert floor == pytest.approx(-10 * math.log10(largest_error**2))


def test_the_floor_of_simulated_numbers_is_half_of_the_power() -> None:
    assert pytest.approx(2.0, rel=0.01) == 10 ** (SIMULATED_FLOOR / 10)


def test_a_rule_that_fails_for_one_odd_shape_is_found() -> None:
    """A tensor of nine rows is not finite; no other check has nine rows."""
    honest = lie().cast
    recipe = lie(cast=lambda self, x, cast: honest(self, x * math.nan if len(x) == 9 else x, cast))
    found = fp8.check(recipe)
    assert {one.trait for one in found.refutations} == {"runs"}
    assert "[9, 33] is not finite" in str(found)


def test_a_rule_that_fails_for_one_block_is_found() -> None:
    """A tensor of a single whole block is not finite."""
    honest = lie().cast

    def cast(self: object, x: torch.Tensor, cast: fp8.Cast) -> object:
        return honest(self, x * math.nan if tuple(x.shape) == (32, 32) else x, cast)

    found = fp8.check(lie(traits(blocks(32)), cast=cast))
    assert "[32, 32] is not finite" in str(found)


def test_a_reason_names_the_first_scale_that_is_no_power_of_two() -> None:
    probe = Probe(Fp8Recipe(name="rowwise", power_2_scale=False), "input")
    scales = probe.operands(probe.wide)["last"].dequant_scale.flatten().tolist()
    first = next(scale for scale in scales if math.frexp(scale)[0] != 0.5)
    assert f"the scale {first:.6g} along the last dim" in next(wrong_scales(probe))


def test_the_bound_of_a_bias_is_that_of_all_draws() -> None:
    """Three of four errors of 1/4 go upward; the signs of 32 draws are judged by 32 others.

    Each draw has 64 x 96 numbers. The bound is Hoeffding's, for errors between -1/4 and 1/4, and
    for the chance 1e-9 of either sign; bytes add 1/256.
    """

    def cast(self: object, x: torch.Tensor, cast: Cast) -> torch.Tensor:
        return x.float() + torch.where(cast.draw(tuple(x.shape)) >= 64, 0.25, -0.25)

    bound = 0.25 * (math.sqrt(2 * math.log(2 / 1e-9) / (32 * 64 * 96)) + 1 / 256)
    report = fp8.check(lie(SIMULATED_RANDOM, cast=cast))
    assert f"chance explains {bound:.3g}" in str(report)
