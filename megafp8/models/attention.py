"""Causal self-attention's core: what happens between QKV and the projection."""

# B batch  S sequence  D model width (D/tp under tensor parallelism)  H heads (H/tp)  E head width

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from megafp8.models.random import RandomStreams

CountFlops = Callable[[int], None]


class AttentionCore(nn.Module):
    """`scaled_dot_product_attention` over whatever heads this rank holds."""

    def __init__(
        self,
        head_size: int,
        dropout: float,
        site: str,
        streams: RandomStreams,
        count_flops: CountFlops,
    ) -> None:
        super().__init__()
        self.head_size, self.dropout, self.site = head_size, dropout, site
        self.streams, self.count_flops = streams, count_flops

    def forward(self, qkv_BSF: torch.Tensor) -> torch.Tensor:
        """[B, S, 3D] (query, key, value of all heads, in this order) -> [B, S, D]."""
        batch, seq, features = qkv_BSF.shape
        heads = features // (3 * self.head_size)
        q_BHSE, k_BHSE, v_BHSE = (
            part.view(batch, seq, heads, self.head_size).transpose(1, 2)
            for part in qkv_BSF.chunk(3, dim=-1)
        )
        if self.training and self.dropout > 0:
            with self.streams.keyed(self.site, qkv_BSF.device, sharded=True):
                out_BHSE = F.scaled_dot_product_attention(
                    q_BHSE, k_BHSE, v_BHSE, is_causal=True, dropout_p=self.dropout
                )
        else:
            out_BHSE = F.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, is_causal=True)
        self._count(out_BHSE, 2 * batch * heads * seq * seq * self.head_size)
        return out_BHSE.transpose(1, 2).flatten(2)

    def _count(self, out: torch.Tensor, causal_flops: int) -> None:
        """Two products forward, four backward, half of each because the mask is causal."""
        self.count_flops(causal_flops)
        if out.requires_grad:

            def count_backward(grad: torch.Tensor) -> None:
                self.count_flops(2 * causal_flops)

            out.register_hook(count_backward)
