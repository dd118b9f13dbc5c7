"""Number formats of a run: the compute dtype and, if asked for, the FP8 recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FormatName = Literal["e4m3", "e5m2"]


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """How FP8 tensors get their scales (Transformer Engine's `DelayedScaling`)."""

    name: Literal["delayed"] = "delayed"
    forward_format: FormatName = "e4m3"  # inputs and weights
    backward_format: FormatName = "e5m2"  # output gradients
    margin: int = 0  # quant_scale = fp8_max * 2**-margin / amax
    interval: int = 1  # updates of a tensor from one recomputation of its scale to the next
    amax_history_len: int = 1024  # updates that one amax stays in the window
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True  # MAX over the ranks that hold parts of the same tensors


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """`compute` is the dtype of activations and of the weights GEMMs read; masters are FP32."""

    compute: Literal["bf16", "fp32"]
    fp8: Fp8Recipe | None
