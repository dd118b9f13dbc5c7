"""Compute Adam's update over tensors in low precision, by the rule of `optim/scaled_adam.py`.

The first kernel makes one pass over memory. A scale follows from the amax of all that is stored
with it, which is known when the pass ends; so the pass writes with the scales of the last step and
keeps the old bytes. Scales are powers of two and seldom change. The second kernel reads the amaxes,
ends at once where all scales were right, and otherwise computes again from the old bytes. The host
waits for nothing.

A launch updates many parameters: it finds their addresses in a table, which the host writes in
each step. Every operation is rounded by itself (no fused multiply-add, true divisions and roots),
so that the bits are those of torch operations and of the C kernel. No GPU has run these kernels
yet.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fp8_numerics.kernels.triton_launch import casts_in_hardware
from megafp8.fp8.kernels.triton_stored import new_scale, number, old_scale, raised, stored_code
from megafp8.fp8.scaled import Dither, ScaledTensor

BLOCK = 1024  # elements of a program
WARPS = 4  # 8 elements a thread: 16 bytes of FP16, 8 bytes of FP8
LARGEST_GROUP = 64  # parameters of a launch; a program looks itself up among as many
COLUMNS = 17
NEAREST = (None, None, None)
WIDEST = 16  # bytes of the longest access of a thread

_FACTORS = (
    "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "inverse_root", "eps", "step_size",
)  # fmt: skip


@dataclass(frozen=True)
class Update:
    """Describe the update of one parameter; all tensors are contiguous.

    `written` are the parameter and its two moments. `backup` has memory for the old bytes of each,
    of its dtype and size. FP32 moments need none, since what is written is exact.
    """

    written: Sequence[ScaledTensor]
    grad: ScaledTensor
    decay: float
    dithers: Sequence[Dither | None]
    backup: Sequence[torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return what the kernels read and write, in the order of a table's columns."""
        stored = [*self.written, self.grad]
        payloads = [each.payload for each in stored]
        return [*payloads, *self.backup, *(each.dequant_scale for each in stored)]

    def column(self, first_program: int) -> list[int]:
        """Return the numbers that the kernels find in the table."""
        keys = (0 if dither is None else dither.key for dither in self.dithers)
        decay = ctypes.c_int32.from_buffer(ctypes.c_float(self.decay)).value
        places = (tensor.data_ptr() for tensor in self.tensors)
        signed = (ctypes.c_int64(key).value for key in keys)
        return [first_program, self.grad.payload.numel(), decay, *signed, *places]

    @property
    def num_programs(self) -> int:
        """Return how many programs update the parameter."""
        return -(-self.grad.payload.numel() // BLOCK)


def are_aligned(payloads: Sequence[torch.Tensor]) -> bool:
    """Whether a thread may read and write `WIDEST` bytes of each at a time."""
    places = (payload.data_ptr() for payload in payloads)
    return not any(number % WIDEST for number in (payloads[0].numel(), *places))


def adam(
    updates: Sequence[Update],
    factors: Sequence[float],
    *,
    is_l2: bool,
    skips: torch.Tensor | None = None,
) -> None:
    """Update parameters and their moments in place: `LARGEST_GROUP` at most, of the same formats.

    `factors` are beta1, 1 - beta1, beta2, 1 - beta2, inverse_root, eps and step_size, as
    `optim.scaled_adam.Constants` has them. Where `skips` (0-d FP32, on the device) is not 0, no
    tensor is changed.
    """
    one, device = updates[0], updates[0].grad.payload.device
    kinds = [stored.fmt.name for stored in (*one.written, one.grad)]
    firsts = [0]
    for update in updates:
        firsts.append(firsts[-1] + update.num_programs)
    if firsts[-1] == 0:  # no parameter has an element
        return
    columns = [update.column(first) for update, first in zip(updates, firsts[:-1], strict=True)]
    columns += [[1 << 62] * COLUMNS] * (LARGEST_GROUP - len(columns))
    rows = list(zip(*columns, strict=True))
    on_gpu = device.type == "cuda"  # from page-locked memory the copy does not wait
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=on_gpu)
    table = table.to(device, non_blocking=True)
    scratch = torch.zeros(6 * LARGEST_GROUP + 1, dtype=torch.int32, device=device)
    arguments: dict[str, Any] = {
        "table": table,
        "amax_bits": scratch[: 3 * LARGEST_GROUP],
        "old_scales": scratch[3 * LARGEST_GROUP : 6 * LARGEST_GROUP].view(torch.float32),
        "skips": scratch[6 * LARGEST_GROUP :].view(torch.float32) if skips is None else skips,
        **dict(zip(_FACTORS, factors, strict=True)),
        **dict(zip(("PARAM", "AVG", "AVG_SQ", "GRAD"), kinds, strict=True)),
        "SCALED": _mask(stored.fmt.max is not None for stored in one.written),
        "DITHERS": _mask(dither is not None for dither in one.dithers),
        "IS_L2": is_l2,
        "IS_ALIGNED": all(are_aligned(update.tensors[:7]) for update in updates),
        "HARDWARE": casts_in_hardware(device),
        "GROUP": LARGEST_GROUP,
        "BLOCK": BLOCK,
        "num_warps": WARPS * (1 if one.dithers == NEAREST else 2),  # random bits take registers
        "enable_fp_fusion": False,
    }
    _adam_kernel[(firsts[-1],)](**arguments)
    if arguments["SCALED"]:
        _adam_again_kernel[(firsts[-1],)](**arguments)


