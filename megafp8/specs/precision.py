"""Describe the number formats of a run: the compute dtype and, if any, the FP8 recipe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, cast, get_args

from megafp8.specs.recipes import (
    DEFAULT_RECIPE,
    HIGH_PRECISION,
    find_recipe,
    label_of,
    problem,
    traits_of,
)
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
    """Give `precision` to linears whose name matches `pattern`, a file-name pattern (* ? [...]).

    `kept_high` are the products of these linears that stay in the compute dtype; None stands for
    those of the whole recipe (`Fp8Recipe.high_precision_gemms`).
    """

    pattern: str
    precision: ModulePrecision
    source: str = "model.fp8_modules"  # the setting that it comes from
    kept_high: frozenset[GemmName] | None = None

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
    # of linears whose rule names another recipe, where that one has the format; None stands for
    # `backward_format` if `name` has a choice of formats, and else for the recipe's own first
    modules_backward_format: FormatName | None = None

    def __post_init__(self) -> None:
        """Choose the format of gradients, unless the recipe is code that is not imported yet."""
        given = cast("FormatName | None", self.backward_format)
        if given is None and problem(self.name) is None:
            first = find_recipe(self.name).traits.backward_formats[0]
            object.__setattr__(self, "backward_format", first)

    @property
    def names(self) -> set[RecipeName]:
        """Return the recipes that linears may have."""
        return {self.name, *(rule.precision for rule in self.modules)} - {HIGH_PRECISION}

    @property
    def is_unused(self) -> bool:
        """Whether a rule keeps every linear in high precision."""
        first = self.modules[:1]
        return any(r.pattern == "*" and r.precision == HIGH_PRECISION for r in first)

    def rule_of(self, linear: str) -> ModuleRule | None:
        """Return the rule that decides on the linear of this name; None if no rule matches it."""
        return next((rule for rule in self.modules if rule.matches(linear)), None)

    def precision_of(self, linear: str) -> ModulePrecision:
        """Return the recipe under which the linear of this name runs."""
        rule = self.rule_of(linear)
        return self.name if rule is None else rule.precision

    def gradients_in(self, name: RecipeName) -> FormatName:
        """Return the format of the output gradients of linears under a recipe of this name."""
        if name == self.name:
            return self.backward_format
        formats = find_recipe(name).traits.backward_formats
        has_choice = len(find_recipe(self.name).traits.backward_formats) > 1
        wanted = self.modules_backward_format or (self.backward_format if has_choice else None)
        return wanted if wanted in formats else formats[0]

    @property
    def histories(self) -> dict[RecipeName, FormatName]:
        """Return the recipes whose scales follow from histories, and the formats of gradients."""
        known = (name for name in sorted(self.names) if problem(name) is None)
        found = (name for name in known if find_recipe(name).traits.has_history)
        return {name: self.gradients_in(name) for name in found}

    @property
    def gradients_with_history(self) -> FormatName:
        """Return the format of the output gradients whose scales follow from histories."""
        formats = self.histories
        return formats.get(self.name, next(iter(formats.values()), self.backward_format))

    def draws_in(self, linears: Iterable[str]) -> bool:
        """Whether casts of one of the linears of these names draw random numbers."""
        random = {name for name in self.names if find_recipe(name).traits.is_random}
        return bool(random) and any(self.precision_of(name) in random for name in linears)

    def kept_high(self, precision: ModulePrecision, linear: str = "") -> frozenset[GemmName]:
        """Return the products that linears under this recipe or another do not run in FP8.

        They are those of the linear of a name, which a rule may choose, or of any without a rule.
        """
        traits = traits_of(precision)
        if traits is None:
            return frozenset(GEMMS)
        rule = self.rule_of(linear) if linear else None
        chosen = None if rule is None else rule.kept_high
        return (self.high_precision_gemms if chosen is None else chosen) | traits.high_precision


@dataclass(frozen=True, kw_only=True)
class PrecisionChange:
    """Describe an entry of `model.precision_schedule`: products that get another precision.

    The change holds for the steps after the first `after` ones, which follow from `start`: a number
    of steps, or a fraction of the run. `modules` are patterns of linears' names; none stand for all
    linears that the run has in FP8.
    """

    start: int | float
    after: int
    modules: tuple[str, ...]
    products: tuple[GemmName, ...]
    precision: ModulePrecision

    @property
    def text(self) -> str:
        """Return the change in words: `output of *.mlp.fc2 in mxfp8`."""
        products = "" if self.products == GEMMS else f"{', '.join(self.products)} of "
        name = "high precision"
        if self.precision != HIGH_PRECISION:
            name = label_of(self.precision)
        return f"{products}{', '.join(self.modules) or 'all linears'} in {name}"


@dataclass(frozen=True, kw_only=True)
class PrecisionPhase:
    """Say under which recipe the steps after the first `after` ones run, and what begins there."""

    after: int
    changes: tuple[PrecisionChange, ...]
    recipe: Fp8Recipe

    @property
    def text(self) -> str:
        """Return in words what changes when the phase begins."""
        return "; ".join(change.text for change in self.changes)


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
    fp8: Fp8Recipe | None  # of the first steps, where there is a schedule
    schedule: tuple[PrecisionPhase, ...] = ()  # all phases of a run that has several
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
