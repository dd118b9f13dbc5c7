"""Describe the keys of the configuration: help, default, valid values, and what each key needs.

A field of the schema is made by `key(...)`; `keys_of` returns the descriptions, one `Key` for each
field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from omegaconf import MISSING

from megafp8.config.groups import GROUPS, Kind

Values = Mapping[str, Any]
"""Settings by their dotted paths."""

NOT_IN_NEMO = object()
"""Marks a key that NeMo's `megatron_gpt_config.yaml` does not have."""

LARGEST = 2**53  # a float cannot hold every whole number above

# The largest sizes that are accepted. They are far above those of any model; what is larger could
# only be a mistake, and rules, plans and tables that go through all layers or heads would not end.
MAX_LAYERS = 10_000
MAX_HEADS = 2**16
MAX_EXPERTS = 2**12
MAX_WIDTH = 2**22
MAX_POSITIONS = 2**27
MAX_VOCABULARY = 2**24
MAX_BATCH = 2**24
MAX_RANKS = 2**20
MAX_STAGES = 1024

FREE_KINDS: frozenset[Kind] = frozenset({"length", "logging", "layout", "policy"})
"""Keys of these kinds may differ when a run continues; those of the others may not."""


@dataclass(frozen=True)
class Valid:
    """Say which values of its type a key accepts.

    Attributes:
        text: The condition in words, as `at least 1`.
        accepts: Whether a value of the right type is valid.
        later: Values that NeMo has and this version does not support.
        suggestion: The hint for one of `later`.
        why: Returns why a value is not valid, in place of `text`.
        values: All that are accepted besides null, if they are few.
    """

    text: str
    accepts: Callable[[Any], bool]
    later: Container[object] = ()
    suggestion: str = ""
    why: Callable[[Any], str | None] = lambda _: None
    values: tuple[object, ...] = ()


PATH = Valid("a path", bool)
BELOW_ONE = Valid("from 0 to below 1", lambda value: 0 <= value < 1)


@dataclass(frozen=True)
class Need:
    """Say which setting a key depends on; while `holds` returns False, the key has no effect.

    `others` are further keys, each of which can meet the need as well as `key` can.
    """

    key: str
    text: str  # what to set for the key to have an effect, as `model.fp8=True`
    holds: Callable[[Values], bool]
    own_hint: str = ""  # replaces "Set …, or leave it out"
    also: Need | None = None  # a second setting that the key depends on
    others: tuple[str, ...] = ()

    @property
    def hint(self) -> str:
        """Return what to do where a key is set and has no effect."""
        return self.own_hint or f"Set {self.text}, or leave it out"


@dataclass(frozen=True)
class Key:
    """Describe one key: a leaf of the tree of settings. `key` explains the attributes."""

    path: str
    type_text: str
    default: Any
    help: str
    nemo: Any
    group: str
    kind: Kind
    valid: Valid | None
    needs: Need | None = None
    spelling: Callable[[Any], Any] | None = None
    never_idle: bool = False
    defines_function: bool = False
    spec: str | None = None

    def spelled(self, value: Any) -> Any:
        """Return `value` as a run's resolved settings write it: one spelling for each meaning."""
        return value if self.spelling is None else self.spelling(value)

    def is_default(self, value: Any) -> bool:
        """Whether `value` means the same as the default."""
        return not self.required and bool(self.spelled(value) == self.spelled(self.default))

    @property
    def required(self) -> bool:
        """Whether the key has no default, so that a YAML or the user must give it."""
        return bool(self.default == MISSING)

    @property
    def valid_text(self) -> str:
        """Return the type and the valid values in words: `a whole number, at least 1`."""
        if self.valid is None:
            return self.type_text
        bounded = self.valid.text.startswith(("at least", "above", "from"))
        type_text = self.type_text.removesuffix(", or null")
        return f"{type_text}, {self.valid.text}" if bounded else self.valid.text


