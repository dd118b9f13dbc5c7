"""Transformer Engine's quantized tensors as its compiled code makes and reads them.

An H100 multiplies FP8 in one orientation alone: along the dim that is innermost in both operands.
So a tensor has row-wise bytes [..., K] for products along K, column-wise bytes [K, ...] for the
others, or both; which, its quantizer says (`rowwise_usage`, `columnwise_usage`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal

import torch

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.scaled_mm import BLOCK
from fp8_numerics.swizzle import rounded_up, swizzled
from te_cpu import mx, nv
from te_cpu.enums import FORMATS, ScaleFormat
from te_cpu.missing import missing
from te_cpu.wheel import version_in_use

Quantizer = Any  # of transformer_engine.pytorch.tensor


def is_quantized(tensor: Any) -> bool:
    """Whether `tensor` is a tensor that Transformer Engine keeps in FP8 or FP4, of either kind.

    One kind is a subclass of `torch.Tensor`, which a parameter may be; the other one is not.
    """
    return hasattr(tensor, "_fp8_dtype") or hasattr(tensor, "_fp4_dtype")


def kind_of(quantizer: Quantizer) -> str:
    return type(quantizer).__name__


def is_blockwise(quantizer: Quantizer) -> bool:
    return kind_of(quantizer) == "Float8BlockQuantizer"


def is_mx(quantizer: Quantizer) -> bool:
    return kind_of(quantizer) == "MXFP8Quantizer"


def is_nv(quantizer: Quantizer) -> bool:
    return kind_of(quantizer) == "NVFP4Quantizer"


def _column_shape(shape: Sequence[int]) -> list[int]:
    return [*shape[-1:], *shape[:-1]]


def _row_shape(column_shape: Sequence[int]) -> list[int]:
    return [*column_shape[1:], *column_shape[:1]]


def _bytes(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.empty(list(shape), dtype=torch.uint8, device=device)


def create(
    quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """Return a tensor of `shape` with memory for what the quantizer's usages ask for.

    `internal` quantizers make a plain storage object, others a subclass of `torch.Tensor`.
    """
    shape = list(shape)
    if is_nv(quantizer):
        made, name, module = nv.arguments(quantizer, shape, device), nv.NAME, nv.module()
    elif is_mx(quantizer):
        made, name, module = mx.arguments(quantizer, shape, device), mx.NAME, mx.module()
    elif is_blockwise(quantizer):
        made, name = _block_arguments(quantizer, shape, device), "Float8BlockwiseQTensor"
        module = importlib.import_module(
            "transformer_engine.pytorch.tensor.float8_blockwise_tensor"
        )
    else:
        made, name = _whole_arguments(quantizer, shape, device), "Float8Tensor"
        module = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    if quantizer.internal:
        found = vars(module)
        storage = found.get(f"{name}Storage") or found[f"{name}Base"]  # its older name
        return storage(**made)
    return getattr(module, name)(shape=shape, dtype=dtype, **made)


def _whole_arguments(
    quantizer: Quantizer, shape: list[int], device: torch.device
) -> dict[str, Any]:
    by_row, by_column = quantizer.rowwise_usage, quantizer.columnwise_usage
    return {
        "data": _bytes(shape, device) if by_row else None,
        "data_transpose": _bytes(_column_shape(shape), device) if by_column else None,
        "fp8_scale_inv": torch.empty(1, device=device),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }


def _block_arguments(
    quantizer: Quantizer, shape: list[int], device: torch.device
) -> dict[str, Any]:
    rows, columns = block_scale_shapes(quantizer, shape)
    by_row, by_column = quantizer.rowwise_usage, quantizer.columnwise_usage
    return {
        "rowwise_data": _bytes(shape, device) if by_row else None,
        "rowwise_scale_inv": torch.zeros(rows, device=device) if by_row else None,
        "columnwise_data": _bytes(_column_shape(shape), device) if by_column else None,
        "columnwise_scale_inv": torch.zeros(columns, device=device) if by_column else None,
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "is_2D_scaled": quantizer.block_scaling_dim == 2,
        **_data_format(quantizer),
    }


def _data_format(quantizer: Quantizer) -> dict[str, Any]:
    """Return the argument that says whether blocks lie as products read them, in 2.5 to 2.11.

    They could lie as ranks gather them too, which sequence parallelism asks for.
    """
    if not hasattr(quantizer, "all_gather_usage"):
        return {}
    if quantizer.all_gather_usage:
        raise missing("Float8BlockScaleTensorFormat.COMPACT")
    return {"data_format": ScaleFormat["GEMM_READY"]}


def block_scale_shapes(
    quantizer: Quantizer, shape: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of a tensor's row-wise and column-wise scales, padded for cuBLASLt.

    1 x 128 blocks are stored [blocks, rows]; 128 x 128 blocks [blocks of rows, blocks].
    """
    *rows, k = shape or (1,)  # a number is a row of one
    m = int(torch.Size(rows).numel())
    k_blocks, m_blocks = -(-k // BLOCK), -(-m // BLOCK)
    if quantizer.block_scaling_dim == 2:
        return (m_blocks, rounded_up(k_blocks, 4)), (k_blocks, rounded_up(m_blocks, 4))
    return (k_blocks, rounded_up(m, 4)), (m_blocks, rounded_up(k, 4))


def coerce(quantizer: Quantizer, tensor: Any) -> Any:
    """Give a tensor that is to be written the memory that the quantizer's usages ask for now."""
    assert quantizer.rowwise_usage or quantizer.columnwise_usage, "a quantizer without a usage"
    if is_nv(quantizer):
        rows, columns = tensor._rowwise_data, tensor._columnwise_data
        data = columns if rows is None else rows
        assert data is not None, "an NVFP4Tensor without data"
        made = nv.arguments(quantizer, list(nv.row_shape(tensor)), data.device)
        return _coerce_sides(made, tensor)
    if is_mx(quantizer):
        data = tensor._rowwise_data if tensor._rowwise_data is not None else tensor._columnwise_data
        return _coerce_sides(mx.arguments(quantizer, list(data.shape), data.device), tensor)
    if is_blockwise(quantizer):
        return _coerce_blocks(quantizer, tensor)
    assert tensor._data is not None or tensor._transpose is not None, "a Float8Tensor without data"
    has_columns = tensor._transpose is not None
    shape = _row_shape(tensor._transpose.shape) if has_columns else list(tensor._data.shape)
    device = (tensor._transpose if has_columns else tensor._data).device
    if not quantizer.rowwise_usage:
        tensor._data = None
    elif tensor._data is None:
        tensor._data = _bytes(shape, device)
    if not quantizer.columnwise_usage:
        tensor._transpose = None
    elif tensor._transpose is None:
        tensor._transpose = _bytes(_column_shape(shape), device)
    tensor._transpose_invalid = not quantizer.columnwise_usage
    tensor._fp8_dtype = quantizer.dtype
    return tensor


def _coerce_blocks(quantizer: Quantizer, tensor: Any) -> Any:
    has_rows = tensor._rowwise_data is not None
    data = tensor._rowwise_data if has_rows else tensor._columnwise_data
    shape = list(data.shape) if has_rows else _row_shape(data.shape)
    return _coerce_sides(_block_arguments(quantizer, shape, data.device), tensor)


def _coerce_sides(made: dict[str, Any], tensor: Any) -> Any:
    """Give a tensor the memory of `made` for what it lacks, and drop what `made` has not."""
    for name, fresh in made.items():
        if name.startswith(("rowwise", "columnwise", "amax")):
            old = getattr(tensor, f"_{name}")
            is_kept = old is not None and fresh is not None
            if is_kept and name.startswith("amax"):  # of the whole tensor, or of each row
                is_kept = old.numel() == fresh.numel()
            setattr(tensor, f"_{name}", old if is_kept else fresh)
        elif "nvfp4" in name:
            setattr(tensor, f"_{name}", fresh)
    return tensor


def operand(tensor: Any, *, by_column: bool) -> Fp8Tensor:
    """Return a quantized tensor as the matrix [M, K] that a product reads.

    It is made of the row-wise bytes or of the column-wise ones. They must be there: the hardware
    has no other way to that orientation.
    """
    if nv.is_nv(tensor):
        return nv.operand(tensor, by_column=by_column)
    if mx.is_mx(tensor):
        return mx.operand(tensor, by_column=by_column)
    fmt = FORMATS[tensor._fp8_dtype]
    side = "column" if by_column else "row"
    if hasattr(tensor, "_is_2D_scaled"):
        data = tensor._columnwise_data if by_column else tensor._rowwise_data
        assert data is not None, f"this product needs {side}-wise blocks, which are not there"
        return _block_operand(tensor, data, by_column=by_column)
    data = tensor._transpose if by_column else tensor._data
    is_stale = by_column and tensor._transpose_invalid
    assert data is not None and not is_stale, f"this product needs {side}-wise FP8 bytes"
    payload_MK = _matrix(data, by_column=by_column).view(fmt.dtype)
    payload_MK = payload_MK.t() if by_column else payload_MK
    return Fp8Tensor(payload_MK, tensor._scale_inv.reshape(()), fmt)


def _block_operand(tensor: Any, data: torch.Tensor, *, by_column: bool) -> Fp8Tensor:
    """Return a tensor with scales of blocks as [M, K]; its column-wise data are the transpose."""
    fmt = FORMATS[tensor._fp8_dtype]
    scale = tensor._columnwise_scale_inv if by_column else tensor._rowwise_scale_inv
    payload = _matrix(data, by_column=by_column).view(fmt.dtype)
    rows, columns = payload.shape
    if tensor._is_2D_scaled:
        block, scale = (BLOCK, BLOCK), scale[:, : -(-columns // BLOCK)]
    else:
        block, scale = (1, BLOCK), scale[:, :rows].t()
    if by_column:
        payload, scale, block = payload.t(), scale.t(), (block[1], block[0])
    layout: Literal["square", "block"] = "square" if tensor._is_2D_scaled else "block"
    is_exact = not scale.is_meta and bool((scale.frexp().mantissa == 0.5).all())
    return Fp8Tensor(payload, scale, fmt, block=block, is_exact_in_bf16=is_exact, layout=layout)


def is_tiled(quantizer: Quantizer) -> bool:
    """Whether a cast leaves the scales in tiles, as a Blackwell's products read them.

    Transformer Engine asks for that from 2.12 on, and NVFP4 follows from 2.17 on.
    """
    is_asked = getattr(quantizer, "optimize_for_gemm", False)
    return is_asked and (is_mx(quantizer) or is_nv(quantizer) and version_in_use() >= (2, 17))


def tile(tensor: Any) -> None:
    """Put the scales of rows and columns into tiles, and note that in the tensor."""
    for side in ("rowwise", "columnwise"):
        stored = getattr(tensor, f"_{side}_scale_inv")
        if stored is not None:
            is_turned = side == "columnwise" and mx.is_mx(tensor)  # those of NVFP4 lie so
            stored.copy_(swizzled(stored.t() if is_turned else stored).view_as(stored))
    tensor._with_gemm_swizzled_scales = True


def _matrix(data: torch.Tensor, *, by_column: bool) -> torch.Tensor:
    """Return [..., K] as [M, K], and column-wise [K, ...] as [K, M]."""
    data = torch.atleast_1d(data)
    return data.reshape(data.shape[0], -1) if by_column else data.reshape(-1, data.shape[-1])


def transposed(data: torch.Tensor) -> torch.Tensor:
    """Return [..., K] as [K, ...], contiguous."""
    return data.permute(_column_shape(range(data.dim()))).contiguous()


def row_shape(tensor: Any) -> torch.Size:
    """Return the logical shape of any operand of a product."""
    if not is_quantized(tensor):
        return torch.Size(tensor.shape)
    if nv.is_nv(tensor):
        return nv.row_shape(tensor)
    if mx.is_mx(tensor):
        data = tensor._rowwise_data if tensor._rowwise_data is not None else tensor._columnwise_data
        return torch.Size(data.shape)
    if hasattr(tensor, "_is_2D_scaled"):
        data, columns = tensor._rowwise_data, tensor._columnwise_data
    else:
        data, columns = tensor._data, tensor._transpose
    return torch.Size(data.shape if data is not None else _row_shape(columns.shape))
