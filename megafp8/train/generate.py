"""Generate text: with a cache of keys and values, or through FP8 for a run's short sample."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megafp8.errors import RunError
from megafp8.models.attention import KVCache
from megafp8.models.gpt import GPT
from megafp8.parallel.context import whole_logits
from megafp8.specs import GPTSpec
from megafp8.train.state import TrainState

ROUND_TO = 16  # FP8 tensor cores need token counts that are multiples of this


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
    """Return `num_tokens` tokens that continue `prompt`, drawn at `temperature`.

    The model computes them as in training, in FP8 if it trains so; scales do not move. There are
    fewer tokens if its outputs are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    limit = state.model.spec.max_position_embeddings
    cp = state.mesh.cp
    parts = math.lcm(2 * cp.size if cp.size > 1 else 1, cp.size * state.mesh.tp.size)
    round_to = _token_multiple(state)
    multiple = math.lcm(round_to, parts)
    window = limit // multiple * multiple or limit // parts * parts
    tokens = list(prompt)
    state.model.eval()
    with state.scaling.evaluation():
        for _ in range(num_tokens):
            context = tokens[-window:]
            # Attention is causal, so that no token sees the padding after it. With FP8 recipes that
            # take a tensor's own amax, padding still counts in the amax.
            padded = context + [0] * min(-len(context) % multiple, window - len(context))
            # A window that is no multiple itself is read several times beside itself.
            copies = round_to // math.gcd(len(padded), round_to)
            batch = torch.tensor([padded] * copies, device=state.mesh.device)
            logits_V = whole_logits(state.model, batch, cp)[0, len(context) - 1, :vocab_size]
            # Ranks that exchange rows must all continue or all stop: they take one rank's logits.
            logits_V = state.mesh.ep.broadcast(logits_V.contiguous(), source=0)
            probs_V = torch.softmax(logits_V.cpu() / temperature, dim=-1)
            if not torch.isfinite(probs_V).all():  # nor are the logits
                break
            tokens.append(int(torch.multinomial(probs_V, 1, generator=generator)))
    state.model.train()
    return tokens[len(prompt) :]


def _token_multiple(state: TrainState) -> int:
    """Return the number that token counts are multiples of, so that each rank's part fits."""
    ranks = state.mesh.tp.size if state.sequence_parallel else 1
    return math.lcm(ROUND_TO, ranks * state.backend.token_multiple())


@dataclass(frozen=True)
class Sampling:
    """Choose the next token: the most likely one at temperature 0, otherwise a random one."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1234

    def choose(self, logits_V: torch.Tensor, generator: torch.Generator) -> int:
        """Return a token, given FP32 logits [V] on the CPU."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        logits_V = logits_V / self.temperature
        if self.top_k is not None and self.top_k < logits_V.numel():
            least = logits_V.topk(self.top_k).values[-1]
            logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
        probs_V = torch.softmax(logits_V, dim=-1)
        if self.top_p is not None:
            sorted_V, order_V = probs_V.sort(descending=True)
            before_V = sorted_V.cumsum(0) - sorted_V  # the most likely one always stays
            probs_V = probs_V.index_fill(0, order_V[before_V >= self.top_p], 0.0)
        return int(torch.multinomial(probs_V, 1, generator=generator))


def beyond_training(spec: GPTSpec, prompt: int, num_tokens: int) -> str | None:
    """Return a warning for a text longer than those the model was trained on, else None.

    `prompt` and `num_tokens` are numbers of tokens.
    """
    total, limit = prompt + num_tokens, spec.max_position_embeddings
    if total <= limit or spec.position_embedding_type == "learned_absolute":
        return None  # `generate` refuses a text beyond learned positions
    return (
        f"{prompt} prompt tokens and up to {num_tokens} more are {total}; the model was trained on "
        f"texts of {limit}. Text after token {limit} may make no sense"
    )


