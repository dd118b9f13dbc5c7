"""The counts of `scripts/house.py` on small sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import house

SOURCE = '''"""A docstring
of two lines."""

# a comment
import os  # counts once


def first(x: int) -> str:
    """One line."""
    text = """not a
    docstring"""

    return text * x
'''


def test_lines_of_code_leave_out_docstrings_comments_and_blank_lines() -> None:
    assert house.code_lines(SOURCE) == 5
    assert list(house.function_lengths(SOURCE)) == [6]


def test_counts_of_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "megafp8").mkdir()
    (tmp_path / "megafp8" / "one.py").write_text(SOURCE)
    (tmp_path / "megafp8" / "two.py").write_text("x = 1\n" * 501)
    house.print_counts(tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "files 2, of less than 60 lines 1, of more than 500 ['megafp8/two.py (501)']",
        "lines 514, of code 506",
        "lines of a file: median 257, most 501",
        "lines of a function: median 6, 90 % up to 6, most 6",
        "names of classes in several files 0",
        "late constants 0",
    ]


def test_a_constant_is_late_if_it_could_stand_before_the_functions() -> None:
    source = "class A: ...\ndef f(): ...\nX = 1\nY = f()\nZ = A(Y)\nW: int = X\n"
    assert house.late_constants(source) == 2
    assert house.late_constants("X = 1\ndef f(): ...\n") == 0


def test_names_of_classes_are_counted_over_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "megafp8").mkdir()
    for name in ("one", "two"):
        (tmp_path / "megafp8" / f"{name}.py").write_text("class Same: ...\ndef f(): ...\n")
    house.print_counts(tmp_path)
    assert "names of classes in several files 1" in capsys.readouterr().out


def test_the_whole_settings_are_told_from_parts_of_them() -> None:
    assert house.is_settings([house.JOB[0], "model.fp8=True"])
    assert not house.is_settings(["model.fp8=True"]) and not house.is_settings({"a": 1})
