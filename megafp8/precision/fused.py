"""Let a norm or an activation write the FP8 input of the linear that follows it.

Under `delayed` the scale is known beforehand, so one pass writes the payload, the transposed
payload and the amax of the norm's or activation's result. That result lies in memory in high
precision only for observers (FP8 health, traces), which ask for it by `with_plain`. Values are
rounded to the linear's dtype before the cast, as if the result had been stored.
"""

# T tokens   I features of the linear's input   X features of what it is made of (2 I: gate and up)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import nn

from megafp8.precision.formats import Fp8Format

Kind = Literal["gelu", "gelu_tanh", "swiglu", "geglu"]
KINDS: dict[str, Kind] = {
    "gelu": "gelu", "gelu-tanh": "gelu_tanh", "swiglu": "swiglu", "geglu": "geglu"
}  # fmt: skip
"""The activations that have a kernel, under the model's names."""


@dataclass(frozen=True)
class CastInto:
    """Describe the cast that a producer shall do.

    `amax` works as in `cast.quantize`; `with_rows`, `with_columns` and `with_plain` ask for the
    three tensors of `Produced`.
    """

    quant_scale: torch.Tensor
    fmt: Fp8Format
    amax: torch.Tensor | None
    with_rows: bool
    with_columns: bool
    with_plain: bool


class Produced(NamedTuple):
    """Hold the tensors that a producer made; None stands for a tensor that was not asked for.

    `payload` is [T, I], `payload_t` [I, T], `plain` [T, I] in high precision. `kept` are the
    tensors that the backward pass needs besides the producer's input.
    """

    payload: torch.Tensor | None
    payload_t: torch.Tensor | None
    plain: torch.Tensor | None
    kept: tuple[torch.Tensor, ...] = ()


class Producer(Protocol):
    """Compute the input of a linear and cast it in one pass, in Triton and without autograd."""

    @property
    def params(self) -> tuple[torch.Tensor, ...]:
        """Return the parameters that get a gradient."""
        ...

    def cast(self, x_TX: torch.Tensor, into: CastInto) -> Produced:
        """Compute the producer's result of `x_TX` and cast it as `into` says."""
        ...

    def backward(
        self, grad_TI: torch.Tensor, x_TX: torch.Tensor, kept: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of x and of `params`, each in the dtype of its tensor.

        `kept` are the tensors of `Produced.kept`.
        """
        ...


class Normalization(Protocol):
    """Hold the parameters of a norm; FSDP replaces them while a layer runs."""

    weight: nn.Parameter
    bias: nn.Parameter | None  # None for RMSNorm
    epsilon: float

    def gain(self) -> torch.Tensor:
        """Return what normalized values are multiplied by; its gradient is the weight's too."""
        ...


@dataclass(frozen=True)
class NormProducer:
    """Compute LayerNorm, or RMSNorm if there is no bias, and cast the result."""

    norm: Normalization
    dtype: torch.dtype  # the dtype of the linear's input

    @property
    def params(self) -> tuple[torch.Tensor, ...]:
        """Return the norm's weight and, for LayerNorm, its bias."""
        weight, bias = self.norm.weight, self.norm.bias
        return (weight,) if bias is None else (weight, bias)

    def cast(self, x_TX: torch.Tensor, into: CastInto) -> Produced:
        """Compute the norm of each row of `x_TX` and cast it as `into` says."""
        from megafp8.precision.kernels.triton_norm import norm_cast

        done = norm_cast(
            x_TX,
            self.norm.gain().detach(),
            None if self.norm.bias is None else self.norm.bias.detach(),
            self.norm.epsilon,
            into.quant_scale,
            into.fmt,
            out_dtype=self.dtype,
            amax=into.amax,
            with_rows=into.with_rows,
            with_columns=into.with_columns,
            with_plain=into.with_plain,
        )
        mean, rstd = done.statistics
        kept = (rstd,) if mean is None else (rstd, mean)
        return Produced(done.payload, done.payload_t, done.plain, kept)

    def backward(
        self, grad_TI: torch.Tensor, x_TX: torch.Tensor, kept: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of x, of the weight and, for LayerNorm, of the bias."""
        from megafp8.precision.kernels.triton_norm import NormStatistics, norm_backward

        statistics = NormStatistics(kept[1] if len(kept) > 1 else None, kept[0])
        grad_x, *of_params = norm_backward(grad_TI, x_TX, self.norm.gain().detach(), statistics)
        pairs = zip(self.params, of_params, strict=False)  # RMSNorm has no bias
        return grad_x, *(grad.to(param.dtype) for param, grad in pairs)


@dataclass(frozen=True)
class ActivationProducer:
    """Compute an activation without parameters, and cast the result."""

    kind: Kind
    params: tuple[torch.Tensor, ...] = ()

    def cast(self, x_TX: torch.Tensor, into: CastInto) -> Produced:
        """Compute the activation of `x_TX` and cast it as `into` says."""
        payload, payload_t, _, plain = _activation(x_TX, None, self.kind, into)
        return Produced(payload, payload_t, plain)

    def backward(
        self, grad_TI: torch.Tensor, x_TX: torch.Tensor, kept: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradient of x, [T, X]."""
        from megafp8.precision.formats import E4M3

        nothing = CastInto(x_TX.new_ones((), dtype=torch.float32), E4M3, None, False, False, True)
        grad_x = _activation(x_TX, grad_TI, self.kind, nothing)[3]
        assert grad_x is not None
        return (grad_x,)


def _activation(
    x_TX: torch.Tensor, grad_TI: torch.Tensor | None, kind: Kind, into: CastInto
) -> tuple[torch.Tensor | None, ...]:
    from megafp8.precision.kernels.triton_cast import cast

    return cast(
        x_TX,
        into.quant_scale,
        into.fmt,
        activation=kind,
        grad_MN=grad_TI,
        amax=into.amax,
        with_rows=into.with_rows,
        with_columns=into.with_columns,
        with_plain=into.with_plain,
    )
