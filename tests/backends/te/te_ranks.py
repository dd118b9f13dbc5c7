"""What crosses tensor-parallel ranks around a linear of the stand-in for Transformer Engine, and a
run over such ranks. Only `torch.distributed`'s plainest operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """A group; whether its ranks share out the first dim between linears."""

    group: Any
    splits_sequence: bool


def into_columns(x: torch.Tensor, ranks: Ranks | None) -> torch.Tensor:
    """The input that every rank multiplies with its columns."""
    if ranks is None:
        return x
    made: torch.Tensor = (Gather if ranks.splits_sequence else Copy).apply(x, ranks.group)
    return made


def out_of_rows(x: torch.Tensor, ranks: Ranks | None) -> torch.Tensor:
    """The sum of what every rank has made of its rows."""
    if ranks is None:
        return x
    made: torch.Tensor = (Scatter if ranks.splits_sequence else Sum).apply(x, ranks.group)
    return made


def total(x: torch.Tensor, group: Any) -> torch.Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def whole(x: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def part(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return total(grads[0], ctx.group), None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return total(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return grads[0], None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return whole(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return part(total(grads[0], ctx.group), ctx.group), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return part(total(x, group), group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return whole(grads[0], ctx.group), None
