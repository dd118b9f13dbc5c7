"""Run a linear: three GEMMs, in FP8 or not, on one rank or as one tensor-parallel rank's part.

output      = input       @ weight.T      (+ bias)
grad_input  = grad_output @ weight
grad_weight = grad_output.T @ input
"""

# T tokens (batch x sequence)   I in features (I/tp row-parallel)   O out (O/tp column-parallel)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from megafp8.fp8.engine import EMULATED
from megafp8.fp8.gemm import GemmCounter, gemm
from megafp8.fp8.grad_sink import ComputeGrad, GradSink, GradSum
from megafp8.fp8.quantizer import LinearQuantizer
from megafp8.fp8.quantizers.base import Operand, Operands, Role, column_sum
from megafp8.fp8.scaling import Pending, ReduceMax
from megafp8.fp8.tensor import Fp8Tensor
from megafp8.fp8.weights import weight_form
from megafp8.specs.traits import GemmName


class LinearComm(Protocol):
    """Exchange the tensors that cross ranks around the three GEMMs of one linear.

    T is the number of tokens of this rank's input, I the in features and O the out features of its
    part of the weight. Each method says when it is called. No method records anything for autograd,
    since the linear has its own backward pass. `NoComm` is the implementation for one rank;
    `parallel.tensor` and `parallel.sequence` have those for several.
    """

    @property
    def sums_output(self) -> bool:
        """Whether the ranks' outputs are summed, because each rank has a part of I.

        The bias is then added once, after `reduce_output`.
        """
        ...

    def tokens_out(self, tokens_in: int) -> int:
        """Return the number of the output's tokens, given `tokens_in` of this rank's input."""
        ...

    def gather_input(self, input_TI: Operand) -> Operand:
        """Return the tokens of all ranks, given this rank's input [T, I].

        The input is in FP8 if it is quantized, and crosses ranks so. The method is called before
        the product for `output`, and again in the backward pass before the product for
        `grad_weight`, so that only this rank's tokens are kept in between. The result is [ranks *
        T, I], or the argument itself where every rank has all tokens.
        """
        ...

    def reduce_output(self, output_TO: torch.Tensor) -> torch.Tensor:
        """Return the linear's output, given the product's result on this rank, before the bias.

        It is called after the product for `output`, and sums over ranks where `sums_output` is set.
        The result has `tokens_out` tokens, and O features.
        """
        ...

    def gather_grad_output(self, grad_output_TO: Operand) -> Operand:
        """Return the output gradient of all ranks' tokens, given this rank's.

        It is called in the backward pass, before the products for `grad_input` and `grad_weight`:
        once if one quantization serves both products, otherwise once for each. The gradient crosses
        ranks in FP8 if it is quantized. The result is the argument itself where every rank has all
        tokens.
        """
        ...

    def reduce_grad_input(self, grad_input_TI: torch.Tensor) -> Pending:
        """Start to sum the input gradient over ranks; `wait` of the result returns the sum, [T, I].

        It is called after the product for `grad_input`, whose result has the tokens that
        `gather_input` returned. The linear computes the weight gradient before it waits, so that
        reduction and product overlap.
        """
        ...

    def reduce_max(self, role: Role) -> ReduceMax | None:
        """Return a function that takes the maximum over the ranks that hold parts of a tensor.

        The function's argument, which it overwrites, is the amax of this rank's part of the tensor
        `role`, 0-d FP32. None says that this rank holds the whole tensor. `reduce_max` is called
        when the linear is built, once for each tensor with current scaling.
        """
        ...


class NoComm:
    """Exchange nothing: the linear lives on one rank."""

    sums_output = False

    def tokens_out(self, tokens_in: int) -> int:
        """Return `tokens_in`: the output has the input's tokens."""
        return tokens_in

    def gather_input(self, input_TI: Operand) -> Operand:
        """Return the input itself."""
        return input_TI

    def reduce_output(self, output_TO: torch.Tensor) -> torch.Tensor:
        """Return the output itself."""
        return output_TO

    def gather_grad_output(self, grad_output_TO: Operand) -> Operand:
        """Return the output gradient itself."""
        return grad_output_TO

    def reduce_grad_input(self, grad_input_TI: torch.Tensor) -> Pending:
        """Return the input gradient as a reduction that is over already."""
        return Pending(grad_input_TI)

    def reduce_max(self, role: Role) -> ReduceMax | None:
        """Return None: this rank holds every tensor whole."""
        return None


