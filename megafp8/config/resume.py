"""Decide from resolved configurations which runs may continue each other.

Settings about length, logging, layout and policy may change when a run continues; those about
model, data and optimizer may not. The `kind` of a key in the schema says which it is.

A setting is compared where it has an effect, with the value that was last in effect in the run. In
a layout without effect, such as `model.optim.grad_sync_dtype` on one rank, no value can be given
and none is compared. So that a later layout cannot silently begin with another value, checkpoints
record under `LAST_IN_EFFECT` what was in effect before.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from megafp8.config.errors import SettingError, raise_if_any
from megafp8.config.keys import FREE_KINDS, Values
from megafp8.config.overrides import quoted
from megafp8.config.precision_changes import SCHEDULE, parse_schedule
from megafp8.config.rules import unmet_need
from megafp8.config.schema import all_keys
from megafp8.config.values import (
    in_effect,
    named_linears,
    parse_modules,
    split_accumulator,
)
from megafp8.specs.optim import OPTIMIZERS
from megafp8.specs.recipes import HIGH_PRECISION, problem

Resolved = Mapping[str, Any]

LAST_IN_EFFECT = "last_in_effect"
"""The key of a checkpoint's meta for `last_in_effect`; older versions did not write it."""

_ABSENT = "absent"

_TAKEN_OUT = {"model.optim.moments_scaling": "tensor"}
"""Keys of earlier versions that are gone, and the value that a run without the key has."""

_SAME_MEANING = {
    "model.optim.name": {n: named.same_as for n, named in OPTIMIZERS.items() if named.same_as}
}
"""Values that mean the same and differ only in the kernel that computes them."""

_FILES_OF_DATA = (
    "model.data.data_prefix",
    "model.data.train_ds.file_names",
    "model.data.validation_ds.file_names",
)
"""Keys whose files may move: their last names are compared here. A checkpoint records a fingerprint
of the content, which is compared when it is loaded."""

_OF_THE_RECIPE = ("model.fp8_e4m3", "model.fp8_hybrid")
"""Keys that mostly differ because the recipe does: a difference of recipes is named alone."""
_PLACES = ("exp_manager.exp_dir", "exp_manager.name", "exp_manager.explicit_log_dir")

_PLAIN_WORD = re.compile(r"(?!(true|false|null|nan|inf|infinity)$)[a-z]\w*", re.IGNORECASE)
"""Words that Hydra reads as text without quotes."""


class Difference(NamedTuple):
    """Name a key that differs between a run and the settings that continue it."""

    key: str
    old: Any
    new: Any


def identity(resolved: Resolved) -> str:
    """Return a hash of model, data and optimizer, equal for runs that one layout may continue."""
    fixed = {k: _meaning(k, value) for k, value in flat(resolved).items() if _is_fixed(k)}
    return _digest(fixed)


def full_identity(resolved: Resolved) -> str:
    """Return a hash of all settings; only a run with equal settings continues an unnamed run."""
    return _digest(flat(resolved))


def setting_differences(
    old: Resolved, new: Resolved, earlier: Mapping[str, Any] | None = None
) -> list[Difference]:
    """Return the keys of model, data and optimizer whose values differ.

    A key that has no effect in `new` does not differ, nor does one that never had an effect in the
    run. A key that one side lacks has its default there, so that a run made by an older version
    continues.

    Args:
        old: The settings with which the run was trained last.
        new: The settings that are to continue it.
        earlier: What `last_in_effect` returned when the run was continued with `old`.
    """
    before, after = with_defaults(old), with_defaults(new)
    known, differences = all_keys(), []
    for key in [*known, *sorted((before.keys() | after.keys()) - known.keys())]:
        if not _is_fixed(key) or not _has_effect(key, after):
            continue
        last = before if _has_effect(key, before) else earlier or {}
        if key in known and key not in last:
            continue  # it had no effect before
        absent = _TAKEN_OUT.get(key, _ABSENT)
        was, now = last.get(key, absent), after.get(key, absent)
        if key == "model.fp8_modules":  # older versions ignored rules that decide about no linear
            was, now = _rules_in_effect(was, before), _rules_in_effect(now, after)
        if key == "model.fp8_split_accumulator":  # null is what the backend does
            was, now = split_accumulator({**before, key: was}), split_accumulator(after)
        if _meaning(key, was) != _meaning(key, now):
            differences.append(Difference(key, was, now))
    if any(found.key == "model.fp8_recipe" for found in differences):
        return [found for found in differences if found.key not in _OF_THE_RECIPE]
    return differences


