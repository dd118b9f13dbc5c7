"""Mutants differ in one place, come in the seed's order, and are counted as what tests said."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from scripts.mutate import covering, scope, table
from scripts.mutate.covering import statement
from scripts.mutate.mutants import Mutant, c_changes, places, python_changes
from scripts.mutate.runner import Report, _outcome
from tests.ranks import ROOT

needs_library = pytest.mark.usefixtures("library")
ROW = table.Row(
    "k", "fp8_numerics/cast.py", 3, "a + b", "a - b", "killed", "tests/x.py", 1.0, "abc"
)


@pytest.fixture
def library() -> None:
    pytest.importorskip("cosmic_ray", reason="Cosmic Ray is not installed: pip install cosmic-ray")


def test_every_file_has_tests_that_exist() -> None:
    files = scope.files(ROOT)
    assert "fp8_numerics/gemm.py" in files and "fp8_numerics/kernels/fp8_cpu.c" in files
    assert not [f for f in files if "triton" in f]
    numeric = (ROOT / name for name in ("fp8_numerics", "te_cpu"))
    kinds = (".py", ".c", ".h")
    missed = {
        str(path.relative_to(ROOT))
        for folder in numeric
        for path in folder.rglob("*")
        if path.suffix in kinds and not path.is_symlink()
    } - set(files)
    assert not [f for f in missed if not any(fnmatchcase(f, p) for p in scope.LEFT_OUT)]
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
    assert not list(c_changes("static void f(const struct x *a, struct y *const *b);"))


def made(root: Path, seed: int) -> list[Mutant]:
    return [m for place in places(root, ["f.py"], seed) if (m := place.make()) is not None]


@needs_library
def test_annotations_stay_and_the_seed_orders_what_is_changed(tmp_path: Path) -> None:
    source = "def f(a: int | None = 3) -> int | None:\n    return a * 2 if a is not None else -1\n"
    (tmp_path / "f.py").write_text(source)
    assert all(change.begin not in ((1, 9), (1, 28)) for change in python_changes(source))
    orders = [[m.after for m in made(tmp_path, seed)] for seed in (1, 1, 2, 3)]
    assert orders[0] == orders[1] and orders[0] != orders[2]
    assert all(sorted(a) != [source] and len(a) >= 4 for a in orders)
    for mutant in made(tmp_path, 1):
        pairs = itertools.zip_longest(source.splitlines(), mutant.source.splitlines())
        assert sum(a != b for a, b in pairs) == 1 and mutant.before != mutant.after
    # Lines before it move a mutant, and leave its place in the order and its key.
    keys = [m.key for m in made(tmp_path, 1)]
    (tmp_path / "f.py").write_text(f"import os\n\n{source}")
    assert [m.after for m in made(tmp_path, 1)] == orders[0]
    assert [m.key for m in made(tmp_path, 1)] == keys
    # The mark of parameters that take only keywords is no operator.
    (tmp_path / "f.py").write_text("def f(a, *, b=1):\n    return a * b\n")
    found = {m.after for seed in range(9) for m in made(tmp_path, seed)}
    assert "return a / b" in found and not any("/" in a and "def" in a for a in found)
    # A line that changes has other keys: results of it are dropped.
    (tmp_path / "f.py").write_text(source.replace("a * 2", "a * 3"))
    assert not set(keys) & {m.key for m in made(tmp_path, 1) if m.line == 2}


def test_what_pytest_s_exit_says(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("..F\nFAILED tests/a.py::test_b[1 - 2] - AssertionError: x\n1 failed\n")
    assert _outcome("tests/a.py", 0, 1.0, log).verdict == "survived"
    assert _outcome("tests/a.py", 1, 1.0, log).by.startswith("tests/a.py::test_b[1")
    for code, verdict in ((2, "killed"), (-11, "killed"), (4, "error"), (5, "error")):
        assert _outcome("tests/a.py", code, 1.0, log).verdict == verdict


def test_the_statement_of_a_line() -> None:
    source = "A = (\n    1,\n    2,\n)\n\n\ndef f(x, y=(\n    3\n)):\n    if x:\n        y = [\n"
    source += "            x,\n        ]\n    return y\n"
    found = {line: statement(source, line, "f.py") for line in (3, 8, 10, 12, 14)}
    assert found[3] == (1, 4, False) and found[8] == (7, 9, False) and found[10] == (10, 10, True)
    assert found[12] == (11, 13, True) and found[14] == (14, 14, True)
    assert statement("int x;", 1, "f.c") == (1, 1, False)


TREE = {
    "megafp8/__init__.py": "",
    "megafp8/f.py": "def f(x):\n    if x > 1:\n        return 2\n    return x + 1\n",
    "tests/__init__.py": "",
    "tests/conftest.py": "from hypothesis import settings\nsettings.register_profile('ci')\n",
    "tests/test_f.py": (
        "import subprocess\nimport pytest\nfrom megafp8.f import f\n\n"
        "@pytest.fixture(scope='module')\ndef two():\n    return f(2)\n\n"
        "def test_first(two):\n    assert two == 2\n\n"
        "def test_second(two):\n    assert two\n\n"
        "def test_one():\n    if f(1) != 2:\n        pytest.skip('f is broken')\n\n"
        "def test_process():\n    assert not subprocess.call(['true'])\n\n"
        "@pytest.mark.skip\ndef test_never(): pass\n"
    ),
}


FILE = "tests/test_f.py"
TRIES = """
import json, sys
from dataclasses import astuple
from pathlib import Path
from scripts.mutate.runner import measure, run_tests
tree, log = map(Path, sys.argv[1:])
file, source = tree / "megafp8/f.py", (tree / "megafp8/f.py").read_text()
report = measure(tree, "tests/test_f.py", 60, log)
tests = [f"tests/test_f.py::test_{name}" for name in ("second", "one", "first")]
found = [astuple(run_tests(tree, tests, 60, log))]
for change in ("return 2", "return 0"), ("x + 1", "x - 1"):
    file.write_text(source.replace(*change))
    found.append(astuple(run_tests(tree, tests, 60, log)))
