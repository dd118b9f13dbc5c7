"""List what Transformer Engine's layers cannot do, as a table that needs neither torch nor a GPU.

The checks of settings (`--cfg job`, `plan`, the start of a run before its ranks) apply the table
where `model.fp8_backend=te`, `auto` applies it to find every reason against Transformer Engine, and
the backend applies it to a spec that a program made by itself (`te_settings`). So no two of them
can disagree. Every row names a setting under NeMo's name. What the table cannot know, such as an
installed package, is checked where a run starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megafp8.config.keys import Values
from megafp8.config.precision_changes import SCHEDULE, parse_schedule
from megafp8.config.rows import (
    CURRENT,
    FP32,
    HALF,
    HISTORY,
    LOW_PRECISION,
    NATIVE,
    ROTATED,
    ZERO_BUBBLE,
    Condition,
    RecipeKind,
    Row,
    given,
    is_above,
    its_recipe,
    not_,
    refusals,
    some_recipe,
)
from megafp8.config.rules import Finding
from megafp8.config.values import (
    GELUS,
    LAYERS_NAMED,
    compute_dtypes,
    layers_in_bf16,
    parse_modules,
    spell_activation,
    split_accumulator,
)
from megafp8.specs.layer import linear_names
from megafp8.specs.precision import GEMMS, ModuleRule
from megafp8.specs.recipes import HIGH_PRECISION, recipes_where, te_class
from megafp8.specs.te_versions import (
    DEFAULT_VERSION,
    DOCUMENTS_ON_CPU,
    FIRST_WITH_NVFP4,
    HEAD_NORMS,
    is_before,
    why_not_on_cpu,
)

IN_TE = RecipeKind("that Transformer Engine has", lambda traits: "te" in traits.backends)
NOT_IN_TE = RecipeKind("that Transformer Engine lacks", lambda traits: "te" not in traits.backends)
SCHEDULED = RecipeKind(
    "that a schedule may have under Transformer Engine",
    lambda traits: IN_TE.holds(traits) and CURRENT.holds(traits),
)

BACKEND, RECIPE, SPLIT = "model.fp8_backend", "model.fp8_recipe", "model.fp8_split_accumulator"
VERSION, MODULES = "model.te_version", "model.fp8_modules"
DOCUMENTS = "model.data.reset_attention_mask"
CP, PP = "model.context_parallel_size", "model.pipeline_model_parallel_size"
HEAD_NORMS_KEY = "model.qk_layernorm"
ACTIVATION, POSITIONS = "model.activation", "model.position_embedding_type"
FP8_ATTENTION = "model.fp8_dot_product_attention"
LEVEL, PRECISION = "model.optim.fp8_opt_level", "trainer.precision"
LEAVE = f"Leave it out, {NATIVE}"
NVFP4 = "NVFP4BlockScaling"
ALL_IN_FP8 = (
    "Transformer Engine's layers run all products in FP8; they ignore this setting, or fail in the "
    "first forward pass"
)
_FIRST_LAST = (
    "model.first_last_layers_bf16",
    "model.num_layers_at_start_in_bf16",
    "model.num_layers_at_end_in_bf16",
)

NOT_BF16 = Condition("=32 or 16", lambda _, values: compute_dtypes(values) != ("bf16",))
NAMES_MODULES = Condition(
    " with modules", lambda value, _: any(change.modules for change in parse_schedule(value))
)
NAMES_PRODUCTS = Condition(
    " with products",
    lambda value, _: any(change.products != GEMMS for change in parse_schedule(value)),
)
GELU = Condition("=gelu or geglu", lambda value, _: spell_activation(value) in GELUS)


def _rules_of(values: Values) -> list[ModuleRule]:
    """Return the rules about single linears, then those about the first and the last layers."""
    kept = layers_in_bf16(values["model.num_layers"], *(values[key] for key in _FIRST_LAST))
    rules = list(parse_modules(values[MODULES]) or ())
    return rules + [ModuleRule(f"layers.{layer}.*", HIGH_PRECISION) for layer in kept]


def _splits_a_layer(_: Any, values: Values) -> bool:
    """Whether a layer has linears in FP8 and others out of it."""
    rules = _rules_of(values) if values[MODULES] else []
    if not rules:
        return False
    for layer in range(min(values["model.num_layers"], LAYERS_NAMED)):
        chosen = [
            next((rule.precision for rule in rules if rule.matches(name)), "fp8")
            for name in linear_names([layer])
        ]
        if 0 < chosen.count(HIGH_PRECISION) < len(chosen):
            return True
    return False


def _has_other_recipe(value: Any, values: Values) -> bool:
    chosen = {rule.precision for rule in parse_modules(value) or ()}
    return bool(chosen - {HIGH_PRECISION, values[RECIPE]})


def _differs_from_its_own(value: Any, values: Values) -> bool:
    own = split_accumulator({**values, SPLIT: None, BACKEND: "te"})
    return value is not None and list(value) != own


def _before(first: str) -> Condition:
    """Return the condition that the version is one before `first`."""
    return Condition(
        f" before {first}", lambda version, _: version is not None and is_before(version, first)
    )


def _of_class(name: str) -> RecipeKind:
    """Return the recipes for which Transformer Engine has the class of this name."""
    return RecipeKind(f"that is {name}", lambda traits: traits.backends.get("te") == name)


def _lacks_a_recipe(value: Any, _: Values) -> bool:
    named = {change.precision for change in parse_schedule(value)} - {HIGH_PRECISION}
    return bool(recipes_where(named, NOT_IN_TE.holds))


TABLE = (
    # --- the model -----------------------------------------------------------------------------
    Row(
        {ACTIVATION: GELU}, {"model.openai_gelu": False},
        "Transformer Engine's GELU is the tanh form alone",
        f"Set model.openai_gelu=True, {NATIVE}",
    ),
    Row(
        {}, {"model.transformer_block_type": not_("pre_ln")},
        "Transformer Engine's layers are pre-norm",
        f"Use model.transformer_block_type=pre_ln, {NATIVE}",
    ),
    *(
        Row({}, {key: True}, f"Transformer Engine's layers have no {what}", LEAVE)
        for key, what in (
            ("model.apply_query_key_layer_scaling", "query-key layer scaling"),
            ("model.fp32_residual_connection", "FP32 residual stream"),
        )
    ),
    Row(
        {}, {"model.add_qkv_bias": True},
        "all linears of Transformer Engine's layer have biases, or none has",
        LEAVE,
    ),
    Row(
        {}, {"model.yarn_rotary_scaling_factor": given()},
        "Transformer Engine takes RoPE's angles, and YaRN multiplies their cosines by a factor",
        LEAVE,
    ),
    Row(
        {HEAD_NORMS_KEY: True}, {VERSION: _before(HEAD_NORMS)},
        f"it normalizes queries and keys before it rotates them from {HEAD_NORMS} on",
        f"Use {VERSION}={DEFAULT_VERSION} or another later one, {NATIVE}",
    ),
    *(
        Row(
            {HEAD_NORMS_KEY: True}, {key: True},
            f"Transformer Engine's norms of queries and keys have not been tried with {what}",
            LEAVE,
        )
        for key, what in (
            ("model.layernorm_zero_centered_gamma", "weights that begin at 0, which it ignores"),
            ("model.fp8_multi_head_attention", "queries and keys in FP8"),
        )
    ),
    Row(
        {}, {"model.ffn_dropout": is_above(0)},
        "Transformer Engine's layer has no dropout inside the MLP",
        f"Use model.ffn_dropout=0, {NATIVE}",
    ),
    Row(
        {POSITIONS: "rope", DOCUMENTS: False}, {"model.data.reset_position_ids": True},
        "Transformer Engine's rotary positions begin again at 0 only with documents that do not "
        "see each other",
        f"Use {DOCUMENTS}=True, leave it out, {NATIVE}",
    ),
    Row(
        {DOCUMENTS: True, "model.sequence_parallel": True}, {"model.micro_batch_size": is_above(1)},
        "Transformer Engine's layers put the tokens of all sequence-parallel ranks behind each "
        "other, which tears the documents of several samples apart",
        f"Use model.micro_batch_size=1, {NATIVE}",
    ),
    Row(
        {DOCUMENTS: True}, {VERSION: _before(DOCUMENTS_ON_CPU)},
        "the attention that Transformer Engine has on a CPU keeps documents apart from "
        f"{DOCUMENTS_ON_CPU} on",
        f"Use {VERSION}={DEFAULT_VERSION} or another later one, {NATIVE}",
    ),
    Row(
        {DOCUMENTS: True}, {FP8_ATTENTION: True},
        "cuDNN's attention in FP8 takes samples of one length, and no documents within them",
        f"Leave it out, or leave {DOCUMENTS} out",
    ),
    Row(
        {"model.window_size": given()}, {FP8_ATTENTION: True},
        "cuDNN's attention in FP8 has no window before Blackwell, and has not been tried with one",
        "Leave it out, or leave model.window_size out",
    ),
    Row(
        {PRECISION: HALF}, {"model.megatron_amp_O2": False},
        "Transformer Engine's layers have one dtype, and {model.megatron_amp_O2} asks for norms in "
        "FP32",
        LEAVE,
    ),
    # --- FP8 -----------------------------------------------------------------------------------
    Row(
        {"model.fp8": True}, {RECIPE: its_recipe(NOT_IN_TE)},
        "Transformer Engine has no {recipe} recipe",
        f"Use {RECIPE}={IN_TE.hint}, {NATIVE}",
    ),
    Row(
        {"model.fp8": True, RECIPE: some_recipe(ROTATED), "model.fp4_disable_rht": False},
        {PRECISION: NOT_BF16},
        "Transformer Engine rotates tensors in BF16 alone, and {recipe} rotates",
        f"Use {PRECISION}=bf16, model.fp4_disable_rht=True, {NATIVE}",
    ),
    Row(
        {"model.fp8": True},
        {MODULES: Condition(" with another recipe", _has_other_recipe, (RECIPE,))},
        "Transformer Engine's layers run under one recipe, {model.fp8_recipe}",
        f"Leave the rules for other recipes out, {NATIVE}",
    ),
    Row(
        {"model.fp8": True},
        {MODULES: Condition(
            " for part of a layer", _splits_a_layer, ("model.num_layers", *_FIRST_LAST)
        )},
        "keeps a part of a layer out of FP8, and Transformer Engine's layers are in FP8 as a whole "
        "or not at all",
        f"Name whole layers, such as layers.0.*:high_precision, {NATIVE}",
    ),
    Row(
        {}, {"model.fp8_interval": not_(1)},
        "Transformer Engine computes new scales at every update",
        f"Use model.fp8_interval=1, {NATIVE}",
    ),
    Row(
        {}, {"model.pad_inner_dim": True},
        "Transformer Engine's layers do not pad",
        f"Leave it out, or use model.fp8_backend=torchao, {NATIVE}",
    ),
    *(
        Row({}, {key: test}, ALL_IN_FP8, LEAVE)
        for key, test in (("model.fp8_wgrad", False),
                          ("model.override_linear_precision", not_([False, False, False])))
    ),
    *(
        Row(
            {"model.fp8": True, RECIPE: its_recipe(_of_class(name))},
            {SPLIT: Condition(f" other than {own}", _differs_from_its_own, (RECIPE,))},
            f"Transformer Engine's {name} has no such setting: it adds up precisely in {which}",
            LEAVE,
        )
        for name, own, which in (
            ("DelayedScaling", "[False, True, True]", "the two backward products alone"),
            ("MXFP8BlockScaling", "[False, True, True]", "the two backward products alone"),
            (NVFP4, "[False, True, True]", "the two backward products alone"),
            ("Float8BlockScaling", "[True, True, True]", "all products"),
        )
    ),
    # --- a schedule of precision ---------------------------------------------------------------
    Row(
        {"model.fp8": True}, {SCHEDULE: NAMES_MODULES},
        "Transformer Engine opens a region of one recipe for all of its layers",
        f"Leave `modules` out, leave {SCHEDULE} out, {NATIVE}",
    ),
    Row(
        {"model.fp8": True}, {SCHEDULE: NAMES_PRODUCTS},
        "Transformer Engine's layers run all products of a linear by the recipe of the region",
        f"Leave `products` out, leave {SCHEDULE} out, {NATIVE}",
    ),
    Row(
        {"model.fp8": True}, {SCHEDULE: Condition(" with a recipe that it lacks", _lacks_a_recipe)},
        "Transformer Engine does not have one of its recipes",
        f"Name bf16, {SCHEDULED.hint} in the entries, leave {SCHEDULE} out, {NATIVE}",
    ),
    Row(
        {"model.fp8": True, RECIPE: some_recipe(HISTORY)}, {SCHEDULE: given()},
        "the histories of Transformer Engine's modules are copied between their tensors and tables "
        "that are made once, and have not been made again within a run",
        f"Use {RECIPE}={SCHEDULED.hint}, name these or bf16 in the entries, {NATIVE}",
    ),
    *(
        Row(
            {key: test}, {SCHEDULE: given()},
            f"{what} under Transformer Engine have not been shown to be right after a change of "
            "recipe",
            LEAVE,
            unproven=True,
        )
        for key, test, what in (
            ("model.fsdp", True, "weights that FSDP gathers"),
            (LEVEL, LOW_PRECISION, "weights that are stored in low precision"),
        )
    ),
    Row(
        {SCHEDULE: given()}, {"model.ub_tp_comm_overlap": True},
        "its buffers have not been shown to be right after a change of recipe",
        f"Leave it out, or leave {SCHEDULE} out",
        unproven=True,
    ),
    # --- attention in FP8 ----------------------------------------------------------------------
    Row(
        {FP8_ATTENTION: True}, {RECIPE: its_recipe(CURRENT)},
        "Transformer Engine has no FP8 attention for blockwise, that for mxfp8 and nvfp4, of later "
        "versions, has not been tried, and for tensorwise it gives the scores delayed scales, "
        "whose rule no setting describes",
        f"Use {RECIPE}=delayed, or leave {FP8_ATTENTION} out",
    ),
    Row(
        {FP8_ATTENTION: True}, {PRECISION: FP32},
        "cuDNN's attention in FP8 hands over tensors in BF16 or FP16",
        f"Use {PRECISION}=bf16, or leave {FP8_ATTENTION} out",
    ),
    Row(
        {POSITIONS: "rope"}, {"model.fp8_multi_head_attention": True},
        "changes nothing, as Transformer Engine rotates queries and keys in high precision",
        f"Leave it out: {FP8_ATTENTION}=True computes the products of attention in FP8",
    ),
    # --- how it runs ---------------------------------------------------------------------------
    Row(
        {}, {"model.compile": not_("off")},
        "Transformer Engine's layers are not compiled: they call its own kernels",
        f"Use model.compile=off, {NATIVE}",
    ),
    Row(
        {}, {"model.enable_cuda_graph": True},
        "the layers of Transformer Engine have not been shown to be right in a graph",
        LEAVE,
    ),
    Row(
        {PP: is_above(1)}, {"model.pipeline_schedule": ZERO_BUBBLE},
        "Transformer Engine's layers compute both gradients at once, and "
        "{model.pipeline_schedule} needs them one after the other",
        f"Use model.pipeline_schedule=1F1B, {NATIVE}",
    ),
    Row(
        {}, {CP: is_above(1)},
        "Transformer Engine's context parallelism needs cuDNN's or flash attention, which the "
        "kernels on a CPU do not have, so that no test here has shown it to be right",
        f"Use {CP}=1, {NATIVE}",
    ),
    Row(
        {LEVEL: LOW_PRECISION}, {"model.ub_tp_comm_overlap": True},
        "{model.ub_tp_comm_overlap} has not been shown to be right with states in low precision",
        "Leave it out, or leave model.optim.fp8_opt_level and the model.optim.*_dtype keys out",
    ),
)  # fmt: skip
"""The rows apply to `model.fp8_backend=te`, which they do not repeat."""


def findings(values: Values) -> Iterator[Finding]:
    """Yield what Transformer Engine's layers cannot do of these settings, whatever their backend.

    A row is skipped if a key that it reads is not in `values`.
    """
    yield from refusals(TABLE, values)
    version = values.get(VERSION)
    if version is None:
        return
    reason = why_not_on_cpu(version)
    needed = te_class(values.get(RECIPE, "")) if values.get("model.fp8") else None
    if reason is None and needed == NVFP4 and is_before(version, FIRST_WITH_NVFP4):
        reason = f"{needed} begins with {FIRST_WITH_NVFP4}"
    if reason is not None:
        yield Finding(VERSION, reason, f"Use {DEFAULT_VERSION}, or leave it out")
