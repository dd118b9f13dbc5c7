"""Mutants differ in one place, come in the seed's order, and are counted as what tests said."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.mutate import scope, table
from scripts.mutate.mutants import c_changes, candidates, python_changes
from scripts.mutate.runner import _outcome
from tests.ranks import ROOT

needs_library = pytest.mark.usefixtures("library")
ROW = table.Row("k", "megafp8/precision/cast.py", 3, "a + b", "a - b", "killed", "tests/x.py", 1.0)


@pytest.fixture
def library() -> None:
    pytest.importorskip("cosmic_ray", reason="Cosmic Ray is not installed: pip install cosmic-ray")


def test_every_file_has_tests_that_exist() -> None:
    files = scope.files(ROOT)
    assert "megafp8/precision/gemm.py" in files and "megafp8/precision/kernels/fp8_cpu.c" in files
    assert not [f for f in files if "triton" in f]
    tests = {test for file in files for test in scope.tests_of(file)}
    assert not [test for test in tests if not (ROOT / test).exists()]


def test_c_is_changed_outside_of_comments_and_the_preprocessor_s_lines() -> None:
    source = """\
#define WIDTH 8 /* 1 + 2 */
// 3 + 4
static float *times(const float *x, size_t n) { return x[0] < n * 2.5f ? -x : "5 + 6"; }
"""
    made = {change.operator: change.source.splitlines()[2] for change in c_changes(source)}
    assert made.keys() == {
        "C: 0 to (0 + 1)", "C: < to <=", "C: < to >=", "C: * to +", "C: 2.5f to (2.5f + 1)",
    }  # fmt: skip
    assert made["C: * to +"].count("n + 2.5f") == 1


@needs_library
def test_annotations_stay_and_the_seed_orders_what_is_changed(tmp_path: Path) -> None:
    source = "def f(a: int | None = 3) -> int | None:\n    return a * 2 if a is not None else -1\n"
    (tmp_path / "f.py").write_text(source)
    assert all(change.begin not in ((1, 9), (1, 28)) for change in python_changes(source))
    orders = [[m.after for m in candidates(tmp_path, ["f.py"], seed)] for seed in (1, 1, 2, 3)]
    assert orders[0] == orders[1] and orders[0] != orders[2]
    assert all(sorted(a) != [source] and len(a) >= 4 for a in orders)
    for mutant in candidates(tmp_path, ["f.py"], 1):
        pairs = itertools.zip_longest(source.splitlines(), mutant.source.splitlines())
        assert sum(a != b for a, b in pairs) == 1 and mutant.before != mutant.after
    # Lines before it move a mutant, and leave its place in the order.
    (tmp_path / "f.py").write_text(f"import os\n\n{source}")
    assert [m.after for m in candidates(tmp_path, ["f.py"], 1)] == orders[0]


def test_what_pytest_s_exit_says(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("..F\nFAILED tests/a.py::test_b[1 - 2] - AssertionError: x\n1 failed\n")
    assert _outcome("tests/a.py", 0, 1.0, log).verdict == "survived"
    assert _outcome("tests/a.py", 1, 1.0, log).by.startswith("tests/a.py::test_b[1")
    for code, verdict in ((2, "killed"), (-11, "killed"), (4, "error"), (5, "error")):
        assert _outcome("tests/a.py", code, 1.0, log).verdict == verdict


def test_the_page_counts_by_part_and_leaves_out_what_is_equivalent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tmp_path / "equivalent.json"
    known.write_text(
        '[{"file": "megafp8/fp8/linear.py", "before": "a + b", "after": "a - b", "why": "Unused."}]'
    )
    monkeypatch.setattr(table, "EQUIVALENT", known)
    rows = [
        ROW,
        replace(ROW, key="2", verdict="survived"),
        replace(ROW, key="3", verdict="timeout", file="megafp8/precision/kernels/fp8_cpu.c"),
        replace(ROW, key="4", verdict="survived", file="megafp8/fp8/linear.py"),
    ]
    page = table.page(rows, 7, "abc", 200)
    assert "| precision | 2 | 1 | 1 | 0 |" in page and "| C sources | 0 | 0 | 0 | 1 |" in page
    assert (
        "1 of 2 decided mutants killed, 50.0 %" in page
        and ": 198 are left" in page
        and "(Unused.)" in page
    )
