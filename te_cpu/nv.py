"""Transformer Engine's tensors in NVFP4: two numbers in a byte, and a scale in E4M3 for 16 of them.

Row-wise bytes [..., K / 2] lie in the tensor's own shape. Column-wise bytes [K, M / 2] are those of
the transposed tensor, since FP4 tensor cores multiply in one orientation alone. Each side has its
own scales and the FP32 amax of what was quantized there: for columns that is the rotated tensor, if
the quantizer rotates. A tensor scaled by rows has an amax for each row, and no columns. Scales are
padded as cuBLASLt reads them, and swizzled only where a flag says so.

The rule is that of our own recipe from version 2.14 on. Before, the amax of a block is divided by 6
before it is multiplied by the factor of the tensor's amax, and so rounded at other places.
"""

# M rows   K elements of one

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fp8_numerics import block_casts, cast
from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.formats import E4M3
from fp8_numerics.nvfp4 import (
    BLOCK,
    LARGEST_E2M1,
    LARGEST_E4M3,
    SIGN_BITS,
    SIGNS,
    quantize_blocks,
    rotated,
)
from fp8_numerics.philox import Rows, random_bytes
from fp8_numerics.swizzle import fp4_numbers, rounded_up, unswizzled
from te_cpu import four_over_six
from te_cpu.draws import DRAWS
from te_cpu.errors import ProductError, SizeError
from te_cpu.four_over_six import Choice
from te_cpu.missing import missing
from te_cpu.wheel import version_in_use

NAME = "NVFP4Tensor"
SIDES = ("rowwise", "columnwise")


def is_nv(tensor: Any) -> bool:
    """Whether a tensor is one of Transformer Engine's in NVFP4, of either kind."""
    return type(tensor).__name__.startswith(NAME)


def module() -> Any:
    """Return the module that defines the tensors."""
    return importlib.import_module("transformer_engine.pytorch.tensor.nvfp4_tensor")


def row_shape(tensor: Any) -> torch.Size:
    """Return the shape of a tensor; of column-wise bytes alone only [M, K] can be known."""
    if tensor._rowwise_data is not None:
        *rows, pairs = tensor._rowwise_data.shape
        return torch.Size([*rows, 2 * pairs])
    columns = tensor._columnwise_data
    return torch.Size([2 * columns[0].numel(), columns.shape[0]])


