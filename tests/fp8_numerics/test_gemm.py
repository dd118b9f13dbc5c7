"""The one matrix product: what it computes, rounds and counts."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch

from fp8_numerics import cpu
from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.formats import E4M3, E5M2
from fp8_numerics.gemm import GemmCounter, gemm
from tests.fp8_numerics.kernels.tensor_cores import accumulation_bound, summed_as_on_hopper


class GradSum(NamedTuple):
    """A sum as the product asks for it."""

    total: torch.Tensor
    is_first: bool


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[True, False], ids=["BF16 products", "FP32 products"])
def bf16_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As a CPU with and without BF16 dot products would."""
    monkeypatch.setattr(cpu, "FAST_AT_BF16", request.param)
    return bool(request.param)


@pytest.fixture
def counter() -> GemmCounter:
    return GemmCounter()


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("work", [torch.float32, torch.bfloat16])
def test_small_integers_are_multiplied_exactly(
    transpose_a: bool,
    transpose_b: bool,
    work: torch.dtype,
    bf16_products: bool,
    counter: GemmCounter,
) -> None:
    """Integers up to 8 are FP8 numbers; 13 of their products stay below 2**10, so FP32 holds every
    partial sum and the result has one rounding: none in FP32 work, one in BF16 work."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 9, (13, 7) if transpose_a else (7, 13), generator=generator).float()
    b = torch.randint(-8, 9, (5, 13) if transpose_b else (13, 5), generator=generator).float()
    left = Fp8Tensor.quantize(a, torch.tensor(1.0), E4M3)
    right = Fp8Tensor.quantize(b, torch.tensor(0.25), E5M2)
    assert torch.equal(right.dequantize(torch.float32) * 0.25, right.numbers(torch.float32))
    product = gemm(
        left,
        right,
        work=work,
        counter=counter,
        place="here",
        transpose_a=transpose_a,
        transpose_b=transpose_b,
    )
    b = right.dequantize(torch.float32)  # E5M2 rounds 5 and 7
    exact = (a.t() if transpose_a else a).double() @ (b.t() if transpose_b else b).double()
    assert product.dtype == work
    assert torch.equal(product, exact.float().to(work))


@pytest.mark.parametrize("work", [torch.float32, torch.bfloat16])
def test_bias_is_added_before_the_one_rounding(
    work: torch.dtype, bf16_products: bool, counter: GemmCounter
) -> None:
    """512 + 1.5 + 1.25: rounding the product or the bias' sum early would lose one of them."""
    a = Fp8Tensor.quantize(torch.tensor([[32.0, 1.0]]), torch.tensor(1.0), E4M3)
    b = Fp8Tensor.quantize(torch.tensor([[16.0, 1.5]]), torch.tensor(1.0), E4M3)
    bias = torch.tensor([1.25], dtype=work)
    out = gemm(a, b, work=work, counter=counter, place="here", transpose_b=True, bias=bias)
    assert out.item() == torch.tensor(514.75).to(work).item()


def test_grid_and_payload_alone_give_the_same_product(
    bf16_products: bool, counter: GemmCounter
) -> None:
    for work, kept in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        a = Fp8Tensor.quantize(noise(9, 17), torch.tensor(80.0), E4M3, grid_dtype=kept)
        b = Fp8Tensor.quantize(noise(17, 3, seed=1), torch.tensor(70.0), E4M3, grid_dtype=kept)
        assert a.grid is not None and a.grid.dtype == kept and a.without_grid().grid is None
        first = gemm(a, b, work=work, counter=counter, place="x")
        again = gemm(a.without_grid(), b.without_grid(), work=work, counter=counter, place="x")
        assert torch.equal(first, again)


@pytest.mark.parametrize("work", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_operands(work: torch.dtype, counter: GemmCounter) -> None:
    a, b, bias = noise(4, 6, dtype=work), noise(5, 6, seed=1, dtype=work), noise(5, dtype=work)
    out = gemm(a, b, work=work, counter=counter, place="x", transpose_b=True, bias=bias)
    torch.testing.assert_close(out, torch.nn.functional.linear(a, b, bias))
    out = gemm(a, b, work=work, counter=counter, place="x", transpose_b=True)
    torch.testing.assert_close(out, a @ b.t())
    name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[work]
    assert dict(counter.flops) == {(name, "x"): 2 * (2 * 4 * 5 * 6)}


@pytest.mark.parametrize("work", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "plain"])
def test_a_product_is_written_where_it_belongs(
    work: torch.dtype, is_fp8: bool, bf16_products: bool, counter: GemmCounter
) -> None:
    """Among the rows of others, and with the same bits; one that is rounded afterwards is not."""
    a, b = noise(20, 32, dtype=work), noise(24, 32, seed=1, dtype=work)
    left, right = a, b
    if is_fp8:
        left, right = (Fp8Tensor.quantize(x, torch.tensor(2.0), E4M3) for x in (a, b))
    whole, begin, end = torch.full((40, 24), torch.nan, dtype=work), 7, 27

    def multiplied(out: torch.Tensor | None) -> torch.Tensor:
        return gemm(left, right, work=work, counter=counter, place="x", transpose_b=True, out=out)

    place = whole[begin:end]
    found, alone = multiplied(place), multiplied(None)
    is_rounded = work == torch.bfloat16 and not bf16_products or (is_fp8 and work == torch.float16)
    assert (found is place) == (not is_rounded)
    assert torch.equal(found, alone) and found.dtype == work
    assert whole[:begin].isnan().all() and whole[end:].isnan().all()


