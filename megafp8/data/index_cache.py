"""Keep arrays that take long to compute in files that all processes of a host map into memory.

An entry is a folder named by a hash of everything that its arrays depend on. It appears by one
rename, so any number of processes and hosts may build it at once. On one host a lock lets a single
process build while the others wait. Hosts without a common file system each build their own, equal
entry.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VERSION = 1
DESCRIPTION = "index.json"
SMALLEST_CACHED = 1 << 18  # fewer numbers are computed faster than they are read
STALE_SECONDS = 24 * 3600.0  # an older temporary folder is from a killed process
_CHECKED_AT_ONCE = 1 << 24  # bytes

Arrays = dict[str, NDArray[np.integer]]


class IndexCache:
    """Computes each entry once per host and keeps it in a folder."""

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
            with self._lock(entry):
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
        began = time.monotonic()
        arrays = build()
        _remove_stale(entry)
        folder = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
        try:
            described = {}
            for name, array in arrays.items():
                np.save(folder / f"{name}.npy", np.ascontiguousarray(array), allow_pickle=False)
                described[name] = {"bytes": (folder / f"{name}.npy").stat().st_size}
                described[name]["crc32"] = _crc32(folder / f"{name}.npy")
            tree = {"version": VERSION, "key": dict(key), "arrays": described}
            (folder / DESCRIPTION).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
            folder.chmod(0o755)  # mkdtemp's is private, and a cache may be shared
            try:
                os.rename(folder, entry)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise  # another host was faster: its arrays are the same
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        seconds = time.monotonic() - began
        self._notify(f"data: {kind} computed in {seconds:.1f} s and kept: {entry}")
        return self._read(entry) or arrays

    def _read(self, entry: Path) -> Arrays | None:
        """Return the entry's arrays, or None if there is no complete and valid entry."""
        if not entry.is_dir():
            return None
        try:
            tree = json.loads((entry / DESCRIPTION).read_text(encoding="utf-8"))
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
            away = entry.with_name(f"{entry.name}.tmp-damaged-{os.getpid()}-{time.time_ns()}")
            with contextlib.suppress(OSError):
                os.rename(entry, away)
                shutil.rmtree(away, ignore_errors=True)
            return None

    @contextlib.contextmanager
    def _lock(self, entry: Path) -> Iterator[None]:
        """Let one process per host build; a file system without locks lets several build the
        same.
        """
        entry.parent.mkdir(parents=True, exist_ok=True)
        path = entry.with_name(f"{entry.name}.lock")
        with open(path, "a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._notify(f"data: another process computes {entry.name}; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                pass  # no locks there
            yield


def _digest(kind: str, key: Mapping[str, object]) -> str:
    text = json.dumps([VERSION, kind, dict(key)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_CHECKED_AT_ONCE):
            crc = zlib.crc32(block, crc)
    return crc


def _remove_stale(entry: Path) -> None:
    for path in entry.parent.glob(f"{entry.name}.tmp-*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
