"""Check that a checkpoint is, byte for byte, what was meant to be written."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megafp8.checkpoint.manifest import (
    MANIFEST_NAME,
    USE_ANOTHER,
    Manifest,
    ShardEntry,
    read_manifest,
)
from megafp8.checkpoint.step_directories import step_of
from megafp8.errors import CheckpointError

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
    """Return the error that `verify` raises for a checkpoint, or None if it raises none."""
    try:
        verify(step_dir)
    except CheckpointError as error:
        return error
    return None


def check_size(directory: Path, shard: ShardEntry) -> None:
    """Raise `CheckpointError` unless a file exists, is no link and has the expected size."""
    path = directory / shard.file_name
    if path.is_symlink():
        raise CheckpointError(path, "is a symbolic link", USE_ANOTHER)
    if not path.is_file():
        raise CheckpointError(path, "is missing", USE_ANOTHER)
    if (actual := path.stat().st_size) != shard.size:
        raise CheckpointError(path, f"has {actual} bytes, expected {shard.size}", USE_ANOTHER)


def _check_content(directory: Path, shard: ShardEntry) -> None:
    path = directory / shard.file_name
    try:
        actual = _sha256(path)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error})", USE_ANOTHER) from error
    if actual != shard.sha256:
        raise CheckpointError(path, f"sha256 is {actual}, expected {shard.sha256}", USE_ANOTHER)
    if wrong := _why_header_differs(path, shard):
        raise CheckpointError(path, wrong, USE_ANOTHER)


def _sha256(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _why_header_differs(path: Path, shard: ShardEntry) -> str | None:
    """Return how a file's tensors differ from the manifest, or None.

    The file's hash is right already, so only a faulty tool can have written such a manifest.
    """
    expected = {piece.key: (piece.dtype, piece.shape) for piece in shard.pieces}
    try:
        with safe_open(str(path), framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            actual = {key: (s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
    except SafetensorError as error:
        return f"is not a safetensors file ({error})"
    return None if actual == expected else "holds other tensors than the manifest lists"
