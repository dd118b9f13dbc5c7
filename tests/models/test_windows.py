"""Attention within a window against a formula in FP64 that masks all scores.

The formula and the bounds are those of documents (`test_documents`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8_numerics import cpu
from megafp8.models import documents, packed
from megafp8.models.attention import QKV, AttentionContext, AttentionCore, attention_context
from megafp8.models.documents import SHORT, Area, Documents, document_ids
from megafp8.models.positions import alibi_slopes
from megafp8.models.random import RandomStreams
from megafp8.ops.attention import AttentionTile
from megafp8.specs.model import BLOCK_QUERIES as QUERIES
from megafp8.specs.model import twice_seen
from megafp8.train.live_bytes import LiveBytes
from tests.models.test_documents import (
    SIZE,
    Largest,
    assert_within,
    borders_of,
    by_contract,
    formula,
    inputs,
    results_of,
)
from tests.tiny import gpt_spec

CPU = torch.device("cpu")
WHOLE, PACKED = [[300], [300]], [[100, 1, 156, 43], [300], [SHORT, 200, 1, 1, 34]]
WINDOWS = [0, 1, 16, 63, QUERIES - 1, QUERIES, 171, 298, 299, 1000]
"""The tokens before its own that a query sees; from 299 on no window hides any of 300 tokens."""


def core_of(window: int | None, groups: int = 4, *, dropout: float = 0.0) -> AttentionCore:
    return AttentionCore(
        SIZE, dropout, "site", RandomStreams(3), lambda flops: None,
        queries_per_group=4 // groups, window=window,
    )  # fmt: skip


def context_of(lengths: list[list[int]], window: int, **options: Any) -> AttentionContext:
    spec = gpt_spec(hidden_size=4 * SIZE, num_attention_heads=4, window_size=(window, 0), **options)
    is_packed = any(len(row) > 1 for row in lengths)
    return attention_context(
        spec, slice(0, 4), torch.float32, (len(lengths), sum(lengths[0])), CPU,
        cu_seqlens_N1=borders_of(lengths) if is_packed else None,
    )  # fmt: skip


def check(
    lengths: list[list[int]],
    window: int,
    dtype: torch.dtype = torch.float32,
    *,
    groups: int = 4,
    alibi: bool = False,
    right: int | None = None,
) -> None:
    """Compare with the formula of the window `right`, by default the one that is asked for."""
    seq = sum(lengths[0])
    qkv, grad = inputs(len(lengths), seq, groups, dtype)
    options = {"position_embedding_type": "alibi"} if alibi else {}
    found = results_of(core_of(window, groups), qkv, grad, context_of(lengths, window, **options))
    slopes = torch.tensor(alibi_slopes(4)) if alibi else None
    ids, seen = document_ids(borders_of(lengths), seq), window if right is None else right
    assert_within(found, formula(qkv, grad, ids, slopes=slopes, window=seen), dtype)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", [WHOLE, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_all_windows(lengths: list[list[int]], window: int, dtype: torch.dtype) -> None:
    check(lengths, window, dtype, groups=2)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("lengths", [WHOLE, PACKED], ids=["whole", "packed"])
def test_groups_of_heads_and_alibi(lengths: list[list[int]], alibi: bool, groups: int) -> None:
    check(lengths, 77, groups=groups, alibi=alibi)


@pytest.mark.parametrize("widens", [False, True], ids=["own products", "products in FP32"])
def test_bf16(widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "FAST_AT_BF16", not widens)
    check(WHOLE, 31, torch.bfloat16, groups=2)
    check(PACKED, 31, torch.bfloat16)


def test_gradients_of_shared_keys_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight blocks add to the gradients of the first values, in FP32 where products are.

    Then they are the correctly rounded ones, but for sums that FP32's error, up to 1024 * 2^-24 of
    their terms, moves over the middle of two BF16 numbers. Rounded after each block, half of them
    are others.
    """
    monkeypatch.setattr(cpu, "FAST_AT_BF16", False)
    seq = 8 * QUERIES
    qkv, grad = inputs(1, seq, 4, torch.bfloat16)
    blocks = Documents(borders_of([[seq]]), seq, CPU, cuts_queries=True)

    def block_of(number: int, area: Area) -> AttentionTile:
        return AttentionTile(SIZE**-0.5, mask=blocks.seen(area))

    out = packed.attend_blocks(*qkv, blocks, block_of)
    out.transpose(1, 2).flatten(2).backward(grad)
    exact = formula(qkv, grad, torch.zeros(1, seq)).results.value
    assert qkv.value.grad is not None
    same = (qkv.value.grad == exact.bfloat16())[:, :, :QUERIES]
    assert same.double().mean() > 0.95


