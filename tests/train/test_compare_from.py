"""`megafp8 compare --from` continues a run's checkpoint, and leaves the run as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megafp8.cli import compare
from megafp8.config.load import Source
from megafp8.jobs import processes
from megafp8.jobs.job import Job
from megafp8.jobs.starts import SET_BY_START, Start
from tests.train.runs import Place

NUMBERS = ("step", "loss", "lr", "grad_norm")


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def trained(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """A run of six steps; return the jobs that the command has run."""
    done = place.run("trainer.max_steps=6", "exp_manager.name=whole")
    assert done.code == 0, done.output
    monkeypatch.chdir(place.cwd)
    jobs: list[Job] = []

    def run(job: Job, signals: object, *, quiet: bool) -> int:
        jobs.append(job)
        if job.directory.exists():
            return 0
        where = f"exp_manager.explicit_log_dir={job.directory.absolute()}"
        done = place.run(*job.overrides, where, "exp_manager.name=null")
        print(done.output)
        return done.code

    monkeypatch.setattr(processes, "_run", run)
    return jobs


def test_variants_continue_a_checkpoint(
    trained: list[Job], place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(place.dir("whole"))
    argv = ["--from", "runs/whole@2", "--steps", "2", "--out", "out", "--each-layer", "--alone"]
    assert compare.main(argv) in (0, compare.WORSE, compare.UNDECIDED)
    assert content(place.dir("whole")) == before
    said = capsys.readouterr().out
    labels = ["baseline", "given", *(f"{w}-layers.{n}" for w in ("high", "only") for n in (0, 1))]
    assert [job.label for job in trained] == labels
    assert "steps 3 to 4" in said and "a tensor that leaves FP8 drops its own" in said
    assert said.count("starting from") == len(labels)

    def of(label: str, file: str) -> str:
        return Path(f"out/{label}-whole@2/{file}").read_text()

    def numbers(rows: list[dict[str, float]]) -> list[list[float]]:
        return [
            [row[key] for key in NUMBERS] for row in rows if "loss" in row and 2 < row["step"] < 5
        ]

    own = [json.loads(line) for line in of("given", "metrics.jsonl").splitlines()]
    whole = numbers(place.metrics("whole"))
    assert numbers(own) == whole and len(whole) == 2, "the run goes on as it did"
    share = {
        label: json.loads(of(label, "summary.json")).get("fp8_share_of_gemm_flops") or 0.0
        for label in labels
    }
    assert share["baseline"] == 0 < share["given"]
    for label in labels[2:]:
        assert share[label] == pytest.approx(share["given"] / 2)
    (first, _) = json.loads(Path("out/compare.json").read_text())["parts"]
    entry = f"{{from: 2, modules: ['{first['part']}'], recipe: high_precision}}"
    assert first["setting"] == f"model.precision_schedule=[{entry}]"
    assert list(first["figures"]["gaps"]) == ["whole@2"]
    assert "one checkpoint cannot tell a gain from chance" in said

    # The run goes on meanwhile and deletes the checkpoint; a further one is compared besides.
    shutil.rmtree(place.checkpoint(2, "whole"))
    trained.clear()
    argv[1:2] = ["out/starts/whole@2", "runs/whole@4"]
    assert compare.main(argv) in (0, compare.WORSE, compare.UNDECIDED)
    said = capsys.readouterr().out
    assert said.count("starting from") == len(labels) and len(trained) == 2 * len(labels)
    assert "(95 %, 2 checkpoints)" in said


def test_each_run_continues_the_checkpoint_of_its_start(tmp_path: Path) -> None:
    pairs: list[Any] = []
    for step in (2, 4):
        checkpoint = tmp_path / f"whole/checkpoints/step_{step:08}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(str(step))
        start = Start(checkpoint, step, 6, {})
        both = [Mock(label=label, overrides=()) for label in ("baseline", "given")]
        pairs.append((start.name, Mock(start=start, configurations=both), Source()))
    (tmp_path / "whole/config.yaml").touch()
    jobs = compare._jobs(pairs, tmp_path / "out")
    assert [job.seed for job in jobs] == ["whole@2"] * 2 + ["whole@4"] * 2
    for job in jobs:
        home = f"{tmp_path}/out/starts/{job.seed}"
        states = {word.partition("=")[2] for word in job.overrides if "resume_from" in word}
        assert states == {f"'{home}/checkpoints/step_0000000{str(job.seed)[-1]}'"}
        assert f"--config-dir={home}" in job.overrides


@pytest.mark.parametrize("key", [*SET_BY_START, "model.seed"])
def test_where_a_run_begins_and_ends_is_not_given_besides(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--from", "runs/gone@2", "--steps", "2", f"{key}=7"]) == 2
    assert f"{key} (command line): has no effect with --from" in capsys.readouterr().err


def test_a_comparison_leaves_the_page_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in ("config.yaml", "run.json", "metrics.jsonl"):
        (tmp_path / file).touch()
    assert compare.main(["model.fp8=True", "--out", str(tmp_path)]) == 2
    assert "has a run, whose page a comparison would overwrite" in capsys.readouterr().err


def test_a_product_leaves_fp8(trained: list[Job]) -> None:
    argv = ["--from", "runs/whole@4", "--each", "product", "--alone", "--out", "out"]
    assert compare.main(argv) in (0, compare.WORSE, compare.UNDECIDED)
    shares = [
        json.loads(Path(f"{job.directory}/summary.json").read_text())["fp8_share_of_gemm_flops"]
        for job in trained[1:]
    ]
    given, *parts = shares
    high, alone = parts[:3], parts[3:]
    assert [a + b for a, b in zip(high, alone, strict=True)] == pytest.approx([given] * 3)
    assert sum(alone) == pytest.approx(given) and min(alone) > 0


def test_what_from_refuses(
    trained: list[Job], place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ("model.fp8=False", "model.fp8_amax_history_len=1024")  # the default, as without it
    assert place.run("trainer.max_steps=2", "exp_manager.name=plain", *plain).code == 0
    wider = ("trainer.max_steps=2", "exp_manager.name=wider", "model.ffn_hidden_size=192")
    assert place.run(*wider).code == 0
    shutil.copytree("runs/whole", "again/whole")
    for argv, words in (
        (["--from", "runs/whole@3"], "has no checkpoint of step 3. It has those of 2, 4, 6"),
        (["--from", "runs/whole"], "trained the 6 steps of its job, so that none is left"),
        (["--from", "runs/gone@2"], "runs/gone: has no checkpoint"),
        (["--from", "runs/plain", "--steps", "2"], "has model.fp8=False"),
        (["--from", "runs/whole@2", "--seeds", "1"], "--seeds (command line): has no effect with"),
        (["--from", "runs/whole@2", "--base", "model.fp8=True"], "--base (command line)"),
        (["--from", "runs/whole@2", "runs/whole@2"], "names a checkpoint twice"),
        (
            ["--from", "runs/whole@2", "runs/whole/checkpoints/step_00000002"],
            "names a checkpoint twice",
        ),
        (["--from", "runs/whole@2", "again/whole@2"], "is the name of two checkpoints"),
        (["--from", "runs/whole@2", "--out", "runs/whole"], "runs/whole: has a run, whose page"),
        (
            ["--steps", "2", "--from", "runs/whole@2", "runs/wider"],
            "model.ffn_hidden_size=192, and",
        ),
        (["model.fp8=True", "--steps", "2"], "has no effect without --from"),
        (["model.fp8_margin=0,1", "--from", "runs/whole@2"], "Give each setting one value"),
    ):
        assert compare.main(argv) == 2 and not trained
        assert words in capsys.readouterr().err, argv
    assert compare.main(["--from", "runs/whole@4", "--out", "out"]) in (0, 5, 6)
    kept = Path("out/starts/whole@4/checkpoints/step_00000004/manifest.json")
    kept.unlink()  # it is a link
    kept.write_text("of another run")
    assert compare.main(["--from", "runs/whole@4", "--out", "out"]) == 2
    assert "Give another --out" in capsys.readouterr().err
