"""Convert models to and from the `config.json` of the families that transformers has.

A family writes the keys of a model, and reads a model of keys. What it writes is what it knows: a
key of a file that no family writes, and that is not among those without effect on the model, is
refused by its name. In this file `theirs` marks names of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megafp8.checkpoint.shared_keys import (
    THETA,
    changes_nothing,
    only,
    rope_fields,
    rope_scaling,
    rope_type,
    same,
)
from megafp8.config.keys import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCABULARY,
    MAX_WIDTH,
)
from megafp8.errors import CheckpointError
from megafp8.foreign import Fields, ForeignFileError, shown_value
from megafp8.specs import GPTSpec
from megafp8.specs.moe import MoESpec

_GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_new", "squared-relu": "relu2"}
_GATED_ACTIVATIONS = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu-tanh": "gelu_pytorch_tanh",
    "reglu": "relu",
}
_GPT2_ALIASES = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}

_FULL, _SLIDING = "full_attention", "sliding_attention"
_WITHOUT_EFFECT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures
    attn_implementation bos_token_id chunk_size_feed_forward decoder_start_token_id dtype
    eos_token_id finetuning_task id2label initializer_range label2id model_type output_attentions
    output_hidden_states pad_token_id prefix pretraining_tp problem_type return_dict sep_token_id
    tie_word_embeddings tokenizer_class torch_dtype transformers_version use_bfloat16 use_cache
    vocab_size
    _flash_attn_2_enabled _num_labels gradient_checkpointing max_sequence_length num_labels
    output_past predict_special_tokens transformers.js_config unsloth_fixed unsloth_version
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens task_specific_params temperature tf_legacy_loss top_k
    top_p torchscript typical_p
    """.split()
)
"""Keys of any family that say nothing about the function, and those that are read for all."""

_NULL_IS_NONE = ("is_causal", "tie_word_embeddings", "initializer_range", "scale_attn_weights")
"""Keys that a family need not write, and whose null is false to transformers 4 or an error."""

_NULL_IS_A_VALUE = frozenset(
    """
    architectures attention_bias attention_dropout head_dim layer_types max_window_layers mlp_bias
    mlp_only_layers n_inner num_key_value_heads rope_scaling sliding_window use_sliding_window
    """.split()
)
"""The keys that a family writes and that may be null, which stands for what follows from others."""


def read_family(family: Family, c: Fields, file: Path) -> GPTSpec:
    """Return the model that a family's keys describe; `file` is their file, for errors.

    Raises:
        ForeignFileError: A key is missing or has a value that no model has.
        CheckpointError: No model of ours is the same, or a key is unknown.
    """
    spec = family.from_keys(c, file)
    keys = family.to_keys(spec)
    for key in (*_NULL_IS_NONE, *sorted(keys)):
        if key in c.tree and c.tree[key] is None and key not in _NULL_IS_A_VALUE:
            raise ForeignFileError(f"{key} is null")
    unknown = [
        f"{key} is {shown_value(value)}"
        for key, value in sorted(c.tree.items())
        if value is not None
        and key not in keys.keys() | family.also_reads | _WITHOUT_EFFECT
        and not (
            same(value, keys.get(family.aliases[key]))
            if key in family.aliases
            else changes_nothing(key, value)
        )
    ]
    if unknown:
        hint = (
            f"megafp8 does not know what that means for {family.name}. Remove it from a copy of "
            "config.json if the model computes the same without it"
        )
        if c.tree.get("auto_map") is not None:
            hint = "The code that auto_map names is never run. " + hint
        if c.tree.get("quantization_config") is not None:
            hint = "Quantized weights are not read. Give the model as it was before"
        raise CheckpointError(file, "; ".join(unknown), hint)
    return spec


