"""Verify checkpoints, and copy what lies in them into local tensors of any layout."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megafp8.checkpoint.manifest import (
    USE_ANOTHER,
    Manifest,
    PieceEntry,
    Placement,
    ShardEntry,
    pieces_by_name,
    read_manifest,
)
from megafp8.checkpoint.shardfile import DTYPES
from megafp8.checkpoint.step_directories import MANIFEST_NAME, step_of
from megafp8.errors import CheckpointError, UnreadableError
from megafp8.files import note_progress, why_unreadable
from megafp8.specs.geometry import Box

SCALES = "scales/"
"""`scales/NAME` is the factor (FP32) of the tensor NAME, if that is in low precision: 0-d, or a
regular grid of factors, one for each part of the tensor."""
_CHUNK_BYTES = 4 << 20

_NAMES_SHOWN = 5
_SAME_MODEL = "Load it with the model and optimizer settings that it was saved with"


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
    with _reading(path):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(path, "is no file", USE_ANOTHER)
    if (actual := found.st_size) != shard.size:
        raise CheckpointError(path, f"has {actual} bytes, expected {shard.size}", USE_ANOTHER)


def _check_content(directory: Path, shard: ShardEntry) -> None:
    path = directory / shard.file_name
    with _reading(path):
        actual = _sha256(path)
    if actual != shard.sha256:
        raise CheckpointError(path, f"sha256 is {actual}, expected {shard.sha256}", USE_ANOTHER)
    if wrong := _why_header_differs(path, shard):
        raise CheckpointError(path, wrong, USE_ANOTHER)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
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
        what = "is not a safetensors file" if isinstance(error, SafetensorError) else "is no file"
        raise CheckpointError(path, f"{what} ({error})", USE_ANOTHER) from error


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
    with _reading(path), safe_open(str(path), framework="pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        actual = {key: (s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
    return None if actual == expected else "holds other tensors than the manifest lists"


class _Copy(NamedTuple):
    """Name the elements that are copied from a stored piece to a placement: the box `overlap`."""

    piece: PieceEntry
    placement: Placement
    overlap: Box
    factor: torch.Tensor | None  # of a tensor in low precision that is read as FP32


def _factors_in(factors: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the factors of the elements in `box` of a tensor of `shape`, from the whole grid."""
    for dim, cells in enumerate(factors.shape):  # 0-d: one factor for the whole tensor
        if cells > 1:
            places = torch.arange(box.offset[dim], box.offset[dim] + box.shape[dim])
            factors = factors.index_select(dim, places * cells // shape[dim])
    return factors


class Reader:
    """Read tensors of one checkpoint, whole or in part.

    The constructor checks the manifest and the files' sizes. It does not check hashes, so call
    `verify` before. Any number of ranks may read the same checkpoint at once; each rank reads only
    the bytes that it needs.

    Raises:
        CheckpointError: The checkpoint is damaged.
        UnreadableError: It has moments by groups, which an earlier version wrote.
    """

    def __init__(self, step_dir: Path) -> None:
        manifest = check_structure(step_dir)
        self.path = step_dir
        self.step: int = manifest.step
        self.meta: dict[str, Any] = manifest.meta
        self._pieces = pieces_by_name(manifest.shards)
        self._refuse_groups()

    def _refuse_groups(self) -> None:
        for name in self._pieces:
            scales = self._pieces.get(SCALES + name)
            if scales and len(scales[0][1].global_shape) > len(self.global_shape(name)):
                raise UnreadableError(
                    self.path,
                    f"stores {name} by groups (model.optim.moments_scaling=group)",
                    "Read it with megafp8 0.1.0, the last version that has them: continue there "
                    "with model.optim.moments_scaling=tensor, and save",
                )

    def names(self) -> tuple[str, ...]:
        """Return the logical names of all tensors, sorted."""
        return tuple(sorted(self._pieces))

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole logical tensor."""
        return self._pieces_of(name)[0][1].global_shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored."""
        return DTYPES[self._pieces_of(name)[0][1].dtype]

    def read(self, name: str) -> torch.Tensor:
        """Return a whole logical tensor, on the CPU."""
        shape = self.global_shape(name)
        tensor = torch.empty(shape, dtype=self.dtype(name))
        self.load_into([Placement(name, shape, (0,) * len(shape), tensor)])
        return tensor

    def read_values(self, name: str) -> torch.Tensor:
        """Return the values of a logical tensor in FP32 on the CPU, however it is stored."""
        shape = self.global_shape(name)
        values = torch.empty(shape)
        self.load_into([Placement(name, shape, (0,) * len(shape), values)])
        return values

    def load_into(self, placements: Sequence[Placement]) -> None:
        """Copy stored elements into every placement's tensor, in place and bit for bit.

        Names, shapes and dtypes are checked before the first byte is copied. Tensors of the
        checkpoint without a placement are ignored, since a rank has only its part of the model;
        compare with `names()` to find them.

        Args:
            placements: The local tensors, and which parts of logical tensors they are.

        Raises:
            CheckpointError: The checkpoint lacks a name, has other shapes or dtypes, or a file
                cannot be read.
        """
        missing = tuple(dict.fromkeys(p.name for p in placements if p.name not in self._pieces))
        if missing:
            shown = ", ".join(missing[:_NAMES_SHOWN])
            more = ", …" if len(missing) > _NAMES_SHOWN else ""
            tensors = "1 tensor" if len(missing) == 1 else f"{len(missing)} tensors"
            raise CheckpointError(self.path, f"lacks {tensors}: {shown}{more}", _SAME_MODEL)
        by_file: dict[str, list[_Copy]] = {}
        for placement in placements:
            self._plan(placement, by_file)
        for file_name, copies in by_file.items():
            self._copy(self.path / file_name, copies)

    def _plan(self, placement: Placement, by_file: dict[str, list[_Copy]]) -> None:
        name, tensor = placement.name, placement.tensor
        if self.global_shape(name) != placement.global_shape:
            have, want = self.global_shape(name), placement.global_shape
            reason = f"{name} has shape {have} in the checkpoint and {want} in this run"
            raise CheckpointError(self.path, reason, _SAME_MODEL)
        if self.dtype(name) != tensor.dtype and not self._decodes(name, tensor.dtype):
            stored = self.dtype(name)
            reason = f"{name} is {stored} in the checkpoint and {tensor.dtype} in this run"
            raise CheckpointError(self.path, reason, _SAME_MODEL)
        wanted = Box(placement.offset, tuple(tensor.shape))
        scales, covered = None, 0  # `scales` are read once, for all pieces
        if self.dtype(name) != tensor.dtype and SCALES + name in self._pieces:
            scales = self.read(SCALES + name)
        for file_name, piece in self._pieces_of(name):
            if overlap := piece.box.overlap(wanted):
                factor = None
                if scales is not None:
                    factor = _factors_in(scales, overlap, placement.global_shape)
                copy = _Copy(piece, placement, overlap, factor)
                by_file.setdefault(file_name, []).append(copy)
                covered += overlap.volume
        assert covered == wanted.volume, f"{name}: the manifest's pieces are no partition"

    def _decodes(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a tensor that is stored in low precision is asked for in FP32, which holds it."""
        is_stored_so = SCALES + name in self._pieces or self.dtype(name) == torch.bfloat16
        return dtype == torch.float32 and is_stored_so

    def factor(self, name: str, box: Box) -> torch.Tensor | None:
        """Return the factors of the elements in `box` of a tensor, in a shape that broadcasts.

        None: the tensor has no factor.
        """
        if SCALES + name not in self._pieces:
            return None
        return _factors_in(self.read(SCALES + name), box, self.global_shape(name))

    def _copy(self, path: Path, copies: list[_Copy]) -> None:
        with _reading(path), safe_open(str(path), framework="pt") as file:
            for piece, placement, overlap, factor in copies:
                inside = overlap.slices_within(piece.box)
                wanted = Box(placement.offset, tuple(placement.tensor.shape))
                target = placement.tensor.detach()[overlap.slices_within(wanted)]
                target.copy_(file.get_slice(piece.key)[inside])
                note_progress()
                if factor is not None:
                    target.mul_(factor.to(target.device))

    def _pieces_of(self, name: str) -> list[tuple[str, PieceEntry]]:
        if name not in self._pieces:
            raise CheckpointError(self.path, f"lacks {name}", _SAME_MODEL)
        return self._pieces[name]
