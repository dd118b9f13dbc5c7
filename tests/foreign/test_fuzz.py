"""Test that settings and damaged files from a generator end in a result or in one message."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.foreign.fuzz import Tally
from tests.foreign.fuzz_files import KINDS, try_files
from tests.foreign.fuzz_settings import try_settings


def assert_no_failure(tally: Tally, tried: int) -> None:
    print(tally)
    assert tally.failures == []
    assert tally.tried == tried


def test_a_few_settings() -> None:
    tally = Tally()
    try_settings(tally, 200, Random(0))
    assert_no_failure(tally, 200)


def test_a_few_damaged_files(tmp_path: Path) -> None:
    tally = Tally()
    try_files(tally, 2 * len(KINDS), Random(0), tmp_path)
    assert_no_failure(tally, 2 * len(KINDS))


@pytest.mark.parametrize("name", KINDS)
def test_files_without_damage_are_read(name: str, tmp_path: Path) -> None:
    """Otherwise each damaged file would be refused, whatever its damage."""
    KINDS[name].make(tmp_path / name)
    assert KINDS[name].read(tmp_path / name) is None


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 5))
def test_thousands_of_settings(seed: int) -> None:
    tally = Tally()
    try_settings(tally, 2500, Random(seed))
    assert_no_failure(tally, 2500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 5))
def test_hundreds_of_damaged_files(seed: int, tmp_path: Path) -> None:
    tally = Tally()
    try_files(tally, 250, Random(seed), tmp_path)
    assert_no_failure(tally, 250)


def test_the_generator_finds_what_it_is_made_for(tmp_path: Path) -> None:
    """Without this test, tries that catch nothing would look like tries that pass."""
    from megafp8.config.schema import all_keys
    from tests.foreign.fuzz import attempt
    from tests.foreign.fuzz_settings import absurd

    tally = Tally()
    attempt(tally, "x", "a traceback", lambda: str(1 // 0))
    attempt(tally, "x", "an absurd value", lambda: "-1 layers")
    attempt(tally, "x", "a result", lambda: None)
    assert tally.ends["x"] == {"failed": 2, "read": 1}
    layers = all_keys()["model.num_layers"]
    assert [bool(absurd(layers, value)) for value in ("4", "nan", "2.7", "-2", "abc")] == [
        False,
        True,
        True,
        True,
        True,
    ]
