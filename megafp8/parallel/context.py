"""Cut sequences over context-parallel ranks, and compute attention over a ring of them.

Ring attention is that of Liu et al. (arXiv 2310.01889).
Keys and values travel round the ring of ranks, a block at a time, while each rank keeps its
queries. A sequence is cut into twice as many chunks as there are ranks, and rank r of n has chunks
r and 2n-1-r, in this order (Megatron-LM's order). Every rank then computes the same amount at every
turn of the ring. If the keys come from an earlier rank, all queries see the keys' first chunk. If
they come from a later rank, the queries' second chunk sees all of the keys. A rank's own block is
causal. Nothing else is computed, so no mask is needed.

The forward pass sends the block of keys and values n - 1 times. The backward pass sends the block n
- 1 times again, followed by the block's gradients, which each rank adds to in FP32 and which end at
the block's own rank.
"""

# B batch  S sequence on this rank  H heads  G key-value heads  E head width  V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megafp8.fp8.draws import Tokens
from megafp8.models.attention import AttentionContext, AttentionCore
from megafp8.models.attention_block import Block, attend, attend_backward, merge_
from megafp8.models.documents import Documents
from megafp8.parallel.collectives import Axis


def own_tokens(x_BS: torch.Tensor, cp: Axis) -> torch.Tensor:
    """Return this rank's tokens of a sequence: [B, S, ...] -> [B, S/cp, ...].

    Of 2 cp chunks rank r has chunks r and 2 cp - 1 - r; see the top of this file.
    """
    if cp.size == 1:
        return x_BS
    chunks = x_BS.chunk(2 * cp.size, dim=1)
    return torch.cat((chunks[cp.rank], chunks[-1 - cp.rank]), dim=1)


def own_positions(shape: tuple[int, ...], cp: Axis, device: torch.device) -> torch.Tensor:
    """Return the positions [B, S/cp] of this rank's tokens in whole sequences of `shape` [B, S]."""
    batch, seq = shape
    return own_tokens(torch.arange(seq, device=device)[None], cp).expand(batch, -1)


def tokens_of(shape: tuple[int, ...], index: int, cp: Axis) -> Tokens:
    """Return which tokens this rank has of a microbatch of whole sequences, of `shape` [B, S].

    `index` is the number of the microbatch among those of all replicas in the step.
    """
    batch, seq = shape
    samples = tuple(range(index * batch, (index + 1) * batch))
    if cp.size == 1:
        return Tokens(samples, (range(seq),))
    chunk = seq // (2 * cp.size)
    first, last = cp.rank * chunk, seq - (cp.rank + 1) * chunk
    return Tokens(samples, (range(first, first + chunk), range(last, last + chunk)))


def all_tokens(x_BSF: torch.Tensor, cp: Axis) -> torch.Tensor:
    """Return all ranks' parts in the order of the sequence: [B, S/cp, ...] -> [B, S, ...].

    Gradients do not flow through this function.
    """
    if cp.size == 1:
        return x_BSF
    halves = [part.chunk(2, dim=1) for part in cp.all_gather(x_BSF.contiguous())]
    last_first = reversed([second for _, second in halves])
    return torch.cat((*(first for first, _ in halves), *last_first), dim=1)


