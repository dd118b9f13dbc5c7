"""The global gradient norm over all ranks."""

from __future__ import annotations

import torch

from megafp8.optim.masters import Masters
from megafp8.parallel.collectives import Axis


def grad_norm(masters: Masters, tp: Axis) -> torch.Tensor:
    """L2 norm over the logical model (FP64 scalar): sharded parts summed over tensor-parallel
    ranks, replicated parameters counted once."""
    norms = torch.stack(torch._foreach_norm(masters.grads)).double()
    squares = norms.square()
    sharded = tp.all_reduce_sum(squares[: masters.num_sharded].sum())
    return (sharded + squares[masters.num_sharded :].sum()).sqrt()
