"""Small models of other people, and how the tests train them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn

from megafp8 import fp8

VOCABULARY = 64


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # ranks need no transformers

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def mlp(width: int = 32, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, 2 * width, bias=bias), nn.GELU(), nn.Linear(2 * width, width, bias=bias)
    )


def old_weight_norm(linear: nn.Module) -> None:
    with warnings.catch_warnings():  # torch calls it deprecated; models of others have it
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(linear)


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(step: int, batch: int = 4, length: int = 16) -> torch.Tensor:
    """Counting sequences with strides of 1 to 3."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(VOCABULARY, (batch, 1), generator=generator)
    strides = torch.randint(1, 4, (batch, 1), generator=generator)
    return (starts + strides * torch.arange(length)) % VOCABULARY


def train(
    model: nn.Module,
    state: fp8.Fp8State | None,
    steps: Sequence[int],
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """One microbatch a step; returns the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in steps:
        with state.microbatch() if state else nullcontext():
            loss = model(input_ids=tokens(step), labels=tokens(step)).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
