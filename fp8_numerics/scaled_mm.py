"""Run FP8 products on FP8 tensor cores: `torch._scaled_mm` in the layouts that it takes.

Both operands are given with the dim that the product sums over innermost, [M, K] and [N, K],
because Hopper multiplies nothing else ("TN"). So each tensor of a linear is needed in two
orientations:

    output      [T, O] = scaled_mm(input [T, I],           weight [O, I])
    grad_input  [T, I] = scaled_mm(grad_output [T, O],     weight transposed [I, O])
    grad_weight [O, I] = scaled_mm(grad_output transposed [O, T], input transposed [I, T])

Scales (each a dequant_scale, FP32) have these shapes: 0-d or one element; [M, 1] and [N, 1]; [M,
ceil(K / 128)] or [ceil(M / 128), ceil(K / 128)] and the same of N. Row and block scales need both
operands to be scaled so; two square-blocked operands are not supported by cuBLASLt.

Blackwell also takes scales of 32 elements (`mx`: E8M0) and, with operands in FP4, of 16 (`nv`:
E4M3), both as bytes in tiles (`swizzle.py`). An operand of FP4 is [M, K / 2], two numbers in a
byte; FP32 factors of both whole operands then enter the product, before the bias.
"""

# M, N rows of the operands   K what is summed over
from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from fp8_numerics import torch_private
from fp8_numerics.swizzle import rounded_up, swizzled_size

BLOCK = 128
ALIGNMENT = 16  # K and N must be multiples of it
BLOCK_ROWS = 4  # M too, if a has block scales: cuBLASLt reads 16 bytes of them at a time
PACKED_ALIGNMENT = 32  # K with scales in tiles: a block of `mx`, and 16 bytes of FP4
SQUARE_ALIGNMENT = 4 * BLOCK  # K too, if scales of square blocks need strides of 16 bytes

Layout = Literal["tensor", "row", "block", "square", "mx", "nv", "other"]
PACKED: dict[str, int] = {"mx": 32, "nv": 16}
"""The layouts whose scales are in tiles of bytes, and how many elements share a scale."""
PAIRS = frozenset(
    {(name, name) for name in ("tensor", "row", "block", *PACKED)}
    | {("block", "square"), ("square", "block")}
)
"""The layouts of two operands that a product takes."""
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
Outers = tuple[torch.Tensor, torch.Tensor]
ScaledMatmul = Callable[..., torch.Tensor]


def writes_fp32(device: torch.device, layout: Layout) -> bool:
    """Whether a product with these scales can write FP32 instead of BF16.

    cuBLAS writes it with scales of rows from CUDA 12.9 on, and on compute capability 9.0 alone
    (torch's tests of `_scaled_mm`). Other devices' kernels for such scales are BF16's.
    """
    if layout != "row":
        return True
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    return cuda >= (12, 9) and torch.cuda.get_device_capability(device)[0] == 9


