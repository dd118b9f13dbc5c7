"""Cut sequences into the parts of context parallelism, and put whole results together again."""

# B batch  S sequence  V vocabulary

from __future__ import annotations

from typing import Protocol

import torch

from megafp8.parallel.collectives import Axis


def own_tokens(x_BS: torch.Tensor, cp: Axis) -> torch.Tensor:
    """Return this rank's tokens of a sequence: [B, S, ...] -> [B, S/cp, ...].

    Of 2 cp chunks rank r has chunks r and 2 cp - 1 - r; see `parallel/ring.py`.
    """
    if cp.size == 1:
        return x_BS
    chunks = x_BS.chunk(2 * cp.size, dim=1)
    return torch.cat((chunks[cp.rank], chunks[-1 - cp.rank]), dim=1)


def own_positions(shape: tuple[int, ...], cp: Axis, device: torch.device) -> torch.Tensor:
    """Return the positions [B, S/cp] of this rank's tokens in whole sequences of `shape` [B, S]."""
    batch, seq = shape
    return own_tokens(torch.arange(seq, device=device)[None], cp).expand(batch, -1)


def whole_sequence(x_BSF: torch.Tensor, cp: Axis) -> torch.Tensor:
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
    return whole_sequence(logits_BSV, cp)
