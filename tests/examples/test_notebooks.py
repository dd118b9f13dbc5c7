"""The notebooks run from their first cell to their last, and their stored outputs are current."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from megafp8.specs.te_versions import DEFAULT_VERSION
from tests.te_sources import need_sources
from tests.train.runs import Driver

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what each cell printed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(output.output_type == "stream" for cell in cells for output in cell.outputs)
    return ["".join(output.text for output in cell.outputs) for cell in cells]


def test_there_are_two() -> None:
    assert NAMES == ["fp8_by_hand", "te_on_a_laptop"]


def compare(found: Sequence[str], stored: Sequence[str]) -> None:
    """Numbers may differ in their last digits on another CPU; words and lines may not."""
    assert [len(text.splitlines()) for text in found] == [len(t.splitlines()) for t in stored]
    for text, before in zip(found, stored, strict=True):
        words, old = text.split(), before.split()
        assert [w for w in words if w.isalpha()] == [w for w in old if w.isalpha()]


CELLS = """\
import json, sys
names = {"__name__": "__main__"}
for cell in json.loads(open(sys.argv[1]).read()):
    exec(compile(cell, "a cell", "exec"), names)
    print("\\0", end="", flush=True)
"""


@pytest.mark.parametrize("name", NAMES)
def test_the_cells_of_a_notebook_run(name: str, driver: Driver, tmp_path: Path) -> None:
    """They run outside of the repository, one after the other; an error in a cell fails."""
    if name.startswith("te_"):
        need_sources(DEFAULT_VERSION)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    words = ("-c", CELLS, "cells.json")
    done = driver.run_python(*words, cwd=tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    *found, nothing = done.stdout.split("\0")
    assert nothing == ""
    compare(found, printed(notebook))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_in_jupyters_kernel(name: str, tmp_path: Path) -> None:
    if name.startswith("te_"):
        need_sources(DEFAULT_VERSION)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    stored = printed(notebook)
    NotebookClient(
        notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    compare(printed(notebook), stored)
