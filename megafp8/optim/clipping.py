"""Find the norm of all gradients, and clip them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megafp8.optim.masters import Masters
from megafp8.parallel.collectives import Axis
from megafp8.specs import OptimSpec


def grad_norm(
    masters: Masters, tp: Axis, pp: Axis, beside: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the L2 norm of the gradients of the whole logical model, as a 0-d FP64 tensor.

    The squares of sharded parameters are summed over tensor-parallel ranks, and all squares over
    pipeline stages and the optimizer's shards. A replicated parameter counts once: as the mean of
    the tensor-parallel ranks, so that all of them get the same norm, and all learn of a gradient
    that is not finite on one of them.

    The FP64 numbers `beside` [numbers] are summed over both axes in the same messages, in place.
    """
    squares = torch.zeros(2, dtype=torch.float64, device=masters.device)
    if masters.grads:  # a shard may be all padding
        of_each = masters.squared_norms()
        squares = torch.stack([of_each[rows].sum() for rows in masters.rows_of_norm])
    # The order decides what counts once: shards own disjoint parts, so their squares are added
    # first; then those of sharded weights over tensor-parallel ranks, and of all over stages.
    masters.shards.all_reduce_sum(squares)
    total = squares[0] + squares[1] / tp.size
    if beside is None:
        return pp.all_reduce_sum(tp.all_reduce_sum(total)).sqrt()
    sums = pp.all_reduce_sum(tp.all_reduce_sum(torch.cat((total[None], beside))))
    beside.copy_(sums[1:])
    return sums[0].sqrt()


def coefficient(norm: float, spec: OptimSpec) -> float:
    """Return the factor by which clipping by norm shrinks gradients of this norm, at most 1."""
    if spec.clip_algorithm != "norm":
        return 1.0
    limit = spec.clip_grad_norm or math.inf
    return min(1.0, limit / (norm + 1e-6))  # the constant of torch's clip_grad_norm_


def coefficient_on_device(norm: torch.Tensor, spec: OptimSpec) -> torch.Tensor:
    """Return what `coefficient` returns, with the same bits, for a norm that is on the device.

    Both are 0-d FP64 tensors; clipping is by norm.
    """
    assert spec.clip_algorithm == "norm"
    limit = torch.full_like(norm, spec.clip_grad_norm or math.inf)
    # tensor / tensor is a true division; number / tensor would be a rounded reciprocal times it
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def clip(
    flat_grads: Sequence[torch.Tensor], norm: float, spec: OptimSpec, *, divisor: float
) -> None:
    """Divide all gradients by `divisor` and clip them, in place.

    `norm` is the norm of the gradients after the division. Clipping by norm shrinks all gradients
    together until their norm is `spec.clip_grad_norm`; clipping by value limits the magnitude of
    each element to it.
    """
    limit, factor = spec.clip_grad_norm or math.inf, coefficient(norm, spec) / divisor
    for flat_grad in flat_grads:
        flat_grad.mul_(factor)
        if spec.clip_algorithm == "value" and limit < math.inf:
            flat_grad.clamp_(-limit, limit)
