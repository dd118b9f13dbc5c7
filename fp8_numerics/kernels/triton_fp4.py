"""Cast to FP4 (E2M1) in blocks of 16 with scales in E4M3, by the rule of `nvfp4.py`.

A cast takes two launches after a fill: the amaxes, of the tensor and of the rotated tensor, from
one read; then both directions with all scales from a second read. The forms of operands are those
of `triton_blocks.py`. Packed payloads have two numbers in a byte, the even one in the low half, and
a square block's scale is repeated for each of its rows; in the plain form numbers are in E4M3.

The rotation adds up in FP64, as on other devices, so that the order of its sums changes no bit.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# M rows (tokens)   N columns (features)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.random import philox_impl

from fp8_numerics.formats import E4M3
from fp8_numerics.kernels.triton_blocks import BlockCast, Operand, pointers, store_scales, turned
from fp8_numerics.kernels.triton_launch import casts_in_hardware, check_matrix
from fp8_numerics.kernels.triton_rounding import (
    FLOAT32_MAX,
    INF_BITS,
    fp8_codes,
    known_bits,
    magnitude_bits,
    nearest_codes,
    raise_amax,
    rounded,
    widened,
)
from fp8_numerics.philox import Counters
from fp8_numerics.swizzle import swizzled_size

BLOCK = 16
TILE_ROWS, TILE_COLS = 128, 64
TILE_WARPS = 16  # 16 elements a thread: no fewer than 16 warps an SM, with Philox and FP64
LARGEST = tl.constexpr(2688.0)  # 6 * 448, the largest number times the largest scale
SIXTH = tl.constexpr(1.0 / 6.0)


def amaxes_fp4(
    x_MN: torch.Tensor, *, signs: int | None, with_sums: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the amaxes of a matrix along rows and along columns, FP32 [2], and its column sums.

    `signs` asks for the rotation of columns; bit i is set where the sign of the i-th of 16 elements
    is negative. Without it only the first amax is used. A NaN makes an amax infinite.
    """
    check_matrix("x_MN", x_MN)
    m, n = x_MN.shape
    amaxes = torch.zeros(2, dtype=torch.float32, device=x_MN.device)
    sums = (
        torch.empty(-(-m // TILE_ROWS), n, dtype=torch.float32, device=x_MN.device)
        if with_sums
        else None
    )
    if x_MN.numel() > 0:
        _amax_kernel[-(-m // TILE_ROWS), -(-n // TILE_COLS)](
            x_MN, m, n, amaxes.view(torch.int32), x_MN if sums is None else sums, signs or 0,
            ROTATE=signs is not None, WITH_SUMS=with_sums,
            HARDWARE=casts_in_hardware(x_MN.device),
            ROWS=TILE_ROWS, COLS=TILE_COLS, BLOCK=BLOCK, num_warps=TILE_WARPS,
        )  # fmt: skip
    return amaxes, sums


def cast_fp4(
    x_MN: torch.Tensor,
    amaxes: torch.Tensor,
    *,
    signs: int | None,
    square: bool,
    packed: bool,
    counters: tuple[Counters, Counters] | None = None,
    with_rows: bool = True,
    with_columns: bool = False,
) -> tuple[BlockCast, torch.Tensor]:
    """Cast a matrix and return also the factors, FP32 [2].

    Columns are a multiple of 16. So are rows, but where blocks are lines and `columns` are not
    wanted or not packed: the last block along a column may then end early.

    `amaxes` and `signs` are those of `amaxes_fp4`. `square` has blocks of 16 x 16, whose plain form
    serves both directions as rows. `counters` ask for stochastic rounding, with bytes for rows and
    for columns; only their keys differ.
    """
    check_matrix("x_MN", x_MN)
    m, n = x_MN.shape
    device = x_MN.device
    rows = _empty(m, n, device, packed, square=square) if with_rows else None
    columns = _empty(n, m, device, packed, square=square) if with_columns else None
    if columns is not None and not packed:  # as the matrix lies
        scale = columns.scale.new_empty(columns.scale.shape[::-1])
        columns = Operand(columns.payload.new_empty(m, n), scale)
    outer = torch.empty(2, dtype=torch.float32, device=device)
    places, keys = (x_MN, x_MN, x_MN), (0, 0, 0, 0)
    if counters is not None:
        places = (*counters[0].rows, counters[0].blocks)
        keys = (*counters[0].key, *counters[1].key)
    # Past the last column too: every tile of 128 x 4 scales is written.
    grid = -(-max(1, m) // TILE_ROWS), 2 * -(-max(1, n) // (2 * TILE_COLS))
    _fp4_kernel[grid](
        x_MN, m, n, amaxes, outer, *pointers(rows, x_MN), *pointers(columns, x_MN),
        *places, *map(signed, keys), signs or 0,
        SQUARE=square, ROTATE=signs is not None, RANDOM=counters is not None,
        WITH_ROWS=with_rows, WITH_COLUMNS=with_columns, PACKED=packed,
        HARDWARE=casts_in_hardware(device), ROWS=TILE_ROWS, COLS=TILE_COLS, BLOCK=BLOCK,
        num_warps=TILE_WARPS,
    )  # fmt: skip
    return BlockCast(rows, turned(columns) if packed else columns, None), outer


def signed(word: int) -> int:
    """Return 32 bits as the int32 with these bits, the type that Triton gives to such a number."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _empty(across: int, along: int, device: torch.device, packed: bool, *, square: bool) -> Operand:
    blocks = -(-along // BLOCK)
    if not packed:
        payload = torch.empty(across, along, dtype=E4M3.dtype, device=device)
        down = across // BLOCK if square else across
        return Operand(payload, torch.empty(down, blocks, dtype=torch.float32, device=device))
    payload = torch.empty(across, along // 2, dtype=torch.uint8, device=device)
    size = swizzled_size(across, blocks)
    return Operand(
        payload.view(torch.float4_e2m1fn_x2),
        torch.empty(size, dtype=torch.float8_e4m3fn, device=device),
    )


@triton.jit
def _rotated(x, signs, HARDWARE: tl.constexpr, BLOCK: tl.constexpr):
    """Return x [A, K] with each 16 elements of a row times signs and H / 4, rounded to BF16.

    A stage adds and subtracts the elements whose place differs in the highest bit, and moves that
    bit to the lowest place; after four stages each element is at its own place again.
    """
    ACROSS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1] // BLOCK
    is_negative = (signs >> tl.arange(0, BLOCK)) & 1
    y = tl.reshape(x, (ACROSS, GROUPS, BLOCK)).to(tl.float64)
    y = tl.where(is_negative[None, None, :] == 1, -y, y)
    for _ in tl.static_range(4):
        high, low = tl.split(
            tl.permute(tl.reshape(y, (ACROSS, GROUPS, 2, BLOCK // 2)), (0, 1, 3, 2))
        )
        y = tl.reshape(tl.join(high + low, high - low), (ACROSS, GROUPS, BLOCK))
    y = (y * 0.25 + 0.0).to(tl.float32)  # a sum of zeros is +0
    return tl.reshape(rounded(y, tl.bfloat16, HARDWARE), (ACROSS, GROUPS * BLOCK))


@triton.jit
def _amax_kernel(
    x,
    num_rows,
    num_cols,
    amax_bits,
    sums,
    signs,
    ROTATE: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    HARDWARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    here = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    value = widened(tl.load(x + here, mask=inside, other=0.0))
    if WITH_SUMS:
        at = tl.program_id(0).to(tl.int64) * num_cols + cols
        tl.store(sums + at, tl.sum(value, axis=0), mask=cols < num_cols)
    raise_amax(amax_bits, tl.max(tl.max(magnitude_bits(value), axis=1), axis=0))
    if ROTATE:
        turned = magnitude_bits(_rotated(tl.trans(value), signs, HARDWARE, BLOCK))
        raise_amax(amax_bits + 1, tl.max(tl.max(turned, axis=1), axis=0))


@triton.jit
def _encoding(amax):
    """Return the factor that brings an amax (FP32 [1]) to the largest element times scale."""
    scale = tl.minimum(tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax), FLOAT32_MAX)
    return tl.where((amax == 0.0) | (scale == 0.0), 1.0, scale)


@triton.jit
def _e4m3_value(code):
    """Return the numbers of E4M3 codes (uint8) that are positive and no NaN, in FP32.

    FP16 with the same bits is 2^-8 of the number.
    """
    return (code.to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _scales(amax_bits, encoding, HARDWARE: tl.constexpr):
    """Return the E4M3 codes of the scales of blocks, and what their elements are multiplied by."""
    times = encoding * SIXTH
    code = fp8_codes(amax_bits.to(tl.float32, bitcast=True) * times, True, HARDWARE)
    one = tl.full(code.shape, 1.0, tl.float32)
    back = tl.div_rn(tl.full(encoding.shape, 1.0, tl.float32), encoding)
    inverse = tl.div_rn(one, _e4m3_value(code) * back)
    return code, tl.minimum(inverse, FLOAT32_MAX)


@triton.jit
def _fp4_codes(y, byte, RANDOM: tl.constexpr):
    """Return E2M1 codes (int32) of FP32: nearest, or up with the chance byte / 256; NaN is +6."""
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if RANDOM:
        a = magnitude.to(tl.float32, bitcast=True)
        # The product is exact, so that the sum has one rounding.
        step = tl.where(a >= 4.0, 2.0, tl.where(a >= 2.0, 1.0, 0.5)) * 0.00390625
        moved = (a + byte.to(tl.float32) * step).to(tl.int32, bitcast=True)
        moved = tl.minimum(moved, 0x40C00000)  # 6
        # A number of E2M1 below: one bit of mantissa from 1 on, halves before.
        code = tl.where(moved < 0x3F800000, (moved >= 0x3F000000).to(tl.int32), (moved >> 22) - 252)
    else:
        code = nearest_codes(tl.minimum(magnitude, 0x40C00000), 1, 1)
    return tl.where(magnitude > INF_BITS, 7, code | ((bits >> 28) & 8))


@triton.jit
def _places(samples, positions, blocks, rows, first_block, num_rows, num_blocks,
            BLOCKS: tl.constexpr):  # fmt: skip
    """Return samples and positions of rows, [ROWS, 1], and the numbers of blocks, [1, BLOCKS]."""
    sample = tl.load(samples + rows, mask=rows < num_rows, other=0)
    position = tl.load(positions + rows, mask=rows < num_rows, other=0)
    block = first_block + tl.arange(0, BLOCKS)
    block = tl.load(blocks + block, mask=block < num_blocks, other=0)
    return sample[:, None], position[:, None], block[None, :]


@triton.jit
def _random_bytes(sample, position, block, key0, key1, BLOCK: tl.constexpr):
    """Return the random bytes of a tile whose blocks of 16 columns are at `_places`, as int32.

    A counter is a block, a position and a sample; its four words are the bytes of the block, the
    lowest first.
    """
    ROWS: tl.constexpr = sample.shape[0]
    BLOCKS: tl.constexpr = block.shape[1]
    zero = tl.zeros((ROWS, BLOCKS), tl.uint32)
    a, b, c, d = philox_impl(
        zero + block.to(tl.uint32), zero + position.to(tl.uint32), zero + sample.to(tl.uint32),
        zero + (sample >> 32).to(tl.uint32), key0.to(tl.uint32), key1.to(tl.uint32),
    )  # fmt: skip
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, BLOCKS * BLOCK // 4))
    shifts = (tl.arange(0, 4) * 8).to(tl.uint32)
    bytes_ = (words[:, :, None] >> shifts[None, None, :]) & 255
    return tl.reshape(bytes_.to(tl.int32), (ROWS, BLOCKS * BLOCK))


@triton.jit
def _store_numbers(
    to, code, across, start, num_across, num_along, step_across, step_along, PACKED: tl.constexpr
):  # fmt: skip
    """Store E2M1 codes of an operand, whose second dim begins at `start` and is summed over.

    Packed they are two in a byte; otherwise numbers in E4M3, with the given steps in memory.
    """
    COUNT: tl.constexpr = code.shape[1]
    down = across[:, None].to(tl.int64)
    if PACKED:
        low, high = tl.split(tl.reshape(code, (code.shape[0], COUNT // 2, 2)))
        pair = start // 2 + tl.arange(0, COUNT // 2)
        inside = (across < num_across)[:, None] & (pair < num_along // 2)[None, :]
        both = (low | (high << 4)).to(tl.uint8)
        tl.store(to + down * (num_along // 2) + pair[None, :], both, mask=inside)
    else:
        magnitude = code & 7
        number = tl.where(magnitude < 2, magnitude * 0x30, 0x30 + magnitude * 4)
        along = start + tl.arange(0, COUNT)
        inside = (across < num_across)[:, None] & (along < num_along)[None, :]
        at = down * step_across + along[None, :].to(tl.int64) * step_along
        tl.store(to + at, (number | ((code & 8) << 4)).to(tl.uint8), mask=inside)


@triton.jit
def _store_lines(
    value, amax, byte, to, to_scale, across, start, num_across, num_along,
    step_across, step_along, scale_across, scale_along,
    RANDOM: tl.constexpr, PACKED: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast value [across, from start on] with blocks of 1 x 16, and store numbers and scales."""
    ACROSS: tl.constexpr = value.shape[0]
    BLOCKS: tl.constexpr = value.shape[1] // BLOCK
    blocks = tl.reshape(value, (ACROSS, BLOCKS, BLOCK))
    code, inverse = _scales(tl.max(known_bits(blocks), axis=2), _encoding(amax)[:, None], HARDWARE)
    numbers = tl.reshape(blocks * inverse[:, :, None], value.shape)
    codes = _fp4_codes(numbers, byte, RANDOM)
    _store_numbers(to, codes, across, start, num_across, num_along, step_across, step_along, PACKED)
    scale = code if PACKED else _e4m3_value(code)
    along = start // BLOCK + tl.arange(0, BLOCKS)
    store_scales(
        to_scale, scale, across, along, num_across, (num_along + BLOCK - 1) // BLOCK,
        scale_across, scale_along, PACKED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["row_key0", "row_key1", "col_key0", "col_key1"])
def _fp4_kernel(
    x,
    num_rows,
    num_cols,
    amaxes,
    outer,
    payload,
    of_rows,
    payload_t,
    of_columns,
    samples,
    positions,
    blocks,
    row_key0,
    row_key1,
    col_key0,
    col_key1,
    signs,
    SQUARE: tl.constexpr,
    ROTATE: tl.constexpr,
    RANDOM: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    HARDWARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    top, left = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    rows, cols = top + tl.arange(0, ROWS), left + tl.arange(0, COLS)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    here = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    value = widened(tl.load(x + here, mask=inside, other=0.0))
    one = tl.arange(0, 1)
    amax = tl.load(amaxes + one)
    of_turned = tl.load(amaxes + one + 1) if ROTATE else amax
    if tl.program_id(0) + tl.program_id(1) == 0:
        largest = tl.full((1,), LARGEST, tl.float32)
        tl.store(outer + one, tl.div_rn(amax, largest))
        tl.store(outer + one + 1, tl.div_rn(of_turned, largest))
    if SQUARE:
        _store_squares(
            value, amax, payload, of_rows, payload_t, of_columns, top, left, num_rows, num_cols,
            WITH_ROWS, WITH_COLUMNS, PACKED, HARDWARE, BLOCK,
        )  # fmt: skip
    else:
        byte, byte_t = 0, 0
        if RANDOM:
            sample, position, block = _places(
                samples, positions, blocks, rows, left // BLOCK, num_rows, num_cols // BLOCK,
                COLS // BLOCK,
            )  # fmt: skip
        if WITH_ROWS:
            if RANDOM:
                byte = _random_bytes(sample, position, block, row_key0, row_key1, BLOCK)
            _store_lines(
                value, amax, byte, payload, of_rows, rows, left, num_rows, num_cols,
                num_cols, 1, num_cols // BLOCK, 1, RANDOM, PACKED, HARDWARE, BLOCK,
            )  # fmt: skip
        if WITH_COLUMNS:
            turned = tl.trans(value)
            if ROTATE:
                turned = _rotated(turned, signs, HARDWARE, BLOCK)
            if RANDOM:
                byte_t = _random_bytes(sample, position, block, col_key0, col_key1, BLOCK)
                byte_t = tl.trans(byte_t)
            _store_lines(
                turned, of_turned, byte_t, payload_t, of_columns, cols, top, num_cols, num_rows,
                1, num_cols, 1, num_cols, RANDOM, PACKED, HARDWARE, BLOCK,
            )  # fmt: skip


@triton.jit
def _store_squares(
    value, amax, payload, of_rows, payload_t, of_columns, top, left, num_rows, num_cols,
    WITH_ROWS: tl.constexpr, WITH_COLUMNS: tl.constexpr, PACKED: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast value with blocks of 16 x 16, and store it for both directions."""
    ROWS: tl.constexpr = value.shape[0]
    COLS: tl.constexpr = value.shape[1]
    DOWN: tl.constexpr = ROWS // BLOCK
    RIGHT: tl.constexpr = COLS // BLOCK
    blocks = tl.reshape(value, (DOWN, BLOCK, RIGHT, BLOCK))
    most = tl.max(tl.max(known_bits(blocks), axis=3), axis=1)
    code, inverse = _scales(most, _encoding(amax)[:, None], HARDWARE)
    codes = _fp4_codes(tl.reshape(blocks * inverse[:, None, :, None], value.shape), 0, False)
    if PACKED:
        if WITH_ROWS:
            _store_packed_squares(
                payload, of_rows, codes, code, top, left, num_rows, num_cols, BLOCK
            )
        if WITH_COLUMNS:
            _store_packed_squares(
                payload_t, of_columns, tl.trans(codes), tl.trans(code), left, top,
                num_cols, num_rows, BLOCK,
            )  # fmt: skip
    else:
        rows = top + tl.arange(0, ROWS)
        down, right = top // BLOCK + tl.arange(0, DOWN), left // BLOCK + tl.arange(0, RIGHT)
        row_blocks, col_blocks = num_rows // BLOCK, num_cols // BLOCK
        _store_numbers(payload, codes, rows, left, num_rows, num_cols, num_cols, 1, False)
        store_scales(
            of_rows, _e4m3_value(code), down, right, row_blocks, col_blocks, col_blocks, 1, False
        )


@triton.jit
def _store_packed_squares(
    to, to_scale, codes, scale, top, left, num_across, num_along, BLOCK: tl.constexpr
):  # fmt: skip
    """Store one direction, whose sum runs along `codes`: a square's scale, for each of its rows."""
    DOWN: tl.constexpr = scale.shape[0]
    RIGHT: tl.constexpr = scale.shape[1]
    across = top + tl.arange(0, DOWN * BLOCK)
    each = tl.reshape(
        tl.broadcast_to(scale[:, None, :], (DOWN, BLOCK, RIGHT)), (DOWN * BLOCK, RIGHT)
    )
    _store_numbers(to, codes, across, left, num_across, num_along, 0, 0, True)
    along = left // BLOCK + tl.arange(0, RIGHT)
    store_scales(to_scale, each, across, along, num_across, num_along // BLOCK, 0, 0, True)