@pytest.mark.parametrize("lengths", [WHOLE, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("window", [1, 20, QUERIES])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_that_is_off_by_one_is_found(
    lengths: list[list[int]], window: int, by: int
) -> None:
    """A query that sees one token more or fewer breaks the bound."""
    with pytest.raises(AssertionError, match="times its bound"):
        check(lengths, window + by, right=window)


def test_a_band_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of rows behind the first triangle, planted with one key too many or too few."""
    right = documents.band

    def shifted(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
        assert window is not None
        return right(queries, keys, window - 1, device)

    monkeypatch.setattr(documents, "band", shifted)
    with pytest.raises(AssertionError, match="times its bound"):
        check(WHOLE, 20)


@given(st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=6), min_size=1, max_size=2),
       st.integers(0, 220), st.booleans())  # fmt: skip
def test_each_score_is_in_one_block(rows: list[list[int]], window: int, cuts: bool) -> None:
    """Every score that is seen is in one block, and blocks are no larger than they must be."""
    seq = max(map(sum, rows))
    rows = [[*row, seq - sum(row)] if sum(row) < seq else row for row in rows]
    borders = borders_of(rows)
    found = Documents(borders, seq, CPU, cuts, window)
    ids = document_ids(borders, seq)
    counts = torch.zeros(len(rows), seq, seq, dtype=torch.int8)
    for area in found.areas:
        num_queries, num_keys = area.stop - area.first_query, area.stop - area.first_key
        assert num_keys <= max(QUERIES, SHORT) + window
        assert num_queries <= QUERIES or (area.is_causal and not cuts)
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
        if area.is_causal:
            assert num_queries == num_keys
        else:
            seen = found.seen(area)
        counts[area.row, area.queries, area.keys] += seen
    places = torch.arange(seq)
    expected = (ids[:, :, None] == ids[:, None, :]).tril() & (places[:, None] - places <= window)
    assert torch.equal(counts, expected.to(torch.int8))
    assert found.num_seen == 2 * int(counts.sum()) - counts.shape[0] * seq


@given(st.integers(1, 200), st.integers(0, 210))
def test_scores_are_counted(length: int, window: int) -> None:
    seen = [min(place, window) for place in range(length)]
    assert twice_seen(length, window) == sum(2 * before + 1 for before in seen)
    assert twice_seen(length) == length**2 == twice_seen(length, length - 1)


def test_a_window_that_hides_nothing_is_plain_causal_attention() -> None:
    assert context_of(WHOLE, 299) == context_of(WHOLE, 10**6) == AttentionContext()
    hidden = context_of(WHOLE, 298)
    assert hidden.documents is not None and hidden.mask is None


def test_layers_with_and_without_a_window() -> None:
    """A model of both kinds has one context for each kind, and layers take theirs."""
    context = context_of(WHOLE, 5, window_attn_skip_freq=(1, 0))
    assert context.documents is None and context.mask is None and context.windowed is not None
    qkv, grad = inputs(2, 300, 4, torch.float64)
    ids = document_ids(borders_of(WHOLE), 300)
    for window in (5, None):
        heads = QKV(*(x.detach().requires_grad_() for x in qkv))
        found = results_of(core_of(window), heads, grad, context)
        assert_within(found, formula(qkv, grad, ids, window=window), torch.float64)


def test_dropout() -> None:
    """What the blocks draw, in its place among all scores; backward draws the same again."""
    core, context = core_of(40, dropout=0.3), context_of(PACKED, 40, attention_dropout=0.3)
    assert context.documents is not None
    core.streams.begin_microbatch(5, 2)
    keep = torch.zeros(3, 4, 300, 300)
    for number, area in enumerate(context.documents.areas):
        shape = (1, 4, area.stop - area.first_query, area.stop - area.first_key)
        drawn = core.kept(f"site block {number}", shape, CPU, core.dropout)
        keep[area.row, :, area.queries, area.keys] = drawn[0]
    qkv, grad = inputs(3, 300, 4, torch.float32)
    out = core(qkv, context)
    core.streams.begin_microbatch(5, 3)
    out.backward(grad)
    by_head = out.detach().unflatten(-1, (4, SIZE)).transpose(1, 2)
    ids = document_ids(borders_of(PACKED), 300)
    exact = formula(qkv, grad, ids, keep=keep, window=40)
    found = type(exact.results)(by_head, *(x.grad for x in qkv))  # type: ignore[arg-type]
    assert_within(found, exact, torch.float32)


def test_memory_is_a_line_in_the_length() -> None:
    """No tensor has S x S elements, and one mask serves all blocks of all layers."""

    def run(seq: int) -> tuple[int, int]:
        qkv, grad = inputs(1, seq, 4, torch.float32)
        with LiveBytes() as live, Largest() as largest:
            live.begin()
            context = context_of([[seq]], 100)
            for _ in range(2):
                results_of(core_of(100), qkv, grad, context)
        assert context.documents is not None
        bands = {context.documents.seen(a).data_ptr() for a in context.documents.areas[1:]}
        assert len(bands) == 1
        return live.most, largest.elements

    short, _ = run(512)
    long, largest = run(2048)
    assert largest < 2048 * 4 * SIZE * 2
    assert long <= 4 * short


@pytest.mark.parametrize("lengths", [WHOLE, PACKED], ids=["whole", "packed"])
def test_the_kernel_for_gpus_gets_the_window(
    lengths: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU has run this: a function that does as torch's documentation says takes its place."""
    calls = []

    def kernel(*args: Any, window_size: tuple[int, int], **options: Any) -> torch.Tensor:
        calls.append(window_size)
        return by_contract(*args, window_size=window_size, **options)

    monkeypatch.setattr(packed, "varlen_kernel", lambda: kernel)
    monkeypatch.setattr("megafp8.models.attention.uses_varlen", lambda *_, **__: True)
    check(lengths, 19, groups=2)
    assert calls == [(19, 0)]


def test_documents_by_numbers_have_the_window_too() -> None:
    """As CUDA graphs have them, with a mask of all scores."""
    spec = replace(gpt_spec(hidden_size=4 * SIZE, num_attention_heads=4), window_size=(33, 0))
    ids = document_ids(borders_of(PACKED), 300)
    context = attention_context(
        spec, slice(0, 4), torch.float64, (3, 300), CPU, document_ids_BS=ids
    )
    qkv, grad = inputs(3, 300, 4, torch.float64)
    found = results_of(core_of(33), qkv, grad, context)
    assert_within(found, formula(qkv, grad, ids, window=33), torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["blocks", "varlen_attn"])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    spec = gpt_spec(hidden_size=4 * SIZE, num_attention_heads=4, window_size=(33, 0))
    qkv, grad = inputs(2, 300, 2, dtype)
    there = QKV(*(x.detach().to(device).requires_grad_() for x in qkv))
    context = attention_context(spec, slice(0, 4), dtype, (2, 300), device)
    found = results_of(core_of(33, 2), there, grad.to(device), context)
    exact = formula(qkv, grad, document_ids(borders_of(WHOLE), 300), window=33)
    assert_within(type(found)(*(x.cpu() for x in found)), exact, dtype)
