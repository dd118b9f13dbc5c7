"""Check that each promise of README and guide names what holds it (scripts/promises.py)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from megafp8.config.errors import CombinedConfigError, SettingError
from megafp8.config.load import load
from scripts.promises import PAGES, ROOT, promises_of, read_table, row_of
from tests.test_docs import PAGES as TEXTS
from tests.test_docs import _tests

SETTING = r"`((?:model|trainer|exp_manager)\.[\w.]+=[\w.]+)`"


def without_row(page: str, text: str) -> list[str]:
    """Return the promises of a text that no row of the page begins."""
    table = read_table()
    return [each.text for each in promises_of(page, text) if row_of(each, table) is None]


def bad_holders(row: str) -> Iterator[str]:
    """Yield what a row of the table names and what does not exist."""
    kind, _, rest = row.partition(": ")
    if kind == "definition" and rest:
        return
    for name in (rest if kind == "measured" else row).split("; "):
        path, _, test = name.partition("::")
        file = ROOT / path
        if not file.is_file() or (kind != "measured" and file.suffix != ".py"):
            yield name
        elif test and (test not in _tests() or f"def {test}(" not in file.read_text("utf-8")):
            yield name


@pytest.mark.parametrize("page", PAGES)
def test_every_promise_has_a_row_and_every_row_a_promise(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert not without_row(page, text), "add to tests/promises.yaml, or say what is true"
    table = read_table()
    used = {row_of(promise, table) for promise in promises_of(page, text)}
    assert table.get(page, {}).keys() == {row[0] for row in used if row is not None}


def test_the_table_has_no_other_pages() -> None:
    assert set(read_table()) <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_what_holds_a_promise_exists(page: str) -> None:
    rows = read_table().get(page, {})
    assert not [(begin, bad) for begin, row in rows.items() for bad in bad_holders(row)]


def test_a_promise_without_a_row_is_found() -> None:
    block = "```\nnever in a block of code\n```\n"
    for new in ("It never fails.", "- A cast takes 0.3 ms here.", "| a | b is refused in it |"):
        text = f"# Always\n\nWords before.\n{new}\n\n{block}"
        assert len(without_row("README.md", text)) == 1, new


@pytest.mark.parametrize(
    "row", ["tests/nowhere.py", "tests/test_docs.py::test_nowhere", "measured: nowhere.json", "x"]
)
def test_a_row_that_names_nothing_is_found(row: str) -> None:
    assert list(bad_holders(row))


def refused_settings(text: str) -> Iterator[str]:
    """Yield settings in backquotes of which a text says, in plain form, that they are refused."""
    flat = " ".join(text.split())
    yield from re.findall(rf"\brefuses {SETTING}(?=[.,;:] )", flat)
    yield from re.findall(rf"(?<=[.;:(] ){SETTING} is refused(?=[.,;:])", flat)


def is_accepted(setting: str) -> bool:
    """Return whether a run in FP8 takes a setting, alone or on two ranks."""
    for more in ([], ["trainer.devices=2"]):
        with contextlib.suppress(SettingError, CombinedConfigError):
            load(["model.fp8=True", *more, setting])
            return True
    return False


def test_no_page_says_refused_of_a_setting_that_loads() -> None:
    said = {(page, each) for page, text in TEXTS.items() for each in refused_settings(text)}
    assert not [(page, each) for page, each in sorted(said) if is_accepted(each)]
    (planted,) = refused_settings("It refuses `model.fsdp=True`, which it cannot simulate.")
    assert is_accepted(planted) and not is_accepted("model.fp8_params=3")
