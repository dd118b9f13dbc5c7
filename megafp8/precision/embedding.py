"""Embedding look-up whose weight gradient touches only the rows that were looked up."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megafp8.precision.grad_sink import GradSink


def look_up(tokens_BS: torch.Tensor, weight_VD: nn.Parameter, sink: GradSink) -> torch.Tensor:
    """Rows of `weight_VD`: [B, S] int64 -> [B, S, D]. The gradient goes to `sink`."""
    rows_BSD: torch.Tensor = _LookUp.apply(  # type: ignore[no-untyped-call]
        tokens_BS, weight_VD, sink
    )
    return rows_BSD


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_BS: torch.Tensor, weight_VD: nn.Parameter, sink: GradSink
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens_BS)
        ctx.weight, ctx.sink = weight_VD, sink
        return nn.functional.embedding(tokens_BS, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (tokens_BS,), (grad_BSD,) = ctx.saved_tensors, grads
        grad = ctx.sink.add_rows(ctx.weight, tokens_BS.flatten(), grad_BSD.flatten(0, 1))
        return None, grad, None
