"""Compute the output head and the cross entropy together, without keeping all logits.

Tokens are worked on a chunk at a time. For each chunk the forward pass also computes the gradients
of its inputs, because they need the chunk's logits, which are freed afterwards. The backward pass
only scales these gradients.
"""

# B batch  S sequence  T tokens (B x S)  C tokens of one chunk  D model width  V vocabulary

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from fp8_numerics import addmm, bf16
from fp8_numerics.meta import device_kind
from megafp8.ops import torch_private
from megafp8.specs.data import IGNORE
from megafp8.specs.model import head_chunk

# (weight, its FP32 gradient) -> the gradient that autograd adds to `.grad`, or None
AddGradWeight = Callable[[nn.Parameter, torch.Tensor], torch.Tensor | None]


@functools.cache
def gradient_of_itself(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the gradient of a loss by itself, the number 1; it is always the same tensor.

    A backward pass that begins with this tensor is known to begin with 1, without reading it.
    """
    return torch.ones((), dtype=dtype, device=device)


def backward_of_loss(loss: torch.Tensor) -> None:
    """Run the backward pass of the loss that `HeadLoss` has returned."""
    # On a CPU the factor is read, and torch would import sympy to check a gradient that is given.
    is_read = loss.device.type == "cpu"
    loss.backward(None if is_read else gradient_of_itself(loss.dtype, loss.device))


def beginning_of_backward(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss for code of others that begins the backward pass there, with 1.

    It passes `gradient_of_itself` on, whatever tensor that code has made. On a CPU, where the
    factor is read, the result is the argument.
    """
    if loss.device.type == "cpu":
        return loss
    begun: torch.Tensor = _Beginning.apply(loss)  # type: ignore[no-untyped-call]
    return begun


class _Beginning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return gradient_of_itself(grads[0].dtype, grads[0].device)


class Matmul(Protocol):
    """Multiply two matrices of the head; `place` names the product for the FLOP counter."""

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        place: str,
        transpose_a: bool = False,
        transpose_b: bool = False,
        total: torch.Tensor | None = None,
        is_first: bool = False,
    ) -> torch.Tensor:
        """Return a @ b, each transposed first if `transpose_a` or `transpose_b` says so.

        With `total`, the result is meant for this FP32 sum: it is FP32 where the device has such a
        product, and `total` itself if the product was added to it or (`is_first`) overwrote it.
        """


def plain_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    place: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    total: torch.Tensor | None = None,
    is_first: bool = False,
) -> torch.Tensor:
    """Return a @ b by torch's own matmul, without counting FLOPs; see `Matmul`."""
    a, b = a.t() if transpose_a else a, b.t() if transpose_b else b
    product = None if total is None else addmm.mm_into(total, a, b, is_first=is_first)
    return bf16.mm(a, b) if product is None else product


