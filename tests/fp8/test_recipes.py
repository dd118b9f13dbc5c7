"""Each recipe's casts against the specification, bit for bit; its linear within stated bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp8_numerics import block_casts, cpu, nvfp4
from fp8_numerics.cast import Fp8Tensor, amax_of, spread, times_scale
from fp8_numerics.formats import ALL_FORMATS, E4M3, FORMATS, FormatName
from fp8_numerics.gemm import GemmCounter
from fp8_numerics.kernels.compile import library
from fp8_numerics.scales import amax_of_blocks, scale_of_amax, scale_of_amax_torchao
from megafp8.errors import UserError
from megafp8.fp8 import Cast
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.grad_sink import AutogradSink
from megafp8.fp8.linear import Linear, LinearComm
from megafp8.fp8.quantizer import Role, SavedForm
from megafp8.fp8.recipes.delayed import Delayed
from megafp8.fp8.recipes.nvfp4 import Nvfp4
from megafp8.fp8.scaling import ScalingState
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import GEMMS, ModuleRule, RecipeName
from megafp8.specs.recipes import RECIPES, find_recipe
from megafp8.specs.traits import ROW, TENSOR, GemmName, Scales
from tests.c_kernels import need_kernels
from tests.fp8.quantized import quantized
from tests.spec import current
from tests.spec import formats as spec_formats

CURRENT: tuple[RecipeName, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
BLOCK = 128
WHOLE = (1 << 30, 1 << 30)
roles = pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
recipes = pytest.mark.parametrize("name", CURRENT)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def recipe_of(name: RecipeName, **changes: Any) -> Fp8Recipe:
    backward = "e5m2" if name in ("delayed", "tensorwise") else "e4m3"
    return Fp8Recipe(
        name=name,
        backward_format=backward,
        **{"power_2_scale": name not in ("delayed", "tensorwise"), **changes},
    )


def groups_of(name: RecipeName, role: Role) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, columns) that share a scale where the sum runs along the last, and the first dim."""
    whole = WHOLE[0]
    match name:
        case "tensorwise":
            return WHOLE, WHOLE
        case "rowwise":
            return (1, whole), (whole, 1)
        case "rowwise_with_gw_hp":
            return (1, whole), WHOLE if role == "weight" else (whole, 1)
    return ((BLOCK, BLOCK),) * 2 if role == "weight" else ((1, BLOCK), (BLOCK, 1))


def rule_of(name: RecipeName) -> current.Rule:
    return "torchao" if name.startswith("rowwise") else "te"


