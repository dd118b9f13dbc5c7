"""The measured rate of a product is that of a product, takes little time, and draws no numbers."""

from __future__ import annotations

import time

import pytest
import torch

from megafp8.ops import peak
from megafp8.ops.peak import measured_tflops
from megafp8.train.report.header import peak_of
from tests.tiny import run_spec

CPU = torch.device("cpu")


def test_a_measurement_is_short_and_leaves_the_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    began = time.process_time()
    rate = measured_tflops(CPU, torch.float32)
    assert time.process_time() - began < 2 * torch.get_num_threads()  # 0.1 s on an idle machine
    assert 1e-5 < rate < 1e4
    assert torch.equal(before, torch.get_rng_state())


def test_the_size_grows_with_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of 1 TFLOP/s, three products of width 2048 take 0.05 s, of 4096 0.4 s."""
    tried: list[int] = []

    def seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
        tried.append(size)
        return 2 * size**3 / 1e12

    monkeypatch.setattr(peak, "_seconds", seconds)
    assert measured_tflops(CPU, torch.float32) == pytest.approx(1.0)
    assert tried == [256, 256, 2048, 2048, 2048]


def test_a_slow_device_measures_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_seconds", lambda size, device, dtype: float(size))
    assert measured_tflops(CPU, torch.float32) == pytest.approx(2 * 256**2 / 1e12)


def test_a_cpus_peak_says_what_was_measured() -> None:
    found = peak_of(run_spec(compute="fp32"), CPU)
    assert found.products == "FP32" and found.fp8_tflops is None
    assert found.device == "CPU" and found.source.startswith("measured now with ")
