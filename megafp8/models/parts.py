"""The parts of a GPT, plain: one device, one dtype, autograd, no FP8. The reference for the rest.

`Parts` is the one seam through which precision and parallelism come in: a subclass replaces what it
must, the model stays as it is.
"""

# B batch  S sequence  D model width  O out features

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from megafp8.models.attention import AttentionCore
from megafp8.models.init import Draw, constant, normal, parameter
from megafp8.models.loss import HeadLoss
from megafp8.models.random import RandomStreams
from megafp8.specs import GPTSpec
from megafp8.specs.placement import Piece, whole


@dataclass(frozen=True)
class Rows:
    """One logical linear whose rows are part of a fused weight: query, key, value, …"""

    name: str
    out_features: int


class Parts:
    """Makes a GPT's modules. `name`s are the logical names that checkpoints use."""

    def __init__(
        self, spec: GPTSpec, dtype: torch.dtype, seed: int, streams: RandomStreams
    ) -> None:
        self.spec, self.dtype, self.seed, self.streams = spec, dtype, seed, streams

    def layer(self, index: int) -> nn.Module:
        """[B, S, D] -> [B, S, D]: one transformer layer; layers count from 0."""
        from megafp8.models.block import TransformerLayer  # which needs this module

        return TransformerLayer(self, index)

    def embedding(self) -> Embedding:
        return Embedding(self)

    def look_up(self, tokens_BS: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        """Rows of `weight_VD`: [B, S] -> [B, S, D]."""
        return F.embedding(tokens_BS, weight_VD)

    def norm(self, name: str) -> Norm:
        return Norm(self, name)

    def norm_linear(self, norm: str, rows: Sequence[Rows], std: float) -> nn.Module:
        """[B, S, D] -> [B, S, all rows]: a norm and a linear that follows it (QKV, FC1)."""
        return nn.Sequential(self.norm(norm), PlainLinear(self, rows, self.spec.hidden_size, std))

    def linear(self, rows: Rows, in_features: int, std: float) -> nn.Module:
        """[B, S, in] -> [B, S, out]: the attention's projection."""
        return PlainLinear(self, [rows], in_features, std)

    def act_linear(self, rows: Rows, in_features: int, std: float) -> nn.Module:
        """[B, S, in] -> [B, S, out]: the activation and the linear that follows it (FC2)."""
        site = f"{rows.name}.dropout"
        return nn.Sequential(
            nn.GELU(),
            self.dropout(self.spec.ffn_dropout, site, sharded=True),
            self.linear(rows, in_features, std),
        )

    def attention_core(self, name: str) -> nn.Module:
        """[B, S, 3D] -> [B, S, D]."""
        return AttentionCore(
            self.spec.head_size,
            self.spec.attention_dropout,
            f"{name}.dropout",
            self.streams,
            self.count_attention_flops,
        )

    def head_loss(self) -> HeadLoss:
        return HeadLoss()

    def dropout(self, p: float, site: str, *, sharded: bool = False) -> Dropout:
        return Dropout(p, site, self.streams, sharded)

    def count_attention_flops(self, flops: int) -> None:
        """Called by the attention core where it multiplies; the plain parts keep no count."""

    def normal_parameter(
        self, shape: tuple[int, ...], pieces: Sequence[Piece], std: float
    ) -> nn.Parameter:
        return parameter(shape, pieces, normal(std, self.seed), self.dtype)

    def whole_parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> nn.Parameter:
        return parameter(shape, whole(name, shape), draw, self.dtype)


class Embedding(nn.Module):
    """Word and learned position embeddings, then dropout."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        spec = parts.spec
        draw = normal(spec.init_method_std, parts.seed)
        self.word = parts.whole_parameter(
            "embedding.word.weight", (spec.vocab_size, spec.hidden_size), draw
        )
        self.position = parts.whole_parameter(
            "embedding.position.weight", (spec.max_position_embeddings, spec.hidden_size), draw
        )
        self.look_up = parts.look_up
        self.dropout = parts.dropout(spec.hidden_dropout, "embedding.dropout")

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """[B, S] int64 -> [B, S, D]."""
        words_BSD = self.look_up(tokens_BS, self.word)
        out: torch.Tensor = self.dropout(words_BSD + self.position[: tokens_BS.shape[1]])
        return out


class Norm(nn.Module):
    """LayerNorm over the model width."""

    def __init__(self, parts: Parts, name: str) -> None:
        super().__init__()
        self.epsilon = parts.spec.layernorm_epsilon
        shape = (parts.spec.hidden_size,)
        self.weight = parts.whole_parameter(f"{name}.weight", shape, constant(1.0))
        self.bias = parts.whole_parameter(f"{name}.bias", shape, constant(0.0))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x_BSD, self.weight.shape, self.weight, self.bias, self.epsilon)


class PlainLinear(nn.Module):
    """x @ weight.T + bias, where weight may fuse several logical linears."""

    def __init__(self, parts: Parts, rows: Sequence[Rows], in_features: int, std: float) -> None:
        super().__init__()
        total = sum(part.out_features for part in rows)
        pieces, bias_pieces, begin = [], [], 0
        for part in rows:
            local, shape = slice(begin, begin + part.out_features), (part.out_features,)
            pieces.append(
                Piece(
                    f"{part.name}.weight",
                    (*shape, in_features),
                    (0, 0),
                    (local, slice(0, in_features)),
                )
            )
            bias_pieces.append(Piece(f"{part.name}.bias", shape, (0,), (local,)))
            begin += part.out_features
        self.weight = parts.normal_parameter((total, in_features), pieces, std)
        self.bias = parameter((total,), bias_pieces, constant(0.0), parts.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Dropout(nn.Module):
    """Dropout whose mask is keyed by step, microbatch and site."""

    def __init__(self, p: float, site: str, streams: RandomStreams, sharded: bool) -> None:
        super().__init__()
        self.p, self.site, self.streams, self.sharded = p, site, streams, sharded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        with self.streams.keyed(self.site, x.device, sharded=self.sharded):
            return F.dropout(x, self.p)
