"""Open the built-in corpus as a dataset that is built once in a cache and checked at every
start.
"""

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
from megafp8.data.named_tokenizers import load_tokenizer
from megafp8.data.opened import OpenedDataset
from megafp8.data.sidecar import FORMAT_VERSION, load_sidecar, verify_files
from megafp8.errors import DataError

ATTEMPTS = 3  # other processes may replace the same folder meanwhile
STALE_SECONDS = 3600.0  # a build takes seconds, so an older temporary folder is from a killed build


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
    """Return the folder that keeps prepared datasets (XDG Base Directory Specification).

    Raises:
        DataError: The user has no home folder and no folder is configured.
    """
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
    """Return the folder's name, which changes with everything that may change its content."""
    parts = f"{corpus.key()}\n{vocab_size}\n{FORMAT_VERSION}"
    return hashlib.sha256(parts.encode()).hexdigest()


def _build_into(
    folder: Path, corpus: Corpus, vocab_size: int, notify: Callable[[str], None]
) -> None:
    """Build beside `folder` and rename, so that `folder` is either complete or absent."""
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
    """Return the inode of `folder`, or None if there is none."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _move_away(folder: Path, inode: int | None) -> None:
    """Rename a damaged folder in one step, then delete it.

    The folder stays if its inode is not `inode`: another process has then rebuilt it.
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
    """Delete temporary folders that killed builds of the same dataset have left."""
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
