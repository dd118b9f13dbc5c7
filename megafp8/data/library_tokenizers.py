"""Load the tokenizers of SentencePiece and tiktoken."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megafp8.data.tokenize import (
    END_OF_DOCUMENT,
    MAX_TOKENIZER_BYTES,
    MAX_VOCABULARY,
    SENTENCEPIECE_FILE,
    TIKTOKEN_FILE,
)
from megafp8.errors import DataError
from megafp8.foreign import parse_json, read_bytes

VERSION = 1
# A file that holds only ranks cuts texts before merging as GPT-2 does.
PLAIN_RANKS_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
)


class SentencePieceTokenizer:
    """Wrap a SentencePiece model; its end of a sentence, `</s>`, ends a document."""

    file_name = SENTENCEPIECE_FILE
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    def __init__(self, processor: Any, eod_id: int) -> None:
        self._processor = processor
        self.bos_id = int(processor.bos_id()) if processor.bos_id() >= 0 else None
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

    def encode_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of texts in which control pieces are written out, as `</s>`.

        The text between two of them is encoded by itself, as Megatron does it.
        """
        controls = {p: n for n, p in self.tokens().items() if self._processor.is_control(n)}
        longest_first = sorted(map(re.escape, controls), key=len, reverse=True)
        split = re.compile(f"({'|'.join(longest_first) or '(?!)'})").split

        def ids(part: str) -> list[int]:
            return [controls[part]] if part in controls else self.encode(part)

        return [[n for part in split(text) if part for n in ids(part)] for text in texts]

    def tokens(self) -> dict[int, str]:
        """Return the text of each piece, by its number."""
        return {number: self._processor.id_to_piece(number) for number in range(self.vocab_size)}

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
    sentencepiece = needed("sentencepiece", path)
    try:
        processor = sentencepiece.SentencePieceProcessor(
            model_proto=read_bytes(path, MAX_TOKENIZER_BYTES)
        )
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
            "Name the piece that is to end a document: --end-of-document PIECE",
        )
    return SentencePieceTokenizer(processor, eod_id)


