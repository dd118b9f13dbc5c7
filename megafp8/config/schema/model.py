"""Define the keys below `model` about the GPT itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import MISSING

from megafp8.config.keys import (
    BELOW_ONE,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    Need,
    Valid,
    above,
    at_least,
    key,
    needs,
    one_of,
    or_null,
)
from megafp8.config.schema.precision import FP16
from megafp8.config.values import (
    GELUS,
    is_skip_frequency,
    is_window,
    spell_activation,
    window_problem,
)

ROPE = needs("model.position_embedding_type", "rope")

# Makers of the keys of a group, with what most of these keys have in common.
model_key = partial(key, group="model", spec="model.*")
rope_key = partial(key, group="model", needs=ROPE, spec="model.*")

SCALED = needs("model.scale_positional_embedding", True)
_FACTOR = "model.yarn_rotary_scaling_factor"
YARN = Need(_FACTOR, f"{_FACTOR}", lambda values: values.get(_FACTOR) is not None)
_WINDOW = "model.window_size"
SCALED_OR_YARN = Need(
    SCALED.key,
    f"{SCALED.text} or {_FACTOR}",
    lambda values: SCALED.holds(values) or YARN.holds(values),
    others=(_FACTOR,),
)


@dataclass
class Architecture:
    """Define the keys about the sizes and functions of the GPT."""

    encoder_seq_length: int = model_key(
        MISSING,
        "Number of tokens in a sequence.",
        nemo=512,
        valid=at_least(1, MAX_POSITIONS),
        spec=None,
    )
    max_position_embeddings: int = model_key(
        "${.encoder_seq_length}",
        "Number of positions; at least `encoder_seq_length`. Learned position embeddings have one "
        "row for each.",
        nemo="${.encoder_seq_length}",
        defines_function=True,
        valid=at_least(1, MAX_POSITIONS),
    )
    num_layers: int = model_key(
        MISSING,
        "Number of transformer layers.",
        nemo=12,
        defines_function=True,
        valid=at_least(1, MAX_LAYERS),
    )
    hidden_size: int = model_key(
        MISSING,
        "Width of the residual stream.",
        nemo=768,
        defines_function=True,
        valid=at_least(1, MAX_WIDTH),
    )
    ffn_hidden_size: int = model_key(
        MISSING,
        "Width of the MLP's inner layer.",
        nemo=3072,
        defines_function=True,
        valid=at_least(1, MAX_WIDTH),
    )
    num_attention_heads: int = model_key(
        MISSING,
        "Number of attention heads.",
        nemo=12,
        defines_function=True,
        valid=at_least(1, MAX_HEADS),
    )
    kv_channels: int | None = model_key(
        None,
        "Width of an attention head. `null`: `hidden_size / num_attention_heads`.",
        nemo=None,
        defines_function=True,
        valid=or_null(at_least(1, MAX_WIDTH)),
    )
    num_query_groups: int | None = model_key(
        None,
        "Number of heads of keys and values; each serves a group of query heads. `null`: one for "
        "each query head.",
        nemo=None,
        defines_function=True,
        valid=or_null(at_least(1, MAX_HEADS)),
    )
    init_method_std: float = model_key(
        0.02,
        "Standard deviation of the initial weights.",
        nemo=0.02,
        valid=above(0),
    )
    use_scaled_init_method: bool = model_key(
        True,
        "Divide `init_method_std` by sqrt(2 * num_layers) for the projections into the residual "
        "stream.",
        nemo=True,
    )
    hidden_dropout: float = model_key(
        0.0,
        "Probability of dropout after the embedding and before each residual addition.",
        nemo=0.1,
        valid=BELOW_ONE,
    )
    attention_dropout: float = model_key(
        0.0,
        "Probability of dropout of attention weights.",
        nemo=0.1,
        valid=BELOW_ONE,
    )
    ffn_dropout: float = model_key(
        0.0,
        "Probability of dropout inside the MLP.",
        nemo=0.0,
        valid=BELOW_ONE,
    )
    normalization: str = model_key(
        "layernorm",
        "Kind of norm: LayerNorm, or RMSNorm, which subtracts no mean and has no bias.",
        nemo="layernorm",
        defines_function=True,
        valid=one_of(
            "layernorm",
            "rmsnorm",
            later=("low_precision_layernorm",),
            suggestion="Use layernorm or rmsnorm",
        ),
    )
    layernorm_zero_centered_gamma: bool = model_key(
        False,
        "Multiply normalized values by 1 plus the norm's weight, which then begins at 0. NeMo's "
        "`normalization=layernorm1p` is `layernorm` with this key.",
        defines_function=True,
    )
    layernorm_epsilon: float = model_key(
        1e-5,
        "Number that norms add to the variance (LayerNorm) or to the mean square (RMSNorm).",
        nemo=1e-5,
        defines_function=True,
        valid=above(0),
    )
    bias: bool = model_key(
        True,
        "Whether linears have biases. It does not change norms.",
        nemo=True,
        defines_function=True,
    )
    add_qkv_bias: bool = model_key(
        False,
        "Give the linear of queries, keys and values a bias where the others have none, as Qwen2 "
        "does. NeMo's files call it `qkv_bias`.",
        defines_function=True,
        needs=needs("model.bias", False),
    )
    qk_layernorm: bool = model_key(
        False,
        "Normalize the queries and the keys of each head over the head's features before positions "
        "are applied, as Qwen3 does; the kind of norm is `normalization`.",
        defines_function=True,
    )
    window_size: list[int] | None = model_key(
        None,
        "`[W, 0]`: a query sees its own token and the W before it, and no earlier ones, as in "
        "Megatron and Transformer Engine. A `sliding_window` of W of transformers counts the own "
        "token too, and is `[W - 1, 0]`. `null`: a query sees all earlier tokens.",
        defines_function=True,
        valid=or_null(Valid("a list [W, 0] with W at least 0", is_window, why=window_problem)),
    )
    window_attn_skip_freq: Any = model_key(
        None,
        "Layers in which a query sees all earlier tokens, as Megatron has them. A number N: each "
        "N-th layer, counted from 1. A list with a number for each layer: those with 0; the "
        "others, with 1, have the window. `null`: all layers have the window.",
        defines_function=True,
        valid=or_null(Valid("a whole number, or a list of 0 and 1", is_skip_frequency)),
        needs=Need(_WINDOW, f"{_WINDOW}=[W,0]", lambda values: values.get(_WINDOW) is not None),
    )
    activation: str = model_key(
        "gelu",
        "Activation of the MLP. `geglu`, `swiglu` and `reglu` are gated: the first linear has `2 "
        "* ffn_hidden_size` output features. `fast-` has no effect; in NeMo it asks for one GEMM "
        "instead of two, and megafp8 always runs one.",
        nemo="gelu",
        defines_function=True,
        valid=one_of(
            "gelu",
            "geglu",
            "swiglu",
            "reglu",
            "squared-relu",
            "fast-geglu",
            "fast-swiglu",
            "fast-reglu",
        ),
        spelling=spell_activation,
        spec=None,
    )
    openai_gelu: bool = model_key(
        False,
        "Compute GELU with tanh, as GPT-2 and Transformer Engine do, instead of erf; with `geglu` "
        "the GELU of the gate.",
        nemo=False,
        defines_function=True,
        needs=needs(
            "model.activation",
            *GELUS,
            reads=lambda v: [spell_activation(v["model.activation"])],
        ),
        spec=None,
    )
    transformer_block_type: str = model_key(
        "pre_ln",
        "Place of the norms: before attention and MLP (`pre_ln`), or after each residual addition "
        "(`post_ln`).",
        nemo="pre_ln",
        defines_function=True,
        valid=one_of(
            "pre_ln", "post_ln", later=("normformer",), suggestion="Use pre_ln or post_ln"
        ),
    )
    position_embedding_type: str = model_key(
        "learned_absolute",
        "Kind of positions: learned embeddings, rotary (RoPE), linear biases (ALiBi), or none.",
        nemo="learned_absolute",
        defines_function=True,
        valid=one_of(
            "learned_absolute",
            "rope",
            "alibi",
            "none",
            later=("kerple", "xpos", "sandwich", "learned_parameters"),
            suggestion="Use rope or alibi",
        ),
    )
    rotary_percentage: float = rope_key(
        1.0,
        "Fraction of a head's features that RoPE rotates.",
        nemo=1.0,
        defines_function=True,
        valid=Valid("above 0 and at most 1", lambda x: 0 < x <= 1),
    )
    rotary_base: float = rope_key(
        10000.0,
        "Base of RoPE's angles; with a larger base, features rotate more slowly.",
        defines_function=True,
        valid=above(1),
    )
    seq_len_interpolation_factor: float | None = rope_key(
        None,
        "Number by which RoPE's positions are divided, for longer sequences. `null`: no division.",
        nemo=None,
        defines_function=True,
        valid=or_null(at_least(1)),
    )
    scale_positional_embedding: bool = rope_key(
        False,
        "Scale RoPE's frequencies as Llama 3.1 does: those that turn few times within the original "
        "length are divided by `rope_scaling_factor`.",
        defines_function=True,
    )
    rope_scaling_factor: float = model_key(
        8.0,
        "Factor by which Llama 3.1's scaling divides the low frequencies.",
        defines_function=True,
        valid=at_least(1),
        needs=SCALED,
    )
    rope_low_freq_factor: float = model_key(
        1.0,
        "Turns within the original length up to which a frequency is divided by the whole factor.",
        defines_function=True,
        valid=above(0),
        needs=SCALED,
    )
    rope_high_freq_factor: float = model_key(
        4.0,
        "Turns within the original length from which on a frequency stays as it is; between "
        "`rope_low_freq_factor` and this number it is divided by a part of the factor.",
        defines_function=True,
        valid=above(0),
        needs=SCALED,
    )
    yarn_rotary_scaling_factor: float | None = rope_key(
        None,
        "Factor by which YaRN (arXiv 2309.00071) lengthens the positions that a model knows. "
        "`null`: no YaRN.",
        defines_function=True,
        valid=or_null(at_least(1)),
    )
    yarn_beta_fast: float = model_key(
        32.0,
        "Turns within the original length from which on YaRN leaves a frequency as it is.",
        defines_function=True,
        valid=above(0),
        needs=YARN,
    )
    yarn_beta_slow: float = model_key(
        1.0,
        "Turns within the original length up to which YaRN divides a frequency by the factor.",
        defines_function=True,
        valid=above(0),
        needs=YARN,
    )
    yarn_attention_factor: float | None = model_key(
        None,
        "Number by which YaRN multiplies rotated queries and keys. `null`: 0.1 ln(factor) + 1.",
        defines_function=True,
        valid=or_null(above(0)),
        needs=YARN,
    )
    original_max_position_embeddings: int = model_key(
        8192,
        "Positions that the model was trained with before its frequencies were scaled.",
        defines_function=True,
        valid=at_least(1, MAX_POSITIONS),
        needs=SCALED_OR_YARN,
    )
    share_embeddings_and_output_weights: bool = model_key(
        True,
        "Use the embedding's weights as the output layer's too.",
        nemo=True,
        defines_function=True,
    )
    apply_query_key_layer_scaling: bool = model_key(
        False,
        "Divide queries by the layer's number, and multiply scores by it in the softmax. Only the "
        "rounding changes. NeMo has the key for FP16, and turns it off elsewhere.",
        nemo=False,
        needs=FP16,
    )
    fp32_residual_connection: bool = model_key(
        False,
        "Keep the residual stream in FP32 instead of `trainer.precision`.",
        nemo=False,
        needs=needs("model.megatron_amp_O2", True),
    )
    make_vocab_size_divisible_by: int = model_key(
        128,
        "Pad the vocabulary to a multiple of this number.",
        nemo=128,
        spec="vocab_divisible_by",
        valid=at_least(1, MAX_VOCABULARY),
    )
    override_vocab_size: int | None = model_key(
        None,
        "Rows of the embedding and of the head. `null`: one for each token, padded by "
        "`make_vocab_size_divisible_by`. With fewer rows than the tokenizer has tokens, as in some "
        "imported models, a text with a token beyond them is refused.",
        spec="vocab_rows",
        valid=or_null(at_least(1, MAX_VOCABULARY)),
    )
