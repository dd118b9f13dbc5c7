"""Route tokens to experts: scores, the choice of experts, the router's losses, the experts' biases.

Scores, weights and losses are in FP32, or FP64 in an FP64 run: rounded logits would often be equal.
Of equal scores the lower expert wins, on every device: `torch.max` along a dim returns the first
maximum, while `torch.topk` promises no order. A NaN among a token's logits makes its weights NaN,
and so the loss.
"""

# B sequences  S tokens of one  T tokens (B x S)  E experts  K experts of a token  D model width

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fp8_numerics.philox import Rows
from megafp8.models.added_loss import AddedLoss, AddedLosses
from megafp8.specs.moe import MoESpec

EPSILON = 1e-20  # Megatron-core's: sums of sigmoids are divided by the sum plus this
Z_LOSS = "z_loss"


class Choice(NamedTuple):
    """Hold the experts of each token, in ascending order, and the weights of their outputs."""

    experts: torch.Tensor  # [T, K] int64
    weights: torch.Tensor  # [T, K]


def choose(logits_TE: torch.Tensor, moe: MoESpec, bias_E: torch.Tensor | None = None) -> Choice:
    """Choose the experts of each token by Megatron-core's rules; `bias_E` only helps to choose."""
    is_sigmoid, scores_TE = moe.score_function == "sigmoid", logits_TE
    if is_sigmoid:
        scores_TE = logits_TE.sigmoid()
    elif moe.pre_softmax:
        scores_TE = logits_TE.softmax(-1)
    ranked_TE = scores_TE.detach()
    experts_TK = best(ranked_TE if bias_E is None else ranked_TE + bias_E, moe.top_k)
    weights_TK = scores_TE.gather(1, experts_TK)
    if not (is_sigmoid or moe.pre_softmax):
        weights_TK = weights_TK.softmax(-1)
    elif is_sigmoid and moe.top_k > 1:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + EPSILON)
    if moe.scaling_factor != 1.0:
        weights_TK = weights_TK * moe.scaling_factor
    return Choice(experts_TK, weights_TK)


