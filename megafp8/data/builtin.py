"""Open the built-in corpus as a dataset that is built once in a cache and checked at every start.

The corpus is what every Python carries: its documentation topics and its standard library.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8_numerics.caches import built_beside, move_away, sync
from fp8_numerics.caches import cache_folder as user_cache
from megafp8.data.dataset import (
    FORMAT_VERSION,
    OpenedDataset,
    Sidecar,
    load_sidecar,
    record_file,
    verify_files,
)
from megafp8.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype
from megafp8.data.named_tokenizers import load_tokenizer
from megafp8.data.tokenize import END_OF_DOCUMENT, train_tokenizer
from megafp8.errors import DataError
from megafp8.files import expanded

# Installed packages are not Python's own; the rest are tests, demos, bundled and generated files.
EXCLUDED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
# These describe one machine (its compiler, its paths), so they would make the corpus differ
# between two installations of the same Python.
MACHINE_FOLDER_PREFIX = "config-"
MACHINE_FILE_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")
TOPICS_SOURCE = "pydoc_data/topics.py"  # its text is taken as topics, one document each

PREFIX = "dataset"
TOKENIZER = "tokenizer.json"
SIDECAR = "dataset.json"
DOCUMENTS_PER_BATCH = 256  # encoded at once, on all cores
ATTEMPTS = 3  # other processes may replace the same folder meanwhile


@dataclass(frozen=True)
class Document:
    """Hold one text of the corpus; `name` says where it is from, such as `stdlib/abc.py`."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Describe a corpus to prepare: its documents and a key that tells whether they may have
    changed.

    `key` changes whenever `documents` may yield other text, and is computed without reading the
    text.
    """

    name: str
    key: Callable[[], str]
    documents: Callable[[], Iterator[Document]]


def builtin_documents(stdlib: Path | None = None) -> Iterator[Document]:
    """Yield the documentation topics, then the standard library's sources, both in sorted order.

    Files that are empty or not UTF-8 are left out. Line endings are kept as they are.

    Args:
        stdlib: The folder of the standard library; None means that of this Python.

    Raises:
        DataError: There is no document at all.
    """
    folder = stdlib or stdlib_folder()
    count = 0
    for name, text in sorted(_topics().items()):
        if text:
            count += 1
            yield Document(f"topics/{name}", text)
    for path in _source_files(folder):
        name = path.relative_to(folder).as_posix()
        if name == TOPICS_SOURCE:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            count += 1
            yield Document(f"stdlib/{name}", text)
    if count == 0:
        raise DataError(
            folder,
            "corpus",
            "this Python carries neither documentation topics nor library sources",
            "Give an indexed dataset's path as model.data.data_prefix, or use another Python",
        )


def builtin_key(stdlib: Path | None = None) -> str:
    """Return a hash of Python's version and of the names, sizes and times of its library's files.

    Reading every file would take longer than the rest of the preparation, and an edit or upgrade of
    the library changes a size or a time. Equal text with other times only causes a second build: a
    checkpoint records the hash of the tokens, which does not depend on times.
    """
    folder = stdlib or stdlib_folder()
    digest = hashlib.sha256()
    digest.update(f"{sys.implementation.name} {sys.version}\n".encode())
    for path in _source_files(folder):
        try:
            status = path.stat()
        except OSError:  # a dangling link: unreadable as a document too
            continue
        name = path.relative_to(folder).as_posix()
        line = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def stdlib_folder() -> Path:
    """Return the folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


BUILTIN = Corpus("builtin", builtin_key, builtin_documents)


