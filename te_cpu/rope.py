"""Turn queries and keys by their positions: the fused kernels of rotary positions.

With context parallelism, a rank of `cp_size` has two of the sequence's 2 x `cp_size` equal pieces:
piece `cp_rank` and the one that is as far from the end. Borders of documents are those of whole
documents, of which each rank has one part of `cp_size`.
"""

# T tokens  B samples or documents  S places  H heads  D head width

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_cpu.attention import places_of
from te_cpu.enums import QkvFormat
from te_cpu.errors import SizeError


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

    `freqs` has the angles [S, 1, 1, D], each for both halves of its pair. A sample whose tokens
    continue others begins at its number in `start_positions`.
    """
    positions = _positions(input, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    return _turned(input.detach(), _angles(freqs, positions), interleaved)


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
    """Return the gradient of what was turned."""
    positions = _positions(
        output_grads, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank
    )
    return _turned_back(output_grads, _angles(freqs, positions), interleaved)


def fused_rope_backward_to_2_9(
    output_grads: torch.Tensor,
    freqs: torch.Tensor,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Return what `fused_rope_backward` does, without `start_positions`."""
    return fused_rope_backward(
        output_grads, freqs, None, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank
    )


def fused_qkv_rope_forward(
    qkv_input: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_split_arg_list: Sequence[int],
    qkv_format: int,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> tuple[torch.Tensor, ...]:
    """Divide [S, B, groups, width] or [B, S, groups, width] into queries, keys and values.

    Each group has the queries of several heads, then one head of keys and one of values, as wide
    as `qkv_split_arg_list` says. Queries become [..., H, D] and are turned, as keys are.
    """
    positions = _positions(qkv_input, q_freqs, start_positions, qkv_format, None, cp_size, cp_rank)
    width = qkv_split_arg_list[1]
    query, key, value = qkv_input.detach().split(list(qkv_split_arg_list), -1)
    query = query.unflatten(-1, (-1, width)).flatten(-3, -2)
    return (
        _turned(query, _angles(q_freqs, positions), interleaved),
        _turned(key, _angles(k_freqs, positions), interleaved),
        value.contiguous(),
    )


def fused_qkv_rope_backward(
    q_grad_out: torch.Tensor,
    k_grad_out: torch.Tensor,
    v_grad_out: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: Sequence[int],
    qkv_format: int,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Return the gradient of `qkv_input`; its positions begin at 0."""
    positions = _positions(q_grad_out, q_freqs, None, qkv_format, None, cp_size, cp_rank)
    query = _turned_back(q_grad_out, _angles(q_freqs, positions), interleaved)
    key = _turned_back(k_grad_out, _angles(k_freqs, positions), interleaved)
    query = query.flatten(-2).unflatten(-1, (-1, qkv_split_arg_list[0]))
    return torch.cat([query, key, v_grad_out], -1)


def _positions(
    x: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: int,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Return each token's position in its whole sample, [S, B], [B, S] or [T], or with 1 for B.

    Raises:
        SizeError: The borders of documents are missing or are not those of the tokens, or a sample
            cannot be divided into two pieces.
    """
    length: torch.Tensor | int
    if int(qkv_format) == int(QkvFormat["NVTE_THD"]):
        if cu_seqlens is None:
            raise SizeError("fused_rope: cu_seqlens is missing, which qkv_format='thd' needs")
        borders = cu_seqlens // cp_size
        sample, places = places_of(borders, x.shape[0], freqs.shape[0])
        length = borders.diff()[sample]
    else:
        shape = (-1, 1) if int(qkv_format) == int(QkvFormat["NVTE_SBHD"]) else (1, -1)
        length, samples = x.shape[:2] if shape == (-1, 1) else (x.shape[1], x.shape[0])
        places = torch.arange(length, device=freqs.device).view(shape)
        sample = torch.arange(samples, device=freqs.device).view(shape[::-1])
    if cp_size > 1:
        half = length // 2
        if (torch.as_tensor(length) % 2).any():
            raise SizeError(f"fused_rope: cp_size={cp_size} needs samples of an even length")
        places = places + torch.where(
            places < half, cp_rank * half, (2 * cp_size - cp_rank - 2) * half
        )
    return places if start_positions is None else places + start_positions[sample]


def _angles(freqs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the angles of `positions` in FP32, which broadcast over the heads.

    Raises:
        SizeError: There are fewer angles than positions.
    """
    if not positions.is_meta and positions.numel() and positions.max() >= freqs.shape[0]:
        raise SizeError(
            f"fused_rope: freqs has {freqs.shape[0]} positions, and the tokens have positions up "
            f"to {int(positions.max())}"
        )
    return freqs.reshape(freqs.shape[0], -1)[positions.to(freqs.device)].float().unsqueeze(-2)


def _turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return _combined(x, angles.cos(), angles.sin(), interleaved)


def _turned_back(grad: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return the transpose of a turn: the sine of the pair's other number, with its sign."""
    sine = -_partner(angles.sin(), interleaved, signed=False)
    return _combined(grad, angles.cos(), sine, interleaved)


def _combined(
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
    fused_rope_forward,
    fused_rope_backward,
    fused_qkv_rope_forward,
    fused_qkv_rope_backward,
)
