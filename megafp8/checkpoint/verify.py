"""Check that the files of a checkpoint are whole: sizes, headers, hashes."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megafp8.checkpoint.manifest import (
    USE_ANOTHER,
    Manifest,
    ShardEntry,
    read_manifest,
)
from megafp8.checkpoint.step_directories import MANIFEST_NAME, step_of
from megafp8.errors import CheckpointError, UnreadableError
from megafp8.files import note_progress, why_unreadable

_CHUNK_BYTES = 4 << 20


def verify(step_dir: Path) -> None:
    """Check a checkpoint completely: its structure, and the hash of every file.

    Raises:
        CheckpointError: A file is missing or differs; the error names it and what was expected.
    """
    shards = check_structure(step_dir).shards
    threads = min(len(shards), os.cpu_count() or 1)  # hashing releases the interpreter lock
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        for done in [pool.submit(_check_content, step_dir, shard) for shard in shards]:
            done.result()


def check_structure(step_dir: Path) -> Manifest:
    """Return the manifest, after checking it and the names and sizes of all files.

    No tensor is read, so the check is fast, and does not find changed bytes.

    Raises:
        CheckpointError: The manifest is damaged, or a file is missing or has another size.
    """
    manifest = read_manifest(step_dir)
    claimed = step_of(step_dir.name)
    if claimed is not None and claimed != manifest.step:
        reason = f"is the manifest of step {manifest.step} in the directory of step {claimed}"
        raise CheckpointError(step_dir / MANIFEST_NAME, reason, USE_ANOTHER)
    for shard in manifest.shards:
        check_size(step_dir, shard)
    return manifest


def why_damaged(step_dir: Path) -> CheckpointError | None:
    """Return the error that `verify` raises for a damaged checkpoint, or None for a good one.

    Raises:
        UnreadableError: The checkpoint cannot be judged now.
    """
    try:
        verify(step_dir)
    except UnreadableError:
        raise
    except CheckpointError as error:
        return error
    return None


def check_size(directory: Path, shard: ShardEntry) -> None:
    """Raise `CheckpointError` unless a file exists, is no link and has the expected size."""
    path = directory / shard.file_name
    if path.is_symlink():
        raise CheckpointError(path, "is a symbolic link", USE_ANOTHER)
    with reading_shard(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(path, "is no file", USE_ANOTHER)
    if (actual := status.st_size) != shard.size:
        raise CheckpointError(path, f"has {actual} bytes, expected {shard.size}", USE_ANOTHER)


def _check_content(directory: Path, shard: ShardEntry) -> None:
    path = directory / shard.file_name
    with reading_shard(path):
        actual = _sha256(path)
    if actual != shard.sha256:
        raise CheckpointError(path, f"sha256 is {actual}, expected {shard.sha256}", USE_ANOTHER)
    if wrong := _why_header_differs(path, shard):
        raise CheckpointError(path, wrong, USE_ANOTHER)


@contextmanager
def reading_shard(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file into a `CheckpointError`, for whatever reason they come.

    Raises:
        UnreadableError: The operating system refused to read the file, which may be good. torch,
            which opens files for safetensors, reports that as a `RuntimeError`.
    """
    try:
        yield
    except FileNotFoundError as error:
        if os.path.lexists(path):  # safetensors says so too if too many files are open
            system = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            raise why_unreadable(path, system) or error from error
        raise CheckpointError(path, "is missing", USE_ANOTHER) from error
    except (OSError, RuntimeError, MemoryError, SafetensorError) as error:
        if (unreadable := why_unreadable(path, error)) is not None:
            raise unreadable from error
        if isinstance(error, RuntimeError):
            raise  # an error of the program, which says nothing about the file
        reason = "is not a safetensors file" if isinstance(error, SafetensorError) else "is no file"
        raise CheckpointError(path, f"{reason} ({error})", USE_ANOTHER) from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    # The C library would keep a buffer's memory in the arena of each thread that ever had one.
    with mmap.mmap(-1, _CHUNK_BYTES) as memory, memoryview(memory) as buffer:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                note_progress()
    return digest.hexdigest()


def _why_header_differs(path: Path, shard: ShardEntry) -> str | None:
    """Return how a file's tensors differ from the manifest, or None.

    The file's hash is right already, so only a faulty tool can have written such a manifest.
    """
    expected = {piece.key: (piece.dtype, piece.shape) for piece in shard.pieces}
    with reading_shard(path), safe_open(str(path), framework="pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        actual = {key: (s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
    return None if actual == expected else "holds other tensors than the manifest lists"
