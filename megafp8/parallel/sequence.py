"""Implement sequence parallelism (Korthikanti et al., arXiv 2205.05198).

Between the linears each tensor-parallel rank holds a part of the sequence: norms, dropout and the
residual stream are [B, S/tp, D] on every rank. A column-parallel linear gathers the parts, as FP8
bytes if it reads FP8. Scales of rows and blocks are gathered with their bytes; a scale of more
tokens than a rank has is agreed on before the cast. Only the rank's own part is kept, and backward
gathers it again. A row-parallel linear sums its outputs, and
each rank keeps its part of the sum.

Linears read tokens rank by rank, [tp B, S/tp, ...]. Only attention needs whole sequences in order.
"""

# B batch  R ranks  S sequence  D model width  F features  T tokens (of one rank or all)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from fp8_numerics.cast import Fp8Tensor
from megafp8.fp8.draws import TokenOrder
from megafp8.fp8.linear import LinearComm
from megafp8.fp8.quantizer import Operand, Role
from megafp8.fp8.scaling import Pending, ReduceMax
from megafp8.models.attention import AttentionContext
from megafp8.parallel.collectives import Axis
from megafp8.parallel.tensor import ColumnParallel, RowParallel

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""What a GPU's thread copies bytes by, the longest first."""


@dataclass(frozen=True)
class SequenceColumnParallel(ColumnParallel):
    """Gather a linear's input; reduce-scatter the input gradient.

    Its methods are those of `LinearComm`. T tokens of one rank become tp T tokens of all ranks.
    """

    def tokens_out(self, tokens_in: int) -> int:
        return tokens_in * self.tp.size

    def gather_input(self, input_TI: Operand) -> Operand:
        return gather_tokens(input_TI, self.tp)

    def reduce_max(self, role: Role) -> ReduceMax | None:
        """Return the maximum over the ranks, because each rank holds only a part of every
        tensor.
        """
        return self.tp.all_reduce_max

    def reduce_columns(self, role: Role) -> ReduceMax | None:
        """Return the maximum over the ranks for inputs, of which each rank has its own tokens."""
        return self.tp.all_reduce_max if role == "input" else None

    def token_order(self, role: Role) -> TokenOrder:
        kind: Literal["own", "by_rank"] = "own" if role == "input" else "by_rank"
        return TokenOrder(kind, self.tp.rank, self.tp.size)

    def reduce_grad_input(self, grad_input_TI: torch.Tensor) -> Pending:
        """Start the reduce-scatter of the input gradient: [tp T, I] -> [T, I]."""
        return self.tp.start_reduce_scatter_sum(grad_input_TI)


