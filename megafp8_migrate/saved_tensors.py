"""Read the tensors of files of `torch.save`, and of pickles that have the bytes of tensors in them.

Nothing is unpickled: `plain_pickle` reads the pickles.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import torch

from megafp8.foreign import MIB, ForeignFileError, shown_value
from megafp8_migrate.plain_pickle import (
    MAX_PICKLE_BYTES,
    Float8,
    SavedTensor,
    read_pickle,
    storage_of,
)

_OF_TORCH = (RuntimeError, TypeError, ValueError, ArithmeticError, AttributeError, MemoryError)
"""What torch and zipfile raise for numbers that do not fit each other."""
_SLACK_BYTES = 16 * MIB
"""A storage may be so much larger than its tensor, as that of one parameter of a buffer."""


class Saved(NamedTuple):
    """Hold what a file of `torch.save` has, with a reader of the tensors in it."""

    value: Any
    tensor: Callable[[Any], torch.Tensor]


def read_saved(file: BinaryIO) -> Saved:
    """Return what a file of `torch.save` holds; it must stay open while tensors are read.

    Raises:
        ForeignFileError: It is not of the form that torch has written since version 1.6, damaged,
            or not accepted by `read_pickle`. The reader of tensors raises it too.
    """
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise ForeignFileError(f"it is not an archive that torch.save writes ({error})") from error
    found = [name for name in archive.namelist() if name.count("/") == 1]
    root = next((name.partition("/")[0] for name in found if name.endswith("/data.pkl")), None)
    if root is None:
        raise ForeignFileError("it has no data.pkl, as an archive of torch.save has")
    members = {info.filename: info for info in archive.infolist()}

    def content(name: str, most: int) -> bytearray:
        info = members.get(f"{root}/{name}")
        if info is None:
            raise ForeignFileError(f"it has no {name}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ForeignFileError(f"{name} is compressed, which torch.save never does")
        assert archive.fp is not None
        if info.file_size > archive.fp.seek(0, 2):
            raise ForeignFileError(f"{name} is longer than its archive")
        if info.file_size > most:
            raise ForeignFileError(f"{name} has {info.file_size} bytes; at most {most} are read")
        read, size = bytearray(info.file_size), 0
        try:
            with archive.open(info) as stream:
                while part := stream.read(16 * MIB):
                    read[size : size + len(part)] = part
                    size += len(part)
        except (zipfile.BadZipFile, EOFError, OSError, *_OF_TORCH) as error:
            raise ForeignFileError(f"{name} cannot be read ({error})") from error
        if size != len(read):
            raise ForeignFileError(f"{name} is cut off")
        return read

    order = bytes(content("byteorder", 16)) if f"{root}/byteorder" in members else b"little"
    if order != b"little":
        raise ForeignFileError("it was written on a machine of big-endian byte order")
    value = read_pickle(bytes(content("data.pkl", MAX_PICKLE_BYTES)), storage_of)
    return Saved(value, partial(_read_tensor, content))


def read_with_tensors(content: bytes) -> Saved:
    """Return what a pickle holds in which the bytes of tensors are; errors as of `read_pickle`."""

    def outside(name: str, most: int) -> bytearray:
        raise ForeignFileError(f"the bytes of a tensor, {shown_value(name)}, are not in it")

    return Saved(read_pickle(content, has_old_storages=True), partial(_read_tensor, outside))


def _read_tensor(content: Callable[[str, int], bytearray], saved: Any) -> torch.Tensor:
    """Return a tensor; `content` returns the bytes of a storage in the archive."""
    try:
        return _unguarded_tensor(content, saved)
    except ForeignFileError:
        raise
    except _OF_TORCH as error:
        raise ForeignFileError("a tensor has another form than its size says") from error


def _unguarded_tensor(content: Callable[[str, int], bytearray], saved: Any) -> torch.Tensor:
    if isinstance(saved, Float8):
        codes = _read_tensor(content, saved.codes).view(torch.uint8).contiguous()
        scale = _read_tensor(content, saved.scale).float().reshape(())
        return codes.view(saved.dtype).float() * scale
    if not isinstance(saved, SavedTensor):
        raise ForeignFileError("it has no tensor")
    last = sum((n - 1) * step for n, step in zip(saved.size, saved.stride, strict=True))
    is_empty = 0 in saved.size
    needed = (saved.offset + (0 if is_empty else last + 1)) * saved.dtype.itemsize
    if math.prod(saved.size) > max(0, last + 1):
        raise ForeignFileError("a tensor has more elements than its storage")
    raw: bytes | bytearray | None = saved.storage.raw
    if raw is None:
        raw = content(f"data/{saved.storage.key}", max(needed, 1) + _SLACK_BYTES)
    if len(raw) < needed:
        raise ForeignFileError(f"the storage of a tensor of {saved.size} is cut off")
    if is_empty:
        return torch.empty(saved.size, dtype=saved.dtype)
    whole = len(raw) // saved.dtype.itemsize
    flat = torch.frombuffer(
        bytearray(raw) if isinstance(raw, bytes) else raw, dtype=saved.dtype, count=whole
    )
    return flat.as_strided(saved.size, saved.stride, saved.offset)