class TiktokenTokenizer:
    """Wrap an encoding of tiktoken; its `<|endoftext|>` ends a document."""

    file_name = TIKTOKEN_FILE
    end_of_document = END_OF_DOCUMENT
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    bos_id: int | None = None  # an encoding says of none of its special tokens that it begins texts

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self.eod_id = int(encoding.eot_token)
        self.vocab_size = int(encoding.n_vocab)

    @property
    def digest(self) -> str:
        """Return a hash of the encoding's content."""
        return hashlib.sha256(self._text().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the token numbers of `text`, without an end-of-document token."""
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text."""
        threads = int(os.environ.get("RAYON_NUM_THREADS", 0)) or os.cpu_count() or 1
        if threads == 1:
            return [self.encode(text) for text in texts]
        ids: list[list[int]] = self._encoding.encode_ordinary_batch(
            list(texts), num_threads=threads
        )
        return ids

    def encode_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of texts in which special tokens are written out."""
        return [self._encoding.encode(text, allowed_special="all") for text in texts]

    def tokens(self) -> dict[int, str]:
        """Return the bytes of each token as letters of Latin-1, by the token's number."""
        known = self._encoding.token_byte_values()
        words = {self._encoding.encode_single_token(word): word.decode("latin-1") for word in known}
        return words | {n: token for token, n in self._encoding._special_tokens.items()}

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of `ids`; a token that ends inside a character gives U+FFFD."""
        text: str = self._encoding.decode([int(number) for number in ids])
        return text

    def save(self, path: Path) -> None:
        """Write the whole encoding to `path`, for `load_tiktoken`."""
        path.write_text(self._text(), encoding="utf-8")

    def _text(self) -> str:
        ranks = self._encoding._mergeable_ranks  # tiktoken has no public access to the ranks
        tree = {
            "version": VERSION,
            "name": self._encoding.name,
            "pat_str": self._encoding._pat_str,
            "special_tokens": self._encoding._special_tokens,
            "mergeable_ranks": {
                base64.b64encode(token).decode(): rank
                for token, rank in sorted(ranks.items(), key=lambda item: item[1])
            },
        }
        return json.dumps(tree, indent=0) + "\n"


def load_tiktoken(path: Path) -> TiktokenTokenizer:
    """Read what `TiktokenTokenizer.save` wrote, or a `.tiktoken` file of ranks.

    Raises:
        DataError: The file cannot be read, or the package is missing.
    """
    tiktoken = needed("tiktoken", path)
    try:
        text = read_bytes(path, MAX_TOKENIZER_BYTES).decode("utf-8")
        if path.suffix == ".json":
            tree = parse_json(text)
            ranks = _ranks(tree["mergeable_ranks"].items())
            name, pattern = str(tree["name"]), str(tree["pat_str"])
            special = {str(t): _rank(r) for t, r in tree["special_tokens"].items()}
        else:
            lines = [line.split() for line in text.splitlines() if line.strip()]
            ranks = _ranks((token, int(rank)) for token, rank in lines)
            name, pattern = path.stem, PLAIN_RANKS_PATTERN
            special = {END_OF_DOCUMENT: 1 + max(ranks.values())}
        if END_OF_DOCUMENT not in special:
            raise ValueError(f"it has no {END_OF_DOCUMENT}, the token that ends a document")
        return TiktokenTokenizer(_encoding(tiktoken, name, pattern, ranks, special))
    # A missing key, a wrong type, bad JSON or base64: all of it is a damaged file.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            path,
            "tokenizer",
            f"cannot be read ({type(error).__name__}: {error})",
            "Give a .tiktoken file, or the one that was recorded with the dataset",
        ) from error


def _ranks(pairs: Iterable[tuple[str, object]]) -> dict[bytes, int]:
    """Return the ranks of tokens, which are given as base64.

    Raises:
        ValueError: A token is no base64, a rank is no number of a token, or one occurs twice.
    """
    ranks: dict[bytes, int] = {}
    for text, rank in pairs:
        token = base64.b64decode(text, validate=True)
        if token in ranks:
            raise ValueError(f"the token {text} occurs twice")
        ranks[token] = _rank(rank)
    if len(set(ranks.values())) < len(ranks):
        raise ValueError("two tokens have the same rank")
    return ranks


def _rank(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_VOCABULARY:
        raise ValueError(f"the rank {str(value)[:20]} is no number from 0 to {MAX_VOCABULARY}")
    return value


def _encoding(
    tiktoken: ModuleType, name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]
) -> Any:
    """Return an encoding of tiktoken.

    Raises:
        ValueError: The parts are not those of an encoding.
    """
    missing = [number for number in range(256) if bytes([number]) not in ranks]
    if missing:
        raise ValueError(f"it has no token of the byte {missing[0]}")
    if taken := [token for token, rank in special.items() if rank in set(ranks.values())]:
        raise ValueError(f"the token {taken[0]} has the rank of another one")
    try:
        return tiktoken.Encoding(
            name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
    except BaseException as error:  # the library's Rust part stops by a PanicException
        if type(error).__name__ != "PanicException" and not isinstance(error, Exception):
            raise
        raise ValueError(f"the library tiktoken failed: {error}") from error


def named_tiktoken(name: str) -> TiktokenTokenizer:
    """Return an encoding by tiktoken's own name for it, such as `cl100k_base`.

    tiktoken downloads the encoding once and then finds it in `TIKTOKEN_CACHE_DIR`.

    Raises:
        DataError: There is no encoding of that name, or it cannot be downloaded.
    """
    tiktoken = needed("tiktoken", name)
    try:
        return TiktokenTokenizer(tiktoken.get_encoding(name))
    except Exception as error:  # includes whatever the network raises
        raise DataError(
            name,
            "tokenizer",
            f"tiktoken has no such encoding here ({type(error).__name__}: {error})",
            f"Known names: {', '.join(tiktoken.list_encoding_names())}. Without a network, set "
            "TIKTOKEN_CACHE_DIR to a folder that has it, or give a .tiktoken file",
        ) from error


def needed(package: str, what: object) -> ModuleType:
    """Return a package, without which the tokenizer `what` cannot be read.

    Raises:
        DataError: The package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        reason = f"needs the {package} package"
        raise DataError(what, "tokenizer", reason, f"pip install {package}") from error
