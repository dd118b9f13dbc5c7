"""The shape of a GPT, and which of its activations are computed again in backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Normalization = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu-tanh", "squared-relu", "geglu", "swiglu", "reglu"]
PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "none"]
BlockType = Literal["pre_ln", "post_ln"]

GATED: tuple[Activation, ...] = ("geglu", "swiglu", "reglu")
"""Activations of two linears: activation(gate) * up."""


@dataclass(frozen=True, kw_only=True)
class RecomputeSpec:
    """What backward computes again instead of keeping it.

    `selective`: attention's core (scores, softmax, values). `full`: whole layers. `uniform` cuts
    the layers into groups of `num_layers` and keeps each group's input; `block` does so with the
    first `num_layers` layers (of a pipeline stage) one by one, the others keep everything.
    """

    granularity: Literal["selective", "full"]
    method: Literal["uniform", "block"]
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class GPTSpec:
    """One GPT, by logical (unsharded) sizes. `None` sizes follow from the others."""

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
    activation: Activation = "gelu"
    position_embedding_type: PositionEmbedding = "learned_absolute"
    rotary_percentage: float = 1.0  # of a head's width that is rotated
    rotary_base: float = 10000.0
    seq_len_interpolation_factor: float | None = None  # rotary positions are divided by it
    bias: bool = True  # of the linears; norms have theirs
    share_embeddings_and_output_weights: bool = True
    transformer_block_type: BlockType = "pre_ln"
    apply_query_key_layer_scaling: bool = False
    fp32_residual_connection: bool = False
    recompute: RecomputeSpec | None = None

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Features of all queries, and of what attention hands to its projection."""
        return self.num_attention_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Features of all keys, and of all values."""
        return self.num_kv_heads * self.head_size

    @property
    def rotary_size(self) -> int:
        """Features of a head that are rotated, from the first."""
        return int(self.head_size * self.rotary_percentage)

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """The vocabulary rounded up to a multiple (NeMo's `make_vocab_size_divisible_by`)."""
    return -(-vocab_size // divisible_by) * divisible_by
