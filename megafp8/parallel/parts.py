"""Define the parts of a GPT with our own linears: FP8 or not, on one rank or tensor-parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from fp8_numerics.dtypes import DTYPE_NAMES
from fp8_numerics.formats import FORMATS
from fp8_numerics.gemm import GemmCounter, gemm
from fp8_numerics.kernels.triton_launch import runs_triton
from fp8_numerics.philox import Rows
from megafp8.fp8.build import linear_quantizer, reserve_rows
from megafp8.fp8.draws import Part, TokenOrder, columns_of
from megafp8.fp8.grad_sink import GradSink, GradSum, look_up
from megafp8.fp8.heads import Heads, split_heads
from megafp8.fp8.linear import Linear, LinearComm, linears_of_rows
from megafp8.fp8.quantizer import Role
from megafp8.fp8.scaling import ScalingState
from megafp8.models.attention import QKV, HeadSizes
from megafp8.models.init import fp8_parameter, pieces_of
from megafp8.models.loss import HeadLoss
from megafp8.models.parts import Elementwise, Parts, both_contexts
from megafp8.models.positions import Rotary
from megafp8.models.random import RandomStreams
from megafp8.models.router import Sharing
from megafp8.parallel.collectives import Axis
from megafp8.parallel.context import RingAttentionCore
from megafp8.parallel.experts import AllToAll
from megafp8.parallel.sequence import (
    OwnTokens,
    SequenceColumnParallel,
    SequenceRowParallel,
    WholeSequence,
    own_shard,
)
from megafp8.parallel.tensor import ColumnParallel, RowParallel
from megafp8.parallel.vocab import (
    VocabParallelHeadLoss,
    loss_by_triton,
    vocab_parallel_look_up,
)
from megafp8.specs import GPTSpec
from megafp8.specs.geometry import Piece
from megafp8.specs.layer import LayerLinear


@dataclass(frozen=True, kw_only=True)
class PartsArgs:
    """Hold what the parts of every backend are made from.

    `half_weights` puts embeddings, norms and the residual stream into `dtype`, which is that of the
    linears. `gathers_weights` says that FSDP shards the weights.
    """

    spec: GPTSpec
    dtype: torch.dtype
    seed: int
    streams: RandomStreams
    tp: Axis
    sink: GradSink
    counter: GemmCounter
    half_weights: bool = True
    sequence_parallel: bool = False
    gathers_weights: bool = False
    cp: Axis | None = None
    ep: Axis | None = None


class NativeParts(Parts):
    """Make QKV, projection, FC1 and FC2 of `fp8.linear`, and shard over tensor parallelism.

    The vocabulary of embedding and head is sharded over the tensor-parallel ranks too. Methods that
    are not described here are described in `Parts`; their shapes are those of this rank.
    """

    def __init__(self, parts_args: PartsArgs, scaling: ScalingState | None = None) -> None:
        """Make the parts; `scaling` is None without FP8, or where another backend runs it."""
        super().__init__(parts_args.spec, parts_args.dtype, parts_args.seed, parts_args.streams)
        self.split_heads = _split_by_triton
        if not parts_args.half_weights:
            self.whole_dtype = torch.promote_types(parts_args.dtype, torch.float32)
            self.residual_dtype = self.whole_dtype
        self.scaling, self.tp, self.sink, self.counter = (
            scaling,
            parts_args.tp,
            parts_args.sink,
            parts_args.counter,
        )
        self.num_parts, self.part = parts_args.tp.size, parts_args.tp.rank
        self.sequence_parallel = parts_args.sequence_parallel and parts_args.tp.size > 1
        self.gathers_weights = parts_args.gathers_weights
        if parts_args.cp is not None and parts_args.cp.size > 1:
            self.make_core = partial(RingAttentionCore, cp=parts_args.cp)
            self.num_sharing = parts_args.cp.size
        axes = [parts_args.tp] if self.sequence_parallel else []
        axes += [] if parts_args.cp is None else [parts_args.cp]
        self.sharing = Sharing(prod(axis.size for axis in axes), partial(_sum_over, axes))
        if parts_args.ep is not None and parts_args.ep.size > 1:
            self.exchange, self.num_expert_parts = AllToAll(parts_args.ep), parts_args.ep.size

    def look_up(self, tokens_BS: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        if self.tp.size > 1:
            return vocab_parallel_look_up(
                tokens_BS, weight_VD, self.sink, self.tp, scatter=self.sequence_parallel
            )
        return look_up(tokens_BS, weight_VD, self.sink)

    def linear(self, linear: LayerLinear) -> nn.Module:
        """Return a column-parallel linear (QKV, FC1) or a row-parallel one (projection, FC2).

        The linear of an expert is whole, for this rank's tokens.
        """
        comms: tuple[Callable[[Axis], LinearComm], ...] = (RowParallel, ColumnParallel)
        if self.sequence_parallel:
            comms = (SequenceRowParallel, SequenceColumnParallel)
        comm = LinearComm() if self.tp.size == 1 else comms[linear.is_column](self.tp)
        listed = self.listed[f"{linear.name}.weight"]
        if is_whole := self.tp.size > 1 and listed.divided is None:
            comm = OwnTokens(self.tp)
        weight = self.parameter(f"{linear.name}.weight")
        bias = self.parameter_if_listed(f"{linear.name}.bias")
        made = self._linear(linear.name, weight, bias, comm)
        assert listed.linear is not None
        made.visits = listed.linear.visits / (self.tp.size if is_whole else 1)
        if listed.linear.is_expert:  # it has the tokens of all ranks that divide the experts
            made.visits *= self.num_expert_parts
        return made

    def _linear(
        self, name: str, weight: nn.Parameter, bias: nn.Parameter | None, comm: LinearComm
    ) -> Linear:
        """Return a linear with a weight [O, I], in the precision of its name."""
        scaling, pieces = self.scaling, pieces_of(weight)
        quantizer = new_quantizer = None
        if scaling is not None:
            reductions, part = (comm.reduce_max, comm.reduce_columns), partial(_part, pieces, comm)
            new_quantizer = partial(linear_quantizer, scaling, name, *reductions, part)
            quantizer = new_quantizer()
        in_fp8 = scaling is not None and scaling.recipe.params_in_fp8 and quantizer is not None
        if scaling is not None and in_fp8:
            weight = fp8_parameter(weight, FORMATS[scaling.recipe.forward_format].dtype)
        return Linear(
            weight,
            bias,
            name=name,
            quantizer=quantizer,
            comm=comm,
            sink=self.sink,
            counter=self.counter,
            stored_compute_dtype=self.dtype if in_fp8 else None,
            is_gathered=self.gathers_weights,
            new_quantizer=new_quantizer,
        )

    def linear_elsewhere(self, linear: LayerLinear) -> nn.Module:
        return LinearElsewhere(linear.name, self.scaling)

    def of_experts(
        self,
        linears: Sequence[nn.Module],
        x_NI: torch.Tensor,
        sizes: Sequence[int],
        places: Rows | None,
    ) -> torch.Tensor:
        rows: list[Rows | None] = [None] * len(sizes)
        if places is not None:
            parts = (each.split(list(sizes)) for each in places)
            rows = [Rows(*each) for each in zip(*parts, strict=True)]
        own = [linear for linear in linears if isinstance(linear, Linear)]
        return linears_of_rows(own, x_NI, sizes, rows)

    def places_of(
        self, linears: Sequence[str], tokens_R: torch.Tensor, num_tokens: int
    ) -> Rows | None:
        if self.scaling is None or not self.scaling.recipe.draws_in(linears):
            return None
        order = TokenOrder()
        if self.sequence_parallel:
            order = TokenOrder("own", self.tp.rank, self.tp.size)
        return self.scaling.draws.rows_of(num_tokens, order, tokens_R.device).take(tokens_R)

    def recompute_contexts(
        self,
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return two contexts, for a forward pass and for its recomputation; see `Parts`.

        A recomputation also casts with the scales of the first pass and records no amax.
        """
        first, again = super().recompute_contexts()
        if self.scaling is None:
            return first, again
        return first, both_contexts(again, self.scaling.recomputation())

    def attention_core(self, name: str, index: int) -> nn.Module:
        core = super().attention_core(name, index)
        return WholeSequence(core, self.tp) if self.sequence_parallel else core

    def dropout(self, p: float, site: str, *, sharded: bool = False) -> Elementwise:
        """Return dropout; with sequence parallelism every dropout's tensor is sharded."""
        return super().dropout(p, site, sharded=sharded or self.sequence_parallel)

    def sequence_length(self, x_BSD: torch.Tensor) -> int:
        return x_BSD.shape[1] * (self.tp.size if self.sequence_parallel else 1)

    def own_sequence(self, x_BS: torch.Tensor) -> torch.Tensor:
        return own_shard(x_BS, self.tp) if self.sequence_parallel else x_BS

    def head_loss(self) -> HeadLoss:
        def matmul(
            a: torch.Tensor,
            b: torch.Tensor,
            *,
            place: str,
            transpose_a: bool = False,
            transpose_b: bool = False,
            total: torch.Tensor | None = None,
            is_first: bool = False,
        ) -> torch.Tensor:
            return gemm(
                a,
                # Weights may be in FP32 while the model computes in BF16 (megatron_amp_O2=False).
                b if b.dtype == a.dtype else b.to(a.dtype),
                work=a.dtype,
                counter=self.counter,
                place=place,
                transpose_a=transpose_a,
                transpose_b=transpose_b,
                into=None if total is None else GradSum(total, is_first),
            )

        def add_grad_weight(weight: nn.Parameter, grad: torch.Tensor) -> torch.Tensor | None:
            added = self.sink.add(weight, lambda _: grad)
            return None if added is None else added.to(weight.dtype)

        if self.tp.size > 1:
            return VocabParallelHeadLoss(
                self.tp, matmul, add_grad_weight, gather=self.sequence_parallel
            )
        return HeadLoss(matmul, add_grad_weight, partial(loss_by_triton, tp=self.tp))

    def count_attention_flops(self, flops: int) -> None:
        self.counter.add(DTYPE_NAMES[self.dtype], "attention", flops)

    def count_router_flops(self, flops: int) -> None:
        dtype = torch.promote_types(self.dtype, torch.float32)
        self.counter.add(DTYPE_NAMES[dtype], "router", flops)


