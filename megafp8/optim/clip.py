"""Compute the gradient norm over all ranks, and clip gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megafp8.models.init import pieces_of
from megafp8.optim.masters import Masters
from megafp8.parallel.collectives import Axis
from megafp8.specs import OptimSpec


def grad_norm(masters: Masters, tp: Axis, pp: Axis) -> torch.Tensor:
    """Return the L2 norm of the gradients of the whole logical model, as a 0-d FP64 tensor.

    The squares of sharded parameters are summed over tensor-parallel ranks, and all squares over
    pipeline stages and the optimizer's shards. A replicated parameter counts once.
    """
    squares = torch.zeros(2, dtype=torch.float64, device=masters.device)
    if masters.grads:  # a shard may be all padding
        of_each = masters.squared_norms()
        whole: list[int] = []
        parts: list[int] = []
        for row, segment in enumerate(masters.segments):
            piece = pieces_of(segment.param)[0]
            if not piece.replica:  # another stage counts a replica
                (parts if piece.is_sharded else whole).append(row)
        squares = torch.stack((of_each[parts].sum(), of_each[whole].sum()))
    masters.shards.all_reduce_sum(squares)
    return pp.all_reduce_sum(tp.all_reduce_sum(squares[0]) + squares[1]).sqrt()


def clip(
    flat_grads: Sequence[torch.Tensor], norm: float, spec: OptimSpec, *, divisor: float
) -> None:
    """Divide all gradients by `divisor` and clip them, in place.

    `norm` is the norm of the gradients after the division. Clipping by norm shrinks all gradients
    together until their norm is `spec.clip_grad_norm`; clipping by value limits the magnitude of
    each element to it.
    """
    limit, coefficient = spec.clip_grad_norm or math.inf, 1.0
    if spec.clip_algorithm == "norm":
        coefficient = min(1.0, limit / (norm + 1e-6))  # the constant of torch's clip_grad_norm_
    for flat_grad in flat_grads:
        flat_grad.mul_(coefficient / divisor)
        if spec.clip_algorithm == "value" and limit < math.inf:
            flat_grad.clamp_(-limit, limit)
