"""Compute where each window of an epoch starts, and keep such index maps in files.

All processes of a host map the files into memory. An entry of the cache is a folder named by a hash
of everything that its arrays depend on. It appears by one rename, so any number of processes and
hosts may build it at once. On one host a lock lets a single process build while the others wait.
Hosts without a common file system each build their own, equal entry.

Suffixes of names: Q sequences of an epoch, N windows of an epoch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp8_numerics.caches import built_beside, locked, move_away
from megafp8.data.indexed import IndexedDataset
from megafp8.foreign import read_json

# Sequences at a time: their lengths and ends stay in the processor's cache.
_BLOCK = 1 << 14
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)

VERSION = 1
DESCRIPTION = "index.json"
SMALLEST_CACHED = 1 << 18  # fewer numbers are computed faster than they are read
_CHECKED_AT_ONCE = 1 << 24  # bytes
WAITING = "data: another process computes {}; waiting for it"
Arrays = dict[str, NDArray[np.integer]]


@dataclass(frozen=True)
class EpochMap:
    """Hold one epoch's sequences in order, and where its windows start.

    Attributes:
        sequences_Q: The dataset's sequences, one after another.
        first_N: The place in `sequences_Q` of the sequence in which each window starts.
        offset_N: The tokens of that sequence before the window's first token.
        order_N: The window of each of the epoch's samples.
    """

    sequences_Q: NDArray[np.integer]  # noqa: N815 (shape suffix)
    first_N: NDArray[np.integer]  # noqa: N815 (shape suffix)
    offset_N: NDArray[np.integer]  # noqa: N815 (shape suffix)
    order_N: NDArray[np.integer]  # noqa: N815 (shape suffix)


def shuffled(count: int, *key: int) -> NDArray[np.int64]:
    """Return a permutation of `range(count)` that depends on `key` alone.

    It sorts by `random_words`.
    """
    order = random_words(count, *key)
    # All values differ, since SplitMix64 is a bijection: an unstable sort gives the same order.
    return np.argsort(order).astype(np.int64, copy=False)


def random_words(count: int, *key: int) -> NDArray[np.uint64]:
    """Return `count` different random numbers of 64 bits that depend on `key` alone.

    They are SplitMix64 of a counter. NumPy's own generators may change from one version to the
    next, and a resumed run must continue with the same order.
    """
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _splitmix64(state ^ np.uint64(part & 0xFFFF_FFFF_FFFF_FFFF))
    return _splitmix64(state + np.arange(count, dtype=np.uint64) * _GOLDEN)


def sample_index(
    lengths_S: NDArray[np.int32],
    sequences_Q: NDArray[np.integer],
    seq_length: int,
    num_windows: int,
) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
    """Return the place and offset of each window's first token: `first_N`, `offset_N` of
    `EpochMap`.

    Window 0 starts with an end of a document that no sequence holds, so it counts as starting at
    the first token. Window w > 0 starts with the token before the first that it predicts, token `w
    * seq_length - 1` of the epoch.
    """
    first_N = np.empty(num_windows, _smallest_dtype(len(sequences_Q)))
    offset_N = np.empty(num_windows, np.int32)
    # A mapped file's arrays start at odd places, where `take` would copy all of them each time.
    lengths_S = np.require(lengths_S, np.int32, "A")
    lengths_buffer, ends_buffer = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.int64)
    before, done = 0, 0  # tokens and windows of the blocks so far
    for begin in range(0, len(sequences_Q), _BLOCK):
        block = sequences_Q[begin : begin + _BLOCK]
        lengths, ends = lengths_buffer[: len(block)], ends_buffer[: len(block)]
        # All are inside; only with "clip" does NumPy write without a buffer between.
        np.take(lengths_S, block, out=lengths, mode="clip")
        np.cumsum(lengths, dtype=np.int64, out=ends)
        ended = before + int(ends[-1])
        until = min(num_windows, ended // seq_length + 1) if ended else 0  # w * seq - 1 < ended
        starts = np.arange(done * seq_length - 1, until * seq_length - 1, seq_length) - before
        if done == 0:
            starts[:1] = 0
        place = np.searchsorted(ends, starts, side="right")
        np.add(place, begin, out=first_N[done:until], casting="unsafe")
        np.add(starts - ends[place], lengths[place], out=offset_N[done:until], casting="unsafe")
        before, done = ended, until
    assert done == num_windows, f"{done} of {num_windows} windows"
    return first_N, offset_N


def epoch_map(
    dataset: IndexedDataset,
    documents: NDArray[np.integer],
    seq_length: int,
    num_windows: int,
    order: Callable[[], NDArray[np.int64]],
) -> Arrays:
    """Return the arrays of an `EpochMap` over documents in the given order."""
    sequences = sequences_of(dataset, documents)
    sequences = sequences.astype(_smallest_dtype(dataset.num_sequences), copy=False)
    first, offset = sample_index(dataset.lengths_N, sequences, seq_length, num_windows)
    return {
        "sequences_Q": sequences,
        "first_N": first,
        "offset_N": offset,
        "order_N": order().astype(_smallest_dtype(num_windows), copy=False),
    }


def cached_epoch_map(
    cache: IndexCache, key: dict[str, object], size: int, build: Callable[[], Arrays]
) -> EpochMap:
    """Return an epoch's map from the cache, or compute it."""
    return EpochMap(**cache.get("epoch", key, size, build))


