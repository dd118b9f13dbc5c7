"""Compute the cross entropy of logits whose vocabulary may be divided among ranks, in FP32 inside.

The functions stand in for those of Transformer Engine's module `triton.cross_entropy`. Up to 2.18
the forward pass computes the gradient of the logits too: up to 2.17 it is written over the logits,
with their rounding, and in 2.18 into FP32. From 2.19 on the backward pass computes it.
"""

# B, S batch and sequence  N rows, B x S  V vocabulary of a rank

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_cpu.errors import SizeError


class Rows(NamedTuple):
    """Hold what is known of each row, [N] FP32.

    `largest` is that of the logits, `total` the sum of exp(logit - largest), `at_goal` the logit
    of the target, and `own_sum` that of this rank's logits; `whole_sum` is that of all ranks'.
    """

    largest: torch.Tensor
    total: torch.Tensor
    at_goal: torch.Tensor
    own_sum: torch.Tensor
    whole_sum: torch.Tensor
    rank: int
    world: int

    def loss(self, width: int, label_smoothing: float, *, all_ranks: bool) -> torch.Tensor:
        """Return the loss of each row; up to 2.18 each rank smoothes with its own logits alone."""
        loss = -(self.at_goal - self.largest - self.total.log())
        if label_smoothing == 0:
            return loss
        seen = self.whole_sum if all_ranks else self.own_sum
        smooth = -label_smoothing / (width * self.world) * seen
        smooth = smooth + label_smoothing * (self.largest + self.total.log())
        return loss * (1 - label_smoothing) + smooth


def _rows(logits: torch.Tensor, goal: torch.Tensor, group: Any) -> Rows:
    """Return what is known of the rows of `logits` [N, V] whose targets are `goal` [N]."""
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    width = logits.shape[1]
    column = goal - rank * width
    is_here = (column >= 0) & (column < width)
    largest = logits.amax(-1)
    at_goal = logits.gather(1, column.clamp(0, width - 1)[:, None])[:, 0]
    at_goal = at_goal.masked_fill(~is_here, -torch.inf)
    own = [largest, (logits - largest[:, None]).exp().sum(-1), at_goal, logits.sum(-1)]
    parts = [torch.stack(own)]
    if world > 1:
        parts = [torch.empty_like(parts[0]) for _ in range(world)]
        dist.all_gather(parts, torch.stack(own), group=group)
    largest, total, at_goal, whole = parts[0]
    for other, other_total, other_goal, other_sum in parts[1:]:
        new = torch.maximum(largest, other)
        total = total * (largest - new).exp() + other_total * (other - new).exp()
        largest, at_goal = new, torch.maximum(at_goal, other_goal)
        whole = whole + other_sum
    return Rows(largest, total, at_goal, own[3], whole, rank, world)


def _gradient(
    logits: torch.Tensor, largest: torch.Tensor, total: torch.Tensor, smoothing: float
) -> torch.Tensor:
    """Return the gradient [N, V] without the part of the target; `smoothing` is that of a word."""
    return (logits - largest[:, None]).exp() / total[:, None] - smoothing


def _targets(goal: torch.Tensor, ignored: int, rank: int, width: int) -> tuple[torch.Tensor, ...]:
    """Return the rows that count whose target this rank has, and its columns."""
    column = goal - rank * width
    rows = ((column >= 0) & (column < width) & (goal != ignored)).nonzero()[:, 0]
    return rows, column[rows]


