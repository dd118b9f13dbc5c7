"""A finished run, and a finished job of a sweep, that is started again keeps every byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from megafp8.observe.summary import RunSummary
from megafp8.runs.finished import with_recorded
from tests.train.runs import JOB, ROOT, Place


def bytes_of(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the hash and the time of change of each file below a folder, by its path."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, driver, dataset) -> Place:  # type: ignore[no-untyped-def]
    place = Place(driver, dataset, tmp_path_factory.mktemp("finished"))
    done = place.run("trainer.max_steps=4", "exp_manager.create_tensorboard_logger=True")
    assert done.code == 0, done.output
    return place


SAME = ("trainer.max_steps=4", "exp_manager.create_tensorboard_logger=True")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "step 4 of 4: nothing is left to do. Its recorded summary"),
        (("trainer.max_steps=2",), "step 4 of 2: nothing is left to do"),
        (("trainer.val_check_interval=2",), "no effect: trainer.val_check_interval 4 to 2"),
    ],
)
def test_no_file_of_a_finished_run_is_touched(
    finished: Place, more: tuple[str, ...], said: str
) -> None:
    before = bytes_of(finished.dir())
    given = {word.partition("=")[0] for word in more}
    same = [word for word in SAME if word.partition("=")[0] not in given]
    done = finished.run(*same, *more)
    assert done.code == 0 and said in done.output, done.output
    summary = finished.summary()
    assert f"{summary['train_loss']:.4f}" in done.output
    assert f"{summary['val_loss']:.4f} nats per token" in done.output
    assert "continuing after" not in done.output and "a sample" not in done.output
    assert bytes_of(finished.dir()) == before


def test_other_settings_are_still_refused(finished: Place) -> None:
    before = bytes_of(finished.dir())
    done = finished.run(*SAME, "model.seed=7")
    assert done.code == 2 and "model.seed=7" in done.output, done.output
    assert bytes_of(finished.dir()) == before


def test_a_finished_run_without_its_checkpoints_is_not_trained_again(place: Place) -> None:
    assert place.run("trainer.max_steps=2").code == 0
    for path in sorted((place.dir() / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    before = bytes_of(place.dir())
    done = place.run("trainer.max_steps=2")
    assert done.code == 0 and "nothing is left to do" in done.output, done.output
    assert bytes_of(place.dir()) == before


def test_a_run_that_goes_on_is_not_finished_any_more(place: Place) -> None:
    assert place.run("trainer.max_steps=2").code == 0 and place.status() == "finished"
    assert place.run("trainer.max_steps=4", fault=["killed_before", "summarize"]).code == -9
    assert place.status() == "running"
    done = place.run("trainer.max_steps=2")  # the recorded summary is of step 2, the run at step 4
    assert done.code == 0 and place.summary()["step"] == 4, done.output


def test_a_stopped_run_that_is_then_shortened_keeps_its_figures(place: Place) -> None:
    """It has a step less than it was to have, so that only its end is missing."""
    assert place.run(fault=["signalled", 15, 3]).code == 75
    before = place.summary()
    done = place.run(f"trainer.max_steps={before['step']}")
    after = place.summary()
    assert done.code == 0 and after["status"] == "finished", done.output
    assert after["val_loss"] is not None
    kept = ("train_loss", "train_loss_steps", "loss_curve", "health", "tokens_per_second")
    kept = (*kept, "wall_seconds", "gemm_flops", "fp8_share_of_gemm_flops", "peak_memory_bytes")
    assert before["train_loss"] is not None
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def test_a_repeated_sweep_reads_what_its_jobs_recorded(place: Place) -> None:
    job = [word for word in JOB if "max_steps" not in word and "model.fp8=" not in word]
    given = [
        "-m",
        "model.fp8=True,False",
        "trainer.max_steps=2",
        f"model.data.data_prefix={place.data}",
    ]
    command = [str(ROOT / "pretrain_gpt.py"), *given, *job, "hydra.sweep.dir=again"]
    command = [word for word in command if "amax_history" not in word]
    tables = []
    for _ in range(2):
        done = place.driver.run_python(*command, cwd=place.cwd, folder=place.cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        tables.append(
            (done.stdout[done.stdout.index("[sweep] 2 jobs in") :], bytes_of_sweep(place.cwd))
        )
    assert tables[0] == tables[1]
    assert "train loss" in tables[1][0] and "tokens/s" in tables[1][0]
    assert done.stdout.count("finished before") == 2 and "step " not in done.stderr
    rows = json.loads((place.cwd / "again" / "sweep.json").read_text())
    assert all(row["train_loss"] for row in rows)


def bytes_of_sweep(folder: Path) -> dict[str, str]:
    return {name: content for name, (content, _) in bytes_of(folder / "again").items()}


def test_a_summary_is_read_as_it_was_written() -> None:
    whole = RunSummary(
        status="finished", step=2, total_steps=2, log_dir="runs/x", train_loss=1.5, mfu_full=0.25,
        val_loss=float("inf"), health="ok", extra={"gemm_flops": {"fp8 qkv": 3}},
    )  # fmt: skip
    again = RunSummary.from_dict({**whole.to_dict(), "val_loss": "Infinity", "wall_seconds": 2})
    assert again.to_dict() == {**whole.to_dict(), "wall_seconds": 2.0}
    for damage in ({"step": "2"}, {"train_loss": [1]}, {"status": None}, {"mfu_full": True}):
        with pytest.raises(ValueError, match=next(iter(damage))):
            RunSummary.from_dict({**whole.to_dict(), **damage})
    with pytest.raises(ValueError, match="step is missing"):
        RunSummary.from_dict({k: v for k, v in whole.to_dict().items() if k != "step"})
    later = RunSummary(status="finished", step=3, total_steps=3, log_dir="runs/x")
    assert with_recorded(later, whole) is later and with_recorded(later, None) is later