class Gpt2:
    """Describe GPT-2."""

    name = "gpt2"
    also_reads = frozenset(
        """
        add_cross_attention attention_probs_dropout_prob n_ctx reorder_and_upcast_attn
        scale_attn_by_inverse_layer_idx scale_attn_weights summary_activation
        summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
        """.split()
    )
    aliases: Mapping[str, str] = {
        "hidden_size": "n_embd",
        "layer_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

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
        only(file, c, "activation_function", activation is not None)
        only(file, c, "scale_attn_weights", c.flag("scale_attn_weights", True))
        only(file, c, "add_cross_attention", not c.flag("add_cross_attention", False))
        inverse = "scale_attn_by_inverse_layer_idx"
        only(file, c, inverse, not c.flag(inverse, False))
        hidden, heads = c.whole("n_embd", 1, MAX_WIDTH), c.whole("n_head", 1, MAX_HEADS)
        _divides(c, "n_head", heads, "n_embd", hidden)
        return GPTSpec(
            num_layers=c.whole("n_layer", 1, MAX_LAYERS),
            hidden_size=hidden,
            ffn_hidden_size=c.whole("n_inner", 1, MAX_WIDTH, None) or 4 * hidden,
            num_attention_heads=heads,
            max_position_embeddings=c.whole("n_positions", 1, MAX_POSITIONS),
            vocab_size=c.whole("vocab_size", 1, MAX_VOCABULARY),
            init_method_std=c.number("initializer_range", 0.02, above=0, at_most=1),
            use_scaled_init_method=True,
            hidden_dropout=c.number("resid_pdrop", 0.1, at_least=0, below=1),
            attention_dropout=c.number("attn_pdrop", 0.1, at_least=0, below=1),
            ffn_dropout=0.0,
            layernorm_epsilon=c.number("layer_norm_epsilon", 1e-5, above=0, at_most=1),
            activation=activation,  # type: ignore[arg-type]  # checked above
            share_embeddings_and_output_weights=c.flag("tie_word_embeddings", True),
        )

    def notes(self, c: Fields) -> list[str]:
        """Return what the user should know of dropouts; see `Family`."""
        after, of_embedding = (c.number(key, 0.1) for key in ("resid_pdrop", "embd_pdrop"))
        if after == of_embedding:
            return []
        return [
            f"note: embd_pdrop is {of_embedding:g} in config.json. Training here drops as much "
            f"after the embedding as after attention and MLP, {after:g} by resid_pdrop: "
            "model.hidden_dropout gives another number"
        ]


@dataclass(frozen=True)
class Decoder:
    """Describe a family with RMSNorm, gated MLPs, rotary positions and grouped queries.

    Attributes:
        name: The family in `model_type`.
        model_class: The class of transformers.
        biases: Which linears have biases: what two keys say, QKV's alone, or none.
        has_head_norms: Whether queries and keys are normalized.
        windows: Which layers may have a window: none, all, all if a key says so, or those that keys
            name.
        defaults: What the family has where a key is missing that others leave out.
    """

    name: str
    model_class: str
    biases: Literal["by keys", "of qkv", "none"]
    has_head_norms: bool = False
    windows: Literal["none", "all layers", "all layers by key", "by layer"] = "none"
    defaults: Mapping[str, int | None] = field(default_factory=dict)
    also_reads: frozenset[str] = frozenset(
        """
        attention_bias layer_types max_window_layers mlp_bias rope_parameters use_qk_norm
        """.split()
    )
    aliases: Mapping[str, str] = field(default_factory=lambda: {"layer_norm_eps": "rms_norm_eps"})

    def to_keys(self, spec: GPTSpec) -> dict[str, Any]:
        """Return the keys of such a model; see `Family`.

        Rotary positions are said by the two keys that transformers 4 reads. transformers 5 reads
        them too, and before its own, so that a third key would say the same twice.
        """
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
            "rope_theta": spec.rotary_base,
            "rope_scaling": rope_scaling(spec),
        }

    @property
    def _by_keys(self) -> bool:
        return self.biases == "by keys"

    def from_keys(self, c: Fields, file: Path) -> GPTSpec:
        """Return the model of such keys; see `Family`."""
        activations = {theirs: ours for ours, theirs in _GATED_ACTIVATIONS.items()}
        activation = activations.get(c.text("hidden_act", "silu"))
        only(file, c, "hidden_act", activation is not None)
        bias, mlp_bias = (c.flag(key, False) for key in ("attention_bias", "mlp_bias"))
        only(file, c, "attention_bias", self._by_keys or not bias)
        only(file, c, "mlp_bias", mlp_bias == bias)
        has_norms = c.flag("use_qk_norm", self.has_head_norms)
        only(file, c, "use_qk_norm", has_norms == self.has_head_norms)
        heads = c.whole("num_attention_heads", 1, MAX_HEADS)
        groups = c.whole(
            "num_key_value_heads", 1, MAX_HEADS, self._default(c, "num_key_value_heads")
        )
        groups = groups or heads
        _divides(c, "num_key_value_heads", groups, "num_attention_heads", heads)
        hidden = c.whole("hidden_size", 1, MAX_WIDTH)
        width = c.whole("head_dim", 1, MAX_WIDTH, self._default(c, "head_dim"))
        if width is None:
            only(file, c, "head_dim", "head_dim" not in self.defaults)
            _divides(c, "num_attention_heads", heads, "hidden_size", hidden)
            width = hidden // heads
        if width % 2:
            reason = f"heads have {width} features, and rotary positions turn pairs of them"
            raise ForeignFileError(reason)
        return GPTSpec(
            num_layers=c.whole("num_hidden_layers", 1, MAX_LAYERS),
            hidden_size=hidden,
            ffn_hidden_size=c.whole("intermediate_size", 1, MAX_WIDTH),
            num_attention_heads=heads,
            max_position_embeddings=c.whole("max_position_embeddings", 1, MAX_POSITIONS),
            vocab_size=c.whole("vocab_size", 1, MAX_VOCABULARY),
            init_method_std=c.number("initializer_range", 0.02, above=0, at_most=1),
            use_scaled_init_method=True,
            hidden_dropout=0.0,
            attention_dropout=c.number("attention_dropout", 0.0, at_least=0, below=1),
            ffn_dropout=0.0,
            layernorm_epsilon=c.number("rms_norm_eps", 1e-6, above=0, at_most=1),
            kv_channels=width,
            num_query_groups=groups,
            normalization="rmsnorm",
            activation=activation,  # type: ignore[arg-type]  # checked above
            position_embedding_type="rope",
            **rope_fields(c, file, self._theta),
            bias=bias,
            add_qkv_bias=self.biases == "of qkv",
            qk_layernorm=self.has_head_norms,
            share_embeddings_and_output_weights=c.flag("tie_word_embeddings", False),
            **self._window_fields(c, file),
        )

    def notes(self, c: Fields) -> list[str]:
        """Return what the user should know of two sections about positions; see `Family`."""
        old, new = c.section("rope_scaling").tree, c.section("rope_parameters").tree
        said = [
            {"rope_theta": c.tree.get("rope_theta"), **section, "rope_type": rope_type(section)}
            for section in (old, new)
        ]
        one, other = ({k: v for k, v in s.items() if v is not None and k != "type"} for s in said)
        if old and new and one != other:
            return [
                f"note: config.json has rope_scaling {shown_value(old)} and rope_parameters "
                f"{shown_value(new)}. transformers reads rope_scaling where both stand, and so it "
                "was done here"
            ]
        if not old and rope_type(new) != "default" and "rope_theta" in c.tree:
            return [
                f"note: config.json has rope_parameters {shown_value(new)}, which transformers 5 "
                "reads, and so it was done here. transformers 4 reads rope_scaling alone, and "
                "computes positions that are not scaled"
            ]
        if "rope_theta" in old and "rope_theta" not in c.tree:
            return [
                f"note: config.json has rope_theta {shown_value(old['rope_theta'])} in "
                "rope_scaling, where transformers 5 reads it, and so it was done here. "
                f"transformers 4 reads it beside rope_scaling, and else takes {self._theta:g}"
            ]
        return []

    @property
    def _theta(self) -> float:
        return self.defaults.get("rope_theta") or THETA

    def _default(self, c: Fields, key: str) -> int | None:
        """Return what a key stands for that is missing; None for one that is null."""
        return None if key in c.tree else self.defaults.get(key)

    def _window_keys(self, spec: GPTSpec) -> dict[str, Any]:
        """Return the keys of windows, in which transformers counts the own token too."""
        windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
        with_own_token = [window + 1 for window in windows if window is not None]
        size = with_own_token[0] if with_own_token else None
        if self.windows == "none":
            return {}
        if self.windows != "by layer":
            size = size if len(with_own_token) == len(windows) else None
        if self.windows == "all layers":
            return {"sliding_window": size}
        if size is None:
            return {"use_sliding_window": False, "sliding_window": None}
        if self.windows == "all layers by key":
            return {"use_sliding_window": True, "sliding_window": size, "max_window_layers": 0}
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
        only(file, c, "layer_types", fits)
        if self.windows == "none" or (
            self.windows != "all layers" and not c.flag("use_sliding_window", False)
        ):
            only(file, c, "layer_types", kinds is None or _SLIDING not in kinds)
            return {}
        if "sliding_window" not in c.tree and "sliding_window" not in self.defaults:
            raise ForeignFileError("sliding_window is missing")
        size = c.whole("sliding_window", 1, MAX_POSITIONS, None)
        if self.windows == "all layers by key":  # transformers 5 ignores it, and 4 does not
            only(file, c, "max_window_layers", not c.tree.get("max_window_layers"))
            only(file, c, "sliding_window", size is not None)
        if self.windows == "by layer":
            if kinds is None:
                first = c.whole("max_window_layers", 0, MAX_LAYERS)
                kinds = [_SLIDING if layer >= first else _FULL for layer in range(layers)]
            if _SLIDING not in kinds:
                return {}
            only(file, c, "sliding_window", size is not None)
        elif size is not None:  # transformers ignores the kinds of layers in such a family
            only(file, c, "layer_types", kinds is None)
        if size is None:
            return {}
        fields: dict[str, Any] = {"window_size": (size - 1, 0)}
        if kinds is not None and _FULL in kinds:
            fields["window_attn_skip_freq"] = tuple(int(kind == _SLIDING) for kind in kinds)
        return fields