def cross_entropy_forward_to_2_18(
    _input: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: Any,
    ignore_idx: int,
    *,
    release: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss [B, S], or its mean, and the gradient of `_input` [B, S, V].

    Up to 2.11 the mean is over all rows, and then over those whose target is not `ignore_idx`.
    """
    batch, length, width = _input.shape
    if _input.stride(2) != 1 or (release >= (2, 14) and _input.stride(1) != width):
        _input = _input.contiguous()
    if batch > 1 and _input.stride(0) != length * _input.stride(1):
        raise SizeError(
            "parallel_cross_entropy: up to 2.18 its kernels take rows at equal distances, and the "
            f"logits {list(_input.shape)} have strides {list(_input.stride())}. Make them "
            "contiguous"
        )
    made = torch.empty_like(_input, dtype=torch.float32) if release >= (2, 18) else _input.data
    logits, goal = _input.detach().reshape(-1, width).float(), target.reshape(-1)
    rows, ignored = _rows(logits, goal, dist_process_group), goal == ignore_idx
    loss = rows.loss(width, label_smoothing, all_ranks=False).masked_fill(ignored, 0.0)
    counted = (~ignored).sum(0, keepdim=True).clamp(min=1)
    if release < (2, 12):
        counted = torch.tensor(len(goal))
    # Triton rounds a number in a program to the dtype of what it is added to.
    step = torch.tensor(1 - label_smoothing).to(made.dtype).float()
    divisor: torch.Tensor | int = 1
    if reduce_loss or release < (2, 5):
        divisor, step = counted, torch.tensor(1 - label_smoothing) / counted
    grad = _gradient(logits, rows.largest, rows.total, label_smoothing / (width * rows.world))
    flat = made.as_strided((len(goal), width), (made.stride(1), 1))
    flat.copy_((grad / divisor).masked_fill(ignored[:, None], 0.0))
    places = _targets(goal, ignore_idx, rows.rank, width)
    flat[places] = (flat[places].float() - step).to(flat.dtype)
    loss = loss.sum() / counted if reduce_loss else loss.view(batch, length)
    return loss, made if release >= (2, 18) else _input


def cross_entropy_backward_to_2_18(
    grad_input: torch.Tensor,
    grad_output: torch.Tensor,
    is_cg_capturable: bool = False,
    *,
    release: tuple[int, ...],
) -> torch.Tensor:
    """Multiply what the forward pass has returned by the gradient of the loss, in place.

    Up to 2.7 the gradient of the first row counts for all.
    """
    factor = grad_output.detach().reshape(-1)[: 1 if release < (2, 8) else None]
    made = grad_input.data
    made.copy_(made * factor.view(*(made.shape[:2] if len(factor) > 1 else (1, 1)), 1))
    return grad_input


def cross_entropy_forward(
    _input: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: Any,
    ignore_idx: int,
    overwrite_input: bool,
) -> tuple[Any, ...]:
    """Return the loss [B, S], or its mean over what is not ignored, and what backward takes."""
    batch, length, width = _input.shape
    saved = (
        _input if overwrite_input else _input.detach().clone(memory_format=torch.contiguous_format)
    )
    logits, goal = _input.detach().reshape(-1, width).float(), target.reshape(-1)
    rows, ignored = _rows(logits, goal, dist_process_group), goal == ignore_idx
    loss = rows.loss(width, label_smoothing, all_ranks=True).masked_fill(ignored, 0.0)
    counted = (~ignored).sum(0, keepdim=True).clamp(min=1) if reduce_loss else None
    loss = loss.view(batch, length) if counted is None else loss.sum() / counted
    stats = torch.stack([rows.largest, rows.total], -1)
    return loss, saved, stats, target.contiguous(), counted, rows.rank, rows.world


def cross_entropy_backward(
    saved_input: torch.Tensor,
    stats: torch.Tensor,
    target: torch.Tensor,
    n_non_ignore: torch.Tensor | None,
    grad_output: torch.Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    rank: int,
    world_size: int,
    ignore_idx: int,
) -> torch.Tensor:
    """Write the gradient of the logits over `saved_input`, rounded once."""
    width, goal = saved_input.shape[-1], target.reshape(-1)
    logits = saved_input.detach().reshape(-1, width).float()
    largest, total = stats.unbind(-1)
    grad = _gradient(logits, largest, total, label_smoothing / (width * world_size))
    grad[_targets(goal, ignore_idx, rank, width)] -= 1 - label_smoothing
    factor = grad_output.detach().reshape(-1, 1).float()
    if n_non_ignore is not None:
        factor = factor / n_non_ignore
    grad = (grad * factor).masked_fill((goal == ignore_idx)[:, None], 0.0)
    saved_input.data.copy_(grad.view(saved_input.shape))
    return saved_input


def in_triton(release: tuple[int, ...]) -> dict[str, Callable[..., Any]]:
    """Return the functions of the module `triton.cross_entropy` by name."""
    if release >= (2, 19):
        return {
            function.__name__: function
            for function in (cross_entropy_forward, cross_entropy_backward)
        }
    return {
        "cross_entropy_forward": functools.partial(cross_entropy_forward_to_2_18, release=release),
        "cross_entropy_backward": functools.partial(
            cross_entropy_backward_to_2_18, release=release
        ),
    }