def scale_shapes(shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the shapes of the row-wise and of the column-wise scales, padded for cuBLASLt."""
    m, k = int(torch.Size(shape[:-1]).numel()), shape[-1]
    return (
        [rounded_up(m, 128), rounded_up(k // BLOCK, 4)],
        [rounded_up(k, 128), rounded_up(m // BLOCK, 4)],
    )


def arguments(quantizer: Any, shape: list[int], device: torch.device) -> dict[str, Any]:
    """Return what a tensor of `shape` is made with, and memory for what is asked for.

    Raises:
        SizeError: The sizes are not whole blocks, or columns are asked for beside scaled rows.
    """
    *rows, k = shape or (1,)
    m = torch.Size(rows).numel()
    if k % BLOCK or m % BLOCK:
        raise SizeError(
            f"Transformer Engine's NVFP4 takes multiples of {BLOCK}, and a tensor is {shape}. "
            "Change the sizes or the number of tokens"
        )
    if _has_scaled_rows(quantizer) and (quantizer.columnwise_usage or not quantizer.rowwise_usage):
        raise SizeError(
            "Transformer Engine's NVFP4 with an amax for each row (row_scaled_activation) takes "
            "rows alone, and columns are asked for. Leave them out, as backward_override does"
        )
    made: dict[str, Any] = {"fp4_dtype": quantizer.dtype, "quantizer": quantizer}
    used = quantizer.rowwise_usage, quantizer.columnwise_usage
    sizes = [*shape[:-1], k // 2], [k, m // 2]
    for side, is_used, size, scales in zip(SIDES, used, sizes, scale_shapes(shape), strict=True):
        data = torch.empty(size, dtype=torch.uint8, device=device)
        scale = torch.zeros(scales, dtype=torch.uint8, device=device)
        made[f"{side}_data"] = data if is_used else None
        made[f"{side}_scale_inv"] = scale if is_used else None
        amaxes = m if _has_scaled_rows(quantizer) else 1
        made[f"amax_{side}"] = torch.zeros(amaxes, device=device) if is_used else None
    if hasattr(quantizer, "optimize_for_gemm"):
        made["with_gemm_swizzled_scales"] = _begins_tiled(quantizer, m, k)
    for name in ("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max"):
        if hasattr(quantizer, name):
            made[name] = getattr(quantizer, name)
    return made


def _begins_tiled(quantizer: Any, m: int, k: int) -> bool:
    """Whether a tensor without values says that its scales lie in tiles (quantizer.cpp of 2.17).

    A GPU has one kernel that rotates, casts and writes tiles, for these sizes; after others, and so
    with other tensors, the scales are put into tiles when they are there.
    """
    is_asked = quantizer.optimize_for_gemm and quantizer.with_rht and version_in_use() >= (2, 17)
    return bool(is_asked and m % 64 == 0 and k % 128 == 0)


def _has_scaled_rows(quantizer_or_tensor: Any) -> bool:
    """Whether there is an amax for each row, of what a quantizer makes or of a tensor."""
    name = "row_scaled_nvfp4"
    return bool(getattr(quantizer_or_tensor, name, getattr(quantizer_or_tensor, f"_{name}", False)))


def fill(quantizer: Any, x: torch.Tensor, out: Any) -> Any:
    """Write the cast of `x` [..., K], its scales and its amaxes into `out`, for each side of it."""
    _refuse(quantizer, x)
    x_MK = x.reshape(-1, x.shape[-1])
    turned = [side == "columnwise" for side in SIDES if _data(out, side) is not None]
    matrices = [_matrix(quantizer, x_MK, turned=each) for each in turned]
    has_scaled_rows = _has_scaled_rows(quantizer)
    amaxes = [_amax_of(matrix, of_rows=has_scaled_rows) for matrix in matrices]
    _reduce(quantizer, amaxes)
    rows = BLOCK if quantizer.with_2d_quantization else 1
    for is_turned, matrix, amax in zip(turned, matrices, amaxes, strict=True):
        byte = _bytes_of(matrix, is_turned=is_turned) if quantizer.stochastic_rounding else None
        choice = _choice(quantizer)
        payload, scale = quantize_rows(matrix, rows, amax, byte, version_in_use(), choice)
        _store(out, SIDES[is_turned], payload, scale.repeat_interleave(rows, 0), amax)
    return out


def _refuse(quantizer: Any, x: torch.Tensor) -> None:
    """Raise an error for what the kernels here, or those of a GPU, do not do."""
    settings = ("with_rht", "stochastic_rounding", "with_2d_quantization", "with_amax_reduction")
    asked = [name for name in settings if getattr(quantizer, name)]
    if _has_scaled_rows(quantizer) and asked:
        raise SizeError(
            "Transformer Engine's NVFP4 with an amax for each row (row_scaled_activation) takes "
            f"none of {', '.join(settings)}, and {', '.join(asked)} is asked for"
        )
    if _choice(quantizer) and set(asked) & set(settings[:2]):
        raise SizeError(
            "Transformer Engine's NVFP4 with nvfp4_4over6 neither rotates nor rounds at random, "
            f"and {', '.join(asked)} is asked for. Use disable_rht=True and "
            "disable_stochastic_rounding=True"
        )
    if quantizer.with_rht and x.dtype != torch.bfloat16:
        raise SizeError(
            f"Transformer Engine's NVFP4 rotates tensors in BF16 alone, and one is {x.dtype}. "
            "Compute in BF16, or use disable_rht=True"
        )
    if quantizer.with_rht and not quantizer.with_post_rht_amax:
        raise missing("quantize", " of NVFP4 with the amax from before the rotation")


def _choice(quantizer: Any) -> Choice | None:
    """Return how a quantizer chooses between two scales of a block, if it does."""
    if not getattr(quantizer, "nvfp4_use_4over6", False):
        return None
    return Choice(
        float(quantizer.nvfp4_e4m3_max),
        is_squared=quantizer.nvfp4_4over6_err_mode == "MSE",
        is_scaled=os.environ.get("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH") == "1",
    )


def _data(tensor: Any, side: str) -> torch.Tensor | None:
    found: torch.Tensor | None = getattr(tensor, f"_{side}_data")
    return found


def _matrix(quantizer: Any, x_MK: torch.Tensor, *, turned: bool) -> torch.Tensor:
    """Return what is quantized in rows: the tensor, or for columns its transpose, rotated maybe."""
    if not turned:
        return x_MK.contiguous()
    if not quantizer.with_rht:
        return x_MK.t().contiguous()
    mask = quantizer.rht_matrix_random_sign_mask_t
    assert mask in (0, SIGN_BITS), f"signs of the rotation that are not known: {mask:#x}"
    signs = SIGNS if mask else (1,) * BLOCK
    if block_casts.runs_in_c(x_MK):
        turned_MK, _ = block_casts.rotate_columns(x_MK, torch.tensor(signs, dtype=torch.float32))
        return turned_MK.t().contiguous()
    return rotated(x_MK.t().contiguous(), signs)


def _amax_of(matrix: torch.Tensor, *, of_rows: bool = False) -> torch.Tensor:
    """Return max|x| of all that is not NaN in FP32, 0-d or of each row [M, 1]."""
    if of_rows:
        magnitude = matrix.float().abs().nan_to_num_(nan=0.0, posinf=torch.inf)
        return magnitude.amax(1, keepdim=True)
    found = cast.amax_of(matrix)
    if torch.isfinite(found):
        return found
    return cast.amax_of(matrix.float().nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf))


def _reduce(quantizer: Any, amaxes: list[torch.Tensor]) -> None:
    """Take the largest amax of each side over the ranks that gather the tensor, if they do."""
    if not quantizer.with_amax_reduction:
        return
    group = quantizer._canonicalized_amax_reduction_group()
    largest = torch.stack(amaxes)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
    amaxes[:] = largest.unbind()


def _bytes_of(matrix: torch.Tensor, *, is_turned: bool) -> torch.Tensor:
    """Return a random byte for each element; rows and columns of a tensor draw apart."""
    rows, columns = matrix.shape
    places = Rows(torch.zeros(rows, dtype=torch.int64), torch.arange(rows))
    return random_bytes(DRAWS.next("columns" if is_turned else "rows"), places, [range(columns)])


def quantize_rows(
    x_MK: torch.Tensor,
    rows: int,
    amax: torch.Tensor,
    byte: torch.Tensor | None,
    version: tuple[int, ...],
    choice: Choice | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers of E2M1, kept in E4M3 [M, K], and the FP32 scales of blocks of rows x 16.

    `amax` is that of the tensor, 0-d, or of each row [M, 1].
    """
    if choice is not None:
        numbers, scale = four_over_six.quantize_blocks(x_MK, rows, amax, choice)
        return numbers.to(E4M3.dtype), scale
    is_older = version < (2, 14)
    if not is_older and not amax.dim() and block_casts.runs_in_c(x_MK):
        return block_casts.nvfp4(x_MK, (rows, BLOCK), amax, byte)[:2]
    numbers, scale = quantize_blocks(x_MK, rows, amax, byte, _sixth_first if is_older else None)
    return numbers.to(E4M3.dtype), scale


def _sixth_first(of_block: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the scales before they are rounded to E4M3, by the rule up to 2.13."""
    return of_block / LARGEST_E2M1 * factor


def _store(
    out: Any, side: str, payload: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor
) -> None:
    """Write one side: bytes of two numbers, and a scale for 16 elements of every row."""
    data = _data(out, side)
    assert data is not None
    data.copy_(_packed(payload).view(data.shape))
    stored = getattr(out, f"_{side}_scale_inv")
    codes = scale.to(E4M3.dtype).view(torch.uint8)
    stored.zero_()[: codes.shape[0], : codes.shape[1]].copy_(codes)
    getattr(out, f"_amax_{side}").copy_(amax.reshape(-1))


def _packed(payload: torch.Tensor) -> torch.Tensor:
    """Return two numbers of E2M1 a byte, the even one in the low half, of numbers in E4M3."""
    bits = payload.view(torch.uint8)
    magnitude = bits & 0x7F
    codes = torch.where(magnitude < 0x38, magnitude // 0x30, (magnitude - 0x30) // 4)
    codes = codes | (bits & 0x80) >> 4
    return codes[:, ::2] | codes[:, 1::2] << 4


def padded_scales(scale: torch.Tensor) -> torch.Tensor:
    """Return a matrix of scales with zeros up to multiples of 128 rows and 4 columns."""
    rows, columns = scale.shape
    return F.pad(scale, (0, rounded_up(columns, 4) - columns, 0, rounded_up(rows, 128) - rows))


def operand(tensor: Any, *, by_column: bool) -> Fp8Tensor:
    """Return the matrix [M, K] that a product reads, of row-wise or of column-wise bytes."""
    side = SIDES[by_column]
    data, scale_inv = _data(tensor, side), getattr(tensor, f"_{side}_scale_inv")
    assert data is not None, f"this product needs {side} numbers, which are not there"
    payload = fp4_numbers(data.reshape(data.shape[0] if by_column else -1, _pairs(tensor, side)))
    rows, columns = payload.shape
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        scale_inv = unswizzled(scale_inv.flatten(), rows, columns // BLOCK)
    scale = scale_inv[:rows, : columns // BLOCK].contiguous().view(E4M3.dtype).float()
    amax = getattr(tensor, f"_amax_{side}")
    outer = amax.reshape((-1, 1) if _has_scaled_rows(tensor) else ()) / _largest(tensor)
    block = (1, BLOCK)
    if by_column:
        payload, scale, block = payload.t(), scale.t(), (BLOCK, 1)
    rotation = _rotation(tensor) if by_column else None
    return Fp8Tensor(
        payload, scale, E4M3, block=block, is_exact_in_bf16=True, layout="other", outer=outer,
        rotation=rotation,
    )  # fmt: skip


def _largest(tensor: Any) -> float:
    """Return what the amax of a tensor becomes: the largest number times the largest scale."""
    return LARGEST_E2M1 * float(getattr(tensor, "_nvfp4_e4m3_max", LARGEST_E4M3))


def _pairs(tensor: Any, side: str) -> int:
    """Return the number of bytes of a row of one side; a column may lie in several dims."""
    data = _data(tensor, side)
    assert data is not None
    return data[0].numel() if side == "columnwise" else data.shape[-1]


def _rotation(tensor: Any) -> str | None:
    """Return the name of the rotation of a tensor's columns."""
    quantizer = tensor._quantizer
    if not quantizer.with_rht:
        return None
    return "hadamard" if quantizer.rht_matrix_random_sign_mask_t else "hadamard without signs"


def scale_of_product(a: Any, b: Any, *, columns: tuple[bool, bool], alpha: float) -> torch.Tensor:
    """Return the factor of a product of two tensors, 0-d FP32: of both amaxes, and `alpha`.

    `columns` says whose column-wise numbers are read. The order of the roundings is that of
    compute_nvfp4_per_tensor_scale_kernel (common/recipe/nvfp4.cu).

    Raises:
        ProductError: A tensor has an amax for each row, which Transformer Engine's Python takes out
            before it calls for a product.
    """
    if _has_scaled_rows(a) or _has_scaled_rows(b):
        raise ProductError(
            "Transformer Engine's product takes no NVFP4 with an amax for each row. Multiply the "
            "rows of the result by them, as general_gemm does"
        )
    of_a, of_b = (
        getattr(tensor, f"_amax_{SIDES[by_column]}").reshape(())
        for tensor, by_column in zip((a, b), columns, strict=True)
    )
    factor: torch.Tensor = torch.full_like(of_a, alpha) * of_a * of_b
    return factor * torch.full_like(of_a, _largest(a) * _largest(b)).reciprocal_()


def dequantize(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of row-wise numbers in the tensor's shape, with the roundings of a GPU.

    The FP32 factor of a block is its scale times the amax of the tensor or row times 1 / 2688, or
    1 / 1536 where 256 is the largest scale; each product is rounded
    (common/cast/nvfp4/dequantize_nvfp4.cuh).
    """
    if tensor._rowwise_data is None:
        raise missing("dequantize", " of NVFP4 that has column-wise numbers alone")
    side = operand(tensor, by_column=False)
    amax = tensor._amax_rowwise.reshape(-1, 1)
    factor = side.dequant_scale * amax * torch.full_like(amax, _largest(tensor)).reciprocal_()
    values_MK: torch.Tensor = side.payload.float() * factor.repeat_interleave(BLOCK, 1)
    return values_MK.reshape(row_shape(tensor)).to(dtype)


def nvfp4_data_transpose(input: torch.Tensor, *, out: torch.Tensor | None) -> torch.Tensor:
    """Return the numbers [M, K], two of a row in a byte, as [K, M], two of a column in a byte."""
    low_high = torch.stack((input & 15, input >> 4), -1).flatten(1)
    turned = low_high.t()
    made = turned[:, ::2] | turned[:, 1::2] << 4
    return made.contiguous() if out is None else out.copy_(made)


def nvfp4_2d_scale_transpose(
    input: torch.Tensor,
    output: torch.Tensor,
    M_tiles: int,  # noqa: N803  # Transformer Engine's names
    K_tiles: int,  # noqa: N803
) -> None:
    """Write the scales of squares, which each of 16 rows has, for each of 16 columns."""
    of_squares = input[: M_tiles * BLOCK : BLOCK, :K_tiles].t()
    output[:, :M_tiles] = 0
    output[: K_tiles * BLOCK, :M_tiles] = of_squares.repeat_interleave(BLOCK, 0)[: len(output)]


def nvfp4_2d_multi_tensor_transpose(
    rowwise_data_list: Sequence[torch.Tensor],
    columnwise_data_list: Sequence[torch.Tensor],
    rowwise_scale_inv_list: Sequence[torch.Tensor],
    columnwise_scale_inv_list: Sequence[torch.Tensor],
    M_list: Sequence[int],  # noqa: N803
    K_list: Sequence[int],  # noqa: N803
) -> None:
    """Write the columns of several weights that are quantized in squares, from their rows."""
    data = zip(rowwise_data_list, columnwise_data_list, strict=True)
    scales = zip(rowwise_scale_inv_list, columnwise_scale_inv_list, strict=True)
    for (rows, columns), (of_rows, of_columns), m, k in zip(
        data, scales, M_list, K_list, strict=True
    ):
        nvfp4_data_transpose(rows.reshape(m, -1), out=columns)
        nvfp4_2d_scale_transpose(of_rows, of_columns, -(-m // BLOCK), -(-k // BLOCK))


KERNELS = (nvfp4_data_transpose, nvfp4_2d_scale_transpose, nvfp4_2d_multi_tensor_transpose)
