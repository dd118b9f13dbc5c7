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
class LossScaleSpec:
    """FP16's dynamic loss scale: NeMo's rule and names; `min_scale` is Megatron's default."""

    init_scale: float = 2.0**32
    growth_interval: int = 1000  # finite steps in a row that double the scale
    hysteresis: int = 2  # overflows in a row from which on each halves it
    min_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """`compute` is the dtype of GEMMs and of the weights they read; masters are FP32.

    With `half_weights` (`megatron_amp_O2`) embeddings, norms and the residual stream have it too.
    Without, these are FP32, as under `torch.autocast`.
    """

    compute: Literal["bf16", "fp16", "fp32"]
    fp8: Fp8Recipe | None
    half_weights: bool = True
    loss_scale: LossScaleSpec | None = None  # FP16's
