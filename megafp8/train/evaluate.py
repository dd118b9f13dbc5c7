"""Validation: the loss over batches, leaving no trace in FP8 scales or weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megafp8.data.loader import Microbatch
from megafp8.train.state import TrainState
from megafp8.train.step import local_batch


@torch.no_grad()
def evaluate(state: TrainState, batches: Iterable[Microbatch]) -> tuple[float, int]:
    """(nats per counted token, counted tokens) over all data-parallel ranks' batches."""
    device = state.mesh.device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    state.model.eval()
    with state.scaling.evaluation():
        for batch in batches:
            own = local_batch(batch, state.mesh)
            totals[0] += state.model(own.tokens_BS, own.targets_BS, **own.documents)
            totals[1] += (own.targets_BS >= 0).sum()
    state.model.train()
    state.mesh.pp.all_reduce_sum(totals[0])  # 0 but for the stage with the head
    state.mesh.data.all_reduce_sum(totals)
    return (totals[0] / totals[1]).item(), int(totals[1].item())
