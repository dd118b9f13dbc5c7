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
from megafp8.models.router import Exchange, Route
from megafp8.parallel.collectives import Axis


@dataclass(frozen=True)
class AllToAll(Exchange):
    """Exchanges rows with the ranks of `ep`, of which each has the next share of the experts."""

    ep: Axis

    def own(self, num_experts: int) -> range:
        """Return the experts of this rank."""
        share = num_experts // self.ep.size
        return range(self.ep.rank * share, (self.ep.rank + 1) * share)

    def route(self, counts_E: torch.Tensor, num_rows: int) -> Route:
        """Tell all ranks how many rows this one has for each expert; return what is exchanged."""
        size = self.ep.size
        of_ranks_SE = self.ep.gather_rows(counts_E[None])
        own_SL = of_ranks_SE.unflatten(1, (size, -1))[:, self.ep.rank]
        sums = (counts_E.unflatten(0, (size, -1)).sum(1), own_SL.sum(1), own_SL.sum(0))
        numbers: list[int] = torch.cat(sums).tolist()
        expert_L = torch.arange(own_SL.shape[1], device=counts_E.device)
        expert_N = expert_L.repeat(size).repeat_interleave(own_SL.flatten())
        order_N = expert_N.sort(stable=True).indices
        sent, received, sizes = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
        return _BetweenRanks(sizes, self.ep, sent, received, order_N)


@dataclass(frozen=True)
class _BetweenRanks(Route):
    """Sends `sent` rows to the ranks of `ep` in turn, and puts what they send into `order`."""

    ep: Axis
    sent: list[int]
    received: list[int]
    order: torch.Tensor  # [N]

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's experts, by expert: [R, ...] -> [N, ...]."""
        return self.ep.exchange_rows(x, self.sent, self.received)[self.order]

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """Return what has become of this rank's rows, in their order: [N, ...] -> [R, ...]."""
        as_received = torch.empty_like(x)
        as_received[self.order] = x
        return self.ep.exchange_rows(as_received, self.received, self.sent)

    def to_experts(
        self, rows_RD: torch.Tensor, weights_R1: torch.Tensor, places: Rows | None
    ) -> tuple[torch.Tensor, torch.Tensor, Rows | None]:
        """Send rows and weights, each in its dtype, and the places for random draws if any."""
        rows_ND, weights_N1 = _Dispatch.apply(rows_RD, weights_R1, self)  # type: ignore[no-untyped-call]
        if places is not None:
            places = Rows(*self.there(torch.stack(places, 1)).unbind(1))
        return rows_ND, weights_N1, places

    def to_tokens(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """Send the experts' rows back: [N, D] -> [R, D]."""
        rows_RD: torch.Tensor = _Combine.apply(rows_ND, self)  # type: ignore[no-untyped-call]
        return rows_RD


class _Dispatch(torch.autograd.Function):
    """Sends rows and weights together, so that their gradients come back in one order."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: torch.Tensor, weights_R1: torch.Tensor, route: _BetweenRanks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.route = route
        return route.there(rows_RD), route.there(weights_R1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.route.back(grads[0]), ctx.route.back(grads[1]), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: torch.Tensor, route: _BetweenRanks) -> torch.Tensor:
        ctx.route = route
        return route.back(rows_ND)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.route.there(grads[0]), None
