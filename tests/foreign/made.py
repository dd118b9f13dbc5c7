"""Make small folders as users download them, for tests that damage them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megafp8.checkpoint.huggingface import mapping, to_config
from megafp8.data.tokenize import byte_tokenizer
from megafp8.specs import GPTSpec
from megafp8.specs.parameters import logical_shapes

GPT2 = GPTSpec(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=32,
    num_attention_heads=2,
    max_position_embeddings=8,
    vocab_size=272,
    init_method_std=0.02,
    use_scaled_init_method=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    ffn_dropout=0.0,
    layernorm_epsilon=1e-5,
)


def make_model(folder: Path, **changed: Any) -> Path:
    """Write a GPT-2 of transformers' form with a tokenizer; `changed` are keys of config.json."""
    folder.mkdir(parents=True)
    tensors = {}
    for entry in mapping(GPT2):
        first, *rest = logical_shapes(GPT2)[entry.ours[0]]
        shape = (len(entry.ours) * first, *rest)
        tensors[entry.theirs] = torch.full(shape[::-1] if entry.transposed else shape, 0.01)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = to_config(GPT2, torch.float32, 256) | changed
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


def into_cache(model: Path, cache: Path) -> Path:
    """Move a model's files into the layout of Hugging Face's cache; return its snapshot."""
    blobs, snapshot = cache / "models--a--b" / "blobs", cache / "models--a--b" / "snapshots" / "0f"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot
