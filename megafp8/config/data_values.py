"""Read the values of keys that name data: datasets with weights, files of examples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation

from megafp8.specs.data import SeparateSplits, Weighted

PREFIX_TEXT = (
    "builtin, mock, a path, a list [weight, path, weight, path, ...] of weights above 0, or a dict "
    "{train: [...], validation: [...], test: [...]} of such lists"
)
_SPLITS = ("train", "validation", "test")
_MOST_DIGITS = 30  # before or behind the point of a weight: exact arithmetic with more is slow

DataPrefix = str | tuple[Weighted, ...] | SeparateSplits


def parse_data_prefix(value: object) -> DataPrefix | None:
    """Return the datasets that a value names; None if it has none of the three forms."""
    try:
        return _parsed(value)
    except ValueError:
        return None


def data_prefix_problem(value: object) -> str | None:
    """Return what is wrong with a value that names data, or None."""
    try:
        _parsed(value)
    except ValueError as error:
        return f"{error}; it must be {PREFIX_TEXT}"
    return None


def _parsed(value: object) -> DataPrefix:
    """Return the datasets that a value names; `ValueError` says what is wrong with it."""
    if isinstance(value, Mapping):
        return _separate(value)
    blend = _blend(value)
    return blend[0].prefix if len(blend) == 1 else blend


def plain_data_prefix(value: object) -> object:
    """Return a value in one spelling, so that equal runs have equal settings."""
    parsed = parse_data_prefix(value)
    if isinstance(parsed, SeparateSplits):
        parts = {"train": parsed.train, "validation": parsed.validation, "test": parsed.test}
        return {name: _plain(blend) for name, blend in parts.items() if blend}
    return _plain(parsed) if isinstance(parsed, tuple) else parsed


def prefixes_in(value: object) -> tuple[str, ...]:
    """Return all paths that a value names."""
    parsed = parse_data_prefix(value)
    if isinstance(parsed, SeparateSplits):
        together = (*parsed.train, *parsed.validation, *parsed.test)
        return tuple(weighted.prefix for weighted in together)
    if isinstance(parsed, tuple):
        return tuple(weighted.prefix for weighted in parsed)
    return () if parsed is None else (parsed,)


def _separate(value: Mapping[object, object]) -> SeparateSplits:
    unknown = [str(name) for name in value if name not in _SPLITS]
    if unknown or "train" not in value:
        reason = f"has the unknown split {unknown[0]}" if unknown else "names no data to train on"
        raise ValueError(f"{reason} (the splits are {', '.join(_SPLITS)})")
    blends = {}
    for name, listed in value.items():
        if name == "train" or (listed is not None and listed != []):
            try:
                blends[str(name)] = _blend(listed)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    return SeparateSplits(**{"validation": (), **blends})


def _blend(value: object) -> tuple[Weighted, ...]:
    if isinstance(value, Sequence) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]  # a path, or a whole blend in one text
    if isinstance(value, str):
        words = value.split()
        listed = words if words[1:] and _number(words[0]) is not None else [1, value]
    elif isinstance(value, Sequence):
        listed = list(value)
    else:
        raise ValueError(f"is of type {type(value).__name__}")
    if not listed:
        raise ValueError("names no dataset")
    if all(isinstance(item, str) and item and _number(item) is None for item in listed):
        raise ValueError(f"has no weights: write [{', '.join(f'1, {path}' for path in listed)}]")
    if len(listed) % 2:
        raise ValueError(f"has {len(listed)} elements, which are no pairs of a weight and a path")
    pairs = zip(listed[::2], listed[1::2], strict=True)
    return tuple(Weighted(_weight(weight, path), _path(path, weight)) for weight, path in pairs)


def _path(path: object, weight: object) -> str:
    if not isinstance(path, str):
        raise ValueError(f"has {path} where the path of the weight {weight} belongs")
    if not path.strip() or "\0" in path:
        raise ValueError("has a path with a NUL" if "\0" in path else "has an empty path")
    return path


def _number(value: object) -> Decimal | None:
    """Return a number, or a text that is one; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return Decimal(str(value))
    except InvalidOperation:
        return None


def _weight(value: object, path: object) -> str:
    """Return a weight as a decimal in its shortest spelling."""
    number = _number(value)
    if number is None:
        raise ValueError(f"has {value} where the weight of {path} belongs")
    if number == 0:
        raise ValueError(f"gives {path} the weight 0, so that it would never be read: leave it out")
    if not number.is_finite() or number < 0 or abs(number.adjusted()) > _MOST_DIGITS:
        raise ValueError(
            f"gives {path} the weight {value}, not a finite number of usual size above 0"
        )
    return format(number.normalize(), "f")


def _plain(blend: Sequence[Weighted]) -> list[object]:
    if len(blend) == 1:
        return [blend[0].prefix]
    return [item for w in blend for item in (float(w.weight), w.prefix)]


def file_list(value: object) -> tuple[str, ...] | None:
    """Return the files that a value names; None if it is neither a text nor a list of texts."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names:
        return None
    good = all(isinstance(name, str) and name for name in names)
    return tuple(names) if good else None


def spell_files(value: object) -> object:
    """Return a value of file names in one spelling: a list, or null."""
    names = file_list(value)
    return value if names is None else list(names)


def unescaped(template: str) -> str:
    """Return a template with a new line for `\\n` and a tab for `\\t`, as NeMo reads it.

    A shell and Hydra leave these pairs of characters as they are. `\\\\` stands for a backslash;
    one before any other character stays.
    """
    meant = {"n": "\n", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nt\\])", lambda match: meant[match[1]], template)
