"""Activations, gated or not, their gradients, and these with the gradient of a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fp8_numerics.gelu import gelu_tanh
from te_cpu.quantize import finish
from te_cpu.tensors import Quantizer

Function = Callable[[torch.Tensor], torch.Tensor]


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


# (name, name of the gated form, function); the sigmoid is there in its gated form alone
FUNCTIONS: tuple[tuple[str, str, Function], ...] = (
    ("gelu", "geglu", gelu_tanh),
    ("qgelu", "qgeglu", _quick_gelu),
    ("relu", "reglu", torch.relu),
    ("srelu", "sreglu", _squared_relu),
    ("silu", "swiglu", F.silu),
    ("", "glu", torch.sigmoid),
)


def _gated(function: Function) -> Function:
    """Map [..., 2 N] to [..., N]: the function of the first half is multiplied by the second."""

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return function(gate) * up

    return gated


def _gradient(function: Function, grad: torch.Tensor, fwd_input: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = fwd_input.detach().float().requires_grad_()
        (found,) = torch.autograd.grad(function(x), x, grad.detach().float())
    return found


def _kernels_of(name: str, function: Function) -> tuple[Callable[..., Any], ...]:
    """Return the activation, `d…` and `dbias_d…`, which also gives the sum of each column."""

    def forward(input: torch.Tensor, quantizer: Quantizer) -> Any:
        return finish(function(input.detach().float()), input.dtype, quantizer)

    def backward(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Quantizer) -> Any:
        return finish(_gradient(function, grad, fwd_input), grad.dtype, quantizer)

    def backward_with_bias(
        grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Quantizer
    ) -> list[Any]:
        found = _gradient(function, grad, fwd_input)
        bias = found.reshape(-1, found.shape[-1]).sum(0).to(grad.dtype)
        return [bias, finish(found, grad.dtype, quantizer)]

    forward.__name__, backward.__name__ = name, f"d{name}"
    backward_with_bias.__name__ = f"dbias_d{name}"
    return forward, backward, backward_with_bias


def _clamped(x: torch.Tensor, limit: float, alpha: float, offset: float) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + offset)


_LIMIT, _ALPHA = 7.0, 1.702


def clamped_swiglu(
    input: torch.Tensor,
    quantizer: Quantizer,
    limit: float = _LIMIT,
    alpha: float = _ALPHA,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Return the SwiGLU of GPT-OSS: of a gate up to `limit`, and a linear part within it, moved."""
    out = _clamped(input.detach().float(), limit, alpha, glu_linear_offset)
    return finish(out, input.dtype, quantizer)


def clamped_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    quantizer: Quantizer,
    limit: float = _LIMIT,
    alpha: float = _ALPHA,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Return its gradient; a number that is clamped has none."""
    found = _gradient(lambda x: _clamped(x, limit, alpha, glu_linear_offset), grad, fwd_input)
    return finish(found, grad.dtype, quantizer)


KERNELS = (clamped_swiglu, clamped_dswiglu) + tuple(
    kernel
    for plain, gated, function in FUNCTIONS
    for name, form in ((plain, function), (gated, _gated(function)))
    for kernel in _kernels_of(name, form)
    if name and (not kernel.__name__.startswith("dbias") or name == plain)
)
dgelu = next(kernel for kernel in KERNELS if kernel.__name__ == "dgelu")
