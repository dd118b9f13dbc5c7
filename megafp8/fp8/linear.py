"""Run a linear: three GEMMs, in FP8 or not, on one rank or as one tensor-parallel rank's part.

output      = input       @ weight.T      (+ bias)
grad_input  = grad_output @ weight
grad_weight = grad_output.T @ input

`linear_forward` and `linear_backward` below are all of it, in the order in which things happen:
what is cast, the products, and what crosses ranks. The linears of the trainer (`Linear`) and those
of `fp8.convert` run them.
"""

# T tokens (batch x sequence)   I in features (I/tp row-parallel)   O out (O/tp column-parallel)

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from fp8_numerics.cast import Fp8Tensor, column_sums
from fp8_numerics.gemm import EMULATED, GemmCounter, gemm
from fp8_numerics.philox import Rows
from megafp8.fp8.draws import TokenOrder
from megafp8.fp8.grad_sink import DeferringSink, GradSink, GradSum
from megafp8.fp8.quantizer import LinearQuantizer, Operand, Operands, Role
from megafp8.fp8.scaling import Pending, ReduceMax
from megafp8.fp8.weights import WeightForm, weight_form
from megafp8.ops import torch_private
from megafp8.specs.traits import GemmName

Params = tuple[nn.Parameter, nn.Parameter | None]
"""A linear's weight [O, I] and bias [O] as its module has them in a forward pass."""


class LinearComm:
    """Exchange the tensors that cross ranks around the three GEMMs of one linear.

    T is the number of tokens of this rank's input, I the in features and O the out features of its
    part of the weight. Each method says when it is called. No method records anything for autograd,
    since the linear has its own backward pass. This class exchanges nothing, as one rank does;
    `parallel.tensor` and `parallel.sequence` have those for several ranks.
    """

    sums_output = False
    """Whether the ranks' outputs are summed, because each rank has a part of I.

    The bias is then added once, after `reduce_output`.
    """

    def tokens_out(self, tokens_in: int) -> int:
        """Return the number of the output's tokens, given `tokens_in` of this rank's input."""
        return tokens_in

    def gather_input(self, input_TI: Operand) -> Operand:
        """Return the tokens of all ranks, given this rank's input [T, I].

        The input is in FP8 if it is quantized, and crosses ranks so. The method is called before
        the product for `output`, and again in the backward pass before the product for
        `grad_weight`, so that only this rank's tokens are kept in between. The result is [ranks *
        T, I], or the argument itself where every rank has all tokens.
        """
        return input_TI

    def reduce_output(self, output_TO: torch.Tensor) -> torch.Tensor:
        """Return the linear's output, given the product's result on this rank, before the bias.

        It is called after the product for `output`, and sums over ranks where `sums_output` is set.
        The result has `tokens_out` tokens, and O features.
        """
        return output_TO

    def gather_grad_output(self, grad_output_TO: Operand) -> Operand:
        """Return the output gradient of all ranks' tokens, given this rank's.

        It is called in the backward pass, before the products for `grad_input` and `grad_weight`:
        once if one quantization serves both products, otherwise once for each. The gradient crosses
        ranks in FP8 if it is quantized. The result is the argument itself where every rank has all
        tokens.
        """
        return grad_output_TO

    def reduce_grad_input(self, grad_input_TI: torch.Tensor) -> Pending:
        """Start to sum the input gradient over ranks; `wait` of the result returns the sum, [T, I].

        It is called after the product for `grad_input`, whose result has the tokens that
        `gather_input` returned. The linear computes the weight gradient before it waits, so that
        reduction and product overlap.
        """
        return Pending(grad_input_TI)

    def reduce_max(self, role: Role) -> ReduceMax | None:
        """Return a function that takes the maximum over the ranks that hold parts of a tensor.

        The function's argument, which it overwrites, is the amax of this rank's part of the tensor
        `role`, 0-d FP32. None says that this rank holds the whole tensor. `reduce_max` is called
        when the linear is built, once for each tensor with current scaling.
        """
        return None

    def reduce_columns(self, role: Role) -> ReduceMax | None:
        """Return a function that takes the maximum over ranks that divide a tensor's tokens.

        The function's argument, which it overwrites, is the amaxes of this rank's columns, FP32 [1,
        features]. None says that this rank has all tokens of its columns. It is called when the
        linear is built.
        """
        return None

    def token_order(self, role: Role) -> TokenOrder:
        """Return which tokens this rank quantizes of `input` or of `grad_output`.

        Random bytes are drawn by it. It is called when the linear is built.
        """
        return TokenOrder()


