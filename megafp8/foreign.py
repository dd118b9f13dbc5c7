"""Read files that others wrote: one door for JSON, one for YAML, one for the files of a folder.

A file may be damaged, or may have been made to do harm. So each door limits the size and the depth
of what it reads, opens regular files only, and raises `ForeignFileError` for all that it does not
accept. That is a `ValueError`. The caller names the file and gives the hint. `Fields` checks types
and ranges of single values.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, ClassVar, NoReturn

MIB = 1 << 20
MAX_JSON_BYTES = 256 * MIB  # a manifest lists each tensor of each rank
MAX_LINES_BYTES = 1024 * MIB  # a log of a long run
MAX_YAML_BYTES = 4 * MIB
MAX_DEPTH = 64
MAX_YAML_NODES = 200_000  # after each alias is replaced by what it stands for
MAX_DIGITS = 40  # of a whole number; one of 128 bits has 39
MAX_NUMBER_LETTERS = 400  # of a number in a YAML file, in whatever base
_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FxXoO_:.+-]*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("binary", "omap", "pairs", "set", "timestamp")}
"""YAML's tags of values that are neither text, number, list nor mapping."""
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a folder"),
)

_MISSING: Any = object()


class ForeignFileError(ValueError):
    """Report why the content of a file is not accepted; the text does not name the file."""


# --- files and folders ----------------------------------------------------------------------------


def read_bytes(path: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a regular file; a FIFO or a device is never waited for.

    Raises:
        OSError: The file is missing or cannot be read.
        ForeignFileError: It is no regular file, or has more than `most` bytes.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        check_regular(found)
        if found.st_size > most:
            raise ForeignFileError(f"it has {found.st_size} bytes; at most {most} are read")
        content = file.read(most + 1)
    if len(content) > most:
        raise ForeignFileError(f"it has more than {most} bytes")
    return content


def without_mark(text: str) -> str:
    """Return a text without the mark of byte order with which some editors begin a file."""
    return text.removeprefix("\ufeff")


def check_regular(found: os.stat_result) -> None:
    """Raise `ForeignFileError` if a file's status is not that of a regular file."""
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(found.st_mode)), "a special file")
        raise ForeignFileError(f"it is {kind}, not a regular file")


def member(folder: Path, name: str) -> Path | None:
    """Return the path of a file in a folder that a user downloaded; None if there is no such file.

    A link may lead to a file in the same folder. In Hugging Face's cache the files of
    `models--NAME/snapshots/REVISION` are links to `models--NAME/blobs`, which are followed, too.

    Raises:
        ForeignFileError: It is a link to another place, or no regular file.
    """
    path = folder / name
    try:
        if not path.is_symlink() and not path.exists():
            return None
        home, target = folder.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links, until Python 3.12
        raise ForeignFileError(f"{name} is a link that leads to no file ({error})") from error
    if home not in target.parents and not _is_blob(home, target):
        raise ForeignFileError(f"{name} is a link to {target}, outside of the folder")
    try:
        check_regular(target.stat())
    except ForeignFileError as error:
        raise ForeignFileError(f"{name}: {error}") from error
    return path


def check_members(folder: Path) -> None:
    """Check every file in a folder as `member` does, for a library that reads the folder itself.

    Raises:
        ForeignFileError: A file is a link to another place, or no regular file.
    """
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_dir():
            member(folder, path.name)


def _is_blob(home: Path, target: Path) -> bool:
    """Whether `target` is in the `blobs` that belong to a snapshot of Hugging Face's cache."""
    return home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"


# --- JSON -----------------------------------------------------------------------------------------


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: The file is missing or cannot be read.
        ForeignFileError: It is no regular file, too large, or not accepted by `parse_json`.
    """
    return parse_json(read_bytes(path, most))


def read_object(path: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file; errors are those of `read_json`."""
    tree = read_json(path, most)
    if not isinstance(tree, dict):
        raise ForeignFileError("it is not a JSON object")
    return tree


