"""Turn attention's heads by RoPE, pack them into one matrix, and cast that, in one launch.

Forward it turns queries and keys; backward it takes their gradients and the values', turns them
back and packs them as the gradient of the QKV linear's output, in FP8 or not. Each product is
rounded before it is added, as torch's separate operations round it (`enable_fp_fusion` off), so
that the bits are those of `models.positions.Rotary`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# B batch   S sequence   N heads of a part   E head width   R rotated width
# M tokens (B x S)   D columns: the heads of all parts, one after the other
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp8_numerics.formats import Fp8Format
from fp8_numerics.kernels.triton_cast import CastResults
from fp8_numerics.kernels.triton_rounding import widened
from fp8_numerics.kernels.triton_tile import TILE_ROWS, emit_tile, emitted


def pack_heads(
    parts_BNSE: Sequence[torch.Tensor],
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    turn: tuple[torch.Tensor, torch.Tensor] | None,
    backward: bool,
    amax: torch.Tensor | None = None,
    with_rows: bool = True,
    with_columns: bool = False,
    with_sums: bool = False,
    with_plain: bool = False,
) -> CastResults:
    """Return a matrix [B S, D] of queries, keys and (unless left out) values, cast as asked.

    The parts have one dtype and innermost stride 1. `turn` holds the cosines and sines of RoPE's
    angles, [S, R] or [B, 1, S, R] in FP32; queries and keys are turned by them, or back if
    `backward` is set. Other arguments are those of `triton_cast.cast`.
    """
    queries, keys, *values = parts_BNSE
    batch, num_queries, seq, size = queries.shape
    num_keys, num_heads = keys.shape[1], sum(part.shape[1] for part in parts_BNSE)
    for part in parts_BNSE:
        is_read = part.stride(-1) == 1 and part.dtype == queries.dtype != torch.float64
        if not is_read:
            raise ValueError(f"a part {tuple(part.shape)} is {part.dtype}, {part.stride()}")
    num_rows, num_cols = batch * seq, num_heads * size
    made = emitted(
        num_rows,
        num_cols,
        fmt,
        queries.device,
        with_rows=with_rows,
        with_columns=with_columns,
        with_sums=with_sums,
        plain_dtype=queries.dtype if with_plain else None,
    )
    cos, sin = (quant_scale, quant_scale) if turn is None else (x.contiguous() for x in turn)
    half = 0 if turn is None else cos.shape[-1] // 2
    rest = size - 2 * half
    third = values[0] if values else keys
    if num_rows * num_cols > 0:
        arguments = made.arguments(quant_scale, fmt, amax)
        del arguments["TILE_COLS"]
        _heads_kernel[(-(-num_rows // TILE_ROWS), num_heads)](
            queries, *queries.stride()[:3],
            keys, *keys.stride()[:3],
            third, *third.stride()[:3],
            cos, sin, cos.stride(0) if cos.dim() == 4 else 0,
            num_rows, num_cols, seq, num_queries, num_keys,
            HALF=half, HALF_LANES=triton.next_power_of_2(max(1, half)),
            REST=rest, REST_LANES=triton.next_power_of_2(max(1, rest)),
            BACKWARD=backward, SIZE=size, enable_fp_fusion=False, **arguments,
        )  # fmt: skip
    return CastResults(*made)


@triton.jit
def _heads_kernel(
    queries, q_batch, q_head, q_token,
    keys, k_batch, k_head, k_token,
    values, v_batch, v_head, v_token,
    cos, sin, turn_batch,
    num_rows, num_cols, seq, num_queries, num_keys,
    quant_scale, amax_bits, payload, payload_t, plain, partial_sums,
    HALF: tl.constexpr, HALF_LANES: tl.constexpr,
    REST: tl.constexpr, REST_LANES: tl.constexpr,
    BACKWARD: tl.constexpr, SIZE: tl.constexpr,
    IS_E4M3: tl.constexpr, WITH_AMAX: tl.constexpr, WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr, WITH_PLAIN: tl.constexpr, WITH_SUMS: tl.constexpr,
    HARDWARE: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Pack the rows of one head, which a program turns half by half."""
    DTYPE: tl.constexpr = queries.dtype.element_ty
    head = tl.program_id(1)
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = (rows < num_rows)[:, None]
    batch, token = (rows // seq).to(tl.int64)[:, None], (rows % seq).to(tl.int64)[:, None]
    if head < num_queries:
        base = queries + head.to(tl.int64) * q_head
        at = batch * q_batch + token * q_token
    elif head < num_queries + num_keys:
        base = keys + (head - num_queries).to(tl.int64) * k_head
        at = batch * k_batch + token * k_token
    else:
        base = values + (head - num_queries - num_keys).to(tl.int64) * v_head
        at = batch * v_batch + token * v_token
    if HALF > 0:
        col = tl.arange(0, HALF_LANES)
        is_col = col < HALF
        inside = is_row & is_col[None, :]
        here = at + col[None, :]
        first = widened(tl.load(base + here, mask=inside, other=0.0))
        second = widened(tl.load(base + here + HALF, mask=inside, other=0.0))
        if head < num_queries + num_keys:
            angle = batch * turn_batch + token * (2 * HALF) + col[None, :]
            c = tl.load(cos + angle, mask=inside, other=0.0)
            s = tl.load(sin + angle, mask=inside, other=0.0)
            if BACKWARD:
                s = -s
            turned = first * c - second * s
            second = second * c + first * s
            first = turned
        cols = head * SIZE + col
        emit_tile(
            first, rows, cols, num_rows, num_cols, inside, is_col,
            quant_scale, amax_bits, payload, payload_t, plain, partial_sums,
            DTYPE, IS_E4M3, WITH_AMAX, WITH_ROWS, WITH_COLUMNS, WITH_PLAIN, WITH_SUMS, HARDWARE,
        )  # fmt: skip
        emit_tile(
            second, rows, cols + HALF, num_rows, num_cols, inside, is_col,
            quant_scale, amax_bits, payload, payload_t, plain, partial_sums,
            DTYPE, IS_E4M3, WITH_AMAX, WITH_ROWS, WITH_COLUMNS, WITH_PLAIN, WITH_SUMS, HARDWARE,
        )  # fmt: skip
    if REST > 0:
        more = tl.arange(0, REST_LANES)
        is_more = more < REST
        here = at + 2 * HALF + more[None, :]
        value = widened(tl.load(base + here, mask=is_row & is_more[None, :], other=0.0))
        emit_tile(
            value, rows, head * SIZE + 2 * HALF + more, num_rows, num_cols,
            is_row & is_more[None, :], is_more,
            quant_scale, amax_bits, payload, payload_t, plain, partial_sums,
            DTYPE, IS_E4M3, WITH_AMAX, WITH_ROWS, WITH_COLUMNS, WITH_PLAIN, WITH_SUMS, HARDWARE,
        )  # fmt: skip
