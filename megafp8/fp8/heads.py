"""Split the output of a QKV linear into heads, turned by RoPE, in Triton; and cast the gradient."""

# B batch  S sequence  T tokens (B x S)  H heads  G key-value heads  E head width  R rotated width
# F features: (H + 2 G) E, all queries, then keys, then values

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megafp8.fp8.fused import CastInto, Produced, cast_by, nothing_but_plain

Turn = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [S, R] or [B, 1, S, R], FP32


@dataclass(frozen=True)
class Heads:
    """Say how the output of a QKV linear is split into heads, where a chain ends.

    `turn` None leaves queries and keys as they are.
    """

    batch: int
    num_heads: int
    num_groups: int
    size: int
    turn: Turn | None

    def parts(self, output_TO: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries [B, H, S, E], keys and values [B, G, S, E]; values are a view."""
        query, key = self.num_heads * self.size, self.num_groups * self.size
        q, k, v = self._split(output_TO, (query, key, key))
        if self.turn is None:
            return q, k, v
        turned = self._pack((q, k), nothing_but_plain(q.device), backward=False).plain
        assert turned is not None
        q, k = self._split(turned, (query, key))
        return q, k, v

    def _split(self, x_TF: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        """Return views [B, heads, S, E] of the columns of `x_TF`, `widths` each."""
        return [
            part.view(self.batch, -1, part.shape[-1] // self.size, self.size).transpose(1, 2)
            for part in x_TF.split(list(widths), dim=-1)
        ]

    def cast_grads(self, grads: Sequence[torch.Tensor], into: CastInto) -> Produced:
        """Return the gradient [T, F] of the linear's output, given those of `parts`."""
        whole = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads]
        return self._pack(whole, into, backward=True)

    def _pack(self, parts: Sequence[torch.Tensor], into: CastInto, *, backward: bool) -> Produced:
        from megafp8.fp8.kernels.triton_heads import pack_heads

        return cast_by(pack_heads, parts, into, turn=self.turn, backward=backward)


def split_heads(qkv_BSF: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, ...]:
    """Return `heads.parts` of `qkv_BSF`, with gradients, which one launch turns and packs."""
    parts: tuple[torch.Tensor, ...] = _SplitHeads.apply(  # type: ignore[no-untyped-call]
        qkv_BSF, heads
    )
    return parts


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_BSF: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, ...]:
        ctx.heads = heads
        return heads.parts(qkv_BSF.flatten(0, 1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        heads: Heads = ctx.heads
        packed = heads.cast_grads(grads, nothing_but_plain(grads[0].device)).plain
        assert packed is not None
        return packed.view(heads.batch, -1, packed.shape[-1]), None
