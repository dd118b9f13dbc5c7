"""Compute the core of causal self-attention: what happens between QKV and the projection."""

# B batch  S sequence  K keys  H heads (H/tp under tensor parallelism)  G key-value heads (G/tp)
# E head width  F features of a rank's queries, keys and values

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megafp8.models.attention_block import Block, attend_widened
from megafp8.models.positions import Rotary, alibi_bias, alibi_slopes, rotary
from megafp8.models.random import RandomStreams
from megafp8.ops.bf16 import is_widened
from megafp8.specs import GPTSpec

CountFlops = Callable[[int], None]


@dataclass
class KVCache:
    """Holds the keys and values of earlier tokens, by layer, for generation."""

    length: int = 0  # tokens that all layers hold; `GPT` advances it
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def extend(
        self, layer: int, k_BGSE: torch.Tensor, v_BGSE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's new keys and values; return all, the new ones last: [B, G, K, E]."""
        if layer in self.layers:
            k_old, v_old = self.layers[layer]
            k_BGSE, v_BGSE = torch.cat((k_old, k_BGSE), 2), torch.cat((v_old, v_BGSE), 2)
        self.layers[layer] = k_BGSE, v_BGSE
        return k_BGSE, v_BGSE


class QKV(NamedTuple):
    """Holds queries [B, H, S, E], keys and values [B, G, S, E], with positions turned into them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class HeadSizes:
    """Says how a linear's output [B, S, (H + 2 G) E] is divided into heads."""

    num_heads: int
    num_groups: int
    size: int


# (the linear's output, how it is divided, RoPE's rotation) -> heads, or None for the plain way
SplitHeads = Callable[[torch.Tensor, HeadSizes, Rotary], QKV | None]


@dataclass(frozen=True)
class AttentionContext:
    """Holds the inputs of attention that all layers share; it is made once per microbatch.

    `mask` is boolean, True where a query may attend, or a bias that is added to the scores. It is
    broadcast to [B, H, S, K]. None means causal attention over the whole sequence.
    """

    rotary: Rotary | None = None
    mask: torch.Tensor | None = None
    cache: KVCache | None = None
    recompute_attention: bool = False


def attention_context(
    spec: GPTSpec,
    heads: slice,
    dtype: torch.dtype,
    seq: int,
    device: torch.device,
    *,
    position_ids_BS: torch.Tensor | None = None,
    document_ids_BS: torch.Tensor | None = None,
    cache: KVCache | None = None,
) -> AttentionContext:
    """Return the context of `seq` new tokens, for the query heads that this rank holds."""
    past = 0 if cache is None else cache.length
    turn = None
    if spec.position_embedding_type == "rope":
        positions = position_ids_BS
        if positions is None:
            positions = torch.arange(past, past + seq, device=device)
        turn = rotary(
            positions, spec.rotary_size, spec.rotary_base, spec.seq_len_interpolation_factor
        )
    mask = None
    if document_ids_BS is not None or past > 0 or spec.position_embedding_type == "alibi":
        keys = torch.arange(past + seq, device=device)
        mask = keys <= keys[past:, None]
        if document_ids_BS is not None:
            assert past == 0, "generation has no documents"
            same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
            mask = (mask & same_BSS)[:, None]
        if spec.position_embedding_type == "alibi":
            slopes = torch.tensor(alibi_slopes(spec.num_attention_heads)[heads], device=device)
            bias = alibi_bias(slopes, seq, past + seq).to(dtype)
            mask = bias.masked_fill(~mask, float("-inf"))
    return AttentionContext(turn, mask, cache)


class AttentionCore(nn.Module):
    """Runs `scaled_dot_product_attention` over the heads that this rank holds.

    With `layer_scaling` n the queries are divided by n and the scores multiplied by n again within
    the softmax (Megatron's query-key layer scaling). n is 1, or the layer's number counted from 1.
    """

    def __init__(
        self,
        head_size: int,
        dropout: float,
        site: str,
        streams: RandomStreams,
        count_flops: CountFlops,
        *,
        queries_per_group: int = 1,
        layer: int = 0,
        layer_scaling: int = 1,
        split_heads: SplitHeads | None = None,
    ) -> None:
        super().__init__()
        self.head_size, self.dropout, self.site = head_size, dropout, site
        self.streams, self.count_flops = streams, count_flops
        self.queries_per_group, self.layer = queries_per_group, layer
        self.layer_scaling, self.split_heads = layer_scaling, split_heads

    def sizes(self, features: int) -> HeadSizes:
        """Return how a linear's output of so many features is divided into heads."""
        groups = features // (self.head_size * (self.queries_per_group + 2))
        return HeadSizes(groups * self.queries_per_group, groups, self.head_size)

    def split(self, qkv_BSF: torch.Tensor, context: AttentionContext) -> QKV:
        """Return the heads of `qkv_BSF` [B, S, (H + 2 G) E]: all queries, keys, then values."""
        sizes, turn = self.sizes(qkv_BSF.shape[-1]), context.rotary
        if self.split_heads is not None and turn is not None:
            split = self.split_heads(qkv_BSF, sizes, turn)
            if split is not None:
                return split
        query, key = sizes.num_heads * sizes.size, sizes.num_groups * sizes.size
        q_BHSE, k_BGSE, v_BGSE = (
            part.unflatten(-1, (-1, sizes.size)).transpose(1, 2)
            for part in qkv_BSF.split((query, key, key), dim=-1)
        )
        if turn is not None:
            q_BHSE, k_BGSE = turn(q_BHSE), turn(k_BGSE)
        return QKV(q_BHSE, k_BGSE, v_BGSE)

    def forward(
        self, qkv: torch.Tensor | QKV, context: AttentionContext | None = None
    ) -> torch.Tensor:
        """Return [B, S, H E], given a linear's output [B, S, (H + 2 G) E] or its heads."""
        context = context or AttentionContext()
        q_BHSE, k_BGSE, v_BGSE = qkv if isinstance(qkv, QKV) else self.split(qkv, context)
        if context.cache is not None:
            k_BGSE, v_BGSE = context.cache.extend(self.layer, k_BGSE, v_BGSE)
        causal_flops = None
        if not torch.compiler.is_compiling():  # for a compiled layer its caller counts the FLOPs
            batch, heads, seq, _ = q_BHSE.shape
            causal_flops = self.count_forward(batch, heads, seq, k_BGSE.shape[2])
        if self.training and self.dropout > 0:
            with self.streams.keyed(self.site, q_BHSE.device, sharded=True):
                out_BHSE = self._attend(q_BHSE, k_BGSE, v_BGSE, context.mask, self.dropout)
        else:
            out_BHSE = self._attend(q_BHSE, k_BGSE, v_BGSE, context.mask, 0.0)
        if causal_flops is not None and out_BHSE.requires_grad:
            self.count_backward(out_BHSE, causal_flops)
        return out_BHSE.transpose(1, 2).flatten(2)

    def _attend(
        self,
        q_BHSE: torch.Tensor,
        k_BGSE: torch.Tensor,
        v_BGSE: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        scale = None
        if self.layer_scaling != 1:
            q_BHSE = q_BHSE / self.layer_scaling
            scale = self.layer_scaling / self.head_size**0.5
        return self._softmax_product(q_BHSE, k_BGSE, v_BGSE, mask, dropout, scale)

    def _softmax_product(
        self,
        q_BHSE: torch.Tensor,
        k_BGSE: torch.Tensor,
        v_BGSE: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        scale: float | None,
    ) -> torch.Tensor:
        if dropout == 0 and is_widened(q_BHSE):  # with dropout torch itself computes in FP32
            scale = scale or self.head_size**-0.5
            block = Block(scale, is_causal=mask is None, mask=mask)
            return attend_widened(q_BHSE, k_BGSE, v_BGSE, block)
        return F.scaled_dot_product_attention(
            q_BHSE,
            k_BGSE,
            v_BGSE,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=self.queries_per_group > 1,
        )

    def count_forward(self, batch: int, heads: int, seq: int, num_keys: int) -> int:
        """Count and return the FLOPs of the two forward products, halved by the causal mask.

        They are counted before the products run: a recomputation for backward stops inside the last
        product. Backward has four such products.
        """
        seen = seq * (2 * num_keys - seq)  # 2 x the mean number of visible keys, over all queries
        causal_flops = 2 * batch * heads * seen * self.head_size
        self.count_flops(causal_flops)
        return causal_flops

    def count_backward(self, out: torch.Tensor, causal_flops: int) -> None:
        """Count the backward FLOPs once the gradient of `out` has been computed.

        `out` is attention's output or a tensor computed from it.
        """

        def count(grad: torch.Tensor) -> None:
            self.count_flops(2 * causal_flops)

        out.register_hook(count)
