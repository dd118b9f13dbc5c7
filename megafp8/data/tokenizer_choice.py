"""Interpret `--tokenizer` of the preprocessing command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from megafp8.data.named_tokenizers import huggingface_tokenizer, tiktoken_tokenizer
from megafp8.data.sentencepiece_tokenizer import load_sentencepiece
from megafp8.data.sidecar import end_of_document_beside
from megafp8.data.tokenize import (
    END_OF_DOCUMENT,
    JSON_FILE,
    Tokenizer,
    byte_tokenizer,
    load_json,
    train_tokenizer,
)
from megafp8.errors import DataError

CHOICES = (
    "bpe (trained on the text itself), bytes, a tokenizer.json, hf:NAME_OR_FOLDER, "
    "sentencepiece:FILE, tiktoken:NAME_OR_FILE"
)


def choose_tokenizer(
    name: str,
    end_of_document: str | None,
    *,
    vocab_size: int,
    texts_to_train_on: Callable[[], Iterator[str]],
) -> Callable[[], Tokenizer]:
    """Return a function that makes the tokenizer that `name` names.

    Args:
        name: One of `CHOICES`.
        end_of_document: The token that ends a document; None means the tokenizer's own.
        vocab_size: The vocabulary size of a tokenizer that is trained.
        texts_to_train_on: Returns the texts; called only for a tokenizer that is trained.

    Raises:
        DataError: `name` is unknown, or the end of a document cannot be chosen for it.
    """
    kind, colon, rest = name.partition(":")
    if not colon and name.endswith(".json"):
        path = Path(name)
        return lambda: load_json(path, end_of_document or _recorded_end(path))
    if not colon and name.endswith(".model"):
        kind, rest = "sentencepiece", name
    if not colon and name.endswith(".tiktoken"):
        kind, rest = "tiktoken", name
    if kind == "hf" and rest:
        return lambda: huggingface_tokenizer(rest, end_of_document)
    if kind == "sentencepiece" and rest:
        return lambda: load_sentencepiece(Path(rest), end_of_document)
    if end_of_document not in (None, END_OF_DOCUMENT):
        raise DataError(
            name,
            "end of a document",
            f"is {END_OF_DOCUMENT} with this tokenizer, not {end_of_document}",
            "Leave out --end-of-document",
        )
    if kind == "tiktoken" and rest:
        return lambda: tiktoken_tokenizer(rest)
    if name == "bytes":
        return byte_tokenizer
    if name == "bpe":
        return lambda: train_tokenizer(texts_to_train_on(), vocab_size)
    raise DataError(name, "tokenizer", "is not known", f"Give one of: {CHOICES}")


def _recorded_end(words: Path) -> str:
    """Return the end of a document recorded beside the tokenizer's file, else the usual token."""
    if not words.name.endswith(JSON_FILE):
        return END_OF_DOCUMENT
    prefix = words.name.removesuffix(f".{JSON_FILE}")
    return end_of_document_beside(words.with_name(prefix)) or END_OF_DOCUMENT
