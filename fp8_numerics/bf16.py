"""Multiply BF16 matrices in FP32 on CPUs without BF16 instructions, rounding to BF16 once.

Every BF16 number is an FP32 number, and the product of two has at most 16 significant bits, so an
FP32 product sums exact terms, as BF16 hardware does with its FP32 accumulators. What autograd keeps
stays BF16: operands are widened for a product and again for those of its backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fp8_numerics import cpu
from fp8_numerics.meta import device_kind


def fp32_products(device: torch.device) -> bool:
    """Whether BF16 products on this device run as FP32 ones."""
    return device_kind(device) == "cpu" and not cpu.FAST_AT_BF16


def is_widened(x: torch.Tensor) -> bool:
    """Whether a product of `x` runs in FP32 although `x` is BF16."""
    return x.dtype == torch.bfloat16 and fp32_products(x.device)


def mm(
    a_MK: torch.Tensor,
    b_KN: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a @ b (+ bias), [M, N], in the operands' dtype, in `out` unless it is widened.

    Autograd does not see the widening, so this is for code that has its own backward pass or none.
    """
    if a_MK.dtype == torch.bfloat16 and is_widened(a_MK):
        bias_N = None if bias_N is None else bias_N.float()
        return mm(a_MK.float(), b_KN.float(), bias_N).to(a_MK.dtype)
    if bias_N is None:
        return torch.mm(a_MK, b_KN, out=out)
    return torch.addmm(bias_N, a_MK, b_KN, out=out)


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
