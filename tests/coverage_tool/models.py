"""Build the healthy models that coverage must not complain of; the list came before the tool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

HEALTHY = (
    "MLP by fp8.convert, tensorwise",
    "MLP by fp8.convert, delayed",
    "MLP by fp8.convert, blockwise",
    "Llama by fp8.convert, rowwise",
    "Qwen3 by fp8.convert, mxfp8",
    "GPT-2 by fp8.convert, tensorwise",
    "BERT by fp8.convert, tensorwise",
    "Llama by torchao, emulated",
    "Mistral by torchao, on meta",
    "nn.TransformerEncoderLayer by fp8.convert, recomputed",
)
WIDTH = 64


def mlp(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def of_transformers(family: str, **more: Any) -> nn.Module:
    """Return a small causal model, or BERT, of transformers."""
    transformers = __import__("transformers")
    if family == "GPT2":
        sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    else:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 2,
                 "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
        sizes |= {} if family == "Bert" else {"num_key_value_heads": 1, "head_dim": 32}
    config = getattr(transformers, f"{family}Config")(vocab_size=96, **sizes, **more)
    kind = (
        "ForMaskedLM" if family == "Bert" else "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    )
    model: nn.Module = getattr(transformers, family + kind)(config)
    return model


def by_torchao(model: nn.Module, *, emulate: bool) -> nn.Module:
    """Let torchao convert all linears but the output layer."""
    from megafp8.backends.torchao import import_torchao

    float8 = import_torchao()
    converted: nn.Module = float8.convert_to_float8_training(
        model,
        config=float8.Float8LinearConfig(emulate=emulate),
        module_filter_fn=lambda module, name: name != "lm_head",
    )
    return converted


def loss_of(model: nn.Module, device: str = "cpu") -> torch.Tensor:
    """Return the loss of a model of transformers for 32 tokens."""
    ids = torch.zeros(2, 16, dtype=torch.long, device=device)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


Built = tuple[nn.Module, Callable[[], torch.Tensor], AbstractContextManager[object]]


def healthy(name: str) -> Built:
    """Return a model of `HEALTHY`, what computes its loss, and what a step runs in."""
    from megafp8 import fp8

    family, _, how = name.partition(" by ")
    if how.startswith("torchao"):
        device = "meta" if "meta" in how else "cpu"
        with torch.device(device):
            model = by_torchao(of_transformers(family), emulate=device == "cpu")
        return model, lambda: loss_of(model, device), nullcontext()
    recipe = how.split(", ")[1].replace("recomputed", "tensorwise")
    if family == "MLP":
        model = mlp(128 if recipe == "blockwise" else WIDTH)
        x = torch.randn(16, model[0].in_features, requires_grad=True)
        run = lambda: model(x).sum()  # noqa: E731
    elif family.startswith("nn."):
        model = nn.TransformerEncoderLayer(WIDTH, 2, 128, batch_first=True)
        x = torch.randn(2, 16, WIDTH, requires_grad=True)
        run = lambda: checkpoint(model, x, use_reentrant=False).sum()  # noqa: E731
    else:
        model = of_transformers({"GPT-2": "GPT2", "BERT": "Bert"}.get(family, family))
        run = lambda: loss_of(model)  # noqa: E731
    skip = {
        "Bert": "cls.*",
        "BERT": "cls.*",
        "MLP": None,
        "nn.TransformerEncoderLayer": "self_attn*",
    }
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which passes the encoder's linears over
    state = fp8.convert(model, recipe=recipe, **_skip(skip.get(family, "lm_head")))
    torch.backends.mha.set_fastpath_enabled(fast)
    return model, run, state.microbatch()


def _skip(pattern: str | None) -> dict[str, str]:
    return {} if pattern is None else {"skip": pattern}