def parse_json(content: bytes | str) -> Any:
    """Return what a JSON text holds.

    Raises:
        ForeignFileError: It is no JSON, nested deeper than `MAX_DEPTH`, or holds a whole number of
            more than `MAX_DIGITS` digits or half of a pair of surrogates, which is no text.
    """
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    try:
        tree = json.loads(without_mark(raw.decode("utf-8")), parse_int=_whole)
        _check_depth(tree)
        if _SURROGATE.search(raw):  # the parser joins two escaped halves, and keeps one alone
            json.dumps(tree, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ForeignFileError(f"it is nested deeper than {MAX_DEPTH} levels") from error
    except UnicodeEncodeError as error:
        raise ForeignFileError("it holds half of a pair of surrogates, which is no text") from error
    except ForeignFileError:
        raise
    except ValueError as error:
        raise ForeignFileError(f"it is not JSON ({error})") from error
    return tree


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ForeignFileError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def _check_depth(tree: object) -> None:
    level = [tree]
    for _ in range(MAX_DEPTH):
        level = [item for each in level for item in _containers_in(each)]
        if not level:
            return
    raise ForeignFileError(f"it is nested deeper than {MAX_DEPTH} levels")


def _containers_in(node: object) -> list[Any]:
    items = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [item for item in items if isinstance(item, dict | list)]


# --- YAML -----------------------------------------------------------------------------------------


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        OSError: The file is missing or cannot be read.
        ForeignFileError: It is no regular file, too large, or not accepted by `parse_yaml`.
    """
    return parse_yaml(read_yaml_text(path))


def read_yaml_text(path: Path) -> str:
    """Return the text of a YAML file that `check_yaml` accepts; errors are those of `read_yaml`."""
    try:
        text = without_mark(read_bytes(path, MAX_YAML_BYTES).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ForeignFileError(f"it is not UTF-8 text ({error.reason})") from error
    check_yaml(text)
    return text


def parse_yaml(text: str, *, as_texts: bool = False) -> Any:
    """Return what a YAML text holds; tags that name Python's objects are refused.

    With `as_texts`, numbers, dates, True and False are the texts that stand for them.

    Raises:
        ForeignFileError: It is no YAML, or not accepted by `check_yaml`.
    """
    import yaml

    check_yaml(text)
    try:
        return yaml.load(text, Loader=_texts_loader() if as_texts else yaml.SafeLoader)
    except RecursionError as error:  # libyaml stops above 1,000 levels, before it says how many
        raise ForeignFileError(f"it is nested deeper than {MAX_DEPTH} levels") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        line = " ".join(str(error).split())[:200] or type(error).__name__
        raise ForeignFileError(f"it is not YAML ({line})") from error


@cache
def _texts_loader() -> Any:
    """Return a safe loader that reads each value without a tag as a text, or as null."""
    import yaml

    kept = {f"tag:yaml.org,2002:{name}" for name in ("null", "merge")}

    class Texts(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
        yaml_implicit_resolvers: ClassVar[Any] = {
            first: [one for one in resolvers if one[0] in kept]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    return Texts


def check_yaml(text: str) -> None:
    """Check what a YAML text becomes when its aliases are replaced, before a parser builds it.

    A syntax error, or a character that UTF-8 cannot encode, is left to the parser, whose message
    has the line.

    Raises:
        ForeignFileError: The text is nested too deep, an alias is inside of what it stands for, the
            aliases stand for too much, or a number has too many digits.
    """
    import yaml

    if _SURROGATE.search(text.encode("utf-8", "surrogatepass")):
        raise ForeignFileError("it holds half of a pair of surrogates, which is no text")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with suppress(yaml.YAMLError, UnicodeEncodeError):
        _check_events(yaml.parse(text, Loader=loader))


def _check_events(events: Iterator[Any]) -> None:
    """Raise `ForeignFileError` for refused tags, too much depth, or size once aliases count."""
    import yaml

    total, began, sizes = 0, list[tuple[str | None, int]](), dict[str, int]()
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = began.pop()
            if anchor is not None:
                sizes[anchor] = total - before
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in began):
                raise ForeignFileError(f"the alias *{event.anchor} is inside of what it stands for")
            total += sizes.get(event.anchor, 0)
        elif event.tag in _TAGS:
            raise ForeignFileError(f"it has a value with the tag !!{event.tag.rpartition(':')[2]}")
        total += 1
        if total > MAX_YAML_NODES:
            raise ForeignFileError(f"with its aliases it stands for over {MAX_YAML_NODES} values")
        if isinstance(event, yaml.CollectionStartEvent):
            began.append((event.anchor, total))
            if len(began) > MAX_DEPTH:
                raise ForeignFileError(f"it is nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.ScalarEvent):
            _check_scalar(event.value)


def _check_scalar(text: str) -> None:
    if len(text) > MAX_NUMBER_LETTERS and _NUMBER.fullmatch(text):
        raise ForeignFileError(f"it holds a number of {len(text)} digits ({text[:20]}…)")


# --- single values --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fields:
    """Hold a JSON object whose values are checked one by one.

    Each method returns the value of a key. Without a default the key must be there. An error names
    the key, the value and what belongs there.
    """

    tree: Mapping[str, Any]

    def whole(self, key: str, low: int, high: int, default: Any = _MISSING) -> Any:
        """Return a whole number from `low` to `high`."""
        value = self._given(key, default)
        if value is default:
            return value
        if type(value) is not int or not low <= value <= high:
            self._refuse(key, value, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: Any = _MISSING, **bounds: float) -> Any:
        """Return a finite number; `bounds` are some of `at_least`, `above`, `below`, `at_most`."""
        value = self._given(key, default)
        if value is default:
            return value
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or not _within(value, bounds):
            words = " and ".join(f"{name.replace('_', ' ')} {x:g}" for name, x in bounds.items())
            self._refuse(key, value, f"a finite number {words}".rstrip())
        return float(value)

    def flag(self, key: str, default: Any = _MISSING) -> Any:
        """Return true or false."""
        value = self._given(key, default)
        if value is not default and not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value

    def text(self, key: str, default: Any = _MISSING) -> Any:
        """Return a text."""
        value = self._given(key, default)
        if value is not default and not isinstance(value, str):
            self._refuse(key, value, "a text")
        return value

    def section(self, key: str) -> Fields:
        """Return the object of a key, which is empty if the key is missing or null."""
        value = self.tree.get(key)
        if value is not None and not isinstance(value, dict):
            self._refuse(key, value, "an object")
        return Fields(value or {})

    def _given(self, key: str, default: Any) -> Any:
        value = self.tree.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise ForeignFileError(f"{key} is null" if key in self.tree else f"{key} is missing")
        return default

    def _refuse(self, key: str, value: object, wanted: str) -> NoReturn:
        raise ForeignFileError(f"{key} is {shown_value(value)}, not {wanted}")


def _within(value: float, bounds: Mapping[str, float]) -> bool:
    holds = {"at_least": ge, "above": gt, "below": lt, "at_most": le}
    return all(holds[name](value, bound) for name, bound in bounds.items())


def shown_value(value: object) -> str:
    """Return a value of a foreign file for a message: as JSON, shortened, in printable letters."""
    text = ""
    try:
        for piece in json.JSONEncoder().iterencode(value):  # of a long value only its beginning
            text += piece
            if len(text) > 60:
                break
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value).__name__)
    return text if len(text) <= 60 else text[:57] + "..."