def add(got: torch.Tensor, into: GradSum) -> None:
    """Add a product to a sum, as a sink of gradients does where the product did not."""
    if got is not into.total:
        into.total.copy_(got) if into.is_first else into.total.add_(got)


@pytest.mark.parametrize("work", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "plain"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_product_for_a_sum_is_not_rounded_to_the_work(
    work: torch.dtype, is_fp8: bool, is_first: bool, bf16_products: bool, counter: GemmCounter
) -> None:
    """257 has nine significant bits: BF16 loses one of them. torch has no BF16 or FP16 product with
    an FP32 result on CPUs, so there the result has the dtype of the work."""
    total = torch.full((1, 1), torch.nan if is_first else 0.25)
    a, b = torch.tensor([[16.0, 1.0]], dtype=work), torch.tensor([[16.0], [1.0]], dtype=work)
    into = GradSum(total, is_first)
    if is_fp8:
        left, right = (Fp8Tensor.quantize(x, torch.tensor(2.0), E4M3) for x in (a, b))
        got = gemm(left, right, work=work, counter=counter, place="x", into=into)
        has_product = not (work == torch.bfloat16 and bf16_products)
    else:
        got = gemm(a, b, work=work, counter=counter, place="x", into=into)
        has_product = work == torch.float32 or (work == torch.bfloat16 and not bf16_products)
    assert (got is total) == has_product
    add(got, into)
    value = 257.0 if has_product else torch.tensor(257.0).to(work).item()
    assert total.item() == value + (0 if is_first else 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_exact_in_bf16", [True, False])
def test_values_are_rounded_once(dtype: torch.dtype, is_exact_in_bf16: bool) -> None:
    """A scale that is no power of two is never rounded to BF16."""
    scale = torch.tensor(2.0**-7 if is_exact_in_bf16 else 0.7e-2)
    x = Fp8Tensor.quantize(noise(64, 16) * 40, torch.tensor(1.0), E4M3)
    x.dequant_scale, x.is_exact_in_bf16 = scale, is_exact_in_bf16
    assert torch.equal(x.dequantize(dtype), (x.payload.float() * scale).to(dtype))


SCALES = {
    "their product is subnormal": (3e-30, 7e-12),
    "their product is 0": (3e-30, 7e-19),
    "one is subnormal": (3e-39, 0.7),
    "both are tiny, and their product is normal": (3e-19, 7e-19),
    "their product overflows": (3e30, 7e9),
    "their product overflows by far": (7e35, 7e35),
    "one is tiny and one is huge": (3e-30, 7e30),
}


@pytest.mark.parametrize("work", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("use", ["output", "bias", "first", "added"])
def test_two_scales_of_any_size_lead_to_the_product_in_float64(
    work: torch.dtype,
    scales: tuple[float, float],
    use: str,
    bf16_products: bool,
    counter: GemmCounter,
) -> None:
    """The bound has the terms of FP32 sums, of the result's dtype, and of subnormal results. Rows
    of zeros stay zeros, and a small number beside large ones stays finite."""
    numbers = noise(6, 40) * torch.tensor([0.0, 2e-2, 1.0, 30.0, 300.0, 1e-1])[:, None]
    numbers[1, 1:] = 0.0
    a = Fp8Tensor.quantize(numbers, torch.tensor(1.0), E4M3)
    b = Fp8Tensor.quantize(noise(40, 5, seed=1) * 50, torch.tensor(1.0), E5M2)
    a.dequant_scale, b.dequant_scale = (torch.tensor(scale) for scale in scales)
    scale = a.dequant_scale.double() * b.dequant_scale.double()
    left, right = (x.numbers(torch.float32).double() for x in (a, b))
    exact, magnitude = left @ right * scale, left.abs() @ right.abs() * scale
    bias = total = None
    if use == "bias":
        bias = (noise(5, seed=2) * scale.clamp(max=1e30)).to(work)
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    if use in ("first", "added"):
        total = noise(6, 5, seed=3) * scale.clamp(max=1e30).float()
        if use == "added":
            exact, magnitude = exact + total.double(), magnitude + total.double().abs()
    into = None if total is None else GradSum(total, use == "first")
    got = gemm(a, b, work=work, counter=counter, place="x", bias=bias, into=into)
    if into is not None:
        add(got, into)
        got = into.total
    bound = (40 + 6) * 2.0**-24 * magnitude + 40 * 2.0**-149
    if work == torch.bfloat16:
        bound = bound + 2.0**-8 * (exact.abs() + bound) + 2.0**-134
    assert_within(got, exact, bound)
    if use in ("output", "first"):
        assert (got[0] == 0).all()


@pytest.mark.parametrize(
    ("low", "high"), [(-63, -63), (-127, 0), (-130, 10), (-100, -28), (-126, -1), (-133, 60)]
)
@pytest.mark.parametrize("in_blocks", [True, False])
def test_bf16_products_near_the_smallest_normal_are_within_the_stated_bound(
    counter: GemmCounter, low: int, high: int, in_blocks: bool
) -> None:
    """CPUs with BF16 instructions take operands, terms and partial sums below 2^-126 for zero."""
    rows, inner = 32, 64
    left, right = noise(rows, inner, seed=1), noise(rows, inner, seed=2)
    if in_blocks:
        ones = torch.ones(rows, inner // 32)
        a, b = (
            Fp8Tensor(
                x.to(torch.float8_e4m3fn), ones * 2.0**exponent, E4M3,
                block=(1, 32), is_exact_in_bf16=True, layout="other",
            )
            for x, exponent in ((left, low), (right, high))
        )  # fmt: skip
        a_MK, b_NK = a.dequantize(torch.float32).double(), b.dequantize(torch.float32).double()
    else:
        a, b = (left * 2.0**low).bfloat16(), (right * 2.0**high).bfloat16()
        a_MK, b_NK = a.double(), b.double()
    exact, magnitude = a_MK @ b_NK.t(), a_MK.abs() @ b_NK.abs().t()
    got = gemm(a, b, work=torch.bfloat16, counter=counter, place="x", transpose_b=True)
    sums = a_MK.abs().sum(1)[:, None] + b_NK.abs().sum(1)
    bound = (inner + 6) * 2.0**-24 * magnitude + 2.0**-126 * (2 * inner + sums)
    assert_within(got, exact, bound + 2.0**-8 * (exact.abs() + bound))


def assert_within(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """What is certainly beyond the dtype's largest number is infinite."""
    top = torch.finfo(got.dtype).max
    is_finite, is_infinite = exact.abs() + bound <= top, exact.abs() - bound > top * 1.01
    assert ((got.double() - exact).abs() <= bound)[is_finite].all()
    assert got[is_infinite].isinf().all()


@pytest.mark.parametrize("is_fast", [False, True], ids=["precise", "fast"])
@pytest.mark.parametrize("inner", [32, 140, 384])
def test_short_sums_of_tensor_cores_are_within_the_bound_of_the_tests_on_a_gpu(
    inner: int, is_fast: bool
) -> None:
    """Precise ones too are farther from the exact product than sums in FP32 could be."""
    a, b = (noise(rows, inner, seed=rows).to(E4M3.dtype) for rows in (96, 80))
    exact, magnitudes = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    error = (summed_as_on_hopper(a, b, is_fast=is_fast) - exact).abs()
    assert (error <= accumulation_bound(magnitudes, inner, is_narrow=True, is_fast=is_fast)).all()
    in_fp32 = accumulation_bound(magnitudes, inner, is_narrow=False, is_fast=is_fast)
    assert (error > in_fp32 + 2.0**-7 * exact.abs()).any()


def test_one_fp8_operand_alone_is_refused(counter: GemmCounter) -> None:
    a = Fp8Tensor.quantize(noise(2, 2), torch.tensor(1.0), E4M3)
    with pytest.raises(AssertionError, match="mixed"):
        gemm(a, noise(2, 2), work=torch.float32, counter=counter, place="x")
    assert not counter.flops


def test_flops_by_place_and_precision_whatever_the_transposes(counter: GemmCounter) -> None:
    a = Fp8Tensor.quantize(noise(3, 11), torch.tensor(1.0), E4M3)
    b = Fp8Tensor.quantize(noise(7, 11), torch.tensor(1.0), E4M3)
    gemm(a, b, work=torch.bfloat16, counter=counter, place="output", transpose_b=True)
    grad = Fp8Tensor.quantize(noise(3, 7), torch.tensor(1.0), E5M2)
    gemm(grad, b, work=torch.bfloat16, counter=counter, place="grad_input")
    gemm(grad, a, work=torch.bfloat16, counter=counter, place="grad_weight", transpose_a=True)
    flops = 2 * 3 * 7 * 11
    places = ("output", "grad_input", "grad_weight")
    assert dict(counter.flops) == {("fp8", place): flops for place in places}
    counter.add("bf16", "attention", flops)
    assert counter.by_precision() == {"fp8": 3 * flops, "bf16": flops}
    assert counter.share("fp8") == 0.75
    assert counter.share("fp32") == 0 and GemmCounter().share("fp8") == 0
