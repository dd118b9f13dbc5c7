"""Convert models to and from the `config.json` of the families that transformers has.

A family writes the keys of a model, and reads a model of keys. What it writes is what it knows: a
key of a file that no family writes, and that is not among those without effect on the model, is
refused by its name. In this file `theirs` marks names of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from megafp8.config.keys import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCABULARY,
    MAX_WIDTH,
)
from megafp8.errors import CheckpointError
from megafp8.foreign import Fields, ForeignFileError, shown_value
from megafp8.specs import GPTSpec

_GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_new", "squared-relu": "relu2"}
_GATED_ACTIVATIONS = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu-tanh": "gelu_pytorch_tanh",
    "reglu": "relu",
}
_GPT2_ALIASES = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LLAMA3 = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
_YARN = {
    "factor": "yarn_rotary_scaling_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attention_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
_SCALINGS = {
    "default": {},
    "linear": {"factor": "seq_len_interpolation_factor"},
    "llama3": _LLAMA3,
    "yarn": _YARN,
}
"""By `rope_type`, our fields by transformers' names."""
_MAY_LACK = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None}

_WITHOUT_EFFECT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures
    attn_implementation bos_token_id chunk_size_feed_forward decoder_start_token_id dtype
    eos_token_id finetuning_task id2label initializer_range label2id model_type output_attentions
    output_hidden_states pad_token_id prefix pretraining_tp problem_type return_dict sep_token_id
    tie_word_embeddings tokenizer_class torch_dtype transformers_version use_bfloat16 use_cache
    vocab_size
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens task_specific_params temperature tf_legacy_loss top_k
    top_p torchscript typical_p
    """.split()
)
"""Keys of any family that say nothing about the function, and those that are read for all."""


class Family(Protocol):
    """Describe a family of models: its name in `model_type`, and its keys both ways."""

    @property
    def name(self) -> str:
        """Return the family in `model_type`."""
        ...

    @property
    def also_reads(self) -> frozenset[str]:
        """Return the keys that the family knows beside those that it writes."""
        ...

    def to_keys(self, spec: GPTSpec) -> dict[str, Any]:
        """Return the keys of a model. One that it cannot express is another when read back."""
        ...

    def from_keys(self, c: Fields, file: Path) -> GPTSpec:
        """Return the model of some keys; errors name the key."""
        ...


def read_family(family: Family, c: Fields, file: Path) -> GPTSpec:
    """Return the model that a family's keys describe; `file` is their file, for errors.

    Raises:
        ForeignFileError: A key is missing or has a value that no model has.
        CheckpointError: No model of ours is the same, or a key is unknown.
    """
    spec = family.from_keys(c, file)
    known = family.to_keys(spec).keys() | family.also_reads | _WITHOUT_EFFECT
    for key in sorted(c.tree.keys() - known):
        if c.tree[key] is not None:
            hint = (
                f"megafp8 does not know what it means for {family.name}. Remove it from a copy of "
                "config.json if the model computes the same without it"
            )
            if key == "quantization_config":
                hint = "Quantized weights are not read. Give the model as it was before"
            raise CheckpointError(file, f"{key} is {shown_value(c.tree[key])}", hint)
    return spec


class Gpt2:
    """Describes GPT-2."""

    name = "gpt2"
    also_reads = frozenset(
        """
        add_cross_attention attention_probs_dropout_prob gradient_checkpointing n_ctx
        reorder_and_upcast_attn
        scale_attn_by_inverse_layer_idx scale_attn_weights summary_activation
        summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
        """.split()
    )

    def to_keys(self, spec: GPTSpec) -> dict[str, Any]:
        """Return the keys of a GPT-2; see `Family`."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_positions": spec.max_position_embeddings,
            "n_embd": spec.hidden_size,
            "n_layer": spec.num_layers,
            "n_head": spec.num_attention_heads,
            "n_inner": spec.ffn_hidden_size,
            "activation_function": _GPT2_ACTIVATIONS.get(spec.activation, "gelu_new"),
            "layer_norm_epsilon": spec.layernorm_epsilon,
            "resid_pdrop": spec.hidden_dropout,
            "embd_pdrop": spec.hidden_dropout,
            "attn_pdrop": spec.attention_dropout,
        }

    def from_keys(self, c: Fields, file: Path) -> GPTSpec:
        """Return the model of a GPT-2's keys; see `Family`."""
        function = c.text("activation_function", "gelu_new")
        activations = {theirs: ours for ours, theirs in _GPT2_ACTIVATIONS.items()}
        activation = activations.get(_GPT2_ALIASES.get(function, function))
        _only(file, c, "activation_function", activation is not None)
        _only(file, c, "scale_attn_weights", c.flag("scale_attn_weights", True))
        _only(file, c, "add_cross_attention", not c.flag("add_cross_attention", False))
        inverse = "scale_attn_by_inverse_layer_idx"
        _only(file, c, inverse, not c.flag(inverse, False))
        hidden, heads = c.whole("n_embd", 1, MAX_WIDTH), c.whole("n_head", 1, MAX_HEADS)
        _divides(c, "n_head", heads, "n_embd", hidden)
        return GPTSpec(
            num_layers=c.whole("n_layer", 1, MAX_LAYERS),
            hidden_size=hidden,
            ffn_hidden_size=c.whole("n_inner", 1, MAX_WIDTH, None) or 4 * hidden,
            num_attention_heads=heads,
            max_position_embeddings=c.whole("n_positions", 1, MAX_POSITIONS),
            vocab_size=c.whole("vocab_size", 1, MAX_VOCABULARY),
            init_method_std=c.number("initializer_range", 0.02, above=0),
            use_scaled_init_method=True,
            hidden_dropout=c.number("resid_pdrop", 0.1, at_least=0, below=1),
            attention_dropout=c.number("attn_pdrop", 0.1, at_least=0, below=1),
            ffn_dropout=0.0,
            layernorm_epsilon=c.number("layer_norm_epsilon", 1e-5, above=0, at_most=1),
            activation=activation,  # type: ignore[arg-type]  # checked above
            share_embeddings_and_output_weights=c.flag("tie_word_embeddings", True),
        )


