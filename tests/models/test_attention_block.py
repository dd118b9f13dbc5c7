"""Blocks of attention and what merges them, against attention over all keys at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megafp8.models.attention_block import Block, attend, attend_backward, merge_

HEADS = [(4, 4), (4, 2), (3, 1), (5, 5)]  # of queries, of keys and values
QUERIES, KEYS, WIDTH = 6, 10, 8
ONES = torch.ones(1, dtype=torch.float64)


def inputs(heads: int, groups: int, keys: int = KEYS) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(heads)
    shapes = [(2, heads, QUERIES, WIDTH), *[(2, groups, keys, WIDTH)] * 2]
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return q, k, v, torch.randn(shapes[0], dtype=torch.float64)


def close(found: torch.Tensor, expected: torch.Tensor | None) -> None:
    assert expected is not None
    torch.testing.assert_close(found, expected.detach(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("keep", [None, ONES], ids=["kernel", "formula"])
def test_two_blocks_are_the_whole(heads: tuple[int, int], keep: torch.Tensor | None) -> None:
    q, k, v, grad = inputs(*heads)
    expected = scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    expected.backward(grad)
    block = Block(0.3, keep=keep)
    parts = [slice(0, 4), slice(4, KEYS)]
    with torch.no_grad():
        (out, lse), more = (attend(q, k[:, :, part], v[:, :, part], block) for part in parts)
        merge_(out, lse, *more)
        close(out, expected)
        grads = [
            attend_backward(grad, q, k[:, :, part], v[:, :, part], out, lse, block)
            for part in parts
        ]
    close(grads[0][0] + grads[1][0], q.grad)
    close(torch.cat([dk for _, dk, _ in grads], dim=2), k.grad)
    close(torch.cat([dv for _, _, dv in grads], dim=2), v.grad)


@pytest.mark.parametrize("keep", [None, ONES], ids=["kernel", "formula"])
def test_a_causal_block(keep: torch.Tensor | None) -> None:
    q, k, v, grad = inputs(4, 2, QUERIES)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    expected.backward(grad)
    block = Block(0.3, is_causal=True, keep=keep)
    with torch.no_grad():
        out, lse = attend(q, k, v, block)
        close(out, expected)
        grads = attend_backward(grad, q, k, v, out, lse, block)
    for found, tensor in zip(grads, (q, k, v), strict=True):
        close(found, tensor.grad)


def test_dropout_is_what_autograd_makes_of_it() -> None:
    """Probabilities are dropped, their sum is not: as in torch's attention."""
    q, k, v, grad = inputs(4, 4)
    keep = torch.empty(2, 4, QUERIES, KEYS, dtype=torch.float64).bernoulli_(0.7) / 0.7
    expected = ((q @ k.mT * 0.3).softmax(-1) * keep) @ v
    expected.backward(grad)
    block = Block(0.3, keep=keep)
    with torch.no_grad():
        out, lse = attend(q, k, v, block)
        close(out, expected)
        grads = attend_backward(grad, q, k, v, out, lse, block)
    for found, tensor in zip(grads, (q, k, v), strict=True):
        close(found, tensor.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_on_a_gpu(dtype: torch.dtype, is_causal: bool) -> None:
    """Half precision takes the flash kernel; a GPU's FP32 the formula."""
    keys, (rtol, atol) = (
        QUERIES if is_causal else KEYS,
        ((1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 2e-2)),
    )
    q, k, v, grad = inputs(4, 2, keys)
    expected = scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True
    )
    expected.backward(grad)
    there = [x.detach().to("cuda", dtype) for x in (q, k, v, grad)]
    block = Block(0.3, is_causal=is_causal)
    out, lse = attend(*there[:3], block)
    grads = attend_backward(there[3], *there[:3], out, lse, block)
    wanted = [expected.detach(), q.grad, k.grad, v.grad]
    for found, tensor in zip((out, *grads), wanted, strict=True):
        assert tensor is not None and found.dtype == dtype
        torch.testing.assert_close(found.cpu().double(), tensor, rtol=rtol, atol=atol)
