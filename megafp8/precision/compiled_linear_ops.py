"""Define the operations that `compiled_linear.TracedLinear` calls.

The module is imported only where torch has what the operations need.
"""

# T tokens (batch x sequence)   I in features   O out features

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from megafp8.precision import linear as eager
from megafp8.precision.compiled_linear import TracedLinear
from megafp8.precision.linear import Linear
from megafp8.precision.recipes.base import Operand, SavedForm
from megafp8.precision.tensor import Fp8Tensor

MakeFp8 = Callable[[torch.Tensor, torch.Tensor], Fp8Tensor]


class Handle(OpaqueBase):
    """Make a linear an input of a graph."""

    def __init__(self, linear: Linear, saved: SavedForm) -> None:
        self.linear, self.saved = linear, saved
        self.remakes: dict[torch.Size, MakeFp8] = {}  # the key is a kept payload's shape in memory


register_opaque_type(Handle, typ="reference")


def trace_linear(linear: Linear) -> None:
    """Make `linear` one operation of the graph where a layer is compiled.

    The linear must be on its device, which decides how casts lay out their bytes.
    """
    saved = SavedForm() if linear.quantizer is None else linear.quantizer.saved_form()
    handle = Handle(linear, saved)
    linear.compiled = TracedLinear(handle, linear.weight.shape[0], saved, linear.comm.tokens_out)


@torch.library.custom_op("megafp8::linear", mutates_args=())
def _linear(
    input_TI: torch.Tensor,
    handle: Handle,
    output_shape: list[int],
    payload_shape: list[int],
    payload_dtype: torch.dtype,
    scale_shape: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, the kept input's payload as it lies in memory, and its scales."""
    done = eager.forward(handle.linear, input_TI, for_backward=True)
    kept = done.input
    if handle.saved.scales is None:  # the input itself is kept, which an operation may not return
        nothing = input_TI.new_empty(0, dtype=payload_dtype)
        return done.output, nothing, input_TI.new_empty(0, dtype=torch.float32)
    assert isinstance(kept, Fp8Tensor), "evaluation is not compiled"
    payload = kept.payload.t() if handle.saved.is_transposed else kept.payload
    handle.remakes[payload.shape] = kept.factory()
    return done.output, payload, kept.dequant_scale.contiguous()


@_linear.register_fake
def _(
    input_TI: torch.Tensor,
    handle: Handle,
    output_shape: list[int],
    payload_shape: list[int],
    payload_dtype: torch.dtype,
    scale_shape: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        input_TI.new_empty(output_shape),
        input_TI.new_empty(payload_shape, dtype=payload_dtype),
        input_TI.new_empty(scale_shape, dtype=torch.float32),
    )


@torch.library.custom_op("megafp8::linear_backward", mutates_args=())
def _linear_backward(
    grad_output_TO: torch.Tensor,
    kept: torch.Tensor,
    scale: torch.Tensor,
    handle: Handle,
    input_shape: list[int],
) -> torch.Tensor:
    """Return the input's gradient; the gradients of weight and bias go to the sink.

    `kept` is the payload of the input, or the input itself.
    """
    linear, input = handle.linear, _operand(kept, scale, handle)
    # The weight is the one that forward read: weights change only between steps.
    weight = linear.weight_operands(grad_output_TO.dtype, input_shape[0]).along_first
    found = eager.backward(linear, grad_output_TO, input, weight)
    assert found.input is not None
    assert found.weight is None and found.bias is None, "the sink keeps gradients itself"
    return found.input


@_linear_backward.register_fake
def _(
    grad_output_TO: torch.Tensor,
    kept: torch.Tensor,
    scale: torch.Tensor,
    handle: Handle,
    input_shape: list[int],
) -> torch.Tensor:
    return grad_output_TO.new_empty(input_shape)


def _operand(kept: torch.Tensor, scale: torch.Tensor, handle: Handle) -> Operand:
    if handle.saved.scales is None:
        return kept
    remake = handle.remakes[kept.shape]
    return remake(kept.t() if handle.saved.is_transposed else kept, scale)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    input_TI, ctx.handle = inputs[:2]
    _, payload, scale = output
    ctx.input_shape = list(input_TI.shape)
    is_plain = inputs[3] == [0]  # `payload_shape`
    ctx.save_for_backward(input_TI if is_plain else payload, scale)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_output_TO: torch.Tensor, *_: None) -> tuple[Any, ...]:
    kept, scale = ctx.saved_tensors
    grad_input_TI = torch.ops.megafp8.linear_backward(
        grad_output_TO, kept, scale, ctx.handle, ctx.input_shape
    )
    return grad_input_TI, None, None, None, None, None


_linear.register_autograd(_backward, setup_context=_keep)
# These operations also change state, so a graph must not drop them.
torch.fx.node.has_side_effect(torch.ops.megafp8.linear.default)
torch.fx.node.has_side_effect(torch.ops.megafp8.linear_backward.default)
