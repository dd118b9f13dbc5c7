"""The scalings of FP8 sums equal sums by enumeration, and their extremes are known."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.spec.formats import E4M3, dequantize, quantize

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        path = BENCHMARKS / "fp8_reduction_scaling.py"
        spec = importlib.util.spec_from_file_location("fp8_reduction_scaling", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_scales_are_those_of_ms_amp(bench: ModuleType) -> None:
    amaxes = [10.0, 1e4, 1e-3, 448.0, 449.0, 0.0]
    assert [bench.scale_of(amax) for amax in amaxes] == [32, 1 / 32, 262144, 1, 0.5, 1]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0, 1e4])
def test_a_sum_is_rounded_after_each_rank(bench: ModuleType, scale: float) -> None:
    """The values of E4M3 are looked up among all its codes, and sums saturate."""
    rng = np.random.default_rng(int(scale))
    parts = (rng.standard_normal((6, 40)) * scale).astype(np.float32)
    parts[:, 0], parts[1, 1] = 0.0, -0.0
    one = np.float32(1)
    total = dequantize(quantize(parts[0], one, E4M3), E4M3).astype(np.float32)
    for part in parts[1:]:
        payload = dequantize(quantize(part, one, E4M3), E4M3).astype(np.float32)
        total = dequantize(quantize(total + payload, one, E4M3), E4M3).astype(np.float32)
    payloads = [bench.to_e4m3(torch.from_numpy(part)) for part in parts]
    assert np.array_equal(bench.sum_in_fp8(payloads).numpy(), total)
    assert (np.abs(total) == 448).any() == (scale > 100)


def test_equal_gradients_saturate_unless_they_are_scaled_before(bench: ModuleType) -> None:
    """The sum of 8 values near 448 is beyond the format; an eighth of them, or mu, keeps it in."""
    grads = [torch.tensor([300.0, -300.0, 256.0])] * 8
    pre, post, auto = (bench.measure(grads, rule) for rule in ("pre", "post", "auto"))
    assert post.overflow == 1 and pre.overflow == auto.overflow == 0
    assert auto.mu == 1 / 8 and pre.snr_db == auto.snr_db > 20 > post.snr_db
    assert bench.measure(grads, "fp32").overflow == 0


def test_small_gradients_vanish_if_they_are_divided_before(bench: ModuleType) -> None:
    """2^-9 is the smallest number of E4M3; a hundredth of it is zero."""
    grads = [torch.tensor([400.0, 2.0**-9, 0.0])] + [torch.tensor([0.0, 2.0**-9, 0.0])] * 127
    pre, post, auto = (bench.measure(grads, rule) for rule in ("pre", "post", "auto"))
    assert pre.underflow == 128 / 129 and post.underflow == auto.underflow == 0
    assert auto.mu == 1 and auto.snr_db > pre.snr_db


def test_gradients_of_zero(bench: ModuleType) -> None:
    for rule in bench.RULES:
        found = bench.measure([torch.zeros(4)] * 3, rule)
        assert (found.underflow, found.overflow, found.snr_db) == (0, 0, float("inf"))