@dataclass(frozen=True)
class Decoder:
    """Describes a family with RMSNorm, gated MLPs, rotary positions and grouped queries.

    Attributes:
        name: The family in `model_type`.
        model_class: The class of transformers.
        biases: Which linears have biases: what two keys say, QKV's alone, or none.
        has_head_norms: Whether queries and keys are normalized.
        windows: Which layers may have a window: none, all, or those that keys name.
        defaults: What the family has where a key is missing that others leave out.
    """

    name: str
    model_class: str
    biases: Literal["by keys", "of qkv", "none"]
    has_head_norms: bool = False
    windows: Literal["none", "all layers", "by layer"] = "none"
    defaults: Mapping[str, int] = field(default_factory=dict)
    also_reads: frozenset[str] = frozenset(
        {"attention_bias", "layer_types", "max_window_layers", "mlp_bias"}
    )

    def to_keys(self, spec: GPTSpec) -> dict[str, Any]:
        """Return the keys of such a model; see `Family`."""
        rope = _rope_keys(spec)
        return {
            "architectures": [self.model_class],
            "model_type": self.name,
            "max_position_embeddings": spec.max_position_embeddings,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.ffn_hidden_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_attention_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_size,
            "hidden_act": _GATED_ACTIVATIONS.get(spec.activation, "silu"),
            "rms_norm_eps": spec.layernorm_epsilon,
            **({"attention_bias": spec.bias, "mlp_bias": spec.bias} if self._by_keys else {}),
            **self._window_keys(spec),
            "attention_dropout": spec.attention_dropout,
            "rope_parameters": rope,
            # transformers 4 reads these two, and transformers 5 `rope_parameters`
            "rope_theta": spec.rotary_base,
            "rope_scaling": _old_rope_scaling(rope),
        }

    @property
    def _by_keys(self) -> bool:
        return self.biases == "by keys"

    def from_keys(self, c: Fields, file: Path) -> GPTSpec:
        """Return the model of such keys; see `Family`."""
        activations = {theirs: ours for ours, theirs in _GATED_ACTIVATIONS.items()}
        activation = activations.get(c.text("hidden_act", "silu"))
        _only(file, c, "hidden_act", activation is not None)
        bias, mlp_bias = (c.flag(key, False) for key in ("attention_bias", "mlp_bias"))
        _only(file, c, "attention_bias", self._by_keys or not bias)
        _only(file, c, "mlp_bias", mlp_bias == bias)
        heads = c.whole("num_attention_heads", 1, MAX_HEADS)
        default_groups = self.defaults.get("num_key_value_heads")
        groups = c.whole("num_key_value_heads", 1, MAX_HEADS, default_groups) or heads
        _divides(c, "num_key_value_heads", groups, "num_attention_heads", heads)
        hidden = c.whole("hidden_size", 1, MAX_WIDTH)
        width = c.whole("head_dim", 1, MAX_WIDTH, self.defaults.get("head_dim"))
        if width is None:
            _divides(c, "num_attention_heads", heads, "hidden_size", hidden)
        return GPTSpec(
            num_layers=c.whole("num_hidden_layers", 1, MAX_LAYERS),
            hidden_size=hidden,
            ffn_hidden_size=c.whole("intermediate_size", 1, MAX_WIDTH),
            num_attention_heads=heads,
            max_position_embeddings=c.whole("max_position_embeddings", 1, MAX_POSITIONS),
            vocab_size=c.whole("vocab_size", 1, MAX_VOCABULARY),
            init_method_std=c.number("initializer_range", 0.02, above=0),
            use_scaled_init_method=True,
            hidden_dropout=0.0,
            attention_dropout=c.number("attention_dropout", 0.0, at_least=0, below=1),
            ffn_dropout=0.0,
            layernorm_epsilon=c.number("rms_norm_eps", 1e-6, above=0, at_most=1),
            kv_channels=width or hidden // heads,
            num_query_groups=groups,
            normalization="rmsnorm",
            activation=activation,  # type: ignore[arg-type]  # checked above
            position_embedding_type="rope",
            **_rope_fields(c, file),
            bias=bias,
            add_qkv_bias=self.biases == "of qkv",
            qk_layernorm=self.has_head_norms,
            share_embeddings_and_output_weights=c.flag("tie_word_embeddings", False),
            **self._window_fields(c, file),
        )

    def _window_keys(self, spec: GPTSpec) -> dict[str, Any]:
        """Return the keys of windows, in which transformers counts the own token too."""
        windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
        with_own_token = [window + 1 for window in windows if window is not None]
        size = with_own_token[0] if with_own_token else None
        if self.windows == "none":
            return {}
        if self.windows == "all layers":
            return {"sliding_window": size if len(with_own_token) == len(windows) else None}
        if size is None:
            return {"use_sliding_window": False, "sliding_window": None}
        return {
            "use_sliding_window": True,
            "sliding_window": size,
            # transformers from 4.54 on reads the kinds of layers, and earlier ones the number
            "max_window_layers": _first_with_window(windows),
            "layer_types": [_FULL if window is None else _SLIDING for window in windows],
        }

    def _window_fields(self, c: Fields, file: Path) -> dict[str, Any]:
        """Return the fields of windows; an error names a key that asks for what none has here."""
        layers = c.whole("num_hidden_layers", 1, MAX_LAYERS)
        kinds = c.tree.get("layer_types")
        known = {_FULL, _SLIDING} if self.windows == "by layer" else {_FULL}
        fits = kinds is None or (
            isinstance(kinds, list)
            and len(kinds) == layers
            and all(isinstance(kind, str) and kind in known for kind in kinds)
        )
        _only(file, c, "layer_types", fits)
        if self.windows == "none" or (
            self.windows == "by layer" and not c.flag("use_sliding_window", False)
        ):
            _only(file, c, "layer_types", kinds is None or _SLIDING not in kinds)
            return {}
        if "sliding_window" not in c.tree:
            raise ForeignFileError("sliding_window is missing")
        size = c.whole("sliding_window", 1, MAX_POSITIONS, None)
        if self.windows == "by layer":
            if kinds is None:
                first = c.whole("max_window_layers", 0, MAX_LAYERS)
                kinds = [_SLIDING if layer >= first else _FULL for layer in range(layers)]
            if _SLIDING not in kinds:
                return {}
            _only(file, c, "sliding_window", size is not None)
        elif size is not None:  # transformers ignores the kinds of layers in such a family
            _only(file, c, "layer_types", kinds is None)
        if size is None:
            return {}
        fields: dict[str, Any] = {"window_size": (size - 1, 0)}
        if kinds is not None and _FULL in kinds:
            fields["window_attn_skip_freq"] = tuple(int(kind == _SLIDING) for kind in kinds)
        return fields


