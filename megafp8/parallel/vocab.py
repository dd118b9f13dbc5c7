"""Shard the vocabulary over tensor-parallel ranks: embedding rows, output logits, cross entropy.

No rank ever has all logits of a token. The ranks exchange each token's largest logit, the sum of
the exponentials and the target's logit (Megatron-LM, arXiv 1909.08053, section 3).
"""

# B batch  S sequence  D model width  T tokens (batch x sequence)  C tokens of one chunk
# V vocabulary rows of this rank

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8_numerics.kernels.triton_launch import runs_triton
from megafp8.fp8.grad_sink import GradSink
from megafp8.models.loss import AddGradWeight, HeadLoss, Matmul
from megafp8.parallel.collectives import Axis
from megafp8.parallel.sequence import gather_sequence, scatter_sum, whole_sequence
from megafp8.specs.data import IGNORE


def vocab_parallel_look_up(
    tokens_BS: torch.Tensor,
    weight_VD: nn.Parameter,
    sink: GradSink,
    tp: Axis,
    *,
    scatter: bool = False,
) -> torch.Tensor:
    """Return the embeddings of tokens of the whole vocabulary: [B, S] int64 -> [B, S, D].

    The result is the same on every rank; with `scatter` each rank gets its part [B, S/tp, D] of the
    sequence.
    """
    rows_BSD: torch.Tensor = _VocabParallelLookUp.apply(  # type: ignore[no-untyped-call]
        tokens_BS, weight_VD, sink, tp, scatter
    )
    return rows_BSD


class _VocabParallelLookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens_BS: torch.Tensor,
        weight_VD: nn.Parameter,
        sink: GradSink,
        tp: Axis,
        scatter: bool,
    ) -> torch.Tensor:
        local_BS, is_here_BS = local_rows(tokens_BS, weight_VD.shape[0], tp)
        ctx.save_for_backward(local_BS, is_here_BS)
        ctx.weight, ctx.sink, ctx.gathered_over = weight_VD, sink, tp if scatter else None
        rows_BSD = nn.functional.embedding(local_BS, weight_VD)
        rows_BSD.masked_fill_(~is_here_BS[..., None], 0.0)
        # Exactly one rank has the row of a token and the others have zeros: the sum is that row.
        if scatter:
            return scatter_sum(rows_BSD, tp)
        return tp.all_reduce_sum(rows_BSD)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (local_BS, is_here_BS), (grad_BSD,) = ctx.saved_tensors, grads
        if ctx.gathered_over is not None:
            grad_BSD = gather_sequence(grad_BSD, ctx.gathered_over)
        # Tokens of other ranks add 0 to an arbitrary row, so no count is read from the device.
        own_BSD = grad_BSD.masked_fill(~is_here_BS[..., None], 0.0)
        grad = ctx.sink.add_rows(ctx.weight, local_BS.flatten(), own_BSD.flatten(0, 1))
        return None, grad, None, None, None


