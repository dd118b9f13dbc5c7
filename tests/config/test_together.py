"""Test the table of settings that exclude each other: each row refuses, with its own reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megafp8.config.checks import check_values
from megafp8.config.load import load
from megafp8.config.rows import Condition, Row, condition_text
from megafp8.config.schema import all_keys
from megafp8.config.together import TOGETHER, findings
from megafp8.specs.recipes import load_recipe

TWO_LEVELS = str(Path(__file__).parents[1] / "own_recipes/four_bits.py")
SIMULATED = str(Path(__file__).parents[1] / "own_recipes/simulated_int8.py")
for own in (TWO_LEVELS, SIMULATED):
    load_recipe(own)
ROWS = [" + ".join(condition_text(*c) for c in {**r.when, **r.excludes}.items()) for r in TOGETHER]
BESIDES = {
    "model.fp8_backend": {"model.fp8": True, "model.fp8_recipe": "tensorwise"},
    "model.fp8_health": {"model.fp8": True},
    "model.fp8_params": {"model.fp8": True},
    "model.reduce_amax": {"model.fp8": True},
    "model.pad_inner_dim": {"model.fp8": True},
    "model.fp8_wgrad": {"model.fp8": True},
    "model.override_linear_precision": {"model.fp8": True},
    "model.precision_schedule": {"model.fp8": True},
    "model.optim.fp8_opt_level": {"model.fp8": True},
}
"""What a key needs to have an effect."""
CANDIDATES = [
    True, False, None, 0, 1, 2, 16, 32, 0.1, "bf16", "te", "torchao", "delayed", "rowwise",
    "blockwise", "tensorwise", "scales", "full", "block", "hybrid", "InterleavedZeroBubble",
    [True, False, False], "O1", "O3", "auto", "fp8", "elements", "muon", TWO_LEVELS, SIMULATED,
    [{"from": 0.5, "recipe": "high_precision"}],
]  # fmt: skip


def that_holds(key: str, test: Any, values: dict[str, Any]) -> Any:
    """Return a value of a key for which a condition holds."""
    if not isinstance(test, Condition):
        return test
    for value in CANDIDATES:
        valid = all_keys()[key].valid
        if valid is not None and not isinstance(value, type(None)) and not _fits(valid, value):
            continue
        try:
            if test.holds(value, values | {key: value}):
                return value
        except (KeyError, TypeError):
            continue
    raise AssertionError(f"no value for {condition_text(key, test)}")


def _fits(valid: Any, value: Any) -> bool:
    try:
        return bool(valid.accepts(value))
    except TypeError:
        return False


def values_of(row: Row) -> dict[str, Any]:
    values = load()
    for key, test in {**row.when, **row.excludes}.items():
        values |= BESIDES.get(key, {})
        values[key] = that_holds(key, test, values)
    for key, test in {**row.when, **row.excludes}.items():  # said by the row, whatever came besides
        values[key] = that_holds(key, test, values)
    return values


@pytest.mark.parametrize("row", TOGETHER, ids=ROWS)
def test_each_row_refuses_by_the_key_that_it_excludes(row: Row) -> None:
    values = values_of(row)
    (excluded,) = row.excludes
    found = [finding for finding in findings(values) if finding.hint == row.hint]
    assert found and found[0].key == excluded
    assert "{" not in found[0].reason and row.hint[0].isupper() and not row.hint.endswith(".")
    default = load()
    if default[excluded] != values[excluded]:
        without = values | {excluded: default[excluded]}
        assert row.hint not in [finding.hint for finding in findings(without)]


def test_the_default_job_and_its_fp8_are_not_in_the_table() -> None:
    assert not list(findings(load()))
    assert not check_values(load(["model.fp8=True"]))


def test_a_row_is_left_out_while_a_key_that_it_reads_is_bad() -> None:
    values = values_of(TOGETHER[0])
    for key in {**TOGETHER[0].when, **TOGETHER[0].excludes}:
        assert not [f for f in findings({k: v for k, v in values.items() if k != key})]
