"""Small datasets and corpora for the tests of `megafp8.data`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from megafp8.data.builtin import Corpus, Document
from megafp8.data.indexed import IndexedDataset, IndexedWriter
from megafp8.specs import DataSpec, TokenizerSpec

EOD = 0


def write_dataset(
    prefix: Path, documents: Sequence[Sequence[int]], dtype: object = "uint16"
) -> IndexedDataset:
    with IndexedWriter(prefix, dtype) as writer:
        for tokens in documents:
            writer.add_document(tokens)
    return IndexedDataset(prefix)


def numbered_documents(count: int, seed: int = 0) -> list[list[int]]:
    """Documents of 1 to 40 tokens, all different, each with an EOD."""
    lengths = np.random.default_rng(seed).integers(1, 41, count)
    numbers = iter(range(1, 60000))
    return [[next(numbers) for _ in range(length - 1)] + [EOD] for length in lengths]


def tiny_documents(count: int = 40) -> Iterator[Document]:
    """Python-like texts with every kind of trouble: other scripts, CRLF, controls, a fake EOD."""
    odd = ["π ≈ 3.14159 — «да» 漢字 🐍\n", "a\r\nb\rc\x00\x7f\ufeff\n", "x <|endoftext|> y\n", "\n"]
    for number in range(count):
        body = "".join(
            f"def function_{number}_{i}(x):\n    return x * {i}\n" for i in range(number % 7 + 1)
        )
        yield Document(f"tiny/{number}", body + odd[number % len(odd)])


def tiny_corpus(documents: Callable[[], Iterator[Document]] = tiny_documents) -> Corpus:
    return Corpus("builtin", lambda: "tiny", documents)


def data_spec(cache: Path | None, prefix: str = "builtin", **changes: object) -> DataSpec:
    fields: dict[str, object] = {
        "prefix": prefix,
        "cache_dir": None if cache is None else str(cache),
        "splits": (80.0, 20.0, 0.0),
        "seq_length": 16,
        "tokenizer": TokenizerSpec(library="builtin", vocab_size=300),
        "seed": 7,
    }
    return DataSpec(**{**fields, **changes})  # type: ignore[arg-type]
