"""Read tensors of a distributed checkpoint of Megatron's, in the form `torch_dist`.

`.metadata` lists the tensors and where their parts are; each part is a file of `torch.save` inside
of a file `….distcp`. Both are read without unpickling, so that nothing of them is run. A checkpoint
is a folder, or lies in an archive `.nemo`, which is a tar that need not be unpacked.
"""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch

from megafp8.errors import CheckpointError
from megafp8.foreign import ForeignFileError, member, parse_json, shown_value
from megafp8_migrate.plain_pickle import (
    MAX_PICKLE_BYTES,
    Float8,
    Record,
    fields_of,
    numbers,
    read_pickle,
)
from megafp8_migrate.saved_tensors import Saved, read_saved, read_with_tensors

METADATA, ABOUT, COMMON = ".metadata", "metadata.json", "common.pt"
_COMMON_OBJECT = "common_state/shard_0_1"
"""The object in which Megatron-core from 0.19 on keeps what was in `common.pt`."""
LATEST = "latest_checkpointed_iteration.txt"
FORMAT = "torch_dist"
_MAX_SMALL_BYTES = 1 << 20
_MAX_STATE_BYTES = 64 << 20
"""Of a module's state: a history of 1,024 amaxes of 1,000 experts is 20 MB."""
_MAX_DIMS = 8
MAX_MEMBERS = 100_000  # of an archive
_ABSENT = "Give the folder of a checkpoint that was saved completely"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes in which weights are read. One of 8 bits would need scales, which no file here has."""


class Files:
    """Open the files of a folder, or of an uncompressed tar archive, by their names in it."""

    def __init__(self, path: Path, inside: str = "") -> None:
        self.path, self._inside = path, inside
        self._sizes: dict[str, int] = {}

    def __truediv__(self, name: str) -> Files:
        """Return the files of a folder in it."""
        inner = Files(self.path, f"{self._inside}{name}/")
        inner.__dict__.update({"_members": self._members} if "_members" in self.__dict__ else {})
        return inner

    def shown(self, name: str) -> Path:
        """Return the path of a file for messages."""
        return self.path / f"{self._inside}{name}"

    @cached_property
    def _members(self) -> Mapping[str, tarfile.TarInfo] | None:
        """Return what an archive holds by names; None for a folder."""
        if self.path.is_dir():
            return None
        try:
            with tarfile.open(self.path, "r:") as archive:
                listed = dict[str, tarfile.TarInfo]()
                for info in archive:
                    # With a negative size the list would never end.
                    if info.size < 0 or len(listed) >= MAX_MEMBERS:
                        raise tarfile.TarError("it has a file of negative size, or too many")
                    listed[info.name.removeprefix("./")] = info
        except (tarfile.TarError, OSError, ValueError, EOFError) as error:
            reason = f"is no uncompressed tar archive ({error})"
            hint = "Unpack it with `tar -xf`, and give the folder"
            raise CheckpointError(self.path, reason, hint) from error
        return {name: info for name, info in listed.items() if info.isreg() and not info.issparse()}

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        inside = f"{self._inside}{name}"
        if self._members is not None:
            return inside in self._members
        return (self.path / inside).is_file()

    def size(self, name: str) -> int:
        """Return the bytes of a file; errors are those of `open`."""
        if name not in self._sizes:
            with self.open(name) as file:
                self._sizes[name] = file.seek(0, io.SEEK_END)
        return self._sizes[name]

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for reading.

        Raises:
            CheckpointError: There is none, or it cannot be read, or what is done with it raises
                `ForeignFileError`.
        """
        try:
            if self._members is not None:
                info = self._members.get(f"{self._inside}{name}")
                if info is None:
                    raise CheckpointError(self.shown(name), "is missing", _ABSENT)
                with open(self.path, "rb") as archive:
                    yield _part(archive, info.offset_data, info.size)
                return
            path = member(self.path / self._inside, name)
            if path is None:
                raise CheckpointError(self.shown(name), "is missing", _ABSENT)
            with open(path, "rb") as file:
                yield file
        except (OSError, ForeignFileError) as error:
            hint = "Copy the checkpoint again from where it was saved"
            raise CheckpointError(self.shown(name), f"cannot be read: {error}", hint) from error

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a file of at most `most` bytes; errors are those of `open`."""
        with self.open(name) as file:
            content = file.read(most + 1)
            if len(content) > most:
                raise ForeignFileError(f"it has more than {most} bytes")
        return content


class _Part(io.RawIOBase):
    """Show some bytes of a file as a file of their own."""

    def __init__(self, file: BinaryIO, begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._begin + self._at)
        read = self._file.read(wanted)
        buffer[: len(read)] = read
        self._at += len(read)
        return len(read)


def _part(file: BinaryIO, begin: int, size: int) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_Part(file, begin, size)))


class Chunk(NamedTuple):
    """Say where a part of a tensor is: its place in the tensor, and its bytes in a file."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredParts:
    """Describe one tensor of a checkpoint.

    Attributes:
        shape: Its shape.
        dtype: The dtype in which it is stored.
        chunks: Its parts.
        cells: How many cells the tensor is divided into along each dimension if each cell is stored
            as rows of one dimension, as Megatron-core until 0.13 stores an optimizer's tensors; a
            chunk's place and size then have the cell's number and a part of the row.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    cells: tuple[int, ...] | None = None

    @cached_property
    def _by_row(self) -> dict[int, list[Chunk]] | None:
        """Return the chunks by their first index, if each has one: a layer of stacked layers."""
        heights = {chunk.size[:1] for chunk in self.chunks} if self.cells is None else set()
        if heights == {(1,)} or (self.cells and self.cells[0] == self.shape[0]):
            rows: dict[int, list[Chunk]] = {}
            for chunk in self.chunks:
                rows.setdefault(chunk.offset[0], []).append(chunk)
            return rows
        return None

    def near(self, first: int, count: int) -> Sequence[Chunk]:
        """Return the chunks that may have some of `count` indices of the first dimension."""
        if self._by_row is None:
            return self.chunks
        return [chunk for row in range(first, first + count) for chunk in self._by_row.get(row, ())]


@dataclass
class DistCheckpoint:
    """Hold what a checkpoint's metadata lists, and read from its files.

    Attributes:
        files: The files.
        tensors: The tensors by their names.
        objects: Where what is no tensor is, such as `…_extra_state/shard_0_2`.
        common: Where what all ranks share is, if `common.pt` does not have it.
    """

    files: Files
    tensors: dict[str, StoredParts]
    objects: dict[str, Chunk]
    common: Chunk | None
    _last: tuple[Chunk, torch.Tensor] | None = field(default=None, repr=False)

    def check(self, name: str) -> None:
        """Check that the parts of a tensor make up the whole, and that files are long enough.

        Raises:
            CheckpointError: They do not, or are not.
        """
        stored = self.tensors[name]
        for chunk in stored.chunks:
            has = self.files.size(chunk.file)
            if chunk.begin + chunk.length > has or math.prod(chunk.size) > chunk.length:
                reason = f"is cut off: it has {has} bytes, and a part of {name} is beyond them"
                raise CheckpointError(self.files.shown(chunk.file), reason, _ABSENT)
        if sum(math.prod(chunk.size) for chunk in stored.chunks) != math.prod(stored.shape):
            raise CheckpointError(self.files.shown(METADATA), f"{name} is incomplete", _ABSENT)

    def read(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """Return a part of a tensor in FP32.

        Beside it, no more than one chunk of the tensor is in memory.

        Args:
            name: The tensor's name.
            begin: Where the part begins, in each dimension.
            size: The part's shape.

        Raises:
            CheckpointError: A file is damaged, or has NaN or infinite values.
        """
        stored = self.tensors[name]
        out = torch.full(size, math.nan)  # what no chunk covers is found as if it were stored so
        for content, at, shape in self._pieces(name, stored, stored.near(begin[0], size[0])):
            low = [max(b, a) for b, a in zip(begin, at, strict=True)]
            sizes = zip(begin, size, at, shape, strict=True)
            high = [min(b + n, a + m) for b, n, a, m in sizes]
            if all(first < end for first, end in zip(low, high, strict=True)):
                out[_slices(low, high, begin)] = content()[_slices(low, high, at)]
        if not bool(torch.isfinite(out).all()):
            hint = "Give another checkpoint; a model with such weights cannot be trained further"
            reason = f"{name} is incomplete, or has NaN or infinite values"
            raise CheckpointError(self.files.shown(""), reason, hint)
        return out

    def read_state(self, name: str) -> Saved | None:
        """Return what the `_extra_state` of a module of Transformer Engine's has; None for nothing.

        Raises:
            CheckpointError: It has another form.
        """
        place = self.objects[name]
        with self.files.open(place.file):
            if place.length > _MAX_STATE_BYTES:
                raise ForeignFileError(f"{name} has {place.length} bytes")
            with self._saved(place.file, place.begin, place.length) as saved:
                value = saved.value
                pickled = saved.tensor(value[0] if isinstance(value, list) and value else value)
            if pickled.dtype != torch.uint8:
                raise ForeignFileError(f"{name} is no row of bytes")
            return read_with_tensors(pickled.numpy().tobytes()) if pickled.numel() else None

    @contextmanager
    def read_common(self) -> Iterator[tuple[Path, Any]]:
        """Yield what all ranks share, such as arguments, after the file that has it; None if none.

        Raises:
            CheckpointError: It cannot be read, or what is done with it raises `ForeignFileError`.
        """
        if self.files.has(COMMON):
            with self.files.open(COMMON) as file:
                yield self.files.shown(COMMON), read_saved(file).value
        elif (place := self.common) is not None:
            with self._saved(place.file, place.begin, place.length) as saved:
                value = saved.value[0] if isinstance(saved.value, list) and saved.value else None
                yield self.files.shown(place.file), value
        else:
            yield self.files.shown(COMMON), None

    def _pieces(
        self, name: str, stored: StoredParts, chunks: Sequence[Chunk]
    ) -> Iterator[tuple[Callable[[], torch.Tensor], tuple[int, ...], tuple[int, ...]]]:
        """Yield what reads a piece of a tensor, with its place and shape, for some chunks."""
        if stored.cells is None:
            for chunk in chunks:
                yield partial(self._content, name, stored, chunk), chunk.offset, chunk.size
            return
        shape = tuple(n // count for n, count in zip(stored.shape, stored.cells, strict=True))
        for cell in dict.fromkeys(chunk.offset[:-1] for chunk in chunks):
            at = tuple(number * n for number, n in zip(cell, shape, strict=True))
            own = [chunk for chunk in chunks if chunk.offset[:-1] == cell]
            yield partial(self._cell, name, stored, own, shape), at, shape

    def _cell(
        self, name: str, stored: StoredParts, chunks: Sequence[Chunk], shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a cell that is stored as parts of one row."""
        row = torch.full((math.prod(shape),), math.nan)
        for chunk in chunks:
            place = slice(chunk.offset[-1], chunk.offset[-1] + chunk.size[-1])
            row[place] = self._content(name, stored, chunk).reshape(-1)
        return row.view(shape)

    def _content(self, name: str, stored: StoredParts, chunk: Chunk) -> torch.Tensor:
        """Return a chunk as it is stored; the last one is kept, since others join in it."""
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        self._last = None
        with self._saved(chunk.file, chunk.begin, chunk.length) as saved:
            tensor = saved.tensor(saved.value)
            if tuple(tensor.shape) != chunk.size:
                raise ForeignFileError(
                    f"{name} has the shape {tuple(tensor.shape)}, and {METADATA} says {chunk.size}"
                )
            if tensor.dtype != stored.dtype and not isinstance(saved.value, Float8):
                raise ForeignFileError(
                    f"{name} has the dtype {tensor.dtype}, and {METADATA} says {stored.dtype}"
                )
        self._last = chunk, tensor
        return tensor

    @contextmanager
    def _saved(self, file: str, begin: int, length: int) -> Iterator[Saved]:
        with self.files.open(file) as whole:
            yield read_saved(_part(whole, begin, length))


