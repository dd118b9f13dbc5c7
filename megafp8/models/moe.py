"""Define the experts of a layer: each is an MLP of two ordinary linears with names of their own.

A token's row is computed by each of its experts, and no expert drops a token. The rows are sorted
by expert, then by token. So recipes, master weights, checkpoints and reports know an expert's
linear by its name, as any other one. An `Exchange` brings rows to experts of other ranks.
"""

# B sequences  S tokens of one  T tokens  K experts of a token  R rows (T x K)  D model width
# N rows of this rank's experts, or of one of them

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megafp8.models.parts import Parts, activation
from megafp8.specs.layer import LayerLinear, Mlp


class MoE(nn.Module):
    """Compute the sum of a token's experts, each times the router's weight, and of a shared MLP.

    As in Megatron-core the weight multiplies what the second linear reads, before its cast to FP8.
    With `weighs_output` it multiplies what this linear returns, as in servers of models.
    """

    weighs_output = False

    def __init__(self, parts: Parts, name: str, experts: Mlp, shared: nn.Module | None) -> None:
        super().__init__()
        self.dtype, self.of_experts = parts.dtype, parts.of_experts
        self.exchange, self.own = parts.exchange, parts.exchange.own(experts.fc1.experts)
        self.places_of = partial(parts.places_of, [*experts.fc1.names, *experts.fc2.names])
        self.router = parts.router(f"{name}.router")
        self.shared = shared
        self.fc1, self.fc2 = (self._each(parts, linear) for linear in experts)
        self.activation = activation(parts.spec.activation)

    def _each(self, parts: Parts, linear: LayerLinear) -> nn.ModuleList:
        """Return a linear of every expert, by its number; what stands for other ranks' is empty."""
        return nn.ModuleList(
            (parts.linear if index in self.own else parts.linear_elsewhere)(linear.one(index))
            for index in range(linear.experts)
        )

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, [B, S, D] -> [B, S, D] in the dtype of the linears."""
        x_BSD = x_BSD.to(self.dtype)
        x_TD = x_BSD.flatten(0, 1)
        logits_TE = self.router(x_TD)
        (experts_TK, weights_TK), counts_E = self.router.route(logits_TE)
        order_R = experts_TK.flatten().sort(stable=True).indices
        place_R = torch.empty_like(order_R)
        place_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        place_TK, token_R = place_R.view_as(experts_TK), order_R // experts_TK.shape[1]
        rows_RD = _ToExperts.apply(x_TD, token_R, place_TK)  # type: ignore[no-untyped-call]
        weights_R1 = _InOrder.apply(weights_TK, order_R, place_TK)[:, None]  # type: ignore[no-untyped-call]
        # What comes between two linears is computed for the rows of all experts at once.
        route = self.exchange.route(counts_E, len(order_R))
        places = self.places_of(token_R, len(x_TD))
        rows_ND, weights_N1, places = route.to_experts(rows_RD, weights_R1, places)
        del rows_RD  # as large as what other ranks have sent
        fc1, fc2 = (list(each)[self.own.start : self.own.stop] for each in (self.fc1, self.fc2))
        inner_NF = self.activation(self.of_experts(fc1, rows_ND, route.sizes, places))
        if not self.weighs_output:
            inner_NF = (inner_NF * weights_N1).to(self.dtype)
        out_ND = self.of_experts(fc2, inner_NF, route.sizes, places)
        if self.weighs_output:
            out_ND = (out_ND * weights_N1).to(self.dtype)
        out_RD = route.to_tokens(out_ND)
        out_TD = _ToTokens.apply(out_RD, token_R, place_TK)  # type: ignore[no-untyped-call]
        out_BSD: torch.Tensor = out_TD.view_as(x_BSD)
        if self.shared is not None:
            out_BSD = out_BSD + self.shared(x_BSD)
        return self.router.add_losses(logits_TE, out_BSD)


def _sum_of_tokens(rows_RD: torch.Tensor, place_TK: torch.Tensor) -> torch.Tensor:
    """Return the sums of each token's rows, added in the order of experts and rounded once."""
    if rows_RD.dtype == torch.float32:  # on CPUs a bag takes a quarter of the time of K gathers
        return F.embedding_bag(place_TK, rows_RD, mode="sum")
    # A bag rounds sums of BF16 rows in another way, and rows widened before it would be K times as
    # large as the sums.
    first, *others = place_TK.t().contiguous().unbind()
    total_TD = rows_RD.index_select(0, first)  # sooner on CPUs than the same by brackets
    total_TD = total_TD.to(torch.promote_types(rows_RD.dtype, torch.float32))
    for place_T in others:
        total_TD += rows_RD.index_select(0, place_T)
    return total_TD.to(rows_RD.dtype)


# The three functions below have backward passes of their own since autograd's would add up rows in
# BF16, and on a GPU in any order.


class _ToExperts(torch.autograd.Function):
    """Copy tokens to rows in the order of experts."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, token_R: torch.Tensor, place_TK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(place_TK)
        return x_TD.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _sum_of_tokens(grads[0], *ctx.saved_tensors), None, None


class _ToTokens(torch.autograd.Function):
    """Add up the rows of each token."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: torch.Tensor, token_R: torch.Tensor, place_TK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(token_R)
        return _sum_of_tokens(rows_RD, place_TK)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


class _InOrder(torch.autograd.Function):
    """Put the weights of all choices into the order of experts."""

    @staticmethod
    def forward(
        ctx: Any, weights_TK: torch.Tensor, order_R: torch.Tensor, place_TK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(place_TK)
        return weights_TK.flatten()[order_R]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place_TK,) = ctx.saved_tensors
        return grads[0][place_TK], None, None
