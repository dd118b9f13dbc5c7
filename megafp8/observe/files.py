"""Strict JSON, and files that are whole or not there."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

Warn = Callable[[str], None]


def warn_on_stderr(message: str) -> None:
    """The default `Warn`: for callers that have no console."""
    import sys

    print(f"warning: {message}", file=sys.stderr, flush=True)


def strict(value: object) -> object:
    """`value` made of what strict JSON knows: NaN and infinities become strings.

    Python's own `json` writes them as bare words that no other parser takes. Finite floats stay
    floats, and `json` writes those so that they read back bit for bit. Anything with `item()` (a
    NumPy or torch scalar) becomes its Python number, paths and others become text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    item = getattr(value, "item", None)
    return strict(item()) if callable(item) else str(value)


def to_json(value: object, *, indent: int | None = None) -> str:
    """Strict JSON. Without `indent` it is one ASCII line, whatever newlines the text may hold."""
    return json.dumps(strict(value), indent=indent, allow_nan=False, ensure_ascii=indent is None)


def write_atomically(path: str | Path, text: str) -> None:
    """Write `path` so that a reader, or a crash at any instant, finds the old file or the new one.

    Raises:
        OSError: The disk is full, the directory missing, …; the old file is then untouched.
    """
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's 0600 is for secrets: give what an ordinary open() would have given.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself must survive a power cut
    finally:
        os.close(directory)
