"""Tests of which run the same command continues, and which flags may change."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megafp8.config.load import load
from megafp8.runs.same_data import describe_fingerprints
from tests.train.runs import (
    ROOT,
    STEPS,
    TWO_RANKS,
    Child,
    Done,
    Place,
    assert_same,
    make_dataset,
    wait_until,
)

EVERY = "exp_manager.checkpoint_callback_params.every_n_train_steps"
UNNAMED = "exp_manager.name=null"


def stopped_at(place: Place, step: int, *more: str) -> Done:
    done = place.run(*more, fault=["signalled", int(signal.SIGTERM), step])
    assert done.code == 75, done.output
    return done


def losses(place: Place) -> list[float]:
    return [row["loss"] for row in place.metrics() if "lr" in row]


@pytest.mark.parametrize(
    "flags",
    [
        [
            "trainer.val_check_interval=3",
            f"{EVERY}=5",
            "exp_manager.create_tensorboard_logger=True",
        ],
        ["model.micro_batch_size=4"],
        ["model.micro_batch_size=1", "trainer.nonfinite_policy=skip"],
    ],
)
def test_logging_layout_and_policy_continue(
    place: Place, undisturbed: tuple[Place, Done], flags: list[str]
) -> None:
    stopped_at(place, 6)
    done = place.run(*flags)
    assert done.code == 0, done.output
    assert "continues run job" in done.first_line
    assert "continuing from runs/job/checkpoints/step_00000006" in done.output
    mine, theirs = losses(place), losses(undisturbed[0])
    assert mine == pytest.approx(theirs, rel=1e-2) and mine[:6] == theirs[:6]
    if "model.micro_batch_size" not in flags[0]:
        assert mine == theirs


def test_other_log_steps_continue(place: Place, undisturbed: tuple[Place, Done]) -> None:
    stopped_at(place, 6)
    assert place.run("trainer.log_every_n_steps=5").code == 0
    rows = [row for row in place.metrics() if "lr" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 10, STEPS]
    assert [row["loss"] for row in rows[-2:]] == [losses(undisturbed[0])[n] for n in (9, -1)]


def test_first_and_last_steps_are_logged(place: Place, undisturbed: tuple[Place, Done]) -> None:
    """Files have the run's first and last steps; the screen also has each process's first step."""
    flags = ["trainer.log_every_n_steps=5", "model.fp8_health=scales"]
    stopped_at(place, 6, *flags)
    done = place.run(*flags)
    assert done.code == 0, done.output
    rows = [row for row in place.metrics() if "lr" in row]
    assert [row["step"] for row in rows] == [1, 5, 10, STEPS]
    assert [row["loss"] for row in rows] == [losses(undisturbed[0])[n] for n in (0, 4, 9, -1)]
    health = (place.dir() / "health.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in health] == [1, 5, 10, STEPS]
    shown = re.findall(r"^step +(\d+)/\d+ \| loss .* \| ETA \d+:\d\d$", done.output, re.MULTILINE)
    assert shown == ["7", "10", str(STEPS)]


def test_a_run_shorter_than_a_log_interval_shows_its_loss(place: Place) -> None:
    done = place.run("trainer.log_every_n_steps=50", "trainer.max_steps=2")
    assert done.code == 0 and "training loss" in done.output
    assert [row["step"] for row in place.metrics() if "lr" in row] == [1, 2]


def test_a_finished_run_is_prolonged(place: Place) -> None:
    assert place.run("trainer.max_steps=4").code == 0
    done = place.run("trainer.max_steps=6")
    assert done.code == 0 and "continuing after step 4 of 6" in done.output
    assert place.steps() == [2, 4, 6] and place.status() == "finished"
    assert [row["step"] for row in place.metrics() if "lr" in row] == [1, 2, 3, 4, 5, 6]
    # The run has ended: only the whole validation is repeated and reported, once.
    lines = place.metrics()
    done = place.run("trainer.max_steps=6")
    assert done.code == 0 and "nothing is left to do" in done.output
    assert place.metrics() == lines


@pytest.mark.parametrize(
    "flag",
    [
        "model.hidden_size=128",
        "model.optim.lr=0.5",
        "model.seed=7",
        "model.fp8_e4m3=True",
        "model.global_batch_size=8",
        "model.data.splits_string=[800,150,50]",
    ],
)
def test_model_data_and_optimizer_may_not_differ(place: Place, flag: str) -> None:
    stopped_at(place, 2)
    before = (place.dir() / "config.yaml").read_bytes()
    done = place.run(flag)
    assert done.code == 2, done.output
    key = flag.partition("=")[0]
    assert done.output.startswith("error: ") and f"{key}=" in done.output
    assert "the run runs/job was made with" in done.output
    assert "to continue it, or another exp_manager.name" in done.output
    assert "Traceback" not in done.output
    assert (place.dir() / "config.yaml").read_bytes() == before
    assert place.steps() == [2]


def test_other_data_under_the_same_name(place: Place, tmp_path: Path) -> None:
    mine = replace(place, data=make_dataset(tmp_path / "mine"))
    stopped_at(mine, 2)
    make_dataset(tmp_path / "mine", seed=1)
    done = mine.run()
    assert done.code == 2, done.output
    assert "was trained on other data" in done.output and "model.data.data_prefix" in done.output
    assert "Traceback" not in done.output


def test_a_dataset_may_move(place: Place, tmp_path: Path) -> None:
    """The fingerprint of the content is compared, not the folder; the name is compared too."""
    stopped_at(replace(place, data=make_dataset(tmp_path / "mine")), 2)
    (tmp_path / "there").mkdir()
    for name in ("there/mine", "there/other"):
        make_dataset(tmp_path / name)
    done = replace(place, data=tmp_path / "there" / "other").run()
    assert done.code == 2 and f"Give model.data.data_prefix={tmp_path / 'mine'} to" in done.output
    done = replace(place, data=tmp_path / "there" / "mine").run()
    assert done.code == 0 and "continuing from" in done.output, done.output


def test_a_missing_dataset_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", str(ROOT / "pretrain_gpt.py")]
    command.append("model.data.data_prefix=[0.3,nofile,0.7,builtin]")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "error: nofile.idx: file: cannot be read" in done.stderr
    assert "megafp8.config.resolve\n" in done.stderr and " torch\n" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_setting_of_several_ranks_moves_to_one_and_back(place: Place) -> None:
    """From two ranks to one and back: never silently with another value than the last one."""
    two, dtype = "trainer.devices=2", "model.optim.grad_sync_dtype"

    def recorded(step: int) -> tuple[str, dict[str, object]]:
        manifest = json.loads((place.checkpoint(step) / "manifest.json").read_text())
        meta = manifest["meta"]
        return meta["config"]["model"]["optim"]["grad_sync_dtype"], meta["last_in_effect"]

    stop = ["signalled", int(signal.SIGTERM)]
    done = place.run(two, f"{dtype}=bf16", fault=["in_rank", 1, *stop, 2])
    assert done.code == 75 and recorded(2) == ("bf16", {}), done.output
    done = place.run(f"{dtype}=bf16")
    assert done.code == 2 and f"{dtype}=bf16" in done.output and "has no effect" in done.output
    for step in (4, 6):
        done = place.run(fault=[*stop, step])
        assert done.code == 75 and f"continuing after step {step - 2}" in done.output, done.output
        config, earlier = recorded(step)
        assert config == "fp32" and earlier[dtype] == "bf16"
    done = place.run(two)
    assert done.code == 2 and place.steps()[-1] == 6, done.output
    assert f"Give {dtype}=bf16 to continue it" in done.output and "Traceback" not in done.output
    started = ["exp_manager.name=other", f"model.resume_from_checkpoint={place.checkpoint(6)}"]
    done = place.run(two, *started)
    assert done.code == 2 and f"Set {dtype}=bf16, or use" in done.output, done.output
    done = place.run(two, f"{dtype}=bf16")
    assert done.code == 0 and "continuing after step 6 of 12" in done.output, done.output
    assert recorded(STEPS) == ("bf16", {}) and "dp all_reduce_sum bfloat16" in str(place.summary())


@pytest.mark.parametrize("stopped", [False, True], ids=["new", "continued"])
def test_a_rank_with_a_copy_of_other_data(place: Place, tmp_path: Path, stopped: bool) -> None:
    """All ranks leave with one message that names the ranks, whether the run is new or not."""
    two = "trainer.devices=2"
    if stopped:
        first = place.run(two, fault=["in_rank", 0, "signalled", int(signal.SIGTERM), 2])
        assert first.code == 75, first.output
    older = make_dataset(tmp_path / "older", seed=1)
    done = place.run(two, fault=["in_rank", 1, "reads_other_data", str(older)])
    assert done.code == 2, done.output
    (line,) = [line for line in done.output.splitlines() if "different data" in line]
    assert line.startswith(f"error: model.data.data_prefix={place.data}: ranks have"), line
    host = re.escape(socket.gethostname())
    values = re.findall(rf"fingerprint (\S+) has rank (\d) on {host}", line)
    assert [rank for _, rank in values] == ["0", "1"] and values[0][0] != values[1][0]
    assert "Give every host the same files" in line
    assert "Traceback" not in done.output and "died" not in done.output, done.output
    assert place.dir().exists() == stopped, "a new run that was refused leaves no directory"


def test_a_rank_without_data(place: Place, tmp_path: Path) -> None:
    """The others do not wait for it, and the message says on which rank and host it failed."""
    fault = ["in_rank", 1, "reads_other_data", str(tmp_path / "none")]
    done = place.run("trainer.devices=2", fault=fault)
    assert done.code == 2, done.output
    (line,) = [line for line in done.output.splitlines() if str(tmp_path / "none") in line]
    assert line.startswith(f"error: rank 1 on {socket.gethostname()}: {tmp_path / 'none'}"), line
    assert "Traceback" not in done.output and "died" not in done.output, done.output


def test_ranks_by_their_data() -> None:
    """A large job's message stays short."""
    found = [(f"n{rank // 8}", "a" * 64) for rank in range(64)]
    found[8:16] = [("n1", "b" * 64)] * 8
    found[20] = ("n2", "b" * 64)
    assert describe_fingerprints(found) == (
        "fingerprint aaaaaaaaaaaaaaaaaaaa has ranks 0 to 7 on n0, ranks 16, 17, 18, 19, 21, 22, 23 "
        "on n2, ranks 24 to 31 on n3, ranks 32 to 39 on n4 and 3 more hosts; "
        "fingerprint bbbbbbbbbbbbbbbbbbbb has ranks 8 to 15 on n1, rank 20 on n2"
    )