class Linear(nn.Module):
    """Compute a linear with an [O, I] weight and, unless it is None, an [O] bias.

    `quantizer` None computes in the weight's own dtype. `stored_compute_dtype` asks for a weight
    that is kept in FP8 alone (`fp8_params`) and is the dtype in which the linear computes: the
    parameter is then the payload, which the weight's form (`StoredFp8`) fills from the master
    weight. The gradients of such a weight go into the sink, never to `.grad`. `is_gathered` says
    that FSDP gathers the weight for each use.
    """

    def __init__(
        self,
        weight_OI: nn.Parameter,
        bias_O: nn.Parameter | None,
        *,
        name: str,
        quantizer: LinearQuantizer | None,
        comm: LinearComm,
        sink: GradSink,
        counter: GemmCounter,
        stored_compute_dtype: torch.dtype | None = None,
        is_gathered: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight_OI, bias_O
        self.name = name
        self.quantizer, self.comm, self.sink, self.counter = quantizer, comm, sink, counter
        self.weight_form = weight_form(
            weight_OI,
            quantizer,
            stored_compute_dtype=stored_compute_dtype,
            is_gathered=is_gathered,
        )
        # The operation that stands for this linear in a compiled layer: [T, I] -> [T', O].
        self.compiled: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the output, [B, ..., I] -> [B, ..., O], in the input's dtype.

        Where `comm` gathers tokens or scatters them, the first dim is that many times longer or
        shorter.
        """
        flat_TI = input.flatten(0, -2)
        if self.compiled is not None and torch.compiler.is_compiling():
            output_TO = self.compiled(flat_TI)
        else:
            output_TO = _LinearFunction.apply(  # type: ignore[no-untyped-call]
                flat_TI, self.weight, self.bias, self, torch.is_grad_enabled()
            )
        return output_TO.view(-1, *input.shape[1:-1], output_TO.shape[-1])

    def input_operands(self, input_TI: torch.Tensor, *, with_first: bool) -> Operands:
        """Return the input [T, I] as the products for `output` and `grad_weight` read it.

        `with_first` False says that no backward pass will follow.
        """
        if self.quantizer is None:
            return Operands(input_TI, input_TI)
        return self.quantizer.operands("input", input_TI, with_first=with_first)

    def grad_output_operands(self, grad_output_TO: torch.Tensor) -> GradOutput:
        """Return the output gradient [T, O] as the products read it, and its sums over tokens."""
        has_bias = self.bias is not None
        if self.quantizer is None:
            both = Operands(grad_output_TO, grad_output_TO)
            sums_PO = column_sum(grad_output_TO) if has_bias else None
            return GradOutput(both, sums_PO, grad_output_TO.dtype)
        found = self.quantizer.operands_and_sums("grad_output", grad_output_TO, with_sum=has_bias)
        return GradOutput(*found, grad_output_TO.dtype)

    def weight_operands(self, work: torch.dtype, num_tokens: int = 0) -> Operands:
        """Return the weight as the products of a microbatch of `num_tokens` read it."""
        return self.weight_form.operands(self.weight, work, num_tokens)

    def product(
        self,
        place: GemmName,
        a: Operand,
        b: Operand,
        work: torch.dtype,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        bias: torch.Tensor | None = None,
        into: GradSum | None = None,
    ) -> torch.Tensor:
        """Run one of the linear's three GEMMs on this device's engine.

        Arguments and result are those of `gemm.gemm`.
        """
        engine, use_fast_accum = EMULATED, False
        if self.quantizer is not None:
            engine, use_fast_accum = self.quantizer.products(place)
        return gemm(
            a,
            b,
            work=work,
            counter=self.counter,
            place=place,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            bias=bias,
            engine=engine,
            use_fast_accum=use_fast_accum,
            into=into,
        )


class GradOutput(NamedTuple):
    """Hold the gradient of a linear's output [T, O], as the products read it.

    `sums` [P, O] are its FP32 sums over P groups of tokens, which add up to the bias's gradient.
    None stands for sums that no bias needs. `work` is the gradient's own dtype.
    """

    operands: Operands
    sums: torch.Tensor | None
    work: torch.dtype


@dataclass(frozen=True)
class Forward:
    """Hold the result of a forward pass: the output, and the operands that the backward pass reads.

    `weight` is None if the weight is gathered again in the backward pass.
    """

    output: torch.Tensor
    input: Operand
    weight: Operand | None


def forward(layer: Linear, input_TI: torch.Tensor, *, for_backward: bool) -> Forward:
    """Run a linear's forward pass, [T, I] -> [T', O], without autograd.

    It casts, computes the product, and exchanges what crosses ranks; T' is `tokens_out` of T.
    `for_backward` says that a backward pass follows.
    """
    input = layer.input_operands(input_TI, with_first=for_backward)
    return forward_of(layer, input, input_TI.dtype, input_TI.shape[0])


def forward_of(layer: Linear, input: Operands, work: torch.dtype, num_tokens: int) -> Forward:
    """Run `forward` with an input of `num_tokens` tokens that is quantized already.

    `work` is the dtype of the result.
    """
    weight = layer.weight_operands(work, num_tokens)
    bias_O, sums_output = layer.bias, layer.comm.sums_output
    output_TO = layer.product(
        "output",
        layer.comm.gather_input(input.along_last),
        weight.along_last,
        work,
        transpose_b=True,
        bias=None if sums_output else bias_O,
    )
    output_TO = layer.comm.reduce_output(output_TO)
    if bias_O is not None and sums_output:
        output_TO = output_TO + bias_O
    is_saved = layer.weight_form.is_saved_for_backward
    return Forward(output_TO, input.along_first, weight.along_first if is_saved else None)


class Gradients(NamedTuple):
    """Hold the gradients that a backward pass returns to autograd.

    A gradient is None if autograd does not need it or if the sink has taken it.
    """

    input: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def backward(
    layer: Linear,
    grad_output_TO: torch.Tensor,
    input: Operand,
    weight: Operand | None,
    *,
    needs_input: bool = True,
) -> Gradients:
    """Run a linear's backward pass, given the gradient of its output and the operands of `Forward`.

    `needs_input` False leaves out the input gradient. The weight gradient is computed when the sink
    asks for it.
    """
    grad_output = layer.grad_output_operands(grad_output_TO)
    return backward_of(layer, grad_output, input, weight, needs_input=needs_input)


def backward_of(
    layer: Linear,
    grad_output: GradOutput,
    input: Operand,
    weight: Operand | None,
    *,
    needs_input: bool = True,
) -> Gradients:
    """Run `backward` with an output gradient that is quantized already."""
    operands, sums_PO, work = grad_output
    along_last, along_first = _gathered(layer.comm, operands)
    pending = None
    if needs_input:
        if weight is None:
            weight = layer.weight_operands(work).along_first
        grad_input_TI = layer.product("grad_input", along_last, weight, work)
        pending = layer.comm.reduce_grad_input(grad_input_TI)

    def compute_grad_weight(into: GradSum | None, /) -> torch.Tensor:
        tokens = layer.comm.gather_input(input)
        return layer.product("grad_weight", along_first, tokens, work, transpose_a=True, into=into)

    grad_weight_OI = layer.sink.add(layer.weight, compute_grad_weight)
    grad_bias = None
    if layer.bias is not None:
        assert sums_PO is not None, "the bias needs them"
        grad_bias = layer.sink.add(layer.bias, summing(sums_PO))
    return Gradients(None if pending is None else pending.wait(), grad_weight_OI, grad_bias)


def summing(parts_PN: torch.Tensor) -> ComputeGrad:
    """Return what computes the gradient of a bias or a norm's weight, [N], from its FP32 parts."""

    def compute(into: GradSum | None, /) -> torch.Tensor:
        if parts_PN.shape[0] == 1:
            return parts_PN[0]
        if into is not None and into.is_first and into.total.dtype == parts_PN.dtype:
            return torch.sum(parts_PN, 0, out=into.total)
        return parts_PN.sum(0)

    return compute


