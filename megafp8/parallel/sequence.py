"""Sequence parallelism (Korthikanti et al., arXiv 2205.05198): between the linears each
tensor-parallel rank has a part of the sequence.

Norms, dropout and the residual stream are [B, S/tp, D] on every rank. A column-parallel linear
gathers the parts, in FP8 where it reads FP8: one scale serves all ranks, so their bytes can stand
side by side. Only the own part is kept; backward gathers it again. A row-parallel linear sums its
outputs and leaves each rank its part.

Linears read tokens rank by rank, [tp B, S/tp, ...]; attention alone needs whole sequences in order.
"""

# B batch  R ranks  S sequence  D model width  F features  T tokens (of one rank or all)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megafp8.models.attention import AttentionContext
from megafp8.parallel.collectives import Axis, Pending
from megafp8.parallel.tensor import ColumnParallel, RowParallel
from megafp8.precision.recipes.base import Operand, Role
from megafp8.precision.scaling import ReduceMax
from megafp8.precision.tensor import Fp8Tensor


@dataclass(frozen=True)
class SequenceColumnParallel(ColumnParallel):
    """Gathers its input; each rank gets its part of the input gradient's sum."""

    def tokens_out(self, tokens_in: int) -> int:
        return tokens_in * self.tp.size

    def gather_input(self, input_TI: Operand) -> Operand:
        return gather_tokens(input_TI, self.tp)

    def reduce_max(self, role: Role) -> ReduceMax | None:
        return self.tp.all_reduce_max

    def reduce_grad_input(self, grad_input_TI: torch.Tensor) -> Pending:
        return self.tp.start_reduce_scatter_sum(grad_input_TI)


@dataclass(frozen=True)
class SequenceRowParallel(RowParallel):
    """Each rank gets its part of the output's sum; gathers the output gradient."""

    def tokens_out(self, tokens_in: int) -> int:
        return tokens_in // self.tp.size

    def gather_grad_output(self, grad_output_TO: Operand) -> Operand:
        return gather_tokens(grad_output_TO, self.tp)

    def reduce_max(self, role: Role) -> ReduceMax | None:
        return self.tp.all_reduce_max

    def reduce_output(self, output_TO: torch.Tensor) -> torch.Tensor:
        return self.tp.start_reduce_scatter_sum(output_TO).wait()


def gather_tokens(x_TF: Operand, tp: Axis) -> Operand:
    """All ranks' tokens, rank by rank; of an FP8 tensor with one scale, its bytes."""
    if not isinstance(x_TF, Fp8Tensor):
        return tp.gather_rows(x_TF)
    assert x_TF.block is None, "scales of blocks are not gathered"
    payload = tp.gather_rows(x_TF.payload.view(torch.uint8)).view(x_TF.payload.dtype)
    return replace(x_TF, payload=payload, grid=None)


def in_order(x_BSF: torch.Tensor, size: int) -> torch.Tensor:
    """[tp B, S/tp, F], rank by rank -> [B, S, F]."""
    shards_BRSF: torch.Tensor = x_BSF.unflatten(0, (size, -1)).transpose(0, 1)
    return shards_BRSF.flatten(1, 2)


def by_rank(x_BSF: torch.Tensor, size: int) -> torch.Tensor:
    """[B, S, F] -> [tp B, S/tp, F]."""
    shards_RBSF: torch.Tensor = x_BSF.unflatten(1, (size, -1)).transpose(0, 1)
    return shards_RBSF.flatten(0, 1)


def own_shard(x_BS: torch.Tensor, tp: Axis) -> torch.Tensor:
    """[B, S, ...] -> [B, S/tp, ...]: this rank's part."""
    return x_BS.chunk(tp.size, dim=1)[tp.rank]


def gather_sequence(x_BSF: torch.Tensor, tp: Axis) -> torch.Tensor:
    """[B, S/tp, F] -> [B, S, F]; no autograd."""
    return in_order(tp.gather_rows(x_BSF), tp.size)


def scatter_sum(x_BSF: torch.Tensor, tp: Axis) -> torch.Tensor:
    """[B, S, F] -> [B, S/tp, F] of the sum over ranks; no autograd."""
    return tp.start_reduce_scatter_sum(by_rank(x_BSF, tp.size)).wait()


def whole_sequence(x_BSD: torch.Tensor, tp: Axis) -> torch.Tensor:
    """[B, S/tp, D] -> [B, S, D] for a reader whose gradient is the whole one on every rank."""
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
    """Attention over whole sequences, between linears that have them rank by rank."""

    def __init__(self, core: nn.Module, tp: Axis) -> None:
        super().__init__()
        self.core, self.size = core, tp.size

    def forward(
        self, qkv_BSF: torch.Tensor, context: AttentionContext | None = None
    ) -> torch.Tensor:
        """[tp B, S/tp, F] -> [tp B, S/tp, H E]."""
        return by_rank(self.core(in_order(qkv_BSF, self.size), context), self.size)
