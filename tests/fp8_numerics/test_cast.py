"""The cast, compiled and by torch operations, equals the specification bit for bit."""

from __future__ import annotations

import copy
import ctypes
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_numerics import block_casts, cast, formats, mxfp8, nvfp4
from fp8_numerics.cast import (
    Fp8Tensor,
    Quantized,
    decode,
    quantize,
    quantize_scaled,
    quantize_torch,
)
from fp8_numerics.formats import Fp8Format
from fp8_numerics.gemm import GemmCounter, gemm
from fp8_numerics.kernels.compile import Library, library
from fp8_numerics.scaled_mm import scaled_mm
from fp8_numerics.scales import (
    amax_of_blocks,
    power_2_below,
    scale_of_amax,
    scale_of_amax_torchao,
)
from tests.c_kernels import need_kernels, threads_started
from tests.spec import delayed
from tests.spec import formats as spec

FLT_MAX = float(np.finfo(np.float32).max)
SCALES = [1.0, 2.0**-9, 3.7, 448 / 3.1e-4, 2.0**127, FLT_MAX, 2.0**-126, 2.0**-149]
Quantize = Callable[..., Quantized]

both_formats = pytest.mark.parametrize("fmt", [formats.E4M3, formats.E5M2], ids=lambda f: f.name)
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.fixture(params=["compiled", "torch"])
def quantize_path(request: pytest.FixtureRequest) -> Quantize:
    if request.param == "torch":
        return quantize_torch
    need_kernels()
    return quantize


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_follows_specification(
    quantize_path: Quantize, x: torch.Tensor, scale: float, fmt: Fp8Format
) -> Quantized:
    """Payload, amax and the grid of either dtype of one cast."""
    quant_scale, amax = torch.tensor(scale), torch.zeros(())
    result = quantize_path(x, quant_scale, fmt, amax=amax, grid_dtype=torch.bfloat16)
    for grid_dtype in (torch.float32, None):
        again = quantize_path(x, quant_scale, fmt, amax=None, grid_dtype=grid_dtype)
        assert torch.equal(again.payload.view(torch.uint8), result.payload.view(torch.uint8))
        if grid_dtype is not None:
            assert_is_decoding(again, fmt, grid_dtype)
    values = x.float().numpy()
    expected = spec.quantize(values, np.float32(scale), spec.ALL_FORMATS[fmt.name])
    codes = result.payload.view(torch.uint8).numpy()
    assert result.payload.dtype == fmt.dtype and result.payload.shape == x.shape
    if not spec.same_codes(codes, expected, spec.ALL_FORMATS[fmt.name]):
        at = np.flatnonzero(codes != expected)[:5]
        pytest.fail(f"{values.flat[at]} * {scale}: {codes.flat[at]}, not {expected.flat[at]}")
    assert amax.item() == delayed.amax_of(values), "amax"
    assert_is_decoding(result, fmt, torch.bfloat16)
    return result


def assert_is_decoding(result: Quantized, fmt: Fp8Format, grid_dtype: torch.dtype) -> None:
    """The grid holds the payload's numbers, signs of zeros included."""
    assert result.grid is not None and result.grid.dtype == grid_dtype
    assert result.grid.shape == result.payload.shape
    codes = result.payload.view(torch.uint8).numpy()
    numbers = spec.dequantize(codes, spec.ALL_FORMATS[fmt.name])
    grid = result.grid.double().numpy()
    np.testing.assert_array_equal(grid, numbers)
    real = ~np.isnan(numbers)
    np.testing.assert_array_equal(np.signbit(grid[real]), np.signbit(numbers[real]))


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def random_float32_bits(count: int, seed: int) -> torch.Tensor:
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


@both_formats
@halves
@pytest.mark.parametrize("scale", SCALES)
def test_every_16_bit_pattern(
    quantize_path: Quantize, dtype: torch.dtype, fmt: Fp8Format, scale: float
) -> None:
    assert_follows_specification(quantize_path, all_halves(dtype), scale, fmt)


