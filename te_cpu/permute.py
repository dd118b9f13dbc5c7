"""Bring tokens into the order of their experts and back.

Most functions on masks [T, E] and on chunks have the names and arguments of Transformer Engine's
module `triton.permutation`. Its `row_id_map` [T, 2 E + 1] has for each token the rows of its
copies, of the last expert first, from column E on their experts, and in the last column their
number. Up to 2.5 it is [E, T], int64, with the row of each token, or -1.

Rows that no token is copied to have no meaning, as in the kernels. Here they are NaN (or the
largest integer), so that a program that reads them is found out.
"""

# T tokens  E experts  K experts of a token  N rows, of permuted tokens  H hidden size

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from te_cpu.errors import SizeError


def _unwritten(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    value = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(list(shape), value, dtype=dtype, device=device)


def moe_permute_fwd(
    input: torch.Tensor,
    dtype: int,
    indices: torch.Tensor,
    num_out_tokens: int,
    workspace: list[torch.Tensor],
    max_expanded_token_num: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Sort tokens by their experts `indices` [T, K]; an expert below 0 comes after all others.

    Rows from `num_out_tokens` on are dropped. Returns the rows [N, H], the row of each token and
    expert [K x T], -1 where it was dropped, and the workspace.
    """
    return _permuted(input, indices.long() % (1 << 32), num_out_tokens, workspace)


def moe_permute_fwd_to_2_15(
    input: torch.Tensor,
    dtype: int,
    indices: torch.Tensor,
    num_out_tokens: int,
    workspace: list[torch.Tensor],
    max_expanded_token_num: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Do what `moe_permute_fwd` does, but with experts below 0 before all others."""
    return _permuted(input, indices, num_out_tokens, workspace)


def _permuted(
    tokens: torch.Tensor, experts: torch.Tensor, num_rows: int, workspace: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    num_tokens, topk = experts.shape
    order = experts.flatten().argsort(stable=True)
    num_rows = num_rows if num_rows > 0 else num_tokens * topk
    row_of = torch.empty_like(order)
    row_of[order] = torch.arange(len(order), device=order.device)
    row_of = row_of.masked_fill(row_of >= num_rows, -1).view(num_tokens, topk).t()
    rows = _unwritten((num_rows, tokens.shape[1]), tokens.dtype, tokens.device)
    rows[: len(order)] = tokens.detach()[order[:num_rows] // topk]
    return rows, row_of.reshape(-1).to(torch.int32), workspace


def moe_permute_bwd(
    input: torch.Tensor,
    dtype: int,
    row_id_map: torch.Tensor,
    prob: torch.Tensor,
    num_tokens: int,
    topK: int,  # noqa: N803  # Transformer Engine's name
) -> torch.Tensor:
    return moe_unpermute_fwd(input, dtype, row_id_map, prob, num_tokens, topK)


def moe_unpermute_fwd(
    input: torch.Tensor,
    dtype: int,
    row_id_map: torch.Tensor,
    prob: torch.Tensor,
    num_tokens: int,
    topK: int,  # noqa: N803
) -> torch.Tensor:
    """Return the sum of each token's rows [T, H], times `prob` [T, K] where it is not empty.

    All arithmetic is in the dtype of the rows, to which `prob` is rounded too.
    """
    rows, row_of = input.detach(), row_id_map.view(topK, num_tokens).long()
    total = rows.new_zeros(num_tokens, rows.shape[1])
    for k, row in enumerate(row_of):
        part = rows[row.clamp(min=0)]
        if prob.numel():
            part = part * prob.detach()[:, k, None].to(rows.dtype)
        total = torch.where((row >= 0)[:, None], part if k == 0 else total + part, total)
    return total


def moe_unpermute_bwd(
    input_bwd: torch.Tensor,
    input_fwd: torch.Tensor,
    dtype: int,
    row_id_map: torch.Tensor,
    prob: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the rows and of `prob` [T, K]."""
    has_prob = prob.numel() > 0
    num_tokens, topk = prob.shape if has_prob else (len(row_id_map), 1)
    row_of = row_id_map.view(topk, num_tokens).t().long()
    is_kept = row_of >= 0
    token, row = is_kept.nonzero()[:, 0], row_of[is_kept]
    grad = input_bwd.detach()[token]
    rows_grad = _unwritten(input_fwd.shape, input_bwd.dtype, input_bwd.device)
    if not has_prob:
        rows_grad[row] = grad
        return rows_grad, _unwritten((num_tokens, topk), torch.float32, input_bwd.device)
    rows_grad[row] = grad * prob[is_kept][:, None].to(grad.dtype)
    prob_grad = torch.zeros(num_tokens, topk, device=input_bwd.device)
    prob_grad[is_kept] = (grad * input_fwd.detach()[row]).float().sum(-1)
    return rows_grad, prob_grad


def make_row_id_map(
    routing_map: torch.Tensor, num_tokens: int, num_experts: int, *, release: tuple[int, ...]
) -> torch.Tensor:
    """Return the map of `routing_map` [T, E], which is 1 where a token has an expert."""
    mask = routing_map.t().to(torch.int32)
    row = (mask.flatten().cumsum(0) - 1).view(num_experts, num_tokens).masked_fill(mask == 0, -1)
    if release < (2, 6):
        return row
    row, expert = row.t().sort(dim=1, descending=True, stable=True)
    unwritten = row < 0
    empty = torch.iinfo(torch.int32).max
    columns = (row.masked_fill(unwritten, empty), expert.masked_fill(unwritten, empty))
    return torch.cat([*columns, mask.sum(0)[:, None]], 1).to(torch.int32)


def _copies(
    row_id_map: torch.Tensor, pad_offsets: torch.Tensor | None, num_rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return tokens, the rows of one copy of each, and their experts, in the order of the sums.

    Raises:
        SizeError: There are fewer rows. The kernels would read or write memory of others.
    """
    if row_id_map.dtype == torch.int64:  # that of the versions up to 2.5
        rows_of, experts_of = row_id_map, torch.arange(len(row_id_map))[:, None]
        experts_of, is_copy = experts_of.expand_as(rows_of), rows_of >= 0
    else:
        width = row_id_map.shape[1] // 2
        rows_of, experts_of, count = row_id_map.long().t().split([width, width, 1])
        is_copy = torch.arange(width)[:, None] < count
    for k in range(len(rows_of)):
        tokens = is_copy[k].nonzero()[:, 0]
        rows, experts = rows_of[k, tokens], experts_of[k, tokens]
        if pad_offsets is not None:
            rows = rows + pad_offsets[experts]
        if len(rows) and rows.max() >= num_rows:
            raise SizeError(f"the tokens have more copies than there are rows: {num_rows}")
        yield tokens, rows, experts


def permute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    scale: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int | None,
    *,
    release: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return rows [N, H], and theirs of `scale` and of `probs` [T, E]; rows of padding are 0.

    From 2.6 on a copy with probability 0 is taken for padding too.
    """

    def made(x: torch.Tensor | None, *width: int | None) -> Any:
        return None if x is None else _rows((num_out_tokens, *width), x, pad_offsets)

    rows, scales = made(inp, hidden_size), made(scale, scale_hidden_dim)
    row_probs = made(probs)
    for token, row, expert in _copies(row_id_map, pad_offsets, num_out_tokens):
        rows[row] = inp[token]
        if scale is not None:
            scales[row] = scale[token, :scale_hidden_dim]
        if probs is not None:
            row_probs[row] = probs[token, expert]
            if release >= (2, 6):
                rows[row[probs[token, expert] == 0]] = 0
    return rows, scales, row_probs


def _rows(shape: Any, like: torch.Tensor, pad_offsets: torch.Tensor | None) -> torch.Tensor:
    if pad_offsets is not None:
        return like.new_zeros(shape)
    return _unwritten(shape, like.dtype, like.device)


def unpermute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None,
    permuted_probs: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sums of copies [T, H], times `merging_probs` [T, E], and `permuted_probs` [T, E].

    Sums are in FP32 and are rounded once.
    """
    total = torch.zeros(num_tokens, hidden_size, device=inp.device)
    probs = None if permuted_probs is None else permuted_probs.new_zeros(num_tokens, num_experts)
    for token, row, expert in _copies(row_id_map, pad_offsets, len(inp)):
        part = inp[row].float()
        if merging_probs is not None:
            part = part * merging_probs[token, expert, None].float()
        total[token] += part
        if probs is not None and permuted_probs is not None:
            probs[token, expert] = permuted_probs[row]
    return total.to(inp.dtype), probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: torch.Tensor,
    row_id_map: torch.Tensor,
    fwd_input: torch.Tensor,
    merging_probs: torch.Tensor,
    pad_offsets: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the rows [N, H] and of `merging_probs` [T, E]."""
    rows_grad = _rows((num_out_tokens, hidden_size), fwd_output_grad, pad_offsets)
    probs_grad = merging_probs.new_zeros(num_tokens, num_experts)
    for token, row, expert in _copies(row_id_map, pad_offsets, num_out_tokens):
        grad = fwd_output_grad[token].float()
        rows_grad[row] = (grad * merging_probs[token, expert, None].float()).to(rows_grad.dtype)
        probs_grad[token, expert] = (fwd_input[row].float() * grad).sum(-1).to(probs_grad.dtype)
    return rows_grad, probs_grad


def make_chunk_sort_map(
    split_sizes: torch.Tensor,
    sorted_indices: torch.Tensor,
    num_tokens: int,
    num_splits: int,
    *,
    release: tuple[int, ...],
) -> torch.Tensor:
    """Return the place of each token if chunks of `split_sizes` come in the order `sorted_indices`.

    Tokens after all chunks keep their places from 2.13 on.

    Raises:
        SizeError: There are such tokens before 2.13, whose kernel writes them over others, or fewer
            tokens than the chunks have.
    """
    sizes, order = split_sizes.long(), sorted_indices.long()
    total = int(sizes.sum())
    if total > num_tokens or (total < num_tokens and release < (2, 13)):
        raise SizeError(f"split_sizes={sizes.tolist()} does not divide {num_tokens} tokens")
    begins = torch.empty_like(sizes)
    begins[order] = sizes[order].cumsum(0) - sizes[order]
    shift = (begins - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes)
    places = torch.arange(num_tokens, device=sizes.device)
    places[:total] += shift
    return places.to(torch.int64 if release < (2, 6) else torch.int32)


def sort_chunks_by_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bring tokens and their `probs` to their places, or back from there."""
    places = row_id_map.long()
    if is_forward:
        places = places.argsort()
    return inp[places], None if probs is None else probs.reshape(-1)[places]


def sort_chunks_by_idx(
    inp: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None,
    num_tokens: int,
    hidden_size: int,
    num_splits: int,
    *,
    release: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Make the map and use it: up to 2.5 one kernel did both."""
    places = make_chunk_sort_map(
        split_sizes, sorted_indices, num_tokens, num_splits, release=release
    )
    rows, row_probs = sort_chunks_by_map(
        inp, places, probs, num_tokens, hidden_size, is_forward=True
    )
    return rows, places, row_probs


KERNELS = (
    moe_permute_fwd,
    moe_permute_bwd,
    moe_unpermute_fwd,
    moe_unpermute_bwd,
)


def in_triton(release: tuple[int, ...]) -> dict[str, Callable[..., Any]]:
    """Return the functions of the module `triton.permutation` by name."""
    told = (make_row_id_map, permute_with_mask_map, make_chunk_sort_map, sort_chunks_by_idx)
    found: dict[str, Callable[..., Any]] = {
        function.__name__: functools.partial(function, release=release) for function in told
    }
    for function in (
        unpermute_with_mask_map,
        unpermute_with_mask_map_bwd_with_merging_probs,
        sort_chunks_by_map,
    ):
        found[function.__name__] = function
    if release < (2, 12):
        for name in found:
            if "with_mask_map" in name:
                found[name] = _never_padded(found[name])
    return found


def _never_padded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without the argument `pad_offsets`, as up to 2.11."""
    return lambda *args: function(*args[:4], None, *args[4:])