def check_scales(payload: torch.Tensor, dequant_scale: torch.Tensor, layout: Layout) -> None:
    """Check that the scales of an operand [M, K] have the shape of `layout`.

    Raises:
        ValueError: The shape differs.
    """
    rows, inner = payload.shape
    shape = tuple(dequant_scale.shape)
    if layout in PACKED:
        numbers = 2 * inner if payload.dtype == torch.float4_e2m1fn_x2 else inner
        fits = shape == (swizzled_size(rows, -(-numbers // PACKED[layout])),)
    elif layout == "tensor":
        fits = dequant_scale.numel() == 1
    elif layout == "row":
        fits = shape == (rows, 1)
    else:
        of_rows = {"block": rows, "square": -(-rows // BLOCK)}[layout]
        fits = shape == (of_rows, -(-inner // BLOCK))
    if not fits:
        raise ValueError(
            f"scales of shape {shape} fit no payload of shape {tuple(payload.shape)} by {layout}"
        )


def scaled_mm(
    a_MK: torch.Tensor,
    b_NK: torch.Tensor,
    a_dequant_scale: torch.Tensor,
    b_dequant_scale: torch.Tensor,
    *,
    layouts: tuple[Layout, Layout] = ("tensor", "tensor"),
    outers: Outers | None = None,
    out_dtype: torch.dtype,
    bias_N: torch.Tensor | None = None,
    use_fast_accum: bool = False,
    matmul: ScaledMatmul = torch_private.scaled_mm,
    out_MN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (a @ b.T) scaled, plus the bias: [M, N] of `out_dtype` (FP32, BF16, FP16).

    `out_MN`, contiguous, of `out_dtype` and 16-byte aligned, is written and returned if it is
    given and if no padding is needed. `layouts` of a and b are given, not inferred from shapes:
    with K up to 128 a row is a block. `outers` are the factors (0-d FP32) of operands in FP4.

    Sizes that the tensor cores do not take are padded with zeros, which costs copies; the result is
    contiguous. The bias is rounded to `out_dtype` and enters before the one rounding of the result;
    with FP32 output it is added after.

    Raises:
        ValueError: Two E5M2 operands, operands in E4M3FNUZ or E5M2FNUZ, or scales that do not fit
            the payloads or each other.
    """
    for dtype in (a_MK.dtype, b_NK.dtype):
        if dtype in FNUZ:
            raise ValueError(f"{dtype}: products of this format are only emulated (gemm.EMULATED)")
    if a_MK.dtype == b_NK.dtype == torch.float8_e5m2:
        raise ValueError("two E5M2 operands: FP8 tensor cores need at least one in E4M3")
    if a_MK.shape[1] != b_NK.shape[1]:
        raise ValueError(f"operands {tuple(a_MK.shape)} and {tuple(b_NK.shape)} differ in K")
    a_layout, b_layout = layouts
    _check_pair(a_layout, b_layout)
    check_scales(a_MK, a_dequant_scale, a_layout)
    check_scales(b_NK, b_dequant_scale, b_layout)
    num_rows, num_cols = a_MK.shape[0], b_NK.shape[0]
    if a_MK.numel() == 0 or b_NK.numel() == 0:
        empty = torch.zeros(num_rows, num_cols, dtype=out_dtype, device=a_MK.device)
        return empty if bias_N is None else empty + bias_N.to(out_dtype)
    inner = rounded_up(a_MK.shape[1], _step(layouts, a_MK.dtype))
    cols = rounded_up(num_cols, BLOCK if b_layout == "square" else ALIGNMENT)
    rows = rounded_up(num_rows, {"square": BLOCK, "block": BLOCK_ROWS}.get(a_layout, 1))
    late_bias = bias_N if out_dtype == torch.float32 else None
    early_bias = None if bias_N is None or late_bias is not None else bias_N.to(out_dtype)
    is_whole = (rows, cols) == (num_rows, num_cols) and late_bias is None
    target = {"out": out_MN} if is_whole and out_MN is not None else {}
    scale_a = _scale(a_dequant_scale, a_layout, rows, inner)
    scale_b = _scale(b_dequant_scale, b_layout, cols, inner).t()
    out = matmul(
        _padded(a_MK, rows, inner),
        _padded(b_NK, cols, inner).t(),
        scale_a=scale_a if outers is None else (scale_a, outers[0]),
        scale_b=scale_b if outers is None else (scale_b, outers[1]),
        bias=None if early_bias is None else _extended(early_bias, (0, cols - num_cols)),
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        **target,
    )
    if is_whole:
        return out if out_MN is None else out_MN
    out = out[:num_rows, :num_cols]
    # NCCL sums no other tensors, and what torch compiles takes its strides for granted.
    return out.contiguous() if late_bias is None else out + late_bias


def _check_pair(a: Layout, b: Layout) -> None:
    if (a, b) not in PAIRS:
        raise ValueError(f"an operand scaled by {a} times one scaled by {b} is not supported")


def _step(layouts: tuple[Layout, Layout], dtype: torch.dtype) -> int:
    """Return what the operands' bytes along K must be a multiple of."""
    if layouts[0] in PACKED:
        return PACKED_ALIGNMENT // (2 if dtype == torch.float4_e2m1fn_x2 else 1)
    if "square" in layouts:
        return SQUARE_ALIGNMENT
    return ALIGNMENT if layouts[0] in ("tensor", "row") else BLOCK


def _extended(x: torch.Tensor, padding: tuple[int, ...], value: float = 0.0) -> torch.Tensor:
    """Pad `x`, or return it where there is nothing to add: `F.pad` copies even then."""
    return F.pad(x, padding, value=value) if any(padding) else x


def _padded(payload: torch.Tensor, rows: int, inner: int) -> torch.Tensor:
    """Return the payload contiguous and padded with zeros, as bytes: torch pads no FP8 dtypes."""
    if payload.shape == (rows, inner):
        return payload.contiguous()
    padding = (0, inner - payload.shape[1], 0, rows - payload.shape[0])
    return F.pad(payload.view(torch.uint8), padding).view(payload.dtype)


def _scale(scale: torch.Tensor, layout: Layout, rows: int, inner: int) -> torch.Tensor:
    """Return the scales in the strides that torch asks for; padded rows and blocks get 1.

    Tiles have zeros for what is padded, and no padding of operands begins another tile.
    """
    if layout in PACKED:
        return scale
    if layout == "tensor":
        return scale.reshape(1, 1)
    size = {
        "row": (rows, 1),
        "block": (rows, inner // BLOCK),
        "square": (rows // BLOCK, inner // BLOCK),
    }[layout]
    padding = (0, size[1] - scale.shape[1], 0, size[0] - scale.shape[0])
    scale = _extended(scale, padding, value=1.0)
    return scale.t().contiguous().t() if layout == "block" else scale.contiguous()