class HasLogits(Protocol):
    """Describes a model that computes logits from tokens and their positions."""

    def logits(
        self, tokens_BS: torch.Tensor, *, position_ids_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of `tokens_BS`: [B, S] -> FP32 [B, S, V]."""
        ...


def whole_logits(model: HasLogits, tokens_BS: torch.Tensor, cp: Axis) -> torch.Tensor:
    """Return FP32 logits [B, S, V] on every rank, for tokens [B, S] that every rank has."""
    if cp.size == 1:
        return model.logits(tokens_BS)
    positions_BS = own_positions(tuple(tokens_BS.shape), cp, tokens_BS.device)
    logits_BSV = model.logits(own_tokens(tokens_BS, cp), position_ids_BS=positions_BS)
    return all_tokens(logits_BSV, cp)


ALL = slice(None)

# (turn, queries, keys) -> the block's scale and masks; equal in forward and backward
BlockOf = Callable[[int, torch.Tensor, torch.Tensor], Block]


def ring_attention(
    q_BHSE: torch.Tensor, k_BGSE: torch.Tensor, v_BGSE: torch.Tensor, cp: Axis, block_of: BlockOf
) -> torch.Tensor:
    """Return causal attention of this rank's queries over the whole sequence: [B, H, S, E].

    `block_of` gives the `Block` of each turn and must return the same one in backward.
    """
    out_BHSE: torch.Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
        q_BHSE, k_BGSE, v_BGSE, cp, block_of
    )
    return out_BHSE


class RingAttentionCore(AttentionCore):
    """Computes attention over a sequence that the ranks of `cp` share.

    Dropout draws a mask for each block, so the mask differs from that of a single process.
    """

    def __init__(self, *args: Any, cp: Axis, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cp = cp

    def _softmax_product(
        self,
        q_BHSE: torch.Tensor,
        k_BGSE: torch.Tensor,
        v_BGSE: torch.Tensor,
        context: AttentionContext,
        dropout: float,
        scale: float | None,
    ) -> torch.Tensor:
        assert context.mask is None and context.documents is None, (
            "documents and ALiBi are refused before the run"
        )
        streams, position = (
            self.streams,
            self.streams.position,
        )  # saved here because backward may run much later

        def block_of(turn: int, q_BHSE: torch.Tensor, k_BGKE: torch.Tensor) -> Block:
            keep_BHSK = None
            if dropout > 0:
                site = f"{self.site} turn {turn}"
                shape = (*q_BHSE.shape[:3], k_BGKE.shape[2])
                with streams.at(position):
                    keep_BHSK = self.kept(site, shape, q_BHSE.device, dropout)
            return Block(scale or self.head_size**-0.5, is_causal=turn == 0, keep=keep_BHSK)

        return ring_attention(q_BHSE, k_BGSE, v_BGSE, self.cp, block_of)

    def count_forward(
        self,
        batch: int,
        heads: int,
        seq: int,
        num_keys: int,
        documents: Documents | None = None,
    ) -> int:
        """Count and return this rank's share of the whole sequence's FLOPs, equal on all ranks."""
        assert documents is None
        return super().count_forward(batch, heads, seq, num_keys * (self.cp.size + 1) // 2)


def seen(cp: Axis, turn: int, seq: int) -> tuple[slice, slice]:
    """Return (which of this rank's queries attend, to which keys) after `turn` turns of the
    ring.
    """
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
        block_of: BlockOf,
    ) -> torch.Tensor:
        held_2BGSE = torch.stack((k_BGSE, v_BGSE))
        coming = cp.start_shift(held_2BGSE)
        out, lse_BHS = attend(q_BHSE, k_BGSE, v_BGSE, block_of(0, q_BHSE, k_BGSE))
        out_BHSE = out.to(torch.promote_types(out.dtype, torch.float32))
        for turn in range(1, cp.size):
            held_2BGSE = coming.wait()
            if turn + 1 < cp.size:
                coming = cp.start_shift(held_2BGSE)
            rows, keys = seen(cp, turn, q_BHSE.shape[2])
            q, (k, v) = q_BHSE[:, :, rows], held_2BGSE[:, :, :, keys]
            more = attend(q, k, v, block_of(turn, q, k))
            merge_(out_BHSE[:, :, rows], lse_BHS[:, :, rows], *more)
        out_BHSE = out_BHSE.to(q_BHSE.dtype)
        ctx.save_for_backward(q_BHSE, k_BGSE, v_BGSE, out_BHSE, lse_BHS)
        ctx.cp, ctx.block_of = cp, block_of
        return out_BHSE

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_BHSE, k_BGSE, v_BGSE, out_BHSE, lse_BHS = ctx.saved_tensors
        (grad_BHSE,), cp, block_of = grads, ctx.cp, ctx.block_of
        work = torch.promote_types(q_BHSE.dtype, torch.float32)
        held_2BGSE = torch.stack((k_BGSE, v_BGSE))
        coming = cp.start_shift(held_2BGSE)
        dq, *dkv = attend_backward(
            grad_BHSE, q_BHSE, k_BGSE, v_BGSE, out_BHSE, lse_BHS, block_of(0, q_BHSE, k_BGSE)
        )
        dq_BHSE, own_2BGSE = dq.to(work), torch.stack(dkv).to(work)
        sums = None  # the sums of the held block's gradients, from the previous rank
        for turn in range(1, cp.size):
            held_2BGSE = coming.wait()
            if turn + 1 < cp.size:
                coming = cp.start_shift(held_2BGSE)
            rows, keys = seen(cp, turn, q_BHSE.shape[2])
            grad, q, out = (x[:, :, rows] for x in (grad_BHSE, q_BHSE, out_BHSE))
            k, v = held_2BGSE[:, :, :, keys]
            block = block_of(turn, q, k)
            dq, *dkv = attend_backward(grad, q, k, v, out, lse_BHS[:, :, rows], block)
            dq_BHSE[:, :, rows] += dq
            sums_2BGSE = torch.zeros_like(own_2BGSE) if sums is None else sums.wait()
            sums_2BGSE[:, :, :, keys] += torch.stack(dkv)
            sums = cp.start_shift(sums_2BGSE)
        if sums is not None:
            own_2BGSE += sums.wait()
        dk_BGSE, dv_BGSE = own_2BGSE.to(k_BGSE.dtype)
        return dq_BHSE.to(q_BHSE.dtype), dk_BGSE, dv_BGSE, None, None
