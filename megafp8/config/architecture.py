"""Convert between the keys under `model` and the `GPTSpec` of the model's shape."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from megafp8.config.keys import Key, Values, keys_of
from megafp8.config.schema import Model, all_keys, spec_fields
from megafp8.config.schema.experts import COEFF, LOSS, NUM_EXPERTS, Experts
from megafp8.config.schema.model import Architecture
from megafp8.config.values import GELUS, layers_with_experts, spell_activation
from megafp8.specs.model import Activation, GPTSpec, RecomputeSpec
from megafp8.specs.moe import MoESpec

TANH = "-tanh"
"""How the name of an activation ends whose GELU is the tanh form."""

VOCAB_SIZE_UNKNOWN = 0
"""The vocabulary's size in `RunSpec.model` before the tokenizer is loaded."""


@cache
def _shape_keys() -> dict[str, Key]:
    return keys_of(Architecture) | keys_of(Experts)


@cache
def function_keys() -> tuple[str, ...]:
    """Return the keys under `model` that define the function which weights compute.

    Each is marked in the schema. Models whose values of them are equal can exchange weights.
    """
    return tuple(name for name, key in _shape_keys().items() if key.defines_function)


def gpt_spec(values: Values, vocab_size: int = VOCAB_SIZE_UNKNOWN) -> GPTSpec:
    """Return the shape that the keys below `model` of a checked configuration ask for."""
    return GPTSpec(
        **spec_fields("model", values),
        activation=_activation(values["model.activation"], values["model.openai_gelu"]),
        recompute=_recompute(values),
        moe=_experts(values),
        vocab_size=vocab_size,
    )


def spec_of_tree(model: Mapping[str, Any], vocab_size: int) -> GPTSpec:
    """Return the shape in the `model` section of a run's resolved settings.

    A checkpoint records these settings. Keys that the section lacks, since an earlier version wrote
    it, have their defaults.
    """
    known = {key: model[key] for key in _shape_keys() if key in model}
    merged = OmegaConf.merge(OmegaConf.structured(Model), known)
    typed: Any = OmegaConf.to_container(merged, throw_on_missing=False)
    values = {path: key.default for path, key in all_keys().items()}
    return gpt_spec(values | {f"model.{key}": typed[key] for key in known}, vocab_size)


def tree_of_spec(spec: GPTSpec) -> dict[str, Any]:
    """Return the function of a model as keys and values below `model`, for `spec_of_tree`."""
    activation = spec.activation.removesuffix(TANH)
    gelu = {"activation": activation, "openai_gelu": spec.activation != activation}
    experts = _tree_of_experts(spec.moe)
    given = {n: getattr(spec, n) for n in function_keys() if n not in gelu.keys() | experts.keys()}
    tree = {name: list(v) if isinstance(v, tuple) else v for name, v in given.items()}
    return gelu | tree | experts


def _tree_of_experts(moe: MoESpec | None) -> dict[str, Any]:
    """Return the function of experts and router as keys below `model`, with all values filled."""
    keys = {name: key for name, key in keys_of(Experts).items() if key.defines_function}
    if moe is None:
        return {name: key.default for name, key in keys.items()}
    of_fields = {name: (key.spec or "").rpartition(".")[2] for name, key in keys.items()}
    return {name: getattr(moe, field) for name, field in of_fields.items() if field} | {
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_layer_freq": [int(has) for has in moe.layers],
        "moe_router_topk_scaling_factor": None if moe.scaling_factor == 1 else moe.scaling_factor,
    }


def function_differences(asked: GPTSpec, stored: GPTSpec) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which the functions of two models differ, each with both values.

    The result is empty if the functions are equal. Sizes that are null because they follow from
    other keys are compared by their values, and windows layer by layer.
    """
    first, second = _filled(asked), _filled(stored)
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}


def _filled(spec: GPTSpec) -> dict[str, Any]:
    tree = tree_of_spec(spec)
    if spec.window_size is not None:
        layers = [int(spec.window_of(layer) is not None) for layer in range(spec.num_layers)]
        tree["window_attn_skip_freq"] = None if all(layers) else layers
    return tree | {"kv_channels": spec.head_size, "num_query_groups": spec.num_kv_heads}


def _activation(name: str, openai_gelu: bool) -> Activation:
    plain = spell_activation(name)
    has_tanh_form = openai_gelu and plain in GELUS
    return f"{plain}{TANH}" if has_tanh_form else plain  # type: ignore[return-value]  # validated


def _experts(values: Values) -> MoESpec | None:
    if values[NUM_EXPERTS] is None:
        return None
    coeff = values[COEFF] or 0.0
    return MoESpec(
        **spec_fields("model.moe", values),
        ffn_hidden_size=values["model.moe_ffn_hidden_size"] or values["model.ffn_hidden_size"],
        layers=layers_with_experts(values["model.moe_layer_freq"], values["model.num_layers"]),
        scaling_factor=values["model.moe_router_topk_scaling_factor"] or 1.0,
        router_loss=values[LOSS] if coeff else "none",
        router_loss_coeff=coeff,
        z_loss_coeff=values["model.moe_z_loss_coeff"] or 0.0,
    )


def _recompute(values: Values) -> RecomputeSpec | None:
    granularity = values["model.activations_checkpoint_granularity"]
    if granularity is None:
        return None
    return RecomputeSpec(
        granularity=granularity,
        method=values["model.activations_checkpoint_method"] or "uniform",
        num_layers=values["model.activations_checkpoint_num_layers"] or 1,
    )
