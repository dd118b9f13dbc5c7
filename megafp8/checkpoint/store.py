"""Checkpoints on a shared file system: written whole or not at all, never overwritten.

Every rank calls `write_shard`; rank 0 calls `begin` before and `commit` after, with the entries of
all ranks. Nothing here communicates: the caller passes paths and entries between ranks. A writer
may be killed at any instruction; what is named `step_…` is complete at all times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint.best import NONE, Best
from megafp8.checkpoint.layout import (
    remove_leftovers,
    remove_whole,
    set_aside,
    staging_path,
    step_name,
    steps,
    were_set_aside,
)
from megafp8.checkpoint.manifest import (
    Manifest,
    PieceEntry,
    ShardEntry,
    is_plain_file_name,
    why_incomplete,
    write_manifest,
)
from megafp8.checkpoint.placement import Placement
from megafp8.checkpoint.reader import Reader
from megafp8.checkpoint.shardfile import DTYPE_NAMES, write_safetensors
from megafp8.checkpoint.verification import check_size, check_structure, verify, why_damaged
from megafp8.errors import CheckpointError
from megafp8.files import fsync_directory, os_errors_reported, remove_tree

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
    """Makes the staging directory of one save; rank 0 only, which passes it to the others."""
    staging = staging_path(root, step)
    with os_errors_reported(staging, "making the staging directory"):
        root.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    return staging


def write_shard(staging: Path, file_name: str, placements: Sequence[Placement]) -> ShardEntry:
    """Writes one rank's pieces as one safetensors file, fsynced; replicas and empty parts stay out.

    `file_name` must differ between ranks and kinds, e.g. `model-rank0.safetensors`. On failure
    the unfinished file is removed, and the staging directory too unless other files are in it.
    """
    assert is_plain_file_name(file_name) and file_name.endswith(".safetensors"), file_name
    tensors: dict[str, torch.Tensor] = {}
    pieces: list[PieceEntry] = []
    for placement in placements:
        if placement.replica != 0 or _is_empty_part(placement):
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
    """Makes a staged checkpoint visible as `root/step_…`, all at once; rank 0 only.

    `meta` is any JSON. If a valid checkpoint of this step exists, that one stays and the staged
    one goes; a damaged one is renamed to `….damaged-<n>`. On failure staging is removed.
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
    """Gives up a save on any rank's failure; never raises."""
    if os.path.lexists(staging):
        remove_tree(staging)


def prune(
    root: Path,
    keep: int,
    known_good: Collection[Path] = (),
    in_progress: Collection[Path] = (),
    best: Best = NONE,
) -> tuple[Path, ...]:
    """Removes all but the `keep` newest valid checkpoints, the `best`, and what dead writers left.

    Each one that is kept is read and verified first, so that damaged ones do not count; those in
    `known_good` (what an earlier call returned) are only looked at. If the newest is damaged,
    raises `CheckpointError` and removes nothing. Only the one writer of `root` may call it;
    `in_progress` names staging directories still in use. Returns the valid ones, newest first.
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
    remove_leftovers(root, in_progress)
    return tuple(good)


def newest_valid(root: Path, notify: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies; None where there never was one.

    Tells `notify` of each damaged one that is passed over. If all are damaged it raises
    `CheckpointError`: a run never starts from scratch in silence.
    """
    damaged: list[CheckpointError] = []
    for step_dir in _newest_first(root):
        error = why_damaged(step_dir)
        if error is None:
            for bad in damaged:
                notify(f"damaged checkpoint: {bad.file}: {bad.reason}; using {step_dir} before it")
            return step_dir
        damaged.append(error)
    hint = "Copy a whole one there, or move them away to start from scratch"
    if damaged:
        reason = f"{len(damaged)} checkpoints, all damaged; {damaged[0].file}: {damaged[0].reason}"
        raise CheckpointError(root, reason, hint)
    if aside := were_set_aside(root):
        raise CheckpointError(root, f"only damaged ones, e.g. {aside[-1].name}", hint)
    return None


def _newest_first(root: Path) -> list[Path]:
    return [root / step_name(step) for step in reversed(steps(root))]


def _is_empty_part(placement: Placement) -> bool:
    """An empty share of a tensor that others hold; an empty tensor itself is saved."""
    return placement.tensor.numel() == 0 and 0 not in placement.global_shape


def _describe(placement: Placement) -> PieceEntry:
    """A whole tensor is stored under its logical name: other tools read such files as they are."""
    name, tensor = placement.name, placement.tensor
    assert tensor.dtype in DTYPE_NAMES, f"{name}: {tensor.dtype} cannot be stored"
    assert name and name != "__metadata__", "a name that safetensors keeps for itself"
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
        pass  # the first error is the one to tell; prune removes what is left
