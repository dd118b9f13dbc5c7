"""Name the healthy models that coverage must not complain of; the list came before the tool."""

from __future__ import annotations

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
