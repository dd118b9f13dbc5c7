"""Read the corpus that every Python carries: its documentation topics and its standard library."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megafp8.errors import DataError

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


@dataclass(frozen=True)
class Document:
    """Holds one text of the corpus; `name` says where it is from, such as `stdlib/abc.py`."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Describes a corpus to prepare: its documents and a key that tells whether they may have
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
