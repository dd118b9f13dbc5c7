"""Blocks of attention and what merges them, against attention over all keys at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fp8_numerics import cpu
from megafp8.models.attention import AttentionCore
from megafp8.models.random import RandomStreams
from megafp8.ops import attention as attention_module
from megafp8.ops import torch_private
from megafp8.ops.attention import (
    AttentionTile,
    attend,
    attend_backward,
    attention,
    merge_,
)

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
    block = AttentionTile(0.3, keep=keep)
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
    block = AttentionTile(0.3, is_causal=True, keep=keep)
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
    block = AttentionTile(0.3, keep=keep)
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
    block = AttentionTile(0.3, is_causal=is_causal)
    out, lse = attend(*there[:3], block)
    grads = attend_backward(there[3], *there[:3], out, lse, block)
    wanted = [expected.detach(), q.grad, k.grad, v.grad]
    for found, tensor in zip((out, *grads), wanted, strict=True):
        assert tensor is not None and found.dtype == dtype
        torch.testing.assert_close(found.cpu().double(), tensor, rtol=rtol, atol=atol)


MASKS = ("causal", "documents", "bias")


def masked(kind: str) -> torch.Tensor | None:
    """Of QUERIES queries and keys."""
    earlier = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()
    if kind == "documents":
        ends = torch.arange(QUERIES) // 4
        return (earlier & (ends[:, None] == ends)).expand(2, 1, QUERIES, QUERIES)
    if kind == "bias":
        slopes = torch.arange(1.0, 5.0)[:, None, None] * torch.arange(QUERIES) / 8
        return slopes.bfloat16().masked_fill(~earlier, float("-inf"))
    return None


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    "dtype, forward_is_fp32",
    [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)],
)
def test_widened_attention_keeps_halves_and_rounds_once(
    dtype: torch.dtype, forward_is_fp32: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against FP64 over the same BF16 or FP16 inputs, u being half a unit of their last place.

    Output and gradients are rounded once: u of each. A forward pass that is not in FP32 rounds the
    probabilities too, before their sum divides them. Backward reads the output through
    D = sum(grad * out) alone, so D is off by e = sum(|grad| |error of out|); it reaches the
    gradient of the scores as P e, and from there that of the queries as scale P e |k| and that of
    the keys as scale P^T e |q|. FP32's own errors are 2^-24 for each of some 50 operations: 2^-17
    of the magnitudes covers them. FP16's numbers below 2^-14 are 2^-24 apart.
    """
    if dtype == torch.bfloat16:
        monkeypatch.setattr(cpu, "FAST_AT_BF16", not forward_is_fp32)
    heads, groups, scale, u = 4, 2, 0.3, torch.finfo(dtype).eps / 2
    exact = [x.detach().to(dtype).double() for x in inputs(heads, groups, QUERIES)]
    q, k, v = (x.to(dtype).requires_grad_() for x in exact[:3])
    q64, k64, v64 = (x.clone().requires_grad_() for x in exact[:3])
    grad, mask = exact[3], masked(kind)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = attention(q, k, v, AttentionTile(scale, is_causal=mask is None, mask=mask))
    assert [x.dtype for x in kept] == [dtype] * 4 + [torch.float32]
    assert kept[4].numel() == 2 * heads * QUERIES, "the log-sum-exp alone is in FP32"
    out.backward(grad.to(dtype))

    k_all, v_all = (x.repeat_interleave(heads // groups, dim=1) for x in (k64, v64))
    bias = torch.zeros(QUERIES, QUERIES, dtype=torch.float64)
    if mask is None:
        bias.masked_fill_(torch.ones_like(bias, dtype=torch.bool).triu(1), float("-inf"))
    elif mask.dtype == torch.bool:
        bias = bias.expand(mask.shape).masked_fill(~mask, float("-inf"))
    else:
        bias = mask.double()
    probs = (q64 @ k_all.mT * scale + bias).softmax(-1)
    expected = probs @ v_all
    expected.backward(grad)
    with torch.no_grad():
        e = (grad.abs() * (out.double() - expected).abs()).sum(-1, keepdim=True)
        products = grad.abs() @ v_all.abs().mT + (grad * expected).abs().sum(-1, keepdim=True)
        size = scale * probs * products  # of the scores' gradients

        def of_groups(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(1, (groups, -1)).sum(2)

        carried = {
            "out": torch.zeros_like(expected) if forward_is_fp32 else u * probs @ v_all.abs(),
            "q": scale * (probs * e) @ k_all.abs(),
            "k": of_groups(scale * (probs * e).mT @ q64.abs()),
            "v": torch.zeros_like(v64),
        }
        magnitude = {
            "out": probs @ v_all.abs(),
            "q": size @ k_all.abs(),
            "k": of_groups(size.mT @ q64.abs()),
            "v": of_groups(probs.mT @ grad.abs()),
        }
        pairs = {"out": (out, expected), "q": (q.grad, q64.grad)}
        pairs |= {"k": (k.grad, k64.grad), "v": (v.grad, v64.grad)}
        for name, (found, wanted) in pairs.items():
            assert found is not None and wanted is not None and found.dtype == dtype
            bound = u * wanted.abs() + (1 + u) * carried[name] + 2.0**-17 * magnitude[name]
            bound += 2.0**-25 if dtype == torch.float16 else 0.0
            assert ((found.double() - wanted).abs() <= bound).all(), name


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let FP32 products have less than the highest precision, as on a CPU with AVX-512."""
    monkeypatch.setattr(attention_module, "_MAY_CALL_ONEDNN", True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record torch's precision in each call of its attention for CPUs."""
    calls: list[str] = []
    for name in ("cpu_attention", "cpu_attention_backward"):
        kernel = getattr(torch_private, name)

        def run(*args: Any, kernel: Any = kernel, **options: Any) -> Any:
            calls.append(torch.get_float32_matmul_precision())
            return kernel(*args, **options)

        monkeypatch.setattr(torch_private, name, run)
    return calls


def core_results(seq: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a core with three heads in FP32, and its input's gradient."""
    core = AttentionCore(width, 0.0, "site", RandomStreams(0), lambda flops: None)
    generator = torch.Generator().manual_seed(seq)
    qkv = torch.randn(2, seq, 9 * width, generator=generator, requires_grad=True)
    out = core(qkv)
    grad = torch.randn(out.shape, generator=generator)
    return out, *torch.autograd.grad(out, qkv, grad)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("width", [8, 32, 64])
@pytest.mark.parametrize("seq", [1, 64, 191])
def test_short_attention_has_mkls_products(seq: int, width: int, seen: list[str]) -> None:
    """On a CPU with AVX-512 the bits of most of these shapes differ if oneDNN multiplies."""
    found = core_results(seq, width)
    assert seen == ["highest", "highest"]
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")
    assert all(map(torch.equal, found, core_results(seq, width)))
    assert len(seen) == 2, "at the highest precision torch's own function runs"


@pytest.mark.usefixtures("chosen")
def test_long_attention_keeps_the_chosen_products(seen: list[str]) -> None:
    core_results(192, 8)
    q, *_ = inputs(4, 2)
    assert not attention_module.is_faster_here(q, q), "FP64 has one kind of product"
    assert seen == [] and torch.get_float32_matmul_precision() == "medium"


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "has_amx, seq, in_fp32",
    [(True, 1, True), (True, 191, True), (True, 192, False), (False, 192, True)],
)
def test_the_backward_pass_of_halves_is_in_fp32(
    has_amx: bool, seq: int, in_fp32: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs are those of torch's own function, and MKL has short products of this pass."""
    monkeypatch.setattr(cpu, "FAST_AT_BF16", True)
    monkeypatch.setattr(cpu, "HAS_AMX", has_amx)
    kernel, calls = torch_private.cpu_attention_backward, []

    def run(*args: Any, **options: Any) -> Any:
        calls.append(({x.dtype for x in args[:5]}, torch.get_float32_matmul_precision()))
        return kernel(*args, **options)

    monkeypatch.setattr(torch_private, "cpu_attention_backward", run)
    core = AttentionCore(8, 0.0, "site", RandomStreams(0), lambda flops: None)
    qkv = torch.randn(2, seq, 72).to(dtype).requires_grad_()
    out = core(qkv)
    out.sum().backward()
    chosen = "highest" if seq < 192 else "medium"
    assert calls == ([({torch.float32}, chosen)] if in_fp32 else [])
    assert qkv.grad is not None and qkv.grad.dtype == dtype
    q, k, v = qkv.unflatten(2, (9, 8)).transpose(1, 2).chunk(3, dim=1)
    wanted = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(out, wanted.transpose(1, 2).flatten(2))


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_few_queries_of_many_keys_are_not_short(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are many queries of few keys, as in blocks of documents and of a ring."""
    monkeypatch.setattr(cpu, "FAST_AT_BF16", True)
    monkeypatch.setattr(cpu, "HAS_AMX", True)
    short, long = (torch.empty(1, 1, seq, 8, dtype=dtype) for seq in (191, 192))
    pairs = [(short, short), (short, long), (long, short)]
    assert [attention_module.is_faster_here(*pair) for pair in pairs] == [True, False, False]


@pytest.mark.usefixtures("chosen")
def test_an_error_leaves_the_chosen_precision() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError):
        attend(q, q, q[..., :7, :, :4].unsqueeze(0), AttentionTile(1.0))
    assert torch.get_float32_matmul_precision() == "medium"
