"""Attention within documents against a formula in FP64 that masks all scores.

The bounds follow from the formats. A score is a sum of E products, so its error is at most E + 2
roundings of FP32 times the sum of the products' magnitudes. A probability is off by at most twice
the largest error of a score, relatively, plus roundings: of its own format, of the exponential, and
of a sum over K keys. Each later product and sum adds its own roundings to what it is given. All of
it is computed with magnitudes in FP64, element by element, in `bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from fp8_numerics import cpu
from megafp8.models import packed
from megafp8.models.attention import (
    QKV,
    AttentionContext,
    AttentionCore,
    attention_context,
)
from megafp8.models.documents import SHORT, Documents, document_ids
from megafp8.models.positions import alibi_slopes
from megafp8.models.random import RandomStreams
from megafp8.ops.torch_private import TorchDispatchMode
from megafp8.specs.model import BLOCK_QUERIES as QUERIES
from megafp8.train.live_bytes import LiveBytes
from tests.tiny import gpt_spec

CPU = torch.device("cpu")
SIZE = 8
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}

LENGTHS: dict[str, list[list[int]]] = {
    "two": [[100, 156]],
    "one token each": [[1] * 256],
    "a whole sample": [[256], [17, 239]],
    "one token at each end": [[1, 254, 1]],
    "hundreds": [[1, 2, 3, 1, 4, 2, 1, 2] * 16, [63, 1, 64, 65, 63]],
    "around a block": [[SHORT - 1, 1, SHORT, SHORT + 1, 255 - 3 * SHORT]],
}


def borders_of(lengths: list[list[int]]) -> torch.Tensor:
    flat = [0, *(length for row in lengths for length in row)]
    return torch.tensor(flat).cumsum(0).to(torch.int32)


def context_of(borders: torch.Tensor, seq: int, **options: float | str) -> AttentionContext:
    spec = gpt_spec(hidden_size=4 * SIZE, num_attention_heads=4, **options)
    heads, rows = slice(0, 4), int(borders[-1]) // seq
    return attention_context(spec, heads, torch.float32, (rows, seq), CPU, cu_seqlens_N1=borders)


def core_of(groups: int = 4, *, dropout: float = 0.0, layer_scaling: int = 1) -> AttentionCore:
    return AttentionCore(
        SIZE, dropout, "site", RandomStreams(3), lambda flops: None,
        queries_per_group=4 // groups, layer_scaling=layer_scaling,
    )  # fmt: skip


def inputs(batch: int, seq: int, groups: int, dtype: torch.dtype) -> tuple[QKV, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch + seq + groups)
    shapes = [(batch, 4, seq, SIZE), *[(batch, groups, seq, SIZE)] * 2]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    grad = torch.randn(batch, seq, 4 * SIZE, generator=generator, dtype=torch.float64)
    return QKV(*(x.to(dtype).requires_grad_() for x in drawn)), grad.to(dtype)


class Results(NamedTuple):
    """Output [B, H, S, E] and the gradients of queries, keys and values, or their bounds."""

    output: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def results_of(
    core: AttentionCore, qkv: QKV, grad: torch.Tensor, context: AttentionContext
) -> Results:
    out = core(qkv, context)
    out.backward(grad)
    grads = [x.grad for x in qkv]
    return Results(by_head(out), *grads)  # type: ignore[arg-type]


def by_head(x_BSF: torch.Tensor) -> torch.Tensor:
    return x_BSF.detach().unflatten(-1, (4, SIZE)).transpose(1, 2)


class Formula(NamedTuple):
    """The scores and what follows from them, all in FP64; keys and values of each query head."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    probs: torch.Tensor
    keep: torch.Tensor
    dscores: torch.Tensor  # of the scaled scores
    results: Results


def formula(
    qkv: QKV,
    grad: torch.Tensor,
    ids: torch.Tensor,
    *,
    slopes: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    window: int | None = None,
) -> Formula:
    q, k, v = (x.detach().double() for x in qkv)
    share = 4 // k.shape[1]
    k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
    seq, heads_grad = q.shape[2], by_head(grad).double()
    places = torch.arange(seq)
    scores = q @ k.mT / math.sqrt(SIZE)
    if slopes is not None:
        scores = scores - slopes[:, None, None].double() * (places[:, None] - places).abs()
    seen = (places <= places[:, None]) & (ids[:, :, None] == ids[:, None, :])
    if window is not None:
        seen = seen & (places[:, None] - places <= window)
    probs = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    keep = torch.ones(1, dtype=torch.float64) if keep is None else keep.double()
    kept = probs * keep
    out = kept @ v
    dprobs = (heads_grad @ v.mT) * keep
    dscores = probs * (dprobs - (heads_grad * out).sum(-1, keepdim=True))
    dk, dv = dscores.mT @ q / math.sqrt(SIZE), kept.mT @ heads_grad
    dk, dv = (x.unflatten(1, (-1, share)).sum(2) for x in (dk, dv))
    found = Results(out, dscores @ k / math.sqrt(SIZE), dk, dv)
    return Formula(q, k, v, heads_grad, probs, keep, dscores, found)


