"""Weight gradients computed later than input gradients, for zero-bubble pipelines."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megafp8.precision.grad_sink import ComputeGrad, GradSink


class DeferringSink:
    """Keeps what linears hand it until the runner that `take` returns is called.

    A backward pass then computes input gradients only: its operands, FP8 or not, wait here with
    the product that is still to be computed. So each is cast, and its amax taken, once.
    """

    def __init__(self, inner: GradSink) -> None:
        self.inner = inner
        self._waiting: list[Callable[[], object]] = []

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        self._waiting.append(lambda: self.inner.add(weight, compute))
        return None

    def add_rows(
        self, weight_VD: nn.Parameter, rows_T: torch.Tensor, grad_TD: torch.Tensor
    ) -> torch.Tensor | None:
        self._waiting.append(lambda: self.inner.add_rows(weight_VD, rows_T, grad_TD))
        return None

    def take(self) -> Callable[[], None]:
        """What has come since the last call, to be run once."""
        waiting, self._waiting = self._waiting, []

        @torch.no_grad()  # as in the backward pass that they come from
        def run() -> None:
            for add in waiting:
                added = add()
                assert added is None, "the sink inside keeps gradients itself"

        return run
