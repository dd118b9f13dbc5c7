"""Where a gradient goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

from megafp8.precision.accumulate import accumulate

# Makes a microbatch's gradient of a weight; called by the sink, so that a later sink may have the
# GEMM accumulate in place.
ComputeGrad = Callable[[], torch.Tensor]


class GradSink(Protocol):
    """Takes the gradients of one microbatch; returns what autograd shall add to `.grad`, if any."""

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None: ...

    def add_rows(
        self, weight_VD: nn.Parameter, rows_T: torch.Tensor, grad_TD: torch.Tensor
    ) -> torch.Tensor | None:
        """The gradient of a look-up: `grad_TD[t]` belongs to row `rows_T[t]`."""
        ...


class AutogradSink:
    """Autograd accumulates in `.grad`, in the weight's own dtype."""

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        return compute().to(weight.dtype)

    def add_rows(
        self, weight_VD: nn.Parameter, rows_T: torch.Tensor, grad_TD: torch.Tensor
    ) -> torch.Tensor | None:
        return torch.zeros_like(weight_VD).index_add_(0, rows_T, grad_TD)


class MainGradSink:
    """Gradients accumulate over microbatches in FP32, whatever the weights' dtype.

    `main_grads` holds one FP32 tensor per parameter; gradients of others are left to autograd.
    What autograd still delivers through `.grad` (norms) is added there and freed as soon as it
    arrives. Between `begin_step` and `end_step` the
    first gradient of a parameter overwrites: nothing has to be zeroed before.
    """

    def __init__(self) -> None:
        self.main_grads: dict[nn.Parameter, torch.Tensor] = {}
        self._untouched: set[nn.Parameter] = set()

    def attach(self, main_grads: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Start collecting for these parameters; each FP32 tensor has its parameter's shape."""
        for param, main_grad in main_grads:
            self.main_grads[param] = main_grad
            param.register_post_accumulate_grad_hook(self._collect)

    def begin_step(self) -> None:
        self._untouched = set(self.main_grads)

    def end_step(self) -> None:
        """Zero what this step had no gradient for."""
        for param in self._untouched:
            self.main_grads[param].zero_()
        self._untouched.clear()

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        if weight not in self.main_grads:
            return compute().to(weight.dtype)
        self._accumulate(weight, compute())
        return None

    def add_rows(
        self, weight_VD: nn.Parameter, rows_T: torch.Tensor, grad_TD: torch.Tensor
    ) -> torch.Tensor | None:
        if weight_VD not in self.main_grads:  # summed in FP32, rounded once
            total_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
            return total_VD.index_add_(0, rows_T, grad_TD.float()).to(weight_VD.dtype)
        main_grad = self.main_grads[weight_VD]
        if weight_VD in self._untouched:
            main_grad.zero_()
            self._untouched.discard(weight_VD)
        main_grad.index_add_(0, rows_T, grad_TD.float())
        return None

    def _collect(self, param: torch.Tensor) -> None:
        if param.grad is not None:  # None where everything went through `add`
            assert isinstance(param, nn.Parameter)
            self._accumulate(param, param.grad)
            param.grad = None

    def _accumulate(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        accumulate(self.main_grads[param], grad, is_first=param in self._untouched)
        self._untouched.discard(param)