def _slices(low: Sequence[int], high: Sequence[int], of: Sequence[int]) -> tuple[slice, ...]:
    """Return where a region is in a tensor that begins at `of`."""
    return tuple(slice(a - b, c - b) for a, c, b in zip(low, high, of, strict=True))


def open_checkpoint(path: Path) -> tuple[Files, DistCheckpoint]:
    """Return the files that a user names, and the checkpoint in them.

    Args:
        path: The folder of a checkpoint, one above it, or an archive `.nemo`.

    Raises:
        CheckpointError: There is no checkpoint that can be read.
    """
    if not path.exists():
        hint = "Give the folder of a checkpoint of Megatron or NeMo"
        raise CheckpointError(path, "does not exist", hint)
    home = Files(path)
    if home.has(LATEST):
        home = _newest(home)
    for place in ("", "weights/", "model_weights/"):
        if home.has(place + METADATA):
            files = home / place.rstrip("/") if place else home
            _check_format(files)
            return home, _checkpoint(files)
    raise _no_checkpoint(home)


def _newest(home: Files) -> Files:
    """Return the files of the newest iteration, which a text file names."""
    text = home.read(LATEST, _MAX_SMALL_BYTES).decode("utf-8", "replace").strip()
    if text != "release" and not (text.isascii() and text.isdecimal() and len(text) < 12):
        reason = f"has {shown_value(text)}, which is no iteration"
        raise CheckpointError(home.shown(LATEST), reason, "Give the folder iter_… of one")
    return home / ("release" if text == "release" else f"iter_{int(text):07}")


