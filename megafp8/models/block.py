"""Define one transformer layer, pre-norm or post-norm."""

from __future__ import annotations

import math

import torch
from torch import nn

from megafp8.models.attention import AttentionContext
from megafp8.models.parts import Parts, Rows


def layer_of(parts: Parts, index: int) -> nn.Module:
    """Return layer `index` (from 0): the backend's own where it brings layers, else ours."""
    own = parts.own_layer(index)
    return TransformerLayer(parts, index) if own is None else own


class TransformerLayer(nn.Module):
    """Computes x + dropout(attention(norm(x))), then the same with the MLP.

    The post-norm form computes norm(x + dropout(attention(x))) instead, and the GPT then has no
    final norm. Layers are counted from 0.
    """

    def __init__(self, parts: Parts, index: int) -> None:
        super().__init__()
        self.parts, spec, name = parts, parts.spec, f"layers.{index}"
        std = spec.init_method_std
        # Megatron's scaled init: the outputs of 2L residual branches add up in L layers.
        out_std = std / math.sqrt(2 * spec.num_layers) if spec.use_scaled_init_method else std
        sizes = {"query": spec.query_size, "key": spec.kv_size, "value": spec.kv_size}
        heads = [Rows(f"{name}.attention.{part}", size) for part, size in sizes.items()]
        inner = ["gate", "up"] if spec.is_gated else ["fc1"]
        fc1 = [Rows(f"{name}.mlp.{part}", spec.ffn_hidden_size) for part in inner]
        fc2 = Rows(f"{name}.mlp.fc2", spec.hidden_size)
        proj = Rows(f"{name}.attention.projection", spec.hidden_size)
        norms: list[str] = [f"{name}.attention_norm", f"{name}.mlp_norm"]
        self.is_post = is_post = spec.transformer_block_type == "post_ln"
        self.qkv = parts.norm_linear(None if is_post else norms[0], heads, std)
        self.attention_core = parts.attention_core(f"{name}.attention", index)
        self.projection = parts.linear(proj, spec.query_size, out_std)
        self.attention_dropout = parts.dropout(spec.hidden_dropout, f"{name}.attention.out_dropout")
        self.attention_norm = parts.norm(norms[0]) if is_post else nn.Identity()
        self.fc1 = parts.norm_linear(None if is_post else norms[1], fc1, std)
        self.fc2 = parts.act_linear(fc2, spec.ffn_hidden_size, out_std)
        self.mlp_dropout = parts.dropout(spec.hidden_dropout, f"{name}.mlp.out_dropout")
        self.mlp_norm = parts.norm(norms[1]) if is_post else nn.Identity()

    def forward(self, x_BSD: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        """Return the layer's output: [B, S, D] -> [B, S, D].

        The context may ask that backward recomputes attention instead of keeping its activations.
        """
        context = context or AttentionContext()
        x_BSD, qkv = self.parts.read_qkv(x_BSD, self.qkv, self.attention_core, context)
        if context.recompute_attention:
            core_BSF = self.parts.recomputed(self.attention_core, qkv, context)
        else:
            core_BSF = self.attention_core(qkv, context)
        out_BSD = self.attention_dropout(self.projection(core_BSF))
        if self.is_post:
            x_BSD, out_BSD = self.attention_norm(x_BSD + out_BSD), None
        x_BSD, out_BSD = self.parts.run_mlp(x_BSD, out_BSD, self.fc1, self.fc2)
        x_BSD = self.mlp_norm(x_BSD + self.mlp_dropout(out_BSD))
        return x_BSD
