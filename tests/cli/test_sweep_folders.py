"""No command overwrites or deletes a file or a folder that this project has not written."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megafp8.cli import plan, preprocess, report
from megafp8.cli.compare import main as compare
from megafp8.cli.main import run_app
from megafp8.data.tokenize import byte_tokenizer
from megafp8.errors import RunError
from megafp8.files import whole_folder
from megafp8.jobs.job import Job, Result, result_of
from megafp8.jobs.results import print_results, with_baseline
from megafp8.report.page import PAGE_START
from megafp8.runs.place import check_place
from tests.cli.app import Shell
from tests.config.helpers import run_spec
from tests.foreign.fuzz import limited
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
    results = [result_of(Job(0, ("model.fp8=True",), tmp_path / "0"), 0)]
    assert print_results(results, tmp_path) == 0
    page = tmp_path / "report.html"
    page.write_text(PAGE_START + "of another minute")
    before = (tmp_path / "sweep.json").stat().st_mtime_ns
    assert print_results(results, tmp_path) == 0
    assert page.read_text() == PAGE_START + "of another minute"
    assert (tmp_path / "sweep.json").stat().st_mtime_ns == before


def swept(folder: Path, jobs: list[dict[str, Any]], losses: list[float]) -> list[Result]:
    """Runs of a sweep over settings, of which those of the default job are in `DEFAULTS`."""
    results = []
    for num, (settings, loss) in enumerate(zip(jobs, losses, strict=True)):
        path = make_run(folder / str(num), **{k.replace(".", "__"): v for k, v in settings.items()})
        changed = [{"key": k, "value": v} for k, v in settings.items() if v != DEFAULTS[k]]
        start = {"kind": "start", "settings": {"non_default": changed}}
        (path / "events.jsonl").write_text(json.dumps(start) + "\n")
        overrides = tuple(f"{key}={value}" for key, value in settings.items())
        results.append(replace(result_of(Job(num, overrides, path), 0), val_loss=loss))
    return results


DEFAULTS = {"model.fp8": False, "model.fp8_recipe": "delayed", "model.optim_lr": 1e-3}
RECIPES = ["tensorwise", "delayed", "mxfp8"]


@pytest.mark.parametrize(
    ("jobs", "named", "baseline"),
    [
        ([{"model.fp8": on} for on in (True, False)], None, 1),
        ([{"model.fp8": True, "model.fp8_recipe": name} for name in RECIPES], None, 1),
        ([{"model.fp8": True, "model.fp8_recipe": name} for name in RECIPES], 2, 2),
        ([{"model.fp8": on, "model.optim_lr": lr} for on in (True, False) for lr in (1e-3, 2e-3)],
         None, None),
        ([{"model.fp8": True, "model.optim_lr": lr} for lr in (2e-3, 4e-3)], None, None),
    ],
    ids=["without FP8", "default values", "named", "two without FP8", "none"],
)  # fmt: skip
def test_losses_stand_beside_the_baselines(
    jobs: list[dict[str, Any]], named: int | None, baseline: int | None, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    losses = [2.0, 2.5, 2.2, 2.1][: len(jobs)]
    results = with_baseline(swept(tmp_path, jobs, losses), tmp_path, named)
    assert [r.is_baseline for r in results] == [r.job == baseline for r in results]
    print_results(results, tmp_path)
    said, page = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    assert (
        ("no job is the baseline" in said)
        == (baseline is None)
        == ("name a job by its number with --baseline JOB" in page)
    )
    for job, loss in enumerate(losses):
        (row,) = re.findall(rf"^{job} .*", said, re.MULTILINE)
        if baseline is not None:
            gap = f"{100 * (loss / losses[baseline] - 1):+.2f} %"
            words = "baseline" if job == baseline else gap
            assert f"  {words}" in row and f">{words}<" in page, row
    assert report.main([str(tmp_path)]) == 0, "the page that is made later has the same"
    later = (tmp_path / "report.html").read_text()
    assert later.count(">baseline<") == (baseline is not None)


def test_a_baseline_is_named_in_a_sweep_alone(shell: Shell) -> None:
    done = shell("model.fp8=True", "--baseline", "1")
    assert done.returncode == 2 and "Add -m, or leave it out" in done.stderr, done.stderr
    done = shell("-m", "model.fp8=True,False", "--baseline", "-1")
    assert done.returncode == 2 and "the number of a job, from 0" in done.stderr, done.stderr


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


# --- every command that writes to a path of a user's ----------------------------------------------


def run_place(folder: Path) -> int:
    try:
        check_place(run_spec(f"exp_manager.explicit_log_dir={folder}").observe)
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def folder_for_a_model(folder: Path) -> int:
    """Begin to write a folder as `export` and `import` do."""
    try:
        with whole_folder(folder, last="config.json"):
            pass
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def sweep() -> int:
    return run_app(["-m", "model.seed=1,2", "hydra.sweep.dir=out"], lambda cfg, info: 0)


PREPARE = ["text.txt", "--output", "out/o", "--tokenizer", "bytes", "--workers", "0"]
DOORS: dict[str, tuple[Sequence[str], Callable[[], int]]] = {
    "report --output": (["out/x"], lambda: report.main(["made", "--output", "out/x"])),
    "report": (["made/report.html"], lambda: report.main(["made"])),
    "plan --page": (["out/x"], lambda: plan.main(["--page", "out/x"])),
    "export, import": (["out/x"], lambda: folder_for_a_model(Path("out/x"))),
    "sweep": (
        ["out/sweep.json", "out/multirun.yaml", "out/report.html", "out/optimization_results.yaml"],
        sweep,
    ),
    "job of a sweep": (["out/0/job.json"], sweep),
    "run": (["out/metrics.jsonl", "out/config.yaml"], lambda: run_place(Path("out"))),
    **{
        f"compare, {name}": ([f"out/{name}"], lambda: compare(["model.fp8=True", "--out", "out"]))
        for name in ("compare.json", "compare-input.json", "report.html", ".lock")
    },
    **{
        f"preprocess, {name}": ([f"out/o{name}"], lambda: preprocess.main(PREPARE))
        for name in (".bin", ".idx", ".dataset.json", ".tokenizer.json", ".partial")
    },
}  # fmt: skip


OF_A_MODEL = ["model/tokenizer.json" if word == "bytes" else word for word in PREPARE]
DOORS["preprocess, .tokenizer"] = (["out/o.tokenizer"], lambda: preprocess.main(OF_A_MODEL))


def a_file(path: Path) -> None:
    path.write_text("[1]")
    path.chmod(0o444)


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "tokens").write_text("mine")


KINDS: dict[str, Callable[[Path], None]] = {
    "file": a_file,
    "folder": a_folder,
    "link": lambda path: path.symlink_to(Path("elsewhere").absolute()),
    "dangling link": lambda path: path.symlink_to(Path("nowhere").absolute()),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("door", DOORS)
def test_no_command_overwrites_what_is_not_ours(
    door: str,
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("made"))
    Path("text.txt").write_text("a text")
    Path("elsewhere").write_text("{}")
    Path("model").mkdir()
    byte_tokenizer().save(Path("model/tokenizer.json"))
    Path("model/tokenizer_config.json").write_text("{}")
    names, command = DOORS[door]
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        KINDS[kind](Path(name))
    before = tree_of(tmp_path)
    with limited():
        assert command() == 2
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert all(Path(name).name in text for name in names) and "Traceback" not in text, text
    after = tree_of(tmp_path)
    assert {path: after.get(path) for path in before} == before
    if door not in ("job of a sweep", "compare, .lock"):
        assert before == after, "nothing is left behind by a command that is refused"


def tree_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Return the kind, the permissions and the content or target of all that is in a folder."""
    return {
        str(path): (
            path.lstat().st_mode,
            os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else "",
        )
        for path in folder.rglob("*")
    }