def bounds(exact: Formula, dtype: torch.dtype) -> Results:
    """How far the results may be off in `dtype`, whose products are summed in FP32 at least."""
    q, k, v, grad = (x.abs() for x in exact[:4])
    store, add = ROUNDING[dtype], min(ROUNDING[dtype], 2.0**-24)
    groups, seq = exact.results.key.shape[1], q.shape[2]
    scale = 1 / math.sqrt(SIZE)
    score = ((SIZE + 4) * add * (q @ k.mT) * scale).amax(-1, keepdim=True)
    relative = 2 * score + (seq + 8) * add + store  # of a probability
    kept, keep = exact.probs * exact.keep, exact.keep
    out = (kept * relative) @ v + (seq * add + store) * (kept @ v)
    dprob = keep * (grad @ v.mT)
    mean = (grad * out).sum(-1, keepdim=True)
    mean = mean + SIZE * add * (grad * exact.results.output.abs()).sum(-1, keepdim=True)
    both = dprob + (grad * exact.results.output.abs()).sum(-1, keepdim=True)
    ds = exact.dscores.abs() * (relative + store)
    ds = ds + exact.probs * (SIZE * add * dprob + mean + 2 * add * both)
    dsum = exact.dscores.abs()
    dq = (ds @ k + (seq * add + store) * (dsum @ k)) * scale
    dk = (ds.mT @ q + (seq * add + store) * (dsum.mT @ q)) * scale
    dv = (kept * relative).mT @ grad + (seq * add + store) * (kept.mT @ grad)
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return Results(*(2 * x for x in (out, dq, dk, dv)))  # and the terms of higher order


def assert_within(found: Results, exact: Formula, dtype: torch.dtype) -> None:
    for name, mine, right, bound in zip(
        Results._fields, found, exact.results, bounds(exact, dtype), strict=True
    ):
        worst = ((mine.double() - right).abs() / bound.clamp(min=1e-300)).max().item()
        assert worst <= 1, f"{name}: {worst:.3g} times its bound"


def check(
    lengths: list[list[int]],
    dtype: torch.dtype = torch.float32,
    *,
    groups: int = 4,
    alibi: bool = False,
    layer_scaling: int = 1,
    borders: torch.Tensor | None = None,
) -> None:
    """Compare, with other `borders` than the right ones if they are given."""
    right, seq = borders_of(lengths), sum(lengths[0])
    qkv, grad = inputs(len(lengths), seq, groups, dtype)
    options = {"position_embedding_type": "alibi"} if alibi else {}
    context = context_of(right if borders is None else borders, seq, **options)
    assert context.mask is None
    found = results_of(core_of(groups, layer_scaling=layer_scaling), qkv, grad, context)
    slopes = torch.tensor(alibi_slopes(4)) if alibi else None
    exact = formula(qkv, grad, document_ids(right, seq), slopes=slopes)
    assert_within(found, exact, dtype)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_all_lengths(name: str, alibi: bool, dtype: torch.dtype) -> None:
    check(LENGTHS[name], dtype, alibi=alibi, groups=2)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_of_heads_and_layer_scaling(groups: int) -> None:
    check(LENGTHS["hundreds"], groups=groups, layer_scaling=3)


@pytest.mark.parametrize("widens", [False, True], ids=["own products", "products in FP32"])
def test_bf16(widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "FAST_AT_BF16", not widens)
    check(LENGTHS["hundreds"], torch.bfloat16, groups=2)
    check(LENGTHS["a whole sample"], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("place", range(1, 5))
@pytest.mark.parametrize("by", [-1, 1])
def test_a_border_that_is_off_by_one_is_found(place: int, by: int, dtype: torch.dtype) -> None:
    """A token that sees the neighbouring document, or does not see its own, breaks the bound."""
    lengths = [[70, 90, 20, 30, 46]]
    borders = borders_of(lengths)
    check(lengths, dtype, borders=borders)
    borders[place] += by
    with pytest.raises(AssertionError, match="times its bound"):
        check(lengths, dtype, borders=borders)


@given(st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=40), min_size=1, max_size=3),
       st.booleans())  # fmt: skip
