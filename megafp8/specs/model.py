"""Describe the shape of a GPT, and which activations its backward pass recomputes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megafp8.specs.moe import MoESpec

Normalization = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu-tanh", "squared-relu", "geglu", "geglu-tanh", "swiglu", "reglu"]
PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "none"]
BlockType = Literal["pre_ln", "post_ln"]

GATED: tuple[Activation, ...] = ("geglu", "geglu-tanh", "swiglu", "reglu")
"""Activations that multiply the results of two linears: activation(gate) * up."""

BLOCK_QUERIES = 128
"""The queries of a block of attention whose scores need a tensor of their own: those of documents
with biases or dropout, and those of windows."""
CHUNK_TOKENS = 1024  # smaller chunks mean smaller GEMMs and more weight gradient sums
CHUNK_BYTES = 256 << 20  # limit of a chunk's FP32 logits; a large vocabulary lowers its tokens
GPU_FACTOR = 8  # a GPU's chunks are larger: reading and writing the weight's gradient takes longer


@dataclass(frozen=True, kw_only=True)
class RecomputeSpec:
    """Say which activations the backward pass recomputes instead of keeping them.

    `selective` recomputes the core of attention (scores, softmax, values), `full` whole layers.
    `uniform` divides the layers into groups of `num_layers` and keeps each group's input. `block`
    recomputes each of the first `num_layers` layers of a pipeline stage, and the other layers keep
    everything.
    """

    granularity: Literal["selective", "full"]
    method: Literal["uniform", "block"]
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class GPTSpec:
    """Describe one GPT by its logical (unsharded) sizes; sizes of None follow from the others."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    vocab_size: int  # padded; the same at every tensor-parallel size, so that layouts can change
    init_method_std: float
    use_scaled_init_method: bool
    hidden_dropout: float
    attention_dropout: float
    ffn_dropout: float
    layernorm_epsilon: float
    kv_channels: int | None = None  # width of a head; None: hidden_size / num_attention_heads
    num_query_groups: int | None = None  # heads of keys and values; None: one for each query head
    normalization: Normalization = "layernorm"
    layernorm_zero_centered_gamma: bool = (
        False  # norms multiply by 1 + weight, and the weight begins at 0
    )
    activation: Activation = "gelu"
    position_embedding_type: PositionEmbedding = "learned_absolute"
    rotary_percentage: float = 1.0  # the fraction of a head's features that is rotated
    rotary_base: float = 10000.0
    seq_len_interpolation_factor: float | None = None  # rotary positions are divided by it
    scale_positional_embedding: bool = False  # whether slow rotations are slower (Llama 3.1)
    rope_scaling_factor: float = 8.0
    rope_low_freq_factor: float = 1.0  # turns in the original length below which they are slower
    rope_high_freq_factor: float = 4.0  # turns in it above which they are as before
    yarn_rotary_scaling_factor: float | None = None  # YaRN's; None: no YaRN
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_attention_factor: float | None = None  # cosines and sines are multiplied by it
    original_max_position_embeddings: int = 8192  # positions before either of the two scalings
    bias: bool = True  # whether linears have a bias; norms have their own
    add_qkv_bias: bool = False  # whether QKV has one where `bias` is False
    qk_layernorm: bool = False  # whether queries and keys are normalized, head by head
    window_size: tuple[int, int] | None = None  # see `window_of`; the second number is 0
    window_attn_skip_freq: int | tuple[int, ...] | None = None  # see `window_of`
    share_embeddings_and_output_weights: bool = True
    transformer_block_type: BlockType = "pre_ln"
    apply_query_key_layer_scaling: bool = False
    fp32_residual_connection: bool = False
    recompute: RecomputeSpec | None = None
    moe: MoESpec | None = None  # experts; None: every layer has one MLP

    @property
    def head_size(self) -> int:
        """Return the number of features of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Return the number of key (and of value) heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Return the number of features of all queries, which the projection's input has too."""
        return self.num_attention_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Return the number of features of all keys, which all values have too."""
        return self.num_kv_heads * self.head_size

    @property
    def rotary_size(self) -> int:
        """Return how many features of a head are rotated, counted from the first."""
        return int(self.head_size * self.rotary_percentage)

    def window_of(self, layer: int) -> int | None:
        """Return how many earlier tokens a query of layer `layer` (from 0) sees; None for all.

        A query always sees its own token too. These are the meanings of Megatron-core, which counts
        layers from 1: with a number N each N-th layer sees all earlier tokens, and with a list the
        layers that have a 0 there.
        """
        if self.window_size is None:
            return None
        skips = self.window_attn_skip_freq
        if isinstance(skips, int):
            has_window = (layer + 1) % skips != 0
        else:
            has_window = skips is None or bool(skips[layer])
        return self.window_size[0] if has_window else None

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return self.moe is not None and any(self.moe.layers)

    @property
    def is_gated(self) -> bool:
        """Whether the activation multiplies two linears: activation(gate) * up."""
        return self.activation in GATED


def twice_seen(length: int, window: int | None = None) -> int:
    """Return twice the scores that queries of a text see, counting half of each on the diagonal.

    Args:
        length: The tokens of the text.
        window: The earlier tokens that a query sees; None for all.
    """
    if window is None or window >= length - 1:
        return length**2
    return window**2 + (length - window) * (2 * window + 1)


def head_chunk(vocab_size: int, *, on_gpu: bool) -> int:
    """Return the most tokens of which the head has logits at once, for a rank's vocabulary."""
    factor = GPU_FACTOR if on_gpu else 1
    return max(1, min(factor * CHUNK_TOKENS, factor * CHUNK_BYTES // (4 * vocab_size)))


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """Return the vocabulary rounded up to a multiple (NeMo's `make_vocab_size_divisible_by`)."""
    return -(-vocab_size // divisible_by) * divisible_by
