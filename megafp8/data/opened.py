"""Open an indexed dataset with its tokenizer and the fingerprint of its content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megafp8.data.indexed import IndexedDataset, bin_path, idx_path
from megafp8.data.named_tokenizers import load_tokenizer
from megafp8.data.sidecar import (
    Sidecar,
    end_of_document_beside,
    find_beside,
    load_sidecar,
    recorded_vocab_size,
    sampled_fingerprint,
    verify_files,
)
from megafp8.data.tokenize import TOKENIZER_FILES, Tokenizer
from megafp8.errors import DataError


@dataclass(frozen=True)
class OpenedDataset:
    """Holds one dataset; `fingerprint` depends on content and tokenizer, not on paths and times."""

    dataset: IndexedDataset
    tokenizer: Tokenizer
    fingerprint: str


def open_prefix(
    prefix: Path, notify: Callable[[str], None], given: Tokenizer | None = None
) -> OpenedDataset:
    """Open a dataset that the user has prepared.

    Args:
        prefix: The dataset's path without `.bin` and `.idx`.
        notify: Receives a line about each thing that the user should know.
        given: The tokenizer that the configuration names; None means the one beside the dataset.

    Raises:
        DataError: Files are missing or damaged, or the tokenizer is not that of the data.
    """
    dataset = IndexedDataset(prefix)
    if dataset.num_tokens == 0:
        raise DataError(
            idx_path(prefix),
            "sequence count",
            f"is {dataset.num_sequences}: there is not one token",
            "Prepare the dataset again from a corpus that has text",
        )
    words = _tokenizer_beside(prefix)
    if words is None and given is None:
        raise DataError(
            prefix.with_name(f"{prefix.name}.tokenizer.json"),
            "tokenizer",
            f"is missing, and so is {prefix.with_name('tokenizer.json')}",
            "Put the tokenizer that the dataset was tokenized with beside it, or name it by "
            "model.tokenizer",
        )
    tokenizer = given
    if words is not None and tokenizer is None:
        tokenizer = load_tokenizer(words, end_of_document_beside(prefix))
    assert tokenizer is not None
    _check_vocabulary_size(prefix, tokenizer)
    sidecar = _sidecar_of(prefix, words, notify)
    if sidecar is not None and words is not None:
        _check_same(prefix, words, given, sidecar.end_of_document)
        verify_files(prefix.parent, sidecar, whole=False)
        return OpenedDataset(dataset, tokenizer, sidecar.fingerprint)
    if words is not None:
        _check_same(prefix, words, given, end_of_document_beside(prefix))
    return OpenedDataset(dataset, tokenizer, sampled_fingerprint(prefix, tokenizer.digest))


def _tokenizer_beside(prefix: Path) -> Path | None:
    mine = [prefix.with_name(f"{prefix.name}.{name}") for name in TOKENIZER_FILES]
    of_folder = [prefix.with_name(name) for name in TOKENIZER_FILES]
    return next((path for path in [*mine, *of_folder] if path.is_file()), None)


def _check_vocabulary_size(prefix: Path, tokenizer: Tokenizer) -> None:
    recorded = recorded_vocab_size(prefix)
    if recorded is not None and recorded != tokenizer.vocab_size:
        raise DataError(
            find_beside(prefix, "dataset.json"),
            "vocab_size",
            f"the dataset was made with a vocabulary of {recorded}; this tokenizer's has "
            f"{tokenizer.vocab_size}",
            "Use the tokenizer that the dataset was made with",
        )


def _check_same(prefix: Path, words: Path, given: Tokenizer | None, eod: str | None) -> None:
    """Raise DataError if the configured tokenizer is not the one recorded with the dataset."""
    if given is None:
        return
    recorded = load_tokenizer(words, eod)
    if recorded.digest != given.digest:
        raise DataError(
            words,
            "vocabulary",
            f"is of {recorded.vocab_size} tokens and recorded with the dataset; the one that "
            f"model.tokenizer names ({given.vocab_size} tokens) is another",
            "Leave model.tokenizer.library=builtin, which takes the recorded one, or prepare the "
            "dataset with the other",
        )


def _sidecar_of(prefix: Path, words: Path | None, notify: Callable[[str], None]) -> Sidecar | None:
    """Return the dataset's sidecar if there is one and it describes exactly these files."""
    path = find_beside(prefix, "dataset.json")
    if path is None or words is None:
        return None
    try:
        sidecar = load_sidecar(path)
    except DataError as error:  # another tool's dataset.json may hold only the end of a document
        notify(f"data: parts of the dataset are hashed instead of all of it: {error}")
        return None
    names = [record.name for record in sidecar.files]
    mine = [bin_path(prefix).name, idx_path(prefix).name, words.name]
    return sidecar if names == mine else None
