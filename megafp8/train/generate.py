"""Sample text from a model; no cache of keys and values: for the short sample of a run's end."""

from __future__ import annotations

import torch

from megafp8.train.state import TrainState

ROUND_TO = 16  # FP8 GEMMs on hardware want token counts in multiples of this


@torch.no_grad()
def sample(
    state: TrainState,
    prompt: list[int],
    num_tokens: int,
    *,
    vocab_size: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """Continue `prompt` by up to `num_tokens` tokens drawn at `temperature`; returns them alone."""
    generator = torch.Generator().manual_seed(seed)
    window = state.model.spec.max_position_embeddings
    tokens = list(prompt)
    state.model.eval()
    with state.scaling.evaluation():
        for _ in range(num_tokens):
            context = tokens[-window:]
            # Padding at the end changes nothing before it: attention is causal.
            padded = context + [0] * (-len(context) % ROUND_TO)
            batch = torch.tensor([padded], device=state.mesh.device)
            logits_V = state.model.logits(batch)[0, len(context) - 1, :vocab_size]
            probs_V = torch.softmax(logits_V.cpu() / temperature, dim=-1)
            tokens.append(int(torch.multinomial(probs_V, 1, generator=generator)))
    state.model.train()
    return tokens[len(prompt) :]
