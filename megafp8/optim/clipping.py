"""Find the norm of all gradients, and clip them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from megafp8.optim.masters import Masters
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import Replicas
from megafp8.specs import OptimSpec
from megafp8.specs.geometry import DENSE


def grad_norm(
    masters: Masters,
    tp: Axis,
    pp: Axis,
    beside: torch.Tensor | None = None,
    groups: Mapping[str, Replicas] = MappingProxyType({}),
) -> torch.Tensor:
    """Return the L2 norm of the gradients of the whole logical model, as a 0-d FP64 tensor.

    The squares of sharded parameters are summed over tensor-parallel ranks, and all squares over
    pipeline stages and the optimizer's shards. A replicated parameter counts once: as the mean of
    the tensor-parallel ranks, so that all of them get the same norm, and all learn of a gradient
    that is not finite on one of them. Parameters of other `groups` of replicas than the dense one
    are summed over the ranks that have the group's parts.

    The FP64 numbers `beside` [numbers] are summed over `tp` and `pp` in the same messages, in
    place.
    """
    of_each = masters.squared_norms() if masters.grads else None  # a shard may be all padding
    squares = _squares(masters, of_each, DENSE)
    total = squares[0] + squares[1] / tp.size
    if beside is not None:
        total = torch.cat((total[None], beside))
    total = tp.all_reduce_sum(total)
    for name, replicas in groups.items():
        total.view(-1)[0] += replicas.parts.all_reduce_sum(_squares(masters, of_each, name)[0])
    total = pp.all_reduce_sum(total)
    if beside is None:
        return total.sqrt()
    beside.copy_(total[1:])
    return total[0].sqrt()


def _squares(masters: Masters, of_each: torch.Tensor | None, group: str) -> torch.Tensor:
    """Return the sums of a group's squares, of its sharded and of its whole parameters, FP64 [2].

    The order decides what counts once: shards own disjoint parts, so their squares are added first;
    then those of sharded weights over tensor-parallel ranks, and of all over stages.
    """
    squares = torch.zeros(2, dtype=torch.float64, device=masters.device)
    if of_each is not None:
        squares = torch.stack([of_each[rows].sum() for rows in masters.rows_of_norm[group]])
    return masters.shards_of[group].all_reduce_sum(squares)


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
