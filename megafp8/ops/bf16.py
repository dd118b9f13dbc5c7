"""Multiply BF16 matrices in FP32 on CPUs without BF16 instructions, rounding to BF16 once.

Every BF16 number is an FP32 number, and the product of two has at most 16 significant bits, so an
FP32 product sums exact terms, as BF16 hardware does with its FP32 accumulators. What autograd keeps
stays BF16: operands are widened for a product and again for those of its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from megafp8.ops import cpu

_planned_type = ContextVar("the type of the device that meta tensors stand for", default="cpu")
_in_kernel = ContextVar("whether what runs stands for one kernel of a GPU", default=False)


@contextmanager
def planning_for(device_type: str) -> Iterator[None]:
    """Let meta tensors stand for tensors of this type of device, inside the context."""
    token = _planned_type.set(device_type)
    try:
        yield
    finally:
        _planned_type.reset(token)


@contextmanager
def as_one_kernel() -> Iterator[None]:
    """Let what runs inside stand for one kernel of a GPU where meta tensors are on one."""
    token = _in_kernel.set(_planned_type.get() != "cpu")
    try:
        yield
    finally:
        _in_kernel.reset(token)


def is_in_kernel() -> bool:
    """Whether what runs stands for one kernel of a GPU, which makes its results and no more."""
    return _in_kernel.get()


def fp32_products(device: torch.device) -> bool:
    """Whether BF16 products on this device run as FP32 ones."""
    return device_kind(device) == "cpu" and not cpu.FAST_AT_BF16


def device_kind(device: torch.device) -> str:
    """Return the type of a device; for meta, that of the device which its tensors stand for."""
    return _planned_type.get() if device.type == "meta" else device.type


def is_widened(x: torch.Tensor) -> bool:
    """Whether a product of `x` runs in FP32 although `x` is BF16."""
    return x.dtype == torch.bfloat16 and fp32_products(x.device)


def mm(a_MK: torch.Tensor, b_KN: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return a @ b (+ bias), [M, N], in the operands' dtype.

    Autograd does not see the widening, so this is for code that has its own backward pass or none.
    """
    if a_MK.dtype == torch.bfloat16 and is_widened(a_MK):
        bias_N = None if bias_N is None else bias_N.float()
        return mm(a_MK.float(), b_KN.float(), bias_N).to(a_MK.dtype)
    return torch.mm(a_MK, b_KN) if bias_N is None else torch.addmm(bias_N, a_MK, b_KN)


def linear(
    x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `F.linear` of the arguments: [..., I] -> [..., O], with gradients."""
    if not is_widened(x):
        return F.linear(x, weight_OI, bias_O)
    out: torch.Tensor = _Linear.apply(x, weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_OI)
        out_TO = mm(x.reshape(-1, x.shape[-1]), weight_OI.t(), bias_O)
        return out_TO.view(*x.shape[:-1], weight_OI.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        grad_TO = grads[0].reshape(-1, weight_OI.shape[0])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            mm(grad_TO, weight_OI).view(x.shape) if needs_x else None,
            mm(grad_TO.t(), x.reshape(-1, x.shape[-1])) if needs_weight else None,
            grad_TO.sum(0) if needs_bias else None,
        )
