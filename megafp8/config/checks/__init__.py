"""Run all rules over settings: valid values, keys without effect, and rules between keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import MISSING

from megafp8.config import together
from megafp8.config.checks import (
    experts,
    finetuning,
    model,
    optim,
    parallel,
    precision,
    precision_schedule,
    run,
)
from megafp8.config.errors import DEFAULT, SettingError
from megafp8.config.keys import LARGEST, NOT_IN_NEMO, Key, Valid, Values
from megafp8.config.rules import Finding, Origins, effective, is_mistake, unmet_needs, unused
from megafp8.config.schema import all_keys
from megafp8.config.values import plain


def check_values(values: Values, origins: Origins | None = None) -> list[SettingError]:
    """Return what all rules find; they need no device, no file and no torch.

    Args:
        values: Settings by their dotted paths, each of its key's type. Rules that read a key which
            is not in it are skipped.
        origins: The layers that set the keys. None: one user set everything.
    """
    findings = list(_outside_ranges(values))
    good = _without(findings, values)
    unmet = unmet_needs(good)
    for key, need, setting in (f for f in unused(good, unmet) if is_mistake(f, origins)):
        findings.append(Finding(key, f"has no effect with {setting}", need.hint))
    findings += rule_findings(effective(good, unmet))
    if origins is not None:
        findings += precision.formats_ruled_out(good, origins)
    found = []
    for f in findings:
        origin = "" if origins is None else origins.get(f.key, DEFAULT)
        found.append(SettingError(f.key, values[f.key], f.reason, f.hint, origin=origin))
    return found


def within_ranges(values: Values) -> dict[str, Any]:
    """Return the settings whose values their own keys accept, which rules may then read."""
    return _without(_outside_ranges(values), values)


def _outside_ranges(values: Values) -> Iterator[Finding]:
    for path, value in values.items():
        finding = _range_finding(all_keys()[path], value)
        if finding is not None:
            yield finding


def _without(findings: Iterable[Finding], values: Values) -> dict[str, Any]:
    bad = {finding.key for finding in findings}
    return {path: value for path, value in values.items() if path not in bad}


def rule_findings(values: Values) -> Iterator[Finding]:
    """Yield what the rules between keys find; keys without effect must have their defaults."""
    for subject in (
        model,
        experts,
        parallel,
        precision,
        precision_schedule,
        optim,
        run,
        finetuning,
    ):
        yield from subject.rule.findings(values)
    yield from together.findings(values)


def _accepts(valid: Valid, value: Any) -> bool:
    """Whether a value is valid; what cannot be compared or counted at all is not."""
    try:
        return bool(valid.accepts(value))
    except (TypeError, ValueError, ArithmeticError, RecursionError):
        return False


def _range_finding(key: Key, value: Any) -> Finding | None:
    valid = key.valid
    if valid is None or _accepts(valid, value):
        return None
    if value in valid.later:
        return Finding(key.path, "is not supported", valid.suggestion)
    hint = f"--help {key.path.rpartition('.')[2]} explains the key"
    if not key.required:
        hint = f"The default is {plain(key.default)}"
    elif key.nemo not in (NOT_IN_NEMO, MISSING):
        hint = f"NeMo's default is {plain(key.nemo)}"
    why = valid.why(value) or f"must be {valid.text}"
    if ("above" in why or "at least" in why) and not ("at most" in why or "below" in why):
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(number, (int, float)) and not number <= LARGEST for number in numbers):
            why += f", and no number may be above {LARGEST} (2**53)"
    return Finding(key.path, why, hint)
