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
from megafp8.ops.addmm import Scales, factor, scaled_addmm, times_scales

_planned_type = ContextVar("the type of the device that meta tensors stand for", default="cpu")


@contextmanager
def planning_for(device_type: str) -> Iterator[None]:
    """Let meta tensors stand for tensors of this type of device, inside the context."""
    token = _planned_type.set(device_type)
    try:
        yield
    finally:
        _planned_type.reset(token)


def fp32_products(device: torch.device) -> bool:
    """Whether BF16 products on this device run as FP32 ones."""
    return device_kind(device) == "cpu" and not cpu.fast_at_bf16()


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
    if is_widened(a_MK):
        bias_N = None if bias_N is None else bias_N.float()
        return _product(a_MK.float(), b_KN.float(), bias_N).to(a_MK.dtype)
    return _product(a_MK, b_KN, bias_N)


def mm_into(
    total_MN: torch.Tensor,
    a_MK: torch.Tensor,
    b_KN: torch.Tensor,
    *,
    is_first: bool,
    scales: Scales | None = None,
) -> torch.Tensor | None:
    """Return a @ b, times both scales, in FP32, not rounded to the operands' dtype.

    None says that torch has no such product.
    The result is `total_MN` (FP32) itself if the product was added to it or, with `is_first`,
    overwrote it; otherwise the caller has to do that. On a CPU the product adds its terms to the
    sum. CPUs with BF16 instructions have such products, but torch 2.13 does not offer them.
    """
    if is_widened(a_MK):
        a_MK, b_KN = a_MK.float(), b_KN.float()
    on_cpu = device_kind(a_MK.device) == "cpu"
    if on_cpu and a_MK.dtype == torch.float32:
        alpha = 1.0 if scales is None or a_MK.is_meta else factor(scales)
        beta = 0 if is_first else 1
        return scaled_addmm(total_MN, a_MK, b_KN, alpha, beta=beta, out=total_MN)
    out_MN = total_MN if is_first else None
    if a_MK.dtype == torch.float32:
        product = torch.mm(a_MK, b_KN, out=out_MN)
    elif on_cpu or a_MK.dtype not in (torch.bfloat16, torch.float16):
        return None
    elif out_MN is None:
        product = torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    else:
        product = torch.mm(a_MK, b_KN, out_dtype=torch.float32, out=out_MN)
    return product if scales is None else times_scales(product, scales)


def _product(a_MK: torch.Tensor, b_KN: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
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
