"""The table of suites counts what ran, keeps the other rows, and says why a suite did not run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import nightly
from scripts.nightly import Suite, counted, main, read_table
from tests.asked import asked_for

PYTHON = (sys.executable, "-c")


def suites(monkeypatch: pytest.MonkeyPatch, *more: Suite) -> None:
    monkeypatch.setattr(nightly, "SUITES", more)


@pytest.mark.parametrize(
    ("output", "code", "row"),
    [
        ("..\n12 passed in 3.21s\n", 0, (12, 0, 0)),
        ("=== 1 failed, 11 passed, 2 skipped in 63.21s (0:01:03) ===\n", 1, (11, 1, 2)),
        ("5 passed in 1.00s\n== AVX2\n4 passed, 1 error in 1.00s\n", 1, (9, 1, 0)),
        ("container: the default job\n", 0, (1, 0, 0)),
        ("make: *** [lint] Error 1\n", 2, (0, 1, 0)),
        ("5 passed in 1.00s\nKilled\n", 137, (5, 1, 0)),
        ("the text 3 passed in words\n", 1, (0, 1, 0)),
    ],
)
def test_counts(output: str, code: int, row: tuple[int, int, int], tmp_path: Path) -> None:
    found = counted(output, tmp_path / "none.xml", code, 1.0)
    assert (found.passed, found.failed, found.skipped) == row
    assert bool(found.reason) == (code != 0 and row[1] == 1 and "fail" not in output and
                                  "error" not in output)  # fmt: skip


def test_a_table_is_made_and_rows_of_other_suites_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.md"
    one = Suite("one", "prints | bars", (*PYTHON, "print('3 passed, 1 skipped in 0.10s')"))
    two = Suite("two", "fails", (*PYTHON, "raise SystemExit('no room')"))
    suites(monkeypatch, one, two)
    arguments = ["--table", str(table), "--logs", str(tmp_path / "logs")]
    assert main(arguments) == 1
    first = read_table(table)
    assert first["one"][1:4] == ("3", "0", "1")
    assert first["two"][1:4] == ("0", "1", "0") and "no room" in first["two"][-1]
    suites(monkeypatch, one, Suite("two", "succeeds", (*PYTHON, "pass")))
    assert main([*arguments, "two"]) == 0
    second = read_table(table)
    assert second["one"] == first["one"] and second["two"][1:4] == ("1", "0", "0")


def test_a_row_that_another_night_writes_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.md"
    one, two = (Suite(name, "prints", (*PYTHON, "print('3 passed in 0.10s')")) for name in "ab")
    suites(monkeypatch, one, two)
    arguments = ["--table", str(table), "--logs", str(tmp_path / "logs")]
    assert main([*arguments, "a"]) == 0
    program = f"open({str(table)!r}, 'a').write('| `b`: x | 7 | 0 | 0 | 1.0 | d | c | m |\\n')"
    suites(monkeypatch, Suite("a", "writes, too", (*PYTHON, program)), two)
    assert main([*arguments, "a"]) == 0
    assert read_table(table)["b"][1] == "7" and read_table(table)["a"][1] == "1"


def test_a_suite_that_cannot_run_is_a_row_and_by_name_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.md"
    lacking = Suite("lacking", "needs a program", ("none",), ("no-such-program",), "a-package")
    suites(monkeypatch, lacking)
    arguments = ["--table", str(table), "--logs", str(tmp_path / "logs")]
    assert main(arguments) == 0
    assert "apt-get install a-package" in read_table(table)["lacking"][-1]
    assert main([*arguments, "lacking"]) == 1
    assert "apt-get install a-package" in capsys.readouterr().out


def test_a_row_names_the_python_of_its_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.md"
    suites(monkeypatch, Suite("old", "succeeds", ("true", "PYTHON=python3.12")))
    assert main(["--table", str(table), "--logs", str(tmp_path / "logs")]) == 0
    assert read_table(table)["old"][-1].startswith("Python 3.12, ")


def test_a_result_of_another_machine_is_not_replaced_by_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.md"
    arguments = ["--table", str(table), "--logs", str(tmp_path / "logs")]
    suites(monkeypatch, Suite("gpu", "on a GPU", (*PYTHON, "print('3 passed in 0.10s')")))
    monkeypatch.setattr(nightly, "_has_gpu", lambda: True)
    assert main(arguments) == 0
    there = read_table(table)
    monkeypatch.setattr(nightly, "_has_gpu", lambda: False)
    assert main(arguments) == 0 and read_table(table) == there
    assert main([*arguments, "gpu"]) == 1 and read_table(table) == there


def test_an_unknown_suite_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["slrum"])
    assert "no suite slrum" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("expression", "asked"),
    [("gpu", True), ("gpu or slurm", True), ("", False), ("not gpu", False), ("slow", False),
     ("not slow and gpu", True), ("slow and not gpu", False), ("not (gpu)", False)],
)  # fmt: skip
def test_what_a_marker_expression_asks_for(expression: str, asked: bool) -> None:
    assert asked_for("gpu", expression) is asked


def test_suites_keep_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images ask Python to write none, and a run of the tests would then compile them each time."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    asks = "import sys; print(f'{3 - int(sys.dont_write_bytecode)} passed in 0.10s')"
    suites(monkeypatch, Suite("one", "asks Python", (*PYTHON, asks)))
    table = tmp_path / "table.md"
    assert main(["--table", str(table), "--logs", str(tmp_path)]) == 0
    assert read_table(table)["one"][1] == "3"
    show = "show:; @echo [$$PYTHONDONTWRITEBYTECODE]"
    command = ["make", "--no-print-directory", "--eval", show, "show"]
    shown = subprocess.run(command, cwd=nightly.ROOT, capture_output=True, text=True)
    assert shown.stdout == "[]\n", shown.stderr