def test_each_score_is_in_one_block(rows: list[list[int]], cuts_queries: bool) -> None:
    """Every score that is seen is in one block, and no more blocks than needed are listed."""
    seq = max(map(sum, rows))
    rows = [[*row, seq - sum(row)] if sum(row) < seq else row for row in rows]
    borders = borders_of(rows)
    documents = Documents(borders, seq, CPU, cuts_queries)
    ids = document_ids(borders, seq)
    counts = torch.zeros(len(rows), seq, seq, dtype=torch.int8)
    for area in documents.areas:
        num_queries, num_keys = area.stop - area.first_query, area.stop - area.first_key
        assert not area.is_causal or num_queries == num_keys
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
        is_one = len(set(ids[area.row, area.keys].tolist())) == 1
        if not area.is_causal or num_keys <= 3:
            seen = documents.seen(area)
        assert is_one or num_keys <= SHORT
        assert num_queries <= QUERIES or not cuts_queries
        counts[area.row, area.queries, area.keys] += seen
    same = ids[:, :, None] == ids[:, None, :]
    assert torch.equal(counts, same.tril().to(torch.int8))
    # Of two blocks beside each other, the second would not have fitted into the first.
    assert len(documents.areas) <= len(rows) * (2 * seq / SHORT + 1) + seq * len(rows) / QUERIES + 1
    assert documents.num_seen == 2 * int(counts.sum()) - counts.shape[0] * seq


def test_samples_of_one_document_each_are_plain_causal_attention() -> None:
    assert context_of(borders_of([[8], [8]]), 8) == AttentionContext()
    assert context_of(borders_of([[8], [7, 1]]), 8).documents is not None


