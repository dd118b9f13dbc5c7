"""The GPT: embedding, layers, final norm, head and loss."""

# B batch  S sequence  D model width  V vocabulary

from __future__ import annotations

import torch
from torch import nn

from megafp8.models.parts import Parts


class GPT(nn.Module):
    """A decoder-only transformer with tied input and output embeddings."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.spec = parts.spec
        self.embedding = parts.embedding()
        self.layers = nn.ModuleList(parts.layer(index) for index in range(parts.spec.num_layers))
        self.final_norm = parts.norm("final_norm")
        self.head_loss = parts.head_loss()

    def hidden(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """[B, S] int64 -> [B, S, D] after the final norm."""
        x_BSD: torch.Tensor = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        out: torch.Tensor = self.final_norm(x_BSD)
        return out

    def forward(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        """The sum of the cross entropy over counted targets: FP32 scalar, nats."""
        loss: torch.Tensor = self.head_loss(self.hidden(tokens_BS), self.embedding.word, targets_BS)
        return loss

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """[B, S] -> FP32 [B, S, V], for generation."""
        return self.head_loss.logits(self.hidden(tokens_BS), self.embedding.word)
