"""What ranks do to show that a ring of them computes attention over the whole sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.models.attention import QKV, AttentionContext
from megafp8.models.documents import Documents, document_ids
from megafp8.models.random import RandomStreams
from megafp8.ops.attention import AttentionTile
from megafp8.parallel.collectives import Axis
from megafp8.parallel.context import (
    RingAttentionCore,
    all_tokens,
    own_positions,
    own_tokens,
    ring_attention,
)
from megafp8.parallel.cut import ScorePiece, places_of
from megafp8.parallel.mesh import join
from megafp8.specs import ParallelSpec
from tests.kit.cases import Case
from tests.kit.runs import each_case
from tests.parallel.rank_work import run_case
from tests.ranks import Rank

BATCH, SEQ, WIDTH = 2, 256, 8
HEADS = [(4, 4), (4, 2), (3, 3), (5, 1), (6, 2)]  # of queries, of keys and values
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
Errors = dict[str, float]


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def own(x_BHSE: torch.Tensor, cp: Axis) -> torch.Tensor:
    return own_tokens(x_BHSE.transpose(1, 2), cp).transpose(1, 2)


def leaf(x_BHSE: torch.Tensor, cp: Axis) -> torch.Tensor:
    return own(x_BHSE, cp).detach().clone().requires_grad_()


def sample(heads: int, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values and the output's gradient: whole sequences, the same on all ranks."""
    torch.manual_seed(heads)
    shapes = [(BATCH, h, SEQ, WIDTH) for h in (heads, groups, groups, heads)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def errors_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> Errors:
    names = ("output", "dq", "dk", "dv")
    return {
        name: ((f.double() - e).abs().max() / e.abs().max()).item()
        for name, f, e in zip(names, found, expected, strict=True)
    }


def run_all(rank: Rank, cases: dict[str, Case]) -> dict[str, Any]:
    """The ring alone, and whole runs in the same processes."""
    cp = join(ParallelSpec(devices_per_node=rank.size, cp=rank.size)).cp
    return {
        "compared": compare(cp),
        "documents": compare_documents(cp),
        "windows": compare_windows(cp),
        "dropout": with_dropout(cp),
        "streams": with_streams(cp),
        "outcomes": each_case(rank, run_case, cases),
    }


def by_turn(
    turn: int, number: int, q: torch.Tensor, k: torch.Tensor, piece: ScorePiece
) -> AttentionTile:
    return AttentionTile(0.3, piece.is_causal)


LENGTHS = [[[256], [100, 1, 1, 53, 101]], [[1] * 256, [64, 32, 8, 8, 144]], [[127, 129], [255, 1]]]


def compare_documents(cp: Axis) -> dict[str, Errors]:
    """The core with documents, each cut over the ranks, against a mask of all scores."""
    results: dict[str, Errors] = {}
    for number, lengths in enumerate(LENGTHS):
        for heads, groups in HEADS:
            for dtype in (torch.float64, torch.float32):
                errors = compare_core(cp, lengths, heads, groups, dtype)
                results[f"{number} {heads} {groups} {dtype}"] = errors
    return results


def compare_windows(cp: Axis) -> dict[str, Errors]:
    """The same with windows, also of whole sequences."""
    results: dict[str, Errors] = {}
    for number, lengths in enumerate([[[256], [256]], *LENGTHS]):
        for window in (1, 2, 40, 64, 129, 200, 254):
            errors = compare_core(cp, lengths, 4, 2, torch.float64, window=window)
            results[f"{number} {window}"] = errors
    return results


def compare_core(
    cp: Axis,
    lengths: list[list[int]],
    heads: int,
    groups: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
) -> Errors:
    borders = torch.tensor([0, *(n for row in lengths for n in row)]).cumsum(0).int()
    documents = Documents(borders, SEQ, torch.device("cpu"), window=window)
    places_BS = places_of(documents.borders, SEQ, cp)
    if documents.are_whole_rows:
        assert torch.equal(places_BS, own_positions((BATCH, SEQ), cp, torch.device("cpu")))
    ids_BS = document_ids(borders, SEQ)
    seen = (ids_BS[:, :, None] == ids_BS[:, None, :]).tril()[:, None]
    seen = seen if window is None else seen.triu(-window)
    *whole, grad = sample(heads, groups, dtype)
    q, k, v = (x.double().requires_grad_() for x in whole)
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    out.backward(grad.double())
    expected = [chosen(x.detach(), places_BS) for x in (out, q.grad, k.grad, v.grad)]
    mine = [chosen(x.detach(), places_BS).requires_grad_() for x in whole]
    core = RingAttentionCore(
        WIDTH, 0.0, "site", RandomStreams(1), lambda flops: None, cp=cp,
        queries_per_group=heads // groups,
    )  # fmt: skip
    found = core(QKV(*mine), AttentionContext(documents=documents))
    found.backward(chosen(grad, places_BS).transpose(1, 2).flatten(2))
    found = found.detach().unflatten(-1, (heads, WIDTH)).transpose(1, 2)
    return errors_of([found, *(x.grad for x in mine)], expected)


def chosen(x_BHSE: torch.Tensor, places_BS: torch.Tensor) -> torch.Tensor:
    return x_BHSE.take_along_dim(places_BS[:, None, :, None], 2)


def compare(cp: Axis) -> dict[str, Any]:
    """Relative to each whole tensor's largest element; and how large anything became."""
    results: dict[str, Any] = {}
    for heads, groups in HEADS:
        for dtype in DTYPES:
            whole = sample(heads, groups, dtype)
            q, k, v = (x.double().requires_grad_() for x in whole[:3])
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
            out.backward(whole[3].double())
            expected = [own(x.detach(), cp) for x in (out, q.grad, k.grad, v.grad)]  # type: ignore
            mine = [leaf(x, cp) for x in whole[:3]]
            grad = own(whole[3], cp)
            sent = dict(cp.traffic.num_bytes)
            with Largest() as largest:
                out = ring_attention(*mine, cp, by_turn)
                out.backward(grad)
            found = [out.detach(), *(x.grad for x in mine)]
            assert all(x.dtype == dtype for x in found)
            results[f"{heads} {groups} {dtype}"] = (
                errors_of(found, expected),
                largest.numel,
                sum(cp.traffic.num_bytes.values()) - sum(sent.values()),
            )
    return results


def with_dropout(cp: Axis) -> Errors:
    """One mask over all scores, of which every block has its part."""
    *whole, grad = sample(4, 4, torch.float64)
    keep = torch.empty(BATCH, 4, SEQ, SEQ, dtype=torch.float64).bernoulli_(0.8) / 0.8
    q, k, v = (x.requires_grad_() for x in whole)
    later = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * 0.3).masked_fill(later, -torch.inf)
    out = (scores.softmax(-1) * keep) @ v
    out.backward(grad)
    expected = [own(x.detach(), cp) for x in (out, q.grad, k.grad, v.grad)]  # type: ignore
    places = own_positions((1, SEQ), cp, torch.device("cpu"))[0]
    all_places = cp.all_gather(places.contiguous())

    def block_of(
        turn: int, number: int, q: torch.Tensor, k: torch.Tensor, piece: ScorePiece
    ) -> AttentionTile:
        assert number == 0 and piece.is_causal == (turn == 0)
        rows = places[-q.shape[2] :]  # all, or the second chunk
        columns = all_places[(cp.rank - turn) % cp.size][: k.shape[2]]  # all, or the first
        return AttentionTile(0.3, turn == 0, keep=keep[:, :, rows][:, :, :, columns])

    mine = [leaf(x, cp) for x in whole]
    out = ring_attention(*mine, cp, block_of)
    out.backward(own(grad, cp))
    return errors_of([out.detach(), *(x.grad for x in mine)], expected)


