"""Convert text to token numbers and back; train a byte-level BPE; read recorded tokenizers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from megafp8.errors import ConfigError, DataError
from megafp8.foreign import MIB, read_bytes

if TYPE_CHECKING:  # imported only where it is used: opening this module stays instant
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
MAX_TOKENIZER_BYTES = 64 * MIB  # the largest that are in use have about 35 MB
MAX_VOCABULARY = 2**24
SMALLEST_VOCABULARY = 257  # the 256 bytes and the end of a document


COMPARED = 1000
"""The largest number of tokens by which tokenizers of two kinds are compared."""

JSON_FILE, SENTENCEPIECE_FILE = "tokenizer.json", "tokenizer.model"
TIKTOKEN_FILE = "tokenizer.tiktoken.json"
TOKENIZER_FILES = (JSON_FILE, SENTENCEPIECE_FILE, TIKTOKEN_FILE)
"""Names under which a tokenizer lies beside its dataset."""

_NUMBERED = re.compile(r'"\s*:\s*([0-9]{8,})')


class Tokenizer(Protocol):
    """Convert text to token numbers and back.

    `encode` never returns a special token: the characters of one inside a text are ordinary text,
    so no text can end its document. `encode_marked` is for text that writes special tokens out.
    """

    @property
    def eod_id(self) -> int:
        """Return the number of the token that ends a document."""

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest token number."""

    @property
    def end_of_document(self) -> str:
        """Return the text of the token `eod_id` in the vocabulary."""

    @property
    def begin(self) -> tuple[int, ...]:
        """Return the tokens that the tokenizer itself puts before a text, such as `<s>`."""

    @property
    def end(self) -> tuple[int, ...]:
        """Return the tokens that the tokenizer itself puts after a text; most put none."""

    @property
    def bos_id(self) -> int | None:
        """Return the number of the token that begins a text, whether or not it is put there."""

    @property
    def file_name(self) -> str:
        """Return the name of `TOKENIZER_FILES` that `save` writes."""

    @property
    def digest(self) -> str:
        """Return a hash of everything that decides the result of `encode`, and of the end of a
        document.
        """

    def encode(self, text: str) -> list[int]:
        """Return the token numbers of `text`, without an end-of-document token."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text, computed on several threads if the library can."""

    def encode_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of texts in which `<s>` and the like are special tokens."""

    def tokens(self) -> dict[int, str]:
        """Return the text of each token in the vocabulary, by its number."""

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of `ids`; a token that ends inside a character gives U+FFFD."""

    def save(self, path: Path) -> None:
        """Write a file that `load_tokenizer` reads if its name ends as `file_name` does."""


