"""The casts of MXFP8 and NVFP4 in Triton against the specification, bit for bit, in both forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8_numerics.kernels.triton_blocks import BlockCast, Operand, cast_mx
from fp8_numerics.kernels.triton_fp4 import amaxes_fp4, cast_fp4
from fp8_numerics.nvfp4 import SIGN_BITS
from fp8_numerics.swizzle import swizzled, swizzled_size, unswizzled
from tests.fp8.test_blackwell import KINDS, SPECIAL, made
from tests.fp8_numerics.kernels.tensor_cores import from_tiles, unpacked
from tests.spec import formats, mxfp8, nvfp4
from tests.spec.formats import E4M3, Floats32, Floats64

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy
SHAPES = ((32, 64), (160, 96), (1, 1), (9, 33), (65, 3), (130, 257))
WHOLE_SHAPES = ((16, 16), (160, 96), (48, 208))
forms = pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
kinds = pytest.mark.parametrize("kind", [*KINDS, *SPECIAL])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def scales_of(operand: Operand, rows: int, blocks: int, *, packed: bool) -> Floats64:
    """The scales [rows, blocks] of an operand whose rows are those of a product."""
    if packed:
        assert operand.scale.numel() == swizzled_size(rows, blocks)
        found = from_tiles(operand.scale.cpu(), rows, blocks)
        assert not padding(operand.scale.cpu(), rows, blocks).any(), "zeros past the end"
    else:
        found = operand.scale.cpu().double()
    return found.numpy()


def padding(scale: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The codes of the tiles that belong to no block."""
    ours = torch.ones(rows, blocks, dtype=torch.uint8)
    is_ours = swizzled(ours).bool()
    return scale.view(torch.uint8)[~is_ours]


def turned(operand: Operand | None, *, packed: bool) -> Operand:
    """The operand along columns as the product reads it."""
    assert operand is not None
    scale = operand.scale if packed else operand.scale.t()
    return Operand(operand.payload.t(), scale)


def both(cast: BlockCast, x: Floats32, *, packed: bool) -> list[tuple[Operand, Floats32]]:
    assert cast.rows is not None
    if packed:
        assert cast.columns is not None and cast.columns.payload.t().is_contiguous()
    return [(cast.rows, x), (turned(cast.columns, packed=packed), np.ascontiguousarray(x.T))]


