"""Check before the first step that a run's checkpoints can be written and that they fit."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterable
from pathlib import Path

from megafp8.checkpoint import store
from megafp8.checkpoint.manifest import Placement
from megafp8.errors import CheckpointError
from megafp8.files import os_errors_reported, write_durably
from megafp8.parallel.agreement import gather, on_all, on_main
from megafp8.parallel.mesh import Mesh
from megafp8.specs import CheckpointSpec

_BYTES_OF_A_PIECE = 1024  # its entries in the file's header and in the manifest, at most


def require_free_space(root: Path, bytes_each: int, count: int = 1, files_each: int = 0) -> None:
    """Raise `CheckpointError` unless `count` more checkpoints fit on the file system of `root`.

    `bytes_each` is the size of a checkpoint, `files_each` its number of files and directories; the
    latter is not checked on a file system without a limit. `root` need not exist yet.
    """
    existing = root.absolute()
    while not existing.exists():
        existing = existing.parent
    with os_errors_reported(root, "asking for free space"):
        system = os.statvfs(existing)
    hint = "Free space there, keep fewer (keep, save_top_k), or move the run"
    what = "a checkpoint needs" if count == 1 else f"{count} checkpoints, kept at once, need"
    bytes_free, bytes_needed = system.f_bavail * system.f_frsize, count * bytes_each
    if bytes_free < bytes_needed:
        reason = f"{what} {bytes_needed} bytes and {bytes_free} are free"
        raise CheckpointError(root, reason, hint)
    files_needed = count * files_each
    if system.f_files > 0 and system.f_favail < files_needed:
        reason = f"{what} {files_needed} files (inodes) and {system.f_favail} are free"
        raise CheckpointError(root, reason, hint)


def require_file_size(root: Path, num_bytes: int) -> None:
    """Raise `CheckpointError` if this process may not write a file as large as that."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < num_bytes:
        reason = f"a file of {num_bytes} bytes is to be written and the limit is {limit}"
        raise CheckpointError(root, reason, "Raise it (ulimit -f), or use more ranks")


def try_to_write(staging: Path, rank: int) -> None:
    """Write a small file from this rank, in a directory that the main rank has just made.

    Raises:
        CheckpointError: The rank does not see the directory, or cannot write there.
    """
    path = staging / f"rank{rank}.probe"
    if not staging.is_dir():
        reason = f"rank {rank} on {socket.gethostname()} does not see the directory of rank 0"
        raise CheckpointError(
            staging.parent, reason, "Set exp_manager.exp_dir to a file system that all ranks share"
        )
    with os_errors_reported(path, "a first small file"):
        write_durably(path, b"megafp8")


def require_disk_space(
    root: Path,
    placements: Iterable[Placement],
    mesh: Mesh,
    spec: CheckpointSpec,
    step: int,
    max_steps: int,
    *,
    saves_at_once: bool = False,
) -> None:
    """Raise `CheckpointError` on all ranks if any rank could not write its checkpoints.

    All ranks call it together. `placements` are what this rank would save under `root` now, at
    `step`. `saves_at_once` says that a checkpoint is saved before the first step.

    The needed space is that of all checkpoints that will exist at the same time: those that are
    kept, and the new one, which is verified before an older one is deleted.
    """
    periodic = spec.every_n_train_steps or spec.train_time_interval_seconds
    if not (periodic or spec.save_last or saves_at_once) or step >= max_steps:
        return  # only a signal would make a checkpoint
    own = [p for p in placements if p.replica == 0]
    num_bytes = sum(p.tensor.nbytes + _BYTES_OF_A_PIECE for p in own)
    in_all = sum(gather(mesh, num_bytes))

    def begin() -> Path:
        more = num_more(spec, step, max_steps, len(store.steps(root)))
        files = mesh.world.size + 3  # beside the ranks': the manifest, its hash and the directory
        require_free_space(root, in_all, more, files)
        return store.begin(root, step)

    def try_here() -> None:
        require_file_size(root, num_bytes)
        try_to_write(staging, mesh.world.rank)

    staging = on_main(mesh, begin)
    try:
        on_all(mesh, try_here)
    finally:
        if mesh.is_main:
            store.discard(staging)


def num_more(spec: CheckpointSpec, step: int, max_steps: int, num_there: int) -> int:
    """Return how many checkpoints are added before each new one replaces an older one.

    `num_there` checkpoints exist at `step`.
    """
    left = max_steps - step
    saves = 1  # the last step's, or a signal's
    if spec.train_time_interval_seconds is not None:
        saves = left
    elif spec.every_n_train_steps is not None:
        saves += (max_steps - 1) // spec.every_n_train_steps - step // spec.every_n_train_steps
    saves = max(1, min(saves, left))
    if spec.save_top_k < 0:
        return saves
    return min(saves, max(1, spec.keep + spec.save_top_k + 1 - num_there))
