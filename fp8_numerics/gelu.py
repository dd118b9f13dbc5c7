"""Compute the GELU in its tanh form on CPUs by a sigmoid, as the kernels for GPUs do.

    gelu(x) = x / (1 + exp(-t)), t = 2 sqrt(2/pi) (x + 0.044715 x^3)   (arXiv 1606.08415)

torch computes 0.5 x (1 + tanh(t / 2)), which is the same but for roundings, takes longer, and loses
all digits where the tanh is near -1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fp8_numerics.cast import IN_MEMORY
from fp8_numerics.kernels.compile import KINDS, library_for
from fp8_numerics.meta import device_kind

_KINDS = {KINDS[0]: 0, KINDS[1]: 1}  # the numbers of FP32 and BF16 in C


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the GELU of `x` (any shape) in its tanh form, in the dtype of `x`, with gradients.

    FP32 and BF16 on CPUs are computed in FP32 and rounded once, with the same bits on all CPUs,
    with and without the C kernel. Other dtypes, devices and classes of tensors, and graphs of
    `torch.compile`, have torch's own function.
    """
    is_here = type(x) in IN_MEMORY and x.dtype in _KINDS and device_kind(x.device) == "cpu"
    if not is_here or torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    out: torch.Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
    return out


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _computed(None, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _computed(grads[0], *ctx.saved_tensors)


def _computed(grad: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Return gelu(x), or the gradient of `x` if that of its GELU is given."""
    lib = library_for(x)
    if lib is None:
        return in_torch(grad, x)
    x, grad = x.contiguous(), None if grad is None else grad.contiguous()
    out, kind = torch.empty_like(x), _KINDS[x.dtype]
    grad_at = None if grad is None else grad.data_ptr()
    threads = torch.get_num_threads()
    lib.megafp8_gelu(grad_at, x.data_ptr(), x.numel(), kind, out.data_ptr(), threads)
    return out


def in_torch(grad: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Run the steps of the kernel (gelu_cpu.h) as torch operations: the same bits, but slowly."""
    v = x.float()
    u = v * (v * v * 0.102943239 + 2.30220819813)
    a = -u.abs()
    shifted = a + 1.5 * 2**23
    r = a - (shifted - 1.5 * 2**23)
    p = r * 0.001326472731307149 + 0.009671512991189957
    for coefficient in (0.05550733581185341, 0.24022242426872253, 0.6931470036506653, 1.0):
        p = p * r + coefficient
    power = (p.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)
    power = power.masked_fill(a < -126, 0.0)
    larger = torch.reciprocal(power + 1.0)
    smaller = power * larger
    gate = torch.where(u < 0, smaller, larger)
    if grad is None:
        return (v * gate).to(x.dtype)
    slope = v * (smaller * larger) * (v * v * 0.21406445 + 1.59576912161)
    return (grad.float() * (gate + slope)).to(x.dtype)