def sequences_of(dataset: IndexedDataset, documents: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the sequences of all documents, one document after another."""
    if dataset.has_one_sequence_per_document:
        return documents
    first = dataset.documents_D1[documents]
    counts = dataset.documents_D1[documents + 1] - first
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))


def _smallest_dtype(count: int) -> type[np.signedinteger]:
    return np.int32 if count < 2**31 else np.int64


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the output function of SplitMix64 (Steele, Lea, Flood 2014), a bijection on 64
    bits.
    """
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))


class IndexCache:
    """Compute each entry once per host and keep it in a folder."""

    def __init__(
        self,
        folder: Path | None,
        notify: Callable[[str], None],
        smallest: int = SMALLEST_CACHED,
    ) -> None:
        """Use `folder` for the entries; None keeps nothing."""
        self._folder, self._notify, self._smallest = folder, notify, smallest

    def get(
        self, kind: str, key: Mapping[str, object], size: int, build: Callable[[], Arrays]
    ) -> Arrays:
        """Return the arrays of `key`: read-only, and mapped from files if they are kept.

        Args:
            kind: The beginning of the entry's name.
            key: Everything that the arrays depend on, as JSON values.
            size: The approximate count of numbers; small entries are not kept.
            build: Computes the arrays; called if there is no valid entry.
        """
        if self._folder is None or size < self._smallest:
            return build()
        entry = self._folder / f"{kind}-{_digest(kind, key)}"
        arrays = self._read(entry)
        if arrays is not None:
            return arrays
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            lock = entry.with_name(f"{entry.name}.lock")
            with locked(lock, lambda: self._notify(WAITING.format(entry.name))):
                arrays = self._read(entry)  # another process may have built it meanwhile
                return self._build(entry, kind, key, build) if arrays is None else arrays
        except OSError as error:
            self._notify(
                f"data: index maps are not kept: {self._folder}: {error.strerror or error}; they "
                "are computed at every start unless model.data.index_mapping_dir can be written"
            )
            return build()

    def _build(
        self, entry: Path, kind: str, key: Mapping[str, object], build: Callable[[], Arrays]
    ) -> Arrays:
        """Compute an entry's arrays, write them, and return them mapped from the files."""
        began = time.monotonic()
        arrays = build()
        with built_beside(entry) as folder:  # if another host was faster, its arrays are the same
            described = {}
            for name, array in arrays.items():
                np.save(folder / f"{name}.npy", np.ascontiguousarray(array), allow_pickle=False)
                described[name] = {"bytes": (folder / f"{name}.npy").stat().st_size}
                described[name]["crc32"] = _crc32(folder / f"{name}.npy")
            tree = {"version": VERSION, "key": dict(key), "arrays": described}
            (folder / DESCRIPTION).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        seconds = time.monotonic() - began
        self._notify(f"data: {kind} computed in {seconds:.1f} s and kept: {entry}")
        return self._read(entry) or arrays  # mapped pages are shared by the host's processes

    def _read(self, entry: Path) -> Arrays | None:
        """Return the entry's arrays, or None if there is no complete and valid entry."""
        if not entry.is_dir():
            return None
        try:
            tree = read_json(entry / DESCRIPTION)
            arrays: Arrays = {}
            for name, described in tree["arrays"].items():
                path = entry / f"{name}.npy"
                if path.stat().st_size != described["bytes"] or _crc32(path) != described["crc32"]:
                    raise ValueError(f"{path.name} differs from what was written")
                mapped = np.load(path, mmap_mode="r", allow_pickle=False)
                arrays[name] = np.asarray(mapped)  # indexing `np.memmap` itself is slow
            return arrays
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
            self._notify(f"data: {entry} is damaged and is computed again: {error}")
            with contextlib.suppress(OSError):
                move_away(entry)
            return None


def _digest(kind: str, key: Mapping[str, object]) -> str:
    text = json.dumps([VERSION, kind, dict(key)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_CHECKED_AT_ONCE):
            crc = zlib.crc32(block, crc)
    return crc
