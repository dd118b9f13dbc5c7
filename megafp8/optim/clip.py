"""The global gradient norm over all ranks."""

from __future__ import annotations

import torch

from megafp8.models.init import pieces_of
from megafp8.optim.masters import Masters
from megafp8.parallel.collectives import Axis


def grad_norm(masters: Masters, tp: Axis, pp: Axis) -> torch.Tensor:
    """L2 norm over the logical model (FP64 scalar): sharded parts summed over tensor-parallel
    ranks, all over pipeline stages; replicated parameters counted once."""
    norms = torch.stack(torch._foreach_norm(masters.grads)).double()
    squares = norms.square()
    for row, param in enumerate(masters.params):
        if pieces_of(param)[0].replica:  # another stage counts it
            squares[row] = 0
    sharded = tp.all_reduce_sum(squares[: masters.num_sharded].sum())
    return pp.all_reduce_sum(sharded + squares[masters.num_sharded :].sum()).sqrt()