def best(scores_TE: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` experts of the highest scores of each token, in ascending order.

    Of equal scores the lower expert is taken; a NaN counts as the highest.
    """
    # Each is the first maximum of those that are left, which takes less than a stable sort. A
    # score of minus infinity is above one that was taken.
    left_TE, best_T1 = scores_TE.clamp(min=torch.finfo(scores_TE.dtype).min), []
    for _ in range(count):
        best_T1.append(left_TE.max(-1, keepdim=True).indices)
        left_TE.scatter_(1, best_T1[-1], -torch.inf)
    return torch.cat(best_T1, 1).sort(dim=-1).values


@dataclass(frozen=True)
class Sharing:
    """Tell of the `size` ranks that have equally many tokens of the same sequences each.

    `sum` returns the sum of a tensor over them, in its place.
    """

    size: int = 1
    sum: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


ALONE = Sharing()


def balance_loss(
    logits_TE: torch.Tensor, moe: MoESpec, num_sequences: int = 1, sharing: Sharing = ALONE
) -> torch.Tensor:
    """Return Megatron-core's auxiliary loss without its coefficient, 0-d; it is 1 in balance.

    With `num_sequences` above 1 it is the mean of the losses of so many sequences. The experts are
    those of the highest scores, whatever the biases have chosen, and counts have no gradient. The
    counts are those of all tokens that ranks share, and the scores this rank's own: the losses of
    the ranks add up to that of all their tokens.
    """
    if moe.score_function == "sigmoid":
        scores_TE = logits_TE.sigmoid()
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + EPSILON)
    else:
        scores_TE = logits_TE.softmax(-1)
    scores_BSE = scores_TE.unflatten(0, (num_sequences, -1))
    experts_TK = best(scores_TE.detach(), moe.top_k)
    counts = (counts_of(part, moe.num_experts) for part in experts_TK.chunk(num_sequences))
    counts_BE = sharing.sum(torch.stack(tuple(counts))).to(scores_TE.dtype)
    size = scores_BSE.shape[1] * sharing.size
    factor = moe.num_experts / (moe.top_k * size * size * num_sequences)
    loss: torch.Tensor = factor * (counts_BE * scores_BSE.sum(1)).sum()
    return loss


def z_loss(logits_TE: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squared logsumexp of each token's logits, 0-d (arXiv 2202.08906)."""
    return logits_TE.logsumexp(-1).square().mean()


def counts_of(experts_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how many tokens each expert has, int64 [E].

    On a GPU `torch.bincount` would wait twice, for the least and the largest number. Whole numbers
    are added up here, whose sums are the same in any order.
    """
    chosen = experts_TK.flatten()
    ones = chosen.new_ones(()).expand_as(chosen)
    return chosen.new_zeros(num_experts).scatter_add_(0, chosen, ones)


def router_losses(moe: MoESpec) -> Iterable[AddedLoss]:
    """Return the terms that the routers of a model add to its loss."""
    layers, has_balance = sum(moe.layers), moe.router_loss != "none"
    weights = {moe.router_loss: moe.router_loss_coeff * has_balance, Z_LOSS: moe.z_loss_coeff}
    return [AddedLoss(name, weight, layers) for name, weight in weights.items() if weight * layers]


@dataclass(frozen=True)
class Route:
    """Say how many rows each of this rank's experts gets in a pass, and bring them there.

    This one is a rank that has all experts: rows stay where they are.
    """

    sizes: list[int]

    def to_experts(
        self, rows_RD: torch.Tensor, weights_R1: torch.Tensor, places: Rows | None
    ) -> tuple[torch.Tensor, torch.Tensor, Rows | None]:
        """Return the rows of this rank's experts, by expert, with their weights and places."""
        return rows_RD, weights_R1, places

    def to_tokens(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """Return rows where they came from, in the order in which `to_experts` was given them."""
        return rows_ND


class Exchange:
    """Say which experts this rank has: all of them, if no others divide these with it."""

    def own(self, num_experts: int) -> range:
        """Return the experts of this rank."""
        return range(num_experts)

    def route(self, counts_E: torch.Tensor, num_rows: int) -> Route:
        """Return what brings this rank's `num_rows` rows, of each expert `counts_E`, to experts."""
        return Route(sizes_of(counts_E, num_rows))


def sizes_of(counts_E: torch.Tensor, num_rows: int) -> list[int]:
    """Return the rows of each expert; without values, on meta, as many for each as can be.

    Any next ones then have their share within one row, as ranks have that divide the experts.
    """
    if counts_E.is_meta:
        ends = [index * num_rows // len(counts_E) for index in range(len(counts_E) + 1)]
        return [end - start for start, end in pairwise(ends)]
    return counts_E.tolist()


class Router(nn.Module):
    """Choose the experts of each token, and let `added` take the losses of a choice.

    `counts` [E] int64 has the tokens of each expert in the present step: those of training alone,
    once if layers are recomputed. At its end a step puts those of all ranks there. `bias` [E] FP32
    is None for a router without one.
    """

    bias: torch.Tensor | None
    counts: torch.Tensor

    def __init__(
        self,
        name: str,
        weight_ED: nn.Parameter,
        moe: MoESpec,
        added: AddedLosses,
        count_flops: Callable[[int], object],
        sharing: Sharing = ALONE,
    ) -> None:
        super().__init__()
        self.sharing = sharing
        self.name, self.moe, self.added, self.count_flops = name, moe, added, count_flops
        self.layer = int(name.split(".")[1])
        self.weight = weight_ED
        experts = moe.num_experts
        self.register_buffer("bias", torch.zeros(experts) if moe.has_expert_bias else None)
        self.register_buffer("counts", torch.zeros(experts, dtype=torch.int64), persistent=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token: [T, D] -> [T, E] in FP32 or FP64."""
        flops = 2 * x_TD.shape[0] * self.weight.numel()
        self.count_flops(flops)
        logits_TE = F.linear(x_TD.to(self.weight.dtype), self.weight)
        if logits_TE.requires_grad:
            logits_TE.register_hook(lambda grad: self.count_flops(2 * flops))
        return logits_TE

    def route(self, logits_TE: torch.Tensor) -> tuple[Choice, torch.Tensor]:
        """Return the choice of the tokens with these logits, and the tokens of each expert [E]."""
        choice = choose(logits_TE, self.moe, self.bias)
        counts_E = counts_of(choice.experts, self.moe.num_experts)
        if self.added.is_recording:
            self.counts += counts_E
        return choice, counts_E

    def add_losses(self, logits_TE: torch.Tensor, out_BSD: torch.Tensor) -> torch.Tensor:
        """Add this layer's terms to the loss; return `out_BSD`, the layer's output, with them.

        A term is a mean over all tokens of the microbatch, and weighs as its counted tokens do. The
        data does not say which tokens are padding.
        """
        for term in self.added.terms if torch.is_grad_enabled() else ():
            if term.name == Z_LOSS:
                value = z_loss(logits_TE) / self.sharing.size
            else:
                sequences = out_BSD.shape[0] if term.name == "seq_aux_loss" else 1
                value = balance_loss(logits_TE, self.moe, sequences, self.sharing)
            out_BSD = self.added.add_mean(term.name, out_BSD, value)
        return out_BSD

    def begin_step(self) -> None:
        """Begin to count the tokens of a step."""
        self.counts.zero_()

    def move_bias(self) -> None:
        """Move the bias of each expert by the tokens of a step (arXiv 2408.15664): up if too few.

        The counts are whole numbers, so that a step of any size moves it by the exact sign.
        """
        if self.bias is not None:
            sign_E = (self.counts.sum() - self.counts * self.moe.num_experts).sign()
            self.bias.add_(sign_E, alpha=self.moe.bias_update_rate)
