"""The shape of a GPT."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GPTSpec:
    """One GPT, by logical (unsharded) sizes."""

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

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """The vocabulary rounded up to a multiple (NeMo's `make_vocab_size_divisible_by`)."""
    return -(-vocab_size // divisible_by) * divisible_by
