"""Use SentencePiece models as tokenizers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megafp8.data.tokenize import SENTENCEPIECE_FILE
from megafp8.errors import DataError


class SentencePieceTokenizer:
    """Wraps a SentencePiece model; its end of a sentence, `</s>`, ends a document."""

    file_name = SENTENCEPIECE_FILE

    def __init__(self, processor: Any, eod_id: int) -> None:
        self._processor = processor
        self.eod_id = eod_id
        self.end_of_document = str(processor.id_to_piece(eod_id))
        self.vocab_size = int(processor.get_piece_size())

    @property
    def digest(self) -> str:
        """Return a hash of the model's content and of the end of a document."""
        model = hashlib.sha256(self._processor.serialized_model_proto()).hexdigest()
        return hashlib.sha256(f"{self.eod_id}\n{model}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the token numbers of `text`, without an end-of-document token."""
        ids: list[int] = self._processor.encode(text, out_type=int)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text."""
        threads = int(os.environ.get("RAYON_NUM_THREADS", 0)) or os.cpu_count() or 1
        ids: list[list[int]] = self._processor.encode(
            list(texts), out_type=int, num_threads=threads
        )
        return ids

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of `ids`."""
        text: str = self._processor.decode([int(number) for number in ids])
        return text

    def save(self, path: Path) -> None:
        """Write the model file to `path`."""
        path.write_bytes(self._processor.serialized_model_proto())


def load_sentencepiece(path: Path, end_of_document: str | None) -> SentencePieceTokenizer:
    """Read a `.model` file.

    Args:
        path: The file.
        end_of_document: The piece that ends a document; None means the model's end of a sentence.

    Raises:
        DataError: The file cannot be read, the package is missing, or no piece ends a document.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError(
            path, "tokenizer", "needs the sentencepiece package", "pip install sentencepiece"
        ) from error
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        size = processor.get_piece_size()
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(
            path, "tokenizer", f"cannot be read ({error})", "Give a SentencePiece .model file"
        ) from error
    eod_id = processor.eos_id() if end_of_document is None else processor[end_of_document]
    if not 0 <= eod_id < size or eod_id == processor.unk_id():
        raise DataError(
            path,
            "vocabulary",
            "has no end of a sentence"
            if end_of_document is None
            else f"has no {end_of_document!r}",
            "Name the piece that is to end a document",
        )
    return SentencePieceTokenizer(processor, eod_id)
