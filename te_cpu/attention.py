"""Compute the fused softmaxes of unfused attention, the form of documents, and the KV cache.

`scale_factor` multiplies the scores. A masked score is -10000, as in the kernels; a causally masked
one contributes nothing. `cu_seqlens` has the place of each document's first token among all tokens,
and then the number of tokens.
"""

# T tokens  B documents  S places, of the longest document at least  H heads  D head width

from __future__ import annotations

import torch
import torch.nn.functional as F

from te_cpu.enums import QkvFormat
from te_cpu.errors import SizeError

MASKED = -10000.0


def scaled_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    return torch.softmax(input.float() * scale_factor, -1).to(input.dtype)


def scaled_masked_softmax_forward(
    input: torch.Tensor, mask: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """`mask` is 1 where a score does not count. A row without another score has no shares."""
    scores = (input.float() * scale_factor).masked_fill(mask == 1, MASKED)
    is_empty = scores.amax(-1, keepdim=True) == MASKED
    return torch.softmax(scores, -1).masked_fill(is_empty, 0.0).to(input.dtype)


def scaled_upper_triang_masked_softmax_forward(
    input: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Causal attention over whole sequences, [attention batches, S, S]."""
    scores = (input.float() * scale_factor).masked_fill(_later(input), -torch.inf)
    return torch.softmax(scores, -1).to(input.dtype)


def scaled_aligned_causal_masked_softmax_forward(
    input: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Causal attention whose last query sees the last key; a query that sees none has no shares.

    The sum of a row has the masked scores too, and those that fill it up to a power of two.
    """
    later, keys = _later(input), input.shape[-1]
    scores = (input.float() * scale_factor).masked_fill(later, MASKED)
    filled = F.pad(scores, (0, (1 << (keys - 1).bit_length()) - keys), value=MASKED)
    return torch.softmax(filled, -1)[..., :keys].masked_fill(later, 0.0).to(input.dtype)


def _later(scores: torch.Tensor) -> torch.Tensor:
    """Return what queries do not see of scores [..., queries, keys] if the last one sees all."""
    queries, keys = scores.shape[-2:]
    all_of_them = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    return all_of_them.triu(1 + keys - queries)


def scaled_softmax_backward(
    output_grad_: torch.Tensor, softmax_results_: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Return the gradient of the scores, whichever were masked: their share is 0."""
    share = softmax_results_.float()
    grad = output_grad_.float() * share
    return (scale_factor * (grad - share * grad.sum(-1, keepdim=True))).to(output_grad_.dtype)


def convert_thd_to_bshd(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int
) -> torch.Tensor:
    """Give each document a row of its own: [T, H, D] -> [B, S, H, D], with zeros behind it."""
    documents, positions = places_of(cu_seqlens[: b + 1], tensor.shape[0], max_seq_len)
    rows = tensor.new_zeros(b * max_seq_len, *tensor.shape[1:])
    rows[(documents * max_seq_len + positions).to(tensor.device)] = tensor
    return rows.view(b, max_seq_len, *tensor.shape[1:])


def convert_bshd_to_thd(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int | torch.Tensor
) -> torch.Tensor:
    """Put the documents of the rows behind each other: [B, S, H, D] -> [T, H, D]."""
    documents, positions = places_of(cu_seqlens, int(t), tensor.shape[1])
    rows = tensor.flatten(0, 1)
    return rows[(documents * tensor.shape[1] + positions).to(tensor.device)]


def places_of(
    cu_seqlens: torch.Tensor, num_tokens: int, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the document of each token and its position there, int64 [T].

    Raises:
        SizeError: The documents are not all tokens, or one is longer than there are places. The
            compiled kernels would read or write memory of others.
    """
    lengths = cu_seqlens.long().diff()
    is_whole = cu_seqlens[0] == 0 and cu_seqlens[-1] == num_tokens
    if not is_whole or (lengths < 0).any() or (lengths > longest).any():
        raise SizeError(
            f"cu_seqlens={cu_seqlens.tolist()} does not divide {num_tokens} tokens into documents "
            f"of up to {longest}"
        )
    documents = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    return documents, torch.arange(num_tokens, device=lengths.device) - cu_seqlens[documents]


def copy_to_kv_cache(
    new_k: torch.Tensor,
    new_v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_new_lens: torch.Tensor,
    cu_cached_lens: torch.Tensor,
    qkv_format: int,
    b: int,
    max_ctx_len: int,
    max_seq_len: int,
    max_pages_per_seq: int,
    is_non_paged: bool,
) -> None:
    """Write new keys and values behind those of each sample that the caches [pages, S, H, D] have.

    New ones are [B, S, H, D], [S, B, H, D] or, as documents without padding, [T, H, D].
    `cu_cached_lens` counts the new tokens too. `page_table` [B, pages of a sample] says where the
    pages of a sample are or, with `is_non_paged`, from which row of the cache a sample [B] is to be
    brought into its own row first.
    """
    new = cu_new_lens.diff().tolist()[:b]
    cached = cu_cached_lens.diff().tolist()[:b]
    size = max_seq_len // max_pages_per_seq
    form = int(qkv_format)
    for source, cache in ((new_k.detach(), k_cache.detach()), (new_v.detach(), v_cache.detach())):
        if is_non_paged:
            _bring_samples_together(cache, page_table.flatten().tolist()[:b], new, cached)
        for sample, (count, total) in enumerate(zip(new, cached, strict=True)):
            if form == int(QkvFormat["NVTE_THD"]):
                tokens = source[int(cu_new_lens[sample]) :][:count]
            else:
                is_sbhd = form == int(QkvFormat["NVTE_SBHD"])
                tokens = (source[:, sample] if is_sbhd else source[sample])[:count]
            places = torch.arange(total - count, total, device=cache.device)
            pages = page_table.view(-1, max_pages_per_seq)[sample][places // size].long()
            page = torch.full_like(places, sample) if is_non_paged else pages
            cache.flatten(0, 1)[page * size + places % size] = tokens


def _bring_samples_together(
    cache: torch.Tensor, rows: list[int], new: list[int], cached: list[int]
) -> None:
    """Move the cached tokens of each sample from its row of `rows` to the row of its number."""
    falls = [after for after in range(1, len(rows)) if rows[after] < rows[after - 1]]
    for sample in range(falls[-1] if falls else len(rows)):
        if rows[0] != 0 or rows[sample] - rows[0] != sample:
            count = cached[sample] - new[sample]
            cache[sample, :count] = cache[rows[sample], :count].clone()


KERNELS = (
    scaled_softmax_forward,
    scaled_softmax_backward,
    scaled_masked_softmax_forward,
    scaled_upper_triang_masked_softmax_forward,
    scaled_aligned_causal_masked_softmax_forward,
    convert_thd_to_bshd,
    convert_bshd_to_thd,
    copy_to_kv_cache,
)
