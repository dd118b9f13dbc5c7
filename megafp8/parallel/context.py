"""Cut sequences over context-parallel ranks, and compute attention over a ring of them.

Ring attention is that of Liu et al. (arXiv 2310.01889).
Keys and values travel round the ring of ranks, a block at a time, while each rank keeps its
queries. A sequence is cut into twice as many chunks as there are ranks, and rank r of n has chunks
r and 2n-1-r, in this order (Megatron-LM's order). Every rank then computes the same amount at every
turn of the ring. If the keys come from an earlier rank, all queries see the keys' first chunk. If
they come from a later rank, the queries' second chunk sees all of the keys. A rank's own block is
causal. Nothing else is computed, so no mask is needed. With a window fewer scores are seen
(`cut.py`), some pieces have a mask, and the keys travel as without one.

The forward pass sends the block of keys and values n - 1 times. The backward pass sends the block n
- 1 times again, followed by the block's gradients, which each rank adds to in FP32 and which end at
the block's own rank.
"""

# B batch  S sequence on this rank  H heads  G key-value heads  E head width  V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megafp8.fp8.draws import Tokens
from megafp8.models.attention import AttentionContext, AttentionCore
from megafp8.models.documents import Documents
from megafp8.ops.attention import AttentionTile, attend, attend_backward, merge_
from megafp8.parallel.collectives import Axis
from megafp8.parallel.cut import (
    ScorePiece,
    own_pieces,
    pieces,
    places_of,
    shares,
    window_pieces,
)

ALL = slice(None)

# (turn, the piece's number in the turn, queries, keys, the piece) -> its scale and masks; equal in
# forward and backward
BlockOf = Callable[[int, int, torch.Tensor, torch.Tensor, ScorePiece], AttentionTile]
# (turn, this rank's tokens of a row) -> pieces
PiecesOf = Callable[[int, int], Sequence[ScorePiece]]


def own_tokens(
    x_BS: torch.Tensor, cp: Axis, *, borders: Sequence[int] | NDArray[np.int32] | None = None
) -> torch.Tensor:
    """Return this rank's tokens of a sequence: [B, S, ...] -> [B, S/cp, ...].

    Of 2 cp chunks rank r has chunks r and 2 cp - 1 - r; see `cut.py`. With `borders`, as
    `Documents.borders`, these are chunks of each document.
    """
    if cp.size == 1:
        return x_BS
    if borders is None:
        chunks = x_BS.chunk(2 * cp.size, dim=1)
        return torch.cat((chunks[cp.rank], chunks[-1 - cp.rank]), dim=1)
    places_BS = places_of(tuple(map(int, borders)), x_BS.shape[1], cp)
    return x_BS.gather(1, places_BS.to(x_BS.device, non_blocking=True))


def own_positions(
    shape: tuple[int, ...],
    cp: Axis,
    device: torch.device,
    *,
    borders: Sequence[int] | NDArray[np.int32] | None = None,
) -> torch.Tensor:
    """Return the positions [B, S/cp] of this rank's tokens in whole sequences of `shape` [B, S]."""
    batch, seq = shape
    positions_BS = torch.arange(seq, device=device).expand(batch, seq)
    return own_tokens(positions_BS, cp, borders=borders)


def tokens_of(
    shape: tuple[int, ...],
    index: int,
    cp: Axis,
    *,
    borders: Sequence[int] | NDArray[np.int32] | None = None,
) -> Tokens:
    """Return which tokens this rank has of a microbatch of whole sequences, of `shape` [B, S].

    `index` is the number of the microbatch among those of all replicas in the step. `borders` as in
    `own_tokens`.
    """
    batch, seq = shape
    samples = tuple(range(index * batch, (index + 1) * batch))
    if cp.size == 1:
        return Tokens(samples, (range(seq),))
    if borders is not None:
        spans: list[list[range]] = [[] for _ in samples]
        for share in shares(tuple(map(int, borders)), seq, cp.size)[cp.rank]:
            spans[share.row] += (share.first, share.second)
        return Tokens(samples, by_sample=tuple(map(tuple, spans)))
    chunk = seq // (2 * cp.size)
    first, last = cp.rank * chunk, seq - (cp.rank + 1) * chunk
    return Tokens(samples, (range(first, first + chunk), range(last, last + chunk)))


