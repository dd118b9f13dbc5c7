"""Define and time a GPT in plain PyTorch, the reference of `cpu_step.py`.

The file imports nothing from megafp8 and makes no process-wide setting. Run as a program, it times
one forward and backward pass on each request, and prints a JSON line (see `cpu_step.py`). With
`torchao` as dtype, the model is in BF16, and torchao converts its linears (tensorwise,
`emulate=True`): this is the other way to run FP8 without FP8 tensor cores.
"""

# B batch  S sequence  D model width  F width between the MLP's linears

from __future__ import annotations

import importlib
import json
import math
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Compute one transformer layer, [B, S, D] -> [B, S, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after attention and MLP."""
        batch, seq, width = x_BSD.shape
        q, k, v = (
            part.view(batch, seq, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x_BSD)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.proj(attended.transpose(1, 2).reshape(batch, seq, width))
        inner_BSF = F.gelu(self.fc1(self.norm2(x_BSD)), approximate="tanh")  # our presets' form
        return x_BSD + self.fc2(inner_BSF)


class PlainGPT(nn.Module):
    """Compute the loss of a GPT with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, seq: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        """Return the mean loss in nats per token."""
        x_BSD = self.word(tokens_BS) + self.position.weight
        for block in self.blocks:
            x_BSD = block(x_BSD)
        logits = F.linear(self.norm(x_BSD), self.word.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets_BS.flatten())


def emulated_fp8(model: PlainGPT) -> PlainGPT:
    """Return the model with its linears converted to torchao's emulated FP8."""
    convert = importlib.import_module("torchao.float8")
    config = convert.Float8LinearConfig(emulate=True)
    converted: PlainGPT = convert.convert_to_float8_training(model, config=config)
    return converted


def main() -> None:
    """Time one step for each line of standard input.

    The arguments are: layers width heads vocab batch seq dtype threads.
    """
    layers, width, heads, vocab, batch, seq = map(int, sys.argv[1:7])
    torch.set_num_threads(int(sys.argv[8]))
    torch.manual_seed(0)
    is_torchao = sys.argv[7] == "torchao"
    dtype = torch.bfloat16 if is_torchao else getattr(torch, sys.argv[7])
    model = PlainGPT(layers, width, heads, vocab, seq).to(dtype)
    if is_torchao:
        model = emulated_fp8(model)
    tokens = torch.randint(vocab, (batch, seq))
    targets = torch.randint(vocab, (batch, seq))
    for _ in sys.stdin:
        model.zero_grad(set_to_none=True)
        began, began_cpu = time.perf_counter(), time.process_time()
        loss = model(tokens, targets)
        loss.backward()
        seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        assert math.isfinite(loss.item())
        print(json.dumps({"seconds": seconds, "cpu": cpu, "loss": loss.item()}), flush=True)


if __name__ == "__main__":
    main()