def through_autograd(weight: nn.Parameter, grad: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient in the weight's dtype, for autograd to add to `weight.grad`."""
    return grad.to(weight.dtype)


class ChunkLoss(Protocol):
    """Compute the loss of a chunk of tokens by kernels of a device."""

    def __call__(
        self,
        logits_CV: torch.Tensor,
        targets_C: torch.Tensor,
        *,
        with_grad: bool,
        grad_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return what `HeadLoss.loss_of_chunk` returns, or None where no such kernel runs."""


class HeadLoss(nn.Module):
    """Sum the cross entropy over counted targets; the head's weight is an argument."""

    def __init__(
        self,
        matmul: Matmul = plain_matmul,
        add_grad_weight: AddGradWeight = through_autograd,
        chunk_loss: ChunkLoss | None = None,
    ) -> None:
        super().__init__()
        self.matmul, self.add_grad_weight = matmul, add_grad_weight
        self.chunk_loss = chunk_loss
        self.grad_scale = 1.0  # multiplies all gradients but not the loss: FP16 loss scaling

    def forward(
        self, hidden_BSD: torch.Tensor, weight_VD: nn.Parameter, targets_BS: torch.Tensor
    ) -> torch.Tensor:
        """Return the cross entropy summed over all targets that are not IGNORE, in nats.

        The result is an FP32 scalar, or FP64 if the model is FP64.
        """
        loss: torch.Tensor = _ChunkedCrossEntropy.apply(
            hidden_BSD.flatten(0, 1),
            weight_VD,
            targets_BS.flatten(),
            self,
            torch.is_grad_enabled(),  # read here: it is always False inside an autograd function
        )
        return loss

    def logits(self, hidden_BSD: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        flat = self.matmul(hidden_BSD.flatten(0, 1), weight_VD, place="head", transpose_b=True)
        return flat.to(_sum_dtype(flat)).view(*hidden_BSD.shape[:2], -1)

    def loss_of_chunk(
        self, logits_CV: torch.Tensor, targets_C: torch.Tensor, with_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the chunk's summed loss and, if `with_grad`, the logits' gradient, else None.

        The gradient is multiplied by `grad_scale`; it may overwrite the logits.
        """
        if self.chunk_loss is not None:
            found = self.chunk_loss(
                logits_CV, targets_C, with_grad=with_grad, grad_scale=self.grad_scale
            )
            if found is not None:
                return found
        log_probs_CV = F.log_softmax(logits_CV, dim=-1, dtype=_sum_dtype(logits_CV))
        loss = F.nll_loss(log_probs_CV, targets_C, ignore_index=IGNORE, reduction="sum")
        return loss, self._scaled(_grad_logits(log_probs_CV, targets_C)) if with_grad else None

    def _scaled(self, grad_CV: torch.Tensor) -> torch.Tensor:
        return grad_CV if self.grad_scale == 1.0 else grad_CV.mul_(self.grad_scale)

    def sum_grad_hidden(self, grad_hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return the hidden states' gradient summed over the ranks that share the vocabulary.

        There are none here; `VocabParallelHeadLoss` overrides this method.
        """
        return grad_hidden_TD


class _ChunkedCrossEntropy(torch_private.DirectFunction):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: nn.Parameter,
        targets_T: torch.Tensor,
        head: HeadLoss,
        is_grad_enabled: bool,
    ) -> torch.Tensor:
        with_grads = is_grad_enabled and any(ctx.needs_input_grad)
        num_tokens, vocab = hidden_TD.shape[0], weight_VD.shape[0]
        # Logits of one chunk at a time: those of a whole microbatch would be the largest tensor.
        chunk = head_chunk(vocab, on_gpu=device_kind(hidden_TD.device) != "cpu")
        work = _sum_dtype(hidden_TD)
        loss = torch.zeros((), dtype=work, device=hidden_TD.device)
        grad_hidden_TD = torch.empty_like(hidden_TD) if with_grads else None
        # The first chunk's product overwrites the total; without tokens nothing would write it.
        make_total = torch.empty_like if num_tokens > 0 else torch.zeros_like
        grad_weight_VD = make_total(weight_VD, dtype=work) if with_grads else None
        for begin in range(0, num_tokens, chunk):
            rows = slice(begin, begin + chunk)
            hidden_CD, targets_C = hidden_TD[rows], targets_T[rows]
            logits_CV = head.matmul(hidden_CD, weight_VD, place="head", transpose_b=True)
            chunk_loss, grad_CV = head.loss_of_chunk(
                logits_CV, targets_C, grad_hidden_TD is not None
            )
            loss += chunk_loss
            if grad_hidden_TD is None or grad_weight_VD is None or grad_CV is None:
                continue
            grad_CV = grad_CV.to(hidden_TD.dtype)  # the products below take operands of one dtype
            grad_hidden_TD[rows] = head.matmul(grad_CV, weight_VD, place="head grad_input")
            part_VD = head.matmul(
                grad_CV,
                hidden_CD,
                place="head grad_weight",
                transpose_a=True,
                total=grad_weight_VD,
                is_first=begin == 0,
            )
            if part_VD is not grad_weight_VD and begin == 0:
                grad_weight_VD.copy_(part_VD)
            elif part_VD is not grad_weight_VD:
                grad_weight_VD += part_VD
        if grad_hidden_TD is not None:
            grad_hidden_TD = head.sum_grad_hidden(grad_hidden_TD)
            ctx.save_for_backward(grad_hidden_TD, grad_weight_VD)
            ctx.weight, ctx.head = weight_VD, head
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_loss,) = grads
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        if not _is_one(grad_loss):
            grad_hidden_TD = grad_hidden_TD * grad_loss.to(grad_hidden_TD.dtype)
            grad_weight_VD = grad_weight_VD * grad_loss
        grad_weight = ctx.head.add_grad_weight(ctx.weight, grad_weight_VD)
        return grad_hidden_TD, grad_weight, None, None, None


def _is_one(grad_loss: torch.Tensor) -> bool:
    """Whether a loss is not scaled, as far as the host knows without waiting for a GPU."""
    if grad_loss.device.type == "cpu":
        return grad_loss.item() == 1.0
    return grad_loss is gradient_of_itself(grad_loss.dtype, grad_loss.device)


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which sums are kept: FP32, or FP64 for an FP64 model."""
    return torch.promote_types(x.dtype, torch.float32)


def _grad_logits(log_probs_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    """Return softmax - one_hot(target), and 0 for ignored targets; overwrite `log_probs_CV`."""
    grad_CV = log_probs_CV.exp_()
    index_C1 = targets_C.clamp(min=0)[:, None]
    grad_CV.scatter_add_(1, index_C1, grad_CV.new_full(index_C1.shape, -1.0))
    ignored_C = targets_C == IGNORE
    if grad_CV.device.type != "cpu" or ignored_C.any():
        grad_CV.masked_fill_(ignored_C[:, None], 0.0)
    return grad_CV
