"""Define the operations that stand for a linear and for dropout's mask in a compiled layer.

Casts and products are kernels already, so a graph needs to know only what goes in, what comes out
and what is kept for backward. The rest of a linear (amaxes, the weight that is quantized once a
step, observers, counts, the sink, what crosses ranks) happens when the operation runs, with the
live objects: the linear itself is an input of the graph, and so is a dropout, whose key changes
each microbatch. So layers share their graphs, and no scale and no microbatch's number is compiled
in. The module is imported only if torch can take objects as inputs of a graph.
"""

# T tokens (batch x sequence)   I in features   O out features

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from fp8_numerics.cast import Fp8Tensor
from megafp8.fp8 import linear as eager
from megafp8.fp8.linear import Linear
from megafp8.fp8.quantizer import Operand, SavedForm
from megafp8.models.parts import Dropout
from megafp8.ops.torch_private import GraphInput

MakeFp8 = Callable[..., Fp8Tensor]


@dataclass
class LiveLinear:
    """Hold the linear that the operations run, and how its input is kept for backward."""

    linear: Linear
    saved: SavedForm
    remakes: dict[torch.Size, tuple[MakeFp8, torch.Size]] = field(default_factory=dict)
    """What makes an FP8 tensor of a kept payload again, and the shape of its scales, by the
    payload's shape in memory."""


@dataclass(frozen=True)
class TracedLinear:
    """Represent a linear in a graph; all fields but `handle` are equal where layers are alike.

    `handle` carries a `LiveLinear`. `saved` says how the input is kept for backward; `tokens_out`
    gives the number of the output's tokens from the input's.
    """

    handle: GraphInput
    out_features: int
    saved: SavedForm
    tokens_out: Callable[[int], int]

    def __call__(self, input_TI: torch.Tensor) -> torch.Tensor:
        """Return the linear's output: [T, I] -> [T', O]."""
        tokens, features = input_TI.shape
        output_TO: torch.Tensor = torch.ops.megafp8.linear(
            input_TI,
            self.handle,
            [self.tokens_out(tokens), self.out_features],
            self.saved.payload_shape(tokens, features),
            self.saved.dtype,
            self.saved.scale_shape(tokens, features),
            self.saved.scale_dtype,
        )[0]
        return output_TO


def trace_linear(linear: Linear) -> None:
    """Make `linear` one operation of the graph where a layer is compiled.

    The linear must be on its device, which decides how casts lay out their bytes.
    """
    saved = SavedForm() if linear.quantizer is None else linear.quantizer.saved_form()
    handle = GraphInput(LiveLinear(linear, saved))
    linear.compiled = TracedLinear(handle, linear.weight.shape[0], saved, linear.comm.tokens_out)


