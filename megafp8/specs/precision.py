"""Number formats of a run: the compute dtype and, if asked for, the FP8 recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FormatName = Literal["e4m3", "e5m2"]
RecipeName = Literal["delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"]
GemmPlace = Literal["output", "grad_input", "grad_weight"]
BackendName = Literal["native", "te", "torchao"]


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """How FP8 tensors get their scales (Transformer Engine's `DelayedScaling`)."""

    name: RecipeName = "delayed"
    forward_format: FormatName = "e4m3"  # inputs and weights
    backward_format: FormatName = "e5m2"  # output gradients
    margin: int = 0  # quant_scale = fp8_max * 2**-margin / amax
    interval: int = 1  # updates of a tensor from one recomputation of its scale to the next
    amax_history_len: int = 1024  # updates that one amax stays in the window
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True  # MAX over the ranks that hold parts of the same tensors
    params_in_fp8: bool = False  # weights are stored in FP8 alone
    high_precision_gemms: frozenset[GemmPlace] = frozenset()  # these run in the compute dtype
    pow2_scales: bool = False
    fp8_in_evaluation: bool = True


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """`compute` is the dtype of activations and of the weights GEMMs read; masters are FP32."""

    compute: Literal["bf16", "fp32"]
    fp8: Fp8Recipe | None
    backend: BackendName = "native"  # who runs the layers; resolved, never "auto"
    pad_inner_dim: bool = False  # torchao alone: see its `Float8LinearConfig`
