r"""Read and write Megatron's indexed datasets.

`<prefix>.bin` holds the tokens, `<prefix>.idx` says where each sequence lies.

Layout of `.idx`, little-endian (Megatron-LM, `megatron/core/datasets/indexed_dataset.py`):

    9 bytes   magic "MMIDIDX\0\0"
    uint64    version, 1
    uint8     dtype code, see DTYPE_CODES
    uint64    S, number of sequences
    uint64    D, number of document indices (documents + 1)
    int32[S]  tokens of each sequence
    int64[S]  byte offset of each sequence in `.bin`
    int64[D]  first sequence of each document, and S at the end
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fp8_numerics.caches import put
from megafp8.errors import DataError
from megafp8.files import draft_of, expanded

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[int, np.dtype[np.generic]] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_CODES = {known: code for code, known in DTYPE_CODES.items()}
REBUILD = "Write the dataset again, or copy both of its files again"
UINT16_VOCABULARY = 65500  # Megatron's own limit, a little below 2**16


def token_dtype(vocab_size: int) -> np.dtype[np.generic]:
    """Return the dtype that Megatron's tools choose for a vocabulary."""
    return DTYPE_CODES[8] if vocab_size < UINT16_VOCABULARY else DTYPE_CODES[4]


def bin_path(prefix: Path) -> Path:
    """Return `<prefix>.bin`; the prefix itself may have dots."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return `<prefix>.idx`; the prefix itself may have dots."""
    return prefix.with_name(prefix.name + ".idx")


def write_index(
    path: Path,
    dtype: np.dtype[np.generic],
    lengths: NDArray[np.integer],
    documents: NDArray[np.integer],
) -> None:
    """Write an `.idx` for sequences that lie one after another."""
    lengths, documents = lengths.astype("<i4"), documents.astype("<i8")
    ends = np.cumsum(lengths, dtype="<i8") * dtype.itemsize
    offsets = np.concatenate([np.zeros(1, "<i8"), ends])[:-1]
    header = HEADER.pack(MAGIC, VERSION, _CODES[dtype], len(lengths), len(documents))
    with open(path, "wb") as file:
        for part in (header, lengths.tobytes(), offsets.tobytes(), documents.tobytes()):
            file.write(part)


