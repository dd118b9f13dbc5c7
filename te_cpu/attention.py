"""Compute the fused softmaxes of unfused attention, rotary positions, and the form of documents.

`scale_factor` multiplies the scores. A masked score is -10000, as in the kernels; a causally masked
one contributes nothing. `cu_seqlens` has the place of each document's first token among all tokens,
and then the number of tokens.
"""

# T tokens  B documents  S places, of the longest document at least  H heads  D head width

from __future__ import annotations

import torch

from te_cpu.enums import QkvFormat
from te_cpu.errors import SizeError
from te_cpu.missing import missing

MASKED = -10000.0


def scaled_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    return torch.softmax(input.float() * scale_factor, -1).to(input.dtype)


def scaled_masked_softmax_forward(
    input: torch.Tensor, mask: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """`mask` is 1 where a score does not count."""
    scores = (input.float() * scale_factor).masked_fill(mask.bool(), MASKED)
    return torch.softmax(scores, -1).to(input.dtype)


def scaled_upper_triang_masked_softmax_forward(
    input: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Causal attention over whole sequences, [attention batches, S, S]."""
    return _causal_softmax(input, scale_factor, first_offset=0)


def scaled_aligned_causal_masked_softmax_forward(
    input: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Causal attention whose last query sees the last key."""
    queries, keys = input.shape[-2:]
    return _causal_softmax(input, scale_factor, first_offset=keys - queries)


def _causal_softmax(
    scores: torch.Tensor, scale_factor: float, *, first_offset: int
) -> torch.Tensor:
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    later = seen.triu(1 + first_offset)
    scaled = (scores.float() * scale_factor).masked_fill(later, -torch.inf)
    return torch.softmax(scaled, -1).to(scores.dtype)


def scaled_softmax_backward(
    output_grad_: torch.Tensor, softmax_results_: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Return the gradient of the scores, whichever were masked: their share is 0."""
    grad, share = output_grad_.float(), softmax_results_.float()
    found = scale_factor * share * (grad - (grad * share).sum(-1, keepdim=True))
    return found.to(output_grad_.dtype)


def fused_rope_forward(
    input: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Turn the first `freqs.shape[-1]` numbers of each head.

    `freqs` has the angles [S, 1, 1, D], each for both halves of its pair.
    """
    angles = _angles(input, freqs, start_positions, qkv_format, cu_seqlens, cp_size)
    return _turned(input.detach(), angles.cos(), angles.sin(), interleaved)


def fused_rope_backward(
    output_grads: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Return the transpose of a turn: the sine of the pair's other number, with its sign."""
    angles = _angles(output_grads, freqs, start_positions, qkv_format, cu_seqlens, cp_size)
    sine = -_partner(angles.sin(), interleaved, signed=False)
    return _turned(output_grads, angles.cos(), sine, interleaved)


def fused_rope_backward_to_2_9(
    output_grads: torch.Tensor,
    freqs: torch.Tensor,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Up to 2.9 the backward pass knew no `start_positions`."""
    return fused_rope_backward(
        output_grads, freqs, None, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank
    )


def _angles(
    x: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: int,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
) -> torch.Tensor:
    """Return the angles in FP32, shaped to broadcast over [S, B, H, D], [B, S, H, D] or [T, H, D].

    With documents, their positions begin at 0.
    """
    if cp_size != 1:
        raise missing("fused_rope", " with context parallelism")
    if start_positions is not None:
        raise missing("fused_rope", " with start positions (inference)")
    width = freqs.shape[-1]
    if int(qkv_format) == int(QkvFormat["NVTE_THD"]):
        if cu_seqlens is None:
            raise SizeError("fused_rope: cu_seqlens is missing, which qkv_format='thd' needs")
        _, positions = _places(cu_seqlens, x.shape[0], freqs.shape[0])
        return freqs.reshape(-1, width)[positions.to(freqs.device)].float()[:, None]
    if int(qkv_format) == int(QkvFormat["NVTE_SBHD"]):
        return freqs[: x.shape[0]].float().reshape(-1, 1, 1, width)
    return freqs[: x.shape[1]].float().reshape(1, -1, 1, width)


def convert_thd_to_bshd(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int
) -> torch.Tensor:
    """Give each document a row of its own: [T, H, D] -> [B, S, H, D], with zeros behind it."""
    documents, positions = _places(cu_seqlens[: b + 1], tensor.shape[0], max_seq_len)
    rows = tensor.new_zeros(b * max_seq_len, *tensor.shape[1:])
    rows[(documents * max_seq_len + positions).to(tensor.device)] = tensor
    return rows.view(b, max_seq_len, *tensor.shape[1:])


def convert_bshd_to_thd(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int | torch.Tensor
) -> torch.Tensor:
    """Put the documents of the rows behind each other: [B, S, H, D] -> [T, H, D]."""
    documents, positions = _places(cu_seqlens, int(t), tensor.shape[1])
    rows = tensor.flatten(0, 1)
    return rows[(documents * tensor.shape[1] + positions).to(tensor.device)]


def _places(
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


def _turned(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    width = cosine.shape[-1]
    first, rest = x[..., :width].float(), x[..., width:]
    turned = first * cosine + _partner(first, interleaved, signed=True) * sine
    return torch.cat([turned.to(x.dtype), rest], -1)


def _partner(x: torch.Tensor, interleaved: bool, *, signed: bool) -> torch.Tensor:
    """Return for each number the other one of its pair: its neighbour, or half a width away.

    With `signed` it is negative where that one is the second.
    """
    sign = -1.0 if signed else 1.0
    if interleaved:
        return torch.stack([sign * x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat([sign * x[..., half:], x[..., :half]], -1)


KERNELS = (
    scaled_softmax_forward,
    scaled_softmax_backward,
    scaled_masked_softmax_forward,
    scaled_upper_triang_masked_softmax_forward,
    scaled_aligned_causal_masked_softmax_forward,
    fused_rope_forward,
    fused_rope_backward,
    convert_thd_to_bshd,
    convert_bshd_to_thd,
)