def assert_mx(x: torch.Tensor, *, packed: bool) -> None:
    cast = cast_mx(x, packed=packed, with_columns=True, with_sums=True)
    for operand, wide in both(cast, x.float().cpu().numpy(), packed=packed):
        rows, inner = wide.shape
        blocks = -(-inner // 32)
        expected = mxfp8.quantize_rows(np.pad(wide, ((0, 0), (0, blocks * 32 - inner))))
        codes = operand.payload.cpu().view(torch.uint8).numpy()
        assert formats.same_codes(codes, expected.codes[:, :inner], E4M3)
        scales = mxfp8.POWERS[expected.scale_codes]
        np.testing.assert_array_equal(scales_of(operand, rows, blocks, packed=packed), scales)


@forms
@kinds
@dtypes
def test_mx_is_the_specification(
    device: torch.device, kind: str, dtype: torch.dtype, packed: bool
) -> None:
    assert_mx(torch.from_numpy(made(kind)).to(dtype).to(device), packed=packed)


@forms
@pytest.mark.parametrize("shape", SHAPES)
def test_mx_of_odd_shapes(device: torch.device, shape: tuple[int, int], packed: bool) -> None:
    x = torch.from_numpy(made("wide", shape)).to(device)
    assert_mx(x, packed=packed)
    cast = cast_mx(x, packed=packed, with_sums=True)
    assert cast.columns is None and cast.sums is not None
    error = (cast.sums.double().sum(0) - x.double().sum(0)).abs()
    assert (error <= len(x) * 2.0**-24 * x.double().abs().sum(0)).all()  # of FP32 sums


def fp4(
    x: torch.Tensor, *, packed: bool, square: bool = False, rotate: bool = True
) -> tuple[BlockCast, torch.Tensor]:
    signs = SIGN_BITS if rotate else None
    amaxes, _ = amaxes_fp4(x, signs=signs)
    return cast_fp4(
        x, amaxes, signs=signs, square=square, packed=packed,
        with_columns=packed or not square,
    )  # fmt: skip


def assert_fp4(
    operand: Operand, outer: torch.Tensor, expected: nvfp4.FourBit, *, packed: bool
) -> None:
    payload = operand.payload.cpu()
    numbers = (unpacked(payload) if packed else payload.double()).numpy()
    magnitudes = nvfp4.MAGNITUDES[expected.codes & 7]
    signed = np.where(expected.codes & 8, -magnitudes, magnitudes)
    np.testing.assert_array_equal(numbers, signed)
    np.testing.assert_array_equal(np.signbit(numbers), np.signbit(signed))
    scales = formats.dequantize(expected.scale_codes, E4M3)
    scales = scales.repeat(expected.rows, 0) if packed else scales  # each row of a square has it
    rows, blocks = len(numbers), scales.shape[1]
    np.testing.assert_array_equal(scales_of(operand, rows, blocks, packed=packed), scales)
    assert outer.cpu().item() == np.float32(expected.amax) / nvfp4.LARGEST


def rotated(x: Floats32) -> Floats32:
    """The rotated rows of x in BF16."""
    return torch.from_numpy(nvfp4.rotate(x).astype(np.float32)).bfloat16().float().numpy()


FINITE = [*KINDS, "largest in fp32", "around 448"]
EXTREME = ("largest", "largest in fp32", "inf", "bits")  # whose rotated sums are not finite


@forms
@dtypes
@pytest.mark.parametrize("kind", [*FINITE, "inf"])
def test_fp4_is_the_specification(
    device: torch.device, kind: str, dtype: torch.dtype, packed: bool
) -> None:
    largest = torch.finfo(dtype).max
    x = torch.from_numpy(made(kind)).to(dtype)
    x = x if kind == "inf" else x.clamp(-largest, largest)
    rotate = kind not in EXTREME and x.isfinite().all().item() and largest > 1e5
    cast, outer = fp4(x.to(device), packed=packed, rotate=rotate)
    (rows, wide), (columns, across) = both(cast, x.float().numpy(), packed=packed)
    assert_fp4(rows, outer[0], nvfp4.quantize_blocks(wide), packed=packed)
    across = rotated(across) if rotate else across
    assert_fp4(columns, outer[1], nvfp4.quantize_blocks(across), packed=packed)


@forms
@pytest.mark.parametrize("kind", [*FINITE, "inf"])
def test_squares_are_the_specification(device: torch.device, kind: str, packed: bool) -> None:
    x = torch.from_numpy(made(kind)).bfloat16().clamp(-3e38, 3e38)
    cast, outer = fp4(x.to(device), packed=packed, square=True, rotate=False)
    wide = x.float().numpy()
    expected = nvfp4.quantize_blocks(wide, 16)
    assert cast.rows is not None
    assert_fp4(cast.rows, outer[0], expected, packed=packed)
    if packed:
        columns = turned(cast.columns, packed=True)
        assert_fp4(columns, outer[1], nvfp4.quantize_blocks(wide.T, 16), packed=True)


@forms
@pytest.mark.parametrize("shape", WHOLE_SHAPES)
def test_fp4_of_several_tiles(device: torch.device, shape: tuple[int, int], packed: bool) -> None:
    x = torch.from_numpy(made("wide", shape)).bfloat16()
    cast, outer = fp4(x.to(device), packed=packed)
    (rows, wide), (columns, across) = both(cast, x.float().numpy(), packed=packed)
    assert_fp4(rows, outer[0], nvfp4.quantize_blocks(wide), packed=packed)
    assert_fp4(columns, outer[1], nvfp4.quantize_blocks(rotated(across)), packed=packed)
    square, outer = fp4(x.to(device), packed=packed, square=True, rotate=False)
    assert square.rows is not None
    assert_fp4(square.rows, outer[0], nvfp4.quantize_blocks(wide, 16), packed=packed)


@pytest.mark.parametrize("kind", ["nan", "-nan", "all nan", "inf"])
def test_a_nan_makes_both_factors_infinite(device: torch.device, kind: str) -> None:
    x = torch.from_numpy(made(kind)).bfloat16().to(device)
    assert fp4(x, packed=True)[1].isinf().all()


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (300, 9), (0, 4)])
def test_tiles_are_those_of_the_formula(shape: tuple[int, int]) -> None:
    """And a matrix comes back from them."""
    codes = torch.randint(256, shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    flat = swizzled(codes)
    assert torch.equal(from_tiles(flat, *shape), codes.double())
    assert torch.equal(unswizzled(flat, *shape), codes)
