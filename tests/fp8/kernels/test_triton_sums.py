"""Sums in low precision and their squares by Triton's kernels: torch's bits, and exact sums."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from megafp8.fp8 import scaled
from megafp8.fp8.kernels import triton_sums
from megafp8.fp8.scaled import ScaledTensor, add_by_triton
from megafp8.fp8.stored_formats import STORAGE_FORMATS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy

NAMES: Any = ("fp8", "fp8_e5m2", "fp16")


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sums, "BLOCK", 256)
    monkeypatch.setattr(triton_sums, "PROGRAMS", 2)


def assert_same(ours: ScaledTensor, theirs: ScaledTensor, what: object) -> None:
    for a, b in zip(ours.held_and_scale, theirs.held_and_scale, strict=True):
        same = torch.equal(a.nan_to_num(nan=1e9), b.nan_to_num(nan=1e9))
        assert same, f"{what}: {a} is not {b}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_torchs_bits(device: torch.device, name: Any, dtype: torch.dtype) -> None:
    """The scale grows, stays and shrinks; what lies past the end is not read."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (ScaledTensor.zeros((3, 257), STORAGE_FORMATS[name], device) for _ in range(2))
    for number, size in enumerate((1.0, 1.0, 30.0, 1e-3)):
        more = (size * torch.randn(3, 257, generator=generator)).to(device, dtype)
        add_by_triton(ours, more, is_first=number in (0, 3))
        theirs.add_by_torch(more, is_first=number in (0, 3))
        assert_same(ours, theirs, number)


@pytest.mark.parametrize(
    "value",
    [0.0, 1e-40, 1e-36, 448.0, 57344.0, 65504.0, 3e38, torch.inf, -torch.inf, torch.nan],
)
@pytest.mark.parametrize("name", NAMES)
def test_hard_addends(device: torch.device, name: Any, value: float) -> None:
    """The largest number of a format has the scale 1: one above it would have half of that."""
    more = torch.zeros(300, device=device)
    more[77] = value
    ours, theirs = (ScaledTensor.zeros((300,), STORAGE_FORMATS[name], device) for _ in range(2))
    for number in (0, 1, 2):
        add_by_triton(ours, more, is_first=number == 0)
        theirs.add_by_torch(more, is_first=number == 0)
        assert_same(ours, theirs, number)


@pytest.mark.parametrize("name", [*NAMES, "bf16"])
def test_squares_are_summed_exactly(device: torch.device, name: Any) -> None:
    """Of few elements, FP64 holds every square and sum: fractions say what they are."""
    generator = torch.Generator().manual_seed(2)
    stored = [
        ScaledTensor.of(torch.randn(size, generator=generator).to(device), STORAGE_FORMATS[name])
        for size in (1, 700, 1300)
    ]
    found = triton_sums.sums_of_squares(stored)
    assert found.dtype == torch.float64
    for one, got in zip(stored, found.tolist(), strict=True):
        exact = sum(Fraction(x) ** 2 for x in one.values().cpu().tolist())
        assert got == pytest.approx(float(exact), rel=2.0**-51)


def test_they_are_chosen_where_they_run_and_have_torchs_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU stands for the GPU: without C, and as if Triton ran on it."""
    calls: list[str] = []
    real = scaled.add_by_triton

    def counted(*args: Any, **options: Any) -> None:
        calls.append("Triton")
        real(*args, **options)

    monkeypatch.setattr(scaled, "add_by_triton", counted)
    monkeypatch.setattr(ScaledTensor, "_fits_kernel", lambda self, more: False)
    stored = ScaledTensor.zeros((8,), STORAGE_FORMATS["fp8"])
    stored.add(torch.ones(8), is_first=True)
    assert not calls, "a CPU does not choose them"
    monkeypatch.setattr(scaled, "runs_triton", lambda device: True)
    check = scaled._triton_reproduces_torch
    check.cache_clear()
    stored.add(torch.ones(8), is_first=False)
    assert calls == ["Triton"] * 4, "they were compared first"
    assert torch.equal(stored.values(), torch.full((8,), 2.0))
    plain = ScaledTensor.zeros((8,), STORAGE_FORMATS["bf16"])
    plain.add(torch.ones(8), is_first=False)
    assert len(calls) == 4, "a format without a scale needs no second pass"
    monkeypatch.setattr(scaled, "_triton_reproduces_torch", lambda *_: False)
    stored.add(torch.ones(8), is_first=False)
    assert len(calls) == 4 and torch.equal(stored.values(), torch.full((8,), 3.0))
    check.cache_clear()
