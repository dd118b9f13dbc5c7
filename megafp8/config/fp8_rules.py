"""Which FP8 settings go with which recipe."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.problems import COMMAND_LINE
from megafp8.config.rules import Finding, Origins, Rules, Values
from megafp8.config.values import parse_modules
from megafp8.specs.precision import BLOCK, HIGH_PRECISION, RecipeName

rule = Rules()

TENSOR_CORE_MULTIPLE = 16
"""FP8 tensor cores take operands whose sizes are multiples of it."""

E4M3_RECIPES: tuple[RecipeName, ...] = ("rowwise", "rowwise_with_gw_hp", "blockwise")
"""These are E4M3 throughout: finer scales leave no need for E5M2's range."""

DELAYED_DETAILS = (
    "model.fp8_margin",
    "model.fp8_interval",
    "model.fp8_amax_history_len",
    "model.fp8_amax_compute_algo",
    "model.reduce_amax",
    "model.tp_only_amax_red",
)
"""What delayed scaling alone has."""

DEFAULTS = {
    "model.fp8_margin": 0,
    "model.fp8_interval": 1,
    "model.fp8_amax_history_len": 1024,
    "model.fp8_amax_compute_algo": "max",
    "model.reduce_amax": True,
    "model.tp_only_amax_red": False,
}

HEALTH_LIMITS = {
    "model.fp8_health_max_underflow": 0.5,
    "model.fp8_health_max_overflow": 0.01,
    "model.fp8_health_min_snr_db": 5.0,
}
"""Limits of what `model.fp8_health=full` measures, and their defaults."""

ONE_COPY_RECIPES: tuple[RecipeName, ...] = ("delayed", "tensorwise", "blockwise")
"""A weight's one quantization serves both of its products, so it may be kept alone."""


def recipes_in(values: Values) -> set[str]:
    """The recipes that some linear may run under."""
    rules = parse_modules(values.get("model.fp8_modules", [])) or ()
    chosen = {rule.precision for rule in rules} - {HIGH_PRECISION}
    return {values.get("model.fp8_recipe", "delayed"), *chosen}


def size_multiple(values: Values) -> int:
    """What the sizes of FP8 products must be multiples of; 1 if they are padded."""
    if "blockwise" in recipes_in(values):
        return BLOCK
    return 1 if values.get("model.pad_inner_dim") else TENSOR_CORE_MULTIPLE


@rule("model.fp8", "model.fp8_recipe", "model.fp8_modules", *DELAYED_DETAILS)
def _only_delayed_has_history(v: Values) -> Iterator[Finding]:
    if not v["model.fp8"] or "delayed" in recipes_in(v):
        return
    for key in DELAYED_DETAILS:
        if v[key] != DEFAULTS[key]:
            yield Finding(
                key,
                f"model.fp8_recipe={v['model.fp8_recipe']} takes scales from each tensor itself "
                "and has no such thing",
                f"Leave it out (it is then {DEFAULTS[key]}), or use model.fp8_recipe=delayed",
            )


@rule("model.fp8", "model.fp8_recipe", "model.fp8_modules", "model.fp8_power_2_scale")
def _delayed_scales_are_not_rounded(v: Values) -> Iterator[Finding]:
    if v["model.fp8"] and v["model.fp8_power_2_scale"] is not None and recipes_in(v) == {"delayed"}:
        yield Finding(
            "model.fp8_power_2_scale",
            "scales of model.fp8_recipe=delayed are used as they come",
            "Leave it out, or use model.fp8_recipe=tensorwise, rowwise or blockwise",
        )


@rule(
    "model.fp8",
    "model.fp8_params",
    "model.fp8_recipe",
    "model.fp8_modules",
    "model.override_linear_precision",
)
def _params_in_fp8_suffice(v: Values) -> Iterator[Finding]:
    if not (v["model.fp8"] and v["model.fp8_params"]):
        return
    two_copies = sorted(recipes_in(v) - set(ONE_COPY_RECIPES))
    if two_copies:
        yield Finding(
            "model.fp8_params",
            f"{two_copies[0]} quantizes a weight once for each of its two products, both times "
            "from high precision",
            f"Leave it out, or use one of {', '.join(ONE_COPY_RECIPES)}",
        )
    if any(v["model.override_linear_precision"][:2]):
        yield Finding(
            "model.fp8_params",
            "model.override_linear_precision keeps a product with the weight in high precision, "
            "and there would be no such weight",
            "Leave one of the two out",
        )


@rule("model.fp8", "model.fp8_params", "model.reduce_amax", "trainer.devices", "trainer.num_nodes")
def _replicas_share_scales(v: Values) -> Iterator[Finding]:
    ranks = v["trainer.devices"] * v["trainer.num_nodes"]
    if v["model.fp8"] and v["model.fp8_params"] and not v["model.reduce_amax"] and ranks > 1:
        yield Finding(
            "model.reduce_amax",
            f"with model.fp8_params=True each of {ranks} ranks would keep weights of its own",
            "Leave it out (True), or leave model.fp8_params out",
        )


