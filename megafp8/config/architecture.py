"""Convert between the keys under `model` and the `GPTSpec` of the model's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from megafp8.config.schema import Model
from megafp8.config.values import spell_activation
from megafp8.specs.model import Activation, GPTSpec, RecomputeSpec

VOCAB_SIZE_UNKNOWN = 0
"""The vocabulary's size in `RunSpec.model` before the tokenizer is loaded."""

SHAPE_KEYS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "kv_channels",
    "num_query_groups",
    "normalization",
    "layernorm_epsilon",
    "activation",
    "openai_gelu",
    "position_embedding_type",
    "rotary_percentage",
    "rotary_base",
    "seq_len_interpolation_factor",
    "bias",
    "share_embeddings_and_output_weights",
    "transformer_block_type",
)
"""The keys under `model` that define the function which the weights compute."""

_OTHER_KEYS = (
    "init_method_std",
    "use_scaled_init_method",
    "hidden_dropout",
    "attention_dropout",
    "ffn_dropout",
    "apply_query_key_layer_scaling",
    "fp32_residual_connection",
    "layernorm_zero_centered_gamma",
)


def gpt_spec(model: Model, vocab_size: int = VOCAB_SIZE_UNKNOWN) -> GPTSpec:
    """Return the shape that the `model` section of a checked configuration asks for."""
    return GPTSpec(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        max_position_embeddings=model.max_position_embeddings,
        vocab_size=vocab_size,
        init_method_std=model.init_method_std,
        use_scaled_init_method=model.use_scaled_init_method,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        ffn_dropout=model.ffn_dropout,
        layernorm_epsilon=model.layernorm_epsilon,
        kv_channels=model.kv_channels,
        num_query_groups=model.num_query_groups,
        normalization=model.normalization,  # type: ignore[arg-type]  # validated
        zero_centered_gamma=model.layernorm_zero_centered_gamma,
        activation=_activation(model.activation, model.openai_gelu),
        position_embedding_type=model.position_embedding_type,  # type: ignore[arg-type]
        rotary_percentage=model.rotary_percentage,
        rotary_base=model.rotary_base,
        seq_len_interpolation_factor=model.seq_len_interpolation_factor,
        bias=model.bias,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        transformer_block_type=model.transformer_block_type,  # type: ignore[arg-type]
        apply_query_key_layer_scaling=model.apply_query_key_layer_scaling,
        fp32_residual_connection=model.fp32_residual_connection,
        recompute=_recompute(model),
    )


def spec_of_tree(model: Mapping[str, Any], vocab_size: int) -> GPTSpec:
    """Return the shape in the `model` section of a run's resolved settings.

    A checkpoint records these settings. Keys that the section lacks, since an earlier version wrote
    it, have their defaults.
    """
    known = {key: model[key] for key in (*SHAPE_KEYS, *_OTHER_KEYS) if key in model}
    typed: Any = OmegaConf.merge(OmegaConf.structured(Model), known)
    return gpt_spec(Model(**{key: typed[key] for key in known}), vocab_size)


def tree_of_spec(spec: GPTSpec) -> dict[str, Any]:
    """Return the shape as keys and values below `model`, which `spec_of_tree` reads."""
    tree: dict[str, Any] = {
        key: getattr(spec, key) for key in SHAPE_KEYS if key not in ("activation", "openai_gelu")
    }
    tree |= {"activation": spec.activation.removesuffix("-tanh")}
    return tree | {"openai_gelu": spec.activation == "gelu-tanh"}


def shape_differences(asked: GPTSpec, stored: GPTSpec) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two models' architectures differ, each with both values.

    The result is empty if the architectures are equal. Sizes that are null because they follow
    from other keys are compared by their values.
    """
    first, second = _filled(asked), _filled(stored)
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}


def _filled(spec: GPTSpec) -> dict[str, Any]:
    tree = tree_of_spec(spec)
    return tree | {"kv_channels": spec.head_size, "num_query_groups": spec.num_kv_heads}


def _activation(name: str, openai_gelu: bool) -> Activation:
    plain = spell_activation(name)
    return "gelu-tanh" if openai_gelu else plain  # type: ignore[return-value]  # validated


def _recompute(model: Model) -> RecomputeSpec | None:
    granularity = model.activations_checkpoint_granularity
    if granularity is None:
        return None
    return RecomputeSpec(
        granularity=granularity,  # type: ignore[arg-type]  # validated
        method=model.activations_checkpoint_method or "uniform",  # type: ignore[arg-type]
        num_layers=model.activations_checkpoint_num_layers or 1,
    )
