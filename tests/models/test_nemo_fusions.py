"""Test what is said of NeMo's fusions: `results differ only by rounding`.

For each key with this note, what NeMo computes with the key and without is written down, and both
are compared in FP64 with what our model computes. A key whose two forms are two functions, such as
`bias_activation_fusion` (tests/config/test_gelu.py), must not have the note.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from megafp8.config.nemo import nemo_keys
from megafp8.models.parts import Norm, Parts
from megafp8.models.positions import rotary
from megafp8.models.random import RandomStreams
from tests.tiny import gpt_spec, of_heads

NOTE = "results differ only by rounding"
WIDTH, SEQ, HEAD = 32, 6, 8
Forms = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What our model computes, and NeMo with the key at True and at False."""


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def persistent_norm() -> Forms:
    """A kernel that reads a row once adds up sums and squares; the other subtracts the mean."""
    norm = Norm(Parts(gpt_spec(), torch.float64, 7, RandomStreams(7)), "final_norm")
    assert norm.bias is not None
    with torch.no_grad():
        norm.weight.copy_(drawn(WIDTH))
        norm.bias.copy_(drawn(WIDTH, seed=2))
    x = drawn(3, SEQ, WIDTH, seed=3)
    mean, square = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
    one = (x - mean) / (square - mean.square() + 1e-5).sqrt() * norm.weight + norm.bias
    shifted = x - mean
    variance = shifted.square().mean(-1, keepdim=True)
    two = shifted * torch.rsqrt(variance + 1e-5) * norm.weight + norm.bias
    return norm(x), one, two


def bias_dropout_add() -> Forms:
    """One kernel for (product + bias), dropout and the residual, or three steps."""
    x, weight, bias, residual = drawn(3, WIDTH), drawn(WIDTH, WIDTH), drawn(WIDTH), drawn(3, WIDTH)
    kept = (drawn(3, WIDTH, seed=5) > 0).double() / 0.5
    ours = residual + F.linear(x, weight, bias) * kept
    product = x @ weight.t()
    return ours, residual + (product + bias) * kept, torch.add(residual, (product + bias).mul(kept))


def masked_softmax() -> Forms:
    """The kernel leaves later tokens out; without it they get -10000 before the softmax."""
    q, k, v = (drawn(1, 2, SEQ, HEAD, seed=seed) for seed in (1, 2, 3))
    scores = q @ k.transpose(-1, -2) / HEAD**0.5
    later = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    weights = scores.exp().masked_fill(later, 0.0)
    fused = weights / weights.sum(-1, keepdim=True) @ v
    plain = scores.masked_fill(later, -10000.0).softmax(-1) @ v
    return F.scaled_dot_product_attention(q, k, v, is_causal=True), fused, plain


def attention_backend() -> Forms:
    """Flash attention goes through the keys in blocks, with a running maximum and sum."""
    ours, _, plain = masked_softmax()
    q, k, v = (drawn(1, 2, SEQ, HEAD, seed=seed) for seed in (1, 2, 3))
    top = torch.full((1, 2, SEQ, 1), -torch.inf, dtype=torch.float64)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for begin in range(0, SEQ, 2):
        keys = torch.arange(begin, begin + 2)
        scores = q @ k[:, :, keys].transpose(-1, -2) / HEAD**0.5
        scores = scores.masked_fill(keys > torch.arange(SEQ)[:, None], -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - higher).exp(), (top - higher).exp()
        out = out * shrink + weights @ v[:, :, keys]
        total, top = total * shrink + weights.sum(-1, keepdim=True), higher
    return ours, out / total, plain


def rope() -> Forms:
    """The kernel rotates pairs (i, i + R/2); without it a rotated half is multiplied and added."""
    x, turn = drawn(1, 2, SEQ, HEAD), rotary(torch.arange(SEQ), of_heads(HEAD))
    half = HEAD // 2
    speeds = 1.0 / 10000.0 ** (torch.arange(half).float() * 2 / HEAD)
    angles = (torch.arange(SEQ).float()[:, None] * speeds).double()
    first, second = x[..., :half], x[..., half:]
    fused = torch.cat((first * angles.cos() - second * angles.sin(),
                       second * angles.cos() + first * angles.sin()), -1)  # fmt: skip
    both = torch.cat((angles, angles), -1)
    plain = x * both.cos() + torch.cat((-second, first), -1) * both.sin()
    return turn(x), fused, plain


def cross_entropy() -> Forms:
    """The kernel subtracts the logit from the logarithm of the sum; the other takes a logarithm of
    the softmax."""
    logits, targets = drawn(5, 11), torch.tensor([1, 4, 10, 0, 3])
    at = torch.arange(5), targets
    fused = logits.exp().sum(-1).log() - logits[at]
    return F.cross_entropy(logits, targets, reduction="none"), fused, -logits.softmax(-1)[at].log()


FORMS: dict[str, Callable[[], Forms]] = {
    "model.persist_layer_norm": persistent_norm,
    "model.bias_dropout_add_fusion": bias_dropout_add,
    "model.masked_softmax_fusion": masked_softmax,
    "model.attention_backend": attention_backend,
    "model.apply_rope_fusion": rope,
    "model.cross_entropy_loss_fusion": cross_entropy,
}


def test_every_key_with_the_note_is_shown() -> None:
    noted = {path for path, key in nemo_keys().items() if key.note.endswith(NOTE)}
    assert noted == FORMS.keys()


@pytest.mark.parametrize("key", FORMS)
def test_both_forms_are_one_function(key: str) -> None:
    """Within 1e-12 of the largest number; RoPE's angles are FP32, as in NeMo, so within 1e-6."""
    ours, fused, plain = FORMS[key]()
    bound = (1e-6 if "rope" in key else 1e-12) * ours.abs().max()
    for other in (fused, plain):
        assert (ours - other).abs().max() <= bound