@rule("model.fp8", "model.fp8_wgrad", "model.override_linear_precision", "model.fp8_recipe")
def _products_in_fp8(v: Values) -> Iterator[Finding]:
    if not v["model.fp8"]:
        return
    high = list(v["model.override_linear_precision"])
    high[2] = high[2] or not v["model.fp8_wgrad"]
    if v["model.fp8_recipe"] == "rowwise_with_gw_hp" and high[2]:
        key = "model.fp8_wgrad" if not v["model.fp8_wgrad"] else "model.override_linear_precision"
        yield Finding(
            key,
            "model.fp8_recipe=rowwise_with_gw_hp keeps weight gradients in high precision already",
            "Leave one of the two out",
        )
    elif all(high):
        yield Finding(
            "model.override_linear_precision",
            "leaves no product in FP8",
            "Leave one of the three in FP8, or set model.fp8=False",
        )


@rule(
    "model.fp8",
    "model.first_last_layers_bf16",
    "model.num_layers_at_start_in_bf16",
    "model.num_layers_at_end_in_bf16",
    "model.num_layers",
)
def _layers_stay_in_fp8(v: Values) -> Iterator[Finding]:
    if not v["model.fp8"]:
        return
    start, end = (v[f"model.num_layers_at_{place}_in_bf16"] for place in ("start", "end"))
    if not v["model.first_last_layers_bf16"]:
        for place, count in (("start", start), ("end", end)):
            if count > 1:
                yield Finding(
                    f"model.num_layers_at_{place}_in_bf16",
                    "means nothing without model.first_last_layers_bf16",
                    "Set model.first_last_layers_bf16=True, or leave it out",
                )
    elif start + end >= v["model.num_layers"]:
        yield Finding(
            "model.first_last_layers_bf16",
            f"keeps {start} layers at the start and {end} at the end out of FP8, of "
            f"{v['model.num_layers']}: none is left",
            "Give model.num_layers_at_start_in_bf16 and model.num_layers_at_end_in_bf16 that leave "
            "one, or set model.fp8=False",
        )
    elif start + end == 0:
        yield Finding(
            "model.first_last_layers_bf16",
            "both counts of layers are 0",
            "Leave it out, or give model.num_layers_at_start_in_bf16 or …_at_end_in_bf16",
        )


@rule("model.fp8", "model.fp8_recipe", "model.fp8_modules", "model.pad_inner_dim")
def _blocks_are_not_padded(v: Values) -> Iterator[Finding]:
    if v["model.fp8"] and v["model.pad_inner_dim"] and "blockwise" in recipes_in(v):
        yield Finding(
            "model.pad_inner_dim",
            f"blockwise scales need whole blocks of {BLOCK}",
            "Leave it out, or use another model.fp8_recipe",
        )


@rule("model.fp8", "model.fp8_health", *HEALTH_LIMITS)
def _limits_need_measures(v: Values) -> Iterator[Finding]:
    if not v["model.fp8"] or v["model.fp8_health"] == "full":
        return
    for key, default in HEALTH_LIMITS.items():
        if v[key] != default:
            yield Finding(
                key,
                f"model.fp8_health={v['model.fp8_health']} does not measure it",
                "Set model.fp8_health=full, or leave it out",
            )


@rule(
    "model.fp8",
    "model.pad_inner_dim",
    "model.fp8_recipe",
    "model.hidden_size",
    "model.ffn_hidden_size",
    "model.encoder_seq_length",
    "model.micro_batch_size",
    "model.tensor_model_parallel_size",
)
def _padding_pads(v: Values) -> Iterator[Finding]:
    if not (v["model.fp8"] and v["model.pad_inner_dim"]) or "blockwise" in recipes_in(v):
        return
    tp = v["model.tensor_model_parallel_size"]
    tokens = v["model.micro_batch_size"] * v["model.encoder_seq_length"]
    sizes = [v["model.hidden_size"], v["model.ffn_hidden_size"]]
    heads = [v.get("model.kv_channels"), v.get("model.num_query_groups")]
    if all(size % (TENSOR_CORE_MULTIPLE * tp) == 0 for size in sizes):
        if tokens % TENSOR_CORE_MULTIPLE == 0 and heads == [None, None]:
            yield Finding(
                "model.pad_inner_dim",
                f"every size is a multiple of {TENSOR_CORE_MULTIPLE} already",
                "Leave it out",
            )


def contradictions(v: Values, origins: Origins) -> Iterator[Finding]:
    """A format asked for on the command line that the recipe does not have."""
    if not v.get("model.fp8") or v.get("model.fp8_recipe") not in E4M3_RECIPES:
        return
    if v.get("model.fp8_hybrid") and origins.get("model.fp8_hybrid") == COMMAND_LINE:
        yield Finding(
            "model.fp8_hybrid",
            f"model.fp8_recipe={v['model.fp8_recipe']} is E4M3 throughout",
            "Leave it out, or use model.fp8_recipe=delayed or tensorwise",
        )