def awkward(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different size, zeros, subnormals, an infinity, a NaN, a tiny row."""
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    sizes = torch.logspace(-6, 4, rows)[:, None]
    x = (torch.randn(rows, cols, generator=generator) * sizes).to(dtype)
    if rows > 6:
        x[1] = 0
        x[2, 0], x[3, cols // 2] = math.inf, math.nan
        x[4] = torch.finfo(dtype).tiny
        x[5] = torch.finfo(dtype).smallest_normal / 4
    return x


def assert_specified(ours: Fp8Tensor, specified: current.Scaled) -> None:
    codes = ours.payload.view(torch.uint8).numpy()
    assert spec_formats.same_codes(codes, specified.codes, specified.fmt)
    scale = spread(ours.dequant_scale, ours.payload.shape, ours.block)
    np.testing.assert_array_equal(scale.expand(ours.payload.shape).numpy(), specified.dequant_scale)


@pytest.fixture(params=["C", "torch"])
def _paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the casts by the C kernels, and by torch operations."""
    if request.param == "torch":
        monkeypatch.setattr(block_casts, "runs_in_c", lambda x: False)
    else:
        need_kernels()


@recipes
@roles
@dtypes
@pytest.mark.parametrize("shape", [(9, 33), (1, 1), (130, 3), (3, 300), (256, 256), (0, 4), (4, 0)])
@pytest.mark.usefixtures("_paths")
def test_casts_are_the_specification(
    name: RecipeName, role: Role, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    recipe = recipe_of(name)
    quantizer = linear_quantizer(ScalingState(recipe), "linear")
    assert quantizer is not None
    x = awkward(*shape, dtype)
    (last, first), sums = quantized(quantizer, role, x, with_sum=True)
    fmt = recipe.backward_format if role == "grad_output" else recipe.forward_format
    for ours, group in zip((last, first), groups_of(name, role), strict=True):
        assert ours is not None
        specified = current.quantize_groups(
            x.float().numpy(), group, spec_formats.FORMATS[fmt], rule_of(name), recipe.power_2_scale
        )
        assert_specified(ours, specified)
    assert sums is not None
    total = sums.sum(0)
    torch.testing.assert_close(total, x.float().sum(0), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "block", [(1, 128), (128, 1), (128, 128), (1, 600), (300, 1), (7, 64), (1, 100), (100, 16)]
)
@pytest.mark.parametrize("format_name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("power_2", [True, False])
@dtypes
def test_kernels_and_torch_operations_cast_blocks_alike(
    block: tuple[int, int], format_name: FormatName, power_2: bool, dtype: torch.dtype
) -> None:
    """In matrices of more columns than kernels do together, with blocks that are cut off."""
    need_kernels()
    x, fmt = awkward(300, 600, dtype), FORMATS[format_name]
    for torchao in (False, True):
        made = block_casts.current(x, block, fmt, power_2=power_2, torchao=torchao)
        assert made is not None
        scale = (scale_of_amax_torchao if torchao else scale_of_amax)(
            amax_of_blocks(x, block), fmt, power_2=power_2
        )
        scaled = times_scale(x.float(), scale, block)
        expected = scaled.clamp(-fmt.max, fmt.max).to(fmt.dtype)
        assert torch.equal(made[1], scale.reciprocal())
        codes = (each.view(torch.uint8).numpy() for each in (made[0], expected))
        assert spec_formats.same_codes(*codes, spec_formats.FORMATS[format_name])


@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power", [0, -118, 118])
@dtypes
def test_values_that_a_cast_writes_are_its_numbers_times_its_scales(
    values: torch.dtype, power: int, dtype: torch.dtype
) -> None:
    """Of matrices that end inside of blocks and tiles, with or without NaN and infinity.

    With the power of two in every second row, values leave the normal numbers of BF16.
    """
    need_kernels()
    x = torch.randn(80, 560, generator=torch.Generator().manual_seed(5))
    x[1::2] *= 2.0 ** (power if dtype != torch.float16 else power // 10)
    x[:, 64:100], x[:, 5], byte = 0.0, -0.0, (x * 999).byte()
    x[:, 110:130] *= 2.0**-14  # numbers of few bits, which a value below the normal ones rounds
    for x[40, 333] in torch.tensor([1.0, math.nan, -math.inf]):
        wide, amax = x.to(dtype), torch.tensor(6.0)
        other = block_casts.current(wide, (1, 16), FORMATS["e5m2"], power_2=True, values=values)
        assert other is not None and other.values is None, "values are those of E4M3"
        for block in ((1, 16), (16, 1), (16, 16), (1, 32), (32, 1), (1, 560), (80, 1), (64, 64)):
            made = [
                block_casts.current(wide, block, E4M3, power_2=power_2, values=values)
                for power_2 in (True, False)
            ]
            if 16 in block:
                made += [block_casts.nvfp4(wide, block, amax, b, values) for b in (None, byte)]
            if 32 in block:
                made.append(block_casts.mxfp8(wide, along_columns=block[1] == 1, values=values))
            cut = wide[:, :-3]  # ends inside of a vector
            made.append(block_casts.current(cut, block, E4M3, power_2=True, values=values))
            for each in made:
                assert each is not None and each.values is not None
                numbers = each.payload.float() * spread(each.scale, each.payload.shape, block)
                expected = numbers.to(values)
                assert torch.equal(each.values.isnan(), expected.isnan())
                found, real = (v.nan_to_num().view(torch.uint8) for v in (each.values, expected))
                assert torch.equal(found, real), block


@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)])
@pytest.mark.parametrize("is_random", [True, False])
@dtypes
def test_kernels_and_torch_operations_cast_to_nvfp4_alike(
    block: tuple[int, int], is_random: bool, dtype: torch.dtype
) -> None:
    """Of numbers of all bits, which two threads share, with any amax of the tensor."""
    need_kernels()
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(1 << 31), 1 << 31, (256, 272), generator=generator).to(torch.int32)
    x = bits.view(dtype)
    byte = torch.randint(0, 256, x.shape, generator=generator).byte() if is_random else None
    x[:16, :48], x[16] = 0, math.nan
    x_MK, of_x = (x.t(), byte if byte is None else byte.t()) if block == (16, 1) else (x, byte)
    for amax in torch.tensor([0.0, 2.0**-149, 3.0, 1e30, math.inf]):
        numbers, scale = nvfp4.quantize_blocks(x_MK, min(block), amax, of_x)
        numbers, scale = (numbers.t(), scale.t()) if block == (16, 1) else (numbers, scale)
        payload, found, _, outer = block_casts.nvfp4(x, block, amax, byte)
        assert outer is not None and torch.equal(outer, nvfp4.outer_of(amax))
        assert torch.equal(found, scale)
        expected = numbers.contiguous().to(payload.dtype).view(torch.uint8)
        assert torch.equal(payload.view(torch.uint8), expected)