@torch.library.custom_op("megafp8::linear", mutates_args=())
def _linear(
    input_TI: torch.Tensor,
    handle: GraphInput,
    output_shape: list[int],
    payload_shape: list[int],
    payload_dtype: torch.dtype,
    scale_shape: list[int],
    scale_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, the kept input's payload as it lies in memory, and its scales.

    Scales of two levels are flat, with the factor of the whole tensor at the end. Packed scales are
    bytes, and so is the factor then.
    """
    live: LiveLinear = handle.value
    linear = live.linear
    params, work = (linear.weight, linear.bias), input_TI.dtype
    output_TO, kept, _ = eager.linear_forward(linear, params, input_TI, work, input_TI.shape[0])
    if live.saved.scales is None:  # the input itself is kept, which an operation may not return
        nothing = input_TI.new_empty(0, dtype=payload_dtype)
        return output_TO, nothing, input_TI.new_empty(0, dtype=scale_dtype)
    assert isinstance(kept, Fp8Tensor), "evaluation is not compiled"
    payload = kept.payload.t() if live.saved.is_transposed else kept.payload
    scale = kept.dequant_scale
    live.remakes[payload.shape] = kept.factory(), scale.shape
    scale = scale.view(torch.uint8) if kept.is_packed else scale
    if kept.outer is not None:  # one output for the scales of both levels
        scale = torch.cat((scale.flatten(), kept.outer.view(1).view(scale.dtype)))
    elif scale.dim() == 0:  # a table's row, whose memory the graph must not use for other tensors
        scale = scale.clone()
    return output_TO, payload, scale.contiguous()


@_linear.register_fake
def _(
    input_TI: torch.Tensor,
    handle: GraphInput,
    output_shape: list[int],
    payload_shape: list[int],
    payload_dtype: torch.dtype,
    scale_shape: list[int],
    scale_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        input_TI.new_empty(output_shape),
        input_TI.new_empty(payload_shape, dtype=payload_dtype),
        input_TI.new_empty(scale_shape, dtype=scale_dtype),
    )


@torch.library.custom_op("megafp8::linear_backward", mutates_args=())
def _linear_backward(
    grad_output_TO: torch.Tensor,
    kept: torch.Tensor,
    scale: torch.Tensor,
    handle: GraphInput,
    input_shape: list[int],
) -> torch.Tensor:
    """Return the input's gradient; the gradients of weight and bias go to the sink.

    `kept` is the payload of the input, or the input itself.
    """
    live: LiveLinear = handle.value
    linear, input = live.linear, _operand(kept, scale, live)
    # The weight is the one that forward read: weights change only between steps.
    form, dtype = linear.weight_form, grad_output_TO.dtype
    weight = form.operands(linear.weight, dtype, input_shape[0]).along_first
    grad_input, *of_params = eager.linear_backward(
        linear, (linear.weight, linear.bias), grad_output_TO, input, weight
    )
    assert grad_input is not None
    assert of_params == [None, None], "the sink keeps gradients itself"
    return grad_input


@_linear_backward.register_fake
def _(
    grad_output_TO: torch.Tensor,
    kept: torch.Tensor,
    scale: torch.Tensor,
    handle: GraphInput,
    input_shape: list[int],
) -> torch.Tensor:
    return grad_output_TO.new_empty(input_shape)


def _operand(kept: torch.Tensor, scale: torch.Tensor, live: LiveLinear) -> Operand:
    """Return the input that the forward pass kept, made of what the operation returned."""
    if live.saved.scales is None:
        return kept
    remake, shape = live.remakes[kept.shape]
    payload = kept.t() if live.saved.is_transposed else kept
    tensors = [scale]
    if live.saved.scales.has_outer:
        size = 4 // scale.element_size()
        tensors = [scale[:-size].view(shape), scale[-size:].view(torch.float32)[0]]
    if live.saved.is_packed:
        nv = payload.dtype == torch.float4_e2m1fn_x2
        tensors[0] = tensors[0].view(torch.float8_e4m3fn if nv else torch.float8_e8m0fnu)
    return remake(payload, *tensors)


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
    return grad_input_TI, None, None, None, None, None, None


_linear.register_autograd(_backward, setup_context=_keep)
# These operations also change state, so a graph must not drop them.
torch.fx.node.has_side_effect(torch.ops.megafp8.linear.default)
torch.fx.node.has_side_effect(torch.ops.megafp8.linear_backward.default)


def trace_mask(dropout: Dropout) -> None:
    """Make the mask of `dropout` one operation of the graph: the one that its `forward` draws."""
    handle = GraphInput(dropout)
    dropout.traced_mask = lambda x: torch.ops.megafp8.dropout_mask(x, handle)


@torch.library.custom_op("megafp8::dropout_mask", mutates_args=())
def _dropout_mask(x: torch.Tensor, handle: GraphInput) -> torch.Tensor:
    """Return a boolean tensor of the shape of `x`: True where an element is kept."""
    dropout: Dropout = handle.value
    with dropout.streams.keyed(dropout.site, x.device, sharded=dropout.sharded):
        return F.dropout(torch.ones_like(x), dropout.p) != 0


@_dropout_mask.register_fake
def _(x: torch.Tensor, handle: GraphInput) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.bool)
