"""Describe the number formats of a run: the compute dtype and, if any, the FP8 recipe."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, cast, get_args

from megafp8.specs.recipes import DEFAULT_RECIPE, find_recipe, problem, traits_of
from megafp8.specs.traits import FormatName, GemmName

BackendName = Literal["native", "te", "torchao"]
AttentionInFp8 = Literal["none", "core", "whole"]
RecipeName = str
"""The name of a recipe, which `specs.recipes.find_recipe` finds."""
ModulePrecision = str
"""The name of a recipe, or `HIGH_PRECISION`."""

GEMMS: tuple[GemmName, ...] = get_args(GemmName)
MARGINS = (-16, 32)
"""The least and the largest `margin` that a run may have."""
UPDATES = (1, 65536)
"""The least and the largest `interval` and `amax_history_len`, in updates."""


@dataclass(frozen=True)
class ModuleRule:
    """Give `precision` to linears whose name matches `pattern`, a file-name pattern (* ? [...])."""

    pattern: str
    precision: ModulePrecision
    source: str = "model.fp8_modules"  # the setting that it comes from

    def matches(self, name: str) -> bool:
        """Whether the rule applies to the linear `name`."""
        return fnmatchcase(name, self.pattern)


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """Say how FP8 tensors get their scales.

    delayed              one scale per tensor, from earlier amaxes (Transformer Engine)
    tensorwise           one scale per tensor, from its own amax (TE's current scaling)
    rowwise              one scale per row or column that a product sums over (torchao)
    rowwise_with_gw_hp   the same, with the weight gradient in the compute dtype (torchao)
    blockwise            one per 1 x 128 elements along the sum, per 128 x 128 of a weight
    mxfp8                one power of two per 32 elements along the sum, rounded up
    nvfp4                FP4: one in E4M3 per 16 elements along the sum, and one per tensor
    """

    name: RecipeName = DEFAULT_RECIPE
    forward_format: FormatName = "e4m3"  # inputs and weights
    # output gradients; None stands for the first format that the recipe has for them
    backward_format: FormatName = None  # type: ignore[assignment]  # `__post_init__` sets it
    # only with a history (`Traits.has_history`)
    margin: int = 0  # quant_scale = fp8_max * 2**-margin / amax
    interval: int = 1  # updates of a tensor from one recomputation of its scale to the next
    amax_history_len: int = 1024  # updates for which one amax stays in the window
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True  # MAX over the ranks that hold parts of the same tensors
    # all
    power_2_scale: bool = False  # scales rounded down to a power of two (not with a history)
    params_in_fp8: bool = False  # weights are FP8, with FP32 master weights
    high_precision_gemms: frozenset[GemmName] = frozenset()  # these stay in the compute dtype
    fast_accumulation: frozenset[GemmName] = frozenset({"output"})  # on FP8 tensor cores
    fp8_in_evaluation: bool = True
    pad_inner_dim: bool = False  # allow dims that are no multiple of what FP8 tensor cores take
    modules: tuple[
        ModuleRule, ...
    ] = ()  # the first rule that matches decides; otherwise `name` does

    def __post_init__(self) -> None:
        """Choose the format of gradients, unless the recipe is code that is not imported yet."""
        given = cast("FormatName | None", self.backward_format)
        if given is None and problem(self.name) is None:
            first = find_recipe(self.name).traits.backward_formats[0]
            object.__setattr__(self, "backward_format", first)

    def precision_of(self, linear: str) -> ModulePrecision:
        """Return the recipe under which the linear of this name runs."""
        return next((rule.precision for rule in self.modules if rule.matches(linear)), self.name)

    def kept_high(self, precision: ModulePrecision) -> frozenset[GemmName]:
        """Return the products that linears under this recipe or another do not run in FP8."""
        traits = traits_of(precision)
        if traits is None:
            return frozenset(GEMMS)
        return self.high_precision_gemms | traits.high_precision


@dataclass(frozen=True, kw_only=True)
class LossScaleSpec:
    """Describe FP16's dynamic loss scale.

    The rule and the names are NeMo's; the default of `min_scale` is Megatron's.
    """

    init_scale: float = 2.0**32
    growth_interval: int = 1000  # finite steps in a row that double the scale
    hysteresis: int = 2  # overflows in a row from which on each one halves it
    min_scale: float = 1.0


@dataclass(frozen=True)
class AutoBackend:
    """Say that a run on a GPU takes Transformer Engine's layers where they can run it.

    `why_not_te` is the reason why they cannot, as far as it is known, or None.
    """

    why_not_te: str | None = None

    @property
    def text(self) -> str:
        """Return for a header why this backend was chosen."""
        if self.why_not_te is None:
            return "chosen by model.fp8_backend=auto"
        return f"not Transformer Engine: {self.why_not_te}"


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """Say in which number formats a run computes.

    `compute` is the dtype of GEMMs and of the weights they read; master weights are FP32. With
    `half_weights` (`megatron_amp_O2`), embeddings, norms and the residual stream are in `compute`
    too; otherwise these are FP32, as under `torch.autocast`.
    """

    compute: Literal["bf16", "fp16", "fp32"]
    fp8: Fp8Recipe | None
    backend: BackendName = "native"  # what runs the layers
    auto: AutoBackend | None = None  # on a GPU, where no backend was named; None otherwise
    user_buffers: bool = False  # Transformer Engine's, which overlap messages with products
    # Transformer Engine's attention: its products (`core`), and what the linears beside it hand
    # over too (`whole`)
    attention_in_fp8: AttentionInFp8 = "none"
    te_version: str | None = None  # whose Python runs on a CPU; None means the default version
    half_weights: bool = True
    loss_scale: LossScaleSpec | None = None  # for FP16 only


class PlannedGemms(NamedTuple):
    """Say which of the three products of a linear, or of a layer's, run in FP8.

    `flops` counts one product for one token; the three products are of the same size.
    """

    name: str
    flops: int
    fp8: tuple[GemmName, ...]  # the products that run in FP8
    reasons: tuple[str, ...]  # why the other products do not, with their names