def key(
    default: Any,
    help: str,
    *,
    nemo: Any = NOT_IN_NEMO,
    group: str,
    kind: Kind | None = None,
    valid: Valid | None = None,
    needs: Need | None = None,
    spelling: Callable[[Any], Any] | None = None,
    never_idle: bool = False,
    defines_function: bool = False,
    spec: str | None = None,
) -> Any:
    """Return a dataclass field with a key's description. Each tree gets its own copy of a list.

    Args:
        default: The default, in the type of the field.
        help: What the key means, for `--help` and docs/reference/configuration.md.
        nemo: The default in NeMo's `megatron_gpt_config.yaml`.
        group: The group in the help, by its name in `GROUPS`.
        kind: The kind of setting, which decides whether it may change when a run continues; None
            is the kind of the group.
        valid: Which values of the type are accepted.
        needs: The setting without which the key has no effect.
        spelling: Returns the same value for all valid spellings of one meaning.
        never_idle: Whether a preset or a NeMo file that sets the key in an FP8 run is refused where
            the key has no effect, since elsewhere it would change numbers.
        defines_function: Whether a model with another value computes another function of the same
            weights, or has other weights. What changes training or roundings alone does not.
        spec: The field of the `RunSpec` that has this value, as `optim.lr`; in `optim.*` the star
            stands for the key's own name. `resolve` reads a key without one by its path, since
            fields follow from it and other keys together.
    """
    metadata = {
        "help": help,
        "nemo": nemo,
        "group": group,
        "kind": kind or GROUPS[group].kind,
        "valid": valid,
        "needs": needs,
        "spelling": spelling,
        "never_idle": never_idle,
        "defines_function": defines_function,
        "spec": spec,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def needs(
    key: str,
    *values: object,
    reads: Callable[[Values], Iterable[object]] | None = None,
    hint: str = "",
) -> Need:
    """Return the need for `key` to have one of `values`.

    Args:
        key: The key that another one depends on.
        values: Its values with which the other key has an effect.
        reads: Returns, from all settings, the values that are compared instead of the key's own:
            for example all recipes that some linear uses.
        hint: Replaces the usual hint "Set …, or leave it out".
    """
    shown = [str(value) if value is not None else "null" for value in values]
    text = f"{key}={' or '.join([', '.join(shown[:-1]), shown[-1]] if shown[1:] else shown)}"

    def holds(settings: Values) -> bool:
        if reads is None:
            return settings[key] in values
        return any(value in values for value in reads(settings))

    return Need(key, text, holds, hint)


def needs_above(key: str, low: float) -> Need:
    """Return the need for `key` to be a number above `low`."""
    return Need(key, f"{key} above {low}", lambda v: v[key] is not None and v[key] > low)


def both_needs(first: Need, second: Need) -> Need:
    """Return the need for two settings, of which the first is named if both are missing."""
    text = f"{first.text} and {second.text}"
    return dataclasses.replace(first, text=text, own_hint=first.hint, also=second)


def keys_of(section: type[Any], prefix: str = "") -> dict[str, Key]:
    """Return all keys of a schema dataclass by their dotted paths, in the order of the source."""
    keys: dict[str, Key] = {}
    hints = get_type_hints(section)
    for item in dataclasses.fields(section):
        path, hint = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            keys |= keys_of(hint, path + ".")
            continue
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        spec = (item.metadata["spec"] or "").replace("*", item.name) or None
        keys[path] = Key(path, _type_text(hint), default, **{**item.metadata, "spec": spec})
    return keys


def at_least(low: float, most: float = LARGEST) -> Valid:
    """Return the condition that a number is `low` or larger, and at most `most`."""
    text = f"at least {low}" + (f" and at most {most}" if most != LARGEST else "")
    return Valid(text, lambda v: low <= v <= most)


def above(low: float, most: float = LARGEST) -> Valid:
    """Return the condition that a number is larger than `low`, and at most `most`."""
    text = f"above {low}" + (f" and at most {most}" if most != LARGEST else "")
    return Valid(text, lambda v: low < v <= most)


def between(low: float, high: float) -> Valid:
    """Return the condition that a number is from `low` to `high`, both included."""
    return Valid(f"from {low} to {high}", lambda v: low <= v <= high)


def one_of(*values: object, later: Container[object] = (), suggestion: str = "") -> Valid:
    """Return the condition that a value is one of `values`; see `Valid` for the rest."""
    text = ", ".join(dict.fromkeys(str(value) for value in values))
    text = " or ".join(text.rsplit(", ", 1))
    return Valid(
        text,
        lambda v: v in values and not isinstance(v, bool),
        later,
        suggestion,
        values=values,
    )


def or_null(valid: Valid) -> Valid:
    """Return the condition that a value is null or meets `valid`."""
    return Valid(
        f"{valid.text}, or null",
        lambda v: v is None or valid.accepts(v),
        valid.later,
        valid.suggestion,
        valid.why,
        valid.values,
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
