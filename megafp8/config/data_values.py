"""Read the values of keys that name data: datasets with weights, files of examples."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation

from megafp8.specs.data import SeparateSplits, Weighted

PREFIX_TEXT = (
    "builtin, mock, a path, a list [weight, path, weight, path, ...] of weights above 0, or a dict "
    "{train: [...], validation: [...], test: [...]} of such lists"
)

DataPrefix = str | tuple[Weighted, ...] | SeparateSplits


def parse_data_prefix(value: object) -> DataPrefix | None:
    """Return the datasets that a value names; None if it has none of the three forms."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, Mapping):
        return _separate(value)
    blend = _blend(value)
    if blend is not None and len(blend) == 1:
        return blend[0].prefix
    return blend


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


def _separate(value: Mapping[object, object]) -> SeparateSplits | None:
    if not {"train", "validation"} <= value.keys() or value.keys() - {
        "train",
        "validation",
        "test",
    }:
        return None
    blends = {name: _one_or_blend(value.get(name)) for name in ("train", "validation", "test")}
    train, validation, test = (blends[name] for name in ("train", "validation", "test"))
    if train is None or validation is None or (test is None and value.get("test")):
        return None
    return SeparateSplits(train=train, validation=validation, test=test or ())


def _one_or_blend(value: object) -> tuple[Weighted, ...] | None:
    if isinstance(value, str):
        return (Weighted("1", value),) if value else None
    return _blend(value)


def _blend(value: object) -> tuple[Weighted, ...] | None:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return None
    if len(value) == 1 and isinstance(value[0], str) and value[0]:
        return (Weighted("1", value[0]),)
    if len(value) % 2:
        return None
    pairs = [(_weight(value[i]), value[i + 1]) for i in range(0, len(value), 2)]
    valid = [Weighted(w, p) for w, p in pairs if w is not None and isinstance(p, str) and p]
    return tuple(valid) if len(valid) == len(pairs) else None


def _weight(value: object) -> str | None:
    """Return a weight as a decimal in its shortest spelling; None if it is no number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    if not number.is_finite() or number <= 0 or not math.isfinite(float(number)):
        return None
    # Exact arithmetic with larger exponents would be slow, and no blend needs them.
    return format(number.normalize(), "f") if abs(number.adjusted()) <= 30 else None


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
