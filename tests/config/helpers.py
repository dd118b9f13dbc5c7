"""Provide functions that the tests of the configuration have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megafp8.config.checks import check_values
from megafp8.config.errors import CombinedConfigError, SettingError, raise_if_any
from megafp8.config.keys import Values
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.specs import RunSpec


def run_spec(*overrides: str, gpu: bool = False, **where: Any) -> RunSpec:
    return resolve(load(overrides, **where), lambda: gpu)


def check(values: Values) -> None:
    """Raise if a rule refuses anything in settings, as if one user had set everything."""
    raise_if_any(check_values(values))


def problems(call: Callable[[], object]) -> list[SettingError]:
    """Return all problems with which a call is refused; the test fails if the call is accepted."""
    with pytest.raises((SettingError, CombinedConfigError)) as caught:
        call()
    error = caught.value
    return list(error.problems) if isinstance(error, CombinedConfigError) else [error]


def load_problems(*overrides: str, **where: Any) -> list[SettingError]:
    return problems(lambda: load(overrides, **where))


def the_problem(*overrides: str, **where: Any) -> SettingError:
    found = load_problems(*overrides, **where)
    assert len(found) == 1, [str(problem) for problem in found]
    return found[0]
