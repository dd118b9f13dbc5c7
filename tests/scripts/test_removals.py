"""A part is taken out of a copy with its tests, and what then fails is found (scripts/removals)."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import removals
from scripts.removals import PARTS, ROOT, Part, Row, take_out, tried, write_table

FILES = {
    "pack/__init__.py": "",
    "pack/pyproject.toml": "",
    "pack/core.py": "NAMES = ('one', 'two')\n",
    "pack/one.py": "from pack import core\n\n\nTWO = 2\n",
    "pack/user.py": "from pack.one import TWO\n",
    "pack/two.py": "import pack.core\n",
    "pretrain_gpt.py": "import pack.core\n",
    "tests/test_one.py": "from pack import one\n\n\ndef test_it():\n    assert one.TWO == 2\n",
    "tests/test_two.py": "def test_it() -> None:\n    assert True\n",
}
CHANGE = ("pack/core.py", ", 'two'")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_part_that_nothing_needs_is_out(tree: Path) -> None:
    row = take_out(Part("two", ("pack/two.py",), ("tests",), CHANGE), tree)
    assert not (tree / "pack/two.py").exists() and row.num_lines == 1 and row.num_places == 0
    assert (tree / "pack/core.py").read_text() == "NAMES = ('one')\n"
    row = tried(row, tree, whole=False)
    assert row.is_out and row.tests == "2 passed" and row.job == "yes", row


def test_a_part_that_is_needed_stays_and_its_tests_go_with_it(tree: Path) -> None:
    row = take_out(Part("one", ("pack/o*.py",), ("tests",)), tree)
    assert not (tree / "tests/test_one.py").exists() and row.num_places == 1
    row = tried(row, tree, whole=False)
    assert not row.is_out and row.imports == "no" and row.job == "–"
    assert row.failure == "pack.user: No module named 'pack.one'"


def test_tests_that_can_be_imported_stay_and_files_that_name_the_part_are_counted(
    tree: Path,
) -> None:
    """Half of all tests went, when one that is imported by others named the part in a text."""
    named = "def test_it():\n    import pack.two\n    assert 'pack.two'\n"
    (tree / "tests/test_text.py").write_text(named)
    (tree / "tests/test_import.py").write_text("import tests.helper\n")
    (tree / "tests/helper.py").write_text("from pack import two\n")
    (tree / "pack/user.py").write_text("NAME = 'pack.two'\n")
    row = take_out(Part("two", ("pack/two.py",), ("tests",)), tree)
    left = sorted(path.name for path in (tree / "tests").iterdir())
    assert left == ["test_one.py", "test_text.py", "test_two.py"] and row.num_places == 1


@pytest.mark.parametrize("broken", ["pretrain_gpt.py", "tests/test_two.py"])
def test_a_job_and_tests_that_fail_are_found(tree: Path, broken: str) -> None:
    (tree / broken).write_text("raise ValueError('no')\n")
    row = tried(take_out(Part("two", ("pack/two.py",), ("tests",)), tree), tree, whole=False)
    assert not row.is_out and row.imports == "yes"
    assert (row.job == "no") == (broken == "pretrain_gpt.py") and row.failure


def test_what_is_installed_does_not_stand_in_for_what_was_taken_out(tree: Path) -> None:
    """This repository is installed from its folders; a copy without one of them has not got it."""
    (tree / "te_cpu").mkdir()
    (tree / "te_cpu" / "__init__.py").write_text("")
    (tree / "pack/user.py").write_text("import te_cpu.tensors\n")
    row = tried(take_out(Part("te_cpu", ("te_cpu",), ("tests",)), tree), tree, whole=False)
    assert row.failure.startswith("pack.user: No module named 'te_cpu'"), row


def test_a_change_that_does_not_fit_ends_the_command(tree: Path) -> None:
    part = Part("two", ("pack/two.py",), ("tests",), ("pack/core.py", "'three'"))
    with pytest.raises(SystemExit, match="is not there once"):
        take_out(part, tree)
    with pytest.raises(SystemExit, match="no file is at pack/none.py"):
        take_out(Part("none", ("pack/none.py",), ()), tree)


def test_every_part_has_files_and_tests_that_exist() -> None:
    for part in PARTS:
        assert all(any(ROOT.glob(pattern)) for pattern in part.paths), part.name
        assert all((ROOT / name).exists() for name in part.neighbours), part.name
        if part.change is not None:
            assert (ROOT / part.change[0]).read_text().count(part.change[1]) == 1, part.name


@pytest.mark.parametrize(
    ("names", "failing", "code"),
    [(["te_cpu", "Muon"], "Muon", 0), (["te_cpu", "Muon"], "te_cpu", 1), (["Muon"], "", 0)],
)
def test_a_package_that_cannot_be_taken_out_fails_the_command(
    names: list[str], failing: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(part: Part, tree: Path) -> Row:
        return Row(part, 1, "", "", "", 0, "it fails" if part.name == failing else "")

    monkeypatch.setattr(removals, "extract", lambda *where: None)
    monkeypatch.setattr(removals, "take_out", rows)
    monkeypatch.setattr(removals, "tried", lambda row, tree, whole: row)
    monkeypatch.setattr(removals, "commit_of", lambda *what: "0123456789ab")
    table = tmp_path / "table.md"
    assert removals.main([*names, "--table", str(table)]) == code
    written = [line for line in table.read_text().splitlines() if "0123456789" in line]
    assert len(written) == len(names) and ("it fails" in table.read_text()) == bool(failing)


def test_a_new_row_replaces_an_older_one(tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    first, second = PARTS[:2]
    write_table(
        [Row(first, 1, "yes", "yes", "no", 3, "it fails"), Row(second, 2, "", "", "", 0)], table
    )
    write_table([Row(first, 4, "yes", "yes", "5 passed", 0)], table)
    text = table.read_text()
    assert "it fails" not in text and "5 passed" in text and f"| {second.name} | 2 |" in text