def generate(
    model: GPT, prompt: list[int], num_tokens: int, sampling: Sampling, *, vocab_size: int
) -> Iterator[int]:
    """Yield `num_tokens` tokens that follow `prompt`; see `generate_batch`."""
    for (token,) in generate_batch(model, [prompt], [num_tokens], sampling, vocab_size=vocab_size):
        assert token is not None, "one prompt gets a token at each step"
        yield token


@torch.no_grad()
def generate_batch(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    num_tokens: Sequence[int],
    sampling: Sampling,
    *,
    vocab_size: int,
    done: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Yield steps: the token that follows each prompt and its tokens so far.

    Each past token is computed once. The model reads all prompts up to the length of the shortest
    one at once, and from there on one token of each at a time, its prompt's or a new one. So all
    have the places that they have alone. Each is drawn by a generator of its own with the same
    seed.

    Args:
        model: The model.
        prompts: The tokens of each prompt, one or more.
        num_tokens: How many tokens each prompt gets.
        sampling: How tokens are chosen.
        vocab_size: Tokens from this number on are padding and never chosen.
        done: The numbers of the prompts that need no further tokens; the caller may add to it.

    Yields:
        A token for each prompt, or None where its own tokens are still read or no more are needed.

    Raises:
        RunError: A text would be longer than the model's learned positions, a prompt has a token
            that the model's embedding does not have, or the model's outputs are not finite.
    """
    for prompt, count in zip(prompts, num_tokens, strict=True):
        check_prompt(model.spec, prompt, count)
    model.eval()
    device = next(model.parameters()).device
    generators = [torch.Generator().manual_seed(sampling.seed) for _ in prompts]
    place = min(map(len, prompts))  # of the tokens that are chosen next
    cache, fed = KVCache(), [list(prompt[:place]) for prompt in prompts]
    ends = [len(prompt) + count for prompt, count in zip(prompts, num_tokens, strict=True)]
    while any(place < end and row not in done for row, end in enumerate(ends)):
        with kernels_of_any_length(device):
            logits_BSV = model.logits(torch.tensor(fed, device=device), cache)
        logits_BV = logits_BSV[:, -1, :vocab_size].cpu()
        if not torch.isfinite(logits_BV).all():
            raise RunError(
                f"the model's outputs are not finite after {place} tokens. Name an earlier "
                "checkpoint, or another run"
            )
        tokens: list[int | None] = [None] * len(prompts)
        for row, prompt in enumerate(prompts):
            if len(prompt) <= place < ends[row] and row not in done:
                tokens[row] = sampling.choose(logits_BV[row], generators[row])
            fed[row] = [prompt[place] if place < len(prompt) else tokens[row] or 0]
        place += 1
        yield tokens


def check_prompt(spec: GPTSpec, prompt: Sequence[int], num_tokens: int) -> None:
    """Raise `RunError` if a model cannot continue a prompt by a number of tokens."""
    limit, total = spec.max_position_embeddings, len(prompt) + num_tokens
    if spec.position_embedding_type == "learned_absolute" and total > limit:
        raise RunError(
            f"{len(prompt)} prompt tokens and {num_tokens} more are {total}; the model has "
            f"{limit} positions. Ask for at most {max(0, limit - len(prompt))}, or shorten the "
            "prompt"
        )
    if max(prompt) >= spec.vocab_size:
        raise RunError(
            f"the prompt has token {max(prompt)}, and the model's embedding has {spec.vocab_size} "
            "rows. Leave out what becomes that token, which the model was never trained with"
        )


@contextmanager
def kernels_of_any_length(device: torch.device) -> Iterator[None]:
    """Let attention take no kernel that is planned again for each number of keys.

    On Hopper and Blackwell torch takes cuDNN's first, which the host plans for each shape. A text
    that grows by a token has another shape each time.
    """
    if device.type != "cuda":
        yield
        return
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(others):
        yield
