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


TINY: dict[str, int] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(**TINY, intermediate_size=64, num_key_value_heads=1, num_local_experts=4)
    return MixtralForCausalLM(config)


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        **TINY | {"num_hidden_layers": 3}, intermediate_size=64, moe_intermediate_size=32,
        num_key_value_heads=2, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def mixture(family: str, implementation: str = "eager") -> nn.Module:
    """A mixture of experts of transformers, by the beginning of its classes' names."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, int] = {
        "intermediate_size": 64, "num_key_value_heads": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "head_dim": 16,
    }  # fmt: skip
    number = "num_experts" if family.startswith(("Qwen", "Olmoe")) else "num_local_experts"
    config = getattr(transformers, f"{family}Config")(**TINY | sizes | {number: 4})
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    model.set_experts_implementation(implementation)
    return model


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
