"""Turn the keys of `trainer` and `model` that concern precision into the `PrecisionSpec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megafp8.config.schema import Model, Trainer
from megafp8.config.values import PRECISIONS, layers_in_bf16, parse_modules, split_accumulator
from megafp8.specs import Fp8Recipe, LossScaleSpec, PrecisionSpec
from megafp8.specs.precision import GEMMS, AttentionInFp8, AutoBackend, ModuleRule
from megafp8.specs.recipes import HIGH_PRECISION, find_recipe, switched_off
from megafp8.specs.traits import GemmName

_PARTS = {
    "fp4_disable_rht": "rht",
    "fp4_disable_stochastic_rounding": "sr",
    "fp4_disable_2d_quantization": "2d",
}
"""The keys that switch parts of a recipe off, and the recipe's names of these parts."""


def precision_spec(trainer: Trainer, model: Model, auto: AutoBackend | None) -> PrecisionSpec:
    """Return the precision that two sections of a checked configuration ask for.

    Args:
        trainer: The section `trainer`.
        model: The section `model`.
        auto: What the settings say of Transformer Engine where no backend was named.
    """
    compute = PRECISIONS[trainer.precision]
    scale = LossScaleSpec(
        init_scale=float(model.native_amp_init_scale),
        growth_interval=model.native_amp_growth_interval,
        hysteresis=model.hysteresis,
    )
    return PrecisionSpec(
        compute=compute,
        te_version=model.te_version,
        user_buffers=model.ub_tp_comm_overlap,
        attention_in_fp8=_attention_in_fp8(model),
        fp8=_fp8(model),
        half_weights=model.megatron_amp_O2,
        loss_scale=scale if compute == "fp16" else None,
        backend="native" if model.fp8_backend == "auto" else model.fp8_backend,  # type: ignore[arg-type]  # validated
        auto=auto,
    )


def _attention_in_fp8(model: Model) -> AttentionInFp8:
    if not model.fp8_dot_product_attention:
        return "none"
    return "whole" if model.fp8_multi_head_attention else "core"


def _fp8(model: Model) -> Fp8Recipe | None:
    if not model.fp8:
        return None
    off = tuple(part for key, part in _PARTS.items() if getattr(model, key))
    name = switched_off(model.fp8_recipe, off)
    traits = find_recipe(name).traits
    power_2 = model.fp8_power_2_scale
    chosen = ("fp8_backend", "fp8_recipe", "fp8_split_accumulator")
    split = split_accumulator({f"model.{key}": getattr(model, key) for key in chosen})
    precise = dict(zip(GEMMS, split, strict=True))
    return Fp8Recipe(
        name=name,
        forward_format="e4m3",
        backward_format="e4m3" if model.fp8_e4m3 or traits.is_e4m3 else "e5m2",
        margin=model.fp8_margin,
        interval=model.fp8_interval,
        amax_history_len=model.fp8_amax_history_len,
        amax_compute_algo=model.fp8_amax_compute_algo,  # type: ignore[arg-type]  # validated
        reduce_amax=model.reduce_amax,
        power_2_scale=traits.power_2_default if power_2 is None else power_2,
        params_in_fp8=model.fp8_params,
        high_precision_gemms=_high_precision_gemms(model),
        fast_accumulation=frozenset(gemm for gemm in GEMMS if not precise[gemm]),
        fp8_in_evaluation=model.use_autocast_during_eval,
        pad_inner_dim=model.pad_inner_dim,
        modules=(*_modules(model, off), *_layers_in_bf16(model)),
    )


def _modules(model: Model, off: tuple[str, ...]) -> Iterator[ModuleRule]:
    """Yield the rules of `fp8_modules`, whose recipes have parts switched off like the main one."""
    for rule in parse_modules(model.fp8_modules) or ():
        yield replace(rule, precision=switched_off(rule.precision, off))


def _high_precision_gemms(model: Model) -> frozenset[GemmName]:
    overridden = zip(GEMMS, model.override_linear_precision, strict=True)
    high = {gemm for gemm, is_high in overridden if is_high}
    return frozenset(high if model.fp8_wgrad else {*high, "grad_weight"})


def _layers_in_bf16(model: Model) -> Iterator[ModuleRule]:
    """Yield `first_last_layers_bf16` as rules over the names of linears."""
    kept = layers_in_bf16(
        model.num_layers,
        model.first_last_layers_bf16,
        model.num_layers_at_start_in_bf16,
        model.num_layers_at_end_in_bf16,
    )
    for layer in kept:
        yield ModuleRule(f"layers.{layer}.*", HIGH_PRECISION, "model.first_last_layers_bf16")
