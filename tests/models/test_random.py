"""Dropout masks are functions of seed, step, microbatch, site and, where sharded, rank."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megafp8.models.attention import AttentionCore
from megafp8.models.parts import Dropout
from megafp8.models.random import RandomStreams

X = torch.ones(64, 32)


def mask(
    *,
    seed: int = 1,
    step: int = 1,
    index: int = 0,
    site: str = "here",
    tp_rank: int = 0,
    cp_rank: int = 0,
    sharded: bool = False,
) -> torch.Tensor:
    streams = RandomStreams(seed, tp_rank, cp_rank)
    streams.begin_microbatch(step, index)
    out: torch.Tensor = Dropout(0.25, site, streams, sharded)(X)
    return out


def test_same_key_same_mask_whatever_was_drawn_before() -> None:
    first = mask()
    torch.rand(17)
    mask(site="elsewhere")
    assert torch.equal(mask(), first)


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"step": 2}, {"index": 1}, {"site": "there"}], ids=lambda c: str(c)
)
def test_any_other_key_is_another_mask(change: dict[str, object]) -> None:
    assert not torch.equal(mask(**change), mask())  # type: ignore[arg-type]


def test_step_and_microbatch_do_not_blur() -> None:
    assert not torch.equal(mask(step=1, index=11), mask(step=11, index=1))
    assert not torch.equal(mask(step=1, index=2), mask(step=2, index=1))


def test_sharded_sites_differ_by_rank_and_replicated_ones_agree() -> None:
    assert torch.equal(mask(tp_rank=1), mask(tp_rank=0))
    assert not torch.equal(mask(tp_rank=1, sharded=True), mask(tp_rank=0, sharded=True))


def test_ranks_with_other_tokens_draw_others() -> None:
    assert not torch.equal(mask(cp_rank=1), mask())
    assert not torch.equal(mask(cp_rank=1), mask(cp_rank=2))
    assert torch.equal(mask(cp_rank=1, tp_rank=1), mask(cp_rank=1)), "both have these tokens"
    assert not torch.equal(mask(cp_rank=1, sharded=True), mask(tp_rank=1, sharded=True))


def test_values_and_share_of_dropped_ones() -> None:
    values = mask()
    assert values.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (values == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


def test_evaluation_and_zero_probability_drop_nothing() -> None:
    streams = RandomStreams(1)
    assert Dropout(0.5, "here", streams, False).eval()(X) is X
    assert Dropout(0.0, "here", streams, False)(X) is X


def attention(dropout: float, rank: int = 0) -> AttentionCore:
    streams = RandomStreams(1, rank)
    return AttentionCore(8, dropout, "attention.dropout", streams, lambda flops: None)


def qkv() -> torch.Tensor:
    return torch.randn(2, 10, 3 * 16, generator=torch.Generator().manual_seed(0))


def test_attention_dropout_is_keyed_and_sharded() -> None:
    one, again = attention(0.5), attention(0.5)
    assert torch.equal(one(qkv()), again(qkv()))
    one.streams.begin_microbatch(1, 1)
    assert not torch.equal(one(qkv()), again(qkv()))
    assert not torch.equal(attention(0.5, rank=1)(qkv()), again(qkv()))
    assert torch.equal(attention(0.5).eval()(qkv()), attention(0.0)(qkv()))


def test_recomputed_forward_draws_the_same_masks() -> None:
    """Gradients through activation recomputation equal those without."""
    streams = RandomStreams(1)
    dropouts = torch.nn.Sequential(*(Dropout(0.3, f"site {i}", streams, False) for i in range(2)))
    gradients = []
    for recompute in (False, True):
        streams.begin_microbatch(3, 0)
        x = torch.linspace(1, 2, 512).view(8, 64).requires_grad_()
        body = lambda t: (dropouts(t) ** 2).sin()  # noqa: E731
        out = (
            checkpoint(body, x, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else body(x)
        )
        torch.rand(5)
        out.sum().backward()
        gradients.append(x.grad)
    assert gradients[0] is not None and torch.equal(gradients[0], gradients[1])
