"""Where a weight gradient goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

# grad_weight in the weight's compute dtype; called by the sink, so that a later sink may have the
# GEMM accumulate in place.
ComputeGradWeight = Callable[[], torch.Tensor]


class GradSink(Protocol):
    """Takes a weight's gradient of one microbatch."""

    def add(self, weight: nn.Parameter, compute: ComputeGradWeight) -> torch.Tensor | None:
        """Returns what autograd shall add to `.grad`, or None if the sink keeps it."""
        ...


class AutogradSink:
    """Autograd accumulates in `.grad`, in the weight's own dtype."""

    def add(self, weight: nn.Parameter, compute: ComputeGradWeight) -> torch.Tensor | None:
        return compute()


class MainGradSink:
    """Gradients accumulate over microbatches in FP32, whatever the weights' dtype.

    `main_grads` holds one FP32 tensor per parameter; what autograd still delivers through `.grad`
    (norms, biases, embeddings) is added there and freed as soon as it arrives.
    """

    def __init__(self) -> None:
        self.main_grads: dict[nn.Parameter, torch.Tensor] = {}
        self._hooks: list[object] = []

    def attach(self, main_grads: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Start collecting for these parameters; each FP32 tensor has its parameter's shape."""
        for param, main_grad in main_grads:
            self.main_grads[param] = main_grad
            if param.grad is not main_grad:  # else autograd adds to it by itself
                self._hooks.append(param.register_post_accumulate_grad_hook(self._collect))

    def add(self, weight: nn.Parameter, compute: ComputeGradWeight) -> torch.Tensor | None:
        if weight not in self.main_grads:
            return compute()
        self.main_grads[weight].add_(compute())
        return None

    def _collect(self, param: torch.Tensor) -> None:
        if param.grad is not None:  # None where everything went through `add`
            assert isinstance(param, nn.Parameter)
            self.main_grads[param].add_(param.grad)
            param.grad = None
