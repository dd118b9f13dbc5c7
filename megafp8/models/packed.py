"""Compute attention within documents and windows, without a mask of all tokens.

On GPUs torch's kernel for sequences of many lengths does it where it can: BF16 and FP16, neither
dropout nor biases. Everywhere else it is done block by block (`models/documents.py`), where a
block has all keys that its queries see, so that nothing is merged.
"""

# B batch  S sequence  T tokens (B x S)  H heads  G key-value heads  E head width
# Q queries of a block  K its keys

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from megafp8.models.documents import Area, Documents
from megafp8.ops.attention import AttentionTile, attend, attend_backward

# (the block's number, the block) -> its scale and masks, equal in forward and backward
BlockOf = Callable[[int, Area], AttentionTile]


@cache
def varlen_kernel() -> Callable[..., torch.Tensor] | None:
    """Return torch's attention for sequences of many lengths, or None if this torch has none.

    Its first versions had no `scale`, which it must have here.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    kernel: Any = varlen_attn
    return kernel if {"scale", "window_size"} <= _arguments(kernel) else None


def _arguments(kernel: Callable[..., torch.Tensor]) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)


@cache
def takes_groups(kernel: Callable[..., torch.Tensor]) -> bool:
    """Whether query heads may share keys and values: that of torch 2.11 has no argument for it."""
    return "enable_gqa" in _arguments(kernel)


def uses_varlen(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    *,
    dropout: float,
    has_bias: bool,
    has_groups: bool,
) -> bool:
    """Whether torch's kernel for sequences of many lengths computes attention of documents.

    It is flash attention, for GPUs alone. `has_groups`: several query heads share keys and values.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    takes = is_half and head_size in range(8, 257, 8) and dropout == 0 and not has_bias
    if device.type != "cuda" or not takes or (kernel := varlen_kernel()) is None:
        return False
    return takes_groups(kernel) or not has_groups


def attend_varlen(
    q_BHSE: torch.Tensor,
    k_BGSE: torch.Tensor,
    v_BGSE: torch.Tensor,
    documents: Documents,
    scale: float,
) -> torch.Tensor:
    """Return causal attention within documents and their window [B, H, S, E], by torch's kernel.

    **Unproven: no GPU has run this function.** A test compares its call with the kernel's contract.
    """
    kernel = varlen_kernel()
    assert kernel is not None, "uses_varlen() says so"
    q_THE, k_TGE, v_TGE = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSE, k_BGSE, v_BGSE))
    longest = max(documents.lengths)
    has_groups = q_THE.shape[1] != k_TGE.shape[1]
    groups = {"enable_gqa": True} if has_groups else {}
    out_THE = kernel(
        q_THE,
        k_TGE,
        v_TGE,
        documents.cu_seqlens_on_device,  # of the queries
        documents.cu_seqlens_on_device,  # of the keys
        longest,
        longest,
        scale=scale,
        window_size=(-1 if documents.window is None else documents.window, 0),  # causal
        **groups,
    )
    return out_THE.view(q_BHSE.shape[0], -1, *out_THE.shape[1:]).transpose(1, 2)


def attend_blocks(
    q_BHSE: torch.Tensor,
    k_BGSE: torch.Tensor,
    v_BGSE: torch.Tensor,
    documents: Documents,
    block_of: BlockOf,
) -> torch.Tensor:
    """Return causal attention within documents and windows [B, H, S, E], block by block."""
    out_BHSE: torch.Tensor = _Blocks.apply(  # type: ignore[no-untyped-call]
        q_BHSE, k_BGSE, v_BGSE, documents, block_of
    )
    return out_BHSE


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHSE: torch.Tensor,
        k_BGSE: torch.Tensor,
        v_BGSE: torch.Tensor,
        documents: Documents,
        block_of: BlockOf,
    ) -> torch.Tensor:
        work = torch.promote_types(q_BHSE.dtype, torch.float32)
        out_BHSE, lse_BHS = _by_token(q_BHSE), q_BHSE.new_empty(q_BHSE.shape[:3], dtype=work)
        for number, area in enumerate(documents.areas):
            parts = _parts(area, q_BHSE, k_BGSE, v_BGSE)
            out, lse = attend(*parts, block_of(number, area))
            out_BHSE[area.row, :, area.queries] = out[0]
            lse_BHS[area.row, :, area.queries] = lse[0]
        ctx.save_for_backward(q_BHSE, k_BGSE, v_BGSE, out_BHSE, lse_BHS)
        ctx.documents, ctx.block_of = documents, block_of
        return out_BHSE

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_BHSE, k_BGSE, v_BGSE, out_BHSE, lse_BHS = ctx.saved_tensors
        documents: Documents = ctx.documents
        dq_BHSE, dtype = _by_token(q_BHSE), q_BHSE.dtype
        if documents.shares_keys:  # the gradients of keys are then sums
            dtype = torch.promote_types(dtype, torch.float32)
        dk_BGSE, dv_BGSE = (_by_token(x, dtype).zero_() for x in (k_BGSE, v_BGSE))
        for number, area in enumerate(documents.areas):
            saved = (grads[0], out_BHSE, lse_BHS)
            grad, out, lse = (x[area.row, None, :, area.queries] for x in saved)
            parts = _parts(area, q_BHSE, k_BGSE, v_BGSE)
            dq, dk, dv = attend_backward(grad, *parts, out, lse, ctx.block_of(number, area))
            dq_BHSE[area.row, :, area.queries] = dq[0]
            dk_BGSE[area.row, :, area.keys] += dk[0]
            dv_BGSE[area.row, :, area.keys] += dv[0]
        return dq_BHSE, dk_BGSE.to(k_BGSE.dtype), dv_BGSE.to(v_BGSE.dtype), None, None


def _parts(
    area: Area, q_BHSE: torch.Tensor, k_BGSE: torch.Tensor, v_BGSE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the queries [1, H, Q, E], keys and values [1, G, K, E] of a block."""
    k, v = (x[area.row, None, :, area.keys] for x in (k_BGSE, v_BGSE))
    return q_BHSE[area.row, None, :, area.queries], k, v


def _by_token(x_BHSE: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an empty tensor [B, H, S, E] that has the heads of a token beside each other."""
    batch, heads, seq, size = x_BHSE.shape
    return x_BHSE.new_empty(batch, seq, heads, size, dtype=dtype or x_BHSE.dtype).transpose(1, 2)