def _first_with_window(windows: Sequence[int | None]) -> int:
    """Return the first layer with a window."""
    return next(layer for layer, window in enumerate(windows) if window is not None)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Gpt2(),
        Decoder("llama", "LlamaForCausalLM", "by keys"),
        Decoder(
            "qwen2",
            "Qwen2ForCausalLM",
            "of qkv",
            windows="by layer",
            defaults={"num_key_value_heads": 32},
        ),
        Decoder(
            "qwen3",
            "Qwen3ForCausalLM",
            "none",
            has_head_norms=True,
            windows="by layer",
            defaults={"num_key_value_heads": 32, "head_dim": 128},
        ),
        Decoder(
            "mistral",
            "MistralForCausalLM",
            "none",
            windows="all layers",
            defaults={"num_key_value_heads": 8},
        ),
    )
}
"""The families by their names. A model is exported as the first one that can express it."""


def _rope_keys(spec: GPTSpec) -> dict[str, Any]:
    """Return `rope_parameters`."""
    kind = "default"
    if spec.seq_len_interpolation_factor is not None:
        kind = "linear"
    elif spec.scale_positional_embedding:
        kind = "llama3"
    elif spec.yarn_rotary_scaling_factor is not None:
        kind = "yarn"
    values = {theirs: getattr(spec, ours) for theirs, ours in _SCALINGS[kind].items()}
    set_values = {key: value for key, value in values.items() if value is not None}
    if "factor" in set_values:
        set_values["factor"] = float(set_values["factor"])
    return {"rope_type": kind, "rope_theta": spec.rotary_base, **set_values}


