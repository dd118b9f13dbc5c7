"""The notebooks run from their first cell to their last, and their stored outputs are current."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from megafp8.te_cpu import DEFAULT_VERSION
from tests.te_cpu.sources import need_sources

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what each cell printed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(output.output_type == "stream" for cell in cells for output in cell.outputs)
    return ["".join(output.text for output in cell.outputs) for cell in cells]


def test_there_are_two() -> None:
    assert NAMES == ["fp8_by_hand", "te_on_a_laptop"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_outside_of_the_repository(name: str, tmp_path: Path) -> None:
    """An error in a cell fails. Numbers may differ in their last digits on another CPU."""
    if name.startswith("te_"):
        need_sources(DEFAULT_VERSION)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    stored = printed(notebook)
    NotebookClient(
        notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    found = printed(notebook)
    assert [len(text.splitlines()) for text in found] == [len(t.splitlines()) for t in stored]
    for text, before in zip(found, stored, strict=True):
        words, old = text.split(), before.split()
        assert [w for w in words if w.isalpha()] == [w for w in old if w.isalpha()]
