"""The built-in corpus as a dataset: built once in a cache folder, checked at every start."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megafp8.data.build import PREFIX, SIDECAR, build_dataset
from megafp8.data.corpus import Corpus
from megafp8.data.indexed import IndexedDataset
from megafp8.data.opened import OpenedDataset
from megafp8.data.sidecar import FORMAT_VERSION, load_sidecar, verify_files
from megafp8.data.tokenize import load_tokenizer
from megafp8.errors import DataError

ATTEMPTS = 3  # when other processes replace the same folder meanwhile
STALE_SECONDS = 3600.0  # a build takes seconds: an older temporary folder is a killed one's


def open_builtin(
    corpus: Corpus, vocab_size: int, cache: Path, notify: Callable[[str], None]
) -> OpenedDataset:
    """The corpus with a tokenizer trained on it, built first if need be.

    Any number of processes may call it at once: each builds in a folder of its own, one of them
    is renamed into place, and the others throw theirs away and use that one.

    Raises:
        DataError: The cache cannot be written, or is damaged again and again.
    """
    folder = cache / f"{corpus.name}-{_cache_key(corpus, vocab_size)[:16]}"
    for _ in range(ATTEMPTS):
        if not folder.exists():
            _build_into(folder, corpus, vocab_size, notify)
        inode = _inode(folder)
        try:
            sidecar = load_sidecar(folder / SIDECAR)
            verify_files(folder, sidecar, whole=True)
            tokenizer = load_tokenizer(folder / sidecar.files[2].name, sidecar.end_of_document)
            dataset = IndexedDataset(folder / PREFIX)
        except DataError as error:
            notify(f"data: the cached dataset is damaged and is built again: {error}")
            _move_away(folder, inode)
            continue
        return OpenedDataset(dataset, tokenizer, sidecar.fingerprint)
    raise DataError(
        folder,
        "cache",
        f"was damaged again after each of {ATTEMPTS} builds",
        "Delete it, or set model.data.index_mapping_dir to a folder on a sound disk",
    )


def cache_folder(cache_dir: str | None) -> Path:
    """Where prepared datasets are kept (XDG Base Directory Specification)."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the specification says to ignore any other
        return Path(base, "megafp8")
    try:
        return Path.home() / ".cache" / "megafp8"
    except RuntimeError as error:
        raise DataError(
            "~",
            "cache folder",
            "this user has no home folder",
            "Set model.data.index_mapping_dir to a folder that you may write",
        ) from error


def _cache_key(corpus: Corpus, vocab_size: int) -> str:
    """Names the folder: whatever may change its content changes the name."""
    parts = f"{corpus.key()}\n{vocab_size}\n{FORMAT_VERSION}"
    return hashlib.sha256(parts.encode()).hexdigest()


def _build_into(
    folder: Path, corpus: Corpus, vocab_size: int, notify: Callable[[str], None]
) -> None:
    """Builds beside `folder` and renames: it is whole or not there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        build = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    try:
        notify(f"data: training the tokenizer and tokenizing the {corpus.name} corpus (once)")
        started = time.monotonic()
        sidecar = build_dataset(corpus, vocab_size, build)
        build.chmod(0o755)  # mkdtemp's is private, and a cache may be shared
        try:
            os.rename(build, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return  # another process was faster; its folder has the same content
        notify(
            f"data: {sidecar.num_documents} documents, {sidecar.num_bytes / 1e6:.1f} MB of text, "
            f"{sidecar.num_tokens} tokens of a vocabulary of {sidecar.vocab_size}, "
            f"built in {time.monotonic() - started:.1f} s: {folder}"
        )
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    finally:
        shutil.rmtree(build, ignore_errors=True)


def _inode(folder: Path) -> int | None:
    """Which folder goes by this name now; None: there is none."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _move_away(folder: Path, inode: int | None) -> None:
    """Takes a damaged folder out of the way in one step, then deletes it.

    It stays if it is not the one that was looked at: another process has mended it meanwhile.
    """
    if _inode(folder) != inode:
        return
    away = folder.with_name(f"{folder.name}.tmp-damaged-{os.getpid()}-{time.time_ns()}")
    try:
        os.rename(folder, away)
    except FileNotFoundError:  # another process did
        return
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    shutil.rmtree(away, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Deletes what killed builds of the same dataset left."""
    for path in folder.parent.glob(f"{folder.name}.tmp-*"):
        try:
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # gone meanwhile
            continue


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        folder,
        "cache folder",
        f"cannot be written ({error.strerror or error})",
        "Set model.data.index_mapping_dir to a folder that you may write",
    )