def _topics() -> dict[str, str]:
    """Return the topics of `pydoc`; empty if a distribution leaves `pydoc_data` out."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        return {}
    return {str(name): str(text) for name, text in topics.items()}


def _source_files(folder: Path) -> list[Path]:
    """Return the library's Python files in the order of their relative names."""
    found: list[Path] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if name not in EXCLUDED_FOLDERS and not name.startswith(MACHINE_FOLDER_PREFIX)
        ]
        found += [
            Path(root, name)
            for name in files
            if name.endswith(".py") and not name.startswith(MACHINE_FILE_PREFIXES)
        ]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def build_dataset(corpus: Corpus, vocab_size: int, folder: Path) -> Sidecar:
    """Train the tokenizer on the corpus and write the whole dataset into an existing folder.

    Every document ends with the end-of-document token. The sidecar is written last, so a folder
    that has a sidecar is complete.
    """
    texts = [document.text for document in corpus.documents()]
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.save(folder / TOKENIZER)
    prefix = folder / PREFIX
    num_tokens = 0
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for first in range(0, len(texts), DOCUMENTS_PER_BATCH):
            for ids in tokenizer.encode_batch(texts[first : first + DOCUMENTS_PER_BATCH]):
                writer.add_document([*ids, tokenizer.eod_id])
                num_tokens += len(ids) + 1
    paths = (bin_path(prefix), idx_path(prefix), folder / TOKENIZER)
    sidecar = Sidecar(
        corpus=corpus.name,
        end_of_document=END_OF_DOCUMENT,
        vocab_size=tokenizer.vocab_size,
        num_documents=len(texts),
        num_tokens=num_tokens,
        num_bytes=sum(len(text.encode("utf-8")) for text in texts),
        files=tuple(record_file(path) for path in paths),
    )
    sidecar.save(folder / SIDECAR)
    for path in (folder / TOKENIZER, folder / SIDECAR):
        sync(path)
    return sidecar


def open_builtin(
    corpus: Corpus, vocab_size: int, cache: Path, notify: Callable[[str], None]
) -> OpenedDataset:
    """Return the corpus as a dataset, with a tokenizer trained on it; build it first if needed.

    Any number of processes may call this at once. Each builds in its own folder, one of the folders
    is renamed into place, and the other processes delete theirs and use that one.

    Raises:
        DataError: The cache cannot be written, or is found damaged after several builds.
    """
    folder = cache / f"{corpus.name}-{_cache_key(corpus, vocab_size)[:16]}"
    for _ in range(ATTEMPTS):
        if not folder.exists():
            _build_into(folder, corpus, vocab_size, notify)
        inode = _inode(folder)
        try:
            sidecar = load_sidecar(folder / SIDECAR)
            verify_files(sidecar, [folder / record.name for record in sidecar.files])
            tokenizer = load_tokenizer(folder / sidecar.files[2].name, sidecar.end_of_document)
            dataset = IndexedDataset(folder / PREFIX)
        except DataError as error:
            notify(f"data: the cached dataset is damaged and is built again: {error}")
            _discard(folder, inode)
            continue
        return OpenedDataset(dataset, tokenizer, sidecar.fingerprint)
    raise DataError(
        folder,
        "cache",
        f"was damaged again after each of {ATTEMPTS} builds",
        "Delete it, or set model.data.index_mapping_dir to a folder on a sound disk",
    )


def prepared_folder(cache_dir: str | None) -> Path:
    """Return the folder that keeps prepared datasets (XDG Base Directory Specification).

    Raises:
        DataError: The user has no home folder and no folder is configured.
    """
    if cache_dir is not None:
        return expanded(cache_dir)
    try:
        return user_cache()
    except RuntimeError as error:
        raise DataError(
            "~",
            "cache folder",
            "this user has no home folder",
            "Set model.data.index_mapping_dir to a folder that you may write",
        ) from error


def _cache_key(corpus: Corpus, vocab_size: int) -> str:
    """Return the folder's name, which changes with everything that may change its content."""
    parts = f"{corpus.key()}\n{vocab_size}\n{FORMAT_VERSION}"
    return hashlib.sha256(parts.encode()).hexdigest()


def _build_into(
    folder: Path, corpus: Corpus, vocab_size: int, notify: Callable[[str], None]
) -> None:
    """Build the dataset in `folder`, which appears when it is complete."""
    try:
        with built_beside(folder) as build:
            notify(f"data: training the tokenizer and tokenizing the {corpus.name} corpus (once)")
            started = time.monotonic()
            sidecar = build_dataset(corpus, vocab_size, build)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    notify(
        f"data: {sidecar.num_documents} documents, {sidecar.num_bytes / 1e6:.1f} MB of text, "
        f"{sidecar.num_tokens} tokens of a vocabulary of {sidecar.vocab_size}, "
        f"built in {time.monotonic() - started:.1f} s: {folder}"
    )


def _inode(folder: Path) -> int | None:
    """Return the inode of `folder`, or None if there is none."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _discard(folder: Path, inode: int | None) -> None:
    """Delete a damaged folder, unless another process has rebuilt it: its inode is another then."""
    if _inode(folder) != inode:
        return
    try:
        move_away(folder)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        folder,
        "cache folder",
        f"cannot be written ({error.strerror or error})",
        "Set model.data.index_mapping_dir to a folder that you may write",
    )
