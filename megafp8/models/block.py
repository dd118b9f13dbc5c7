"""Define one transformer layer, pre-norm or post-norm: two residual branches, attention and MLP."""

# B batch  S sequence  D model width  F features: of a rank's heads, or between the MLP's linears

from __future__ import annotations

import torch
from torch import nn

from megafp8.models.attention import QKV, AttentionContext
from megafp8.models.moe import MoE
from megafp8.models.parts import Parts, activation
from megafp8.specs.layer import Mlp, layer_spec


def layer_of(parts: Parts, index: int) -> nn.Module:
    """Return layer `index` (from 0): the backend's own where it brings layers, else ours."""
    backend_layer = parts.own_layer(index)
    return TransformerLayer(parts, index) if backend_layer is None else backend_layer


class TransformerLayer(nn.Module):
    """Compute x + dropout(attention(norm(x))), then the same with the MLP.

    The post-norm form computes norm(x + dropout(attention(x))) instead, and the GPT then has no
    final norm. Layers are counted from 0.
    """

    def __init__(self, parts: Parts, index: int) -> None:
        super().__init__()
        self.parts, name, dropout = parts, f"layers.{index}", parts.spec.hidden_dropout
        self.is_post = parts.spec.transformer_block_type == "post_ln"
        # The optimizer's flat buffers have the parameters in the order in which they are used.
        if self.is_post:
            self.attention = Attention(parts, index)
            self.attention_norm = parts.norm(f"{name}.attention_norm", is_stream=True)
            self.mlp = mlp_of(parts, index)
            self.mlp_norm = parts.norm(f"{name}.mlp_norm", is_stream=True)
        else:
            self.attention_norm = parts.norm(f"{name}.attention_norm")
            self.attention = Attention(parts, index)
            self.mlp_norm = parts.norm(f"{name}.mlp_norm")
            self.mlp = mlp_of(parts, index)
        self.attention_dropout = parts.dropout(dropout, f"{name}.attention.out_dropout")
        self.mlp_dropout = parts.dropout(dropout, f"{name}.mlp.out_dropout")

    def forward(self, x_BSD: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        """Return the layer's output: [B, S, D] -> [B, S, D]."""
        x: torch.Tensor = x_BSD
        context = context or AttentionContext()
        if self.is_post:
            x = self.attention_norm(x + self.attention_dropout(self.attention(x, context)))
            x = self.mlp_norm(x + self.mlp_dropout(self.mlp(x)))
        else:
            x = x + self.attention_dropout(self.attention(self.attention_norm(x), context))
            x = x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))
        return x


class Attention(nn.Module):
    """Compute causal self-attention: projection(core(qkv(x)))."""

    def __init__(self, parts: Parts, index: int) -> None:
        super().__init__()
        linears = layer_spec(parts.spec, index).attention
        self.parts = parts
        self.qkv = parts.linear(linears.qkv)
        self.core = parts.attention_core(f"layers.{index}.attention", index)
        self.projection = parts.linear(linears.projection)

    def forward(self, x_BSD: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Return attention's output, [B, S, D] -> [B, S, D] in the dtype of the linears.

        Without a norm before it, the residual stream may have another dtype.
        """
        return self.attend(self.qkv(x_BSD.to(self.parts.dtype)), context)

    def attend(self, qkv: torch.Tensor | QKV, context: AttentionContext) -> torch.Tensor:
        """Return projection(core(qkv)), given a linear's output [B, S, F] or its heads.

        The context may ask that backward recomputes the core instead of keeping its activations.
        """
        if context.recompute_attention:
            core_BSF = self.parts.recomputed(self.core, qkv, context)
        else:
            core_BSF = self.core(qkv, context)
        out_BSD: torch.Tensor = self.projection(core_BSF)
        return out_BSD


def mlp_of(parts: Parts, index: int) -> MLP | MoE:
    """Return what layer `index` has after its attention: an MLP or experts."""
    linears = layer_spec(parts.spec, index)
    mlp = None if linears.mlp is None else MLP(parts, linears.mlp)
    if linears.experts is not None:
        return MoE(parts, f"layers.{index}.mlp", linears.experts, mlp)
    assert mlp is not None
    return mlp


class MLP(nn.Module):
    """Compute fc2(dropout(activation(fc1(x)))); a gated activation reads 2F features."""

    def __init__(self, parts: Parts, linears: Mlp) -> None:
        super().__init__()
        site = f"{linears.fc2.name}.dropout"
        self.dtype = parts.dtype
        self.fc1 = parts.linear(linears.fc1)
        self.activation = activation(parts.spec.activation)
        self.dropout = parts.dropout(parts.spec.ffn_dropout, site, sharded=True)
        self.fc2 = parts.linear(linears.fc2)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output, [B, S, D] -> [B, S, D] in the dtype of the linears."""
        return self.contract(self.fc1(x_BSD.to(self.dtype)))

    def contract(self, inner_BSF: torch.Tensor) -> torch.Tensor:
        """Return fc2(dropout(activation(inner))): [B, S, F] -> [B, S, D]."""
        out_BSD: torch.Tensor = self.fc2(self.dropout(self.activation(inner_BSF)))
        return out_BSD
