"""Write tensors into a safetensors file and hash the bytes before they reach the disk.

With the writer of the library safetensors, the file would have to be read back for its hash, and a
torn write would be hashed as if it were right. The format is small: the header's length in 8
little-endian bytes, a JSON header padded with spaces, and the tensors' bytes one after the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from megafp8.files import note_progress

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_CHUNK_BYTES = 16 << 20
_FLUSH_BYTES = 1 << 30
"""After so many bytes the file is flushed to the disk. With one flush at the end, a rank could show
no progress for as long as the disk takes for a whole file."""
_ALIGNMENT_BYTES = 8


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Create the file `path`, fsynced; return its size in bytes and the SHA-256 it should have.

    Tensors that are strided or on a device are copied, one at a time; the others are written from
    their own memory.

    Raises:
        OSError: The file cannot be written. The unfinished file is left to the caller.
    """
    # With wide dtypes first, every tensor starts at a multiple of its item size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    digest, size = hashlib.sha256(), 0
    flushed = 0
    with (
        open(path, "xb", buffering=0) as file,
        ThreadPoolExecutor(1) as hasher,
        ThreadPoolExecutor(1) as flusher,
    ):
        flush: Future[None] | None = None
        for chunk in _chunks(ordered):
            hashed = hasher.submit(digest.update, chunk)  # runs while the same bytes are written
            _write_all(file.fileno(), chunk)
            hashed.result()
            size += len(chunk)
            note_progress()
            if size - flushed >= _FLUSH_BYTES:
                if flush is not None:
                    flush.result()
                flush, flushed = flusher.submit(_flush, file.fileno()), size
        if flush is not None:
            flush.result()
        _flush(file.fileno())
    return size, digest.hexdigest()


def _chunks(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[memoryview]:
    yield memoryview(_header(tensors))
    for _, tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content: memoryview[int] = memoryview(flat.numpy().data)
        for start in range(0, len(content), _CHUNK_BYTES):
            yield content[start : start + _CHUNK_BYTES]


def _header(tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    entries: dict[str, dict[str, object]] = {}
    start = 0
    for key, tensor in tensors:
        end = start + tensor.numel() * tensor.element_size()
        entries[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)
    note_progress()


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