def _old_rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    """Return `rope_parameters` as transformers 4 reads them; its first scaling has another name."""
    if rope["rope_type"] == "default":
        return None
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if rope["rope_type"] == "linear":
        scaling["type"] = scaling.pop("rope_type")
    return scaling


def _rope_fields(c: Fields, file: Path) -> dict[str, Any]:
    """Return the fields of rotary positions, of a `config.json` of transformers 4 or 5."""
    rope = Fields({**c.section("rope_scaling").tree, **c.section("rope_parameters").tree})
    kind = rope.tree.get("rope_type", rope.tree.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALINGS:
        hint = f"Models with rope_type {', '.join(_SCALINGS)} can be imported"
        raise CheckpointError(file, f"rope_type is {shown_value(kind)}", hint)
    names = _SCALINGS[kind]
    theta = rope.number("rope_theta", c.number("rope_theta", 10000.0, above=1), above=1)
    fields: dict[str, Any] = {"rotary_base": theta}
    for theirs, ours in names.items():
        if theirs == "original_max_position_embeddings":
            fields[ours] = rope.whole(theirs, 1, MAX_POSITIONS)
        else:
            default = (_MAY_LACK[theirs],) if theirs in _MAY_LACK else ()
            bound = {"at_least": 1.0} if theirs == "factor" else {"above": 0.0}
            fields[ours] = rope.number(theirs, *default, **bound)
    if kind == "llama3":
        fields["scale_positional_embedding"] = True
    read = {"rope_type", "type", "rope_theta", *names}
    if kind == "yarn":
        read |= {"truncate", "mscale", "mscale_all_dim"}
        _only(file, rope, "truncate", rope.flag("truncate", True))
        if fields["yarn_attention_factor"] is None:
            fields["yarn_attention_factor"] = _attention_factor(rope)
    for key in sorted(rope.tree.keys() - read):
        _only(file, rope, key, rope.tree[key] is None)
    return fields


def _attention_factor(rope: Fields) -> float | None:
    """Return YaRN's factor by `mscale` and `mscale_all_dim`; None where one of them is missing."""
    factor = rope.number("factor")
    scales = [rope.number(key, 0.0, at_least=0) for key in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return None
    above, below = (1.0 if factor <= 1 else 0.1 * x * math.log(factor) + 1 for x in scales)
    return float(above / below)


def _divides(c: Fields, key: str, small: int, of: str, large: int) -> None:
    if large % small:
        raise ForeignFileError(
            f"{key} is {shown_value(c.tree.get(key))}, which does not divide {of}"
        )


def _only(file: Path, config: Fields, key: str, fits: bool) -> None:
    if not fits:
        hint = "megafp8 has no such model; import one without this setting"
        raise CheckpointError(file, f"{key} is {shown_value(config.tree.get(key))}", hint)
