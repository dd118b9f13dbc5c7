"""Open an indexed dataset with its tokenizer and its `dataset.json`, which describes its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megafp8.data.indexed import IndexedDataset, bin_path, idx_path
from megafp8.data.named_tokenizers import load_tokenizer
from megafp8.data.tokenize import MAX_VOCABULARY, TOKENIZER_FILES, Tokenizer
from megafp8.errors import DataError
from megafp8.foreign import MIB, Fields, read_object, shown_value
from megafp8.secrets import hide_values

FORMAT_VERSION = 1
MAX_DESCRIPTION_BYTES = 16 * MIB
# The number of evenly spaced blocks of `.bin` that are hashed where all of it would take too long.
SAMPLED_BLOCKS = 64
BLOCK_BYTES = 64 * 1024
WHOLE_BYTES = 64 * MIB  # a smaller `.bin` is hashed whole at each start
# So is a smaller one that is younger than its description, as after a change in place.
YOUNGER_WHOLE_BYTES = 1024 * MIB

SIDECAR_SUFFIX = ".dataset.json"
_AGAIN = "Prepare the dataset again, or copy its files again"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Hold a file's name, size and hash as they were when the file was written."""

    name: str
    size: int
    sha256: str
    sampled: str | None = None  # `sampled_digest` of a `.bin`


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """Describe one prepared dataset; `files` are in the order `.bin`, `.idx`, tokenizer."""

    version: int = FORMAT_VERSION
    corpus: str
    end_of_document: str
    vocab_size: int
    num_documents: int
    num_tokens: int
    num_bytes: int  # bytes of the text, without beginnings and ends of documents
    files: tuple[FileRecord, ...]
    add_bos: bool = False  # whether documents begin with the tokens of `begin`
    add_eos: bool = True  # whether documents end with the token that ends a document
    begin: tuple[int, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Return a hash of tokens, index and tokenizer, without paths and times."""
        return _combine([record.sha256 for record in self.files])

    def save(self, path: Path) -> None:
        """Write the sidecar as `dataset.json` to `path`."""
        tree = asdict(self) | {"corpus": hide_values(self.corpus)}
        path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def record_file(path: Path, *, sampled: bool = False) -> FileRecord:
    """Return the record of a file; reads the whole file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    places = sampled_digest(path) if sampled else None
    return FileRecord(name=path.name, size=path.stat().st_size, sha256=digest, sampled=places)


def load_sidecar(path: Path) -> Sidecar:
    """Return the content of `dataset.json`.

    Raises:
        DataError: The file is missing, damaged, or of another version.
    """
    try:
        fields = Fields(read_object(path, MAX_DESCRIPTION_BYTES))
        if fields.tree.get("version") != FORMAT_VERSION:
            version = shown_value(fields.tree.get("version"))
            raise ValueError(f"version {version}; only {FORMAT_VERSION} is known")
        files = fields.tree["files"]
        if not isinstance(files, list) or len(files) != 3:
            raise ValueError("3 files belong into `files`")
        return Sidecar(
            corpus=fields.text("corpus"),
            end_of_document=fields.text("end_of_document"),
            vocab_size=fields.whole("vocab_size", 1, MAX_VOCABULARY),
            num_documents=fields.whole("num_documents", 0, 2**63 - 1),
            num_tokens=fields.whole("num_tokens", 0, 2**63 - 1),
            num_bytes=fields.whole("num_bytes", 0, 2**63 - 1),
            files=tuple(_file_record(file) for file in files),
            add_bos=fields.flag("add_bos", False),
            add_eos=fields.flag("add_eos", True),
            begin=_begin_in(fields.tree.get("begin", [])),
        )
    # A missing key, a wrong type, bad JSON, bad UTF-8: all of it is a damaged file.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            path,
            "dataset.json",
            f"cannot be read ({type(error).__name__}: {error})",
            "Delete it, or prepare the dataset again",
        ) from error


