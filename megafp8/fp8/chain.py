"""Run norms, activations and the FP8 linears after them as one autograd function.

A chain is norm - linear, activation - linear, or norm - linear - activation - linear. Each norm or
activation casts its own result, which the linear after it reads. In the backward pass the
activation casts the gradient that the linear before it reads, and so do the heads (`heads.Heads`)
after QKV. The norm also adds what is added to the residual stream before it, and its
backward pass adds the gradient that reaches the stream elsewhere. So no tensor between the links
is written only to be cast, and no addition is a pass of its own.

It needs the scales before the tensors (`delayed`) and Triton; `can_run` says whether it runs.
"""

# T tokens   X features of the chain's input   I in features   O out features of a linear

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8_numerics.cast import Fp8Tensor
from megafp8.fp8.fused import ActivationProducer, Producer
from megafp8.fp8.heads import Heads
from megafp8.fp8.linear import GradOutput, Linear, linear_backward, linear_forward, sum_rows
from megafp8.fp8.quantizer import Operand
from megafp8.ops import torch_private


class Link(NamedTuple):
    """Name a norm or an activation, and the linear that reads its result."""

    producer: Producer
    linear: Linear


def can_run(links: Sequence[Link], consumer: Heads | None = None) -> bool:
    """Whether every linear's input is cast by the norm or activation before it.

    With a consumer, also whether it can cast the gradient of the last linear's output. A chain does
    not call its linears as modules, so that none may have hooks, which a search for a NaN sets.
    """
    if any(torch_private.has_forward_hooks(link.linear) for link in links):
        return False
    with_first = torch.is_grad_enabled()
    quantizers = [link.linear.quantizer for link in links]
    if consumer is not None:
        last = quantizers[-1]
        if not with_first or last is None or not last.fuses("grad_output"):
            return False
    return all(q is not None and q.fuses("input", with_first=with_first) for q in quantizers)


def run_chain(
    links: Sequence[Link],
    x_TX: torch.Tensor,
    dtype: torch.dtype,
    *,
    addend_TX: torch.Tensor | None = None,
    consumer: Heads | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run a chain in which `can_run`; the linears compute in `dtype`.

    The chain reads x + addend. An addend needs a chain that begins with a norm. The first result is
    this sum [T, X]; after it come the output [T, O], or what the consumer made of it.
    """
    params: list[torch.Tensor | None] = []
    for producer, linear in links:
        params += [linear.weight, linear.bias, *producer.params]
    results: tuple[torch.Tensor, ...] = _Chain.apply(  # type: ignore[no-untyped-call]
        x_TX.contiguous(),
        None if addend_TX is None else addend_TX.contiguous(),
        tuple(links),
        consumer,
        dtype,
        torch.is_grad_enabled(),
        *params,
    )
    return results


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TX: torch.Tensor,
        addend_TX: torch.Tensor | None,
        links: tuple[Link, ...],
        consumer: Heads | None,
        dtype: torch.dtype,
        is_grad_enabled: bool,
        *params: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        stream_TX, value_TX, addend = x_TX, x_TX, addend_TX
        saved: list[torch.Tensor] = []
        ctx.weights, ctx.remakes, ctx.counts = [], [], []
        for producer, linear in links:
            assert linear.quantizer is not None
            make = partial(producer.cast, value_TX, addend_TX=addend)
            input, produced = linear.quantizer.produce("input", make, with_first=is_grad_enabled)
            if produced.total is not None:
                stream_TX = value_TX = produced.total
            params = linear.weight, linear.bias
            output_TO, x_fp8, weight = linear_forward(linear, params, input, dtype, x_TX.shape[0])
            if is_grad_enabled:
                assert isinstance(x_fp8, Fp8Tensor)
                ctx.remakes.append(x_fp8.factory())
                ctx.weights.append(weight)
                ctx.counts.append(3 + len(produced.kept))
                saved += [x_fp8.payload, x_fp8.dequant_scale, value_TX, *produced.kept]
            value_TX, addend = output_TO, None
        if is_grad_enabled:
            ctx.save_for_backward(*saved)
        ctx.links, ctx.consumer, ctx.dtype = links, consumer, dtype
        ctx.addend_dtype = None if addend_TX is None else addend_TX.dtype
        ctx.set_materialize_grads(False)
        parts = (value_TX,) if consumer is None else consumer.parts(value_TX)
        return stream_TX, *parts

    @staticmethod
    def backward(
        ctx: Any, grad_stream: torch.Tensor | None, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        tensors = list(ctx.saved_tensors)  # recomputation lets them be read once
        of_params: list[torch.Tensor | None] = []
        grad = _grad_of_output(ctx, grads)
        for index in reversed(range(len(ctx.links))):
            producer, linear = ctx.links[index]
            payload, scale, x_TX, *kept = tensors[-ctx.counts[index] :]
            del tensors[-ctx.counts[index] :]
            input: Operand = ctx.remakes[index](payload, scale)
            params = linear.weight, linear.bias
            grad_input, *of_linear = linear_backward(
                linear, params, grad, input, ctx.weights[index]
            )
            assert grad_input is not None
            grad_TI, of_producer = grad_input.contiguous(), []
            if index > 0:
                before = ctx.links[index - 1].linear
                grad = _through(producer, grad_TI, x_TX, tuple(kept), before, ctx.dtype)
            else:
                addend = None if grad_stream is None else grad_stream.contiguous()
                fuses = not isinstance(producer, ActivationProducer)
                grad_x, *parts = producer.backward(
                    grad_TI, x_TX, tuple(kept), addend if fuses else None
                )
                if addend is not None and not fuses:
                    grad_x = grad_x + addend
                for param, of_param in zip(producer.params, parts, strict=True):
                    of_producer.append(linear.sink.add(param, partial(sum_rows, of_param)))
            of_params = [*of_linear, *of_producer, *of_params]
        of_addend = None if ctx.addend_dtype is None else grad_x.to(ctx.addend_dtype)
        return grad_x, of_addend, None, None, None, None, *of_params


def _grad_of_output(ctx: Any, grads: Sequence[torch.Tensor]) -> torch.Tensor | GradOutput:
    """Return the gradient of the last linear's output, cast if the consumer casts it."""
    linear: Linear = ctx.links[-1].linear
    if ctx.consumer is None:
        return grads[0]
    assert linear.quantizer is not None
    with_sum = linear.bias is not None
    operands, produced = linear.quantizer.produce(
        "grad_output", lambda into: ctx.consumer.cast_grads(grads, into), with_sum=with_sum
    )
    return GradOutput(operands, produced.partial_sums, ctx.dtype)


def _through(
    producer: Producer,
    grad_TI: torch.Tensor,
    x_TX: torch.Tensor,
    kept: tuple[torch.Tensor, ...],
    linear: Linear,
    dtype: torch.dtype,
) -> torch.Tensor | GradOutput:
    """Return the gradient that an activation's backward pass gives to the linear before it."""
    assert linear.quantizer is not None
    if not isinstance(producer, ActivationProducer) or not linear.quantizer.fuses("grad_output"):
        return producer.backward(grad_TI, x_TX, kept)[0]
    operands, produced = linear.quantizer.produce(
        "grad_output",
        lambda into: producer.cast_grad(grad_TI, x_TX, into),
        with_sum=linear.bias is not None,
    )
    return GradOutput(operands, produced.partial_sums, dtype)
