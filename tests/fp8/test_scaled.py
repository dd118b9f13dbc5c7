"""Tensors stored in low precision: the slow specification, bit for bit, in C and in torch."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fp8_numerics.kernels.compile import Library
from megafp8.fp8 import scaled
from megafp8.fp8.scaled import Dither, ScaledTensor, add_up, scales_for
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.specs.optim import ITEM_BYTES, StorageName
from tests.c_kernels import need_kernels
from tests.spec import scaled as spec

FORMATS = pytest.mark.parametrize("name", STORAGE_FORMATS)
LOW_PRECISION = pytest.mark.parametrize("name", [n for n in STORAGE_FORMATS if n != "fp32"])


@pytest.fixture(params=["C", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to add: the kernel, and torch operations."""
    if request.param == "torch":
        monkeypatch.setattr(scaled, "library", lambda: Library(None, "switched off"))
    else:
        need_kernels()


def samples() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(13, 29, generator=generator)
    wide = normal * torch.exp2(torch.randint(-40, 40, normal.shape, generator=generator).float())
    return {
        "normal": normal,
        "wide": wide,
        "tiny": normal * 2.0**-140,  # subnormal in FP32
        "huge": normal * 2.0**125,
        "zero": torch.zeros(3, 5),
        "negative zero": -torch.zeros(7),
        "one": torch.tensor([448.0]),
        "ties": torch.arange(-200, 200) / 32 + 17,
        "powers": torch.exp2(torch.arange(-149.0, 128.0)),
        "empty": torch.zeros(0, 4),
    }


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bits, any NaN counting as any other."""
    real = ~right.isnan()
    bits = (left[real].view(torch.int32), right[real].view(torch.int32))
    return torch.equal(*bits) and torch.equal(left.isnan(), ~real)


@pytest.mark.parametrize(
    ("name", "amax", "scale"),
    [
        ("fp8", 10.0, 32.0),  # MS-AMP's own test vectors
        ("fp8", 10000.0, 1 / 32),
        ("fp8", 0.0, 1.0),
        ("fp8", 1e-3, 262144.0),
        ("fp16", 0.1, 524288.0),
        ("fp8_e5m2", 57344.0, 1.0),
        ("fp8", 1e-45, 2.0**126),
        ("bf16", 3.0, 1.0),
        ("fp32", 3.0, 1.0),
    ],
)
def test_scales_are_ms_amps(name: StorageName, amax: float, scale: float) -> None:
    quant_scale, dequant_scale = scales_for(torch.tensor(amax), STORAGE_FORMATS[name])
    assert quant_scale.item() == scale and dequant_scale.item() == 1 / scale


@FORMATS
def test_the_bytes_of_a_format_are_those_of_its_dtype(name: StorageName) -> None:
    assert ITEM_BYTES[name] == STORAGE_FORMATS[name].dtype.itemsize


@FORMATS
@pytest.mark.parametrize("kind", samples())
def test_what_is_stored_is_the_specifications(name: StorageName, kind: str) -> None:
    values = samples()[kind]
    expected = torch.from_numpy(spec.stored(values.numpy(), name))
    assert same(ScaledTensor.of(values, STORAGE_FORMATS[name]).values(), expected)


@LOW_PRECISION
@pytest.mark.parametrize("kind", samples())
def test_stochastic_rounding_is_the_specifications(name: StorageName, kind: str) -> None:
    values, key = samples()[kind], 0x0123456789ABCDEF
    expected = torch.from_numpy(spec.stored(values.numpy(), name, key))
    stored = ScaledTensor.zeros(values.shape, STORAGE_FORMATS[name])
    stored.store(values, Dither(key))
    assert same(stored.values(), expected)


@pytest.mark.parametrize("name", ["fp16", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("exponent", [-30, 0, 30])
def test_the_scaled_amax_lies_in_the_upper_half(name: StorageName, exponent: int) -> None:
    fmt = STORAGE_FORMATS[name]
    assert fmt.max is not None
    for base in torch.linspace(1, 2, 99).tolist():
        quant_scale, _ = scales_for(torch.tensor(base * 2.0**exponent), fmt)
        amax = float(np.float32(base * 2.0**exponent)) * quant_scale.item()
        assert fmt.max / 2 < amax <= fmt.max


@pytest.mark.parametrize("name", ["fp16", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_makes_all_values_nan(name: StorageName, bad: float, path: None) -> None:
    values = torch.linspace(-1, 1, 99)
    values[17] = bad
    stored = ScaledTensor.of(values, STORAGE_FORMATS[name])
    assert stored.values().isnan().all()
    added = ScaledTensor.zeros((99,), STORAGE_FORMATS[name])
    added.add(values, is_first=True)
    assert added.values().isnan().all() and added.sum_of_squares().isnan()
    added.add(torch.ones(99), is_first=False)
    assert added.values().isnan().all(), "a bad microbatch is not forgotten"
    added.add(torch.ones(99), is_first=True)
    assert torch.equal(added.values(), torch.ones(99)), "but the next step begins anew"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", torch.float32),
        ("fp8", torch.bfloat16),
        ("fp8", torch.float16),
        ("fp8_e5m2", torch.bfloat16),
        ("fp16", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp32", torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [0, 1, 1025, 70001])
def test_sums_are_read_added_and_requantized(
    name: StorageName, dtype: torch.dtype, size: int, path: None
) -> None:
    generator = torch.Generator().manual_seed(size)
    total = ScaledTensor.zeros((size,), STORAGE_FORMATS[name])
    expected = torch.zeros(size)
    for number in range(3):
        part = (torch.randn(size, generator=generator) * 10.0 ** (number - 1)).to(dtype)
        total.add(part, is_first=number == 0)
        exact = part.float() if number == 0 else expected + part.float()
        few = slice(0, 300)  # of the long one the specification does a part with the same amax
        if size > 2000:
            expected = ScaledTensor.of(exact, total.fmt).values()
            place = int(exact.abs().argmax())
            sample = torch.cat((exact[few], exact[place : place + 1]))
            slow = torch.from_numpy(spec.stored(sample.numpy(), name))
            assert same(total.values()[few], slow[:-1])
        else:
            expected = torch.from_numpy(spec.stored(exact.numpy(), name))
        assert same(total.values(), expected)


@FORMATS
@pytest.mark.parametrize("kind", ["wide", "tiny", "huge", "zero", "negative zero"])
def test_sums_of_extreme_numbers_are_the_specifications(
    name: StorageName, kind: str, path: None
) -> None:
    """Of tiny numbers the scale is the largest one, whose inverse is a normal number."""
    values = samples()[kind].flatten()
    total = ScaledTensor.zeros(values.shape, STORAGE_FORMATS[name])
    total.add(values, is_first=True)
    assert same(total.values(), torch.from_numpy(spec.stored(values.numpy(), name)))


@FORMATS
def test_a_factor_on_the_scale_leaves_the_payload(name: StorageName) -> None:
    stored = ScaledTensor.of(samples()["normal"], STORAGE_FORMATS[name])
    if stored.fmt.max is None:
        return
    before, values = stored.payload.clone(), stored.values()
    stored.dequant_scale.mul_(0.3)
    assert torch.equal(stored.payload.view(torch.uint8), before.view(torch.uint8))
    torch.testing.assert_close(stored.values(), values * 0.3)
    norm = stored.values().double().square().sum()
    torch.testing.assert_close(stored.sum_of_squares(), norm, rtol=1e-6, atol=0)


@LOW_PRECISION
def test_stochastic_rounding_is_right_on_average(name: StorageName) -> None:
    """Of 40000 equal values between two numbers, the mean is the value within 5 sigma."""
    for value in (1.03, -0.77, 1 + 2.0**-12):
        values = torch.full((40000,), value)
        values[0] = 1.9  # the amax, so that all values have one scale
        stored = ScaledTensor.zeros(values.shape, STORAGE_FORMATS[name])
        found = []
        for key in (11, 2**40 + 3):
            stored.store(values, Dither(key))
            found.append(stored.values()[1:].double())
        low, high = found[0].min().item(), found[0].max().item()
        assert low <= value <= high and low < high
        share = (value - low) / (high - low)
        sigma = (high - low) * math.sqrt(share * (1 - share) / 40000)
        for mean in (found[0].mean().item(), found[1].mean().item()):
            assert abs(mean - values[1].item()) <= 5 * sigma
        assert not torch.equal(*found), "another key rounds in another way"


def test_storing_twice_changes_nothing() -> None:
    for fmt in STORAGE_FORMATS.values():
        for values in samples().values():
            once = ScaledTensor.of(values, fmt).values()
            assert same(ScaledTensor.of(once, fmt).values(), once)


def parts_of(name: StorageName, size: int) -> list[ScaledTensor]:
    """Return three tensors of normal numbers of other magnitudes."""
    generator = torch.Generator().manual_seed(size)
    found = [torch.randn(size, generator=generator) * 10.0**k for k in (0, 1, -1)]
    return [ScaledTensor.of(values, STORAGE_FORMATS[name]) for values in found]


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "fp16", "bf16", "fp32"])
@pytest.mark.parametrize("size", [1, 1027, 70_000])
def test_sums_of_parts_are_added_in_their_order(name: StorageName, size: int, path: None) -> None:
    parts, total = parts_of(name, size), torch.full((size,), 7.0)
    amax = add_up(parts, total)
    first, second, third = (part.values() for part in parts)
    assert torch.equal(total, (first + second) + third)
    assert amax.shape == () and amax == total.abs().max()


def test_parts_are_added_in_c_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    need_kernels()
    asked: list[int] = []
    lib = SimpleNamespace(megafp8_sum_of=lambda parts, count, *_: asked.append(count))
    monkeypatch.setattr(scaled, "library", lambda: SimpleNamespace(lib=lib))
    add_up(parts_of("fp8", 8), torch.zeros(8))
    assert asked == [3]