@both_formats
@pytest.mark.parametrize("scale", SCALES)
def test_random_float32_bit_patterns(quantize_path: Quantize, fmt: Fp8Format, scale: float) -> None:
    """Unlike the 16-bit patterns these have mantissa bits below the rounding position."""
    x = random_float32_bits(60_000, seed=1)
    assert_follows_specification(quantize_path, x, scale, fmt)
    in_range = x[x.isfinite()].remainder(8.0) / scale if scale > 1e-30 else x
    assert_follows_specification(quantize_path, in_range, scale, fmt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_amax_in_c_has_the_bits_of_torch_operations(
    dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the largest lies, of every sign and kind; a zero has the sign that torch gives it.

    Threads share 65,536 elements and more.
    """
    need_kernels()
    x = 0.9 * torch.rand(70_001).to(dtype)
    tiny, largest = torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max
    cases = [x, x[:1], x[:67], x[:0], -x, x * tiny, 0 * x, -0.0 * x, x[:70_000].view(2, -1).t()]
    for at, value in itertools.product(
        (0, 31, 65_536, 70_000), (-1.0, tiny, largest, math.inf, -math.inf, math.nan)
    ):
        cases.append(x.clone())
        cases[-1][at] = value
    found = [cast.amax_of(each) for each in cases]
    monkeypatch.setattr(cast, "library", lambda: Library(None, "not asked"))
    for each, amax in zip(cases, found, strict=True):
        assert amax.dtype == torch.float32 and amax.shape == ()
        expected = cast.amax_of(each)
        assert torch.equal(amax.view(torch.int32), expected.view(torch.int32)), (amax, expected)


@both_formats
def test_ties_and_their_neighbours(quantize_path: Quantize, fmt: Fp8Format) -> None:
    """Every midpoint between two codes, and the float32 numbers next to it on both sides."""
    grid = spec.ALL_FORMATS[fmt.name].finite_magnitudes
    ties = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)
    near = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e30))]
    x = torch.from_numpy(np.concatenate([*near, *(-n for n in near)]))
    assert_follows_specification(quantize_path, x, 1.0, fmt)


@both_formats
def test_special_values(quantize_path: Quantize, fmt: Fp8Format) -> None:
    largest = fmt.max
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.2e-38, largest, largest * 1.001, 1e30, -1e30])
    finite = assert_follows_specification(quantize_path, x, 1.0, fmt).payload.view(torch.uint8)
    assert finite[:4].tolist() == [0x00, 0x80, 0x00, 0x80]
    assert finite[5:].float().view(-1).tolist() == [finite[5]] * 3 + [finite[5] | 0x80]
    infinite = torch.tensor([math.inf, -math.inf, 1.0])
    saturated = assert_follows_specification(quantize_path, infinite, 1.0, fmt).payload.float()
    assert saturated.tolist() == [largest, -largest, 1.0]
    with_nan = torch.tensor([math.nan, -math.nan, 1.0, math.inf])
    casted = assert_follows_specification(quantize_path, with_nan, 1.0, fmt).payload.float()
    assert casted.isnan().tolist() == [True, True, False, False]


@both_formats
def test_scale_of_a_tiny_amax_is_flt_max_and_zeros_stay_zeros(
    quantize_path: Quantize, fmt: Fp8Format
) -> None:
    x = torch.tensor([0.0, -0.0, 1e-40, -1e-42, 1e-45, 1e-38])
    result = assert_follows_specification(quantize_path, x, FLT_MAX, fmt)
    assert result.payload.float()[:2].tolist() == [0.0, 0.0]
    assert not result.payload.float().isnan().any()


@both_formats
@pytest.mark.parametrize("shape", [(0,), (0, 5), (1,), (3, 0), (7, 13), (2, 3, 5), ()])
def test_odd_and_empty_shapes(
    quantize_path: Quantize, fmt: Fp8Format, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert_follows_specification(quantize_path, x, 30.0, fmt)


@both_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_contiguous_input(quantize_path: Quantize, fmt: Fp8Format, dtype: torch.dtype) -> None:
    x = torch.randn(33, 21, generator=torch.Generator().manual_seed(0)).to(dtype)
    for view in (x.t(), x[::2, 1::3], x[:, 4]):
        assert not view.is_contiguous()
        assert_follows_specification(quantize_path, view, 11.0, fmt)


@both_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_that_threads_share(
    quantize_path: Quantize, fmt: Fp8Format, dtype: torch.dtype, num_threads: int
) -> None:
    """Above 65,536 elements; the amax sits at the first, the last and the seams' elements."""
    count = 200_003
    x = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    for position in (0, count - 1, count // 2, 100_032 - 1, 100_032):
        peak = x.clone()
        peak[position] = -77.0
        amax = torch.zeros(())
        quantize_path(peak, torch.tensor(3.0), fmt, amax=amax, grid_dtype=None)
        assert amax.item() == 77.0
    result = assert_follows_specification(quantize_path, x, 3.0, fmt)
    assert torch.equal(decode(result.payload, fmt, torch.bfloat16), result.grid)


@both_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (0, 5), (301, 257), (3, 40_000), (999, 100)])
@pytest.mark.parametrize("with_kernels", [True, False], ids=["compiled", "torch"])
def test_column_sums_come_with_the_same_cast(
    monkeypatch: pytest.MonkeyPatch,
    fmt: Fp8Format,
    dtype: torch.dtype,
    shape: tuple[int, int],
    with_kernels: bool,
    num_threads: int,
) -> None:
    """Rows added in FP32: within rows * 2**-24 of the sum of magnitudes."""
    if with_kernels:
        need_kernels()
    else:
        monkeypatch.setattr(cast, "library", lambda: Library(None, "no compiler"))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for view, grid_dtype in itertools.product((x, x.t()), (torch.float32, torch.bfloat16)):
        amaxes, scale = torch.zeros(2), torch.tensor(50.0)
        alone = quantize(view, scale, fmt, amax=amaxes[0], grid_dtype=grid_dtype)
        sums = torch.full(view.shape[1:], torch.nan)
        both = quantize(view, scale, fmt, amax=amaxes[1], grid_dtype=grid_dtype, column_sum=sums)
        assert alone.grid is not None and alone.grid.dtype == grid_dtype
        assert torch.equal(both.payload.view(torch.uint8), alone.payload.view(torch.uint8))
        assert torch.equal(both.grid, alone.grid) and amaxes[0] == amaxes[1]
        bound = view.shape[0] * 2.0**-24 * view.double().abs().sum(0)
        assert ((sums.double() - view.double().sum(0)).abs() <= bound).all()


@both_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.0, -3.0, torch.inf, torch.nan])
def test_a_scale_that_is_none_has_one_meaning(
    fmt: Fp8Format, dtype: torch.dtype, scale: float
) -> None:
    """The product in FP32 is cast, sign and all, by the kernels as by torch operations."""
    need_kernels()
    x = torch.randn(3, 47, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, :3] = torch.tensor([0.0, torch.inf, torch.nan])
    options: Any = {"amax": None, "grid_dtype": torch.float32 if dtype != torch.bfloat16 else dtype}
    made = quantize(x, torch.tensor(scale), fmt, **options)
    expected = cast.quantize_torch(x, torch.tensor(scale), fmt, **options)
    assert made.grid is not None and expected.grid is not None
    assert torch.equal(made.grid.isnan(), expected.grid.isnan())
    assert torch.equal(made.grid.nan_to_num(), expected.grid.nan_to_num())
    assert torch.equal(made.payload.float().nan_to_num(), made.grid.float().nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (0, 5), (5, 0), (301, 257), (999, 100)])