def test_a_tracker_that_breaks_when_a_run_continues_ends_no_run(place: Place) -> None:
    """A job that is started again while Weights & Biases is down trains on."""
    given = "exp_manager.create_wandb_logger=True"
    fault = ["broken_wandb", "Invalid project name: init broke"]
    first = place.run("trainer.max_steps=4")
    assert first.code == 0
    done = place.run(given, fault=fault)
    assert done.code == 0, done.output
    said = "Weights & Biases failed (RuntimeError: Invalid project name: init broke)"
    assert f"warning: {said}; training continues without it" in done.output
    assert place.summary()["trackers_failed"] == said and place.steps()[-1] == STEPS
    assert place.summary()["wandb"] is None and said in done.output.rpartition("status")[2]
    required = "exp_manager.wandb_logger_kwargs.must_start=True"
    done = place.run(given, required, f"trainer.max_steps={STEPS + 2}", fault=fault)
    assert done.code == 2 and "create_wandb_logger=True: Weights & Biases" in done.output
    assert place.steps()[-1] == STEPS


def test_resume_if_exists_off(place: Place) -> None:
    stopped_at(place, 2)
    done = place.run("exp_manager.resume_if_exists=False")
    assert done.code == 2 and "has a run already" in done.output
    assert "Traceback" not in done.output


