"""Cast with a scale for each block in C on CPUs, along rows or along columns, and come back.

A cast along columns reads the tensor as it lies in memory, where a rule in torch operations
transposes it. The bits are those of `mxfp8.py`, `nvfp4.py` and `scales.py`.
"""

# M, N the tensor's own dims

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8_numerics.formats import E4M3, Fp8Format
from fp8_numerics.kernels.compile import IN_C, KINDS, library_for

Block = tuple[int, int]
_KINDS = {dtype: number for number, dtype in enumerate(KINDS)}
OUT_KINDS = (torch.float32, torch.bfloat16)
_STRIP = 256  # columns that the kernels do together


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
    """Cast to E4M3 with a scale for each 32 elements of rows or columns."""
    x_MN, lib = x_MN.contiguous(), library_for(x_MN)
    assert lib is not None
    made, results = _new(x_MN, (32, 1) if along_columns else (1, 32), E4M3, values)
    lib.megafp8_mxfp8(*_matrix(x_MN), int(along_columns), *results, torch.get_num_threads())
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
    """
    down, right = block
    if not (x_MN.numel() and fmt in IN_C and runs_in_c(x_MN)) or (down > 1 and _STRIP % right):
        return None
    x_MN, lib = x_MN.contiguous(), library_for(x_MN)
    assert lib is not None
    made, results = _new(x_MN, block, fmt, values)
    choices = (int(choice) for choice in (not fmt.is_e4m3, power_2, torchao))
    lib.megafp8_current(*_matrix(x_MN), *block, *choices, *results, torch.get_num_threads())
    return made


def nvfp4(
    x_MN: torch.Tensor,
    block: Block,
    amax: torch.Tensor,
    byte: torch.Tensor | None,
    values: torch.dtype | None = None,
) -> BlockCast:
    """Cast to E2M1 by blocks of 1 x 16, 16 x 1 or 16 x 16, which divide the sizes.

    `amax` (0-d FP32) is the tensor's, and `byte` [M, N] asks for random rounding.
    """
    x_MN, lib = x_MN.contiguous(), library_for(x_MN)
    assert lib is not None and (byte is None or byte.is_contiguous())
    made, results = _new(x_MN, block, E4M3, values)
    outer = torch.empty_like(amax)
    lib.megafp8_nvfp4(
        *_matrix(x_MN),
        *block,
        *(_at(t) for t in (amax, byte)),
        *results,
        _at(outer),
        torch.get_num_threads(),
    )
    return made._replace(outer=outer)


def _new(
    x_MN: torch.Tensor, block: Block, fmt: Fp8Format, values: torch.dtype | None
) -> tuple[BlockCast, tuple[object, ...]]:
    """Return memory for a cast, and its addresses as the kernels take them."""
    (rows, cols), (down, right) = x_MN.shape, block
    values = values if fmt == E4M3 else None
    made = BlockCast(
        torch.empty_like(x_MN, dtype=fmt.dtype),
        x_MN.new_empty(-(-rows // down), -(-cols // right), dtype=torch.float32),
        None if values is None else torch.empty_like(x_MN, dtype=values),
    )
    kind = 0 if values is None else _KINDS[values]
    return made, (*(_at(t) for t in made[:3]), kind)


def rotate_columns(x_MN: torch.Tensor, signs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 16 elements of a column at a time times signs (FP32 [16]) and H / 4, in BF16.

    The second result is its amax, as of `cast.amax_of`, whose zero may be -0: this one's is +0.
    """
    x_MN, lib = x_MN.contiguous(), library_for(x_MN)
    assert lib is not None
    out, amax = (
        torch.empty_like(x_MN, dtype=torch.bfloat16),
        x_MN.new_empty((), dtype=torch.float32),
    )
    lib.megafp8_rotate(
        *_matrix(x_MN), *(_at(t) for t in (signs, out, amax)), torch.get_num_threads()
    )
    return out, amax


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
