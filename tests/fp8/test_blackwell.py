"""The casts of MXFP8 and NVFP4 against the specification, bit for bit, along both dims."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from fp8_numerics import block_casts
from fp8_numerics import nvfp4 as arithmetic
from fp8_numerics.cast import Fp8Tensor, spread
from fp8_numerics.kernels.compile import library
from fp8_numerics.meta import planning_for
from fp8_numerics.philox import Rows, random_bytes
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.quantizer import Role
from megafp8.fp8.recipe_settings import recipe_named
from megafp8.fp8.recipes.nvfp4 import Nvfp4
from megafp8.fp8.scaling import ScalingState
from megafp8.specs.recipe import Cast, Scaled
from megafp8.specs.recipes import problem
from megafp8.specs.traits import ROLES
from tests.c_kernels import need_kernels, threads_started
from tests.fp8.quantized import quantized
from tests.kit.operations import Operations
from tests.spec import formats, mxfp8, nvfp4
from tests.spec.data import data
from tests.spec.draws import key_of
from tests.spec.formats import E4M3, Floats32

KINDS = ("normal", "wide", "zeros", "subnormal", "tiny", "bits", "edges", "midpoints", "largest")
SPECIAL = (
    "inf",
    "nan",
    "-nan",
    "all nan",
    "largest in fp32",
    "around 448",
    "least scale",
    "square",
)
SHAPES = ((32, 64), (9, 33), (1, 1), (65, 3), (0, 64), (64, 0))
kinds = pytest.mark.parametrize("kind", [*KINDS, *SPECIAL])
roles = pytest.mark.parametrize("role", ROLES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True, params=["C", "torch"])
def _paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with the C kernels, and with the rules in torch operations."""
    if request.param == "torch":
        monkeypatch.setattr(block_casts, "runs_in_c", lambda x: False)
    else:
        need_kernels()