def with_streams(cp: Axis) -> dict[str, Any]:
    """The core's own masks, drawn again for backward long after another microbatch came."""
    streams = RandomStreams(1234, 0, cp.rank)
    core = RingAttentionCore(WIDTH, 0.5, "dropout", streams, lambda flops: None, cp=cp)
    whole = torch.cat([x.transpose(1, 2).flatten(2) for x in sample(4, 4, torch.float64)[:3]], -1)
    outputs = []
    for microbatch in (0, 0, 1):
        streams.begin_microbatch(1, microbatch)
        qkv = own_tokens(whole, cp).clone().requires_grad_()
        out = core(qkv)
        outputs.append(out.detach())
        grad = torch.randn_like(out)
        streams.begin_microbatch(1, 7)
        out.backward(grad)
        assert qkv.grad is not None
        value, grad_value = qkv.detach()[..., -4 * WIDTH :], qkv.grad[..., -4 * WIDTH :]
        # Given the masks, the output is linear in the values.
        sums = torch.stack(((out.detach() * grad).sum(), (value * grad_value).sum()))
        cp.all_reduce_sum(sums)
        assert torch.allclose(sums[0], sums[1], rtol=1e-10), sums
    again, other = (torch.equal(outputs[0], x) for x in outputs[1:])
    places = own_positions((1, SEQ), cp, torch.device("cpu"))
    in_order = torch.equal(all_tokens(own_tokens(whole, cp), cp), whole)
    return {"again": again, "other": other, "places": places[0].tolist(), "in order": in_order}
