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
        "megafp8: files 2, lines 514, of code 506",
    ]


def test_each_package_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("megafp8/one.py", "numerics/two.py", "numerics/build/lib/numerics/two.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(SOURCE)
    (tmp_path / "numerics" / "pyproject.toml").write_text("")
    house.print_counts(tmp_path)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "megafp8: files 1, lines 13, of code 5",
        "numerics: files 1, lines 13, of code 5",
    ]


def test_a_constant_is_late_if_it_could_stand_before_the_functions() -> None:
    source = "class A: ...\ndef f(): ...\nX = 1\nY = f()\nZ = A(Y)\nW: int = X\n"
    assert house.late_constants(source) == 2
    assert house.late_constants("X = 1\ndef f(): ...\n") == 0


def test_a_sample_has_a_function_of_each_package_and_is_drawn_again_alike(tmp_path: Path) -> None:
    long, short = ("def {name}{number}():\n" + "    x = 1\n" * lines for lines in (7, 6))
    for package in ("config", "data", "fp8", "errors.py"):
        path = tmp_path / "megafp8" / package
        path = path if path.suffix else path / "some.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        functions = [long.format(name=path.stem, number=number) for number in range(20)]
        path.write_text("".join(functions) + short.format(name="short", number=0))
    drawn = house.sample(tmp_path)
    assert len(set(drawn)) == len(drawn) == 25 and not any("short" in name for name in drawn)
    firsts = [name.split("/")[1].split(":")[0] for name in drawn[:4]]
    assert firsts == ["config", "data", "errors.py", "fp8"]
    assert house.sample(tmp_path) == drawn


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