def _no_checkpoint(home: Files) -> CheckpointError:
    """Return the error of a folder without a checkpoint of this form, which names what it has."""
    if home.has(ABOUT):
        _check_format(home)
    shown = home.shown("")
    if home._members is None and shown.is_dir():
        names = sorted(path.name for path in shown.iterdir())
        if any(name.startswith("mp_rank_") for name in names):
            return CheckpointError(
                shown, "has pickled files of each rank (mp_rank_…), which are never read",
                "Load it in Megatron and save it with --ckpt-format torch_dist",
            )  # fmt: skip
        if any((shown / name / ".zarray").is_file() for name in names[:1000]):
            return _other_format(shown, "zarr")
    hint = "Give the folder of a checkpoint of Megatron or NeMo, in which .metadata is"
    return CheckpointError(shown, f"has no {METADATA}", hint)


def _other_format(file: Path, found: object) -> CheckpointError:
    return CheckpointError(
        file, f"the checkpoint has the form {shown_value(found)}, which is not read here",
        f"Load it in Megatron and save it with --ckpt-format {FORMAT}",
    )  # fmt: skip


def _check_format(files: Files) -> None:
    """Raise `CheckpointError` if a checkpoint says that it has another form than `torch_dist`."""
    if not files.has(ABOUT):
        return
    try:
        about = parse_json(files.read(ABOUT, _MAX_SMALL_BYTES))
        backend = about.get("sharded_backend") if isinstance(about, dict) else None
    except ForeignFileError as error:
        raise CheckpointError(files.shown(ABOUT), str(error), _ABSENT) from error
    if backend != FORMAT:
        raise _other_format(files.shown(ABOUT), backend)


