"""Write what ranks tell each other as JSON, and read it again.

Ranks find each other in a store that everybody in the same network can reach. A pickled object from
there could run code; a text cannot. What is read is made of plain values, of dataclasses and
enumerations of megafp8, and of errors that a user can cause.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from megafp8.errors import RunError, UserError

_OF = "of"  # the key that says of which kind a JSON object is
_PACKAGE = "megafp8."


def to_bytes(value: Any) -> bytes:
    """Return a value as bytes that `from_bytes` reads.

    Raises:
        TypeError: The value has a part of another kind than this file knows.
    """
    return json.dumps(_written(value, strict=True)).encode()


def from_bytes(content: bytes) -> Any:
    """Return the value that `to_bytes` has written.

    Raises:
        RunError: The content is no such message.
    """
    try:
        return _read(json.loads(content))
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RecursionError) as error:
        raise RunError(
            f"a message of another rank cannot be read ({type(error).__name__}). Another program "
            "may have written to this job's store: see docs/guide/slurm.md about shared networks"
        ) from error


def _written(value: Any, *, strict: bool) -> Any:
    """Return a value as JSON can hold it; without `strict`, other kinds become their text."""
    if isinstance(value, Enum):
        return {_OF: "enum", "class": _name(type(value)), "name": value.name}
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [_written(item, strict=strict) for item in value]
    if isinstance(value, Path):
        return {_OF: "path", "text": str(value)}
    if isinstance(value, tuple):
        items = [_written(item, strict=strict) for item in value]
        kind = _name(type(value)) if hasattr(value, "_fields") else None
        return {_OF: "tuple", "items": items, "class": kind}
    if isinstance(value, set | frozenset):
        return {_OF: "set", "items": [_written(item, strict=strict) for item in sorted(value)]}
    if isinstance(value, Mapping):
        pairs = [[_written(part, strict=strict) for part in pair] for pair in value.items()]
        return {_OF: "dict", "items": pairs}
    if isinstance(value, UserError):
        return {
            _OF: "error",
            "class": _name(type(value)),
            "args": _written(list(value.args), strict=False),
            "state": _written(value.__dict__, strict=False),
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shared = value.shared() if hasattr(value, "shared") else value
        fields = {f.name: getattr(shared, f.name) for f in dataclasses.fields(shared)}
        return {_OF: "dataclass", "class": _name(type(shared)), **_items(fields, strict)}
    if strict:
        raise TypeError(f"ranks exchange no {type(value).__name__}")
    return str(value)


def _items(fields: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    return {"items": {name: _written(item, strict=strict) for name, item in fields.items()}}


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str, is_known: Callable[[type], bool]) -> Any:
    """Return the class of a message, which is one of megafp8's own."""
    module, _, path = name.partition(":")
    if not module.startswith(_PACKAGE):
        raise ValueError("no class of megafp8")
    target: Any = importlib.import_module(module)
    for part in path.split("."):
        target = vars(target)[part]
    if not isinstance(target, type) or target.__module__ != module or not is_known(target):
        raise ValueError("no class of a message")
    return target


def _read(tree: Any) -> Any:
    """Return the object that a tree of JSON values stands for."""
    if isinstance(tree, list):
        return [_read(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree[_OF]:
        case "path":
            return Path(tree["text"])
        case "tuple":
            items = [_read(item) for item in tree["items"]]
            if tree["class"] is None:
                return tuple(items)
            return _class(tree["class"], lambda kind: hasattr(kind, "_fields"))._make(items)
        case "set":
            return frozenset(_read(item) for item in tree["items"])
        case "dict":
            return {_read(key): _read(item) for key, item in tree["items"]}
        case "enum":
            return _class(tree["class"], lambda kind: issubclass(kind, Enum))[tree["name"]]
        case "error":
            kind = _class(tree["class"], lambda kind: issubclass(kind, UserError))
            error = kind.__new__(kind, *_read(tree["args"]))
            error.__dict__.update(_read(tree["state"]))
            return error
        case "dataclass":
            message = object.__new__(_class(tree["class"], dataclasses.is_dataclass))
            for name, item in tree["items"].items():
                object.__setattr__(message, name, _read(item))
            return message
    raise ValueError("an unknown kind of message")