class Linear(nn.Module):
    """Compute a linear with an [O, I] weight and, unless it is None, an [O] bias.

    `quantizer` None computes in the weight's own dtype. `stored_compute_dtype` asks for a weight
    that is kept in FP8 alone (`fp8_params`) and is the dtype in which the linear computes: the
    parameter is then the payload, which the weight's form (`StoredFp8`) fills from the master
    weight. The gradients of such a weight go into the sink, never to `.grad`. `is_gathered` says
    that FSDP gathers the weight for each use. `new_quantizer` makes a quantizer by the recipe that
    the scaling state has then, for `take_recipe`.
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
        new_quantizer: Callable[[], LinearQuantizer | None] | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight_OI, bias_O
        self.name, self._is_gathered, self._new_quantizer = name, is_gathered, new_quantizer
        self.quantizer, self.comm, self.sink, self.counter = quantizer, comm, sink, counter
        self.weight_form = weight_form(
            weight_OI,
            quantizer,
            stored_compute_dtype=stored_compute_dtype,
            is_gathered=is_gathered,
        )
        self.visits = Fraction(1)  # the part of a microbatch's tokens that it has on this rank
        # The operation that stands for this linear in a compiled layer: [T, I] -> [T', O].
        self.compiled: Callable[[torch.Tensor], torch.Tensor] | None = None

    def take_recipe(self) -> None:
        """Compute by the present recipe of the scaling state, which has changed.

        Nothing that was quantized before is kept. Weights that are kept in FP8 alone are refused.
        """
        assert self._new_quantizer is not None, "this linear never had a recipe"
        self.quantizer = self._new_quantizer()
        self.weight_form = weight_form(self.weight, self.quantizer, is_gathered=self._is_gathered)

    def forward(self, input: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
        """Return the output, [B, ..., I] -> [B, ..., O], in the input's dtype.

        Where `comm` gathers tokens or scatters them, the first dim is that many times longer or
        shorter. `rows` are the places of the input's rows, by which stochastic rounding draws, so
        that a token draws alike wherever its row is; None stands for those of all tokens. There
        may be no row: the weight is cast all the same, and its gradient is zero.
        """
        flat_TI = input.flatten(0, -2)
        if self.compiled is not None and rows is None and torch.compiler.is_compiling():
            output_TO = self.compiled(flat_TI)
        else:
            params = torch_private.parameters_of(self)
            output_TO = DirectLinearFunction.apply(
                flat_TI, params["weight"], params.get("bias"), self, torch.is_grad_enabled(), rows
            )
        return output_TO.view(-1, *input.shape[1:-1], output_TO.shape[-1])


class LinearWork(Protocol):
    """Hold all that both passes of a linear read, but for its parameters."""

    quantizer: LinearQuantizer | None  # None computes in the weight's own dtype
    weight_form: WeightForm
    counter: GemmCounter

    @property
    def comm(self) -> LinearComm:
        """Return what exchanges tensors with other ranks."""

    @property
    def sink(self) -> GradSink:
        """Return what takes the gradients of weight and bias."""


class GradOutput(NamedTuple):
    """Hold the gradient of a linear's output [T, O], as the products read it.

    `sums` [P, O] are its FP32 sums over P groups of tokens, which add up to the bias's gradient.
    None stands for sums that no bias needs. `work` is the gradient's own dtype.
    """

    operands: Operands
    sums: torch.Tensor | None
    work: torch.dtype


def linear_forward(
    layer: LinearWork,
    params: Params,
    input: torch.Tensor | Operands,
    work: torch.dtype,
    num_tokens: int,
    *,
    for_backward: bool = True,
    rows: Rows | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Operand, Operand | None]:
    """Run a linear's forward pass, [T, I] -> [T', O], without autograd; T' is `tokens_out` of T.

    `input` has `num_tokens` tokens, and may be quantized already, by the norm or activation that
    computed it. `work` is the dtype of the result. `for_backward` says that a backward pass
    follows. `rows` are the places of the tokens (`Linear.forward`). The output is `out` if the
    product could write it there (`gemm.gemm`). After the output come the operands that the backward
    pass reads: the input's, and the weight's, or None if the weight is gathered again in the
    backward pass.
    """
    quantizer, comm, (weight_OI, bias_O) = layer.quantizer, layer.comm, params
    # The input becomes FP8 here, in E4M3: of the two formats it has the more bits of mantissa, and
    # its range is enough for activations and weights under a scale (arXiv 2209.05433). Both
    # operands are made now, from one tensor: the backward pass keeps the one for `grad_weight`,
    # so it needs half of BF16's memory, and no tensor in high precision stays.
    if isinstance(input, Operands):
        input_last, input_first = input
    elif quantizer is None:
        input_last = input_first = input
    else:
        (input_last, input_first), _ = quantizer.operands(
            "input", input, with_first=for_backward, rows=rows
        )
    # The weight becomes FP8 in E4M3 too, in the first microbatch of a step. It changes once a step,
    # so its FP8 copy serves the other microbatches; one that FSDP gathers is cast for each use.
    weight_last, weight_first = layer.weight_form.operands(weight_OI, work, num_tokens)
    # The cast comes before the gather, so that ranks send one byte for each number.
    input_TI = comm.gather_input(input_last)
    # Ranks with a part of I each add up outputs: a bias before that would be added tp times.
    bias_in_product = None if comm.sums_output else bias_O
    output_TO = product(
        layer,
        "output",
        input_TI,
        weight_last,
        work,
        transpose_b=True,
        bias=bias_in_product,
        out=out,
    )
    output_TO = comm.reduce_output(output_TO)
    if bias_O is not None and comm.sums_output:
        output_TO = output_TO + bias_O
    kept_weight = weight_first if layer.weight_form.is_saved_for_backward else None
    return output_TO, input_first, kept_weight


def linear_backward(
    layer: LinearWork,
    params: Params,
    grad_output: torch.Tensor | GradOutput,
    input: Operand,
    weight: Operand | None,
    *,
    needs_input: bool = True,
    rows: Rows | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Run a linear's backward pass, given the gradient of its output and the operands of `forward`.

    `grad_output` [T', O] may be quantized already, by the backward pass that computed it.
    `needs_input` False leaves out the input gradient, which is `out` if the product could write it
    there. `rows` are those of the forward pass. The weight gradient is computed when the sink asks
    for it. The results are the gradients of input, weight and bias for autograd; one is None if
    autograd does not need it or if the sink has taken it.
    """
    comm, sink, (weight_OI, bias_O) = layer.comm, layer.sink, params
    # The output gradient becomes FP8 here, in E5M2 where a tensor has one scale: the gradients of
    # one tensor spread over more powers of two than E4M3 has (`fp8_e4m3` and recipes with a scale
    # for each row or block take E4M3). The cast also adds up the columns, since it reads the tensor
    # anyway: they are the bias's gradient, and are sums of the tensor before it is rounded.
    if isinstance(grad_output, GradOutput):
        (grad_last, grad_first), sums_PO, work = grad_output
    else:
        work, has_bias = grad_output.dtype, bias_O is not None
        if layer.quantizer is None:
            grad_last = grad_first = grad_output
            sums_PO = None
            if work == torch.float32 and grad_output.shape[0] > 1:
                sums_PO = grad_output  # added up where the bias's gradient lies, not copied there
            elif has_bias:
                sums_PO = column_sums(grad_output)
        else:
            (grad_last, grad_first), sums_PO = layer.quantizer.operands(
                "grad_output", grad_output, with_sum=has_bias, rows=rows
            )
    along_last = comm.gather_grad_output(grad_last)
    along_first = along_last  # gathered once where one quantization serves both products
    if grad_first is not grad_last:
        along_first = comm.gather_grad_output(grad_first)
    pending = None
    if needs_input:
        if weight is None:  # FSDP has gathered it again
            weight = layer.weight_form.operands(weight_OI, work, 0).along_first
        grad_input = product(layer, "grad_input", along_last, weight, work, out=out)
        pending = comm.reduce_grad_input(grad_input)

    def compute_grad_weight(into: GradSum | None, /) -> torch.Tensor:
        # Tokens are gathered again, so that each rank keeps only its own in between.
        tokens = comm.gather_input(input)
        return product(layer, "grad_weight", along_first, tokens, work, transpose_a=True, into=into)

    # Its values by blocks have been read, and those of the other cast are as large.
    if isinstance(along_last, Fp8Tensor) and along_last.block is not None:
        grad_last = along_last = along_last.without_grid()
    if isinstance(sink, DeferringSink) and isinstance(along_first, Fp8Tensor) and along_first.block:
        along_first = along_first.without_grid()  # the product may come much later
    # While ranks sum `grad_input`, this rank computes the product for `grad_weight`.
    grad_weight_OI = sink.add(weight_OI, compute_grad_weight)
    grad_bias = None
    if bias_O is not None:
        assert sums_PO is not None, "the bias needs them"
        grad_bias = sink.add(bias_O, partial(sum_rows, sums_PO))
    return None if pending is None else pending.wait(), grad_weight_OI, grad_bias