def _checkpoint(files: Files) -> DistCheckpoint:
    """Return what the metadata of a checkpoint lists."""
    with files.open(METADATA) as file:
        content = file.read(MAX_PICKLE_BYTES + 1)
        if len(content) > MAX_PICKLE_BYTES:
            raise ForeignFileError(f"it has more than {MAX_PICKLE_BYTES} bytes")
        try:
            listed = read_pickle(content)
            return _listed(files, listed)
        except (AttributeError, TypeError, LookupError) as error:
            raise ForeignFileError("it is not the metadata of a checkpoint") from error


def _listed(files: Files, metadata: Record) -> DistCheckpoint:
    """Return the names of a checkpoint's tensors and objects, and where their parts are."""
    places: dict[Any, Mapping[str, Any]] = {}
    for index, info in metadata["storage_data"].items():
        offset = fields_of(index).get("offset")
        _of_text(index["fqn"])
        places[index["fqn"], None if offset is None else numbers(offset)] = fields_of(info)
    flat = fields_of(metadata).get("mcore_data") or {}
    tensors: dict[str, StoredParts] = {}
    objects: dict[str, Chunk] = {}
    for name, about in metadata["state_dict_metadata"].items():
        _of_text(name)
        if about.name.endswith("BytesStorageMetadata"):
            objects[name] = _chunk(name, (), (), places)
            continue
        shape, dtype = numbers(about["size"]), about["properties"].state[0]
        if not isinstance(dtype, torch.dtype) or len(shape) > _MAX_DIMS:
            raise ForeignFileError(f"{name} is no tensor of a known dtype")
        chunks = tuple(_chunks(name, shape, about["chunks"], places))
        original = flat.get(name, {}).get("nd_reformulated_orig_global_shape")
        if original is None:
            tensors[name] = StoredParts(shape, dtype, chunks)
            continue
        whole, cells = numbers(tuple(original)), shape[:-1]
        divides = len(whole) == len(cells) and not any(
            not n or m % n for m, n in zip(whole, cells, strict=True)
        )
        if not divides or any(chunk.size[:-1] != (1,) * len(cells) for chunk in chunks):
            raise ForeignFileError(f"the cells of {name} do not divide its shape")
        tensors[name] = StoredParts(whole, dtype, chunks, cells)
    return DistCheckpoint(files, tensors, objects, objects.pop(_COMMON_OBJECT, None))


