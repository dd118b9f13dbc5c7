"""How one key is described: its help, NeMo's default, its valid values, and what it belongs to.

A schema field is made by `key(...)`; `keys_of` reads the descriptions back, one `Key` a leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from omegaconf import MISSING

Kind = Literal["model", "data", "optim", "length", "logging", "layout", "policy"]

NOT_IN_NEMO = object()
"""NeMo's `megatron_gpt_config.yaml` has no such key."""

_LARGEST = 2**53  # beyond it a float no longer counts in ones

FREE_KINDS: frozenset[Kind] = frozenset({"length", "logging", "layout", "policy"})
"""Keys of these kinds may differ when a run continues; those of the others may not."""


@dataclass(frozen=True)
class Valid:
    """Which values a key takes beyond its type."""

    text: str
    accepts: Callable[[Any], bool]
    later: Container[object] = ()  # known values that this version does not support
    suggestion: str = ""  # what to write instead of one of `later`


@dataclass(frozen=True)
class Key:
    """One leaf of the tree of settings."""

    path: str
    type_text: str
    default: Any
    help: str
    nemo: Any
    kind: Kind
    valid: Valid | None

    @property
    def required(self) -> bool:
        return bool(self.default == MISSING)

    @property
    def valid_text(self) -> str:
        """What to give, in words: `a whole number, at least 1`."""
        if self.valid is None:
            return self.type_text
        bounded = self.valid.text.startswith(("at least", "above", "from"))
        type_text = self.type_text.removesuffix(", or null")
        return f"{type_text}, {self.valid.text}" if bounded else self.valid.text


def key(
    default: Any, help: str, *, nemo: Any = NOT_IN_NEMO, kind: Kind, valid: Valid | None = None
) -> Any:
    """A dataclass field that knows its documentation. A list becomes a default of its own."""
    metadata = {"help": help, "nemo": nemo, "kind": kind, "valid": valid}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def keys_of(section: type[Any], prefix: str = "") -> dict[str, Key]:
    """All leaves below a schema dataclass by dotted path, in the order they are written."""
    found: dict[str, Key] = {}
    hints = get_type_hints(section)
    for item in dataclasses.fields(section):
        path, hint = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found |= keys_of(hint, path + ".")
            continue
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        found[path] = Key(path, _type_text(hint), default, **item.metadata)
    return found


def at_least(low: float) -> Valid:
    return Valid(f"at least {low}", lambda v: low <= v <= _LARGEST)


def above(low: float) -> Valid:
    return Valid(f"above {low}", lambda v: low < v <= _LARGEST)


def between(low: float, high: float) -> Valid:
    return Valid(f"from {low} to {high}", lambda v: low <= v <= high)


def from_to_below(low: float, high: float) -> Valid:
    return Valid(f"from {low} to below {high}", lambda v: low <= v < high)


def one_of(*values: object, later: Container[object] = (), suggestion: str = "") -> Valid:
    text = ", ".join(dict.fromkeys(str(value) for value in values))
    text = " or ".join(text.rsplit(", ", 1))
    return Valid(text, lambda v: v in values and not isinstance(v, bool), later, suggestion)


def or_null(valid: Valid) -> Valid:
    return Valid(
        f"{valid.text}, or null",
        lambda v: v is None or valid.accepts(v),
        valid.later,
        valid.suggestion,
    )


def _type_text(hint: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "True or False",
        list[float]: "a list of numbers",
        list[bool]: "a list of True and False",
        list[str]: "a list of texts",
        list[int]: "a list of whole numbers",
        type(None): "null",
    }
    if hint in names:
        return names[hint]
    parts = getattr(hint, "__args__", ())
    texts = [names[part] for part in parts if part in names]
    return ", or ".join(texts) if texts else "a value"
