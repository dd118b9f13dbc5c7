"""Our casts against torchao's own, for the recipes that are torchao's; and `tensorwise`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8_numerics.cast import Fp8Tensor
from megafp8.backends import torchao as torchao_linear
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.quantizer import Role
from megafp8.fp8.scaling import ScalingState
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import RecipeName
from tests.fp8.quantized import quantized

pytest.importorskip("torchao", reason="torchao is not installed")


def theirs(x: torch.Tensor, fmt: torch.dtype, dim: int | None, power_2: bool) -> Any:
    """torchao's cast: (payload, scale to multiply by)."""
    torchao_linear.import_torchao()
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    granularity = ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE
    scale = tensor_to_scale(
        x,
        fmt,
        scaling_granularity=granularity,
        axiswise_dim=dim,
        round_scales_to_power_of_2=power_2,
    )
    return to_fp8_saturated(x.float() * scale, fmt), scale


def assert_equal(ours: Fp8Tensor | None, x: torch.Tensor, dim: int | None, power_2: bool) -> None:
    assert ours is not None
    payload, scale = theirs(x, ours.fmt.dtype, dim, power_2)
    assert torch.equal(ours.payload.view(torch.uint8), payload.view(torch.uint8))
    assert torch.equal(ours.dequant_scale.flatten(), scale.reciprocal().flatten())


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_are_torchaos(name: RecipeName, role: Role, dtype: torch.dtype) -> None:
    power_2 = name != "tensorwise"
    backward = "e5m2" if name == "tensorwise" else "e4m3"
    recipe = Fp8Recipe(name=name, backward_format=backward, power_2_scale=power_2)
    quantizer = linear_quantizer(ScalingState(recipe), "linear")
    assert quantizer is not None
    generator = torch.Generator().manual_seed(3)
    sizes = torch.logspace(-5, 3, 48)[:, None]
    x = (torch.randn(48, 80, generator=generator) * sizes).to(dtype)
    x[3] = 0  # below torchao's smallest amax
    (last, first), _ = quantized(quantizer, role, x)
    if name == "tensorwise":
        assert_equal(last, x, None, power_2)
        return
    assert_equal(last, x, -1, power_2)
    whole = name == "rowwise_with_gw_hp" and role == "weight"
    assert_equal(first, x, None if whole else 0, power_2)