@dataclass(frozen=True)
class WithExperts(Decoder):
    """Describe such a family that has experts, of which a softmax over all of them chooses.

    Attributes:
        names_layers: Whether keys say which layers have experts, and whether the weights of the
            chosen ones are divided by their sum, or else all layers have experts, and they are.
    """

    names_layers: bool = False

    def to_keys(self, spec: GPTSpec) -> dict[str, Any]:
        assert spec.moe is not None
        moe = spec.moe
        has_loss = moe.router_loss != "none"
        keys = {
            **super().to_keys(spec),
            self._count: moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "router_aux_loss_coef": float(moe.router_loss_coeff) if has_loss else 0.0,
        }
        if not self.names_layers:
            return keys | {"intermediate_size": moe.ffn_hidden_size}
        return keys | {
            "moe_intermediate_size": moe.ffn_hidden_size,
            "norm_topk_prob": not moe.pre_softmax,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, has in enumerate(moe.layers) if not has],
        }

    @property
    def _count(self) -> str:
        return "num_experts" if self.names_layers else "num_local_experts"

    def from_keys(self, c: Fields, file: Path) -> GPTSpec:
        """Return the model of such keys; see `Family`.

        Weights that are divided by their sum are the softmax over the chosen experts' logits.
        """
        spec = super().from_keys(c, file)
        count = self._count
        if count not in c.tree:  # transformers 5 writes the number of experts by either name
            count = next((name for name in self.aliases if name in c.tree), count)
        experts = c.whole(count, 1, MAX_EXPERTS)
        top_k = c.whole("num_experts_per_tok", 1, MAX_EXPERTS)
        only(file, c, "num_experts_per_tok", top_k <= experts)
        coeff = self._loss(c)
        moe = MoESpec(
            num_experts=experts,
            top_k=top_k,
            ffn_hidden_size=c.whole(
                "moe_intermediate_size" if self.names_layers else "intermediate_size", 1, MAX_WIDTH
            ),
            layers=self._layers(c, file, spec.num_layers),
            pre_softmax=self.names_layers and not c.flag("norm_topk_prob", False),
            router_loss="aux_loss" if coeff else "none",
            router_loss_coeff=coeff,
        )
        return replace(spec, moe=moe)

    def _layers(self, c: Fields, file: Path, num_layers: int) -> tuple[bool, ...]:
        """Return for each layer whether it has experts."""
        if not self.names_layers:
            return (True,) * num_layers
        step = c.whole("decoder_sparse_step", 1, MAX_LAYERS, 1)
        without = c.tree.get("mlp_only_layers") or []
        numbers = range(num_layers)
        known = isinstance(without, list) and all(type(x) is int and x in numbers for x in without)
        only(file, c, "mlp_only_layers", known)
        layers = tuple(layer not in without and (layer + 1) % step == 0 for layer in numbers)
        only(file, c, "mlp_only_layers" if without else "decoder_sparse_step", any(layers))
        return layers

    def _loss(self, c: Fields) -> float:
        coeff: float = c.number("router_aux_loss_coef", 0.001, at_least=0)
        return coeff

    def notes(self, c: Fields) -> list[str]:
        if not (coeff := self._loss(c)):
            return super().notes(c)
        moe = self.from_keys(c, Path()).moe
        assert moe is not None
        return [
            *super().notes(c),
            f"note: router_aux_loss_coef is {coeff:g} in config.json, and model.yaml has the same "
            "model.moe_aux_loss_coeff. The losses are others: transformers' is num_experts_per_tok "
            "times as large and one for all layers, and here each layer adds one. "
            f"{coeff * moe.top_k / sum(moe.layers):g} would be about as strong. transformers adds "
            "its loss only with output_router_logits, which is not read, and fine-tuning here only "
            "with model.moe_aux_loss_coeff of its own",
        ]


