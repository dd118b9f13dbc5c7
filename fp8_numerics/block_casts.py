"""Cast with a scale for each block in C on CPUs, along rows or along columns, and come back.

A cast along columns reads the tensor as it lies in memory, where a rule in torch operations
transposes it. The bits are those of `mxfp8.py`, `nvfp4.py` and `scales.py`, which run on other
devices and without a compiler (`runs_in_c`); `mxfp8`, `nvfp4` and `rotate_columns` name them there
in a RuntimeError.
"""

# M, N the tensor's own dims

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from fp8_numerics.dtypes import described
from fp8_numerics.formats import E4M3, Fp8Format, not_a_format
from fp8_numerics.kernels.compile import IN_C, KINDS, library, library_for

Block = tuple[int, int]
Matrix = tuple[int, int, int, int]  # address, rows, columns, kind
_KINDS: dict[object, int] = {dtype: number for number, dtype in enumerate(KINDS)}
OUT_KINDS = (torch.float32, torch.bfloat16)
_STRIP = 256  # columns that the kernels do together
_FP4_BLOCKS = ((1, 16), (16, 1), (16, 16))


def runs_in_c(x: torch.Tensor) -> bool:
    """Whether the C kernels cast this tensor."""
    return x.dtype in _KINDS and library_for(x) is not None


class BlockCast(NamedTuple):
    """Hold a cast [M, N] with a scale for each block.

    `payload` has FP8 numbers, of NVFP4 those of E2M1 in E4M3, and `scale` FP32 is what they are
    times. `values` are payload * scale, rounded once, if they were asked for in FP32 or BF16;
    `outer` is NVFP4's factor of the whole tensor (`nvfp4.outer_of`).
    """

    payload: torch.Tensor
    scale: torch.Tensor
    values: torch.Tensor | None = None
    outer: torch.Tensor | None = None


def mxfp8(
    x_MN: torch.Tensor, *, along_columns: bool, values: torch.dtype | None = None
) -> BlockCast:
    """Cast to E4M3 with a scale for each 32 elements of rows or columns; the last may be fewer.

    Raises:
        TypeError: `x_MN` is no matrix in FP32, BF16 or FP16, or `values` is not FP32 or BF16.
        RuntimeError: There are no kernels for `x_MN`.
    """
    lib, x_MN, matrix = _read(x_MN, "mxfp8.quantize_rows")
    made, results = _new(x_MN, matrix, (32, 1) if along_columns else (1, 32), E4M3, values)
    lib.megafp8_mxfp8(*matrix, int(along_columns), *results, torch.get_num_threads())
    return made


def current(
    x_MN: torch.Tensor,
    block: Block,
    fmt: Fp8Format,
    *,
    power_2: bool,
    torchao: bool = False,
    values: torch.dtype | None = None,
) -> BlockCast | None:
    """Cast to FP8 with a scale for each block by its own amax; None where no kernel does it.

    The rules are those of `scales.scale_of_amax`, and with `torchao` of `scale_of_amax_torchao`.

    Raises:
        TypeError: `x_MN` is no matrix, `fmt` no format, or `values` is not FP32 or BF16.
    """
    if not isinstance(fmt, Fp8Format):
        raise not_a_format(fmt)
    down, right = block
    if not (x_MN.numel() and fmt in IN_C and runs_in_c(x_MN)) or (down > 1 and _STRIP % right):
        return None
    lib, x_MN, matrix = _read(x_MN, "scales.scale_of_amax")
    made, results = _new(x_MN, matrix, block, fmt, values)
    choices = (int(choice) for choice in (not fmt.is_e4m3, power_2, torchao))
    lib.megafp8_current(*matrix, *block, *choices, *results, torch.get_num_threads())
    return made


def nvfp4(
    x_MN: torch.Tensor,
    block: Block,
    amax: torch.Tensor,
    byte: torch.Tensor | None,
    values: torch.dtype | None = None,
) -> BlockCast:
    """Cast to E2M1 by blocks of 1 x 16, 16 x 1 or 16 x 16, which divide the sizes.

    `amax` (0-d FP32) is the tensor's, and `byte` (uint8 [M, N]) asks for random rounding.

    Raises:
        TypeError: `x_MN` is no matrix in FP32, BF16 or FP16, or `amax`, `byte` or `values` has
            another dtype than these.
        ValueError: Another block, one that does not divide a size, more amaxes than one, or `byte`
            has another shape or is not contiguous.
        RuntimeError: There are no kernels for `x_MN`.
    """
    lib, x_MN, matrix = _read(x_MN, "nvfp4.quantize_blocks")
    (_, rows, cols, _), (down, right) = matrix, block
    if block not in _FP4_BLOCKS or rows % down or cols % right:
        raise ValueError(
            f"x is {described(x_MN)} in blocks of {block}: NVFP4 has {_FP4_BLOCKS}, which divide "
            "the sizes. Fill rows or columns up with zeros"
        )
    if getattr(amax, "dtype", None) != torch.float32 or amax.numel() != 1 or not amax.is_cpu:
        _check_read(x_MN, "amax", amax, torch.float32, ())
    if byte is not None:
        is_known = getattr(byte, "dtype", None) == torch.uint8 and byte.is_contiguous()
        if not is_known or byte.shape != (rows, cols) or not byte.is_cpu:
            _check_read(x_MN, "byte", byte, torch.uint8, (rows, cols))
    made, results = _new(x_MN, matrix, block, E4M3, values)
    outer = torch.empty_like(amax)
    byte_at = None if byte is None else byte.data_ptr()
    read = *matrix, down, right, amax.data_ptr(), byte_at
    lib.megafp8_nvfp4(*read, *results, outer.data_ptr(), torch.get_num_threads())
    return made._replace(outer=outer)


