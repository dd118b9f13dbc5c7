"""Model FLOPs against published sizes and a count that multiplies matrices one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.observe.flops import flops_per_token, gemm_flops_per_token
from megafp8.specs import GPTSpec


def gpt(
    layers: int,
    hidden: int,
    ffn: int,
    vocab: int,
    seq: int,
    heads: int | None = None,
    **more: Any,
) -> GPTSpec:
    return GPTSpec(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads or max(1, hidden // 64),
        max_position_embeddings=seq,
        vocab_size=vocab,
        init_method_std=0.02,
        use_scaled_init_method=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        ffn_dropout=0.0,
        layernorm_epsilon=1e-5,
        **more,
    )


GPT_5B = gpt(layers=24, hidden=4096, ffn=16384, vocab=51200, seq=2048)
GPT3_175B = gpt(layers=96, hidden=12288, ffn=49152, vocab=51200, seq=2048)


def test_gpt_5b() -> None:
    assert flops_per_token(GPT_5B, "full") == pytest.approx(32.665e9, rel=2e-5)
    assert flops_per_token(GPT_5B, "causal") == pytest.approx(31.457e9, rel=2e-5)


def test_gpt3_175b_per_sequence() -> None:
    assert flops_per_token(GPT3_175B, "full") * 2048 == pytest.approx(2.20e15, rel=3e-3)


def test_ffn_of_four_times_hidden_is_the_well_known_72() -> None:
    linear = gemm_flops_per_token(GPT_5B).linear
    assert linear == 72 * GPT_5B.num_layers * GPT_5B.hidden_size**2


def test_llama3_8b() -> None:
    """6 FLOPs for each parameter of a matrix that multiplies: all but the look-up and the norms."""
    spec = gpt(32, 4096, 14336, 128256, 8192, 32, num_query_groups=8, activation="swiglu")
    found = gemm_flops_per_token(spec)
    parameters = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert found.linear + found.head == 6 * parameters


def specification(spec: GPTSpec, causal: bool) -> float:
    """One sequence, matrix by matrix, then divided by its tokens. Slow and obvious."""
    tokens, hidden = spec.max_position_embeddings, spec.hidden_size
    forward = 0.0

    def gemm(m: float, k: float, n: float) -> float:
        return 2 * m * k * n

    for _ in range(spec.num_layers):
        for _ in range(spec.num_attention_heads + 2 * spec.num_kv_heads):
            forward += gemm(tokens, hidden, spec.head_size)
        for _ in range(spec.num_attention_heads):
            scores = gemm(tokens, spec.head_size, tokens)
            values = gemm(tokens, tokens, spec.head_size)
            forward += (scores + values) * (0.5 if causal else 1)
        forward += gemm(tokens, spec.num_attention_heads * spec.head_size, hidden)
        forward += gemm(tokens, hidden, spec.ffn_hidden_size)
        if spec.activation in ("geglu", "swiglu", "reglu"):
            forward += gemm(tokens, hidden, spec.ffn_hidden_size)
        forward += gemm(tokens, spec.ffn_hidden_size, hidden)
    forward += gemm(tokens, hidden, spec.vocab_size)
    return 3 * forward / tokens


@given(
    layers=st.integers(1, 5),
    heads=st.integers(1, 6),
    head_size=st.sampled_from([8, 16, 64]),
    ffn=st.integers(1, 3000),
    vocab=st.integers(1, 60000),
    seq=st.integers(1, 5000),
    causal=st.booleans(),
    groups=st.integers(1, 3),
    activation=st.sampled_from(["gelu", "swiglu", "squared-relu", "reglu"]),
    width=st.sampled_from([None, 24]),
)
def test_equals_a_count_matrix_by_matrix(
    layers: int,
    heads: int,
    head_size: int,
    ffn: int,
    vocab: int,
    seq: int,
    causal: bool,
    groups: int,
    activation: str,
    width: int | None,
) -> None:
    spec = gpt(
        layers,
        groups * heads * head_size,
        ffn,
        vocab,
        seq,
        groups * heads,
        num_query_groups=groups,
        activation=activation,
        kv_channels=width,
    )
    got = flops_per_token(spec, "causal" if causal else "full")
    assert got == pytest.approx(specification(spec, causal), rel=1e-12)


@given(st.integers(1, 8192))
def test_full_minus_causal_is_half_of_attention(seq: int) -> None:
    full = gemm_flops_per_token(GPT_5B, "full", seq_length=seq)
    causal = gemm_flops_per_token(GPT_5B, "causal", seq_length=seq)
    assert (full.linear, full.head) == (causal.linear, causal.head)
    assert full.attention == 2 * causal.attention
    assert full.total == full.linear + full.head + full.attention


def test_unknown_vocabulary_and_count_are_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size=0"):
        flops_per_token(gpt(1, 64, 256, 0, 32), "full")
    with pytest.raises(ValueError, match="'causal' or 'full'"):
        flops_per_token(GPT_5B, "half")  # type: ignore[arg-type]
