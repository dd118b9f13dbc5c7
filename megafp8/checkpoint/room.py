"""Whether checkpoints can be written where they are to lie, asked before anything depends on it."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

from megafp8.checkpoint.disk import os_errors_reported, write_durably
from megafp8.errors import CheckpointError


def require_free_space(root: Path, bytes_each: int, count: int = 1, files_each: int = 0) -> None:
    """Raises `CheckpointError` unless `count` more checkpoints fit where `root` is or will be made.

    `files_each`: files and directories of one; not counted where the file system has no limit.
    """
    existing = root.absolute()
    while not existing.exists():
        existing = existing.parent
    with os_errors_reported(root, "asking for free space"):
        system = os.statvfs(existing)
    way_out = "Free space there, keep fewer (keep, save_top_k), or move the run"
    what = "a checkpoint needs" if count == 1 else f"{count} checkpoints, kept at once, need"
    bytes_free, bytes_needed = system.f_bavail * system.f_frsize, count * bytes_each
    if bytes_free < bytes_needed:
        reason = f"{what} {bytes_needed} bytes and {bytes_free} are free"
        raise CheckpointError(root, reason, way_out)
    files_needed = count * files_each
    if system.f_files > 0 and system.f_favail < files_needed:
        reason = f"{what} {files_needed} files (inodes) and {system.f_favail} are free"
        raise CheckpointError(root, reason, way_out)


def require_file_size(root: Path, num_bytes: int) -> None:
    """Raises `CheckpointError` if this process may not write a file as large as that."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < num_bytes:
        reason = f"a file of {num_bytes} bytes is to be written and the limit is {limit}"
        raise CheckpointError(root, reason, "Raise it (ulimit -f), or use more ranks")


def try_to_write(staging: Path, rank: int) -> None:
    """Each rank's own attempt in a directory that the main rank has just made."""
    path = staging / f"rank{rank}.probe"
    if not staging.is_dir():
        reason = f"rank {rank} on {socket.gethostname()} does not see the directory of rank 0"
        raise CheckpointError(
            staging.parent, reason, "Set exp_manager.exp_dir to a file system that all ranks share"
        )
    with os_errors_reported(path, "a first small file"):
        write_durably(path, b"megafp8")