class JsonTokenizer:
    """Wrap a tokenizer of the `tokenizers` library, stored as `tokenizer.json`."""

    file_name = JSON_FILE

    def __init__(self, rust: tokenizers.Tokenizer, eod_id: int, bos_token: object = None) -> None:
        # Without this the library turns "<|endoftext|>" inside a text into the special token.
        rust.encode_special_tokens = True
        # Truncation and padding in a file are meant for a model's batches, not for a corpus.
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self.eod_id = eod_id
        self.end_of_document = str(rust.id_to_token(eod_id))
        self._bos_token = bos_token
        # Numbers may have gaps: the count alone would be too small.
        self.vocab_size = 1 + max(rust.get_vocab(with_added_tokens=True).values())

    @property
    def begin(self) -> tuple[int, ...]:
        """Return the tokens that the file's post-processor puts before a text."""
        return self._added[0]

    @property
    def end(self) -> tuple[int, ...]:
        """Return the tokens that the file's post-processor puts after a text."""
        return self._added[1]

    @cached_property
    def _added(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        for text in ("a", "0", "."):  # a vocabulary may lack some of them
            encoding = self._rust.encode(text)
            own = [n for n, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
            if own:
                return tuple(encoding.ids[: own[0]]), tuple(encoding.ids[own[-1] + 1 :])
        return tuple(self._rust.encode("").ids), ()

    @property
    def bos_id(self) -> int | None:
        """Return the token that the configuration names, or else the one that is put before a
        text.
        """
        named = self._bos_token
        found = self._rust.token_to_id(named) if isinstance(named, str) else None
        return self.begin[0] if found is None and len(self.begin) == 1 else found

    @property
    def digest(self) -> str:
        """Return a hash of the tokenizer's content and of the end of a document."""
        return hashlib.sha256(f"{self.eod_id}\n{self._rust.to_str()}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the token numbers of `text`, without an end-of-document token."""
        ids: list[int] = self._rust.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text, computed on all cores."""
        # This faster call leaves out offsets into the text, which are not needed here.
        encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of texts in which `<s>` and the like are special tokens."""
        self._rust.encode_special_tokens = False
        try:
            return self.encode_batch(texts)
        finally:
            self._rust.encode_special_tokens = True

    def tokens(self) -> dict[int, str]:
        """Return the text of each token in the vocabulary, by its number."""
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        return {number: token for token, number in vocabulary.items()}

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of `ids`; a token that ends inside a character gives U+FFFD."""
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        text: str = self._rust.decode(numbers, skip_special_tokens=False)
        return text

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`, the format of the `tokenizers` library."""
        path.write_text(self._rust.to_str(pretty=True), encoding="utf-8")


@dataclass(frozen=True)
class Frame:
    """Hold the tokens that begin and end a text; a text that has them already gets no others."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    def around(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens of a whole text with those that begin and end it."""
        return [*self.before(ids), *ids, *self.after(ids)]

    def before(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return what is put before the tokens of a text."""
        return () if tuple(ids[: len(self.begin)]) == self.begin else self.begin

    def after(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return what is put after the tokens of a text."""
        return () if self.end and tuple(ids[-len(self.end) :]) == self.end else self.end


def frame_of(tokenizer: Tokenizer, add_bos: bool | None, end: tuple[int, ...], key: str) -> Frame:
    """Return the frame of texts.

    Args:
        tokenizer: The tokenizer.
        add_bos: Whether the token that begins a text is put there; None: as the tokenizer does.
        end: The tokens that end a text.
        key: The name of the setting, for the error.

    Raises:
        DataError: A token is asked for, and the tokenizer names none.
    """
    if add_bos is False:
        return Frame((), end)
    if not add_bos or tokenizer.begin:
        return Frame(tokenizer.begin, end)
    if tokenizer.bos_id is None:
        reason = "has no effect: the tokenizer names no token that begins a text (bos_token)"
        hint = "Leave it out, or name the token in a tokenizer_config.json beside the tokenizer"
        raise DataError("tokenizer", key, reason, hint)
    return Frame((tokenizer.bos_id,), end)


def document_end(tokenizer: Tokenizer, add_eos: bool | None) -> tuple[int, ...]:
    """Return the tokens that end a document; `add_eos` False leaves them out."""
    if add_eos is False:
        return ()
    ends_so = tokenizer.end[-1:] == (tokenizer.eod_id,)
    return tokenizer.end if ends_so else (*tokenizer.end, tokenizer.eod_id)


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers mean the same tokens by the numbers that both have.

    One may have further tokens, as transformers adds some that a model's configuration names. Of
    two kinds of files, which write tokens differently, most of `COMPARED` tokens must be read as
    the same text.
    """
    mine, theirs = one.tokens(), other.tokens()
    both = sorted(mine.keys() & theirs.keys())
    if len(both) < min(len(mine), len(theirs)):
        return False
    if one.file_name == other.file_name:
        return all(mine[n] == theirs[n] for n in both)
    sample = both[:: len(both) // COMPARED + 1]
    return 2 * sum(one.decode([n]) == other.decode([n]) for n in sample) > len(sample)


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that `tokens` add to the text of `prompt`.

    Decoded alone, the tokens would lose a space before their first word with tokenizers that write
    none at the start of a text, such as SentencePiece's.
    """
    before = tokenizer.decode(prompt)
    return tokenizer.decode([*prompt, *tokens])[len(before) :]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """Train a byte-level BPE; the same texts always give the same tokenizer.

    All 256 bytes are in the alphabet from the start, so any text can be encoded and decodes to the
    same bytes. A small corpus may have fewer pairs to merge than `vocab_size` asks for;
    `Tokenizer.vocab_size` is the actual size.

    Raises:
        ConfigError: `vocab_size` is too small for the bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            "model.tokenizer.vocab_size",
            vocab_size,
            "too small for the 256 bytes and the end of a document",
            f"Give at least {SMALLEST_VOCABULARY}",
        )
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    rust = tokenizers.Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rust.train_from_iterator(texts, trainer)
    eod_id = rust.token_to_id(END_OF_DOCUMENT)
    assert eod_id is not None, "the trainer left its special token out"
    return JsonTokenizer(rust, eod_id)


def byte_tokenizer() -> JsonTokenizer:
    """Return a tokenizer with a token for each of the 256 bytes and one that ends a document."""
    return train_tokenizer([], SMALLEST_VOCABULARY)


def rust_call(call: Callable[[ModuleType], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    """Return what `call` makes with the library `tokenizers`.

    Raises:
        ValueError: The library stopped at an assertion of its own. It reports that by a
            `PanicException`, which is no `Exception`.
        Exception: The library refused a file, by a plain `Exception`.
    """
    import tokenizers

    try:
        return call(tokenizers)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the library tokenizers failed: {error}") from error


def check_numbers(text: str) -> None:
    """Raise `ValueError` if a JSON text gives a token a number beyond `MAX_VOCABULARY`.

    The library would make a table with as many rows, for minutes. A text inside of quotes cannot
    look like such a pair, because its quotes are escaped.
    """
    for match in _NUMBERED.finditer(text):
        before = text[max(0, match.start() - 1) : match.start()]
        if before != "\\" and int(match[1][:20]) > MAX_VOCABULARY:
            most = f"numbers up to {MAX_VOCABULARY} are read"
            raise ValueError(f"it has a token of the number {match[1][:20]}; {most}")


def load_json(
    path: Path, end_of_document: str = END_OF_DOCUMENT, named: Mapping[str, object] | None = None
) -> JsonTokenizer:
    """Read a `tokenizer.json` of the `tokenizers` library.

    Args:
        path: The file.
        end_of_document: The token that ends a document.
        named: The content of the `tokenizer_config.json` beside it, if there is one.

    Raises:
        DataError: The file is missing, not a tokenizer, or lacks `end_of_document`.
    """
    try:
        text = read_bytes(path, MAX_TOKENIZER_BYTES).decode("utf-8")
        check_numbers(text)
        rust = rust_call(lambda module: module.Tokenizer.from_str(text))
    # The Rust library raises plain `Exception` for anything wrong with the JSON.
    except Exception as error:
        raise DataError(
            path,
            "tokenizer",
            f"cannot be read ({error})",
            "Put the tokenizer.json that the dataset was tokenized with there",
        ) from error
    eod_id = rust.token_to_id(end_of_document)
    if eod_id is None:
        special = [token.content for token in rust.get_added_tokens_decoder().values()]
        raise DataError(
            path,
            "vocabulary",
            f"has no {end_of_document!r}, the token that ends a document",
            f"Name the one it has (its special tokens: {', '.join(special[:8]) or 'none'}): by "
            '--end-of-document when preparing data, as "end_of_document" in dataset.json beside '
            "a dataset that is there",
        )
    _add_named(rust, named or {})
    return JsonTokenizer(rust, eod_id, token_text((named or {}).get("bos_token")))


def _add_named(rust: tokenizers.Tokenizer, named: Mapping[str, object]) -> None:
    """Make special tokens of those that a `tokenizer_config.json` names, as transformers does.

    Tokens that the file has added already stay what they are. One that is not in the vocabulary is
    added if it is listed with the next free number.
    """
    from tokenizers import AddedToken

    ids = rust.get_vocab(with_added_tokens=True)
    added = {token.content for token in rust.get_added_tokens_decoder().values()}
    for number, flags in sorted(_listed(named.get("added_tokens_decoder")).items()):
        text = token_text(flags)
        is_next = number == len(ids) == 1 + max(ids.values())
        if text and text not in added and (ids.get(text) == number or is_next):
            names = ("single_word", "lstrip", "rstrip", "normalized", "special")
            switches = {name: flags[name] for name in names if isinstance(flags.get(name), bool)}
            rust.add_tokens([AddedToken(text, **switches)])
            ids[text] = number
            added.add(text)
    values = [value for key, value in named.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = named.get(key)
        values += (
            more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
        )
    texts = dict.fromkeys(text for value in values if (text := token_text(value)))
    special = [text for text in texts if text in ids and text not in added]
    rust.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])


def _listed(added: object) -> dict[int, dict[str, object]]:
    """Return the tokens of an `added_tokens_decoder` by their numbers."""
    pairs = added.items() if isinstance(added, dict) else ()
    return {
        int(number): flags
        for number, flags in pairs
        if number.isdecimal() and len(number) <= 8 and isinstance(flags, dict)
    }


def token_text(value: object) -> str | None:
    """Return the text of a token that a `tokenizer_config.json` names, or None if it names none."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