def product(
    layer: LinearWork,
    place: GemmName,
    a: Operand,
    b: Operand,
    work: torch.dtype,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: torch.Tensor | None = None,
    into: GradSum | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one of a linear's three GEMMs on this device's engine, as `gemm.gemm` does."""
    quantizer = layer.quantizer
    return gemm(
        a,
        b,
        work=work,
        counter=layer.counter,
        place=place,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        bias=bias,
        engine=EMULATED if quantizer is None else quantizer.state.engine,
        use_fast_accum=quantizer is not None and place in quantizer.fast_accumulation,
        into=into,
        out=out,
    )


def sum_rows(parts_PN: torch.Tensor, into: GradSum | None) -> torch.Tensor:
    """Return the gradient of a bias or a norm's weight, [N], from its FP32 parts."""
    if parts_PN.shape[0] == 1:
        return parts_PN[0]
    if into is not None and into.is_first and into.total.dtype == parts_PN.dtype:
        return torch.sum(parts_PN, 0, out=into.total)
    return parts_PN.sum(0)


class LinearFunction(torch.autograd.Function):
    """Run a linear under autograd.

    `weight_OI` and `bias_O` are the layer's own; they are arguments so that autograd sees them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_TI: torch.Tensor,
        weight_OI: nn.Parameter,
        bias_O: nn.Parameter | None,
        layer: LinearWork,
        is_grad_enabled: bool,
        rows: Rows | None = None,
    ) -> torch.Tensor:
        params, work = (weight_OI, bias_O), input_TI.dtype
        output_TO, saved, weight = linear_forward(
            layer, params, input_TI, work, len(input_TI), for_backward=is_grad_enabled, rows=rows
        )
        if is_grad_enabled:
            # autograd keeps the tensors, so that its hooks (offloading, recomputation) see them
            ctx.save_for_backward(*(saved.tensors if isinstance(saved, Fp8Tensor) else (saved,)))
            ctx.remake = saved.factory() if isinstance(saved, Fp8Tensor) else None
            ctx.layer, ctx.params, ctx.weight, ctx.rows = layer, params, weight, rows
        return output_TO

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        input: Operand = saved[0] if ctx.remake is None else ctx.remake(*saved)
        arguments = ctx.layer, ctx.params, grads[0], input, ctx.weight
        grads_of_inputs = linear_backward(
            *arguments, needs_input=ctx.needs_input_grad[0], rows=ctx.rows
        )
        return *grads_of_inputs, None, None, None


class DirectLinearFunction(torch_private.DirectFunction, LinearFunction):
    """Run a linear of the trainer, which compiles its layers without tracing this function."""


def linears_of_rows(
    layers: Sequence[Linear],
    input_TI: torch.Tensor,
    sizes: Sequence[int],
    rows: Sequence[Rows | None],
) -> torch.Tensor:
    """Return what linears without biases make of their rows, one after another, [T, I] -> [T, O].

    Linear i has `sizes[i]` of the rows, with the places `rows[i]` (`Linear.forward`). The bits are
    those of calls of the linears, which autograd would see one by one. Hooks of the linears have
    such calls.
    """
    if any(map(torch_private.has_forward_hooks, layers)):
        each = zip(layers, input_TI.split(tuple(sizes)), rows, strict=True)
        return torch.cat([layer(x_NI, rows_N) for layer, x_NI, rows_N in each])
    weights = [torch_private.parameters_of(layer)["weight"] for layer in layers]
    output_TO: torch.Tensor = _LinearsFunction.apply(
        input_TI, layers, tuple(sizes), rows, torch.is_grad_enabled(), *weights
    )
    return output_TO


class _LinearsFunction(torch_private.DirectFunction, torch.autograd.Function):
    """Run several linears, each of its own rows, as one function of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        input_TI: torch.Tensor,
        layers: Sequence[Linear],
        sizes: tuple[int, ...],
        rows: Sequence[Rows | None],
        is_grad_enabled: bool,
        *weights: nn.Parameter,
    ) -> torch.Tensor:
        work, kept, tensors = input_TI.dtype, [], list[torch.Tensor]()
        # Each product writes its rows where they stay, or is copied there.
        output_TO = input_TI.new_empty(len(input_TI), weights[0].shape[0])
        parts = (input_TI.split(sizes), output_TO.split(sizes))
        each = zip(layers, *parts, rows, weights, strict=True)
        for layer, x_NI, out_NO, rows_N, weight_OI in each:
            output_NO, saved, weight = linear_forward(
                layer,
                (weight_OI, None),
                x_NI,
                work,
                len(x_NI),
                for_backward=is_grad_enabled,
                rows=rows_N,
                out=out_NO,
            )
            if output_NO is not out_NO:
                out_NO.copy_(output_NO)
            own = saved.tensors if isinstance(saved, Fp8Tensor) else (saved,)
            remake = saved.factory() if isinstance(saved, Fp8Tensor) else None
            tensors += own
            kept.append((len(own), remake, weight))
        if is_grad_enabled:
            ctx.save_for_backward(*tensors)
            ctx.layers, ctx.sizes, ctx.rows, ctx.weights = layers, sizes, rows, weights
            ctx.kept = kept
        return output_TO

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors, needs_input = iter(ctx.saved_tensors), ctx.needs_input_grad[0]
        grad_TO, sizes, grads_of_weights = grads[0], ctx.sizes, []
        grad_input_TI = grad_TO.new_empty(len(grad_TO), ctx.weights[0].shape[1])
        parts = grad_TO.split(sizes), grad_input_TI.split(sizes)
        each = zip(ctx.layers, *parts, ctx.rows, ctx.weights, ctx.kept, strict=True)
        for layer, grad_NO, out_NI, rows_N, weight_OI, (number, remake, weight) in each:
            saved = list(islice(tensors, number))
            input: Operand = saved[0] if remake is None else remake(*saved)
            grad_input_NI, grad_weight_OI, _ = linear_backward(
                layer,
                (weight_OI, None),
                grad_NO,
                input,
                weight,
                needs_input=needs_input,
                rows=rows_N,
                out=out_NI,
            )
            if grad_input_NI is not None and grad_input_NI is not out_NI:
                out_NI.copy_(grad_input_NI)
            grads_of_weights.append(grad_weight_OI)
        return grad_input_TI if needs_input else None, None, None, None, None, *grads_of_weights
