"""Write, list and delete checkpoints on a shared file system.

To save, rank 0 calls `begin`, every rank calls `write_shard`, and rank 0 calls `commit` with the
entries that the ranks' calls returned. The caller passes paths and entries between ranks; this
module does not communicate. A checkpoint is committed by one rename, so a directory `step_…` is
complete even if a process is killed at any instruction, and it is never overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from fp8_numerics.caches import fsync_directory
from megafp8.checkpoint.best import NONE, Best
from megafp8.checkpoint.manifest import (
    Manifest,
    PieceEntry,
    Placement,
    ShardEntry,
    is_plain_file_name,
    why_incomplete,
    write_manifest,
)
from megafp8.checkpoint.reader import Reader
from megafp8.checkpoint.shardfile import DTYPE_NAMES, write_safetensors
from megafp8.checkpoint.step_directories import (
    remove_leftovers,
    remove_whole,
    set_aside,
    staging_path,
    step_name,
    steps,
    were_set_aside,
)
from megafp8.checkpoint.verify import check_size, check_structure, verify, why_damaged
from megafp8.errors import CheckpointError
from megafp8.files import os_errors_reported, remove_tree

__all__ = [
    "Placement",
    "Reader",
    "ShardEntry",
    "begin",
    "commit",
    "discard",
    "newest_valid",
    "prune",
    "remove_leftovers",
    "steps",
    "verify",
    "write_shard",
]


def begin(root: Path, step: int) -> Path:
    """Make the staging directory of one save, and return it; only rank 0 calls this function.

    Raises:
        CheckpointError: The directory cannot be made.
    """
    staging = staging_path(root, step)
    with os_errors_reported(staging, "making the staging directory"):
        root.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    return staging


def write_shard(staging: Path, file_name: str, placements: Sequence[Placement]) -> ShardEntry:
    """Write one rank's pieces into one safetensors file, fsynced; return the file's entry.

    Placements of other replicas than 0 and empty parts of tensors are left out. On failure the
    unfinished file is removed, and the staging directory too unless other files are in it.

    Args:
        staging: The directory that `begin` returned.
        file_name: A name that no other rank or kind of state uses, as `model-rank0.safetensors`.
        placements: The tensors of this rank.

    Raises:
        CheckpointError: The file cannot be written.
    """
    assert is_plain_file_name(file_name) and file_name.endswith(".safetensors"), file_name
    tensors: dict[str, torch.Tensor] = {}
    pieces: list[PieceEntry] = []
    for placement in placements:
        is_empty_part = placement.tensor.numel() == 0 and 0 not in placement.global_shape
        if placement.replica != 0 or is_empty_part:  # an empty whole tensor is saved
            continue
        piece = _describe(placement)
        if piece.key in tensors and not placement.tensor.numel():
            continue  # parts of an empty tensor are all alike
        assert piece.key not in tensors, f"{piece.key} is given twice"
        tensors[piece.key] = placement.tensor
        pieces.append(piece)
    path = staging / file_name
    assert not os.path.lexists(path), f"{path} is written twice"
    try:
        with os_errors_reported(path, "writing a checkpoint"):
            size, sha256 = write_safetensors(path, tensors)
            fsync_directory(staging)
    except BaseException:
        _remove_unfinished(path)
        raise
    return ShardEntry(file_name, size, sha256, tuple(pieces))


def commit(
    staging: Path, root: Path, step: int, shards: Sequence[ShardEntry], meta: dict[str, Any]
) -> Path:
    """Rename a staged checkpoint to `root/step_…` and return that path; only rank 0 calls this.

    If a valid checkpoint of this step exists already, it stays and the staged one is deleted. A
    damaged one is renamed to `….damaged-<n>` first. On failure the staging directory is deleted.

    Args:
        staging: The directory that `begin` returned.
        root: The directory of the run's checkpoints.
        step: The step that the checkpoint was saved at.
        shards: The entries that `write_shard` returned on all ranks.
        meta: Any JSON, which the manifest records.

    Raises:
        CheckpointError: A file has another size than was written, or the commit fails.
    """
    wrong = why_incomplete(shards)
    assert wrong is None, f"ranks did not save each tensor exactly once: {wrong}"
    final = root / step_name(step)
    try:
        with os_errors_reported(final, "committing a checkpoint"):
            for shard in shards:
                check_size(staging, shard)
            write_manifest(staging, Manifest(step, meta, tuple(shards)))
            fsync_directory(staging)
            if os.path.lexists(final):
                if why_damaged(final) is None:
                    remove_whole(staging)
                    return final
                set_aside(final)
            staging.rename(final)
            fsync_directory(root)
    except BaseException:
        discard(staging)
        raise
    return final


def discard(staging: Path) -> None:
    """Delete the staging directory of a save that failed; never raises."""
    if os.path.lexists(staging):
        remove_tree(staging)


def prune(
    root: Path,
    keep: int,
    known_good: Collection[Path] = (),
    best: Best = NONE,
) -> tuple[Path, ...]:
    """Delete all checkpoints but the `keep` newest valid ones and the best ones.

    The checkpoints that count as newest are read and verified first, so that damaged ones do not
    count. Staging and trash directories of dead processes are deleted too. Only the process that
    holds the run's lock may call this function, and not while it saves.

    Args:
        root: The directory of the run's checkpoints.
        keep: How many of the newest stay, at least 1.
        known_good: Checkpoints that an earlier call returned; only their sizes are checked again.
        best: Which others stay.

    Returns:
        The newest valid checkpoints, newest first.

    Raises:
        CheckpointError: The newest checkpoint is damaged, in which case nothing is deleted, or a
            checkpoint cannot be deleted.
    """
    assert keep >= 1, f"keep={keep}"
    good: list[Path] = []
    superfluous: list[Path] = []
    for step_dir in _newest_first(root):
        if len(good) == keep:
            superfluous.append(step_dir)
            continue
        try:
            check_structure(step_dir) if step_dir in known_good else verify(step_dir)
            good.append(step_dir)
        except CheckpointError:
            if not good:
                raise
    protected = best.of([*good, *superfluous])
    for step_dir in [path for path in reversed(superfluous) if path not in protected]:
        with os_errors_reported(step_dir, "removing an old checkpoint"):
            remove_whole(step_dir)
    remove_leftovers(root)
    return tuple(good)


def newest_valid(root: Path, notify: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint that verifies, or None where there never was one.

    `notify` is called with a line for each damaged checkpoint that is passed over.

    Raises:
        CheckpointError: All checkpoints are damaged. The run must not start from scratch unless
            its user decides so.
    """
    damaged: list[CheckpointError] = []
    for step_dir in _newest_first(root):
        error = why_damaged(step_dir)
        if error is None:
            for bad in damaged:
                notify(f"damaged checkpoint: {bad.file}: {bad.reason}; using the older {step_dir}")
            return step_dir
        damaged.append(error)
    hint = "Copy an undamaged checkpoint there, or start from scratch under another name"
    if damaged:
        count = len(damaged)
        checkpoints = "the only checkpoint is" if count == 1 else f"all {count} checkpoints are"
        reason = f"{checkpoints} damaged; {damaged[0].file}: {damaged[0].reason}"
        raise CheckpointError(root, reason, hint)
    if aside := were_set_aside(root):
        reason = f"all checkpoints there were found damaged, as {aside[-1].name}"
        raise CheckpointError(root, reason, hint)
    return None


def _newest_first(root: Path) -> list[Path]:
    return [root / step_name(step) for step in reversed(steps(root))]


def _describe(placement: Placement) -> PieceEntry:
    """Return the entry of a piece.

    A whole tensor has its logical name as the key, so that other tools can read such files.
    """
    name, tensor = placement.name, placement.tensor
    assert tensor.dtype in DTYPE_NAMES, f"{name}: {tensor.dtype} cannot be stored"
    assert name and name != "__metadata__", f"{name!r}: safetensors reserves this name"
    shape = tuple(tensor.shape)
    is_whole = shape == placement.global_shape
    key = name if is_whole else f"{name}@{','.join(map(str, placement.offset))}"
    dtype = DTYPE_NAMES[tensor.dtype]
    return PieceEntry(name, key, dtype, placement.global_shape, placement.offset, shape)


def _remove_unfinished(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    except OSError:
        pass  # the caller reports the first error; `prune` deletes what is left
