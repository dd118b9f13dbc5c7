"""Compute the core of causal self-attention: what happens between QKV and the projection."""

# B batch  S sequence  K keys  H heads (H/tp under tensor parallelism)  G key-value heads (G/tp)
# N heads of all three (H + 2 G)  E head width  F features of a rank's queries, keys and values

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megafp8.models.documents import Area, Documents, band
from megafp8.models.packed import BlockOf, attend_blocks, attend_varlen, uses_varlen
from megafp8.models.positions import Rotary, alibi_bias, alibi_slopes, rotary
from megafp8.models.random import RandomStreams
from megafp8.ops.attention import AttentionTile, attention, is_faster_here
from megafp8.specs import GPTSpec

CountFlops = Callable[[int], None]


@dataclass
class KVCache:
    """Hold the keys and values of earlier tokens, by layer, for generation."""

    length: int = 0  # tokens that all layers hold; `GPT` advances it
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def extend(
        self, layer: int, k_BGSE: torch.Tensor, v_BGSE: torch.Tensor, window: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's new keys and values; return all, the new ones last: [B, G, K, E].

        Of a layer with a window those are forgotten that no later token sees.
        """
        if layer in self.layers:
            k_old, v_old = self.layers[layer]
            k_BGSE, v_BGSE = torch.cat((k_old, k_BGSE), 2), torch.cat((v_old, v_BGSE), 2)
        first = 0 if window is None else max(0, k_BGSE.shape[2] - window)
        self.layers[layer] = k_BGSE[:, :, first:], v_BGSE[:, :, first:]
        return k_BGSE, v_BGSE


class QKV(NamedTuple):
    """Hold queries [B, H, S, E], keys and values [B, G, S, E], with positions turned into them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class HeadSizes:
    """Say how a linear's output [B, S, (H + 2 G) E] is divided into heads."""

    num_heads: int
    num_groups: int
    size: int


class HeadNorms(NamedTuple):
    """Hold the norms of queries and keys, each over the features of a head: [..., E]."""

    query: nn.Module
    key: nn.Module


# (the linear's output, how it is divided, RoPE's rotation) -> heads, or None for the plain way
SplitHeads = Callable[[torch.Tensor, HeadSizes, Rotary], QKV | None]


@dataclass(frozen=True)
class AttentionContext:
    """Hold the inputs of attention that all layers share; it is made once per microbatch.

    `mask` is boolean, True where a query may attend, or a bias that is added to the scores. It is
    broadcast to [B, H, S, K]. None means causal attention over the whole sequence, or within
    `documents`, with ALiBi's slopes where it has them. `windowed` is what layers with a window read
    in place of the whole, if other layers have none.
    """

    rotary: Rotary | None = None
    mask: torch.Tensor | None = None
    documents: Documents | None = None
    slopes_H: torch.Tensor | None = None  # noqa: N815 (shape suffix)
    cache: KVCache | None = None
    recompute_attention: bool = False
    windowed: AttentionContext | None = None


@functools.cache
def _slopes_on(device: torch.device, num_heads: int, begin: int, end: int) -> torch.Tensor:
    """Return ALiBi's slopes of some heads, FP32 [H], which are copied to a device only once."""
    return torch.tensor(alibi_slopes(num_heads)[begin:end], device=device)


def attention_context(
    spec: GPTSpec,
    heads: slice,
    dtype: torch.dtype,
    shape: tuple[int, int],
    device: torch.device,
    *,
    position_ids_BS: torch.Tensor | None = None,
    cu_seqlens_N1: torch.Tensor | None = None,
    document_ids_BS: torch.Tensor | None = None,
    cache: KVCache | None = None,
    num_sharing: int = 1,
) -> AttentionContext:
    """Return the context of new tokens of `shape` [B, S], for the query heads of this rank.

    `num_sharing` ranks share each sequence and have so many of its tokens each.

    Documents are kept apart by `cu_seqlens_N1` (see `Documents`), or by `document_ids_BS` and a
    mask of all their scores.
    """
    past, (batch, seq) = 0 if cache is None else cache.length, shape
    assert past == 0 or (cu_seqlens_N1 is None and document_ids_BS is None), (
        "generation has no documents"
    )
    slopes, turn = None, None
    if spec.position_embedding_type == "rope":
        positions = position_ids_BS
        if positions is None:
            positions = torch.arange(past, past + seq, device=device)
        turn = rotary(positions, spec)
    if spec.position_embedding_type == "alibi":
        slopes = _slopes_on(device, spec.num_attention_heads, heads.start, heads.stop)
    whole = seq * num_sharing
    masks = _Masks(
        (batch, whole), past, device, dtype, slopes, cu_seqlens_N1, document_ids_BS,
        cuts_queries=slopes is not None or spec.attention_dropout > 0,
    )  # fmt: skip
    window = None if spec.window_size is None else spec.window_size[0]
    if window is None or window >= past + whole - 1:  # no token is hidden
        return AttentionContext(turn, *masks.of(None), cache)
    if spec.window_attn_skip_freq is None:
        return AttentionContext(turn, *masks.of(window), cache)
    windowed = AttentionContext(turn, *masks.of(window), cache)
    return AttentionContext(turn, *masks.of(None), cache, windowed=windowed)


class _Seen(NamedTuple):
    """Hold the fields of an `AttentionContext` that say which scores are seen."""

    mask: torch.Tensor | None
    documents: Documents | None
    slopes_H: torch.Tensor | None  # noqa: N815 (shape suffix)


@dataclass(frozen=True)
class _Masks:
    """Make what says which scores layers see, those with and those without a window.

    Attributes:
        shape: The new tokens, [B, S], of whole sequences.
        past: The tokens before them.
        device: Where attention runs.
        dtype: That of a bias.
        slopes_H: ALiBi's.
        cu_seqlens_N1: The documents as `Documents` has them.
        document_ids_BS: The documents as a number for each token.
        cuts_queries: Whether the scores of a block of documents need a tensor of their own.
    """

    shape: tuple[int, int]
    past: int
    device: torch.device
    dtype: torch.dtype
    slopes_H: torch.Tensor | None  # noqa: N815 (shape suffix)
    cu_seqlens_N1: torch.Tensor | None  # noqa: N815 (shape suffix)
    document_ids_BS: torch.Tensor | None  # noqa: N815 (shape suffix)
    cuts_queries: bool

    def of(self, window: int | None) -> _Seen:
        """Return what says which scores layers with this window see; None is no window."""
        batch, seq = self.shape
        borders_N1, has_ids = self.cu_seqlens_N1, self.document_ids_BS is not None
        if borders_N1 is None and window is not None and not has_ids and self.past == 0:
            borders = range(0, batch * seq + 1, seq)  # each row is a document
            borders_N1 = torch.tensor(borders, dtype=torch.int32, device="cpu")
        if borders_N1 is not None:
            documents = Documents(borders_N1, seq, self.device, self.cuts_queries, window)
            is_plain = documents.are_whole_rows and not documents.hides_earlier
            if self.slopes_H is not None or not is_plain:
                return _Seen(None, documents, self.slopes_H)
        if has_ids or self.past > 0 or self.slopes_H is not None:
            return _Seen(self._mask(window), None, None)
        return _Seen(None, None, None)

    def _mask(self, window: int | None) -> torch.Tensor:
        """Return the mask, or ALiBi's bias: of all keys that layers with this window hold."""
        num_past = self.past if window is None else min(self.past, window)
        mask = band(self.shape[1], num_past + self.shape[1], window, self.device)
        if (ids_BS := self.document_ids_BS) is not None:
            mask = (mask & (ids_BS[:, :, None] == ids_BS[:, None, :]))[:, None]
        if self.slopes_H is None:
            return mask
        places = torch.arange(self.past - num_past, self.past + self.shape[1], device=self.device)
        bias = alibi_bias(self.slopes_H, places[num_past:], places).to(self.dtype)
        return bias.masked_fill(~mask, float("-inf"))


class AttentionCore(nn.Module):
    """Run `scaled_dot_product_attention` over the heads that this rank holds.

    With `layer_scaling` n the queries are divided by n and the scores multiplied by n again within
    the softmax (Megatron's query-key layer scaling). n is 1, or the layer's number counted from 1.
    `window` is the number of earlier tokens that a query sees, or None for all.
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
        norms: HeadNorms | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.head_size, self.dropout, self.site = head_size, dropout, site
        self.streams, self.count_flops = streams, count_flops
        self.queries_per_group, self.layer = queries_per_group, layer
        self.layer_scaling, self.split_heads, self.window = layer_scaling, split_heads, window
        self.query_norm = None if norms is None else norms.query
        self.key_norm = None if norms is None else norms.key

    @property
    def has_norms(self) -> bool:
        """Whether queries and keys are normalized, between the linear and the positions."""
        return self.query_norm is not None

    def sizes(self, features: int) -> HeadSizes:
        """Return how a linear's output of so many features is divided into heads."""
        groups = features // (self.head_size * (self.queries_per_group + 2))
        return HeadSizes(groups * self.queries_per_group, groups, self.head_size)

    def split(self, qkv_BSF: torch.Tensor, context: AttentionContext) -> QKV:
        """Return the heads of `qkv_BSF` [B, S, (H + 2 G) E]: all queries, keys, then values.

        Norms of queries and keys come before positions, as in Megatron and transformers.
        """
        sizes, turn = self.sizes(qkv_BSF.shape[-1]), context.rotary
        if self.split_heads is not None and turn is not None and not self.has_norms:
            split = self.split_heads(qkv_BSF, sizes, turn)
            if split is not None:
                return split
        heads_BSNE = qkv_BSF.view(*qkv_BSF.shape[:2], -1, sizes.size)
        groups = sizes.num_groups
        q_BSHE, k_BSGE, v_BSGE = heads_BSNE.split((sizes.num_heads, groups, groups), dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            q_BSHE, k_BSGE = self.query_norm(q_BSHE), self.key_norm(k_BSGE)
        q_BHSE, k_BGSE = q_BSHE.transpose(1, 2), k_BSGE.transpose(1, 2)
        if turn is not None:
            q_BHSE, k_BGSE = turn(q_BHSE), turn(k_BGSE)
        return QKV(q_BHSE, k_BGSE, v_BSGE.transpose(1, 2))

    def forward(
        self, qkv: torch.Tensor | QKV, context: AttentionContext | None = None
    ) -> torch.Tensor:
        """Return [B, S, H E], given a linear's output [B, S, (H + 2 G) E] or its heads."""
        context = context or AttentionContext()
        q_BHSE, k_BGSE, v_BGSE = qkv if isinstance(qkv, QKV) else self.split(qkv, context)
        if context.cache is not None:
            k_BGSE, v_BGSE = context.cache.extend(self.layer, k_BGSE, v_BGSE, self.window)
        if self.window is not None and context.windowed is not None:
            context = context.windowed
        causal_flops = None
        if not torch.compiler.is_compiling():  # for a compiled layer its caller counts the FLOPs
            batch, heads, seq, _ = q_BHSE.shape
            causal_flops = self.count_forward(batch, heads, seq, k_BGSE.shape[2], context.documents)
        scale = None
        if self.layer_scaling != 1:
            q_BHSE = q_BHSE / self.layer_scaling
            scale = self.layer_scaling / self.head_size**0.5
        parts = (q_BHSE, k_BGSE, v_BGSE)
        if self.training and self.dropout > 0:
            with self.streams.keyed(self.site, q_BHSE.device, sharded=True):
                out_BHSE = self._softmax_product(*parts, context, self.dropout, scale)
        else:
            out_BHSE = self._softmax_product(*parts, context, 0.0, scale)
        if causal_flops is not None and out_BHSE.requires_grad:
            self.count_backward(out_BHSE, causal_flops)
        return out_BHSE.transpose(1, 2).flatten(2)

    def _softmax_product(
        self,
        q_BHSE: torch.Tensor,
        k_BGSE: torch.Tensor,
        v_BGSE: torch.Tensor,
        context: AttentionContext,
        dropout: float,
        scale: float | None,
    ) -> torch.Tensor:
        """Return attention [B, H, S, E], by the kernel that can do these documents and dropout."""
        mask = context.mask
        if context.documents is not None:
            documents, has_bias = context.documents, context.slopes_H is not None
            scale, device = scale or self.head_size**-0.5, q_BHSE.device
            traits = (device, q_BHSE.dtype, self.head_size)
            has_groups = self.queries_per_group > 1
            if uses_varlen(*traits, dropout=dropout, has_bias=has_bias, has_groups=has_groups):
                return attend_varlen(q_BHSE, k_BGSE, v_BGSE, documents, scale)
            block_of = self._block_of(context, documents, dropout, scale, q_BHSE)
            return attend_blocks(q_BHSE, k_BGSE, v_BGSE, documents, block_of)
        # With dropout torch itself computes BF16 in FP32, and all scores in one product.
        if dropout == 0 and is_faster_here(q_BHSE, k_BGSE):
            scale = scale or self.head_size**-0.5
            block = AttentionTile(scale, is_causal=mask is None, mask=mask)
            return attention(q_BHSE, k_BGSE, v_BGSE, block)
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

    def _block_of(
        self,
        context: AttentionContext,
        documents: Documents,
        dropout: float,
        scale: float,
        q_BHSE: torch.Tensor,
    ) -> BlockOf:
        """Return what gives a block its masks: those of the documents, ALiBi's and dropout's."""
        # The position is saved here because backward may run much later.
        position, heads, dtype = self.streams.position, q_BHSE.shape[1], q_BHSE.dtype
        slopes_H = context.slopes_H

        def block_of(number: int, area: Area) -> AttentionTile:
            mask = keep = None
            if slopes_H is not None:
                bias = alibi_bias(slopes_H, *documents.places(area)).to(dtype)
                mask = bias.masked_fill(~documents.seen(area), float("-inf"))
            elif not area.is_causal:
                mask = documents.seen(area)
            if dropout > 0:
                shape = (1, heads, area.stop - area.first_query, area.stop - area.first_key)
                site = f"{self.site} block {number}"
                with self.streams.at(position):
                    keep = self.kept(site, shape, q_BHSE.device, dropout)
            return AttentionTile(scale, is_causal=mask is None, keep=keep, mask=mask)

        return block_of

    def kept(
        self, site: str, shape: tuple[int, ...], device: torch.device, dropout: float
    ) -> torch.Tensor:
        """Return dropout's mask: 0 for dropped elements, 1 / (1 - p) for the others."""
        with self.streams.keyed(site, device, sharded=True):
            keep = torch.empty(shape, device=device)
            return keep.bernoulli_(1 - dropout).div_(1 - dropout)

    def count_forward(
        self,
        batch: int,
        heads: int,
        seq: int,
        num_keys: int,
        documents: Documents | None = None,
    ) -> int:
        """Count and return the FLOPs of the two forward products, halved by the causal mask.

        Between documents no score is seen, and none is counted.

        They are counted before the products run: a recomputation for backward stops inside the last
        product. Backward has four such products.
        """
        causal_flops = 2 * heads * self.num_seen(batch, seq, num_keys, documents) * self.head_size
        self.count_flops(causal_flops)
        return causal_flops

    def num_seen(self, batch: int, seq: int, num_keys: int, documents: Documents | None) -> int:
        """Return twice the scores that queries see, counting half of each on the diagonal."""
        return batch * seq * (2 * num_keys - seq) if documents is None else documents.num_seen

    def count_backward(self, out: torch.Tensor, causal_flops: int) -> None:
        """Count the backward FLOPs once the gradient of `out` has been computed.

        `out` is attention's output or a tensor computed from it.
        """

        def count(grad: torch.Tensor) -> None:
            self.count_flops(2 * causal_flops)

        out.register_hook(count)