def made(kind: str, shape: tuple[int, int] = (32, 64)) -> Floats32:
    """Return data of the specification's kinds, and some more, in FP32."""
    if kind in ("-nan", "all nan"):
        x = data("normal", shape)
        x[3, 5] = -math.nan
        x[4] = math.nan if kind == "all nan" else x[4]
        return x
    if kind == "largest in fp32":
        return np.copysign(np.finfo(np.float32).max, data("normal", shape))
    if kind == "around 448":  # neighbours in FP32 of where the scale changes, one in each row
        x = data("tiny", shape)
        powers = (448 * 2.0 ** np.arange(-len(x) // 2, len(x) - len(x) // 2)).astype(np.float32)
        x[0::3, 0] = powers[0::3]
        x[1::3, 0] = np.nextafter(powers[1::3], np.float32(0))
        x[2::3, 0] = np.nextafter(powers[2::3], np.float32(np.inf))
        return x
    if kind == "least scale":  # where the code becomes 1, which stands for 2^-126
        x = data("zeros", shape) * np.float32(0)
        x[:, 0] = 448 * 2.0**-127 * (1 + (np.arange(len(x)) - len(x) // 2) * 2.0**-7)
        return x
    if kind == "square":  # scales of squares have one shape in either order
        return data("wide", (64, 64))
    return data(kind, shape)


def operands(name: str, role: Role, x: torch.Tensor) -> tuple[Fp8Tensor, Fp8Tensor]:
    """Return a tensor as the products along its last and its first dim read it."""
    quantizer = linear_quantizer(ScalingState(recipe_named(name)), "linear")
    assert quantizer is not None
    (last, first), sums = quantized(quantizer, role, x, with_sum=True)
    assert isinstance(last, Fp8Tensor) and isinstance(first, Fp8Tensor)
    assert sums is not None and sums.shape[1] == x.shape[1]
    return last, first


def padded(x: Floats32, rows: int, cols: int) -> Floats32:
    """Return a matrix with zeros up to multiples of `rows` and `cols`."""
    return np.pad(x, ((0, -len(x) % rows), (0, -x.shape[1] % cols)))


def assert_mxfp8(ours: Fp8Tensor, x: Floats32) -> None:
    """Assert that rows of x are quantized as the specification says."""
    rows, cols = x.shape
    expected = mxfp8.quantize_rows(padded(x, 1, mxfp8.BLOCK))
    codes = ours.payload.view(torch.uint8).numpy()
    assert formats.same_codes(codes, expected.codes[:, :cols], E4M3)
    scale = spread(ours.dequant_scale, ours.payload.shape, ours.block).expand(rows, cols)
    np.testing.assert_array_equal(scale.double().numpy(), expected.dequant_scale[:, :cols])


def turned(x: Fp8Tensor) -> Fp8Tensor:
    """Return the transposed operand."""
    assert x.block is not None
    scale = x.dequant_scale.t()
    return replace(x, payload=x.payload.t(), dequant_scale=scale, block=x.block[::-1])


@kinds
@roles
@dtypes
def test_mxfp8_is_the_specification(kind: str, role: Role, dtype: torch.dtype) -> None:
    x = torch.from_numpy(made(kind)).to(dtype)
    last, first = operands("mxfp8", role, x)
    assert last.is_exact_in_bf16 and last.block == (1, 32) and first.block == (32, 1)
    assert_mxfp8(last, x.float().numpy())
    assert_mxfp8(turned(first), x.float().t().contiguous().numpy())


@pytest.mark.parametrize("shape", SHAPES)
def test_odd_and_empty_shapes(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    last, first = operands("mxfp8", "input", x)
    assert last.payload.shape == first.payload.shape == x.shape
    assert last.dequant_scale.shape == (shape[0], -(-shape[1] // 32))
    if x.numel():
        assert_mxfp8(last, x.float().numpy())
        assert_mxfp8(turned(first), x.float().t().contiguous().numpy())


def test_mxfp8_takes_its_input_as_it_lies_in_memory_and_leaves_it() -> None:
    x = torch.from_numpy(made("wide"))
    across, kept = x.t().contiguous().t(), x.clone()
    both = zip(operands("mxfp8", "input", x), operands("mxfp8", "input", across), strict=True)
    for ours, theirs in both:
        assert torch.equal(ours.payload.view(torch.uint8), theirs.payload.view(torch.uint8))
        assert torch.equal(ours.dequant_scale, theirs.dequant_scale)
    assert torch.equal(x, kept)


# NVFP4


def expected_nvfp4(x: Floats32, rows: int, byte: formats.Codes | None = None) -> nvfp4.FourBit:
    """Return rows of x as the specification quantizes them."""
    return nvfp4.quantize_blocks(padded(x, rows, nvfp4.BLOCK), rows, byte=byte)


def assert_nvfp4(ours: Fp8Tensor, expected: nvfp4.FourBit) -> None:
    """Assert that an operand [M, K] has the specification's numbers, scales and factor."""
    rows, cols = ours.payload.shape
    numbers = ours.payload.float().numpy()
    magnitudes = nvfp4.MAGNITUDES[expected.codes & 7]
    signed = np.where(expected.codes & 8, -magnitudes, magnitudes)[:rows, :cols]
    np.testing.assert_array_equal(numbers, signed)
    np.testing.assert_array_equal(np.signbit(numbers), np.signbit(signed))
    scales = formats.dequantize(expected.scale_codes, E4M3)
    np.testing.assert_array_equal(ours.dequant_scale.numpy(), scales)
    assert ours.outer is not None
    assert float(ours.outer) == np.float32(expected.amax) / nvfp4.LARGEST


def rotated(x: Floats32) -> Floats32:
    """Return the rotated rows of x in BF16."""
    turned = nvfp4.rotate(x).astype(np.float32)
    return torch.from_numpy(turned).bfloat16().float().numpy()


FINITE = [*KINDS, "largest in fp32", "around 448", "square"]


@pytest.mark.parametrize("kind", [*FINITE, "inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("role", ["input", "weight"])
def test_nvfp4_to_nearest_is_the_specification(kind: str, role: Role, dtype: torch.dtype) -> None:
    if kind in ("largest", "largest in fp32", "inf", "bits") and role == "input":
        role_name = "nvfp4-no_rht"  # the rotation has sums that are not finite
    else:
        role_name = "nvfp4"
    x = torch.from_numpy(made(kind)).to(dtype)
    x = x.clamp(-3e38, 3e38) if kind == "largest in fp32" else x  # BF16 would round it to infinity
    wide = x.float().numpy()
    last, first = operands(role_name, role, x)
    rows = 16 if role == "weight" else 1
    assert last.block == (rows, 16) and last.layout == "other"
    assert_nvfp4(last, expected_nvfp4(wide, rows))
    if role == "weight":
        assert first is last
        return
    across = np.ascontiguousarray(wide.T)
    assert first.rotation == (None if "rht" in role_name else "hadamard")
    across = across if first.rotation is None else rotated(across)
    assert_nvfp4(turned(first), expected_nvfp4(across, 1))


@pytest.mark.parametrize("kind", ["normal", "wide", "zeros", "tiny", "midpoints", "edges"])
def test_nvfp4_rounds_gradients_by_the_bytes_that_are_drawn(kind: str) -> None:
    x = torch.from_numpy(made(kind)).bfloat16()
    last, first = operands("nvfp4", "grad_output", x)
    rows = Rows(torch.zeros(len(x), dtype=torch.int64), torch.arange(len(x)))
    draws = [
        random_bytes(key_of(0, 0, f"linear.grad_output.{along}"), rows, [range(x.shape[1])]).numpy()
        for along in ("last", "first")
    ]
    wide = x.float().numpy()
    assert_nvfp4(last, expected_nvfp4(wide, 1, draws[0]))
    assert_nvfp4(turned(first), expected_nvfp4(rotated(wide.T), 1, draws[1].T))
    nearest, _ = operands("nvfp4-no_sr", "grad_output", x)
    assert_nvfp4(nearest, expected_nvfp4(wide, 1))


@pytest.mark.parametrize("shape", [(33, 64), (48, 20), (9, 33), (1, 1), (17, 16)])
@pytest.mark.parametrize("role", ROLES)
def test_blocks_of_nvfp4_that_end_behind_the_tensor_stay_in_c(
    role: Role, shape: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    """They are filled with zeros, and draw the bytes of the elements that are there."""
    cast, calls = Nvfp4.cast, []

    def counted(self: Nvfp4, x_MK: torch.Tensor, asked: Cast) -> Scaled:
        calls.append(x_MK.shape)
        return cast(self, x_MK, asked)

    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Nvfp4, "cast", counted)
        last, first = operands("nvfp4-no_rht", role, x)
    assert bool(calls) == ("torch" in request.node.name)
    assert last.payload.shape == first.payload.shape == x.shape
    rows = 16 if role == "weight" else 1
    draws: list[formats.Codes | None] = [None, None]
    if role == "grad_output":
        tokens = Rows(torch.zeros(len(x), dtype=torch.int64), torch.arange(len(x)))
        for place, along in enumerate(("last", "first")):
            key = key_of(0, 0, f"linear.grad_output.{along}")
            byte = random_bytes(key, tokens, [range(x.shape[1])]).numpy()
            byte = byte.T if along == "first" else byte
            draws[place] = np.pad(byte, ((0, 0), (0, -byte.shape[1] % nvfp4.BLOCK)))
    wide = x.float().numpy()
    assert_nvfp4(last, expected_nvfp4(wide, rows, draws[0]))
    if role != "weight":
        assert_nvfp4(turned(first), expected_nvfp4(np.ascontiguousarray(wide.T), 1, draws[1]))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_the_form_that_a_compiled_layer_keeps_is_that_of_its_device(name: str) -> None:
    """The C kernels run for tensors of CPUs alone, whatever else the machine has."""
    state = ScalingState(recipe_named(name))
    quantizer = linear_quantizer(state, "linear")
    assert quantizer is not None
    last, first = operands(name, "input", torch.from_numpy(made("normal")))
    lies_across = not first.payload.is_contiguous()
    assert quantizer.saved_form().is_transposed == lies_across
    state.to(torch.device("meta"))
    with planning_for("cuda"):  # tensors without memory stand for a GPU's
        assert quantizer.saved_form().is_transposed


def test_each_part_of_nvfp4_can_be_switched_off() -> None:
    x = torch.from_numpy(made("normal")).bfloat16()
    assert operands("nvfp4-no_rht-no_sr", "grad_output", x)[1].rotation is None
    last, first = operands("nvfp4-no_2d", "weight", x)
    assert last.block == (1, 16) and first.block == (16, 1)
    assert operands("nvfp4-no_2d", "input", x)[1].rotation == "hadamard"
    assert problem("nvfp4-no_sound") == (
        "nvfp4-no_sound: nvfp4 can switch off rht, sr, 2d, and not 'sound'"
    )
    assert "has no parts" in str(problem("delayed-no_rht"))


@pytest.mark.parametrize("kind", ["nan", "-nan", "all nan"])
def test_a_nan_is_not_lost_in_nvfp4(kind: str) -> None:
    x = torch.from_numpy(made(kind)).bfloat16()
    for operand in operands("nvfp4", "weight", x):
        assert operand.outer is not None and operand.outer.isinf()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_rotated_nan_is_a_nan(bits: int) -> None:
    """Whatever its bits: those of the second would be carried into the sign by rounding to BF16."""
    x = torch.ones(16, 32)
    x[3, 5] = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    found, amax = block_casts.rotate_columns(x, torch.ones(16))
    assert amax.isinf()
    assert torch.equal(found.isnan(), (torch.arange(32) == 5).expand(16, 32))


@pytest.mark.parametrize(
    "block", [(1, 32), (32, 1), (1, 16), (16, 1), (16, 16), (1, 7), (1, 100), (100, 100)]
)
@pytest.mark.parametrize("powers", [(-20, 20), (-118, -116), (119, 121)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_blocks_are_numbers_times_scales(
    block: tuple[int, int], powers: tuple[int, int], dtype: torch.dtype
) -> None:
    """Of all codes, in both orders in memory, with blocks that end behind the matrix.

    Two threads share it. With all scales powers of two, or one in five columns of them not; where
    the smallest or the largest values leave the normal numbers of BF16.
    """
    generator = torch.Generator().manual_seed(3)
    payload = torch.randint(0, 256, (70, 1000), dtype=torch.uint8, generator=generator)
    shape = tuple(-(-size // step) for size, step in zip(payload.shape, block, strict=True))
    scale = torch.exp2(torch.randint(*powers, shape, generator=generator).float())
    other = payload.t().contiguous().t().view(torch.float8_e4m3fn)
    payload = payload.view(torch.float8_e4m3fn)
    for _ in range(2):
        numbers = payload.float() * spread(scale, payload.shape, block)
        expected = numbers.to(dtype).contiguous()
        for codes in (payload, other):
            found = block_casts.block_values(codes, scale, block, dtype)
            assert found is not None and torch.equal(found.isnan(), expected.isnan())
            found, real = (each.nan_to_num().contiguous() for each in (found, expected))
            assert torch.equal(found.view(torch.uint8), real.view(torch.uint8))  # also signs of 0
        scale[:, ::5] *= 1.5


@pytest.mark.parametrize("rows", [4080, 4096])  # of 16: below and at 65,536 elements
def test_small_matrices_start_no_threads(rows: int) -> None:
    need_kernels()
    lib, address = library().lib, torch.Tensor.data_ptr
    assert lib is not None
    x, scale, byte = torch.ones(rows, 16), torch.ones(rows, 16), torch.zeros(rows, 16).byte()
    payload, wide, one = torch.zeros(rows, 16).byte(), torch.zeros(rows, 16), torch.ones(16)
    size = [ctypes.c_size_t(n) for n in (rows, 16, 1, 16)]
    written = [address(payload), address(scale), None, 0]
    calls = [
        lambda: lib.megafp8_mxfp8(address(x), *size[:2], 0, 0, *written, 2),
        lambda: lib.megafp8_nvfp4(
            address(x),
            *size[:2],
            0,
            *size[2:],
            address(one),
            address(byte),
            *written,
            address(wide),
            2,
        ),
        lambda: lib.megafp8_block_values(
            address(payload), *size[:2], address(scale), *size[2:], address(wide), 0, 2
        ),
        lambda: lib.megafp8_rotate(
            address(x), *size[:2], 0, address(one), address(wide), address(scale), 2
        ),
    ]
    more = lib.megafp8_has_threads() if rows == 4096 else 0
    assert [threads_started(call) for call in calls] == [more] * 4


@pytest.mark.parametrize("along", ["last", "first"])
def test_a_cast_to_nvfp4_in_c_leaves_torch_to_make_its_results(
    along: Literal["last", "first"],
) -> None:
    """A cast of few rows costs as much as it has calls."""
    need_kernels()
    x, scales = torch.from_numpy(made("normal")), Nvfp4.traits.input.last
    arithmetic.signs()  # is made once
    with Operations() as seen:
        block = (1, 16) if along == "last" else (16, 1)
        asked = Cast("input", scales, None, False, along, None, lambda shape: torch.empty(shape))
        made_in_c = Nvfp4().in_c(x, block, asked)
    assert made_in_c is not None
    assert set(seen.names) == {"new_empty", "empty_like", "_local_scalar_dense"}


@pytest.mark.parametrize("kernel", ["rotation", "values", "rows", "columns", "blocks", "written"])
def test_kernels_write_no_byte_behind_their_matrix(kernel: str) -> None:
    need_kernels()
    lib, address = library().lib, torch.Tensor.data_ptr
    assert lib is not None
    x, scale, codes = torch.ones(48, 33), torch.ones(48, 33), torch.zeros(48, 33).byte()
    out = torch.full((48, 33, 4), 7, dtype=torch.uint8)
    size = [ctypes.c_size_t(n) for n in (32, 33, 1, 33)]  # the kernel is told of the first 32 rows
    given, written = (address(x), *size[:2], 0), (address(out), address(scale), None, 0, 1)
    values = address(codes), address(scale), address(out), 0, 1
    calls = {
        "rotation": lambda: lib.megafp8_rotate(
            *given, address(scale), address(out), address(codes), 1
        ),
        "values": lambda: lib.megafp8_block_values(
            address(codes), *size[:2], address(scale), *size[2:], address(out), 0, 1
        ),
        "rows": lambda: lib.megafp8_mxfp8(*given, 0, *written),
        "columns": lambda: lib.megafp8_mxfp8(*given, 1, *written),
        "blocks": lambda: lib.megafp8_current(*given, *size[2:], 0, 1, 0, *written),
        "written": lambda: lib.megafp8_mxfp8(*given, 0, *values),
    }
    calls[kernel]()
    end = 32 * 33 * {"rotation": 2, "values": 4, "written": 4}.get(kernel, 1)
    assert not (out.flatten()[:end] == 7).any() and (out.flatten()[end:] == 7).all()


def test_random_bytes_that_lie_transposed_are_not_read_in_another_order() -> None:
    need_kernels()
    byte = torch.zeros(16, 32, dtype=torch.uint8).t()
    with pytest.raises(ValueError, match=r"byte has the strides \(1, 32\): give byte.contig"):
        block_casts.nvfp4(torch.ones(32, 16), (1, 16), torch.ones(()), byte)
