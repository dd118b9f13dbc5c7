"""Parse `model.precision_schedule`: a list of `{from, modules, products, recipe}`.

This module reads each entry by itself. What entries mean together, and for a model, is in
`precision_phases`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megafp8.specs.precision import GEMMS, PrecisionChange
from megafp8.specs.recipes import HIGH_PRECISION, names_code, problem
from megafp8.specs.traits import GemmName

SCHEDULE = "model.precision_schedule"
BF16 = "bf16"
FORWARD, BACKWARD = "forward", "backward"
_PRODUCTS: dict[str, tuple[GemmName, ...]] = {
    **{gemm: (gemm,) for gemm in GEMMS},
    FORWARD: ("output",),
    BACKWARD: ("grad_input", "grad_weight"),
}
_FIELDS = ("from", "modules", "products", "recipe")
EXAMPLE = "{from: 0.85, recipe: bf16}"


def schedule_problem(value: object) -> str | None:
    """Return why a value of the key is not valid by itself, or None if it is.

    Names of code are left out; `own_recipes` imports these.
    """
    if not isinstance(value, (list, tuple)):
        return f"must be a list of entries such as {EXAMPLE}"
    reasons = (_entry_problem(entry) for entry in value)
    found = ((n, reason) for n, reason in enumerate(reasons, 1) if reason is not None)
    return next((f"entry {n} {reason}" for n, reason in found), None)


def _entry_problem(entry: object) -> str | None:
    if not isinstance(entry, Mapping):
        return f"({entry!r}) must be a mapping such as {EXAMPLE}"
    for name in entry:
        if name not in _FIELDS:
            close = difflib.get_close_matches(str(name), _FIELDS, n=1)
            meant = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(_FIELDS)}"
            return f"has the unknown key {name}{meant}"
    if "from" not in entry or "recipe" not in entry:
        missing = "from" if "from" not in entry else "recipe"
        return f"lacks `{missing}`, as in {EXAMPLE}"
    if not _is_start(start := entry["from"]):
        return (
            f"has from: {start!r}, which must be a whole number of steps, or a fraction of the run "
            "from 0.0 to below 1.0"
        )
    if _patterns(entry.get("modules")) is None:
        return (
            f"has modules: {entry['modules']!r}, which must be a pattern of linears' names such as "
            "'*.mlp.fc2', or a list of patterns"
        )
    if not _products_of(entry.get("products")):
        return (
            f"has products: {entry['products']!r}, which must be {', '.join(_PRODUCTS)}, or a list "
            "of these"
        )
    recipe = entry["recipe"]
    if recipe in (BF16, HIGH_PRECISION) or names_code(recipe):
        return None
    if (reason := problem(recipe, (HIGH_PRECISION, BF16))) is not None:
        return f"has recipe: {reason}"
    return None


def _is_start(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value < 1 if isinstance(value, float) else 0 <= value <= 2**53


def _patterns(value: object) -> tuple[str, ...] | None:
    """Return the patterns of an entry's `modules`, none for null; None if it is not valid."""
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)) or not all(isinstance(p, str) and p for p in given):
        return None
    return tuple(given)


def _products_of(value: object) -> tuple[GemmName, ...]:
    """Return the products of an entry in their order, all for null; none if it is not valid."""
    if value is None:
        return GEMMS
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)) or not all(
        isinstance(name, str) and name in _PRODUCTS for name in given
    ):
        return ()
    named = {gemm for name in given for gemm in _PRODUCTS[name]}
    return tuple(gemm for gemm in GEMMS if gemm in named)


def parse_schedule(value: object, num_steps: int = 0) -> tuple[PrecisionChange, ...]:
    """Return the entries of a valid value, for a run of so many steps; none of another value.

    A fraction of the run is rounded down, as those of the learning rate's schedule are.
    """
    if schedule_problem(value) is not None:
        return ()
    assert isinstance(value, Sequence)
    return tuple(_change(entry, num_steps) for entry in value)


def _change(entry: Mapping[str, Any], num_steps: int) -> PrecisionChange:
    start, recipe = entry["from"], entry["recipe"]
    return PrecisionChange(
        start=start,
        after=int(start * num_steps) if isinstance(start, float) else start,
        modules=_patterns(entry.get("modules")) or (),
        products=_products_of(entry.get("products")),
        precision=HIGH_PRECISION if recipe == BF16 else recipe,
    )


def written(change: PrecisionChange) -> dict[str, Any]:
    """Return a change as an entry of the key, in one spelling."""
    return {
        "from": change.start,
        "modules": list(change.modules) or None,
        "products": list(change.products),
        "recipe": change.precision,
    }


def spell_schedule(value: object) -> list[dict[str, Any]]:
    """Return the same value for all valid spellings of a schedule."""
    return [written(change) for change in parse_schedule(value)]


def with_change(
    value: object,
    num_steps: int,
    entry: Mapping[str, Any],
    is_valid: Callable[[list[Any]], bool],
) -> str:
    """Return a valid schedule of a run with one more entry, as it is written on a command line.

    Later entries with which it is not valid, since they would change nothing, are left out.
    """
    had = list(value) if isinstance(value, (list, tuple)) else []
    starts = [change.after for change in parse_schedule(had, num_steps)]
    place = sum(start <= entry["from"] for start in starts)
    entries = [*had[:place], entry]
    for later in had[place:]:
        if is_valid([*entries, later]):
            entries.append(later)
    return as_override(entries)


def as_override(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the setting with these entries, as it is written on a command line."""
    return f"{SCHEDULE}=[{', '.join(map(_on_command_line, entries))}]"


def _on_command_line(value: object) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{key}: {_on_command_line(v)}" for key, v in value.items() if v is not None)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_on_command_line, value))}]"
    return f"'{value}'" if isinstance(value, str) and not value.isidentifier() else str(value)


def names_bf16(value: object) -> bool:
    """Whether an entry names BF16 as such, and not the run's own high precision."""
    if not isinstance(value, (list, tuple)):
        return False
    return any(isinstance(entry, Mapping) and entry.get("recipe") == BF16 for entry in value)
