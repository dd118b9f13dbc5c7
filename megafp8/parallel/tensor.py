"""Implement tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3).

A column-parallel linear (QKV, FC1) has some rows of the weight on each rank and computes some
output features; backward sums the ranks' input gradients. A row-parallel linear (projection, FC2)
has some columns on each rank, and the ranks' outputs are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.fp8.linear import LinearComm
from megafp8.fp8.quantizer import Role
from megafp8.fp8.scaling import Pending, ReduceMax
from megafp8.parallel.collectives import Axis


@dataclass(frozen=True)
class ColumnParallel(LinearComm):
    """Sum the input gradient over tensor-parallel ranks, while the weight gradient is computed.

    Every rank has all tokens, of the output those of its own features, so that nothing else is
    exchanged. T tokens  I in features  O out features
    """

    tp: Axis

    def reduce_max(self, role: Role) -> ReduceMax | None:
        """Return the maximum over the ranks for weights and output gradients; None for inputs.

        Every rank has the whole input and a part of the others.
        """
        return None if role == "input" else self.tp.all_reduce_max

    def reduce_grad_input(self, grad_input_TI: torch.Tensor) -> Pending:
        # The caller waits after the weight gradient, which does not read the sum.
        return self.tp.start_all_reduce_sum(grad_input_TI)


@dataclass(frozen=True)
class RowParallel(LinearComm):
    """Sum the output over tensor-parallel ranks.

    Every rank has all tokens, of the input those of its own features, so that nothing else is
    exchanged. T tokens  I in features  O out features
    """

    tp: Axis
    sums_output = True

    def reduce_max(self, role: Role) -> ReduceMax | None:
        """Return the maximum over the ranks for inputs and weights; None for output gradients.

        Every rank has the whole output gradient and a part of the others.
        """
        return None if role == "grad_output" else self.tp.all_reduce_max

    def reduce_output(self, output_TO: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce_sum(output_TO)  # waits, as what follows reads the sum at once
