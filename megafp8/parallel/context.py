"""Context parallelism: which tokens of a sequence a rank has, and whole results from the parts."""

# B batch  S sequence  V vocabulary

from __future__ import annotations

from typing import Protocol

import torch

from megafp8.parallel.collectives import Axis


def own_tokens(x_BS: torch.Tensor, cp: Axis) -> torch.Tensor:
    """[B, S, ...] -> [B, S/cp, ...]: of 2 cp chunks the rank-th from each end, see `ring`."""
    if cp.size == 1:
        return x_BS
    chunks = x_BS.chunk(2 * cp.size, dim=1)
    return torch.cat((chunks[cp.rank], chunks[-1 - cp.rank]), dim=1)


def own_positions(shape: tuple[int, ...], cp: Axis, device: torch.device) -> torch.Tensor:
    """The places [B, S/cp] of a rank's tokens in whole sequences of `shape` [B, S]."""
    batch, seq = shape
    return own_tokens(torch.arange(seq, device=device)[None], cp).expand(batch, -1)


def whole_sequence(x_BSF: torch.Tensor, cp: Axis) -> torch.Tensor:
    """[B, S/cp, ...] -> [B, S, ...] in the order of the sequence; no autograd."""
    if cp.size == 1:
        return x_BSF
    halves = [part.chunk(2, dim=1) for part in cp.all_gather(x_BSF.contiguous())]
    last_first = reversed([second for _, second in halves])
    return torch.cat((*(first for first, _ in halves), *last_first), dim=1)


class HasLogits(Protocol):
    def logits(
        self, tokens_BS: torch.Tensor, *, position_ids_BS: torch.Tensor | None = None
    ) -> torch.Tensor: ...


def whole_logits(model: HasLogits, tokens_BS: torch.Tensor, cp: Axis) -> torch.Tensor:
    """FP32 [B, S, V] on every rank, of tokens [B, S] that every rank has."""
    if cp.size == 1:
        return model.logits(tokens_BS)
    positions_BS = own_positions(tuple(tokens_BS.shape), cp, tokens_BS.device)
    logits_BSV = model.logits(own_tokens(tokens_BS, cp), position_ids_BS=positions_BS)
    return whole_sequence(logits_BSV, cp)
