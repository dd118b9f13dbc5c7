"""Read the table of NeMo's keys that have no effect in megafp8 and need no code: nemo_inert.yaml.

Each entry of the table lists `keys` of one kind. `accepts` are the values that are accepted, of
which the first is NeMo's default; `free` names a type whose values are accepted besides; `same_as`
is a key that has an effect, whose value is accepted too. `note` says what megafp8 does, `why` why
another value is refused, and `hint` what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("nemo_inert.yaml")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Hold what the table says of some keys; the module explains the fields."""

    keys: list[str]
    accepts: list[Any]
    note: str
    free: str | None = None
    same_as: str | None = None
    why: str = ""
    hint: str = ""


@cache
def entries() -> tuple[Entry, ...]:
    """Return the entries of the table."""
    return tuple(Entry(**entry) for entry in yaml.safe_load(TABLE.read_text(encoding="utf-8")))


def rows() -> Iterator[tuple[str, Entry]]:
    """Yield each key with its entry, in the order of the table."""
    yield from ((key, entry) for entry in entries() for key in entry.keys)
