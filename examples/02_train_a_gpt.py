"""Train the same small GPT in BF16 and in FP8, on tokens that a model can learn to predict.

The model is plain PyTorch. `fp8.convert` turns its linears into FP8 linears; the training loop
needs `state.microbatch()` in addition.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from megafp8 import fp8

torch.set_num_threads(1)  # more threads do not help such a small model
STEPS, VOCABULARY, WIDTH, HEADS, LENGTH = 60, 64, 64, 4, 32


class Layer(nn.Module):
    """Compute one pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after attention and MLP, [B, S, D] -> [B, S, D]."""
        qkv = self.qkv(self.norm1(x_BSD)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, S, WIDTH / heads]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.projection(attended.transpose(1, 2).flatten(2))
        return x_BSD + self.fc2(F.gelu(self.fc1(self.norm2(x_BSD))))


class GPT(nn.Module):
    """Compute the loss of two layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for weight in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each of the tokens [B, S + 1] after the first."""
        x_BSD = self.tokens(tokens_BS[:, :-1]) + self.positions.weight
        logits = self.head(self.norm(self.layers(x_BSD)))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens_BS[:, 1:].flatten())


def batches() -> Iterator[torch.Tensor]:
    """Yield batches of sequences that count in steps of 1 to 3, modulo the vocabulary."""
    rng = np.random.default_rng(0)
    while True:
        starts, strides = rng.integers(VOCABULARY, size=(16, 1)), rng.integers(1, 4, (16, 1))
        yield torch.from_numpy((starts + strides * np.arange(LENGTH + 1)) % VOCABULARY)


def start(
    recipe: str | fp8.Fp8Recipe | None,
) -> tuple[GPT, torch.optim.Optimizer, fp8.Fp8State | None]:
    """Return a model and its optimizer; with a recipe, all linears but the head are in FP8."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    return model, optimizer, fp8.convert(model, recipe, skip="head") if recipe else None


def losses(recipe: str | None, steps: int = STEPS) -> list[float]:
    """Train with FP32 weights and products in BF16 or FP8; return the loss of each step."""
    (model, optimizer, state), found = start(recipe), []
    for _, tokens_BS in zip(range(steps), batches(), strict=False):
        with state.microbatch() if state else nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens_BS)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    print("step    BF16     FP8   (nats per token)")
    both = zip(losses(None), losses("delayed"), strict=True)
    for step, (bf16, in_fp8) in enumerate(both, start=1):
        if step == 1 or step % 10 == 0:
            print(f"{step:4} {bf16:7.4f} {in_fp8:7.4f}")