def _file_record(tree: object) -> FileRecord:
    fields = Fields(tree if isinstance(tree, dict) else {})
    name = fields.text("name")
    if Path(name).name != name or "\0" in name:
        raise ValueError(f"{shown_value(name)} is not a file name without folders")
    size = fields.whole("size", 0, 2**63 - 1)
    sampled = fields.text("sampled", None)
    return FileRecord(name=name, size=size, sha256=fields.text("sha256"), sampled=sampled)


def _begin_in(listed: object) -> tuple[int, ...]:
    numbers = listed if isinstance(listed, list) else [None]
    if not all(type(n) is int and 0 <= n <= MAX_VOCABULARY for n in numbers):
        raise ValueError(f"begin is {shown_value(listed)}, not a list of the numbers of tokens")
    return tuple(numbers)


def verify_files(
    sidecar: Sidecar, paths: Sequence[Path], *, description: Path | None = None
) -> list[str]:
    """Compare files with what a sidecar recorded, whatever their names are.

    Args:
        sidecar: The record to compare with.
        paths: The files in the order of the record; a tokenizer may be left out.
        description: The sidecar's own file. None hashes the whole `.bin`. Otherwise a `.bin` of
            more than `WHOLE_BYTES` is hashed in `SAMPLED_BLOCKS` places, unless it is younger than
            that file and has no more than `YOUNGER_WHOLE_BYTES`.

    Returns:
        Lines about what was compared only in part although it may have changed.

    Raises:
        DataError: A file is missing or differs.
    """
    notes = []
    for number, (path, record) in enumerate(zip(paths, sidecar.files, strict=False)):
        try:
            found = path.stat()
            size, most = found.st_size, None
            if number == 0 and description is not None:
                is_younger = found.st_mtime_ns > description.stat().st_mtime_ns
                most = YOUNGER_WHOLE_BYTES if is_younger else WHOLE_BYTES
                if is_younger and size > most:
                    known = "nothing" if record.sampled is None else f"{SAMPLED_BLOCKS} places"
                    notes.append(
                        f"data: {path} was changed or copied after {description.name} was written; "
                        f"of its content {known} can be compared, besides its size"
                    )
            if most is not None and size > most:
                differs = record.sampled is not None and sampled_digest(path) != record.sampled
            else:
                differs = size == record.size and record_file(path).sha256 != record.sha256
        except OSError as error:
            raise DataError(path, "file", f"cannot be read ({error})", _AGAIN) from error
        if differs or size != record.size:
            reason = (
                f"has {size} bytes where dataset.json recorded {record.size}"
                if size != record.size
                else "differs from what dataset.json recorded (SHA-256)"
            )
            raise DataError(path, "content", reason, _AGAIN)
    return notes


def sampled_digest(path: Path) -> str:
    """Return a hash of a file's size and of evenly spaced blocks of it, in bounded time."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(size - BLOCK_BYTES, 0)
    with open(path, "rb") as file:
        for number in range(SAMPLED_BLOCKS):
            file.seek(last * number // (SAMPLED_BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def sampled_fingerprint(prefix: Path, tokenizer: str) -> str:
    """Return the fingerprint of a dataset without recorded hashes, in bounded time.

    It hashes the whole `.idx`, the size and evenly spaced blocks of `.bin`, and `tokenizer`, which
    is the tokenizer's hash. Hashing terabytes would delay every start. A change inside a skipped
    block alone is not noticed.
    """
    index = record_file(idx_path(prefix))
    return "sampled:" + _combine([sampled_digest(bin_path(prefix)), index.sha256, tokenizer])


def description_beside(prefix: Path) -> Path | None:
    """Return `<prefix>.dataset.json` or else `dataset.json` in the same folder, if it exists."""
    names = (prefix.name + SIDECAR_SUFFIX, "dataset.json")
    return next((path for path in map(prefix.with_name, names) if path.is_file()), None)


def end_of_document_beside(prefix: Path) -> str | None:
    """Return the token that ends a document if a `dataset.json` beside the dataset names it."""
    token = _described(prefix, "end_of_document")
    return token if isinstance(token, str) else None


def recorded_vocab_size(prefix: Path) -> int | None:
    """Return the vocabulary size of the dataset's tokenizer if its `dataset.json` records it."""
    size = _described(prefix, "vocab_size")
    return size if type(size) is int and 0 < size <= MAX_VOCABULARY else None


