"""Ring attention (Liu et al., arXiv 2310.01889): keys and values go round the ranks that share a
sequence, a block at a time, while each rank keeps its queries.

A sequence is cut into twice as many chunks as there are ranks, and rank r of n has chunks r and
2n-1-r, in this order: then every rank has as much to do as the others at every turn of the ring
(Megatron-LM's order). Where the keys come from an earlier rank all queries see their first chunk;
where they come from a later one the second chunk of the queries sees all of them; the own ones are
causal. Nothing else is computed, so no mask is needed.

Forward, n - 1 times: the block of keys and values. Backward, n - 1 times: the block again, and
behind it the block's gradients, summed in FP32 by the ranks that it passes, home to its rank.
"""

# B batch  S sequence on this rank  H heads  G key-value heads  E head width

from __future__ import annotations

from typing import Any

import torch

from megafp8.models.attention import AttentionCore
from megafp8.models.attention_block import Block, attend, attend_backward, merge_
from megafp8.parallel.collectives import Axis

ALL = slice(None)


def ring_attention(
    q_BHSE: torch.Tensor, k_BGSE: torch.Tensor, v_BGSE: torch.Tensor, cp: Axis, *, scale: float
) -> torch.Tensor:
    """Causal attention of this rank's queries over the whole sequence: [B, H, S, E]."""
    out_BHSE: torch.Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
        q_BHSE, k_BGSE, v_BGSE, cp, scale
    )
    return out_BHSE


class RingAttentionCore(AttentionCore):
    """Attention over a sequence that the ranks of `cp` share out."""

    def __init__(self, *args: Any, cp: Axis, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cp = cp

    def _softmax_product(
        self,
        q_BHSE: torch.Tensor,
        k_BGSE: torch.Tensor,
        v_BGSE: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        scale: float | None,
    ) -> torch.Tensor:
        assert mask is None and dropout == 0.0, "refused before the run"
        return ring_attention(q_BHSE, k_BGSE, v_BGSE, self.cp, scale=scale or self.head_size**-0.5)

    def _count_forward(self, q_BHSE: torch.Tensor, num_keys: int) -> int:
        """A rank's share of the whole sequence's, the same for all."""
        return super()._count_forward(q_BHSE, num_keys * (self.cp.size + 1) // 2)


def seen(cp: Axis, turn: int, seq: int) -> tuple[slice, slice]:
    """(which of this rank's queries see, which of the keys here after `turn` turns)."""
    half, is_from_before = seq // 2, turn <= cp.rank
    return (ALL, slice(0, half)) if is_from_before else (slice(half, seq), ALL)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHSE: torch.Tensor,
        k_BGSE: torch.Tensor,
        v_BGSE: torch.Tensor,
        cp: Axis,
        scale: float,
    ) -> torch.Tensor:
        held_2BGSE = torch.stack((k_BGSE, v_BGSE))
        coming = cp.start_shift(held_2BGSE)
        out, lse_BHS = attend(q_BHSE, k_BGSE, v_BGSE, Block(scale, is_causal=True))
        out_BHSE = out.to(torch.promote_types(out.dtype, torch.float32))
        for turn in range(1, cp.size):
            held_2BGSE = coming.wait()
            if turn + 1 < cp.size:
                coming = cp.start_shift(held_2BGSE)
            rows, keys = seen(cp, turn, q_BHSE.shape[2])
            more = attend(q_BHSE[:, :, rows], *held_2BGSE[:, :, :, keys], Block(scale))
            merge_(out_BHSE[:, :, rows], lse_BHS[:, :, rows], *more)
        out_BHSE = out_BHSE.to(q_BHSE.dtype)
        ctx.save_for_backward(q_BHSE, k_BGSE, v_BGSE, out_BHSE, lse_BHS)
        ctx.cp, ctx.scale = cp, scale
        return out_BHSE

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_BHSE, k_BGSE, v_BGSE, out_BHSE, lse_BHS = ctx.saved_tensors
        (grad_BHSE,), cp = grads, ctx.cp
        work = torch.promote_types(q_BHSE.dtype, torch.float32)
        held_2BGSE = torch.stack((k_BGSE, v_BGSE))
        coming = cp.start_shift(held_2BGSE)
        dq, *dkv = attend_backward(
            grad_BHSE, q_BHSE, k_BGSE, v_BGSE, out_BHSE, lse_BHS, Block(ctx.scale, is_causal=True)
        )
        dq_BHSE, own_2BGSE = dq.to(work), torch.stack(dkv).to(work)
        sums = None  # of the gradients of the keys and values held, from the rank before
        for turn in range(1, cp.size):
            held_2BGSE = coming.wait()
            if turn + 1 < cp.size:
                coming = cp.start_shift(held_2BGSE)
            rows, keys = seen(cp, turn, q_BHSE.shape[2])
            dq, *dkv = attend_backward(
                *(x[:, :, rows] for x in (grad_BHSE, q_BHSE)),
                *held_2BGSE[:, :, :, keys],
                *(x[:, :, rows] for x in (out_BHSE, lse_BHS)),
                Block(ctx.scale),
            )
            dq_BHSE[:, :, rows] += dq
            sums_2BGSE = torch.zeros_like(own_2BGSE) if sums is None else sums.wait()
            sums_2BGSE[:, :, :, keys] += torch.stack(dkv)
            sums = cp.start_shift(sums_2BGSE)
        if sums is not None:
            own_2BGSE += sums.wait()
        dk_BGSE, dv_BGSE = own_2BGSE.to(k_BGSE.dtype)
        return dq_BHSE.to(q_BHSE.dtype), dk_BGSE, dv_BGSE, None, None