@dtypes
@pytest.mark.parametrize("rows", [272, 257, 271])
def test_kernels_and_torch_operations_rotate_alike(dtype: torch.dtype, rows: int) -> None:
    """Columns that two threads share, with sums of zeros, whose sign is plus.

    Rows of zeros fill the last 16, and behind the matrix is NaN.
    """
    need_kernels()
    filled = awkward(272, 272, dtype).nan_to_num(0, 0)
    filled[:16] = -0.0
    filled[rows:] = math.nan
    x = filled[:rows]
    for x[0, 271] in torch.tensor([0.0, 2.0**14, math.inf, math.nan], dtype=dtype):
        found, amax = block_casts.rotate_columns(x, nvfp4.signs())
        padded = torch.nn.functional.pad(x, (0, 0, 0, 272 - rows))
        expected = nvfp4.rotated(padded.t()).t().contiguous()
        assert torch.equal(amax, amax_of(expected))
        assert torch.equal(found.isnan(), expected.isnan())
        found, expected = (each.nan_to_num().view(torch.int16) for each in (found, expected))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("top", [-126, -99, -97, 0, 123, 124, 127])
@pytest.mark.parametrize("far", [18, 19, 20, 39])
def test_columns_of_numbers_far_from_each_other_are_rotated_exactly(top: int, far: int) -> None:
    """In BF16, where kernels may add integers up.

    Two numbers of a column are the largest, and cancel each other in half of the sums; the others
    of column j are 2**-j times as large, or 2**-far. Their sums are exact in FP64. Rows and columns
    end inside of a vector, and behind the rows are others.
    """
    need_kernels()
    sizes = torch.tensor(2.0) ** top * torch.exp2(-torch.arange(45.0).clamp(max=far))
    generator = torch.Generator().manual_seed(top + 200)
    all_MN = ((1 + torch.rand(64, 45, generator=generator)) * sizes).bfloat16()
    all_MN[3::16], all_MN[9::16] = 1.9921875 * 2.0**top, -1.9921875 * 2.0**top
    all_MN[37:, ::2] = 0.0
    x_MN = all_MN[:61]
    for signs in (nvfp4.signs(), nvfp4.signs() * 0.75):
        found, amax = block_casts.rotate_columns(x_MN, signs)
        padded = torch.nn.functional.pad(x_MN, (0, 0, 0, 3)).t()
        expected = nvfp4.rotated(padded, signs.tolist()).t().contiguous()
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
        assert torch.equal(amax, amax_of(expected))


