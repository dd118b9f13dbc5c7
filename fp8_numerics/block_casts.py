"""Cast with a scale for each block in C on CPUs, along rows or along columns, and come back.

A cast along columns reads the tensor as it lies in memory, where a rule in torch operations
transposes it. The bits are those of `mxfp8.py`, `nvfp4.py` and `scales.py`.
"""

# M, N the tensor's own dims

from __future__ import annotations

import torch

from fp8_numerics.formats import Fp8Format
from fp8_numerics.kernels.compile import IN_C, KINDS, library_for

Block = tuple[int, int]
_KINDS = {dtype: number for number, dtype in enumerate(KINDS)}
OUT_KINDS = (torch.float32, torch.bfloat16)
_STRIP = 256  # columns that the kernels do together


def runs_in_c(x: torch.Tensor) -> bool:
    """Whether the C kernels cast this tensor."""
    return x.dtype in _KINDS and library_for(x) is not None


def mxfp8(x_MN: torch.Tensor, *, along_columns: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers in E4M3 [M, N] and scales for blocks of 32 elements of rows or columns."""
    x_MN, lib = x_MN.contiguous(), library_for(x_MN)
    assert lib is not None
    rows, cols = x_MN.shape
    payload = x_MN.new_empty(rows, cols, dtype=torch.float8_e4m3fn)
    shape = (-(-rows // 32), cols) if along_columns else (rows, -(-cols // 32))
    scale = x_MN.new_empty(shape, dtype=torch.float32)
    lib.megafp8_mxfp8(
        *_matrix(x_MN), int(along_columns), _at(payload), _at(scale), torch.get_num_threads()
    )
    return payload, scale


def current(
    x_MN: torch.Tensor, block: Block, fmt: Fp8Format, *, power_2: bool, torchao: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return FP8 numbers [M, N] and what they are times, FP32, for each block by its own amax.

    The rules are those of `scales.scale_of_amax`, and with `torchao` of `scale_of_amax_torchao`.
    None where no kernel does it.
    """
    (rows, cols), (down, right) = x_MN.shape, block
    if not (x_MN.numel() and fmt in IN_C and runs_in_c(x_MN)) or (down > 1 and _STRIP % right):
        return None
    x_MN, lib = x_MN.contiguous(), library_for(x_MN)
    assert lib is not None
    payload = x_MN.new_empty(rows, cols, dtype=fmt.dtype)
    scale = x_MN.new_empty(-(-rows // down), -(-cols // right), dtype=torch.float32)
    lib.megafp8_current(
        *_matrix(x_MN),
        *block,
        *(int(choice) for choice in (not fmt.is_e4m3, power_2, torchao)),
        *(_at(t) for t in (payload, scale)),
        torch.get_num_threads(),
    )
    return payload, scale


def nvfp4(
    x_MN: torch.Tensor, block: Block, amax: torch.Tensor, byte: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers of E2M1 [M, N], kept in E4M3, a scale for each block, and `nvfp4.outer_of`.

    `block` is 1 x 16, 16 x 1 or 16 x 16, and divides the sizes. `amax` (0-d FP32) is the tensor's,
    and `byte` [M, N] asks for random rounding.
    """
    x_MN, lib = x_MN.contiguous(), library_for(x_MN)
    assert lib is not None and (byte is None or byte.is_contiguous())
    rows, cols = x_MN.shape
    payload = x_MN.new_empty(rows, cols, dtype=torch.float8_e4m3fn)
    scale = x_MN.new_empty(rows // block[0], cols // block[1], dtype=torch.float32)
    outer = torch.empty_like(amax)
    lib.megafp8_nvfp4(
        *_matrix(x_MN),
        *block,
        *(_at(t) for t in (amax, byte, payload, scale, outer)),
        torch.get_num_threads(),
    )
    return payload, scale, outer


def rotate_columns(x_MN: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return 16 elements of a column at a time times signs (FP32 [16]) and H / 4, in BF16."""
    x_MN, lib = x_MN.contiguous(), library_for(x_MN)
    assert lib is not None
    out = torch.empty_like(x_MN, dtype=torch.bfloat16)
    lib.megafp8_rotate(*_matrix(x_MN), _at(signs), _at(out), torch.get_num_threads())
    return out


def block_values(
    payload_MN: torch.Tensor, scale: torch.Tensor, block: Block, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return number * scale, rounded once to FP32 or BF16; None where no kernel does it."""
    lib = library_for(payload_MN)
    if lib is None or dtype not in OUT_KINDS or payload_MN.dtype != torch.float8_e4m3fn:
        return None
    if not payload_MN.is_contiguous() and payload_MN.t().is_contiguous():
        turned = block_values(payload_MN.t(), scale.t(), block[::-1], dtype)
        return None if turned is None else turned.t()
    payload_MN, scale = payload_MN.contiguous(), scale.contiguous()
    out = torch.empty_like(payload_MN, dtype=dtype)
    lib.megafp8_block_values(
        _at(payload_MN),
        *payload_MN.shape,
        _at(scale),
        *block,
        _at(out),
        _KINDS[dtype],
        torch.get_num_threads(),
    )
    return out


def _matrix(x_MN: torch.Tensor) -> tuple[object, ...]:
    """Return a contiguous matrix as the kernels take it: address, rows, columns, kind."""
    return x_MN.data_ptr(), *x_MN.shape, _KINDS[x_MN.dtype]


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
