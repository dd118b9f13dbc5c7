"""Say which tokenizer's vocabulary a job is planned with, where its data are not opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megafp8.specs.data import BUILTIN_CORPUS

DATA_KEY, SIZE_KEY = "model.data.data_prefix", "model.tokenizer.vocab_size"


class Vocabulary(NamedTuple):
    """Hold the number of a tokenizer's tokens, before padding, and whose they are in words."""

    size: int
    whose: str


GPT2 = Vocabulary(50257, "of GPT-2")  # GPT-3's tokenizer, too (Brown et al. 2020, section 2.2)
LLAMA3 = Vocabulary(128256, "of Llama 3")
QWEN3 = Vocabulary(151936, "of Qwen3")  # its rows, which are more than its tokens
MISTRAL = Vocabulary(32768, "of Mistral 7B v0.3")
MIXTRAL = Vocabulary(32000, "of Mixtral 8x7B")
OF_PRESETS = {
    "gpt3_125m": GPT2,
    "gpt3_1.3b": GPT2,
    "gpt3_2.7b": GPT2,
    "gpt3_5b": GPT2,
    "gpt3_6.7b": GPT2,
    "gpt3_13b": GPT2,
    "gpt3_175b": GPT2,
    "llama3_8b": LLAMA3,
    "llama3_70b": LLAMA3,
    "llama3.1_8b": LLAMA3,
    "qwen3_0.6b": QWEN3,
    "qwen3_8b": QWEN3,
    "qwen3_30b_a3b": QWEN3,
    "mistral_7b": MISTRAL,
    "mixtral_8x7b": MIXTRAL,
}
"""The vocabulary of each preset of `model=` that has the shape of a published model. A preset
cannot set it: the tokenizer of the data decides it."""


def asked_vocabulary(
    origins: Mapping[str, str], prefix: object, builtin_size: int
) -> Vocabulary | None:
    """Return the vocabulary that the settings speak of, or None if only the data can tell it.

    Args:
        origins: The layer that set each key, as `Loaded.origins`.
        prefix: The run's `model.data.data_prefix`; None if it has examples instead.
        builtin_size: The run's `model.tokenizer.vocab_size`.
    """
    if prefix != BUILTIN_CORPUS:
        return None
    if SIZE_KEY in origins:
        return Vocabulary(builtin_size, f"of {SIZE_KEY}={builtin_size}")
    if DATA_KEY in origins:
        return None
    first = "preset model="
    presets = {text.removeprefix(first) for text in origins.values() if text.startswith(first)}
    known = [OF_PRESETS[name] for name in sorted(presets) if name in OF_PRESETS]
    return known[0] if known else None
