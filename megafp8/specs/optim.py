"""Describe the optimizer and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

StorageName = Literal["fp32", "bf16", "fp16", "fp8", "fp8_e5m2"]
"""In which format a tensor of the optimizer is stored; `fp8` is E4M3. FP16 and FP8 have a scale."""
Fp8Reduction = Literal["fp32", "auto", "pre", "post"]
"""How gradients in FP8 are summed over replicas: in FP32, or in FP8 after one of three factors."""
ShardBy = Literal["tensors", "elements", "auto"]
"""What ranks own of stored states: whole tensors, equal numbers of elements, or what is better."""
STORAGE_NAMES: tuple[StorageName, ...] = get_args(StorageName)
WsdDecay = Literal["exponential", "linear", "cosine", "minus_sqrt"]
"""How the rate falls in the last phase of warm-up, stable, decay."""
MuonScale = Literal["spectral", "shape_scaling", "unit_rms_norm"]
"""The factor of an orthogonal update, by the shape of its matrix; the names are Megatron's."""
MuonMode = Literal["duplicated", "blockwise"]
"""Whether tensor-parallel ranks orthogonalize whole matrices or their own parts, as in Megatron."""
ITEM_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8_e5m2": 1}
"""Bytes of an element in each format; a scale takes 4 bytes a tensor more."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """Describe a schedule by its name in NeMo or Megatron; `optim.schedules` has the formulas."""

    name: str
    warmup_steps: int
    constant_steps: int  # CosineAnnealing: the last steps, at `min_lr`
    min_lr: float
    max_steps: int  # steps of the whole run: warm-up, decay and constant part together
    hold_steps: int | None = None  # steps at the highest rate after the warm-up
    power: float = 1.0  # the polynomial's exponent
    decay_rate: float = 0.5  # NoamHoldAnnealing: exponent of the decay
    d_model: int | None = None  # NoamAnnealing: the rate is divided by its root
    wsd_decay_steps: int = 0  # WSD: the last steps, in which the rate falls
    wsd_decay_style: WsdDecay = "exponential"


@dataclass(frozen=True, kw_only=True)
class StorageSpec:
    """Describe how gradients, master weights and moments are stored (FP8-LM, arXiv 2310.18313).

    `main_grads` and `main_params` are for the weights of linears: those of embeddings, norms and
    biases are FP32. The moments' formats are for all parameters, or with `linears_only` for the
    weights of linears.
    """

    main_grads: StorageName = "fp32"
    main_params: StorageName = "fp32"
    exp_avg: StorageName = "fp32"
    exp_avg_sq: StorageName = "fp32"
    linears_only: bool = False
    sums_in_fp32: bool = False  # gradients are summed in FP32 over a step and quantized once
    reduction: Fp8Reduction = "fp32"
    stochastic_rounding: bool = False  # of master weights and moments below FP32

    @property
    def is_plain(self) -> bool:
        """Whether everything is stored in FP32."""
        formats = (self.main_grads, self.main_params, self.exp_avg, self.exp_avg_sq)
        return set(formats) == {"fp32"}


@dataclass(frozen=True, kw_only=True)
class MuonSpec:
    """Describe Muon's update of matrices (`optim.muon`)."""

    momentum: float = 0.95
    nesterov: bool = True
    num_steps: int = 5  # of Newton and Schulz's iteration
    scale_mode: MuonScale = "spectral"
    extra_scale_factor: float = 0.2
    tp_mode: MuonMode = "duplicated"


@dataclass(frozen=True, kw_only=True)
class OptimSpec:
    """Describe the optimizer, its weight decay and gradient clipping.

    `adam` adds weight_decay * weight to the gradient (L2); `adamw` and `fused_adam` shrink the
    weight itself (decoupled). `fused_adam` runs Apex's or Transformer Engine's kernel where it can;
    `distributed_fused_adam` does too, and shards the optimizer's state over replicas (ZeRO-1). With
    `shards_grads` it shards summed gradients too (ZeRO-2), where `storage` is not plain. There
    `shard_by` says what a rank owns.
    """

    name: str
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad_norm: float | None  # None and 0 switch clipping off
    schedule: ScheduleSpec
    clip_algorithm: Literal["norm", "value"] = "norm"
    storage: StorageSpec = StorageSpec()
    shards_grads: bool = False
    shard_by: ShardBy = "tensors"
    decays_vectors: bool = False  # norms and biases decay too
    muon: MuonSpec = MuonSpec()  # read where `uses_muon`

    def decays(self, num_dims: int) -> bool:
        """Whether a parameter of this many dims has weight decay; vectors are norms and biases."""
        return num_dims > 1 or self.decays_vectors

    @property
    def shards_states(self) -> bool:
        """Whether each replica keeps only its shard of the master weights and moments."""
        return self.name in ("distributed_fused_adam", "dist_muon")

    @property
    def owns_whole(self) -> bool:
        """Whether a replica owns FP32 states of whole tensors, and not of equal ranges."""
        return self.name == "dist_muon"

    @property
    def uses_muon(self) -> bool:
        """Whether Muon updates the matrices of the layers, and AdamW the rest."""
        return self.name in ("muon", "dist_muon")