def local_rows(ids: torch.Tensor, share: int, tp: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (this rank's row of each vocabulary index, whether the index is on this rank).

    The row is arbitrary where the index is on another rank.
    """
    local = ids - tp.rank * share
    is_here = (local >= 0) & (local < share)
    return local.clamp(0, share - 1), is_here


def loss_by_triton(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    *,
    tp: Axis,
    with_grad: bool,
    grad_scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return a chunk's summed loss, FP32, and the gradient of this rank's logits, by one kernel.

    The gradient overwrites the logits. Over several ranks there are two launches, and messages in
    between. The result is None where Triton does not run, or for FP64.
    """
    if not runs_triton(logits_CV.device) or logits_CV.dtype == torch.float64:
        return None
    from megafp8.fp8.kernels.triton_loss import TokenSums, to_gradient, token_sums

    is_ignored_C = targets_C == IGNORE
    if tp.size == 1 and with_grad:
        sums = to_gradient(logits_CV, targets_C, IGNORE, grad_scale=grad_scale)
    else:
        elsewhere = torch.iinfo(torch.int64).min  # no column, and no other target's distance
        own_C = (targets_C - tp.rank * logits_CV.shape[1]).masked_fill(is_ignored_C, elsewhere)
        sums = token_sums(logits_CV, own_C)
        if tp.size > 1:
            # Each rank's exponentials are relative to its own largest logit, so that the largest
            # of all ranks must be known before they can be added.
            largest_C = tp.all_reduce_max(sums.largest.clone())
            own_part_C = (sums.largest - largest_C).exp_().mul_(sums.exponentials)
            both_2C = tp.all_reduce_sum(torch.stack((own_part_C, sums.target)))
            sums = TokenSums(largest_C, *both_2C.unbind())
        if with_grad:
            to_gradient(logits_CV, own_C, elsewhere, sums=sums, grad_scale=grad_scale)
    loss_C = sums.exponentials.log() + sums.largest - sums.target
    loss = loss_C.masked_fill(is_ignored_C, 0.0).sum()
    return loss, logits_CV if with_grad else None


class VocabParallelHeadLoss(HeadLoss):
    """Compute the head's loss over a sharded vocabulary; the loss is the same on all ranks.

    Every rank has all tokens and a part of the vocabulary. `gather` says that hidden states come as
    each rank's part of the sequence.
    """

    def __init__(
        self, tp: Axis, matmul: Matmul, add_grad_weight: AddGradWeight, *, gather: bool = False
    ) -> None:
        super().__init__(matmul, add_grad_weight)
        self.tp, self.gather = tp, gather

    def forward(
        self, hidden_BSD: torch.Tensor, weight_VD: nn.Parameter, targets_BS: torch.Tensor
    ) -> torch.Tensor:
        if self.gather:
            hidden_BSD = whole_sequence(hidden_BSD, self.tp)
        return super().forward(hidden_BSD, weight_VD, targets_BS)

    def loss_of_chunk(
        self, logits_CV: torch.Tensor, targets_C: torch.Tensor, with_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = loss_by_triton(
            logits_CV, targets_C, tp=self.tp, with_grad=with_grad, grad_scale=self.grad_scale
        )
        if found is not None:
            return found
        # Exponentials of a whole vocabulary are added up, in FP32 at least.
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        # A NaN must survive the maximum: the sum of exponentials is then NaN.
        largest_C = logits_CV.amax(dim=-1).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        shifted_CV = logits_CV - self.tp.all_reduce_max(largest_C)[:, None]
        local_C, is_here_C = local_rows(targets_C, logits_CV.shape[1], self.tp)
        target_C = shifted_CV.gather(1, local_C[:, None])[:, 0].masked_fill(~is_here_C, 0.0)
        exponentials_CV = shifted_CV.exp_()
        sums_2C = self.tp.all_reduce_sum(torch.stack((exponentials_CV.sum(dim=-1), target_C)))
        is_ignored_C = targets_C == IGNORE
        loss = (sums_2C[0].log() - sums_2C[1]).masked_fill(is_ignored_C, 0.0).sum()
        if not with_grad:
            return loss, None
        grad_CV = exponentials_CV.div_(sums_2C[0][:, None])  # softmax
        grad_CV.scatter_add_(1, local_C[:, None], -is_here_C[:, None].to(grad_CV.dtype))
        return loss, self._scaled(grad_CV.masked_fill_(is_ignored_C[:, None], 0.0))

    def sum_grad_hidden(self, grad_hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return the hidden states' gradient summed over ranks; with `gather` this rank's tokens
        of it.
        """
        # Each rank's product has the columns of its part of the vocabulary alone.
        return self.tp.all_reduce_sum(grad_hidden_TD)

    def logits(self, hidden_BSD: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        if self.gather:
            hidden_BSD = gather_sequence(hidden_BSD, self.tp)
        return torch.cat(self.tp.all_gather(super().logits(hidden_BSD, weight_VD)), dim=-1)
