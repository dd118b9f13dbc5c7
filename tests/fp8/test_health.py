"""FP8's health against plain sums over the same tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.health import HealthProbe, TableProbe, UpdateProbe, num_nonfinite
from megafp8.fp8.recipe_settings import checked_recipe
from megafp8.fp8.scaling import ScalingState
from megafp8.observe.accuracy import beyond_range
from megafp8.observe.health import HealthRecord, complaints, scalars
from megafp8.specs import Fp8Recipe, HealthSpec, TensorHealth
from megafp8.specs.precision import RecipeName
from megafp8.specs.recipes import RECIPES, find_recipe
from tests.fp8.test_linear import make, noise
from tests.spec import formats as spec_formats


def see(
    recipe: Fp8Recipe, tensors: list[torch.Tensor], scale: float | None = None, mode: str = "full"
) -> TensorHealth:
    """The input's health over these microbatches."""
    state = ScalingState(recipe)
    quantizer = linear_quantizer(state, "linear")
    assert quantizer is not None
    if scale is not None:
        state.forward.quant_scale.fill_(scale)
    probe = HealthProbe(state, mode)  # type: ignore[arg-type]
    probe.attach()
    for x in tensors:
        quantizer.operands("input", x)
    found = probe.detach()
    assert state.observers == []
    assert found.keys() == {"linear.input"}
    return found["linear.input"]


def test_shares_are_counts() -> None:
    """Scale 2**-4 in E4M3: below 2**-10 * 2**4 a value becomes 0; above 448 * 2**4 it saturates."""
    scale = 2.0**-4
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(8, 16, generator=generator) * 10.0 ** torch.randint(-4, 6, (8, 16)),
        torch.randn(4, 16, generator=generator),
    ]
    tensors[0][0, :4] = 0
    health = see(Fp8Recipe(), tensors, scale)
    x = np.concatenate([t.numpy().ravel() for t in tensors]).astype(np.float32)
    codes = spec_formats.quantize(x, np.float32(scale), spec_formats.E4M3)
    values = spec_formats.dequantize(codes, spec_formats.E4M3) / scale
    assert health.amax == np.abs(x).max() and health.quant_scale == scale
    assert health.underflow == pytest.approx(((values == 0) & (x != 0)).sum() / (x != 0).sum())
    assert health.overflow == pytest.approx((np.abs(x) * scale > 448).sum() / x.size)
    assert 0 < health.underflow < 1 and 0 < health.overflow < 1
    worst = max(
        noise_over_signal(lines)
        for t, start in zip(tensors, (0, 128), strict=True)
        for pair in [(t.double().numpy(), values[start : start + t.numel()].reshape(t.shape))]
        for lines in (zip(*pair, strict=True), zip(*(part.T for part in pair), strict=True))
    )
    assert health.snr_db == pytest.approx(-10 * math.log10(worst), rel=1e-4)


def noise_over_signal(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    """The mean over the rows of one product, of rows or columns and what casts made of them."""
    found = [((x - value) ** 2).sum() / (x**2).sum() for x, value in pairs if x.any()]
    return sum(found) / len(found)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_watched(name: RecipeName) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    health = see(Fp8Recipe(name=name, power_2_scale=name not in ("delayed", "tensorwise")), [x])
    assert health.amax == x.abs().max().item()
    traits = find_recipe(name).traits
    low = 15 if traits.numbers == "fp8" else 10
    assert health.snr_db is not None and low < health.snr_db < 50
    assert health.overflow is not None and health.overflow <= traits.max_saturated


def test_a_channel_of_1e3_costs_integers_all_and_e4m3_nothing() -> None:
    """E4M3's relative error is the same over 15 binades; integers have one step for all values."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    beside = x.clone()
    beside[:, 5] *= 1e3
    int8 = checked_recipe(f"{Path(__file__).parents[1]}/own_recipes/simulated_int8.py:Int8")
    for recipe, least, most in ((Fp8Recipe(name="tensorwise"), 0.0, 0.2), (int8, 38.0, 50.0)):
        plain, spoilt = (see(recipe, [each]).snr_db for each in (x, beside))
        assert plain is not None and spoilt is not None
        assert least <= abs(plain - spoilt) <= most


def test_scales_alone_measure_no_more() -> None:
    health = see(Fp8Recipe(), [torch.ones(4, 4)], mode="scales")
    assert (health.amax, health.quant_scale) == (1.0, 1.0)
    assert health.underflow is health.overflow is health.snr_db is None


def test_extremes_have_a_health() -> None:
    assert see(Fp8Recipe(), [torch.zeros(3, 4)]).snr_db == math.inf
    assert see(Fp8Recipe(), [torch.zeros(3, 4)]).underflow == 0
    assert see(Fp8Recipe(), [torch.tensor([[math.nan, 1.0]])]).amax == math.inf
    assert see(Fp8Recipe(), [torch.full((2, 2), 1e-30)]).underflow == 1
    assert see(Fp8Recipe(), [torch.full((2, 2), 1e-30)]).snr_db == 0


def test_evaluation_is_not_watched_and_nonfinite_updates_are_counted() -> None:
    state = ScalingState(Fp8Recipe())
    quantizer = linear_quantizer(state, "linear")
    assert quantizer is not None
    probe = HealthProbe(state, "full")
    probe.attach()
    with state.evaluation():
        quantizer.operands("input", torch.ones(2, 2))
    assert probe.detach() == {}
    quantizer.operands("input", torch.full((2, 2), math.inf))
    state.end_forward()
    assert num_nonfinite(state) == {"linear.input": 1}


def test_a_linear_without_rows_is_no_fault() -> None:
    """As an expert that no token chooses: before its first row, and between others."""
    layer = make(noise(16, 32, seed=1, dtype=torch.float32), None, Fp8Recipe(margin=1))
    state = layer.state
    assert state is not None
    probes = HealthProbe(state, "full"), UpdateProbe(state), TableProbe(state)
    casts, updates, tables = probes
    for rows in (0, 0, 3, 0, 0, 0):
        for probe in probes:
            probe.attach()
        state.begin_microbatch(0)
        out = layer.linear(noise(rows, 32, seed=2, dtype=torch.float32).requires_grad_())
        state.end_forward()
        out.backward(noise(rows, 16, seed=3, dtype=torch.float32))
        state.end_backward()
        numbers = updates.numbers().tolist()
        found = casts.detach(), updates.measures(numbers)[0], tables.detach()
        assert "linear.weight" in found[0] and (len(found[0]) == 3) == (rows > 0)
        assert found[2].keys() == found[0].keys()
        was_cast = bool(state.backward.num_updates[0])
        assert len(found[1]) == (3 if was_cast else 1)
        seen = {name: health.amax for name, health in found[1].items() if health.amax}
        assert seen == {name: health.amax for name, health in found[0].items()}
        for measured in found:
            record = HealthRecord(1, measured, num_nonfinite(state))
            assert complaints(record, HealthSpec()) == {}
            assert all(map(math.isfinite, scalars(record).values()))
            for name, health in measured.items():
                assert beyond_range(name, health, 448.0, 2.0**-9) is None