# ---- without a name


def names(place: Place) -> list[str]:
    return sorted(path.name for path in (place.cwd / "runs").iterdir())


@pytest.mark.parametrize("ranks", [[], TWO_RANKS], ids=["one rank", "two ranks"])
def test_names_that_look_like_numbers_are_names_of_their_own(
    place: Place, ranks: list[str]
) -> None:
    """The second command continued the first one's run, and trained nothing."""
    for name in ("3.10", "3.1", "12e5"):
        done = place.run(f"exp_manager.name={name}", "trainer.max_steps=2", *ranks)
        assert done.code == 0 and f"runs/{name}: new run {name}" in done.output, done.output
    assert names(place) == ["12e5", "3.1", "3.10"]
    command = place.summary("3.10")["continue_command"]
    assert "--config-dir runs/3.10 --config-name config " in command
    assert load([], place.cwd / "runs/3.10", "config")["exp_manager.name"] == "3.10"


def test_the_newest_unfinished_one_is_continued(
    place: Place, undisturbed: tuple[Place, Done]
) -> None:
    first = stopped_at(place, 3, UNNAMED)
    (one,) = names(place)
    assert first.first_line == f"runs/{one}: new run {one}"
    other = stopped_at(place, 2, UNNAMED, "model.seed=5")  # another configuration
    (two,) = set(names(place)) - {one}
    assert other.first_line == f"runs/{two}: new run {two}"

    done = place.run(UNNAMED)
    assert done.code == 0
    assert done.first_line == (
        f"runs/{one}: continues run {one}: the newest unfinished run with the same settings"
    )
    assert len(names(place)) == 2 and place.status(one) == "finished"
    mine = [row["loss"] for row in place.metrics(one) if "lr" in row]
    assert mine == losses(undisturbed[0])

    done = place.run(
        UNNAMED, fault=["signalled", int(signal.SIGTERM), 1]
    )  # the first run has ended
    (three,) = set(names(place)) - {one, two}
    assert done.code == 75 and done.first_line == f"runs/{three}: new run {three}"
    done = place.run(UNNAMED, "exp_manager.resume_if_exists=False", "trainer.max_steps=2")
    assert done.code == 0 and ": new run " in done.first_line and len(names(place)) == 4


