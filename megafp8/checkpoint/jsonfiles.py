"""Small JSON files that survive a kill, and logs of JSON lines that are cut back to a step."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megafp8.checkpoint.disk import fsync_directory
from megafp8.errors import RunError


def write_json_atomically(path: Path, obj: object) -> None:
    """Readers see the old content or the new one, never part of it. Raises `RunError`."""
    content = json.dumps(obj, indent=1, sort_keys=True) + "\n"
    with _replacing(path) as file:
        file.write(content.encode())


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`; raises `RunError` where it is missing, damaged or no object."""
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}). Was the run moved?") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: not JSON ({error}). Restore it or start a new run") from error
    if not isinstance(tree, dict):
        raise RunError(f"{path}: not a JSON object. Restore it or start a new run")
    return tree


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and vanishes if not."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{path}: cannot be written ({reason}). Free space or move it") from error
    finally:
        draft.unlink(missing_ok=True)