def _first_with_window(windows: Sequence[int | None]) -> int:
    """Return the first layer with a window."""
    return next(layer for layer, window in enumerate(windows) if window is not None)


Family = Gpt2 | Decoder
"""A family of models. `to_keys` returns the keys of a model; one that the family cannot express is
another when read back. `from_keys` returns the model of some keys, and its errors name the key.
`notes` says how accepted keys were read. `also_reads` are keys that the family knows beside those
that it writes, and `aliases` other names of those, which may stand beside them and be equal."""

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
        WithExperts(
            "mixtral",
            "MixtralForCausalLM",
            "none",
            windows="all layers",
            defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000, "sliding_window": None},
            aliases={"layer_norm_eps": "rms_norm_eps", "num_experts": "num_local_experts"},
        ),
        WithExperts(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "none",
            has_head_norms=True,
            windows="all layers by key",
            defaults={"num_key_value_heads": 4},
            aliases={"layer_norm_eps": "rms_norm_eps", "num_local_experts": "num_experts"},
            names_layers=True,
        ),
    )
}
"""The families by their names. A model is exported as the first one that can express it."""


def _divides(c: Fields, key: str, small: int, of: str, large: int) -> None:
    if large % small:
        raise ForeignFileError(
            f"{key} is {shown_value(c.tree.get(key))}, which does not divide {of}"
        )
