"""What `model.fp8_backend` may be asked for beside the other keys.

What depends on the machine or on a package's version is checked where the run begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megafp8.config.fp8_rules import recipes_in
from megafp8.config.problems import SettingError
from megafp8.config.rules import Finding, Rules, Values
from megafp8.config.values import PRECISIONS
from megafp8.specs.precision import BackendName

rule = Rules()

KEY = "model.fp8_backend"
NATIVE = "model.fp8_backend=native is our own engine, on any device"
TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TE_RECIPES = ("delayed", "tensorwise", "blockwise")


def backend(asked: str) -> BackendName:
    """`auto` is our own engine: it runs every recipe on every device."""
    names: dict[str, BackendName] = {"te": "te", "torchao": "torchao"}
    return names.get(asked, "native")


def refuse_te_on_cpu(values: Mapping[str, Any]) -> None:
    """`trainer.accelerator` is resolved."""
    if values[KEY] == "te" and values["trainer.accelerator"] == "cpu":
        reason = "Transformer Engine runs on NVIDIA GPUs alone, and this run is on a CPU"
        raise SettingError(KEY, "te", reason, NATIVE)


@rule(KEY, "model.fp8")
def _torchao_needs_fp8(v: Values) -> Iterator[Finding]:
    if v[KEY] == "torchao" and not v["model.fp8"]:
        yield Finding(KEY, "torchao runs FP8 alone", f"Set model.fp8=True. {NATIVE}")


@rule(KEY, "model.transformer_engine")
def _te_is_transformer_engine(v: Values) -> Iterator[Finding]:
    if v[KEY] == "te" and not v["model.transformer_engine"]:
        yield Finding(
            KEY,
            "model.transformer_engine=False says that it is not wanted",
            f"Set model.transformer_engine=True. {NATIVE}",
        )


@rule(KEY, "model.fp8", "model.fp8_recipe", "model.fp8_modules")
def _recipe_is_there(v: Values) -> Iterator[Finding]:
    known = {"te": TE_RECIPES, "torchao": TORCHAO_RECIPES}.get(v[KEY])
    if not v["model.fp8"] or known is None:
        return
    foreign = sorted(recipes_in(v) - set(known))
    if foreign:
        yield Finding(
            "model.fp8_recipe" if foreign == [v["model.fp8_recipe"]] else "model.fp8_modules",
            f"model.fp8_backend={v[KEY]} has no {foreign[0]} recipe",
            f"It has {', '.join(known)}. {NATIVE}",
        )


@rule(KEY, "model.fp8", "model.fp8_interval")
def _te_has_no_interval(v: Values) -> Iterator[Finding]:
    if v[KEY] == "te" and v["model.fp8"] and v["model.fp8_interval"] != 1:
        yield Finding(
            "model.fp8_interval",
            "Transformer Engine makes scales anew at every update",
            f"Use model.fp8_interval=1. {NATIVE}",
        )


@rule(KEY, "model.fp8", "model.fp8_wgrad", "model.override_linear_precision")
def _te_runs_all_products_in_fp8(v: Values) -> Iterator[Finding]:
    """Later versions take `backward_override` in their recipes; LayerNormMLP asserts that it is
    None."""
    high = [v["model.override_linear_precision"], not v["model.fp8_wgrad"]]
    if v[KEY] == "te" and v["model.fp8"] and (any(high[0]) or high[1]):
        yield Finding(
            "model.fp8_wgrad" if high[1] else "model.override_linear_precision",
            "Transformer Engine's layers run all products in FP8: they would ignore it, or "
            "refuse it at their first forward",
            f"Leave it out. {NATIVE}",
        )


@rule(KEY, "model.data.reset_attention_mask")
def _te_does_not_tell_documents_apart(v: Values) -> Iterator[Finding]:
    key = "model.data.reset_attention_mask"
    if v[KEY] == "te" and v[key]:
        yield Finding(
            key,
            "Transformer Engine's layers attend over whole samples, across the ends of documents",
            f"Leave it out. {NATIVE}",
        )


@rule(KEY, "model.fp8", "model.pad_inner_dim")
def _te_does_not_pad(v: Values) -> Iterator[Finding]:
    if v[KEY] == "te" and v["model.fp8"] and v["model.pad_inner_dim"]:
        yield Finding(
            "model.pad_inner_dim",
            "Transformer Engine's layers do not pad",
            f"Leave it out, or use model.fp8_backend=torchao. {NATIVE}",
        )


@rule(KEY, "model.ffn_dropout")
def _te_has_no_mlp_dropout(v: Values) -> Iterator[Finding]:
    if v[KEY] == "te" and v["model.ffn_dropout"]:
        yield Finding(
            "model.ffn_dropout",
            "Transformer Engine's layer has no dropout inside the MLP",
            f"Use model.ffn_dropout=0. {NATIVE}",
        )


@rule(KEY, "model.fp8", "model.fp8_params")
def _torchao_has_no_fp8_params(v: Values) -> Iterator[Finding]:
    if v[KEY] == "torchao" and v["model.fp8"] and v["model.fp8_params"]:
        yield Finding(
            "model.fp8_params",
            "torchao keeps weights in high precision",
            f"Leave it out. {NATIVE}",
        )


@rule(KEY, "model.tensor_model_parallel_size")
def _torchao_is_not_tensor_parallel(v: Values) -> Iterator[Finding]:
    tp = v["model.tensor_model_parallel_size"]
    if v[KEY] == "torchao" and tp > 1:
        yield Finding(
            "model.tensor_model_parallel_size",
            "torchao's linears are not tensor-parallel here",
            f"Use model.tensor_model_parallel_size=1. {NATIVE}",
        )


@rule(KEY, "model.fp8", "model.fp8_recipe", "model.fp8_health")
def _te_shows_scales_alone(v: Values) -> Iterator[Finding]:
    """What lasts of its casts: the amaxes and scales of delayed scaling."""
    asked, recipe = v["model.fp8_health"], v["model.fp8_recipe"]
    if v[KEY] != "te" or not v["model.fp8"] or asked in ("auto", "off"):
        return
    if asked == "full" or recipe != "delayed":
        shown = "auto or off" if recipe != "delayed" else "scales"
        yield Finding(
            "model.fp8_health",
            f"Transformer Engine does not show its casts, and keeps amaxes and scales of "
            f"model.fp8_recipe=delayed alone (here {recipe})",
            f"Use model.fp8_health={shown}. {NATIVE}",
        )


@rule(KEY, "model.fp8", "model.compile", "model.fp8_health")
def _compiled_torchao_shows_nothing(v: Values) -> Iterator[Finding]:
    is_compiled = v[KEY] == "torchao" and v["model.fp8"] and v["model.compile"] != "off"
    if is_compiled and v["model.fp8_health"] not in ("auto", "off"):
        yield Finding(
            "model.fp8_health",
            "torchao's casts are inside the compiled graph, where they are not seen",
            "Use model.fp8_health=auto or off, or leave model.compile out",
        )


@rule(
    KEY,
    "model.enable_fsdp_float8_all_gather",
    "model.fsdp",
    "model.fp8",
    "model.fp8_recipe",
    "model.fp8_modules",
    "trainer.precision",
)
def _torchaos_weights_cross_in_fp8(v: Values) -> Iterator[Finding]:
    key = "model.enable_fsdp_float8_all_gather"
    if not v[key]:
        return
    if v[KEY] != "torchao":
        other = "model.fp8_backend=native gathers FP8 with model.fp8_params=True"
        yield Finding(key, f"is torchao's, and {KEY}={v[KEY]}", f"Leave it out; {other}")
    elif not v["model.fsdp"]:
        yield Finding(key, "without model.fsdp=True nothing is gathered", "Leave it out")
    elif recipes_in(v) != {"tensorwise"}:
        found = " and ".join(sorted(recipes_in(v)))
        yield Finding(
            key,
            f"one scale serves a weight that is put together from parts; {found} has several",
            "Use model.fp8_recipe=tensorwise, or leave it out",
        )
    elif PRECISIONS[v["trainer.precision"]] == "fp16":
        yield Finding(
            key,
            "weights that have crossed in FP8 do not all fit into FP16's range",
            "Use trainer.precision=bf16, or leave it out",
        )
