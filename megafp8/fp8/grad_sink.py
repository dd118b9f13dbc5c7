"""Decide where the gradients of weights go: summed over microbatches, now or later."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from fp8_numerics.kernels.compile import library
from megafp8.fp8.scaled import ScaledTensor, resize_memory
from megafp8.ops import torch_private


@dataclass(slots=True)
class GradSum:
    """Name the FP32 sum of a weight's gradients that a gradient is to be added to.

    `total` has the weight's shape. With `is_first` the next gradient overwrites it.
    """

    total: torch.Tensor
    is_first: bool


class ComputeGrad(Protocol):
    """Compute a microbatch's gradient of a weight.

    The sink calls it, and so chooses when the GEMM runs.
    """

    def __call__(self, into: GradSum | None, /) -> torch.Tensor:
        """Return the gradient, in any dtype, or `into.total` if it was added there already."""


@dataclass(slots=True)
class ScaledSum:
    """Hold the sum of a weight's gradients in low precision, from the end of a product on.

    Each microbatch reads the sum, adds its gradient in FP32, finds the amax, and writes the sum
    with a new scale: one rounding a microbatch, and no FP32 sum that stays. With `sums_in_fp32` the
    sum of a step is `total`, which is quantized once when the step ends.

    A library's products add to `total`, too. While it is not in use it has no memory: it is used
    from `begin_products` to `add`, or with `sums_in_fp32` to the end of the step.
    """

    scaled: ScaledTensor
    total: torch.Tensor | None  # FP32
    sums_in_fp32: bool
    is_first: bool = False

    def add(self, compute: ComputeGrad, hold: Callable[[], object]) -> None:
        """Add a gradient; `hold` is called before `scaled` is first written in a step.

        With `sums_in_fp32` that is in `end`.
        """
        is_first, self.is_first = self.is_first, False
        if self.sums_in_fp32:
            total = self.in_use()
            grad = compute(GradSum(total, is_first))
            if grad is not total:
                accumulate(total, grad, is_first=is_first)
            return
        # The product writes FP32 numbers, of this weight alone and for this moment.
        own = self.total
        if own is None:
            own = torch.empty(self.scaled.payload.shape, device=self.scaled.payload.device)
        grad = compute(GradSum(own, is_first=True))
        if is_first:
            hold()
        self.scaled.add(grad, is_first=is_first)
        self.forget()

    def end(self, hold: Callable[[], object]) -> None:
        """End a step, in which the sum has got all its gradients, or none."""
        if self.is_first or self.sums_in_fp32:
            hold()
        if self.is_first:
            self.scaled.zero_()
        elif self.sums_in_fp32:
            self.scaled.add(self.in_use(), is_first=True)
        self.is_first = False
        self.forget()

    @property
    def is_used(self) -> bool:
        """Whether the FP32 tensor has memory."""
        return self.total is not None and self.total.untyped_storage().nbytes() > 0

    def in_use(self) -> torch.Tensor:
        """Return the FP32 tensor, once it has memory."""
        assert self.total is not None
        resize_memory(self.total, has_memory=True)
        return self.total

    def forget(self) -> None:
        """Free the FP32 tensor."""
        if self.total is not None:
            resize_memory(self.total, has_memory=False)


class GradSink(Protocol):
    """Receive the weight gradients of each microbatch.

    Both methods return the gradient that autograd shall add to `.grad`, in the parameter's dtype
    and shape, or None if the sink keeps it itself. They are called in the backward pass, once per
    microbatch and use of the parameter.
    """

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        """Receive the gradient that `compute` returns, of the shape of `weight`.

        The sink decides when to call `compute`, which runs the GEMM of a weight gradient.
        """

    def add_rows(
        self, weight_VD: nn.Parameter, rows_T: torch.Tensor, grad_TD: torch.Tensor
    ) -> torch.Tensor | None:
        """Receive the gradient of a look-up in the table `weight_VD`.

        `grad_TD[t]` belongs to row `rows_T[t]`. `rows_T` is int64; a row may occur several times,
        and its gradients are summed.
        """


class AutogradSink:
    """Return every gradient, so that autograd accumulates it in `.grad`, in the weight's dtype."""

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        return compute(None).to(weight.dtype)

    def add_rows(
        self, weight_VD: nn.Parameter, rows_T: torch.Tensor, grad_TD: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the gradient of the whole table, with zeros in rows that were not looked up."""
        return torch.zeros_like(weight_VD).index_add_(0, rows_T, grad_TD)


class DotGradSink(AutogradSink):
    """Add each gradient to `.grad` itself, where the operation of a graph returns none.

    It is for linears of compiled layers whose gradients autograd would keep otherwise: those under
    FSDP, which reads `.grad` of the gathered parameters after a layer's backward pass.
    """

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> None:
        """Add the gradient, rounded to the weight's dtype, to `weight.grad`."""
        grad = compute(None).to(weight.dtype)
        weight.grad = grad if weight.grad is None else weight.grad + grad


class MainGradSink:
    """Accumulate gradients over microbatches in FP32, whatever the weights' dtype, or in FP8-LM's.

    `main_grads` holds one sum per parameter; autograd keeps the gradients of other parameters.
    Gradients that autograd delivers through `.grad` (norms) are added to `main_grads`
    too, and `.grad` is freed as soon as it arrives. Between `begin_step` and `end_step` the first
    gradient of a parameter overwrites, so that nothing has to be zeroed before. `hold` is called
    for a parameter before its sum is first written in a step, and may allocate the sum's memory.
    """

    def __init__(self) -> None:
        self.hold: Callable[[nn.Parameter], object] | None = None
        self.main_grads: dict[nn.Parameter, GradSum | ScaledSum] = {}

    def attach(self, main_grads: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Start collecting for these parameters; each FP32 tensor has its parameter's shape.

        A second call would add each gradient that autograd delivers twice.
        """
        assert not self.main_grads, "the sink has been attached to its parameters already"
        for param, main_grad in main_grads:
            self.main_grads[param] = GradSum(main_grad, is_first=False)
            param.register_post_accumulate_grad_hook(self._collect)

    def attach_scaled(
        self, scaled_grads: Iterable[tuple[nn.Parameter, ScaledTensor]], *, sums_in_fp32: bool
    ) -> None:
        """Start collecting in low precision for these parameters, which only linears use."""
        for param, scaled in scaled_grads:
            total = without_memory(param) if sums_in_fp32 else None
            self.main_grads[param] = ScaledSum(scaled, total, sums_in_fp32)

    def collect(self, params: Iterable[nn.Parameter]) -> None:
        """Take the gradients in low precision that autograd delivers through `.grad`."""
        for param in params:
            if isinstance(self.main_grads.get(param), ScaledSum):
                param.register_post_accumulate_grad_hook(self._collect)

    @property
    def scaled_sums(self) -> list[ScaledSum]:
        """Return the sums in low precision."""
        return [each for each in self.main_grads.values() if isinstance(each, ScaledSum)]

    def begin_step(self) -> None:
        """Begin a step: the next gradient of each parameter overwrites."""
        for main_grad in self.main_grads.values():
            main_grad.is_first = True
            if isinstance(main_grad, ScaledSum):
                main_grad.forget()  # what an error has left of the step that it ended

    def sum_in_products(self, params: Iterable[nn.Parameter]) -> None:
        """Let a library's products add the gradients of these parameters to FP32 tensors.

        The library finds such a tensor as the parameter's `main_grad`. `begin_products` is called
        before the products of a microbatch, and `add` after them, with a function that returns
        the sum that it is given.
        """
        for param in params:
            main_grad = self.main_grads[param]
            if main_grad.total is None:
                main_grad.total = without_memory(param)
            param.main_grad = main_grad.total  # type: ignore[attr-defined]

    def begin_products(self, params: Iterable[nn.Parameter]) -> None:
        """Prepare the FP32 tensors to which products are about to add: zero the new ones."""
        fresh = []
        for param in params:
            main_grad = self.main_grads[param]
            if isinstance(main_grad, ScaledSum):
                fresh += [] if main_grad.is_used else [main_grad.in_use()]
            elif main_grad.is_first:
                self._hold(param)
                fresh.append(main_grad.total)
        if fresh:
            torch_private.zero_all_(fresh)

    def end_step(self) -> None:
        """End a step: quantize FP32 sums, and zero the gradients of parameters that got none."""
        for param, main_grad in self.main_grads.items():
            if isinstance(main_grad, ScaledSum):
                main_grad.end(partial(self._hold, param))
            elif main_grad.is_first:
                self._hold(param)
                main_grad.total.zero_()
                main_grad.is_first = False

    @property
    def untouched(self) -> frozenset[nn.Parameter]:
        """Return the parameters that have got no gradient in this step."""
        return frozenset(param for param, grad in self.main_grads.items() if grad.is_first)

    def leave_untouched(self, params: Iterable[nn.Parameter]) -> None:
        """Take all other parameters as having a gradient: a CUDA graph has added it."""
        untouched = frozenset(params)
        for param, main_grad in self.main_grads.items():
            main_grad.is_first = main_grad.is_first and param in untouched

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        main_grad = self.main_grads.get(weight)
        if main_grad is None:
            return compute(None).to(weight.dtype)
        if isinstance(main_grad, ScaledSum):
            main_grad.add(compute, partial(self._hold, weight))
            return None
        if main_grad.is_first and self.hold is not None:  # `_hold` would be a call for each weight
            self.hold(weight)
        grad, total = compute(main_grad), main_grad.total
        if grad is not total:  # otherwise the product has added it already
            accumulate(total, grad, is_first=main_grad.is_first)
        main_grad.is_first = False
        return None

    def add_rows(
        self, weight_VD: nn.Parameter, rows_T: torch.Tensor, grad_TD: torch.Tensor
    ) -> torch.Tensor | None:
        main_grad = self.main_grads.get(weight_VD)
        if main_grad is None:  # summed in FP32, rounded once
            total_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
            return total_VD.index_add_(0, rows_T, grad_TD.float()).to(weight_VD.dtype)
        assert isinstance(main_grad, GradSum), "low precision is for linears' weights alone"
        if main_grad.is_first:
            self._hold(weight_VD)
            main_grad.total.zero_()
            main_grad.is_first = False
        main_grad.total.index_add_(0, rows_T, grad_TD.float())
        return None

    def _collect(self, param: torch.Tensor) -> None:
        grad = param.grad
        if grad is None:  # every gradient went through `add`
            return
        assert isinstance(param, nn.Parameter)
        main_grad = self.main_grads[param]
        if isinstance(main_grad, ScaledSum):
            main_grad.add(lambda _: grad, partial(self._hold, param))
        else:
            if main_grad.is_first and self.hold is not None:
                self.hold(param)
            accumulate(main_grad.total, grad, is_first=main_grad.is_first)
            main_grad.is_first = False
        param.grad = None

    def _hold(self, param: nn.Parameter) -> None:
        if self.hold is not None:
            self.hold(param)


def without_memory(param: nn.Parameter) -> torch.Tensor:
    """Return an FP32 tensor of a parameter's shape that has no memory."""
    total = torch.empty(param.shape, device=param.device)
    resize_memory(total, has_memory=False)
    return total


def accumulate(total: torch.Tensor, grad: torch.Tensor, *, is_first: bool) -> None:
    """Add `grad` (FP32, BF16 or FP16) to `total` (FP32), or write it there if it is the first.

    torch adds BF16 to FP32 in two passes over memory, the compiled kernel in one, with the same
    bits.
    """
    if is_first:
        total.copy_(grad)
    elif _fits_kernel(total, grad) and (lib := library().lib) is not None:
        lib.megafp8_accumulate(
            ctypes.c_void_p(total.data_ptr()),
            ctypes.c_void_p(grad.data_ptr()),
            ctypes.c_size_t(total.numel()),
            torch.get_num_threads(),
        )
    else:
        total.add_(grad)


def _fits_kernel(total: torch.Tensor, grad: torch.Tensor) -> bool:
    on_cpu = total.device.type == "cpu" and grad.dtype == torch.bfloat16
    return on_cpu and total.is_contiguous() and grad.is_contiguous()


def look_up(tokens_BS: torch.Tensor, weight_VD: nn.Parameter, sink: GradSink) -> torch.Tensor:
    """Return rows of `weight_VD`: [B, S] int64 -> [B, S, D].

    The gradient goes to `sink`, and touches only the rows that were looked up.
    """
    rows_BSD: torch.Tensor = _LookUp.apply(tokens_BS, weight_VD, sink)
    return rows_BSD


class _LookUp(torch_private.DirectFunction):
    @staticmethod
    def forward(
        ctx: Any, tokens_BS: torch.Tensor, weight_VD: nn.Parameter, sink: GradSink
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens_BS)
        ctx.weight, ctx.sink = weight_VD, sink
        return nn.functional.embedding(tokens_BS, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (tokens_BS,), (grad_BSD,) = ctx.saved_tensors, grads
        grad = ctx.sink.add_rows(ctx.weight, tokens_BS.flatten(), grad_BSD.flatten(0, 1))
        return None, grad, None


class DeferringSink:
    """Keep weight gradient products until the function that `take` returns is called.

    A backward pass then computes input gradients only. The operands of each weight gradient, in FP8
    or not, are kept with its product, so each operand is cast once and its amax is recorded once.
    """

    def __init__(self, inner: GradSink) -> None:
        self.inner = inner
        self._waiting: list[Callable[[], object]] = []

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        """Keep the product that computes the weight's gradient; return None: it comes later."""
        self._waiting.append(lambda: self.inner.add(weight, compute))
        return None

    def add_rows(
        self, weight_VD: nn.Parameter, rows_T: torch.Tensor, grad_TD: torch.Tensor
    ) -> torch.Tensor | None:
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