def _described(prefix: Path, key: str) -> Any:
    """Return the value of a key in the `dataset.json` beside a dataset, or None."""
    path = description_beside(prefix)
    if path is None:
        return None
    try:
        return read_object(path, MAX_DESCRIPTION_BYTES).get(key)
    except (OSError, ValueError):
        return None


def _combine(hashes: list[str]) -> str:
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


@dataclass(frozen=True)
class OpenedDataset:
    """Hold one dataset; `fingerprint` depends on content and tokenizer, not on paths and times.

    `begin` are the tokens with which each document begins, None if no preparation of ours recorded
    it, and `add_eos` says whether it ends with the token that ends a document.
    """

    dataset: IndexedDataset
    tokenizer: Tokenizer
    fingerprint: str
    begin: tuple[int, ...] | None = None
    add_eos: bool = True

    @cached_property
    def tokens_digest(self) -> str:
        """Return the `sampled_digest` of the tokens, which copies of a dataset share."""
        return sampled_digest(bin_path(self.dataset.prefix))


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
    for line in dataset.notes:
        notify(f"data: {line}")
    paths = [bin_path(prefix), idx_path(prefix), *([] if words is None else [words])]
    sidecar = _sidecar_of(prefix, paths, notify)
    if words is not None:
        eod = end_of_document_beside(prefix) if sidecar is None else sidecar.end_of_document
        _check_same(prefix, words, given, eod)
    fingerprint: str | None = None
    begin: tuple[int, ...] | None = None
    add_eos = _described(prefix, "add_eos") is not False
    with suppress(ValueError):
        begin = _begin_in(_described(prefix, "begin"))
    if sidecar is not None:
        for line in verify_files(sidecar, paths, description=description_beside(prefix)):
            notify(line)
        begin, add_eos = sidecar.begin, sidecar.add_eos
        if [record.name for record in sidecar.files] == [path.name for path in paths]:
            fingerprint = sidecar.fingerprint
    fingerprint = fingerprint or sampled_fingerprint(prefix, tokenizer.digest)
    return OpenedDataset(dataset, tokenizer, fingerprint, begin, add_eos)


def _tokenizer_beside(prefix: Path) -> Path | None:
    mine = [prefix.with_name(f"{prefix.name}.{name}") for name in TOKENIZER_FILES]
    of_folder = [prefix.with_name(name) for name in TOKENIZER_FILES]
    return next((path for path in [*mine, *of_folder] if path.is_file()), None)


def _check_vocabulary_size(prefix: Path, tokenizer: Tokenizer) -> None:
    recorded = recorded_vocab_size(prefix)
    if recorded is not None and recorded != tokenizer.vocab_size:
        raise DataError(
            description_beside(prefix),
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


def _sidecar_of(
    prefix: Path, paths: Sequence[Path], notify: Callable[[str], None]
) -> Sidecar | None:
    """Return the sidecar that describes the files of a dataset, under whatever names; else None.

    `<prefix>.dataset.json` describes them. A `dataset.json` may belong to another dataset in the
    folder: it describes files that have its names, or the content of its `.idx`.
    """
    path = description_beside(prefix)
    if path is None:
        return None
    try:
        sidecar = load_sidecar(path)
    except DataError as error:  # another tool's dataset.json may hold only the end of a document
        notify(f"data: parts of the dataset are hashed instead of all of it: {error}")
        return None
    names = [record.name for record in sidecar.files]
    if path.name == "dataset.json" and names[:2] != [path.name for path in paths[:2]]:
        try:
            is_its = record_file(paths[1]).sha256 == sidecar.files[1].sha256
        except OSError:
            is_its = False
        if not is_its:
            notify(f"data: {path} describes {names[0]}, and not {paths[0].name}")
            return None
    return sidecar
