"""Which settings of data and tokenizer fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megafp8.config.data_prefix import prefixes_in
from megafp8.specs.data import BUILTIN_CORPUS

NEMO_TYPE = "GPT2BPETokenizer"  # NeMo's files give it with every library
_NEEDED = {
    "huggingface": ("type",),
    "sentencepiece": ("model",),
    "tiktoken": ("model",),
    "megatron": ("vocab_file", "merge_file"),
}
TOKENIZER_KEYS = tuple(
    f"model.tokenizer.{name}" for name in ("library", "type", "model", "vocab_file", "merge_file")
)

Found = tuple[str, str, str]


def tokenizer_is_named(v: Mapping[str, Any]) -> Iterator[Found]:
    """Key, reason and way out where a library lacks what names its tokenizer, or has too much."""
    library = v["model.tokenizer.library"]
    needed = _NEEDED.get(library, ())
    way_out = "Give it, or use model.tokenizer.library=builtin, which takes the data's own"
    for name in ("type", "model", "vocab_file", "merge_file"):
        key = f"model.tokenizer.{name}"
        value = v[key]
        wanted = name in needed
        if wanted and not value:
            yield key, f"is needed with model.tokenizer.library={library}", way_out
        elif value and not wanted and not (name == "type" and value == NEMO_TYPE):
            yield key, f"means nothing with model.tokenizer.library={library}", "Leave it out"
    if library == "huggingface" and v["model.tokenizer.type"] == NEMO_TYPE:
        reason = "names no tokenizer of model.tokenizer.library=huggingface"
        yield "model.tokenizer.type", reason, "Give a name on the Hub, or a folder"


def builtin_has_its_tokenizer(v: Mapping[str, Any]) -> Iterator[Found]:
    """The built-in corpus is tokenized by its own tokenizer."""
    library = v["model.tokenizer.library"]
    if library != "builtin" and BUILTIN_CORPUS in prefixes_in(v["model.data.data_prefix"]):
        yield (
            "model.tokenizer.library",
            "the built-in corpus has a tokenizer of its own",
            "Leave it out, or prepare that text with yours: python -m megafp8.cli.preprocess",
        )
