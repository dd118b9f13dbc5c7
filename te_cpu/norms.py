"""LayerNorm and RMSNorm, forward and backward, in FP32 inside."""

from __future__ import annotations

from typing import Any

import torch

from te_cpu.enums import WIDE
from te_cpu.quantize import finish
from te_cpu.tensors import Quantizer


def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Quantizer,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Return [output, mean [rows], 1/deviation [rows]]."""
    x = input.detach().float()
    mean = x.mean(-1, keepdim=True)
    inverse = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
    out = (x - mean) * inverse * _gain(weight, zero_centered_gamma)
    if bias is not None:
        out = out + bias.detach().float()
    return [finish(out, WIDE[otype], quantizer, ln_out), mean.flatten(), inverse.flatten()]


def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Quantizer,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Return [output, None, 1/root of the mean square [rows]]."""
    x = input.detach().float()
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    out = x * inverse * _gain(weight, zero_centered_gamma)
    return [finish(out, WIDE[otype], quantizer, ln_out), None, inverse.flatten()]


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Gradients of the input, the weight and the bias."""
    return _backward(dz, x, mu, rsigma, gamma, zero_centered_gamma)


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Gradients of the input and the weight."""
    return _backward(dz, x, None, rsigma, gamma, zero_centered_gamma)[:2]


def rmsnorm_bwd_add(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Gradients of the input, to which `add` is added before it is rounded, and the weight."""
    return _backward(dz, x, None, rsigma, gamma, zero_centered_gamma, add)[:2]


def _gain(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.detach().float() + (1.0 if zero_centered else 0.0)


def _backward(
    dz: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor | None,
    inverse: torch.Tensor,
    weight: torch.Tensor,
    zero_centered: bool,
    add: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return the gradients of input, weight and bias, of RMSNorm if there is no `mean`."""
    width = x.shape[-1]
    x32, grad = x.detach().float().reshape(-1, width), dz.detach().float().reshape(-1, width)
    inverse = inverse.reshape(-1, 1)
    normed = (x32 if mean is None else x32 - mean.reshape(-1, 1)) * inverse
    scaled = grad * _gain(weight, zero_centered)
    dx = scaled - normed * (scaled * normed).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - scaled.mean(-1, keepdim=True)
    dx = dx * inverse
    if add is not None:
        dx = dx + add.detach().float().reshape(dx.shape)
    return [
        dx.to(x.dtype).reshape(x.shape),
        (grad * normed).sum(0).to(weight.dtype),
        grad.sum(0).to(weight.dtype),
    ]


KERNELS = (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add)