@dataclass(frozen=True)
class SequenceRowParallel(RowParallel):
    """Reduce-scatter a linear's output; gather the output gradient.

    Its methods are those of `LinearComm`.
    """

    def tokens_out(self, tokens_in: int) -> int:
        return tokens_in // self.tp.size

    def gather_grad_output(self, grad_output_TO: Operand) -> Operand:
        return gather_tokens(grad_output_TO, self.tp)

    def reduce_max(self, role: Role) -> ReduceMax | None:
        """Return the maximum over the ranks, because each rank holds only a part of every
        tensor.
        """
        return self.tp.all_reduce_max

    def reduce_columns(self, role: Role) -> ReduceMax | None:
        """Return the maximum over the ranks for output gradients, of which each has its tokens."""
        return self.tp.all_reduce_max if role == "grad_output" else None

    def token_order(self, role: Role) -> TokenOrder:
        kind: Literal["own", "by_rank"] = "own" if role == "grad_output" else "by_rank"
        return TokenOrder(kind, self.tp.rank, self.tp.size)

    def reduce_output(self, output_TO: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the outputs' sum: [tp T, O] -> [T, O]."""
        # It waits, as what follows reads the sum at once.
        return self.tp.start_reduce_scatter_sum(output_TO).wait()


@dataclass(frozen=True)
class OwnTokens(LinearComm):
    """Exchange nothing: the linear of an expert is whole on every rank, for the rank's tokens."""

    tp: Axis

    def token_order(self, role: Role) -> TokenOrder:
        return TokenOrder("own", self.tp.rank, self.tp.size)


def gather_tokens(x_TF: Operand, tp: Axis) -> Operand:
    """Return all ranks' tokens, rank by rank; of an FP8 tensor its bytes are gathered.

    Scales of rows and blocks cross ranks too: no block reaches over the tokens of two ranks, since
    each rank's tokens are whole blocks. Scales of columns are equal on all ranks, which have agreed
    on them.
    """
    if not isinstance(x_TF, Fp8Tensor):
        return tp.gather_rows(x_TF)
    if x_TF.layout == "row" and x_TF.block == (x_TF.payload.shape[0], 1):
        x_TF = replace(x_TF, block=(x_TF.payload.shape[0] * tp.size, 1))
    elif x_TF.block is not None:
        assert x_TF.shape[0] % x_TF.block[0] == 0, "a block would end in another rank"
        scale_matrix = x_TF.scale_matrix().contiguous()
        bits = scale_matrix.view(torch.uint8) if x_TF.is_packed else scale_matrix
        scales = tp.gather_rows(bits).view(scale_matrix.dtype)
        x_TF = x_TF.with_scale_matrix(scales)  # `outer` is equal on all ranks: amaxes agree
    payload_TF = x_TF.payload.view(torch.uint8)  # not every communication backend knows FP8
    if payload_TF.is_contiguous():
        whole_TF = tp.gather_rows(payload_TF)
    else:  # it lies in memory as [F, T], for tensor cores: it is sent and kept so
        blocks_RFT = tp.gather_rows(payload_TF.t().contiguous()).unflatten(0, (tp.size, -1))
        whole_TF = side_by_side(blocks_RFT).t()
    return replace(x_TF, payload=whole_TF.view(x_TF.payload.dtype), grid=None)


def side_by_side(blocks_RFT: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the ranks' blocks beside each other: [R, F, T] -> [F, R T].

    A GPU's thread copies one element at a time, so the elements are made as long as they can be.
    """
    word = next(x for x in WORDS if blocks_RFT.shape[-1] % x.itemsize == 0)
    return blocks_RFT.view(word).transpose(0, 1).flatten(1).view(blocks_RFT.dtype)


def in_order(x_BSF: torch.Tensor, size: int) -> torch.Tensor:
    """Reorder tokens from rank by rank [tp B, S/tp, F] to whole sequences [B, S, F]."""
    shards_BRSF: torch.Tensor = x_BSF.unflatten(0, (size, -1)).transpose(0, 1)
    return shards_BRSF.flatten(1, 2)


def by_rank(x_BSF: torch.Tensor, size: int) -> torch.Tensor:
    """Reorder tokens from whole sequences [B, S, F] to rank by rank [tp B, S/tp, F]."""
    shards_RBSF: torch.Tensor = x_BSF.unflatten(1, (size, -1)).transpose(0, 1)
    return shards_RBSF.flatten(0, 1)


def own_shard(x_BS: torch.Tensor, tp: Axis) -> torch.Tensor:
    """Return this rank's part of the sequence: [B, S, ...] -> [B, S/tp, ...]."""
    return x_BS.chunk(tp.size, dim=1)[tp.rank]


def gather_sequence(x_BSF: torch.Tensor, tp: Axis) -> torch.Tensor:
    """Return the whole sequence on every rank: [B, S/tp, F] -> [B, S, F]; without autograd."""
    return in_order(tp.gather_rows(x_BSF), tp.size)


def scatter_sum(x_BSF: torch.Tensor, tp: Axis) -> torch.Tensor:
    """Return this rank's part of the sum over ranks: [B, S, F] -> [B, S/tp, F]; without
    autograd.
    """
    return tp.start_reduce_scatter_sum(by_rank(x_BSF, tp.size)).wait()


def whole_sequence(x_BSD: torch.Tensor, tp: Axis) -> torch.Tensor:
    """Return the whole sequence on every rank: [B, S/tp, D] -> [B, S, D]; with autograd.

    The reader's gradient must be whole and equal on every rank: backward keeps this rank's part of
    it and sums nothing.
    """
    whole_BSD: torch.Tensor = _WholeSequence.apply(x_BSD, tp)  # type: ignore[no-untyped-call]
    return whole_BSD


class _WholeSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: torch.Tensor, tp: Axis) -> torch.Tensor:
        ctx.tp = tp
        return gather_sequence(x_BSD, tp)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return own_shard(grads[0], ctx.tp), None


class WholeSequence(nn.Module):
    """Run attention over whole sequences between linears that hold tokens rank by rank."""

    def __init__(self, core: nn.Module, tp: Axis) -> None:
        super().__init__()
        self.core, self.size = core, tp.size

    def forward(
        self, qkv_BSF: torch.Tensor, context: AttentionContext | None = None
    ) -> torch.Tensor:
        """Return the attention output, rank by rank: [tp B, S/tp, F] -> [tp B, S/tp, H E]."""
        return by_rank(self.core(in_order(qkv_BSF, self.size), context), self.size)
