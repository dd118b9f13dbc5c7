"""Copy what lies in a checkpoint into local tensors of any layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from megafp8.checkpoint.manifest import (
    PieceEntry,
    Placement,
    pieces_by_name,
)
from megafp8.checkpoint.shardfile import DTYPES
from megafp8.checkpoint.verify import check_structure, reading_shard
from megafp8.errors import CheckpointError, UnreadableError
from megafp8.files import note_progress
from megafp8.specs.geometry import Box

SCALES = "scales/"
"""`scales/NAME` is the factor (FP32) of the tensor NAME, if that is in low precision: 0-d, or a
regular grid of factors, one for each part of the tensor."""

_NAMES_SHOWN = 5
_SAME_MODEL = "Load it with the model and optimizer settings that it was saved with"


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
        return self.read_all([name])[name]

    def read_all(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return whole logical tensors by their names, on the CPU; each file is opened once."""
        tensors = {
            name: torch.empty(self.global_shape(name), dtype=self.dtype(name)) for name in names
        }
        self.load_into(
            [
                Placement(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
                for name, tensor in tensors.items()
            ]
        )
        return tensors

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
        """Add to `by_file` what is copied from each file into one local tensor.

        Raises:
            CheckpointError: The checkpoint has the tensor in another shape or dtype.
        """
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
        with reading_shard(path), safe_open(str(path), framework="pt") as file:
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