@pytest.mark.parametrize("top", [-126, -120, -115, -114, -113, -108, 0, 126, 127])
@pytest.mark.parametrize("along_columns", [True, False])
def test_every_number_of_bf16_below_the_largest_of_its_block(top: int, along_columns: bool) -> None:
    """By a power of two: 32 binades below it and zero, of both signs, to codes and to values."""
    need_kernels()
    fmt, largest = FORMATS["e4m3"], 0x7F + ((top + 127) << 7)
    bits = torch.arange(max(0, largest - 32 * 128), largest + 1)
    bits = torch.cat([bits, bits + 0x8000, torch.tensor([0, 0x8000])]).to(torch.uint16)
    others = torch.nn.functional.pad(bits.view(torch.int16), (0, -len(bits) % 31)).view(-1, 31)
    x = torch.cat([others, torch.full((len(others), 1), largest, dtype=torch.int16)], 1)
    x_MK = x.view(torch.bfloat16)
    x_MK = torch.nn.functional.pad(x_MK, (0, 0, 0, -len(x_MK) % 8)).view(-1, 256)  # with zeros
    given_MN = x_MK.t().contiguous() if along_columns else x_MK
    block, wide = (32, 1) if along_columns else (1, 32), torch.bfloat16
    for made in (
        block_casts.mxfp8(given_MN, along_columns=along_columns, values=wide),
        block_casts.current(given_MN, block, fmt, power_2=True, values=wide),
    ):
        assert made is not None and made.values is not None
        payload, found, values = (
            (t.t() if along_columns else t) for t in (made.payload, made.scale, made.values)
        )
        found = found.repeat_interleave(32, 1)
        expected = (x_MK.float() / found).clamp(-fmt.max, fmt.max).to(fmt.dtype)
        assert torch.equal(payload.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(values, (expected.float() * found).bfloat16())
        assert torch.equal(values.signbit(), x_MK.signbit())


def test_the_factor_of_a_rotated_zero_has_the_sign_of_torchs_amax() -> None:
    """The sign of a value that is 0 follows from it."""
    need_kernels()
    scales = Scales(1, 16, has_outer=True)
    cast = Cast("input", scales, E4M3, False, "first", None, lambda _: pytest.fail("not random"))
    made = Nvfp4().in_c(torch.zeros(32, 16), (16, 1), cast)
    expected = nvfp4.outer_of(amax_of(torch.zeros(32, 16, dtype=torch.bfloat16)))
    assert made is not None
    assert torch.equal(made.outer.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "blockwise", "rowwise"])