class IndexedWriter:
    """Write one dataset, a document at a time; its files get their names in `close`.

    As a context manager it deletes the half-written files if an exception leaves the context.
    """

    def __init__(self, prefix: Path, dtype: DTypeLike) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        assert self._dtype in _CODES, f"the format has no {self._dtype}"
        self._lengths: list[int] = []
        self._documents: list[int] = [0]
        self._bin_tmp = draft_of(bin_path(prefix))
        self._idx_tmp = draft_of(idx_path(prefix))
        self._bin = open(self._bin_tmp, "wb")

    def add_document(self, *sequences: Sequence[int] | NDArray[np.integer]) -> None:
        """Add a document of one or more sequences of tokens.

        Raises:
            ValueError: A token does not fit the dtype.
        """
        for sequence in sequences:
            wide = np.asarray(sequence, dtype=np.int64)
            tokens = wide.astype(self._dtype)
            if not np.array_equal(tokens, wide):
                raise ValueError(f"tokens {wide.min()}..{wide.max()} do not fit {self._dtype}")
            self._bin.write(tokens.tobytes())
            self._lengths.append(len(tokens))
        self._documents.append(len(self._lengths))

    def close(self) -> None:
        """Rename both files into place, `.bin` first, so that an `.idx` never points at missing
        tokens.
        """
        try:
            self._write_files()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Delete what was written."""
        with contextlib.suppress(OSError):  # a full disk fails to flush a second time
            self._bin.close()
        self._bin_tmp.unlink(missing_ok=True)
        self._idx_tmp.unlink(missing_ok=True)

    def _write_files(self) -> None:
        self._bin.close()
        lengths, documents = np.asarray(self._lengths, "<i4"), np.asarray(self._documents, "<i8")
        write_index(self._idx_tmp, self._dtype, lengths, documents)
        put(self._bin_tmp, bin_path(self._prefix))
        put(self._idx_tmp, idx_path(self._prefix))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class IndexedDataset:
    """Map an indexed dataset into memory; opening it reads and checks only the index.

    Attributes:
        prefix: The path without `.bin` and `.idx`.
        dtype: The dtype of the stored tokens.
        lengths_N: The tokens of each sequence, int32.
        documents_D1: The first sequence of each document, then the number of sequences, int64.
        notes: Lines about what looks wrong and may be meant.
    """

    def __init__(self, prefix: Path) -> None:
        """Open and check both files.

        Raises:
            DataError: A file is missing, damaged, or not such a dataset.
        """
        self.prefix = prefix
        idx, tokens = idx_path(prefix), bin_path(prefix)
        raw = _map(idx, np.dtype("uint8")).view(np.uint8)
        bin_bytes = _file_size(tokens)
        self.dtype, num_sequences, num_indices = _parse_header(idx, raw)
        # Views of the mapped file, which start at odd offsets; NumPy reads those correctly.
        start = HEADER.size
        self.lengths_N: NDArray[np.int32] = raw[start : start + 4 * num_sequences].view("<i4")
        start += 4 * num_sequences
        self._offsets_N: NDArray[np.int64] = raw[start : start + 8 * num_sequences].view("<i8")
        start += 8 * num_sequences
        self.documents_D1: NDArray[np.int64] = raw[start : start + 8 * num_indices].view("<i8")
        self._check_index(idx, tokens, bin_bytes)
        self.notes = self._check_cover(idx, tokens, bin_bytes)
        # A length that is no multiple of the token's size cannot be mapped whole; its tail is
        # beyond every sequence, as just checked.
        self._tokens = _map(tokens, self.dtype)

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths_N)

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return len(self.documents_D1) - 1

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sequences."""
        return int(self.lengths_N.sum(dtype=np.int64))

    @cached_property
    def has_one_sequence_per_document(self) -> bool:
        """Return whether document d is sequence d, as in the files of every language-model
        writer.
        """
        return self.num_documents == self.num_sequences and bool(
            (np.diff(self.documents_D1) == 1).all()
        )

    def tokens_per_document(self) -> NDArray[np.int64]:
        """Return the number of tokens of each document, [num_documents]."""
        if self.has_one_sequence_per_document:
            return self.lengths_N.astype(np.int64)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths_N, dtype=np.int64)])
        counts: NDArray[np.int64] = np.diff(ends[self.documents_D1])
        return counts

    def sequence(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Return tokens `start` to `stop` of one sequence, as a copy."""
        length = int(self.lengths_N[index])
        stop = length if stop is None else stop
        assert 0 <= start <= stop <= length, f"[{start}, {stop}) of {length} tokens"
        first = int(self._offsets_N[index]) // self.dtype.itemsize
        return self._tokens[first + start : first + stop].astype(np.int64)

    def document(self, index: int) -> NDArray[np.int64]:
        """Return all tokens of one document, its sequences joined, as a copy."""
        first, last = int(self.documents_D1[index]), int(self.documents_D1[index + 1])
        parts = [self.sequence(i) for i in range(first, last)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _check_index(self, idx: Path, tokens: Path, bin_bytes: int) -> None:
        """Check every value of the three arrays, vectorized."""
        lengths = self.lengths_N.astype(np.int64)
        if lengths.size and int(lengths.min()) < 0:
            raise DataError(
                idx,
                "sequence lengths",
                f"sequence {int(lengths.argmin())} has {int(lengths.min())} tokens",
                REBUILD,
            )
        offsets = self._offsets_N.astype(np.int64)  # an aligned copy
        if lengths.size:
            # No overflow: a length is below 2**31, and `offsets` is on its own side.
            room = bin_bytes - lengths * self.dtype.itemsize
            out_of_file = (offsets < 0) | (offsets > room)
            if out_of_file.any():
                bad = int(out_of_file.argmax())
                raise DataError(
                    idx,
                    "sequence offsets",
                    f"sequence {bad} ({int(lengths[bad])} tokens from byte {int(offsets[bad])}) "
                    f"is not inside the {bin_bytes} bytes of {tokens.name}",
                    REBUILD,
                )
            misplaced = offsets % self.dtype.itemsize != 0
            # Every writer appends, so sequences lie in order; an overlap is damage.
            misplaced[1:] |= offsets[1:] - offsets[:-1] < lengths[:-1] * self.dtype.itemsize
            if misplaced.any():
                bad = int(misplaced.argmax())
                raise DataError(
                    idx,
                    "sequence offsets",
                    f"sequence {bad} starts inside another token or sequence (byte {offsets[bad]})",
                    REBUILD,
                )
        documents = self.documents_D1
        if (
            int(documents[0]) != 0
            or int(documents[-1]) != self.num_sequences
            or bool((documents[1:] < documents[:-1]).any())
        ):
            raise DataError(
                idx,
                "document indices",
                f"do not rise from 0 to the number of sequences, {self.num_sequences}",
                REBUILD,
            )

    def _check_cover(self, idx: Path, tokens: Path, bin_bytes: int) -> list[str]:
        """Return a line if bytes of `.bin` belong to no sequence.

        Raises:
            DataError: Sequences lie as if tokens had another size than the header says.
        """
        lengths, offsets = self.lengths_N.astype(np.int64), self._offsets_N.astype(np.int64)
        covered = int(lengths.sum()) * self.dtype.itemsize
        if covered == bin_bytes:
            return []
        for size in (2, 4, 8):
            ends = np.cumsum(lengths) * size
            same = ends.size and int(ends[-1]) == bin_bytes and (offsets[1:] == ends[:-1]).all()
            if size != self.dtype.itemsize and same:
                reason = (
                    f"says {self.dtype}, and the tokens of {tokens.name} take {size} bytes each"
                )
                raise DataError(idx, "dtype code", reason, REBUILD)
        part = f"{bin_bytes - covered} of the {bin_bytes} bytes of {tokens}"
        return [f"{part} belong to no sequence of {idx.name}, and are never read"]


def _parse_header(idx: Path, raw: NDArray[np.uint8]) -> tuple[np.dtype[np.generic], int, int]:
    """Return dtype, number of sequences and number of document indices; check the file's size."""
    if len(raw) < HEADER.size:
        raise DataError(
            idx, "header", f"has {len(raw)} bytes where {HEADER.size} are needed", REBUILD
        )
    magic, version, code, num_sequences, num_indices = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(
            idx,
            "magic",
            f"is {magic!r}, not {MAGIC!r}",
            "Give the path of a Megatron indexed dataset (mmap) without .bin or .idx",
        )
    if version != VERSION:
        raise DataError(
            idx, "version", f"is {version}; only {VERSION} is known", "Convert the dataset"
        )
    dtype = DTYPE_CODES.get(code)
    if dtype is None or dtype.kind == "f":
        raise DataError(
            idx,
            "dtype code",
            f"{code} is " + ("unknown" if dtype is None else f"{dtype}, and tokens are integers"),
            REBUILD,
        )
    if num_indices < 1:
        raise DataError(idx, "document count", "is 0 where the first index must be 0", REBUILD)
    # In Python's integers, before any array is made: an absurd count allocates nothing.
    expected = HEADER.size + 12 * num_sequences + 8 * num_indices
    if len(raw) != expected:
        raise DataError(
            idx,
            "size",
            f"has {len(raw)} bytes where {num_sequences} sequences and {num_indices} document "
            f"indices take {expected}",
            REBUILD,
        )
    return dtype, num_sequences, num_indices


def dataset_path(name: str) -> Path:
    """Return the path of a dataset without suffix, for the name that a user gives it.

    Raises:
        DataError: It is the name of a folder, or of one of a dataset's files.
        RunError: It begins with `~` and the name of no user.
    """
    path = expanded(name)
    with contextlib.suppress(OSError):  # whoever opens the files reports it
        if path.name not in ("", "..") and idx_path(path).exists():
            return path
        if path.is_dir():
            found = sorted(each.stem for each in path.glob("*.idx"))
            hint = f"Give one of those in it: {', '.join(str(path / each) for each in found[:3])}"
            reason = "is a folder, not a dataset's path without .bin and .idx"
            hint = hint if found else "Give the path of a dataset; megafp8 preprocess makes one"
            raise DataError(name, "model.data.data_prefix", reason, hint)
        if path.suffix in (".bin", ".idx") and idx_path(path.with_suffix("")).exists():
            reason = "is one of a dataset's two files"
            raise DataError(
                name, "model.data.data_prefix", reason, f"Give {path.with_suffix('')}, without it"
            )
    if path.name in ("", ".."):
        raise DataError(name, "model.data.data_prefix", "is no path of a dataset", "Give another")
    return path


def require_files(prefix: Path) -> None:
    """Raise a DataError if one of the two files cannot be found; their content is not read."""
    for path in (idx_path(prefix), bin_path(prefix)):
        _file_size(path)


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _map(path: Path, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Return the file's whole items, memory-mapped; an empty file gives an empty array."""
    count = _file_size(path) // dtype.itemsize
    if count == 0:
        return np.empty(0, dtype)
    try:
        # A plain view: indexing `np.memmap` itself makes a Python object with state each time.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or str(error)
    return DataError(
        path,
        "file",
        f"cannot be read ({reason})",
        "model.data.data_prefix is a path without .bin and .idx; both files must be there",
    )
