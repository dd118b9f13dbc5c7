"""Test that any command line, right or wrong, gives a run or an error with a hint."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.config import overrides as of_command_lines
from megafp8.config.errors import CombinedConfigError, SettingError
from megafp8.config.load import load
from megafp8.config.nemo import nemo_keys
from megafp8.config.resolve import resolve
from megafp8.config.schema import all_keys
from megafp8.config.settings import known_sections
from megafp8.specs import RunSpec

EVERY_KEY = [*all_keys(), *nemo_keys()]


def misspelt(key: str, at: int, how: str) -> str:
    at %= len(key)
    return key[:at] + how + key[at + (how == "") :]


KEYS = st.one_of(
    st.sampled_from(EVERY_KEY),
    st.sampled_from(sorted(known_sections())),
    st.builds(misspelt, st.sampled_from(EVERY_KEY), st.integers(0, 60), st.sampled_from("x_.-é ")),
    st.builds(misspelt, st.sampled_from(EVERY_KEY), st.integers(0, 60), st.just("")),
    st.sampled_from(["hydra.run.dir", "hydra/launcher", "model@x", "precision", "x/y", "_target_"]),
    st.text(max_size=12),
)
VALUES = st.one_of(
    st.sampled_from(["True", "0", "1", "-1", "16", "1.5", "1e400", "nan", "null", "", "''", "???"]),
    st.sampled_from(["[]", "[1,2]", "{}", "{a:1}", "{lr:1}", "1,2", "range(3)"]),
    st.sampled_from(["${model.seed}", "${nope}", "${.x}", "${sum:1,2}", "${oc.env:NOPE}", "\\"]),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
    st.text(max_size=8),
    st.text(max_size=8).map(lambda text: f'"{text}"'),
)  # fmt: skip
OVERRIDE = st.one_of(
    st.builds(lambda p, k, v: f"{p}{k}={v}", st.sampled_from(["", "+", "++", "~"]), KEYS, VALUES),
    st.builds(lambda k, v: f"{k}={v}", st.sampled_from(EVERY_KEY), VALUES),
    st.builds(lambda k: f"++{k}=1", KEYS),
    st.text(max_size=20),
)
LISTS = st.lists(OVERRIDE, max_size=5).flatmap(
    lambda some: st.sampled_from([some, some + some, some[::-1]])  # given twice
)


def ends_well(overrides: list[str]) -> None:
    try:
        plan = resolve(load(overrides), lambda: False)
    except (SettingError, CombinedConfigError) as error:
        problems = error.problems if isinstance(error, CombinedConfigError) else (error,)
        for problem in problems:
            assert problem.key and problem.reason and problem.hint, problem
        return
    assert isinstance(plan, RunSpec)


@settings(max_examples=25)
@given(LISTS)
def test_any_list_ends_in_a_plan_or_an_error(overrides: list[str]) -> None:
    ends_well(overrides)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000)
@given(LISTS)
def test_thousands_of_lists(overrides: list[str]) -> None:
    ends_well(overrides)


def test_all_problems_of_a_bad_command_line_come_at_once_and_soon() -> None:
    """Each takes as many calls as in a list of half the length."""
    wrong = [f"+{key}x=1" for key in all_keys()] + [f"{key}=[[x]]" for key in nemo_keys()]
    wrong = wrong[::6]
    halves = wrong[::2], wrong[1::2]
    _calls_to_refuse(wrong[:2])  # what is read once for all
    assert _calls_to_refuse(wrong) < 1.1 * sum(map(_calls_to_refuse, halves))


def _calls_to_refuse(wrong: list[str]) -> int:
    """Return the calls, of Python and of C, in which the errors of all settings are found."""
    of_command_lines._read_once.cache_clear()
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        with pytest.raises(CombinedConfigError) as caught:
            load(wrong)
    finally:
        sys.setprofile(None)
    assert len(caught.value.problems) >= len(wrong)
    return count