@roles
@dtypes
def test_operands_have_the_values_that_are_read_soon(
    name: RecipeName, role: Role, dtype: torch.dtype
) -> None:
    """All but the input that is kept for the backward pass; with other scales they are dropped."""
    need_kernels()
    quantizer = linear_quantizer(ScalingState(Fp8Recipe(name=name)), "linear")
    assert quantizer is not None
    operands, _ = quantized(quantizer, role, awkward(48, 96, dtype))
    for along, x in zip(("last", "first"), operands, strict=True):
        assert x is not None and (x.grid is None) == (role == "input" and along == "first")
        plain = x.without_grid()
        for wide in (torch.bfloat16, torch.float32):
            found, expected = x.dequantize(wide), plain.dequantize(wide)
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())
            assert torch.equal(x.numbers(wide).nan_to_num(), plain.numbers(wide).nan_to_num())
        assert x.with_scale_matrix(x.scale_matrix() * 2).grid is None


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_kernels_take_empty_matrices(shape: tuple[int, int]) -> None:
    """A block of a whole row or column has then no elements."""
    need_kernels()
    lib, x, (rows, cols) = library().lib, torch.empty(shape), shape
    assert lib is not None
    for along_columns, shape_of_scales in (
        (False, (rows, -(-cols // 32))),
        (True, (-(-rows // 32), cols)),
    ):
        payload, scale, *_ = block_casts.mxfp8(x, along_columns=along_columns)
        assert payload.shape == shape and scale.shape == shape_of_scales
    payload, scale, made, outer = block_casts.nvfp4(
        x, (1, 16), torch.tensor(6.0), None, torch.float32
    )
    assert payload.shape == shape and outer == nvfp4.outer_of(torch.tensor(6.0))
    assert made is not None and made.shape == shape
    turned, amax = block_casts.rotate_columns(x, nvfp4.signs())
    assert turned.shape == shape and amax == 0
    for block in ((1, cols), (rows, 1), (128, 128)):
        assert block_casts.current(x, block, FORMATS["e4m3"], power_2=True) is None
        lib.megafp8_current(None, *shape, 0, *block, 0, 1, 0, None, None, None, 0, 1)
        values = block_casts.block_values(payload, scale, block, torch.bfloat16)
        assert values is not None and values.shape == shape


def test_kernels_leave_other_blocks_formats_and_dtypes_to_torch_operations() -> None:
    x, fmt = torch.ones(256, 256), FORMATS["e4m3"]
    others = [(x, (2, 96), fmt), (x, (1, 8), ALL_FORMATS["e4m3fnuz"]), (x.double(), (1, 8), fmt)]
    for given_x, block, given_fmt in others:
        assert block_casts.current(given_x, block, given_fmt, power_2=True) is None


@given(
    amax=st.one_of(
        st.floats(0, 3.4028234663852886e38, width=32), st.sampled_from([0.0, math.inf, 2.0**-149])
    ),
    power_2=st.booleans(),
    fmt=st.sampled_from(["e4m3", "e5m2"]),
)
@settings(max_examples=300, deadline=None)
def test_scales_are_the_specification(amax: float, power_2: bool, fmt: str) -> None:
    ours = torch.tensor([amax])
    theirs = np.float32(amax)
    spec_fmt = spec_formats.FORMATS[fmt]
    for function, rule in ((scale_of_amax, "te"), (scale_of_amax_torchao, "torchao")):
        scale = function(ours, FORMATS[fmt], power_2=power_2).item()
        assert scale == current.scale_of(theirs, spec_fmt, rule, power_2), rule


def test_recipes_need_no_history() -> None:
    for name in CURRENT:
        state = ScalingState(recipe_of(name))
        linear_quantizer(state, "linear")
        state.begin_microbatch(0)
        state.end_forward()
        state.end_backward()
        assert state.forward.names == state.backward.names == []


def make(recipe: Fp8Recipe, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return Linear(
        nn.Parameter(weight.clone()),
        None if bias is None else nn.Parameter(bias.clone()),
        name="linear",
        quantizer=linear_quantizer(ScalingState(recipe), "linear"),
        comm=LinearComm(),
        sink=AutogradSink(),
        counter=GemmCounter(),
    )


@pytest.mark.parametrize("work", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("power_2", [True, False])
@pytest.mark.parametrize("name", CURRENT)
@pytest.mark.parametrize("shape", [(48, 80, 33), (1, 5, 7), (130, 256, 129), (9, 256, 256)])
@pytest.mark.parametrize("has_bf16", [True, False], ids=["BF16 products", "FP32 products"])
def test_linear_is_the_specification(
    name: RecipeName,
    power_2: bool,
    work: torch.dtype,
    shape: tuple[int, int, int],
    has_bf16: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products of the specified operands, in FP64, as CPUs with BF16 products and without compute.

    Bound: K products accumulated in FP32 err by K * 2**-24 of the product of magnitudes; operands
    whose scales are no powers of two are rounded to FP32 (2 * 2**-24 more); then one rounding to
    the work's dtype.
    """
    monkeypatch.setattr(cpu, "FAST_AT_BF16", has_bf16)
    tokens, outs, ins = shape
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, ins, generator=generator).to(work)
    weight = (0.02 * torch.randn(outs, ins, generator=generator)).to(work)
    bias = torch.randn(outs, generator=generator).to(work)
    grad = (1e-3 * torch.randn(tokens, outs, generator=generator)).to(work)
    recipe = recipe_of(name, power_2_scale=power_2)
    linear = make(recipe, weight, bias)
    x.requires_grad_()
    output = linear(x)
    output.backward(grad)

    def values(role: Role, tensor: torch.Tensor, along: int) -> np.ndarray:
        fmt = recipe.backward_format if role == "grad_output" else recipe.forward_format
        return current.quantize_groups(
            tensor.detach().float().numpy(),
            groups_of(name, role)[along],
            spec_formats.FORMATS[fmt],
            rule_of(name),
            power_2,
        ).values

    def check(ours: torch.Tensor, a: np.ndarray, b: np.ndarray, extra: np.ndarray | float) -> None:
        exact = a @ b + extra
        terms = a.shape[1] + 8
        accumulated = terms * 2.0**-24 * (np.abs(a) @ np.abs(b) + np.abs(extra))
        unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[work]
        bound = accumulated + unit * (np.abs(exact) + accumulated) + 1e-45
        error = np.abs(ours.detach().double().numpy() - exact)
        assert (error <= bound).all(), (error / bound).max()

    check(output, values("input", x, 0), values("weight", weight, 0).T, bias.double().numpy())
    assert x.grad is not None and linear.weight.grad is not None
    check(x.grad, values("grad_output", grad, 0), values("weight", weight, 1), 0.0)
    if name == "rowwise_with_gw_hp":
        a, b = grad.double().numpy(), x.detach().double().numpy()
    else:
        a, b = values("grad_output", grad, 1), values("input", x, 1)
    check(linear.weight.grad, a.T, b, 0.0)


@pytest.mark.parametrize("name", ["delayed", *CURRENT])
@pytest.mark.parametrize("high", [{gemm} for gemm in GEMMS])
def test_overridden_products_are_plain(name: RecipeName, high: set[GemmName]) -> None:
    """A product kept in high precision equals torch's; the counter tells which ran how."""
    generator = torch.Generator().manual_seed(7)
    weight = 0.1 * torch.randn(32, 16, generator=generator)
    x = torch.randn(48, 16, generator=generator).requires_grad_()
    grad = torch.randn(48, 32, generator=generator)
    linear = make(recipe_of(name, high_precision_gemms=frozenset(high)), weight, None)
    output = linear(x)
    output.backward(grad)
    plain_x = x.detach().clone().requires_grad_()
    plain = nn.functional.linear(plain_x, weight.requires_grad_())
    plain.backward(grad)
    results: dict[GemmName, tuple[Any, Any]] = {
        "output": (output, plain),
        "grad_input": (x.grad, plain_x.grad),
        "grad_weight": (linear.weight.grad, weight.grad),
    }
    never = {"grad_weight"} if name == "rowwise_with_gw_hp" else set()
    for gemm, (ours, theirs) in results.items():
        is_plain = bool(torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6))
        assert is_plain == (gemm in high | never), gemm
        flops = 2 * 48 * 16 * 32  # whichever way it is computed
        kind = "fp32" if is_plain else "fp8"
        assert {k: n for k, n in linear.counter.flops.items() if k[1] == gemm} == {
            (kind, gemm): flops
        }


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_a_linear_never_replaces_a_format_of_gradients(name: RecipeName) -> None:
    """Settings and conversions refuse it before; a program may make the linear by itself."""
    state = ScalingState(Fp8Recipe(name=name, backward_format="e5m2"))
    with pytest.raises(UserError, match=f"'e5m2': {name} has 'e4m3' alone for gradients"):
        linear_quantizer(state, "a")


def test_module_rules_choose_by_name() -> None:
    rules = (
        ModuleRule("layers.0.*", "high_precision"),
        ModuleRule("*.fc2", "tensorwise"),
        ModuleRule("layers.?.mlp.*", "blockwise"),
    )
    state = ScalingState(recipe_of("delayed", modules=rules))
    kinds = {}
    for name in ("layers.0.mlp.fc2", "layers.1.mlp.fc2", "layers.1.mlp.fc1", "layers.1.qkv"):
        quantizer = linear_quantizer(state, name)
        kinds[name] = quantizer and type(quantizer.tensors["input"].rule).__name__
    assert kinds == {
        "layers.0.mlp.fc2": None,
        "layers.1.mlp.fc2": "Tensorwise",
        "layers.1.mlp.fc1": "Blockwise",
        "layers.1.qkv": "Delayed",
    }
    assert state.forward.names == ["layers.1.qkv.input", "layers.1.qkv.weight"]


@pytest.mark.parametrize("name", ["delayed", *CURRENT])
def test_saved_activations_are_fp8(name: RecipeName) -> None:
    """One FP8 copy for backward; high precision only where the weight gradient is."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(64, 48).bfloat16().requires_grad_()
    linear = make(recipe_of(name), torch.randn(32, 48).bfloat16(), None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(x)
    large = [t.dtype for t in saved if t.numel() == x.numel()]
    is_high = name == "rowwise_with_gw_hp"
    assert large == [torch.bfloat16 if is_high else torch.float8_e4m3fn]


@pytest.mark.parametrize("name", ["delayed", *CURRENT])
def test_nothing_in_fp8_where_evaluation_is_not(name: RecipeName) -> None:
    state = ScalingState(recipe_of(name, fp8_in_evaluation=False))
    linear = Linear(
        nn.Parameter(torch.randn(16, 16)),
        None,
        name="linear",
        quantizer=linear_quantizer(state, "linear"),
        comm=LinearComm(),
        sink=AutogradSink(),
        counter=GemmCounter(),
    )
    x = torch.randn(16, 16)
    with torch.no_grad(), state.evaluation():
        assert torch.equal(linear(x), x @ linear.weight.t())
    with torch.no_grad():
        assert not torch.equal(linear(x), x @ linear.weight.t())


@pytest.mark.parametrize(
    ("scales", "shape"),
    [
        (TENSOR, []),
        (ROW, [1, 200]),
        (Scales(128, 128), [3, 2]),
        (Scales(16, 16, has_outer=True), [19 * 13 + 1]),
    ],
)
def test_scales_of_the_kept_input_have_whole_numbers_of_blocks(
    scales: Scales, shape: list[int]
) -> None:
    """The input is [300, 200], and scales lie along its tokens; the last blocks are shorter."""
    assert SavedForm(scales).scale_shape(300, 200) == shape
    assert SavedForm().scale_shape(300, 200) == [0]


@pytest.mark.parametrize(
    ("high", "with_first", "expected"),
    [
        ((), True, True),
        ((), False, True),
        (("output",), True, False),
        (("output",), False, False),
        (("grad_weight",), True, False),
        (("grad_weight",), False, True),
    ],
)
def test_a_kernel_casts_an_input_only_if_no_product_reads_it_in_high_precision(
    high: tuple[GemmName, ...],
    with_first: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Delayed, "can_fuse", lambda self, tensor: True)
    state = ScalingState(recipe_of("delayed", high_precision_gemms=frozenset(high)))
    quantizer = linear_quantizer(state, "linear")
    assert quantizer is not None
    assert quantizer.fuses("input", with_first=with_first) == expected
    state.fp8_enabled = False
    assert not quantizer.fuses("input", with_first=with_first)


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_counts_a_second_read_where_scales_need_one(name: str) -> None:
    """A history knows the scale before; a block's amax is found in the read that casts it."""
    traits = find_recipe(name).traits
    scales = [some for casts in traits.casts.values() for some in (casts.last, casts.first)]
    of_more = any(some.along is None or some.has_outer for some in scales)
    reads_twice = of_more and not traits.has_history
    assert traits.cost.reads_twice == reads_twice, f"its traits need Cost({reads_twice=})"
