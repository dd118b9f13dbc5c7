"""Text from a model: with a cache of keys and values, or through FP8 for a run's short sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megafp8.errors import RunError
from megafp8.models.attention import KVCache
from megafp8.models.gpt import GPT
from megafp8.parallel.context import whole_logits
from megafp8.specs import GPTSpec
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
    limit = state.model.spec.max_position_embeddings
    cp = state.mesh.cp
    parts = math.lcm(2 * cp.size if cp.size > 1 else 1, cp.size * state.mesh.tp.size)
    multiple = math.lcm(ROUND_TO, parts)
    window = limit // multiple * multiple or limit // parts * parts
    tokens = list(prompt)
    state.model.eval()
    with state.scaling.evaluation():
        for _ in range(num_tokens):
            context = tokens[-window:]
            # Padding at the end changes nothing before it: attention is causal.
            padded = context + [0] * min(-len(context) % multiple, window - len(context))
            batch = torch.tensor([padded], device=state.mesh.device)
            logits_V = whole_logits(state.model, batch, cp)[0, len(context) - 1, :vocab_size]
            probs_V = torch.softmax(logits_V.cpu() / temperature, dim=-1)
            tokens.append(int(torch.multinomial(probs_V, 1, generator=generator)))
    state.model.train()
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest at temperature 0, else drawn."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1234

    def choose(self, logits_V: torch.Tensor, generator: torch.Generator) -> int:
        """One token from FP32 logits on the CPU."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        logits_V = logits_V / self.temperature
        if self.top_k is not None and self.top_k < logits_V.numel():
            least = logits_V.topk(self.top_k).values[-1]
            logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
        probs_V = torch.softmax(logits_V, dim=-1)
        if self.top_p is not None:
            sorted_V, order_V = probs_V.sort(descending=True)
            before_V = sorted_V.cumsum(0) - sorted_V  # the likeliest always stays
            probs_V = probs_V.index_fill(0, order_V[before_V >= self.top_p], 0.0)
        return int(torch.multinomial(probs_V, 1, generator=generator))


def beyond_training(spec: GPTSpec, prompt: int, num_tokens: int) -> str | None:
    """What to tell of a text longer than those that the model was trained on, if it is."""
    total, limit = prompt + num_tokens, spec.max_position_embeddings
    if total <= limit or spec.position_embedding_type == "learned_absolute":
        return None  # or refused, by `generate`
    return (
        f"{prompt} tokens of prompt and up to {num_tokens} more are {total}; the model was trained "
        f"on {limit}. What follows token {limit} may make no sense"
    )


@torch.no_grad()
def generate(
    model: GPT, prompt: list[int], num_tokens: int, sampling: Sampling, *, vocab_size: int
) -> Iterator[int]:
    """Up to `num_tokens` tokens after `prompt`; each past token is computed once.

    Tokens from `vocab_size` on are padding and never chosen.

    Raises:
        RunError: The model's learned positions end before the text would.
    """
    spec, total = model.spec, len(prompt) + num_tokens
    limit = spec.max_position_embeddings
    if spec.position_embedding_type == "learned_absolute" and total > limit:
        raise RunError(
            f"{len(prompt)} tokens of prompt and {num_tokens} more are {total}; the model has "
            f"{limit} positions. Ask for at most {max(0, limit - len(prompt))}, or shorten the "
            "prompt"
        )
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    cache, tokens = KVCache(), prompt
    for _ in range(num_tokens):
        logits_SV = model.logits(torch.tensor([tokens], device=device), cache)[0]
        token = sampling.choose(logits_SV[-1, :vocab_size].cpu(), generator)
        yield token
        tokens = [token]
