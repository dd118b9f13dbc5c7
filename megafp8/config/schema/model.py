"""Keys of `model` about the GPT itself."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from megafp8.config.keys import (
    Valid,
    above,
    at_least,
    from_to_below,
    key,
    needs,
    one_of,
    or_null,
)
from megafp8.config.values import spell_activation

ROPE = needs("model.position_embedding_type", "rope")


@dataclass
class Architecture:
    """The shapes and functions of the GPT."""

    encoder_seq_length: int = key(
        MISSING, "Tokens of a sequence.", nemo=512, kind="model", valid=at_least(1)
    )
    max_position_embeddings: int = key(
        "${.encoder_seq_length}",
        "Learned positions; at least the tokens of a sequence.",
        nemo="${.encoder_seq_length}",
        kind="model",
        valid=at_least(1),
    )
    num_layers: int = key(MISSING, "Transformer layers.", nemo=12, kind="model", valid=at_least(1))
    hidden_size: int = key(
        MISSING, "Width of the residual stream.", nemo=768, kind="model", valid=at_least(1)
    )
    ffn_hidden_size: int = key(
        MISSING, "Width inside the MLP.", nemo=3072, kind="model", valid=at_least(1)
    )
    num_attention_heads: int = key(
        MISSING, "Attention heads.", nemo=12, kind="model", valid=at_least(1)
    )
    kv_channels: int | None = key(
        None,
        "Width of a head; null for `hidden_size / num_attention_heads`.",
        nemo=None,
        kind="model",
        valid=or_null(at_least(1)),
    )
    num_query_groups: int | None = key(
        None,
        "Heads of keys and values, each shared by a group of query heads; null for one each.",
        nemo=None,
        kind="model",
        valid=or_null(at_least(1)),
    )
    init_method_std: float = key(
        0.02, "Standard deviation of initial weights.", nemo=0.02, kind="model", valid=above(0)
    )
    use_scaled_init_method: bool = key(
        True,
        "Divide `init_method_std` of the projections into the residual stream by "
        "sqrt(2 * num_layers).",
        nemo=True,
        kind="model",
    )
    hidden_dropout: float = key(
        0.0,
        "Dropout before each residual addition and after the embedding.",
        nemo=0.1,
        kind="model",
        valid=from_to_below(0, 1),
    )
    attention_dropout: float = key(
        0.0, "Dropout of attention weights.", nemo=0.1, kind="model", valid=from_to_below(0, 1)
    )
    ffn_dropout: float = key(
        0.0, "Dropout inside the MLP.", nemo=0.0, kind="model", valid=from_to_below(0, 1)
    )
    normalization: str = key(
        "layernorm",
        "LayerNorm, or RMSNorm, which has no mean and no bias.",
        nemo="layernorm",
        kind="model",
        valid=one_of(
            "layernorm",
            "rmsnorm",
            later=("layernorm1p", "low_precision_layernorm"),
            suggestion="Use layernorm or rmsnorm",
        ),
    )
    layernorm_epsilon: float = key(
        1e-5,
        "Added to the variance, or mean square, in norms.",
        nemo=1e-5,
        kind="model",
        valid=above(0),
    )
    bias: bool = key(True, "Biases of the linears; norms keep theirs.", nemo=True, kind="model")
    activation: str = key(
        "gelu",
        "Of the MLP. geglu, swiglu and reglu are gated: FC1 makes `2 * ffn_hidden_size` features. "
        "`fast-` ones are the same (NeMo: one GEMM instead of two; here it is always one).",
        nemo="gelu",
        kind="model",
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
    )
    openai_gelu: bool = key(
        False,
        "GELU by tanh, as GPT-2 has it, instead of erf.",
        nemo=False,
        kind="model",
        needs=needs("model.activation", "gelu"),
    )
    transformer_block_type: str = key(
        "pre_ln",
        "Norms before attention and MLP, or (`post_ln`) after each residual addition.",
        nemo="pre_ln",
        kind="model",
        valid=one_of(
            "pre_ln", "post_ln", later=("normformer",), suggestion="Use pre_ln or post_ln"
        ),
    )
    position_embedding_type: str = key(
        "learned_absolute",
        "Learned positions, rotary ones (RoPE), linear biases (ALiBi), or none.",
        nemo="learned_absolute",
        kind="model",
        valid=one_of(
            "learned_absolute",
            "rope",
            "alibi",
            "none",
            later=("kerple", "xpos", "sandwich", "learned_parameters"),
            suggestion="Use rope or alibi",
        ),
    )
    rotary_percentage: float = key(
        1.0,
        "Part of a head's width that RoPE turns.",
        nemo=1.0,
        kind="model",
        valid=Valid("above 0 and at most 1", lambda x: 0 < x <= 1),
        needs=ROPE,
    )
    rotary_base: float = key(
        10000.0,
        "RoPE's base: larger ones turn more slowly.",
        kind="model",
        valid=above(1),
        needs=ROPE,
    )
    seq_len_interpolation_factor: float | None = key(
        None,
        "RoPE's positions are divided by it, to reach longer sequences; null for no division.",
        nemo=None,
        kind="model",
        valid=or_null(at_least(1)),
        needs=ROPE,
    )
    share_embeddings_and_output_weights: bool = key(
        True, "Input and output have one embedding.", nemo=True, kind="model"
    )
    apply_query_key_layer_scaling: bool = key(
        False,
        "Divide queries by the layer's number and multiply scores by it in the softmax: the same "
        "but for rounding (made for FP16 softmax; here it is FP32).",
        nemo=False,
        kind="model",
    )
    fp32_residual_connection: bool = key(
        False,
        "Keep the residual stream in FP32.",
        nemo=False,
        kind="model",
        needs=needs("model.transformer_block_type", "pre_ln"),
    )
    make_vocab_size_divisible_by: int = key(
        128, "The vocabulary is padded to a multiple.", nemo=128, kind="model", valid=at_least(1)
    )