def _new(
    x_MN: torch.Tensor, matrix: Matrix, block: Block, fmt: Fp8Format, values: torch.dtype | None
) -> tuple[BlockCast, tuple[object, ...]]:
    """Return memory for a cast, and its addresses as the kernels take them."""
    (_, rows, cols, _), (down, right) = matrix, block
    if values is not None and values not in OUT_KINDS:
        raise TypeError(f"values is {values}, and values are written in {_names(OUT_KINDS)} alone")
    values = values if fmt == E4M3 else None
    payload = torch.empty_like(x_MN, dtype=fmt.dtype)
    scale = x_MN.new_empty(-(-rows // down), -(-cols // right), dtype=torch.float32)
    written = payload.data_ptr(), scale.data_ptr()
    if values is None:
        return BlockCast(payload, scale), (*written, None, 0)
    wide = torch.empty_like(x_MN, dtype=values)
    return BlockCast(payload, scale, wide), (*written, wide.data_ptr(), _KINDS[values])


def rotate_columns(x_MN: torch.Tensor, signs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 16 elements of a column at a time times signs (FP32 [16]) and H / 4, in BF16.

    Rows of zeros fill the last 16, and are rotated too: the result has a multiple of 16 rows. The
    second result is its amax, as of `cast.amax_of`, whose zero may be -0: this one's is +0.

    Raises:
        TypeError: `x_MN` is no matrix in FP32, BF16 or FP16, or `signs` is not in FP32.
        ValueError: `signs` is not contiguous [16].
        RuntimeError: There are no kernels for `x_MN`.
    """
    lib, x_MN, matrix = _read(x_MN, "nvfp4.rotated")
    is_known = getattr(signs, "dtype", None) == torch.float32 and signs.is_contiguous()
    if not is_known or signs.shape != (16,) or not signs.is_cpu:
        _check_read(x_MN, "signs (nvfp4.signs())", signs, torch.float32, (16,))
    rows, cols = x_MN.shape
    out = x_MN.new_empty(rows + -rows % 16, cols, dtype=torch.bfloat16)
    amax = x_MN.new_empty((), dtype=torch.float32)
    at = signs.data_ptr(), out.data_ptr(), amax.data_ptr()
    lib.megafp8_rotate(*matrix, *at, torch.get_num_threads())
    return out, amax


def block_values(
    payload_MN: torch.Tensor, scale: torch.Tensor, block: Block, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return number * scale, rounded once to FP32 or BF16; None where no kernel does it.

    Raises:
        TypeError: `scale` is not in FP32.
        ValueError: `scale` has not one number for each block.
    """
    lib = library_for(payload_MN)
    if lib is None or dtype not in OUT_KINDS or payload_MN.dtype != torch.float8_e4m3fn:
        return None
    is_contiguous = payload_MN.is_contiguous()
    if not is_contiguous and payload_MN.t().is_contiguous():
        turned = block_values(payload_MN.t(), scale.t(), block[::-1], dtype)
        return None if turned is None else turned.t()
    payload_MN = payload_MN if is_contiguous else payload_MN.contiguous()
    (rows, cols), (down, right), scale = payload_MN.shape, block, scale.contiguous()
    if rows and cols:
        shape = -(-rows // down), -(-cols // right)
        if scale.dtype != torch.float32 or scale.shape != shape or not scale.is_cpu:
            _check_read(payload_MN, "scale", scale, torch.float32, shape)
    out = torch.empty_like(payload_MN, dtype=dtype)
    read = payload_MN.data_ptr(), rows, cols, scale.data_ptr(), down, right
    lib.megafp8_block_values(*read, out.data_ptr(), _KINDS[dtype], torch.get_num_threads())
    return out


def _read(x_MN: torch.Tensor, rule: str) -> tuple[Any, torch.Tensor, Matrix]:
    """Return the kernels, a matrix that is contiguous, and what they take it as.

    Without kernels the error names a `rule` in torch operations.
    """
    kind = _KINDS.get(getattr(x_MN, "dtype", None))
    shape = () if kind is None else x_MN.shape
    if kind is None or len(shape) != 2:
        raise TypeError(f"x is {described(x_MN)}, and not a matrix of {_names(KINDS)}")
    lib, x_MN = library_for(x_MN), x_MN.contiguous()
    if lib is None:
        why = library().note if library().lib is None else f"x is on {x_MN.device}"
        raise RuntimeError(
            f"no kernels for x: {why}. Use fp8_numerics.{rule}, which has the same bits for rows, "
            "and those of columns for the rows of x.t()"
        )
    return lib, x_MN, (x_MN.data_ptr(), *shape, kind)


def _check_read(
    x: torch.Tensor, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Raise an error unless kernels can read a tensor beside `x`, which may stand for one on a CPU.

    Callers ask the same before, inline: an attribute of a tensor costs a percent of a small cast.
    """
    needed = f"kernels read {dtype} {list(shape)} on {x.device}"
    is_known = isinstance(tensor, torch.Tensor) and tensor.dtype == dtype
    if not is_known or (x.is_cpu and not tensor.is_cpu):
        raise TypeError(f"{name} is {described(tensor)}, and {needed}")
    if tensor.numel() != math.prod(shape) or (shape and tensor.shape != shape):
        raise ValueError(f"{name} is {described(tensor)}, and {needed}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has the strides {tensor.stride()}: give {name}.contiguous()")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))