def _of_text(name: Any) -> None:
    """Raise `ForeignFileError` unless a name is text that a message can show on its line."""
    if not isinstance(name, str) or not name.isprintable():
        raise ForeignFileError(f"the name {shown_value(name)} of a tensor is no text of one line")


def _chunks(
    name: str, shape: tuple[int, ...], listed: Any, places: Mapping[Any, Mapping[str, Any]]
) -> Iterator[Chunk]:
    for chunk in listed:
        offset, size = numbers(chunk["offsets"]), numbers(chunk["sizes"])
        if not len(offset) == len(size) == len(shape) or any(
            begin + count > n for begin, count, n in zip(offset, size, shape, strict=True)
        ):
            raise ForeignFileError(f"a part of {name} lies outside of it")
        yield _chunk(name, offset, size, places)


def _chunk(
    name: str,
    offset: tuple[int, ...],
    size: tuple[int, ...],
    places: Mapping[Any, Mapping[str, Any]],
) -> Chunk:
    info = places.get((name, offset)) or places.get((name, None))
    if info is None:
        raise ForeignFileError(f"it does not say where the part of {name} at {offset} is")
    file = info["relative_path"]
    if not isinstance(file, str) or Path(file).name != file or not file.isprintable():
        raise ForeignFileError(f"{shown_value(file)} is not a file name without folders")
    if info.get("transform_descriptors"):
        raise ForeignFileError(f"the file {file} is compressed or encrypted")
    begin, length = info["offset"], info["length"]
    if not all(type(n) is int and n >= 0 for n in (begin, length)):
        raise ForeignFileError(f"the place of {name} in {file} is no number")
    return Chunk(offset, size, file, begin, length)