def dropout_of(core: AttentionCore, borders: torch.Tensor, seq: int) -> torch.Tensor:
    """What each block draws, in its place among all scores."""
    documents = Documents(borders, seq, CPU, True)
    keep = torch.zeros(borders[-1] // seq, 4, seq, seq)
    for number, area in enumerate(documents.areas):
        shape = (1, 4, area.stop - area.first_query, area.stop - area.first_key)
        drawn = core.kept(f"site block {number}", shape, CPU, core.dropout)
        keep[area.row, :, area.queries, area.keys] = drawn[0]
    return keep


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
def test_dropout(alibi: bool) -> None:
    """Backward draws the masks of its microbatch again, though another one has run meanwhile."""
    lengths = [[200, 1, 2, 53]]
    borders = borders_of(lengths)
    core = core_of(dropout=0.3)
    options = {"position_embedding_type": "alibi"} if alibi else {}
    context = context_of(borders, 256, attention_dropout=0.3, **options)
    qkv, grad = inputs(1, 256, 4, torch.float32)
    core.streams.begin_microbatch(5, 2)
    keep = dropout_of(core, borders, 256)
    assert 0.25 < (keep[0, :, :200, :200].tril() == 0).sum() / (4 * 200**2) - 0.5 + 0.15 < 0.55
    out = core(qkv, context)
    core.streams.begin_microbatch(5, 3)
    out.backward(grad)
    found = Results(by_head(out), *(x.grad for x in qkv))  # type: ignore[arg-type]
    slopes = torch.tensor(alibi_slopes(4)) if alibi else None
    exact = formula(qkv, grad, document_ids(borders, 256), slopes=slopes, keep=keep)
    assert_within(found, exact, torch.float32)
    core.eval()
    exact = formula(qkv, grad, document_ids(borders, 256), slopes=slopes)
    torch.testing.assert_close(by_head(core(qkv, context)).double(), exact.results.output,
                               rtol=0, atol=1e-5)  # fmt: skip


class Largest(TorchDispatchMode):
    """Record the most elements that a tensor has that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *found])
        return out


@pytest.mark.parametrize("length", [16, 1024, 2048], ids="documents of {}".format)
@pytest.mark.parametrize("kind", ["plain", "alibi", "dropout"])
def test_memory_is_a_line_in_the_length(kind: str, length: int) -> None:
    """No tensor has S x S elements, and four times the length has at most four times the bytes."""
    dropout = 0.1 if kind == "dropout" else 0.0
    options = {"position_embedding_type": "alibi"} if kind == "alibi" else {}

    def run(seq: int, length: int) -> tuple[int, int]:
        lengths = [length] * (seq // length)
        if len(lengths) == 1 and dropout:  # it is plain causal attention, of torch
            lengths = [1, length - 1]
        context = context_of(borders_of([lengths]), seq, attention_dropout=dropout, **options)
        qkv, grad = inputs(1, seq, 4, torch.float32)
        with LiveBytes() as live, Largest() as largest:
            live.begin()
            results_of(core_of(dropout=dropout), qkv, grad, context)
        return live.most, largest.elements

    short, _ = run(512, length if length == 16 else length // 4)
    long, largest = run(2048, length)
    assert largest < 2048**2 / 3
    assert long <= 4 * short + (64 << 10)


def by_contract(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What torch's documentation says of `varlen_attn`, for causal attention in a window."""
    assert cu_seq_q.dtype == torch.int32 and cu_seq_k is cu_seq_q
    earlier, later = window_size
    assert earlier >= -1 and later == 0
    assert max_q == max_k == int(cu_seq_q.diff().max())
    outs = []
    for start, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        seen = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if earlier != -1:
            seen = seen.triu(-earlier)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("groups", [2, 4])
def test_the_kernel_for_gpus_gets_what_its_contract_asks_for(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU has run this: a function that does as torch's documentation says takes its place."""
    monkeypatch.setattr(packed, "varlen_kernel", lambda: by_contract)
    monkeypatch.setattr("megafp8.models.attention.uses_varlen", lambda *_, **__: True)
    check(LENGTHS["hundreds"], groups=groups)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["blocks", "varlen_attn"])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    lengths, device = LENGTHS["hundreds"], torch.device("cuda")
    borders = borders_of(lengths)
    qkv, grad = inputs(2, 256, 2, dtype)
    there = QKV(*(x.detach().to(device).requires_grad_() for x in qkv))
    spec = gpt_spec(hidden_size=4 * SIZE, num_attention_heads=4)
    context = attention_context(spec, slice(0, 4), dtype, (2, 256), device, cu_seqlens_N1=borders)
    found = results_of(core_of(2), there, grad.to(device), context)
    exact = formula(qkv, grad, document_ids(borders, 256))
    assert_within(Results(*(x.cpu() for x in found)), exact, dtype)


def test_torchs_kernel_takes_the_call() -> None:
    """On the meta device, where torch checks the arguments and gives the output's shape."""
    kernel: Callable[..., torch.Tensor] | None = packed.varlen_kernel()
    if kernel is None:
        pytest.skip("this version of torch has no attention for sequences of many lengths")
    for groups in (4, 2) if packed.takes_groups(kernel) else (4,):
        q, k, v = (torch.empty(2, heads, 8, SIZE, dtype=torch.bfloat16, device="meta")
                   for heads in (4, groups, groups))  # fmt: skip
        documents = Documents(borders_of([[3, 5], [8]]), 8, torch.device("meta"))
        assert packed.attend_varlen(q, k, v, documents, 0.3).shape == q.shape


def test_a_kernel_without_groups_has_models_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch 2.11 has no `enable_gqa`: it is used where each query head has its own keys."""

    def kernel(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int,
               max_k: int, *, scale: float | None = None,
               window_size: tuple[int, int] = (-1, -1)) -> Any:  # fmt: skip
        assert scale is not None
        return by_contract(
            query,
            key,
            value,
            cu_seq_q,
            cu_seq_k,
            max_q,
            max_k,
            scale=scale,
            window_size=window_size,
        )

    monkeypatch.setattr(packed, "varlen_kernel", lambda: kernel)
    traits = (torch.device("cuda"), torch.bfloat16, 64)
    for has_groups in (False, True):
        used = packed.uses_varlen(*traits, dropout=0.0, has_bias=False, has_groups=has_groups)
        assert used != has_groups
    monkeypatch.setattr("megafp8.models.attention.uses_varlen", lambda *_, **__: True)
    check(LENGTHS["hundreds"], groups=4)


@pytest.mark.parametrize(
    ("device", "dtype", "size", "dropout", "has_bias", "expected"),
    [
        ("cuda", torch.bfloat16, 64, 0.0, False, True),
        ("cuda", torch.float16, 64, 0.0, False, True),
        ("cuda", torch.float32, 64, 0.0, False, False),
        ("cuda", torch.bfloat16, 60, 0.0, False, False),
        ("cuda", torch.bfloat16, 64, 0.1, False, False),
        ("cuda", torch.bfloat16, 64, 0.0, True, False),
        ("cpu", torch.bfloat16, 64, 0.0, False, False),
    ],
)
def test_which_kernel_computes_it(
    device: str, dtype: torch.dtype, size: int, dropout: float, has_bias: bool, expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(packed, "varlen_kernel", lambda: by_contract)
    traits = (torch.device(device), dtype, size)
    asked: dict[str, Any] = {"dropout": dropout, "has_bias": has_bias, "has_groups": True}
    assert packed.uses_varlen(*traits, **asked) == expected
    monkeypatch.setattr(packed, "varlen_kernel", lambda: None)
    assert not packed.uses_varlen(*traits, **asked)
