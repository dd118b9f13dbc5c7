"""One transformer layer, pre-norm."""

from __future__ import annotations

import math

import torch
from torch import nn

from megafp8.models.parts import Parts, Rows


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm(x))), then the same with the MLP. Layers count from 0."""

    def __init__(self, parts: Parts, index: int) -> None:
        super().__init__()
        spec, name = parts.spec, f"layers.{index}"
        std = spec.init_method_std
        # Megatron's scaled init: the layers' outputs add up over 2L residual branches.
        out_std = std / math.sqrt(2 * spec.num_layers) if spec.use_scaled_init_method else std
        heads = [
            Rows(f"{name}.attention.{part}", spec.hidden_size) for part in ("query", "key", "value")
        ]
        fc1 = Rows(f"{name}.mlp.fc1", spec.ffn_hidden_size)
        fc2 = Rows(f"{name}.mlp.fc2", spec.hidden_size)
        proj = Rows(f"{name}.attention.projection", spec.hidden_size)
        self.qkv = parts.norm_linear(f"{name}.attention_norm", heads, std)
        self.attention_core = parts.attention_core(f"{name}.attention")
        self.projection = parts.linear(proj, spec.hidden_size, out_std)
        self.attention_dropout = parts.dropout(spec.hidden_dropout, f"{name}.attention.out_dropout")
        self.fc1 = parts.norm_linear(f"{name}.mlp_norm", [fc1], std)
        self.fc2 = parts.act_linear(fc2, spec.ffn_hidden_size, out_std)
        self.mlp_dropout = parts.dropout(spec.hidden_dropout, f"{name}.mlp.out_dropout")

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        attended_BSD = self.projection(self.attention_core(self.qkv(x_BSD)))
        x_BSD = x_BSD + self.attention_dropout(attended_BSD)
        out_BSD: torch.Tensor = x_BSD + self.mlp_dropout(self.fc2(self.fc1(x_BSD)))
        return out_BSD