def _mask(flags: Iterable[bool]) -> int:
    """Return one bit for each flag, the first one lowest."""
    return sum(int(flag) << place for place, flag in enumerate(flags))


@triton.jit
def _tensor(table, number_of_column, row: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
            IS_ALIGNED: tl.constexpr):  # fmt: skip
    """Return the address of a tensor in the table."""
    place = tl.load(table + row * GROUP + number_of_column)
    if KIND == "fp32":
        address = place.to(tl.pointer_type(tl.float32))
    elif KIND == "bf16":
        address = place.to(tl.pointer_type(tl.bfloat16))
    elif KIND == "fp16":
        address = place.to(tl.pointer_type(tl.float16))
    else:
        address = place.to(tl.pointer_type(tl.uint8))
    if IS_ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _own_parameter(table, IS_ALIGNED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of this program's parameter, its first element, and how many there are."""
    firsts = tl.load(table + tl.arange(0, GROUP))
    of = tl.sum((firsts <= tl.program_id(0)).to(tl.int32), axis=0) - 1
    first = (tl.program_id(0) - tl.load(table + of)) * BLOCK
    num_elements = tl.load(table + GROUP + of)
    if IS_ALIGNED:
        num_elements = tl.multiple_of(num_elements, 16)
    return of, first, num_elements


@triton.jit
def _key(table, of, row: tl.constexpr, GROUP: tl.constexpr):
    """Return the halves of a key of stochastic rounding."""
    key = tl.load(table + row * GROUP + of)
    return (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _fresh(
    p, m, v, g,
    beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size, decay,
    IS_L2: tl.constexpr, HAS_M: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    """Return the parameter and moments after the step; HAS_M: `m` is that of this step already."""
    if IS_L2:
        g = g + decay * p
    else:
        p = p * decay
    if not HAS_M:
        m = m * beta1 + g * one_minus_beta1
    if not HAS_V:
        v = v * beta2 + (g * g) * one_minus_beta2
    divisor = tl.sqrt_rn(v) * inverse_root + eps
    return p - tl.div_rn(m, divisor) * step_size, m, v


@triton.jit
def _codes(
    p, m, v, p_quant, m_quant, v_quant, table, of, first, at,
    PARAM: tl.constexpr, AVG: tl.constexpr, AVG_SQ: tl.constexpr, DITHERS: tl.constexpr,
    HARDWARE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the parameter and the moments as their formats store them."""
    p_low, p_high = _key(table, of, 3, GROUP)
    m_low, m_high = _key(table, of, 4, GROUP)
    v_low, v_high = _key(table, of, 5, GROUP)
    return (
        stored_code(p, p_quant, p_low, p_high, first, at, PARAM, DITHERS & 1 > 0, HARDWARE),
        stored_code(m, m_quant, m_low, m_high, first, at, AVG, DITHERS & 2 > 0, HARDWARE),
        stored_code(v, v_quant, v_low, v_high, first, at, AVG_SQ, DITHERS & 4 > 0, HARDWARE),
    )


@triton.jit
def _adam_kernel(
    table, amax_bits, old_scales, skips,
    beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size,
    PARAM: tl.constexpr, AVG: tl.constexpr, AVG_SQ: tl.constexpr, GRAD: tl.constexpr,
    SCALED: tl.constexpr, DITHERS: tl.constexpr, IS_L2: tl.constexpr, IS_ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skips) == 0.0:  # the step is finite
        of, first, num_elements = _own_parameter(table, IS_ALIGNED, GROUP, BLOCK)
        decay = tl.load(table + 2 * GROUP + of).to(tl.int32).to(tl.float32, bitcast=True)
        at = tl.arange(0, BLOCK)
        inside = first + at < num_elements
        param = _tensor(table, of, 6, PARAM, GROUP, IS_ALIGNED)
        exp_avg = _tensor(table, of, 7, AVG, GROUP, IS_ALIGNED)
        exp_avg_sq = _tensor(table, of, 8, AVG_SQ, GROUP, IS_ALIGNED)
        p = tl.load(param + first + at, mask=inside, other=0)
        m = tl.load(exp_avg + first + at, mask=inside, other=0)
        v = tl.load(exp_avg_sq + first + at, mask=inside, other=0)
        g = tl.load(
            _tensor(table, of, 9, GRAD, GROUP, IS_ALIGNED) + first + at, mask=inside, other=0
        )
        if SCALED > 0:
            tl.store(_tensor(table, of, 10, PARAM, GROUP, IS_ALIGNED) + first + at, p, mask=inside)
            if AVG != "fp32":
                old_avg = _tensor(table, of, 11, AVG, GROUP, IS_ALIGNED)
                tl.store(old_avg + first + at, m, mask=inside)
            if AVG_SQ != "fp32":
                old_avg_sq = _tensor(table, of, 12, AVG_SQ, GROUP, IS_ALIGNED)
                tl.store(old_avg_sq + first + at, v, mask=inside)
        p_scale, p_quant = old_scale(_tensor(table, of, 13, "fp32", GROUP, False), PARAM)
        m_scale, m_quant = old_scale(_tensor(table, of, 14, "fp32", GROUP, False), AVG)
        v_scale, v_quant = old_scale(_tensor(table, of, 15, "fp32", GROUP, False), AVG_SQ)
        g_scale, _ = old_scale(_tensor(table, of, 16, "fp32", GROUP, False), GRAD)
        if SCALED > 0 and first == 0:
            tl.store(old_scales + 3 * of, p_scale)
            tl.store(old_scales + 3 * of + 1, m_scale)
            tl.store(old_scales + 3 * of + 2, v_scale)
        p, m, v = _fresh(
            number(p, p_scale, PARAM, HARDWARE), number(m, m_scale, AVG, HARDWARE),
            number(v, v_scale, AVG_SQ, HARDWARE), number(g, g_scale, GRAD, HARDWARE),
            beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size, decay,
            IS_L2, False, False,
        )  # fmt: skip
        p_code, m_code, v_code = _codes(
            p, m, v, p_quant, m_quant, v_quant, table, of, first, at,
            PARAM, AVG, AVG_SQ, DITHERS, HARDWARE, GROUP,
        )  # fmt: skip
        tl.store(param + first + at, p_code, mask=inside)
        tl.store(exp_avg + first + at, m_code, mask=inside)
        tl.store(exp_avg_sq + first + at, v_code, mask=inside)
        raised(amax_bits + 3 * of, p, inside, PARAM)
        raised(amax_bits + 3 * of + 1, m, inside, AVG)
        raised(amax_bits + 3 * of + 2, v, inside, AVG_SQ)


@triton.jit
def _adam_again_kernel(
    table, amax_bits, old_scales, skips,
    beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size,
    PARAM: tl.constexpr, AVG: tl.constexpr, AVG_SQ: tl.constexpr, GRAD: tl.constexpr,
    SCALED: tl.constexpr, DITHERS: tl.constexpr, IS_L2: tl.constexpr, IS_ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skips) == 0.0:  # the step is finite
        of, first, num_elements = _own_parameter(table, IS_ALIGNED, GROUP, BLOCK)
        p_scale, p_guess = old_scale(old_scales + 3 * of, PARAM)
        m_scale, m_guess = old_scale(old_scales + 3 * of + 1, AVG)
        v_scale, v_guess = old_scale(old_scales + 3 * of + 2, AVG_SQ)
        p_dequant, p_quant = new_scale(amax_bits + 3 * of, PARAM)
        m_dequant, m_quant = new_scale(amax_bits + 3 * of + 1, AVG)
        v_dequant, v_quant = new_scale(amax_bits + 3 * of + 2, AVG_SQ)
        if first == 0:  # no program of this launch reads these
            if SCALED & 1 > 0:
                tl.store(_tensor(table, of, 13, "fp32", GROUP, False), p_dequant)
            if SCALED & 2 > 0:
                tl.store(_tensor(table, of, 14, "fp32", GROUP, False), m_dequant)
            if SCALED & 4 > 0:
                tl.store(_tensor(table, of, 15, "fp32", GROUP, False), v_dequant)
        # A guess is NaN where the old scale is: then nothing equals it.
        is_right = (p_quant == p_guess) & (m_quant == m_guess) & (v_quant == v_guess)
        if not is_right:
            decay = tl.load(table + 2 * GROUP + of).to(tl.int32).to(tl.float32, bitcast=True)
            at = tl.arange(0, BLOCK)
            inside = first + at < num_elements
            # FP32 moments are those of this step already, and have no second copy.
            avg = _tensor(table, of, 7 if AVG == "fp32" else 11, AVG, GROUP, IS_ALIGNED)
            avg_sq = _tensor(table, of, 8 if AVG_SQ == "fp32" else 12, AVG_SQ, GROUP, IS_ALIGNED)
            old_param = _tensor(table, of, 10, PARAM, GROUP, IS_ALIGNED)
            grad = _tensor(table, of, 9, GRAD, GROUP, IS_ALIGNED)
            p = tl.load(old_param + first + at, mask=inside, other=0)
            m = tl.load(avg + first + at, mask=inside, other=0)
            v = tl.load(avg_sq + first + at, mask=inside, other=0)
            g = tl.load(grad + first + at, mask=inside, other=0)
            g_scale, _ = old_scale(_tensor(table, of, 16, "fp32", GROUP, False), GRAD)
            p, m, v = _fresh(
                number(p, p_scale, PARAM, HARDWARE), number(m, m_scale, AVG, HARDWARE),
                number(v, v_scale, AVG_SQ, HARDWARE), number(g, g_scale, GRAD, HARDWARE),
                beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size, decay,
                IS_L2, AVG == "fp32", AVG_SQ == "fp32",
            )  # fmt: skip
            p_code, m_code, v_code = _codes(
                p, m, v, p_quant, m_quant, v_quant, table, of, first, at,
                PARAM, AVG, AVG_SQ, DITHERS, HARDWARE, GROUP,
            )  # fmt: skip
            if SCALED & 1 > 0:
                param = _tensor(table, of, 6, PARAM, GROUP, IS_ALIGNED)
                tl.store(param + first + at, p_code, mask=inside)
            if SCALED & 2 > 0:
                exp_avg = _tensor(table, of, 7, AVG, GROUP, IS_ALIGNED)
                tl.store(exp_avg + first + at, m_code, mask=inside)
            if SCALED & 4 > 0:
                exp_avg_sq = _tensor(table, of, 8, AVG_SQ, GROUP, IS_ALIGNED)
                tl.store(exp_avg_sq + first + at, v_code, mask=inside)
