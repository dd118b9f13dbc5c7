"""Do what happens between steps: delayed scaling's histories and scales."""

from __future__ import annotations

import torch

from te_cpu.enums import FORMATS
from te_cpu.errors import SizeError

FLOAT32_MAX = torch.finfo(torch.float32).max


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: int,
    margin: float,
) -> None:
    """Shift each tensor's history [length, tensors] by one update and make its new scale.

    Slot 0 is where the next amax is staged, slots 1 and on are past updates, oldest first. A
    tensor whose reduced amax is 0 has not been cast and keeps what it has staged; where that is 0
    too, its history stays as it is. The largest is taken by `fmaxf`, which passes over NaN. A scale
    stays where the amax is 0 or infinite, and is the largest finite number where it overflows.

    Raises:
        SizeError: A history is not of the tensors whose scales it comes with, as Transformer
            Engine's `adjust_amax_history_length` leaves them. Nothing is updated.
    """
    for history, scale in zip(amax_histories, scales, strict=True):
        if history.shape[1] != scale.numel():
            raise SizeError(
                f"A history of amaxes of {history.shape[1]} tensors comes with {scale.numel()} "
                "scales: Transformer Engine mixes up the forward and the backward histories of a "
                "layer whose amax_history_len changes. Make a new layer for another length, and "
                "call FP8GlobalStateManager.reset() to forget this one"
            )
    largest = FORMATS[fp8_dtype].max * 2.0**-margin
    reduced = amax_reduction_buffer.split([history.shape[1] for history in amax_histories])
    for amax, history, scale in zip(reduced, amax_histories, scales, strict=True):
        last = torch.where(amax != 0, amax, history[0])
        was_cast = last != 0
        shifted = torch.cat([history[1:], last[None]])
        window = shifted.nan_to_num(nan=0.0, posinf=torch.inf).amax(0)
        new = torch.where(was_cast, window, torch.zeros_like(window))
        if amax_compute_algo == "most_recent":
            new = last
        shifted[0] = 0
        history.copy_(torch.where(was_cast, shifted, history))
        made = torch.div(torch.full_like(new, largest), new).clamp(max=FLOAT32_MAX)
        scale.copy_(torch.where(torch.isfinite(new) & (new > 0), made, scale))


KERNELS = (fused_amax_and_scale_update_after_reduction,)
