"""The global gradient norm over all ranks, and clipping."""

from __future__ import annotations

import math

import torch

from megafp8.models.init import pieces_of
from megafp8.optim.masters import Masters
from megafp8.parallel.collectives import Axis
from megafp8.specs import OptimSpec


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


def clip(flat_grad: torch.Tensor, norm: float, spec: OptimSpec, *, divisor: float) -> None:
    """Divide all gradients by `divisor` and clip them, in place; `norm` is theirs after it.

    By norm, they shrink together until their norm is the limit; by value, each is cut off at it.
    """
    limit, coefficient = spec.clip_grad_norm or math.inf, 1.0
    if spec.clip_algorithm == "norm":
        coefficient = min(1.0, limit / (norm + 1e-6))  # the constant of torch's clip_grad_norm_
    flat_grad.mul_(coefficient / divisor)
    if spec.clip_algorithm == "value" and limit < math.inf:
        flat_grad.clamp_(-limit, limit)
