"""Update all delayed scales of a table in one launch, by `fp8/scaling.py`'s rule.

Each program updates one tensor's scale. Every division is a true one, since Triton's `/` is an
approximation in FP32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8_numerics.formats import Fp8Format
from fp8_numerics.kernels.triton_rounding import FLOAT32_MAX, dequant_of
from megafp8.specs import Fp8Recipe

CHUNK = 1024  # entries of a history that a program holds at once


def update_scales(
    amax: torch.Tensor,
    history: torch.Tensor,
    quant_scale: torch.Tensor,
    num_updates: torch.Tensor,
    num_nonfinite: torch.Tensor,
    recipe: Fp8Recipe,
    fmt: Fp8Format,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update the fields of a `ScaleTable`, all contiguous; its amaxes must be reduced already.

    Returns the new quant_scales and their reciprocals in tensors of their own; `quant_scale` stays
    as it is, and the other fields are written in place. `amax` is 0 afterwards.
    """
    fresh, reciprocal = torch.empty_like(quant_scale), torch.empty_like(quant_scale)
    if amax.numel() == 0:
        return fresh, reciprocal
    _update_kernel[(amax.numel(),)](
        amax,
        history,
        quant_scale,
        fresh,
        reciprocal,
        num_updates,
        num_nonfinite,
        history.shape[1],
        recipe.interval,
        fmt.max * 2.0**-recipe.margin,
        USE_MAX=recipe.amax_compute_algo == "max",
        CHUNK=min(CHUNK, triton.next_power_of_2(max(1, history.shape[1]))),
    )
    return fresh, reciprocal


@triton.jit
def _update_kernel(
    amax,
    history,
    quant_scale,
    new_quant_scale,
    new_dequant_scale,
    num_updates,
    num_nonfinite,
    length,
    interval,
    target,
    USE_MAX: tl.constexpr,
    CHUNK: tl.constexpr,
):
    tensor = tl.program_id(0) + tl.arange(0, 1)  # a vector: masks then broadcast alike everywhere
    staged = tl.load(amax + tensor)
    is_finite = staged < float("inf")  # false for a NaN too
    occurred = is_finite & (staged > 0.0)
    entries = history + tensor.to(tl.int64) * length
    window_amax = staged
    for begin in range(0, length, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        older = tl.load(entries + at, mask=at < length, other=0.0)
        newer = tl.load(entries + at + 1, mask=at < length - 1, other=0.0)
        if USE_MAX:
            window_amax = tl.maximum(window_amax, tl.max(older, axis=0))
        newer = tl.where(at == length - 1, staged, newer)
        tl.debug_barrier()  # every thread has read before any writes its neighbour's entry
        tl.store(entries + at, newer, mask=(at < length) & occurred)
    updates = tl.load(num_updates + tensor)
    fresh = tl.div_rn(tl.zeros((1,), tl.float32) + target, window_amax)
    fresh = tl.where(fresh > FLOAT32_MAX, FLOAT32_MAX, fresh)
    is_due = occurred & (updates % interval == 0)
    scale = tl.where(is_due, fresh, tl.load(quant_scale + tensor))
    tl.store(new_quant_scale + tensor, scale)
    tl.store(new_dequant_scale + tensor, dequant_of(scale))
    tl.store(num_updates + tensor, updates + 1, mask=occurred)
    tl.store(num_nonfinite + tensor, tl.load(num_nonfinite + tensor) + 1, mask=is_finite == 0)
    tl.store(amax + tensor, tl.zeros((1,), tl.float32))
