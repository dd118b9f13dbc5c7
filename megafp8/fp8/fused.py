"""Let what computes a linear's input or output gradient write it in FP8.

Under `delayed` the scale is known beforehand, so one pass writes the payload, the transposed
payload and the amax of what a norm or an activation computes, and of the gradient that an
activation's backward pass or attention's gives to the linear before it. These values lie in memory
in high precision only for observers (FP8 health, traces), which ask for them by `with_plain`.
Values are rounded to the linear's dtype before the cast, as if they had been stored.
"""

# T tokens   I features of the linear's input   X features of what it is made of (2 I: gate and up)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from fp8_numerics.formats import E4M3, Fp8Format

Kind = Literal["gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"]
KINDS: dict[str, Kind] = {
    "gelu": "gelu", "gelu-tanh": "gelu_tanh", "swiglu": "swiglu", "geglu": "geglu",
    "geglu-tanh": "geglu_tanh",
}  # fmt: skip
"""The activations that have a kernel, under the model's names."""


@dataclass(frozen=True)
class CastInto:
    """Describe the cast that a producer shall do.

    `amax` works as in `cast.quantize`; `with_rows`, `with_columns`, `with_plain` and `with_sums`
    ask for the first four tensors of `Produced`.
    """

    quant_scale: torch.Tensor
    fmt: Fp8Format
    amax: torch.Tensor | None
    with_rows: bool
    with_columns: bool
    with_plain: bool
    with_sums: bool = False


class Produced(NamedTuple):
    """Hold the tensors that a producer made; None stands for a tensor that was not asked for.

    `payload` is [T, I], `payload_t` [I, T], `plain` [T, I] in high precision. `partial_sums` are
    FP32 sums of the columns over groups of rows, [P, I]. `kept` are the tensors that the backward
    pass needs besides the producer's input. `total` [T, X] is that input where it is a sum.
    """

    payload: torch.Tensor | None
    payload_t: torch.Tensor | None
    plain: torch.Tensor | None
    partial_sums: torch.Tensor | None = None
    kept: tuple[torch.Tensor, ...] = ()
    total: torch.Tensor | None = None


Make = Callable[[CastInto], Produced]
"""Computes a tensor and casts it as the argument says."""


class Normalization(Protocol):
    """Hold the parameters of a norm; FSDP replaces them while a layer runs."""

    weight: nn.Parameter
    bias: nn.Parameter | None  # None for RMSNorm
    epsilon: float

    def gain(self) -> torch.Tensor:
        """Return what normalized values are multiplied by; its gradient is the weight's too."""


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

    def cast(
        self, x_TX: torch.Tensor, into: CastInto, addend_TX: torch.Tensor | None = None
    ) -> Produced:
        """Compute the norm of each row of `x_TX` (+ addend) and cast it as `into` says.

        With an addend `Produced.total` is the sum.
        """
        from megafp8.fp8.kernels.triton_norm import norm_cast

        done = norm_cast(
            x_TX,
            self.norm.gain().detach(),
            None if self.norm.bias is None else self.norm.bias.detach(),
            self.norm.epsilon,
            into.quant_scale,
            into.fmt,
            out_dtype=self.dtype,
            addend_MD=addend_TX,
            amax=into.amax,
            with_rows=into.with_rows,
            with_columns=into.with_columns,
            with_plain=into.with_plain,
        )
        mean, rstd = done.statistics
        kept = (rstd,) if mean is None else (rstd, mean)
        return Produced(done.payload, done.payload_t, done.plain, None, kept, done.total)

    def backward(
        self,
        grad_TI: torch.Tensor,
        x_TX: torch.Tensor,
        kept: tuple[torch.Tensor, ...],
        addend_TX: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradient of x (+ addend), and parts of those of `params`, [P, ...] each.

        The gradient of x [T, X] has its dtype. The parts are FP32, and their sum over P is the
        gradient. `kept` are the tensors of `Produced.kept`.
        """
        from megafp8.fp8.kernels.triton_norm import NormStatistics, norm_backward

        statistics = NormStatistics(kept[1] if len(kept) > 1 else None, kept[0])
        gain = self.norm.gain().detach()
        grads = norm_backward(grad_TI, x_TX, gain, statistics, addend_TX)
        return tuple(x for x in grads if x is not None)


@dataclass(frozen=True)
class ActivationProducer:
    """Compute an activation without parameters, and cast the result."""

    kind: Kind
    params: tuple[torch.Tensor, ...] = ()

    def cast(
        self, x_TX: torch.Tensor, into: CastInto, addend_TX: torch.Tensor | None = None
    ) -> Produced:
        """Compute the activation of `x_TX` and cast it as `into` says."""
        assert addend_TX is None, "a norm adds"
        return self._cast(x_TX, None, into)

    def cast_grad(self, grad_TI: torch.Tensor, x_TX: torch.Tensor, into: CastInto) -> Produced:
        """Compute the gradient of x, [T, X], and cast it as `into` says."""
        return self._cast(x_TX, grad_TI, into)

    def backward(
        self,
        grad_TI: torch.Tensor,
        x_TX: torch.Tensor,
        kept: tuple[torch.Tensor, ...],
        addend_TX: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradient of x, [T, X]."""
        assert addend_TX is None, "a norm adds"
        grad_x = self._cast(x_TX, grad_TI, nothing_but_plain(x_TX.device)).plain
        assert grad_x is not None
        return (grad_x,)

    def _cast(self, x_TX: torch.Tensor, grad_TI: torch.Tensor | None, into: CastInto) -> Produced:
        from fp8_numerics.kernels.triton_cast import cast

        return cast_by(cast, x_TX, into, activation=self.kind, grad_MN=grad_TI)


Producer = NormProducer | ActivationProducer
"""Computes the input of a linear and casts it in one pass, in Triton and without autograd."""


def cast_by(kernel: Callable[..., Any], source: object, into: CastInto, **options: Any) -> Produced:
    """Call one of the kernels that return `CastResults`, so that it casts as `into` says.

    `source` is what the kernel reads first, and `options` are its other keyword arguments.
    """
    results = kernel(
        source,
        into.quant_scale,
        into.fmt,
        amax=into.amax,
        with_rows=into.with_rows,
        with_columns=into.with_columns,
        with_sums=into.with_sums,
        with_plain=into.with_plain,
        **options,
    )
    return Produced(results.payload, results.payload_t, results.plain, results.partial_sums)


def nothing_but_plain(device: torch.device) -> CastInto:
    """Return the cast that writes a tensor in high precision alone."""
    unread = torch.empty((), device=device)  # with no payload to write, no kernel uses the scale
    return CastInto(unread, E4M3, None, with_rows=False, with_columns=False, with_plain=True)
