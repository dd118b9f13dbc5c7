"""Compute weight gradients later than input gradients, for zero-bubble pipelines."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megafp8.precision.grad_sink import ComputeGrad, GradSink


class DeferringSink:
    """Keeps weight gradient products until the function that `take` returns is called.

    A backward pass then computes input gradients only. The operands of each weight gradient, in FP8
    or not, are kept with its product, so each operand is cast once and its amax is recorded once.
    """

    def __init__(self, inner: GradSink) -> None:
        self.inner = inner
        self._waiting: list[Callable[[], object]] = []

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        """Keep the product that computes the weight's gradient; return None, because it comes
        later.
        """
        self._waiting.append(lambda: self.inner.add(weight, compute))
        return None

    def add_rows(
        self, weight_VD: nn.Parameter, rows_T: torch.Tensor, grad_TD: torch.Tensor
    ) -> torch.Tensor | None:
        """Keep the gradient of an embedding's rows to be added later; return None."""
        self._waiting.append(lambda: self.inner.add_rows(weight_VD, rows_T, grad_TD))
        return None

    def take(self) -> Callable[[], None]:
        """Return a function that adds all gradients kept since the last call; it must run once."""
        waiting, self._waiting = self._waiting, []

        @torch.no_grad()  # as in the backward pass that made the operands
        def run() -> None:
            for add in waiting:
                added = add()
                assert added is None, "the sink inside keeps gradients itself"

        return run