def changed_settings(old: Resolved, new: Resolved) -> list[Difference]:
    """Return the keys whose values differ and that have an effect in either, of every kind.

    Where runs are kept is left out: a run may be moved.
    """
    before, after = with_defaults(old), with_defaults(new)
    return [
        Difference(key, before[key], after[key])
        for key in all_keys()
        if key not in _PLACES
        and _meaning(key, before[key]) != _meaning(key, after[key])
        and (_has_effect(key, before) or _has_effect(key, after))
    ]


def last_in_effect(
    old: Resolved, new: Resolved, earlier: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the keys that have no effect in `new` and had one in the run, with the last values.

    They are those of model, data and optimizer that need a layout. Arguments are those of
    `setting_differences`.
    """
    before, after = with_defaults(old), with_defaults(new)
    last_values = {}
    for key in filter(_is_fixed, all_keys()):
        if _has_effect(key, after):
            continue
        last = before if _has_effect(key, before) else earlier or {}
        if key in last:
            last_values[key] = last[key]
    return last_values


def with_defaults(resolved: Resolved) -> dict[str, Any]:
    """Return all values by their paths; a key that `resolved` lacks has its default."""
    return {path: key.default for path, key in all_keys().items()} | flat(resolved)


def _has_effect(key: str, values: Values) -> bool:
    """Whether a key is read; one that is never idle counts as if it were, with its default."""
    known = all_keys().get(key)
    if known is None or known.never_idle:
        return True
    return unmet_need(key, {**values, **_findable(values)}) is None


def _findable(values: Values) -> dict[str, Any]:
    """Return stand-ins for recipes of old settings whose code is not imported."""
    stand_ins: dict[str, Any] = {}
    name, rules = values.get("model.fp8_recipe"), values.get("model.fp8_modules")
    if problem(name) is not None:
        stand_ins["model.fp8_recipe"] = all_keys()["model.fp8_recipe"].default
    if any(
        rule.precision != HIGH_PRECISION and problem(rule.precision) is not None
        for rule in parse_modules(rules) or ()
    ):
        stand_ins["model.fp8_modules"] = []
    named = {change.precision for change in parse_schedule(values.get(SCHEDULE))}
    if any(problem(name) is not None for name in named - {HIGH_PRECISION}):
        stand_ins[SCHEDULE] = []
    return stand_ins


def check_continues(
    old: Resolved,
    new: Resolved,
    earlier: Mapping[str, Any] | None = None,
    *,
    run: str,
    is_sweep: bool = False,
) -> None:
    """Raise unless settings `new` can continue the run that was made with `old`.

    The first three arguments are those of `setting_differences`. `run` is the run's directory,
    `is_sweep` says that a sweep chose it.

    Raises:
        ConfigError: A key differs that must not; all of them are named.
    """
    of_directory = "exp_manager.name"
    if is_sweep:
        of_directory = "hydra.sweep.dir"
    elif flat(new).get("exp_manager.explicit_log_dir") is not None:
        of_directory = "exp_manager.explicit_log_dir"
    raise_if_any(
        [
            SettingError(
                d.key,
                d.new,
                f"the run {run} was made with {d.old}",
                f"Give {typed(d.key, d.old)} to continue it, or another {of_directory} for a new "
                "run",
            )
            for d in setting_differences(old, new, earlier)
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
        with suppress(TypeError, ValueError, KeyError, AssertionError):  # no value of the key
            value = known.spelled(value)  # an older version may have spelt it differently
    if key.startswith(_FILES_OF_DATA):
        return _last_names(value)
    is_name = isinstance(value, str)
    return _SAME_MEANING.get(key, {}).get(value, value) if is_name else value


def _last_names(value: Any) -> Any:
    """Return paths, alone or in lists, without the folders that they are in."""
    if isinstance(value, list | tuple):
        return [_last_names(item) for item in value]
    return PurePosixPath(value).name if isinstance(value, str) else value


def typed(key: str, value: Any) -> str:
    """Return an override as it is typed in a shell."""
    return shlex.quote(f"{key}={_word(value)}")


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_word, value))}]"
    if isinstance(value, str):
        return value if _PLAIN_WORD.fullmatch(value) else quoted(value)
    return "null" if value is None else str(value)


def _rules_in_effect(rules: Any, values: Values) -> Any:
    """Return the rules of `fp8_modules` without those that decide about no linear."""
    return in_effect(rules, named_linears(values)) if isinstance(rules, (list, tuple)) else rules


def _is_fixed(key: str) -> bool:
    known = all_keys().get(key)
    return known is None or known.kind not in FREE_KINDS


def _digest(leaves: Mapping[str, Any]) -> str:
    text = json.dumps(leaves, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
