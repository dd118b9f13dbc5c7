"""Describe the optimizer and its learning-rate schedule."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

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
MOMENTUM = "momentum_buffer"
"""What checkpoints call Muon's momentum."""
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
    muon: MuonSpec = MuonSpec()
    given: NamedOptimizer | None = None  # one that no setting names, in place of that of `name`

    def decays(self, num_dims: int) -> bool:
        """Whether a parameter of this many dims has weight decay; vectors are norms and biases."""
        return num_dims > 1 or self.decays_vectors

    @property
    def named(self) -> NamedOptimizer:
        """Return what `name` stands for, unless another one is given."""
        return self.given or OPTIMIZERS[self.name]

    def owner(self, kind: ParamKind) -> OptimizerTraits:
        """Return the optimizer of a parameter: the first one that owns it."""
        return next(traits for traits in self.named.optimizers if traits.owns(self, kind))

    def states_of(self, kind: ParamKind) -> Mapping[str, StorageName]:
        """Return the states that each element of a parameter has, and their formats."""
        return self.owner(kind).states(self, kind)

    @property
    def shards_states(self) -> bool:
        """Whether each replica keeps only its shard of the master weights and moments."""
        return self.named.shards_states

    @property
    def needs_whole(self) -> bool:
        """Whether an optimizer updates whole matrices, so that replicas own whole tensors."""
        return any(traits.needs_whole for traits in self.named.optimizers)


# --- optimizers -----------------------------------------------------------------------------------


class ParamKind(NamedTuple):
    """Hold what an optimizer may ask of a parameter to own it."""

    is_linear: bool  # whether it is the weight of a layer's linear
    is_vector: bool  # whether it is a norm or a bias


class OptimizerTraits:
    """Describe to plan and build how an optimizer updates the parameters that it owns.

    This is the part without torch of `megafp8/optim/protocol.py`. One that `needs_whole` updates
    whole matrices: with ZeRO-1 replicas own whole tensors, and with FSDP they gather in BF16 what
    one of them computes an update from, which it sends to all in BF16.
    """

    name: ClassVar[str]  # what log and plan call the rule
    implementation: ClassVar[str]  # where its `Optimizer` is: `module:Class`
    needs_whole: ClassVar[bool] = False
    update_bytes: ClassVar[int]  # what a step's norm and update move on a GPU for each element
    num_amaxes: ClassVar[int] = 0  # of a parameter on which ranks with parts of it agree

    def owns(self, optim: OptimSpec, kind: ParamKind) -> bool:
        """Whether it updates parameters of this kind that no optimizer before it owns."""
        return True

    def states(self, optim: OptimSpec, kind: ParamKind) -> Mapping[str, StorageName]:
        """Return the states of each element of a parameter, by name, and their formats."""
        raise NotImplementedError

    def gathers_parts(self, optim: OptimSpec) -> bool:
        """Whether tensor-parallel ranks gather their parts of a matrix to update it whole."""
        return False

    def flops(self, optim: OptimSpec, rows: int, columns: int) -> int:
        """Return the operations of matrix products in the update of one matrix."""
        return 0

    def make(self, *given: Any) -> Any:
        """Return the `Optimizer` of a rank, from its other fields."""
        module, name = self.implementation.split(":")
        return getattr(importlib.import_module(module), name)(self, *given)


class AdamTraits(OptimizerTraits):
    """Describe Adam over FP32 states by a fused kernel."""

    name = "AdamW"
    implementation = "megafp8.optim.adamw:AdamW"
    update_bytes = 36
    """The norm reads gradients of 4 bytes; torch's fused AdamW reads 16 and writes 16, as it clips
    the gradients too. Passes over states in low precision are not modelled and count as these."""

    def states(self, optim: OptimSpec, kind: ParamKind) -> Mapping[str, StorageName]:
        storage = optim.storage
        if storage.linears_only and not kind.is_linear:
            return {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
        return {"exp_avg": storage.exp_avg, "exp_avg_sq": storage.exp_avg_sq}


class StoredAdamTraits(AdamTraits):
    """Describe Adam where gradient, master or a moment is below FP32 (FP8-LM)."""

    implementation = "megafp8.optim.stored_adam:StoredAdam"
    num_amaxes = 3

    def owns(self, optim: OptimSpec, kind: ParamKind) -> bool:
        """Whether any tensor of such a parameter is stored below FP32."""
        formats = set(self.states(optim, kind).values())
        if kind.is_linear:
            formats |= {optim.storage.main_grads, optim.storage.main_params}
        return formats != {"fp32"}


class MuonTraits(OptimizerTraits):
    """Describe Muon, whose settings are `MuonSpec`."""

    name = "Muon"
    implementation = "megafp8.optim.muon:Muon"
    needs_whole = True
    update_bytes = 60
    """The norm reads 4 and clipping moves 8; the momentum reads 8 and writes 4; Nesterov's step 8
    and 4; the conversion to BF16 reads 4 and writes 2; decay and update read 4, 4 and 2 and write 4
    and 4."""

    def owns(self, optim: OptimSpec, kind: ParamKind) -> bool:
        return kind.is_linear

    def states(self, optim: OptimSpec, kind: ParamKind) -> Mapping[str, StorageName]:
        return {MOMENTUM: "fp32"}

    def gathers_parts(self, optim: OptimSpec) -> bool:
        """Whether ranks orthogonalize whole matrices."""
        return optim.muon.tp_mode == "duplicated"

    def flops(self, optim: OptimSpec, rows: int, columns: int) -> int:
        """Return the operations that orthogonalize a matrix.

        For its shorter side m and the longer n each iteration has two products of 2 m^2 n and one
        of 2 m^3.
        """
        short, long = sorted((rows, columns))
        return optim.muon.num_steps * (4 * short**2 * long + 2 * short**3)


ADAM = (StoredAdamTraits(), AdamTraits())
MUON = (MuonTraits(), *ADAM)


@dataclass(frozen=True)
class NamedOptimizer:
    """Say what a name of an optimizer stands for; names that there are not are empty."""

    optimizers: tuple[OptimizerTraits, ...] = ADAM  # a parameter belongs to the first that owns it
    shards_states: bool = False  # whether replicas share masters and states (ZeRO-1)
    same_as: str = ""  # the name that means the same but for kernel and sharding
    sharded: str = ""  # the name of the one that shards states, if this one does not
    unsharded: str = ""  # the name of the one that shards nothing, if this one does


OPTIMIZERS: Mapping[str, NamedOptimizer] = {
    "adam": NamedOptimizer(),  # none shards: that of NeMo decouples weight decay
    "adamw": NamedOptimizer(sharded="distributed_fused_adam"),
    "fused_adam": NamedOptimizer(same_as="adamw", sharded="distributed_fused_adam"),
    "distributed_fused_adam": NamedOptimizer(
        shards_states=True, same_as="adamw", unsharded="fused_adam"
    ),
    "muon": NamedOptimizer(MUON, sharded="dist_muon"),
    "dist_muon": NamedOptimizer(MUON, shards_states=True, same_as="muon", unsharded="muon"),
}
"""The optimizers of `model.optim.name`. NeMo's fused ones are Apex's with `adam_w_mode=True`, the
same as `adamw`."""
