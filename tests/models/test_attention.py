"""The attention core against the formula in FP64."""

from __future__ import annotations

import math

import pytest
import torch

from megafp8.models.attention import AttentionCore
from megafp8.models.random import RandomStreams


def by_formula(qkv: torch.Tensor, heads: int, head_size: int) -> torch.Tensor:
    """softmax(q k^T / sqrt(E), causal) v, one head at a time."""
    batch, seq, _ = qkv.shape
    q, k, v = qkv.double().view(batch, seq, 3, heads, head_size).unbind(2)
    out = torch.zeros(batch, seq, heads, head_size, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(seq):
                scores = k[b, : i + 1, h] @ q[b, i, h] / math.sqrt(head_size)
                out[b, i, h] = scores.softmax(0) @ v[b, : i + 1, h]
    return out.flatten(2)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_output_and_flops(heads: int) -> None:
    flops: list[int] = []
    core = AttentionCore(8, 0.0, "site", RandomStreams(0), flops.append)
    qkv = torch.randn(2, 7, 3 * heads * 8, generator=torch.Generator().manual_seed(heads))
    out = core(qkv.requires_grad_())
    torch.testing.assert_close(out.double(), by_formula(qkv, heads, 8), rtol=1e-5, atol=1e-6)
    forward = 2 * 2 * (2 * heads * 7 * 7 * 8) // 2  # two products, half of each
    assert flops == [forward]
    out.sum().backward()
    assert flops == [forward, 2 * forward]