def all_tokens(x_BSF: torch.Tensor, cp: Axis) -> torch.Tensor:
    """Return all ranks' parts in the order of the sequence: [B, S/cp, ...] -> [B, S, ...].

    Gradients do not flow through this function.
    """
    if cp.size == 1:
        return x_BSF
    # Rank r has the chunks r and 2 cp - 1 - r, so that the second ones come in falling order.
    halves = [part.chunk(2, dim=1) for part in cp.all_gather(x_BSF.contiguous())]
    last_first = reversed([second for _, second in halves])
    return torch.cat((*(first for first, _ in halves), *last_first), dim=1)


class HasLogits(Protocol):
    """Describe a model that computes logits from tokens and their positions."""

    def logits(
        self, tokens_BS: torch.Tensor, *, position_ids_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of `tokens_BS`: [B, S] -> FP32 [B, S, V]."""


def whole_logits(model: HasLogits, tokens_BS: torch.Tensor, cp: Axis) -> torch.Tensor:
    """Return FP32 logits [B, S, V] on every rank, for tokens [B, S] that every rank has."""
    if cp.size == 1:
        return model.logits(tokens_BS)
    positions_BS = own_positions(tuple(tokens_BS.shape), cp, tokens_BS.device)
    logits_BSV = model.logits(own_tokens(tokens_BS, cp), position_ids_BS=positions_BS)
    return all_tokens(logits_BSV, cp)


def ring_attention(
    q_BHSE: torch.Tensor,
    k_BGSE: torch.Tensor,
    v_BGSE: torch.Tensor,
    cp: Axis,
    block_of: BlockOf,
    pieces_of: PiecesOf | None = None,
) -> torch.Tensor:
    """Return causal attention of this rank's queries over the whole sequence: [B, H, S, E].

    `pieces_of` gives the pieces of each turn, by default those of whole sequences, and `block_of`
    the `AttentionTile` of each piece. Both must return the same ones in backward.
    """
    pieces_of = pieces_of or partial(_whole_pieces, cp)
    out_BHSE: torch.Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
        q_BHSE, k_BGSE, v_BGSE, cp, block_of, pieces_of
    )
    return out_BHSE


class RingAttentionCore(AttentionCore):
    """Compute attention over a sequence that the ranks of `cp` share.

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
        assert context.mask is None and context.slopes_H is None, "ALiBi is refused before the run"
        scale = scale or self.head_size**-0.5
        # The position is taken now, because the backward pass may run much later.
        streams, position = self.streams, self.streams.position
        documents = context.documents

        def block_of(
            turn: int, number: int, q_BHSE: torch.Tensor, k_BGKE: torch.Tensor, piece: ScorePiece
        ) -> AttentionTile:
            keep_BHSK = mask_SK = None
            if piece.in_band:
                assert documents is not None
                mask_SK = documents.band_QK[: q_BHSE.shape[2], : k_BGKE.shape[2]]
            if dropout > 0:
                site = f"{self.site} turn {turn}" + (f" piece {number}" if number else "")
                shape = (*q_BHSE.shape[:3], k_BGKE.shape[2])
                with streams.at(position):
                    keep_BHSK = self.kept(site, shape, q_BHSE.device, dropout)
            return AttentionTile(scale, is_causal=piece.is_causal, keep=keep_BHSK, mask=mask_SK)

        pieces_of = None
        if documents is not None:
            pieces_of = partial(_document_pieces, self.cp, documents)
        return ring_attention(q_BHSE, k_BGSE, v_BGSE, self.cp, block_of, pieces_of)

    def num_seen(self, batch: int, seq: int, num_keys: int, documents: Documents | None) -> int:
        """Return this rank's share of the scores of whole sequences, equal on all ranks."""
        if documents is not None:
            return documents.num_seen // self.cp.size
        return super().num_seen(batch, seq, num_keys * (self.cp.size + 1) // 2, None)


def _whole_pieces(cp: Axis, turn: int, seq: int) -> list[ScorePiece]:
    """Return the pieces of whole sequences after `turn` turns of the ring; see the file's top."""
    if turn == 0:
        return [ScorePiece(ALL, ALL, ALL, is_causal=True)]
    half, is_from_before = seq // 2, turn <= cp.rank
    if is_from_before:
        return [ScorePiece(ALL, ALL, slice(0, half))]
    return [ScorePiece(ALL, slice(half, seq), ALL)]


def _document_pieces(cp: Axis, documents: Documents, turn: int, seq: int) -> Sequence[ScorePiece]:
    """Return the pieces of documents, each of which is cut as a whole sequence is."""
    if documents.hides_earlier:
        assert documents.window is not None
        if not documents.are_whole_rows:
            return _pieces_in_windows(cp, documents.borders, documents.seq, documents.window, turn)
        one_row = (0, documents.seq)
        row_pieces = _pieces_in_windows(cp, one_row, documents.seq, documents.window, turn)
        return [piece._replace(rows=ALL) for piece in row_pieces]
    ranks = shares(documents.borders, documents.seq, cp.size)
    if turn == 0:
        return own_pieces(ranks[cp.rank])
    theirs = ranks[(cp.rank - turn) % cp.size]
    return pieces(ranks[cp.rank], theirs, from_before=turn <= cp.rank)


def _pieces_in_windows(
    cp: Axis, borders: tuple[int, ...], seq: int, window: int, turn: int
) -> list[ScorePiece]:
    ranks = shares(borders, seq, cp.size)
    return window_pieces(ranks[cp.rank], ranks[(cp.rank - turn) % cp.size], window)


def _attend_own(
    q_BHSE: torch.Tensor,
    k_BGSE: torch.Tensor,
    v_BGSE: torch.Tensor,
    parts: Sequence[ScorePiece],
    block_of: BlockOf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp of this rank's own pieces, in FP32 at least.

    Every query is in exactly one of them that does not add to another one.
    """
    work = torch.promote_types(q_BHSE.dtype, torch.float32)
    if parts[0].queries == ALL:
        out, lse_BHS = attend(q_BHSE, k_BGSE, v_BGSE, block_of(0, 0, q_BHSE, k_BGSE, parts[0]))
        return out.to(work), lse_BHS
    out_BHSE = torch.empty_like(q_BHSE, dtype=work)
    lse_BHS = q_BHSE.new_empty(q_BHSE.shape[:3], dtype=work)
    for number, piece in enumerate(parts):
        rows, queries, keys, *_ = piece
        q, k, v = q_BHSE[rows, :, queries], k_BGSE[rows, :, keys], v_BGSE[rows, :, keys]
        out, lse = attend(q, k, v, block_of(0, number, q, k, piece))
        if piece.adds:
            merge_(out_BHSE[rows, :, queries], lse_BHS[rows, :, queries], out, lse)
        else:
            out_BHSE[rows, :, queries], lse_BHS[rows, :, queries] = out, lse
    return out_BHSE, lse_BHS


class _Ring(torch.autograd.Function):
    """Attend over a ring: at turn t a rank has the keys and values of the rank t places before it.

    While it computes with a block, the block of the next turn is under way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BHSE: torch.Tensor,
        k_BGSE: torch.Tensor,
        v_BGSE: torch.Tensor,
        cp: Axis,
        block_of: BlockOf,
        pieces_of: PiecesOf,
    ) -> torch.Tensor:
        coming = cp.start_shift(torch.stack((k_BGSE, v_BGSE)))
        seq = q_BHSE.shape[2]
        out_BHSE, lse_BHS = _attend_own(q_BHSE, k_BGSE, v_BGSE, pieces_of(0, seq), block_of)
        for turn in range(1, cp.size):
            held_2BGSE = coming.wait()
            if turn + 1 < cp.size:
                coming = cp.start_shift(held_2BGSE)
            for number, piece in enumerate(pieces_of(turn, seq)):
                rows, queries, keys, *_ = piece
                q, (k, v) = q_BHSE[rows, :, queries], held_2BGSE[:, rows, :, keys]
                out_and_lse = attend(q, k, v, block_of(turn, number, q, k, piece))
                merge_(out_BHSE[rows, :, queries], lse_BHS[rows, :, queries], *out_and_lse)
        out_BHSE = out_BHSE.to(q_BHSE.dtype)
        ctx.save_for_backward(q_BHSE, k_BGSE, v_BGSE, out_BHSE, lse_BHS)
        ctx.cp, ctx.pieces_of, ctx.block_of = cp, pieces_of, block_of
        return out_BHSE

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_BHSE, k_BGSE, v_BGSE, out_BHSE, lse_BHS = ctx.saved_tensors
        (grad_BHSE,), cp = grads, ctx.cp
        # All ranks add to a block's gradients: they cross ranks in FP32 at least, and are rounded
        # once, at home.
        work = torch.promote_types(q_BHSE.dtype, torch.float32)
        coming = cp.start_shift(torch.stack((k_BGSE, v_BGSE)))
        dq_BHSE = torch.zeros_like(q_BHSE, dtype=work)
        own_dkv_2BGSE = k_BGSE.new_zeros((2, *k_BGSE.shape), dtype=work)
        coming_dkv = None  # what the ranks before have added to the gradients of the held block
        for turn in range(cp.size):
            k_held, v_held = k_BGSE, v_BGSE
            if turn > 0:
                k_held, v_held = held_2BGSE = coming.wait()
                if turn + 1 < cp.size:
                    coming = cp.start_shift(held_2BGSE)
            dkv_of_pieces = []
            for number, piece in enumerate(ctx.pieces_of(turn, q_BHSE.shape[2])):
                rows, queries, keys, *_ = piece
                grad, q, out, lse = (
                    x[rows, :, queries] for x in (grad_BHSE, q_BHSE, out_BHSE, lse_BHS)
                )
                k, v = k_held[rows, :, keys], v_held[rows, :, keys]
                block = ctx.block_of(turn, number, q, k, piece)
                dq, *dkv = attend_backward(grad, q, k, v, out, lse, block)
                dq_BHSE[rows, :, queries] += dq
                dkv_of_pieces.append((rows, keys, torch.stack(dkv)))
            # The gradients of a block follow it from rank to rank. They are waited for after this
            # turn's products, during which they have travelled.
            if turn == 0:
                block_dkv_2BGSE = own_dkv_2BGSE
            else:
                block_dkv_2BGSE = (
                    torch.zeros_like(own_dkv_2BGSE) if coming_dkv is None else coming_dkv.wait()
                )
            for rows, keys, dkv_2BGSE in dkv_of_pieces:
                block_dkv_2BGSE[:, rows, :, keys] += dkv_2BGSE
            if turn > 0:
                coming_dkv = cp.start_shift(block_dkv_2BGSE)
        if coming_dkv is not None:  # the last shift has brought the own block's gradients home
            own_dkv_2BGSE += coming_dkv.wait()
        dk_BGSE, dv_BGSE = own_dkv_2BGSE.to(k_BGSE.dtype)
        return dq_BHSE.to(q_BHSE.dtype), dk_BGSE, dv_BGSE, None, None, None
