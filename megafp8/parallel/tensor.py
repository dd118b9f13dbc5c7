"""Tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3): which rank holds which rows.

Column-parallel (QKV, FC1): each rank holds some rows of the weight and makes some output features;
in backward the ranks' input gradients are summed. Row-parallel (projection, FC2): each rank holds
some columns and the ranks' outputs are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megafp8.models.parts import Rows
from megafp8.parallel.collectives import Axis, Pending
from megafp8.precision.recipes.base import Operand, Role
from megafp8.precision.scaling import ReduceMax
from megafp8.specs.placement import Piece


@dataclass(frozen=True)
class ColumnParallel:
    """Sums the input gradient over tensor-parallel ranks, while the weight's is computed."""

    tp: Axis
    sums_output = False

    def tokens_out(self, tokens_in: int) -> int:
        return tokens_in

    def gather_input(self, input_TI: Operand) -> Operand:
        return input_TI

    def gather_grad_output(self, grad_output_TO: Operand) -> Operand:
        return grad_output_TO

    def reduce_max(self, role: Role) -> ReduceMax | None:
        return None if role == "input" else self.tp.all_reduce_max

    def reduce_output(self, output_TO: torch.Tensor) -> torch.Tensor:
        return output_TO

    def reduce_grad_input(self, grad_input_TI: torch.Tensor) -> Pending:
        return self.tp.start_all_reduce_sum(grad_input_TI)


@dataclass(frozen=True)
class RowParallel:
    """Sums the output over tensor-parallel ranks."""

    tp: Axis
    sums_output = True

    def tokens_out(self, tokens_in: int) -> int:
        return tokens_in

    def gather_input(self, input_TI: Operand) -> Operand:
        return input_TI

    def gather_grad_output(self, grad_output_TO: Operand) -> Operand:
        return grad_output_TO

    def reduce_max(self, role: Role) -> ReduceMax | None:
        return None if role == "grad_output" else self.tp.all_reduce_max

    def reduce_output(self, output_TO: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce_sum(output_TO)

    def reduce_grad_input(self, grad_input_TI: torch.Tensor) -> Pending:
        return Pending(grad_input_TI, None)


def column_pieces(
    rows: Sequence[Rows], in_features: int, tp: Axis
) -> tuple[list[Piece], list[Piece]]:
    """(weight pieces, bias pieces) of a fused column-parallel weight: this rank's share of each."""
    weights, biases, begin = [], [], 0
    for part in rows:
        share = part.out_features // tp.size
        local, offset = slice(begin, begin + share), tp.rank * share
        columns = slice(0, in_features)
        shape = (part.out_features,)
        name = part.name
        weights.append(
            Piece(f"{name}.weight", (*shape, in_features), (offset, 0), (local, columns))
        )
        biases.append(Piece(f"{name}.bias", shape, (offset,), (local,)))
        begin += share
    return weights, biases


def row_pieces(rows: Rows, in_features: int, tp: Axis) -> tuple[list[Piece], list[Piece]]:
    """(weight pieces, bias pieces) of a row-parallel weight; the bias is whole on every rank."""
    share, out = in_features // tp.size, rows.out_features
    local = (slice(0, out), slice(0, share))
    weight = Piece(f"{rows.name}.weight", (out, in_features), (0, tp.rank * share), local)
    return [weight], [Piece(f"{rows.name}.bias", (out,), (0,), (slice(0, out),))]