def stopped_alive(place: Place, *more: str) -> Child:
    """Return a process that is stopped by SIGSTOP in the middle of its run."""
    child = place.start(*more, fault=["slow", 0.2])
    wait_until(lambda: list(place.cwd.glob("runs/*/metrics.jsonl")), "training")
    os.kill(child.pid, signal.SIGSTOP)
    return child


def end(child: Child) -> None:
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() is not None


def test_a_living_run_is_not_joined(place: Place) -> None:
    alive = stopped_alive(place, UNNAMED)
    try:
        (one,) = names(place)
        done = stopped_at(place, 1, UNNAMED)
        (two,) = set(names(place)) - {one}
        assert done.first_line == f"runs/{two}: new run {two} ({one} is in use)"
        done = place.run(f"exp_manager.name={one}")
        assert done.code == 2, done.output
        assert f"runs/{one} is in use by process {alive.pid} on " in done.output
        assert "Traceback" not in done.output
    finally:
        end(alive)
    shutil.rmtree(place.cwd / "runs" / two)
    done = stopped_at(place, 2, UNNAMED)  # processes that have ended hold no locks
    assert f"continues run {one}" in done.first_line
    assert done.first_line.endswith("which had saved no checkpoint: it begins again")


def test_a_sweeps_jobs_are_never_joined(place: Place) -> None:
    words = ["-m", UNNAMED, "model.seed=1234,5", "trainer.max_steps=2", "hydra.sweep.dir=runs"]
    done = place.run(*words, fault=["signalled", int(signal.SIGTERM), 1])
    assert done.code == 75, done.output
    assert names(place) and (place.dir("0") / "checkpoints").is_dir()
    done = place.run(UNNAMED, "trainer.max_steps=2")
    assert done.code == 0 and ": new run " in done.first_line, done.output


def test_a_run_that_has_ended_holds_no_lock(place: Place) -> None:
    """The jobs of a sweep share one process: one finishes, one fails, one stops on a signal."""
    note = place.cwd / "jobs.jsonl"
    faults = [
        ["watched_jobs", str(note)],
        ["nan_gradient", "final_norm.weight", [4], 1],
        ["signalled", int(signal.SIGTERM), 5],
    ]
    sweep = str(place.cwd / "jobs")  # absolute, as the names of open files are
    words = ["-m", UNNAMED, "trainer.max_steps=2,8,9", f"hydra.sweep.dir={sweep}"]
    done = place.run(*words, fault=["both", *faults])
    assert done.code == 75, done.output
    left = [json.loads(line) for line in note.read_text().splitlines()]
    assert [job["status"] for job in left] == ["finished", "failed", "stopped"], done.output
    assert not any(job["is_locked"] or job["open"] for job in left), left


# ---- when to save


def test_train_time_interval(place: Place) -> None:
    interval = "exp_manager.checkpoint_callback_params.train_time_interval=1500"
    last = "exp_manager.checkpoint_callback_params.save_last=False"
    done = place.run(f"{EVERY}=null", interval, last, fault=["steps_of_seconds", 600])
    assert done.code == 0, done.output
    assert done.output.count("saved and verified") == 4
    assert place.steps() == [6, 9, 12], "of 3, 6, 9 and 12 the newest three are kept"


def test_save_last_off(place: Place) -> None:
    last = "exp_manager.checkpoint_callback_params.save_last=False"
    done = place.run(f"{EVERY}=5", last)
    assert done.code == 0 and place.steps() == [5, 10]
    assert place.summary()["checkpoint"] == "runs/job/checkpoints/step_00000010"


def test_keep(place: Place) -> None:
    done = place.run("exp_manager.checkpoint_callback_params.keep=1", f"{EVERY}=5")
    assert done.code == 0 and place.steps() == [STEPS]


def test_a_full_disk_costs_that_checkpoint_only(
    place: Place, undisturbed: tuple[Place, Done]
) -> None:
    done = place.run(fault=["full_disk_at", 2])
    assert done.code == 0, done.output
    assert "checkpoint at step 4 failed, training continues" in done.output
    assert "ENOSPC" in done.output
    assert_same(place, undisturbed[0])