print(json.dumps([report.outcomes, report.lines, report.starting, *found]))
"""


def test_tests_are_chosen_by_line_and_a_skip_is_no_pass(tmp_path: Path) -> None:
    """Lines of a module's fixture count for all tests that use it. A mutant that makes a test skip
    is not decided."""
    pytest.importorskip("coverage", reason="coverage is not installed: pip install coverage")
    for name, text in TREE.items():
        (tmp_path / "tree" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "tree" / name).write_text(text)
    words = [sys.executable, "-c", TRIES, str(tmp_path / "tree"), str(tmp_path / "log")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcomes, lines, starting, sound, changed, skipping = json.loads(done.stdout)
    assert [outcomes[f"{FILE}::test_{name}"] for name in ("one", "never")] == ["passed", "skipped"]
    two = [f"{FILE}::test_{name}" for name in ("first", "second")]
    assert lines["megafp8/f.py"]["3"] == two and starting == [f"{FILE}::test_process"]
    assert lines["megafp8/f.py"]["4"] == [f"{FILE}::test_one"]
    assert sound[0] == "survived" and changed[::2] == ["killed", two[1]]
    assert skipping[::2] == ["error", f"{FILE}::test_one is skipped"]


def test_the_page_counts_by_part_and_leaves_out_what_is_equivalent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tmp_path / "equivalent.json"
    known.write_text(
        '[{"file": "fp8_numerics/gemm.py", "before": "a + b", "after": "a - b", "why": "Unused."}]'
    )
    monkeypatch.setattr(table, "EQUIVALENT", known)
    rows = [
        ROW,
        replace(ROW, key="2", verdict="survived"),
        replace(ROW, key="3", verdict="timeout", file="fp8_numerics/kernels/fp8_cpu.c"),
        replace(ROW, key="4", verdict="survived", file="fp8_numerics/gemm.py"),
        replace(ROW, key="5", verdict="equivalent", file="fp8_numerics/gemm.py"),
    ]
    page = table.page(rows, 7, 200)
    assert "| numerics | 2 | 1 | 1 | 0 |" in page and "| C sources | 0 | 0 | 0 | 1 |" in page
    assert (
        "1 of 2 decided mutants killed, 50.0 %" in page
        and ": 198 are left" in page
        and page.count("(Unused.)") == 2
    )
    planted = tmp_path / "by_hand.json"
    one = {"file": "a.py", "before": "x", "after": "y", "verdict": "killed", "by": "tests/x.py"}
    planted.write_text(
        json.dumps([one, {**one, "after": "z", "verdict": "not noticed", "why": "W"}])
    )
    monkeypatch.setattr(table, "BY_HAND", planted)
    page = table.page(rows, 7, 200)
    assert "Of 2: 1 killed, 1 not noticed." in page and "- `a.py`: `x` → `z` (W)" in page
    assert "`y`" not in page
    known.write_text("[]")  # without its reason, one that was not tried is not decided
    assert "| numerics | 3 | 1 | 2 | 1 |" in table.page(rows, 7, 200)


@pytest.mark.parametrize("calls_itself", [False, True])
def test_c_is_tried_by_the_tests_that_call_it(calls_itself: bool, tmp_path: Path) -> None:
    """Those that run a line with a call, or start processes; all of a file that calls it itself."""
    for name, text in {
        "megafp8/cast.py": "def f():\n    lib.megafp8_decode(1)\n",
        "megafp8/k.c": "int x = 1;\n",
        "tests/test_c.py": "lib.megafp8_decode(2)\n" if calls_itself else "f()\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    names = ("calls", "starts", "neither")
    report = Report(
        dict.fromkeys(names, "passed"),
        dict.fromkeys(names, 1.0),
        {"megafp8/cast.py": {"1": ["neither"], "2": ["calls"]}},
        ["starts"],
    )
    tests = covering.Tests(tmp_path, tmp_path / "kept", lambda file: report)
    mutant = Mutant("megafp8/k.c", 1, "", "", "int x = 2;\n", "int x = 1;\n", "key")
    (found,) = tests.batches(mutant, ["tests/test_c.py"], Counter())
    assert set(found) == (set(names) if calls_itself else {"calls", "starts"})


def test_the_links_of_the_page_lead_from_where_it_is_written() -> None:
    folder = ROOT / "docs" / "evidence"
    assert (folder / "mutation.md").exists()
    links = re.findall(r"\]\(([^)]*)\)", table.page([ROW], 7, 200))
    assert len(links) > 4 and not [link for link in links if not (folder / link).exists()]