def test_column_sums_alone(dtype: torch.dtype, shape: tuple[int, int], num_threads: int) -> None:
    """In 16 bits the bits of a cast's sums, in each layout."""
    need_kernels()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, sums, one = cast.column_sums(x), torch.empty(shape[1]), torch.ones(())
    assert found.shape == (1, shape[1]) and found.dtype == torch.float32
    bound = shape[0] * 2.0**-24 * x.double().abs().sum(0)
    assert ((found[0].double() - x.double().sum(0)).abs() <= bound).all()
    quantize(x, one, formats.E4M3, amax=None, grid_dtype=torch.float32, column_sum=sums)
    if dtype != torch.float32:
        assert torch.equal(found[0], sums)
        assert torch.equal(cast.column_sums(x.t().contiguous().t()), found)


@both_formats
def test_decoding_of_every_code(fmt: Fp8Format) -> None:
    """Compiled and by torch; 131,072 codes reach the threads and a vector loop's remainder."""
    numbers = spec.ALL_FORMATS[fmt.name].table
    for codes in (np.arange(256), np.tile(np.arange(256), 512), np.arange(37)):
        payload = torch.from_numpy(codes.astype(np.uint8)).view(fmt.dtype)
        decoded = [decode(payload, fmt, dtype) for dtype in (torch.bfloat16, torch.float32)]
        assert [each.dtype for each in decoded] == [torch.bfloat16, torch.float32]
        for each in (*decoded, payload.to(torch.bfloat16)):
            values = each.double().numpy()
            np.testing.assert_array_equal(values, numbers[codes])
            real = ~np.isnan(values)
            np.testing.assert_array_equal(
                np.signbit(values[real]), np.signbit(numbers[codes][real])
            )


