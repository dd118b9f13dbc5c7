"""A sweep, a comparison and a report overwrite no file that this project has not written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.cli import report
from megafp8.cli.compare import main as compare
from megafp8.cli.sweep_results import SweepJob, print_results, result_of
from megafp8.report.page import PAGE_START
from tests.cli.app import Shell
from tests.report.made import make_run


@pytest.mark.parametrize(("name", "text"), [("report.html", "<p>mine"), ("multirun.yaml", "a: 1")])
def test_a_folder_with_such_a_file_is_refused(
    shell: Shell, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / name).write_text(text)
    done = shell("-m", "model.fp8=True,False", "hydra.sweep.dir=here")
    assert done.returncode == 2 and f"a sweep would overwrite {name}" in done.stderr, done.stderr
    assert [path.name for path in (tmp_path / "here").iterdir()] == [name]
    assert (tmp_path / "here" / name).read_text() == text


def test_a_job_does_not_overwrite_another_programs_result(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "here" / "0").mkdir(parents=True)
    mine = tmp_path / "here" / "0" / "job.json"
    mine.write_text('{"mine": 1}')
    done = shell("-m", "model.fp8=True,False", "hydra.sweep.dir=here")
    assert done.returncode == 2 and "no sweep of megafp8 has written this file" in done.stdout
    assert mine.read_text() == '{"mine": 1}'
    rows = json.loads((tmp_path / "here" / "sweep.json").read_text())
    assert [row["outcome"] for row in rows] == ["refused", "finished"]
    again = shell("-m", "model.fp8=True,False", "hydra.sweep.dir=here")
    assert again.returncode == 2 and mine.read_text() == '{"mine": 1}'


def test_the_page_of_a_repeated_sweep_is_not_written_again(tmp_path: Path) -> None:
    make_run(tmp_path / "0")
    results = [result_of(SweepJob(0, ("model.fp8=True",), tmp_path / "0"), 0)]
    assert print_results(results, tmp_path) == 0
    page = tmp_path / "report.html"
    page.write_text(PAGE_START + "of another minute")
    before = (tmp_path / "sweep.json").stat().st_mtime_ns
    assert print_results(results, tmp_path) == 0
    assert page.read_text() == PAGE_START + "of another minute"
    assert (tmp_path / "sweep.json").stat().st_mtime_ns == before


def test_reports_and_comparisons_leave_such_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name)
    page = tmp_path / "report.html"
    page.write_text("<p>mine")
    assert report.main([str(tmp_path)]) == 2
    assert f"{page} is not a report of megafp8" in capsys.readouterr().err
    assert compare(["model.fp8=True", "--out", str(tmp_path)]) == 2
    assert f"{page} is not a report of megafp8" in capsys.readouterr().err
    assert page.read_text() == "<p>mine"
    page.unlink()
    assert report.main([str(tmp_path)]) == 0 and page.read_text().startswith(PAGE_START)
    assert report.main([str(tmp_path)]) == 0