class _LinearFunction(torch.autograd.Function):
    """Run a linear under autograd.

    `weight_OI` and `bias_O` are the layer's own; they are arguments so that autograd sees them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_TI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        layer: Linear,
        is_grad_enabled: bool,
    ) -> torch.Tensor:
        done = forward(layer, input_TI, for_backward=is_grad_enabled)
        if is_grad_enabled:
            _save(ctx, done.input)
        ctx.layer, ctx.weight = layer, done.weight
        return done.output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_input = ctx.needs_input_grad[0]
        input = _operand(ctx, ctx.saved_tensors)
        found = backward(ctx.layer, grads[0], input, ctx.weight, needs_input=needs_input)
        return *found, None, None


def _gathered(comm: LinearComm, grad_output: Operands) -> Operands:
    """Gather the output gradient of all ranks, once if one quantization serves both products."""
    along_last = comm.gather_grad_output(grad_output.along_last)
    if grad_output.along_first is grad_output.along_last:
        return Operands(along_last, along_last)
    return Operands(along_last, comm.gather_grad_output(grad_output.along_first))


def _save(ctx: Any, input: Operand) -> None:
    """Save tensors through autograd, so that its hooks (offloading, recomputation) see them."""
    if isinstance(input, Fp8Tensor):
        ctx.remake = input.factory()
        ctx.save_for_backward(*input.tensors)
    else:
        ctx.remake = None
        ctx.save_for_backward(input)


def _operand(ctx: Any, tensors: Sequence[torch.Tensor]) -> Operand:
    """Return the operand that `_save` saved."""
    operand: Operand = tensors[0] if ctx.remake is None else ctx.remake(*tensors)
    return operand