@both_formats
def test_grid_only_when_asked_for(quantize_path: Quantize, fmt: Fp8Format) -> None:
    x, one = torch.randn(5), torch.ones(())
    assert quantize_path(x, one, fmt, amax=None, grid_dtype=None).grid is None
    assert quantize_path(x, one, fmt, amax=None, grid_dtype=torch.float32).grid is not None


@both_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_added_up_also_without_a_grid(fmt: Fp8Format, dtype: torch.dtype) -> None:
    x, one = torch.randn(9, 40).to(dtype), torch.ones(())
    sums, wanted = torch.zeros(40), torch.zeros(40)
    with_grid = quantize(x, one, fmt, amax=None, grid_dtype=torch.float32, column_sum=wanted)
    alone = quantize(x, one, fmt, amax=None, grid_dtype=None, column_sum=sums)
    assert alone.grid is None and torch.equal(sums, wanted)
    assert torch.equal(alone.payload.view(torch.uint8), with_grid.payload.view(torch.uint8))


@pytest.fixture(params=["C", "torch"])
def with_and_without_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let casts find the C kernels, and then none."""
    if request.param == "torch":
        monkeypatch.setattr(cast, "library", lambda: Library(None, "no compiler"))


@pytest.mark.usefixtures("with_and_without_kernels")
@pytest.mark.parametrize(
    ("x", "words", "said"),
    [
        (torch.ones(2, 3).double(), {}, r"x is torch.float64 \[2, 3\], and casts read torch.flo"),
        (torch.ones(2, 3).int(), {}, r"x is torch.int32"),
        (torch.ones(2, 3), {"quant_scale": torch.ones(2, 1)}, r"torch.float32 \[2, 1\], and not"),
        (torch.ones(2, 3), {"quant_scale": torch.ones(()).double()}, r"torch.float64 \[\], and"),
        (torch.ones(2, 3), {"amax": torch.zeros(()).half()}, r"torch.float16 \[\], and not one"),
        (
            torch.ones(2, 3),
            {"column_sum": torch.zeros(2)},
            r"torch.float32 \[2\] with strides \(1,\) for x \[2, 3\]",
        ),
        (
            torch.ones(2, 3),
            {"column_sum": torch.zeros(6)[::2]},
            r"\[3\] with strides \(2,\) .*contiguous",
        ),
        (
            torch.ones(2, 3).numpy(),
            {},
            "x is of type numpy.ndarray, and casts read torch.float32, ",
        ),
        (torch.ones(2, 3), {"quant_scale": 2.0}, "a scale or amax is of type float, and not one"),
        (torch.ones(2, 3), {"quant_scale": torch.ones((), device="meta")}, r"on meta, .* on cpu$"),
        (torch.ones(2, 3), {"amax": 0.0}, "a scale or amax is of type float, and not one"),
        (torch.ones(2, 3), {"fmt": "e4m3"}, "fmt is 'e4m3', and not a format as fp8_numerics.form"),
        (torch.ones(2, 3), {"fmt": torch.float8_e4m3fn}, "fmt is torch.float8_e4m3fn, and not a f"),
        (torch.ones(3), {"column_sum": torch.zeros(3)}, "for x"),
    ],
)
def test_what_kernels_would_misread_is_refused(
    x: torch.Tensor,
    words: dict[str, Any],
    said: str,
) -> None:
    """They get addresses, and would read or write what lies beside a tensor of another kind."""
    given: dict[str, Any] = {"quant_scale": torch.ones(()), "amax": None, "grid_dtype": None}
    with pytest.raises((TypeError, ValueError), match=said):
        quantize(x, **({"fmt": formats.E4M3} | given | words))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda fp8: decode(fp8, formats.E5M2, torch.float32), "that of e5m2 is torch.float8_e5m2"),
        (lambda fp8: decode(fp8.view(torch.uint8), formats.E4M3, torch.float32), "is torch.uint8"),
        (lambda fp8: decode(fp8.float().numpy(), formats.E4M3, torch.float32), "numpy.ndarray"),
        (lambda fp8: decode(fp8, formats.E4M3, torch.float16), "dtype is torch.float16: numbers"),
        (lambda fp8: decode(fp8, "e4m3", torch.float32), "fmt is 'e4m3', and not a format"),
        (lambda fp8: scale_of_amax(torch.ones(()), "e4m3", power_2=True), "fmt is 'e4m3'"),
        (lambda fp8: scale_of_amax_torchao(torch.ones(()), "e4m3", power_2=True), "fmt is 'e4m3'"),
        (lambda fp8: mxfp8.scales_of(torch.ones(()), "e4m3"), "fmt is 'e4m3'"),
        (lambda fp8: block_casts.current(fp8, (1, 2), "e4m3", power_2=True), "fmt is 'e4m3'"),
    ],
)
@pytest.mark.usefixtures("with_and_without_kernels")
def test_a_payload_of_another_format_and_no_format_are_refused(
    call: Callable[[torch.Tensor], object],
    said: str,
) -> None:
    with pytest.raises(TypeError, match=said):
        call(torch.ones(2, 4).to(formats.E4M3.dtype))


def test_a_cast_to_fp4_needs_scales_of_blocks() -> None:
    """Kernels would write E5M2, and torch operations E4M3; the rules of FP4 are in nvfp4.py."""
    for path, said in ((quantize, "e2m1: "), (quantize_torch, "e2m1: casts with one scale are to")):
        with pytest.raises(ValueError, match=said):
            path(torch.ones(4), torch.ones(()), formats.E2M1, amax=None, grid_dtype=None)


def test_staged_amax_is_a_running_maximum(quantize_path: Quantize) -> None:
    amax, one = torch.zeros(3), torch.ones(())
    seen = []
    for values in ([1.0, -3.0], [2.0], [], [5.5, 0.0], [-5.0], [math.nan], [1.0]):
        quantize_path(torch.tensor(values), one, formats.E4M3, amax=amax[1], grid_dtype=None)
        seen.append(amax[1].item())
    assert seen == [3.0, 3.0, 3.0, 5.5, 5.5, math.inf, math.inf]
    assert amax[[0, 2]].tolist() == [0.0, 0.0], "only its own slot"


def test_no_amax_records_nothing_and_changes_no_bits(quantize_path: Quantize) -> None:
    x, amax = torch.randn(100), torch.full((), 0.125)
    with_amax = quantize_path(x, torch.tensor(9.0), formats.E4M3, amax=amax, grid_dtype=None)
    before = amax.clone()
    without = quantize_path(x, torch.tensor(9.0), formats.E4M3, amax=None, grid_dtype=None)
    assert amax == before
    assert torch.equal(with_amax.payload.view(torch.uint8), without.payload.view(torch.uint8))


def test_input_is_not_changed(quantize_path: Quantize) -> None:
    x = torch.tensor([1e9, -1e9, 3.3, math.inf])
    before = x.clone()
    quantize_path(x, torch.ones(()), formats.E4M3, amax=torch.zeros(()), grid_dtype=torch.float32)
    assert torch.equal(x, before)


def test_device_without_kernels_takes_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast, "library", lambda: Library(None, "no compiler"))
    x = random_float32_bits(1000, seed=3)
    for fmt in (formats.E4M3, formats.E5M2):
        result = assert_follows_specification(quantize, x, 2.0, fmt)
        decoded = decode(result.payload, fmt, torch.bfloat16)
        assert torch.equal(decoded.nan_to_num(1.5), result.grid.nan_to_num(1.5))


# Properties

float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
powers_of_two = st.integers(-20, 20).map(lambda exponent: 2.0**exponent)
some_format = st.sampled_from([formats.E4M3, formats.E5M2])
some_path = st.sampled_from([quantize, quantize_torch])


def cast_values(path: Quantize, x: torch.Tensor, scale: float, fmt: Fp8Format) -> torch.Tensor:
    """Quantized and back, in FP64."""
    result = path(x, torch.tensor(scale), fmt, amax=None, grid_dtype=None)
    return result.payload.double() / scale


@given(some_path, st.lists(float32s, min_size=1), powers_of_two, some_format)
@settings(max_examples=50)
def test_casting_twice_is_casting_once(
    path: Quantize, values: list[float], scale: float, fmt: Fp8Format
) -> None:
    once = cast_values(path, torch.tensor(values), scale, fmt)
    assert torch.equal(cast_values(path, once.float(), scale, fmt), once)


@given(some_path, st.lists(float32s, min_size=1), powers_of_two, some_format)
@settings(max_examples=50)
def test_scale_by_two_is_input_by_two(
    path: Quantize, values: list[float], scale: float, fmt: Fp8Format
) -> None:
    x = torch.tensor(values)
    x = x[x.abs() < 1e38]
    doubled = path(2 * x, torch.tensor(scale), fmt, amax=None, grid_dtype=None).payload
    scaled = path(x, torch.tensor(2 * scale), fmt, amax=None, grid_dtype=None).payload
    assert torch.equal(doubled.view(torch.uint8), scaled.view(torch.uint8))


@given(some_path, st.lists(float32s, min_size=2), powers_of_two, some_format)
@settings(max_examples=50)
def test_cast_keeps_order_and_signs(
    path: Quantize, values: list[float], scale: float, fmt: Fp8Format
) -> None:
    x = torch.tensor(values).sort().values
    casted = cast_values(path, x, scale, fmt)
    assert (casted.diff() >= 0).all()
    assert torch.equal(casted.signbit(), x.signbit())
    assert torch.equal(cast_values(path, -x, scale, fmt), -casted)


@given(some_path, st.floats(2.0**-149, FLT_MAX, width=32), some_format)
@settings(max_examples=50)
def test_zeros_stay_zeros(path: Quantize, scale: float, fmt: Fp8Format) -> None:
    zeros = path(
        torch.tensor([0.0, -0.0]), torch.tensor(scale), fmt, amax=None, grid_dtype=None
    ).payload
    assert zeros.view(torch.uint8).tolist() == [0x00, 0x80]


@pytest.mark.slow
@both_formats
def test_every_float32_pattern_compiled_equals_torch(fmt: Fp8Format) -> None:
    """All 2**32 patterns at scale 1: 75 s on one core."""
    need_kernels()
    size, one = 1 << 24, torch.ones(())
    base = torch.arange(size, dtype=torch.int32)
    for chunk in range(256):
        x = (base + ((chunk << 24) - (1 << 32 if chunk > 127 else 0))).view(torch.float32)
        compiled = quantize(x, one, fmt, amax=None, grid_dtype=torch.float32)
        by_torch = quantize_torch(x, one, fmt, amax=None, grid_dtype=torch.float32)
        left, right = compiled.payload.view(torch.uint8), by_torch.payload.view(torch.uint8)
        assert torch.equal(left, right), f"chunk {chunk}: {x[left != right][:5]}"
        assert compiled.grid is not None and by_torch.grid is not None
        left, right = compiled.grid.view(torch.int32), by_torch.grid.view(torch.int32)
        differ = (left != right) & ~x.isnan()
        assert not differ.any(), f"chunk {chunk}: {x[differ][:5]}"


def test_a_copy_of_a_format_is_the_format() -> None:
    """Casts ask which object it is; a copied model cast E4M3 tensors to the bits of E5M2."""
    for fmt in formats.ALL_FORMATS.values():
        assert copy.deepcopy(fmt) is fmt and pickle.loads(pickle.dumps(fmt)) is fmt


amds_formats = pytest.mark.parametrize(
    "fmt", [formats.E4M3FNUZ, formats.E5M2FNUZ], ids=lambda f: f.name
)


@amds_formats
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 3.7, FLT_MAX])
def test_amds_formats_are_cast_by_torch_operations(fmt: Fp8Format, scale: float) -> None:
    """Every BF16 number, random FP32 bits, ties and their neighbours, and all 256 codes."""
    grid = spec.ALL_FORMATS[fmt.name].finite_magnitudes
    ties = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)
    near = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e30))]
    near.append(np.array([0, 2.0**-149, fmt.max, fmt.max * 1.001, np.inf], dtype=np.float32))
    bits = random_float32_bits(60_000, seed=1)
    for x in (
        all_halves(torch.bfloat16),
        bits,
        bits[bits.isfinite()].remainder(300.0),
        torch.from_numpy(np.concatenate([*near, *(-n for n in near)])),
    ):
        made = assert_follows_specification(quantize, x, scale, fmt)
        for dtype in (torch.bfloat16, torch.float32):
            assert_is_decoding(
                Quantized(made.payload, decode(made.payload, fmt, dtype)), fmt, dtype
            )
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype)
    for dtype in (torch.bfloat16, torch.float32):
        assert_is_decoding(Quantized(codes, decode(codes, fmt, dtype)), fmt, dtype)


@amds_formats
def test_a_tensor_and_a_product_in_amds_formats(fmt: Fp8Format) -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    scale = scale_of_amax(cast.amax_of(x), fmt, power_2=False)
    amax, sums = torch.zeros(()), torch.empty(32)
    made = Fp8Tensor.quantize(x, scale, fmt, amax=amax)
    assert torch.equal(
        quantize_scaled(x * scale, fmt).view(torch.uint8), made.payload.view(torch.uint8)
    )
    quantize(x, scale, fmt, amax=None, grid_dtype=None, column_sum=sums)
    assert amax == x.abs().max() and torch.equal(sums, x.sum(0))
    values = made.dequantize(torch.float32)
    step = 2.0**-4 if "e4m3" in fmt.name else 2.0**-3
    assert ((values - x).abs() <= step * x.abs() + 2.0**-9 / scale).all() and values.abs().max() > 1
    product = gemm(
        made, made, transpose_b=True, work=torch.float32, counter=GemmCounter(), place="here"
    )
    torch.testing.assert_close(product, values @ values.t())


@amds_formats
def test_other_engines_refuse_amds_formats_by_name(fmt: Fp8Format) -> None:
    pytest.importorskip("triton")
    from fp8_numerics.kernels import triton_current, triton_tile

    x, one = torch.ones(16, 16), torch.ones(())
    into = triton_tile.emitted(16, 16, fmt, x.device, with_rows=True, with_columns=False)
    for launch in (
        lambda: into.arguments(one, fmt, None),
        lambda: triton_current.scales_of(one, fmt, power_2=False),
        lambda: triton_current.cast_rowwise(x, fmt, power_2=True),
        lambda: triton_current.cast_blocks(x, fmt, power_2=True),
    ):
        with pytest.raises(ValueError, match=rf"^{fmt.name}: kernels cast to e4m3 and e5m2 alone"):
            launch()
    a, b = torch.ones(16, 16).to(fmt.dtype), torch.ones(16, 16).to(torch.float8_e4m3fn)
    for pair in ((a, b), (b, a)):
        with pytest.raises(ValueError, match=rf"{fmt.dtype}: products of this format are only emu"):
            scaled_mm(*pair, one, one, out_dtype=torch.float32)


@pytest.mark.parametrize("dim", [0, 1])
def test_amaxes_along_a_dim_and_of_nothing(dim: int) -> None:
    """A NaN is an infinity; along a dim of size 0 there is one zero for each of the others."""
    x_MN = torch.tensor([[1.0, -3.0, 2.0], [math.nan, 0.5, -0.0]], dtype=torch.bfloat16)
    wanted = torch.tensor([[3.0], [math.inf]] if dim else [[math.inf, 3.0, 2.0]])
    found = cast.amax_along(x_MN, dim)
    assert found.dtype == torch.float32 and torch.equal(found, wanted)
    empty = cast.amax_along(torch.empty(0, 5).t() if dim else torch.empty(0, 5), dim)
    assert torch.equal(empty, torch.zeros((5, 1) if dim else (1, 5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [1, 1041, 70_001])  # the last is shared by threads
def test_an_amax_of_all_kinds_and_orders_in_memory(dtype: torch.dtype, size: int) -> None:
    x = torch.randn(size, 2, generator=torch.Generator().manual_seed(size)).to(dtype)
    for last in (-9.5, -math.inf, math.nan):
        x[-1, 1] = last
        wanted = torch.tensor(9.5 if math.isfinite(last) else math.inf)
        for seen in (x, x.t(), x[:, 1]):
            assert cast.amax_of(seen).equal(wanted)
    assert cast.amax_of(torch.zeros(2, 2, dtype=dtype)).equal(torch.zeros(()))


def test_a_scale_of_torchao_is_divided_in_float64() -> None:
    amax = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 10
    for fmt in (formats.E4M3, formats.E5M2):
        scale = (fmt.max / amax.numpy().astype(np.float64)).astype(np.float32)
        ours = scale_of_amax_torchao(amax, fmt, power_2=False)
        assert np.array_equal(ours.numpy(), scale)
        below = scale_of_amax_torchao(amax, fmt, power_2=True).numpy()
        assert np.array_equal(below, np.exp2(np.floor(np.log2(scale))))


@pytest.mark.parametrize("rule", [scale_of_amax, scale_of_amax_torchao])
@pytest.mark.parametrize("power_2", [True, False])
@halves
def test_amaxes_in_halves_are_widened_and_others_refused(
    rule: Callable[..., torch.Tensor], power_2: bool, dtype: torch.dtype
) -> None:
    amax = torch.tensor([0.0, 3.0, 1.0 / 3, math.inf]).to(dtype)
    found, expected = (rule(each, formats.E4M3, power_2=power_2) for each in (amax, amax.float()))
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    for other, said in ((amax.double(), r"torch.float64 \[4\]"), (3.0, "of type float")):
        with pytest.raises(TypeError, match=rf"amax is {said}, .*amax.float\(\)"):
            rule(other, formats.E4M3, power_2=power_2)


@halves
def test_the_rules_of_blocks_widen_amaxes(dtype: torch.dtype) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    half, one = x.abs().amax(), x.abs().amax().float()
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda amax: nvfp4.quantize_blocks(x, 1, amax, None),
        lambda amax: (nvfp4.encoding(amax), nvfp4.outer_of(amax)),
        mxfp8.scales_of,
    ]
    for call in calls:
        for found, expected in zip(call(half), call(one), strict=True):
            assert found.dtype == torch.float32 and torch.equal(found, expected)
        with pytest.raises(TypeError, match=r"amax is torch.float64 \[\]"):
            call(one.double())


ONE, fp4, mx = torch.ones(()), nvfp4.quantize_blocks, mxfp8.quantize_rows


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: power_2_below(x.double()), r"scale is torch.float64 .*scale.float\(\)"),
        (lambda x: mxfp8.power_of(x.byte()), r"code is torch.uint8 .*code.int\(\)"),
        (lambda x: mx(x[:, :48]), r"x is torch.float32 \[4, 48\], .* of 32: fill"),
        (lambda x: mx(x[0]), r"x is torch.float32 \[64\]"),
        (lambda x: mx(x.numpy()), "x is of type numpy.ndarray"),
        (lambda x: mx(x.double()), r"x is torch.float64 \[4, 64\], and rules read .*: x.float\(\)"),
        (lambda x: fp4(x.double(), 1, ONE, None), r"x is torch.float64 .*: x.float\(\)"),
        (lambda x: fp4(x[:, :40], 1, ONE, None), r"\[4, 40\], .*of 1 x 16: fill"),
        (lambda x: fp4(x, 16, ONE, None), r"\[4, 64\], .*of 16 x 16: fill"),
        (lambda x: fp4(x, 1, x[:, 0], None), r"amax .*\[4\].* row, \[4, 1\]$"),
        (lambda x: fp4(x, 4, x[:, :1], None), r"\[4, 1\].*one number of the tensor$"),
        (lambda x: fp4(x, 1, ONE, x.long()), r"byte is torch.int64 \[4, 64\]"),
        (lambda x: fp4(x, 1, ONE, x.byte()[:1]), r"byte is torch.uint8 \[1, 64\]"),
        (lambda x: nvfp4.rotated(x[:, :40]), r"x is torch.float32 \[4, 40\] and signs has 16:"),
        (lambda x: nvfp4.rotated(x, (1,)), r"and signs has 1: 16 elements"),
    ],
)  # fmt: skip
def test_mistakes_in_the_rules_of_blocks_are_named(
    call: Callable[[torch.Tensor], object], said: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        call(torch.ones(4, 64))


def test_a_nan_makes_the_amax_of_its_block_infinite() -> None:
    x = torch.ones(3, 5)
    x[2, 4], x[0, 1], x[1, 2] = math.nan, -7, -math.inf
    assert amax_of_blocks(x, (2, 2)).tolist() == [[7, math.inf, 1], [1, 1, math.inf]]


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinity_becomes_a_nan(sign: int) -> None:
    x = torch.tensor([1.0, sign * math.inf, math.nan, -448.0])
    made = cast.with_nans(x)
    assert made.isnan().tolist() == [False, True, True, False] and made[3] == -448
    assert cast.with_nans(finite := torch.ones(3)) is finite


def test_numbers_of_fp4_are_decoded_as_those_of_e4m3() -> None:
    numbers = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6])
    payload = numbers.to(formats.E2M1.dtype)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(decode(payload, formats.E2M1, dtype), numbers.to(dtype))


@pytest.mark.parametrize("size", [65_535, 65_536])
def test_casts_of_small_tensors_start_no_threads(size: int) -> None:
    need_kernels()
    lib = library().lib
    assert lib is not None
    kinds = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.uint8)
    made = [torch.ones(size).to(dtype) for dtype in kinds]
    x, grid, total, half, payload = (ctypes.c_void_p(tensor.data_ptr()) for tensor in made)
    n, row, scale = ctypes.c_size_t(size), ctypes.c_size_t(1), x
    calls = [
        lambda: lib.megafp8_quantize(x, n, 0, 0, scale, payload, grid, 0, None, 2),
        lambda: lib.megafp8_quantize_and_sum(
            x, row, n, 0, 0, scale, payload, grid, 0, None, total, 2
        ),
        lambda: lib.megafp8_decode(payload, n, 0, grid, 0, 2),
        lambda: lib.megafp8_accumulate(total, half, n, 2),
    ]
    more = lib.megafp8_has_threads() if size == 65_536 else 0
    assert [threads_started(call) for call in calls] == [more] * 4