class LinearElsewhere(nn.Module):
    """Stand for the linear of an expert that another rank has.

    All ranks of a stage reduce their scale tables by place, so this one has the linear's rows too.
    """

    def __init__(self, name: str, scaling: ScalingState | None) -> None:
        super().__init__()
        self.name, self.scaling = name, scaling
        self.take_recipe()

    def take_recipe(self) -> None:
        """Register the rows of the present recipe."""
        if self.scaling is not None:
            reserve_rows(self.scaling, self.name)


def _sum_over(axes: Sequence[Axis], x: torch.Tensor) -> torch.Tensor:
    """Return the sum of x over the ranks of `axes`, in place."""
    for axis in axes:
        x = axis.all_reduce_sum(x)
    return x


def heads_of(batch: int, sizes: HeadSizes, turn: Rotary | None) -> Heads:
    """Return how a kernel splits the output of a QKV linear of `batch` sequences."""
    angles = None if turn is None else (turn.cos, turn.sin)
    return Heads(batch, sizes.num_heads, sizes.num_groups, sizes.size, angles)


def _split_by_triton(qkv_BSF: torch.Tensor, sizes: HeadSizes, turn: Rotary) -> QKV | None:
    """Return the heads, turned by one kernel each way, or None where no kernel runs.

    The kernel computes in FP32, so that FP64 is left to torch.
    """
    if qkv_BSF.dtype == torch.float64 or not runs_triton(qkv_BSF.device):
        return None
    if torch.compiler.is_compiling():
        return None
    return QKV(*split_heads(qkv_BSF, heads_of(qkv_BSF.shape[0], sizes, turn)))


def linears_of(model: nn.Module) -> list[Linear]:
    """Return our own linears of the model, in the model's order; other backends' are left out."""
    return [module for module in model.modules() if isinstance(module, Linear)]


def _part(weights: Sequence[Piece], comm: LinearComm, role: Role) -> Part:
    """Return which part of a linear's tensor this rank has, given its pieces of the weight."""
    rows, begin = list[range](), 0
    for piece in weights:
        first, size = begin + piece.offset[0], piece.local_box.shape[0]
        rows.append(range(first, first + size))
        begin += piece.global_shape[0]
    column, width = weights[0].offset[1], weights[0].local_box.shape[1]
    outputs, inputs = columns_of(rows), (range(column, column + width),)
    if role == "weight":
        return Part(outputs, inputs)
    return Part(None, inputs if role == "input" else outputs, comm.token_order(role))
