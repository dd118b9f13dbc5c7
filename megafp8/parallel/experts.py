"""Divide the experts of a layer over ranks (expert parallelism): rows travel to them and back.

A rank sorts its rows by expert, then by token, and sends each expert's to the rank that has it.
There they are in the order of (expert, rank, token): where ranks have consecutive tokens, that is
the order of one process. Back they come in the order in which they were sent. The numbers of rows
differ from rank to rank and may be 0; every rank takes part in every exchange all the same.
"""

# R rows of this rank's tokens  N rows of its experts  D model width  E experts  L of one rank
# S ranks that send

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fp8_numerics.philox import Rows
from megafp8.models.router import Exchange, Route, sizes_of
from megafp8.parallel.collectives import Axis


@dataclass(frozen=True)
class AllToAll(Exchange):
    """Exchange rows with the ranks of `ep`, of which each has the next share of the experts."""

    ep: Axis

    def own(self, num_experts: int) -> range:
        share = num_experts // self.ep.size
        return range(self.ep.rank * share, (self.ep.rank + 1) * share)

    def route(self, counts_E: torch.Tensor, num_rows: int) -> Route:
        """Tell all ranks how many rows this one has for each expert; return what is exchanged."""
        size, device = self.ep.size, counts_E.device
        if counts_E.is_meta:  # without values every rank has as many rows for each as can be
            counts_E = torch.tensor(sizes_of(counts_E, num_rows), device="cpu")
            of_ranks_SE = counts_E.expand(size, -1)
        else:
            of_ranks_SE = self.ep.gather_rows(counts_E[None])
        own_SL = of_ranks_SE.unflatten(1, (size, -1))[:, self.ep.rank]
        sums = (counts_E.unflatten(0, (size, -1)).sum(1), own_SL.sum(1), own_SL.sum(0))
        numbers: list[int] = torch.cat(sums).tolist()
        sent, received, sizes = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
        expert_L = torch.arange(own_SL.shape[1], device=device)
        expert_N = expert_L.repeat(size).repeat_interleave(
            own_SL.flatten().to(device), output_size=sum(received)
        )
        order_N = expert_N.sort(stable=True).indices
        return _BetweenRanks(sizes, _Paths(self.ep, sent, received), order_N)


@dataclass(frozen=True)
class _Paths:
    """Say how many rows this rank sends to each rank of `ep`, and receives from each."""

    ep: Axis
    sent: list[int]
    received: list[int]

    def there(self, x: torch.Tensor, order_N: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's experts, by expert: [R, ...] -> [N, ...]."""
        return self.ep.exchange_rows(x, self.sent, self.received)[order_N]

    def back(self, x: torch.Tensor, order_N: torch.Tensor) -> torch.Tensor:
        """Return what has become of this rank's rows, in their order: [N, ...] -> [R, ...]."""
        as_received = torch.empty_like(x)
        as_received[order_N] = x
        return self.ep.exchange_rows(as_received, self.received, self.sent)


@dataclass(frozen=True)
class _BetweenRanks(Route):
    """Send rows along `paths`, and put what other ranks send into `order`."""

    paths: _Paths
    order: torch.Tensor  # [N]

    def to_experts(
        self, rows_RD: torch.Tensor, weights_R1: torch.Tensor, places: Rows | None
    ) -> tuple[torch.Tensor, torch.Tensor, Rows | None]:
        """Send rows and weights, each in its dtype, and the places for random draws if any."""
        how = self.order, self.paths
        rows_ND, weights_N1 = _Dispatch.apply(rows_RD, weights_R1, *how)  # type: ignore[no-untyped-call]
        if places is not None:
            places = Rows(*self.paths.there(torch.stack(places, 1), self.order).unbind(1))
        return rows_ND, weights_N1, places

    def to_tokens(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """Send the experts' rows back: [N, D] -> [R, D]."""
        rows_RD: torch.Tensor = _Combine.apply(rows_ND, self.order, self.paths)  # type: ignore[no-untyped-call]
        return rows_RD


# Both save the order as autograd saves tensors: where layers are recomputed, none stays meanwhile.


class _Dispatch(torch.autograd.Function):
    """Send rows and weights together, so that their gradients come back in one order."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: torch.Tensor,
        weights_R1: torch.Tensor,
        order_N: torch.Tensor,
        paths: _Paths,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(order_N)
        ctx.paths = paths
        return paths.there(rows_RD, order_N), paths.there(weights_R1, order_N)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order_N,) = ctx.saved_tensors
        return ctx.paths.back(grads[0], order_N), ctx.paths.back(grads[1], order_N), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_ND: torch.Tensor, order_N: torch.Tensor, paths: _Paths
    ) -> torch.Tensor:
        ctx.save_for_backward(order_N)
        ctx.paths = paths
        return paths.back(rows_ND, order_N)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order_N,) = ctx.saved_tensors
        return ctx.paths.there(grads[0], order_N), None, None
