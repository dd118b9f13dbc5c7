"""Let layers add terms to the loss, such as the losses of a router, without a message of their own.

A layer gives a value for each of its tokens. The loss of a step is a sum over counted tokens that
is divided once, and a term joins it as its weight times the values of the same tokens. So a term
does not depend on the division into microbatches and replicas, and its gradient begins in its
layer, on whatever pipeline stage that is.
"""

# B batch  S sequence: this rank's tokens, as the residual stream has them

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class AddedLoss:
    """Describe a term: `weight` times the mean of its values over counted tokens, in each layer.

    The log has under `name` the mean over its `num_layers` layers, without the weight.
    """

    name: str
    weight: float
    num_layers: int


class AddedLosses:
    """Add the `terms` of a model, which are the same on all ranks, in the same order.

    `sums` [terms] in FP64 has the values of this rank's counted tokens in the present step.
    """

    sums: torch.Tensor

    def __init__(self, terms: Iterable[AddedLoss]) -> None:
        self.terms = tuple(terms)
        self.grad_scale = 1.0  # multiplies all gradients but no value: FP16 loss scaling
        self._row_of = {term.name: row for row, term in enumerate(self.terms)}
        self._is_recording = True

    @property
    def is_recording(self) -> bool:
        """Whether layers run for the first time in training: no evaluation, no recomputation."""
        return self._is_recording and torch.is_grad_enabled()

    def begin_step(self, device: torch.device) -> None:
        """Begin the sums of a step, in the same memory as those of the step before."""
        if hasattr(self, "sums"):
            self.sums.zero_()
        else:
            self.sums = torch.zeros(len(self.terms), dtype=torch.float64, device=device)

    def begin_microbatch(
        self, is_counted_BS: torch.Tensor, num_counted: torch.Tensor | None = None
    ) -> None:
        """Begin a microbatch, of which these tokens count: boolean [B, S].

        `num_counted` (0-d) is their number on all ranks that have tokens of the microbatch; None
        stands for those of this rank alone.
        """
        self._is_counted_BS = is_counted_BS
        self._num_counted = is_counted_BS.sum() if num_counted is None else num_counted

    def add(self, name: str, x_BSD: torch.Tensor, values_BS: torch.Tensor) -> torch.Tensor:
        """Add a value of the term `name` for each token, in FP32; return `x_BSD`.

        The layer continues with the result: the gradient of the values begins where that of the
        result comes back. Outside of training nothing is added.
        """
        return self._added(name, x_BSD, values_BS, self._is_counted_BS)

    def add_mean(self, name: str, x_BSD: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Add one value (0-d) for all counted tokens of the microbatch; return `x_BSD` as `add`.

        Ranks that have tokens of the same microbatch give values whose sum is meant.
        """
        return self._added(name, x_BSD, value, self._num_counted)

    def _added(
        self, name: str, x_BSD: torch.Tensor, values: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Add values, each with its weight: one for a token that counts, and 0 for another."""
        if not torch.is_grad_enabled():
            return x_BSD
        row = self._row_of[name]
        if self._is_recording:
            weighted = values.detach().double() * weights
            self.sums[row] += weighted.where(weights != 0, 0.0).sum()
        factor = self.terms[row].weight * self.grad_scale
        out_BSD: torch.Tensor = _Added.apply(x_BSD, values, weights, factor)  # type: ignore[no-untyped-call]
        return out_BSD

    def recomputation(self) -> AbstractContextManager[None]:
        """Return a context in which layers run again for the present microbatch and add no value.

        It is made in the forward pass and entered when that pass is recomputed.
        """
        return self._recomputation(self._is_counted_BS, self._num_counted)

    @contextmanager
    def _recomputation(self, *counted: torch.Tensor) -> Iterator[None]:
        present = self._is_counted_BS, self._num_counted
        self.begin_microbatch(*counted)
        self._is_recording = False
        try:
            yield
        finally:
            self.begin_microbatch(*present)
            self._is_recording = True


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSD: torch.Tensor,
        values: torch.Tensor,
        weights: torch.Tensor,
        factor: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(weights)
        ctx.factor, ctx.dtype = factor, values.dtype
        return x_BSD.view_as(x_BSD)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        return grads[0], weights.to(ctx.dtype) * ctx.factor, None, None
