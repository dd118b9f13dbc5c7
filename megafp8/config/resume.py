"""Decide from resolved configurations which runs may continue each other.

Settings about length, logging, layout and policy may change when a run continues; those about
model, data and optimizer may not. The `kind` of a key in the schema says which it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from megafp8.config.errors import SettingError, raise_if_any
from megafp8.config.keys import FREE_KINDS
from megafp8.config.schema import all_keys

Resolved = Mapping[str, Any]

_ABSENT = "absent"

_SAME_MEANING = {"model.optim.name": {"fused_adam": "adamw", "distributed_fused_adam": "adamw"}}
"""Values that mean the same and differ only in the kernel that computes them."""


class Difference(NamedTuple):
    """Name a key that must not change when a run continues, with its two values."""

    key: str
    old: Any
    new: Any


def identity(resolved: Resolved) -> str:
    """Return a hash of model, data and optimizer, equal for runs that may continue each other."""
    fixed = {k: _meaning(k, value) for k, value in flat(resolved).items() if _is_fixed(k)}
    return _digest(fixed)


def full_identity(resolved: Resolved) -> str:
    """Return a hash of all settings; only a run with equal settings continues an unnamed run."""
    return _digest(flat(resolved))


def differences(old: Resolved, new: Resolved) -> list[Difference]:
    """Return the keys of model, data and optimizer whose values differ.

    A key that one side lacks has its default there, so that a run made by an older version
    continues.
    """
    before, after = flat(old), flat(new)
    found = []
    for key in [*all_keys(), *sorted((before.keys() | after.keys()) - all_keys().keys())]:
        default = all_keys()[key].default if key in all_keys() else _ABSENT
        was, now = before.get(key, default), after.get(key, default)
        if _is_fixed(key) and _meaning(key, was) != _meaning(key, now):
            found.append(Difference(key, was, now))
    return found


def check_continues(old: Resolved, new: Resolved, *, run: str) -> None:
    """Raise unless settings `new` can continue the run that was made with `old`.

    Raises:
        ConfigError: A key differs that must not; all of them are named.
    """
    raise_if_any(
        [
            SettingError(
                d.key,
                d.new,
                f"the run {run} was made with {d.old}",
                f"Give {d.key}={d.old} to continue it, or another exp_manager.name for a new run",
            )
            for d in differences(old, new)
        ]
    )


def flat(resolved: Resolved, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a tree of settings by their dotted paths."""
    leaves: dict[str, Any] = {}
    for name, value in resolved.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def _meaning(key: str, value: Any) -> Any:
    known = all_keys().get(key)
    if known is not None and value != _ABSENT and value is not None:
        value = known.spelled(value)  # an older version may have spelt the value differently
    return _SAME_MEANING.get(key, {}).get(value, value) if key in _SAME_MEANING else value


def _is_fixed(key: str) -> bool:
    known = all_keys().get(key)
    return known is None or known.kind not in FREE_KINDS


def _digest(leaves: Mapping[str, Any]) -> str:
    text = json.dumps(leaves, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
