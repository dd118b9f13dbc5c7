"""The one linear: three GEMMs, in FP8 or not, alone or as one tensor-parallel rank's part.

output      = input       @ weight.T      (+ bias)
grad_input  = grad_output @ weight
grad_weight = grad_output.T @ input
"""

# T tokens (batch x sequence)   I in features (I/tp row-parallel)   O out (O/tp column-parallel)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from megafp8.precision.gemm import GemmCounter, Operand, gemm
from megafp8.precision.grad_sink import GradSink
from megafp8.precision.scaling import ScalingState, Slot
from megafp8.precision.tensor import Fp8Tensor


class PendingReduction(Protocol):
    """A reduction that may still be under way."""

    def wait(self) -> torch.Tensor: ...


class LinearComm(Protocol):
    """What crosses ranks around the GEMMs of one linear.

    `sums_output`: each rank has a part of the sum, and the bias is added once, after it.
    """

    @property
    def sums_output(self) -> bool: ...

    def reduce_output(self, output_TO: torch.Tensor) -> torch.Tensor: ...

    def reduce_grad_input(self, grad_input_TI: torch.Tensor) -> PendingReduction: ...


class _Done(NamedTuple):
    value: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.value


class NoComm:
    """A linear that lives on one rank."""

    sums_output = False

    def reduce_output(self, output_TO: torch.Tensor) -> torch.Tensor:
        return output_TO

    def reduce_grad_input(self, grad_input_TI: torch.Tensor) -> PendingReduction:
        return _Done(grad_input_TI)


@dataclass(frozen=True)
class LinearScaling:
    """The three scaled tensors of one FP8 linear."""

    state: ScalingState
    input: Slot
    weight: Slot
    grad_output: Slot

    @classmethod
    def register(cls, state: ScalingState, name: str) -> LinearScaling:
        return cls(
            state,
            state.forward.register(f"{name}.input"),
            state.forward.register(f"{name}.weight"),
            state.backward.register(f"{name}.grad_output"),
        )

    def quantize(self, x: torch.Tensor, slot: Slot) -> Fp8Tensor:
        amax = slot.amax if self.state.recording else None
        return Fp8Tensor.quantize(x, slot.quant_scale, slot.fmt, amax=amax)

    def quantize_and_sum(self, x_MN: torch.Tensor, slot: Slot) -> tuple[Fp8Tensor, torch.Tensor]:
        amax = slot.amax if self.state.recording else None
        return Fp8Tensor.quantize_and_sum(x_MN, slot.quant_scale, slot.fmt, amax=amax)


class Linear(nn.Module):
    """`scaling` None computes in the weight's own dtype."""

    def __init__(
        self,
        weight_OI: nn.Parameter,
        bias_O: nn.Parameter | None,
        *,
        name: str,
        scaling: LinearScaling | None,
        comm: LinearComm,
        sink: GradSink,
        counter: GemmCounter,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight_OI, bias_O
        self.name = name
        self.scaling, self.comm, self.sink, self.counter = scaling, comm, sink, counter
        self._weight_fp8: Fp8Tensor | None = None
        self._weight_version = -1

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., O], in the input's dtype."""
        flat_TI = input.flatten(0, -2)
        output_TO: torch.Tensor = _LinearFunction.apply(  # type: ignore[no-untyped-call]
            flat_TI, self.weight, self.bias, self
        )
        return output_TO.view(*input.shape[:-1], -1)

    def input_operand(self, input_TI: torch.Tensor) -> Operand:
        if self.scaling is None:
            return input_TI
        return self.scaling.quantize(input_TI, self.scaling.input)

    def grad_output_operand(self, grad_output_TO: torch.Tensor) -> tuple[Operand, torch.Tensor]:
        """The output gradient as the GEMMs read it, and its sum over tokens (the bias's), FP32."""
        if self.scaling is None:
            return grad_output_TO, grad_output_TO.sum(0, dtype=torch.float32)
        return self.scaling.quantize_and_sum(grad_output_TO, self.scaling.grad_output)

    def weight_operand(self) -> Operand:
        """The weight as the GEMMs read it; in FP8 it is quantized once a step and kept."""
        if self.scaling is None:
            return self.weight
        if self._weight_fp8 is None or self._weight_version != self.scaling.state.weights_version:
            self._weight_fp8 = self.scaling.quantize(self.weight.detach(), self.scaling.weight)
            self._weight_version = self.scaling.state.weights_version
        return self._weight_fp8


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_TI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        layer: Linear,
    ) -> torch.Tensor:
        input, weight = layer.input_operand(input_TI), layer.weight_operand()
        sums_output = layer.comm.sums_output
        output_TO = gemm(
            input,
            weight,
            work=input_TI.dtype,
            counter=layer.counter,
            place="output",
            transpose_b=True,
            bias=None if sums_output else bias_O,
        )
        output_TO = layer.comm.reduce_output(output_TO)
        if bias_O is not None and sums_output:
            output_TO = output_TO + bias_O
        if isinstance(input, Fp8Tensor):
            ctx.fmt = input.fmt
            ctx.save_for_backward(input.payload, input.dequant_scale)
        else:
            ctx.save_for_backward(input)
        ctx.layer, ctx.weight = layer, weight
        return output_TO

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_output_TO,) = grads
        layer: Linear = ctx.layer
        saved = ctx.saved_tensors
        input: Operand = Fp8Tensor(saved[0], saved[1], ctx.fmt) if len(saved) == 2 else saved[0]
        work = grad_output_TO.dtype
        grad_output, grad_bias_O = layer.grad_output_operand(grad_output_TO)
        pending = None
        if ctx.needs_input_grad[0]:
            grad_input_TI = gemm(
                grad_output, ctx.weight, work=work, counter=layer.counter, place="grad_input"
            )
            pending = layer.comm.reduce_grad_input(grad_input_TI)

        def compute_grad_weight() -> torch.Tensor:
            return gemm(
                grad_output,
                input,
                work=work,
                counter=layer.counter,
                place="grad_weight",
                transpose_a=True,
            )

        grad_weight_OI = layer.sink.add(layer.weight, compute_grad_weight)
        bias = layer.bias
        grad_bias = None if bias is None else layer.sink.add(bias, lambda: grad_bias_O)
        return None if pending is None else pending.wait(), grad_weight_OI, grad_bias, None
