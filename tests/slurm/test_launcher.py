"""Tests of sweeps on Slurm without a Slurm: presets, and the reading of `squeue`'s output."""

from __future__ import annotations

import json
import os
import shlex
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from omegaconf import OmegaConf

from hydra_plugins import megafp8_slurm
from hydra_plugins.megafp8_slurm import (
    WatchedSlurmLauncher,
    exit_code,
    make_watcher,
    parse_queue,
    runs_again,
)
from megafp8.jobs.job import Job, Result, result_of, with_earlier_slices
from tests.slurm.jobs import ROOT

QUEUE = "7_0|RUNNING|node1\n7_1|FAILED|node2\n7_2|PENDING|\n9|NODE_FAIL|node[1-2]\n"


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, squeue: str) -> None:
    """Make an `sacct` that answers as without accounting, and a `squeue`."""
    scripts = {"sacct": "echo 'Slurm accounting storage is disabled' >&2; exit 1", "squeue": squeue}
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_states_of_a_queue() -> None:
    states = {number: info["State"] for number, info in parse_queue(QUEUE).items()}
    assert states == {"7_0": "RUNNING", "7_1": "FAILED", "7_2": "PENDING", "9": "NODE_FAIL"}
    assert parse_queue("") == {} == parse_queue("slurm_load_jobs error: no\n")


def test_ended_and_forgotten_jobs_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue").write_text(QUEUE)
    commands(tmp_path, monkeypatch, f'echo "$@" >{tmp_path}/asked; cat {tmp_path}/queue')
    watcher = make_watcher()
    numbers = ("7_0", "7_1", "7_2", "9", "5")
    for number in numbers:
        watcher.register_job(number)
    done = {number: watcher.is_done(number, mode="force") for number in numbers}
    assert done == {"7_0": False, "7_1": True, "7_2": False, "9": True, "5": True}
    assert (tmp_path / "asked").read_text().startswith("--me --noheader --array --states=all")


@pytest.mark.parametrize(
    ("seen", "again"),
    [
        (["RUNNING", "COMPLETING", "COMPLETED"], False),
        (["FAILED"], False),
        (["COMPLETING", "PENDING"], True),  # preempted, or requeued by hand
        (["PREEMPTED", "REQUEUED"], True),
        (["RUNNING", None], False),  # Slurm has forgotten it
    ],
)
def test_a_job_that_slurm_starts_again_has_not_ended(seen: list[str | None], again: bool) -> None:
    states = iter(seen)
    asked: list[list[str]] = []
    pauses: list[float] = []

    def ask(command: list[str]) -> str | None:
        asked.append(command)
        state = next(states)
        return None if state is None else f"7_1|{state}|node1\n7_0|RUNNING|node2\n"

    assert runs_again("7_1", ask, pauses.append) == again
    assert asked[0][-2:] == ["-j", "7_1"] and len(pauses) == len(seen) - 1


class Unfinished:
    """Stands for a job of submitit that leaves one result after the other."""

    job_id, num_tasks = "7_1", 1

    def __init__(self, results: list[int], folder: Path) -> None:
        self._results, self.paths = results, self
        self.result_pickle = folder / "result"
        self.stderr = folder / "err"

    def task(self, number: int) -> Unfinished:
        return self

    def results(self) -> list[int]:
        assert not self.result_pickle.exists(), "this is the result of before"
        self.result_pickle.touch()
        return [self._results.pop(0)]


def test_the_last_result_of_a_requeued_job_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([True, True, False])
    monkeypatch.setattr(megafp8_slurm, "runs_again", lambda number: next(answers))
    job = Unfinished([75, 75, 0], tmp_path)
    assert WatchedSlurmLauncher._code(job, 1, ["a=1"]) == 0
    assert capsys.readouterr().err.count("was saved, and Slurm runs it again") == 2


def test_an_interrupted_sweep_names_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    jobs = [Unfinished([], tmp_path)]
    monkeypatch.setattr(WatchedSlurmLauncher, "submit", lambda *_: jobs)
    monkeypatch.setattr(WatchedSlurmLauncher, "_code", interrupt)
    launcher = WatchedSlurmLauncher.__new__(WatchedSlurmLauncher)
    launcher.config = OmegaConf.create({"hydra": {"sweep": {"dir": "multi run/12-30"}}})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        launcher.launch([["a=1"]], 0)
    said = capsys.readouterr().err
    assert "scancel 7 ends them" in said
    given = next(word for word in shlex.split(said) if word.startswith("hydra.sweep.dir="))
    assert given == f"hydra.sweep.dir='{tmp_path}/multi run/12-30'", "Hydra reads it as one value"


@pytest.mark.parametrize("val_loss", [float("inf"), 2.5])
def test_a_job_saves_before_submitit_requeues_it(
    val_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher object runs the job inside of Slurm, where submitit has set its handlers."""
    events: list[str] = []
    notice = signal.SIGUSR2
    before = {number: signal.getsignal(number) for number in (notice, signal.SIGTERM)}
    done = JobReturn(status=JobStatus.COMPLETED)
    done.return_value = val_loss

    def run(*_: object) -> JobReturn:
        signal.raise_signal(notice)  # while the packages are imported
        signal.signal(signal.SIGTERM, lambda *_: events.append("saved"))
        signal.raise_signal(notice)
        return done

    # Hydra loads files of plugins anew, so that the class of this name may be another one.
    monkeypatch.setattr(WatchedSlurmLauncher.__mro__[1], "__call__", run)
    signal.signal(signal.SIGTERM, lambda *_: events.append("bypassed"))
    signal.signal(notice, lambda *_: events.append("requeued"))
    try:
        launcher = WatchedSlurmLauncher.__new__(WatchedSlurmLauncher)
        assert launcher() is done
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert events == ["requeued", "saved", *(["requeued"] if val_loss > 3 else [])]


def test_a_squeue_that_fails_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(tmp_path, monkeypatch, "exit 1")
    watcher = make_watcher()
    watcher.register_job("7_0")
    assert not watcher.is_done("7_0", mode="force")


def test_exit_codes_of_results() -> None:
    done = JobReturn(status=JobStatus.COMPLETED)
    done.return_value = 3
    assert exit_code(done) == 3 and exit_code(0) == 0 and exit_code(None) == 0


@pytest.mark.filterwarnings(r"ignore:\n'hydra/launcher/submitit_slurm' is validated")
@pytest.mark.parametrize(
    "preset", ["submitit_slurm", "submitit_slurm_ranks", "submitit_slurm_container"]
)
def test_presets(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINER_IMAGE", "/images/a.sqsh")
    monkeypatch.setenv("CONTAINER_MOUNTS", "/data:/data")
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        cfg = compose("pretrain_gpt", [f"hydra/launcher={preset}"], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    launcher = cfg.hydra.launcher
    known = set(OmegaConf.structured(SlurmQueueConf))
    assert set(launcher) == known  # every setting of submitit's, none besides
    plugins = Plugins.instance()
    assert str(launcher._target_).rpartition(".")[2] == "WatchedSlurmLauncher"
    assert launcher._target_ in plugins.class_name_to_class
    extra = OmegaConf.to_container(launcher.additional_parameters, resolve=True)
    if preset == "submitit_slurm_container":
        assert extra["container-image"] == "/images/a.sqsh"
        assert extra["container-mounts"] == "/data:/data"


@pytest.mark.filterwarnings(r"ignore:\n'hydra/launcher/submitit_slurm' is validated")
def test_it_asks_submitit_for_what_submitits_own_launcher_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []

    class Executor:
        def __init__(self, **given: object) -> None:
            asked.append(given)

        def update_parameters(self, **given: object) -> None:
            asked.append(given)

        def map_array(self, function: object, *arguments: object) -> list[object]:
            asked.append([list(argument) for argument in arguments[:-1]])  # without Hydra's state
            return []

    monkeypatch.setattr("submitit.AutoExecutor", Executor)
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        given = ["hydra/launcher=submitit_slurm", f"hydra.sweep.dir={tmp_path}"]
        cfg = compose("pretrain_gpt", given, return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    jobs = [["model.seed=1"], ["model.seed=2"]]
    for launch in (SlurmLauncher.launch, WatchedSlurmLauncher.submit):
        settings = OmegaConf.to_container(cfg.hydra.launcher, resolve=True)
        assert isinstance(settings, dict)
        settings.pop("_target_")
        launcher = WatchedSlurmLauncher(**settings)
        launcher.config = cfg
        launch(launcher, jobs, 3)
    assert len(asked) == 6 and asked[:3] == asked[3:]


def test_a_jobs_time_is_that_of_all_its_slices(tmp_path: Path) -> None:
    job, saved, finished = Job(0, ("a=1",), tmp_path), 75, 0

    def ends(code: int, seconds: float) -> Result:
        (tmp_path / "summary.json").write_text(json.dumps({"wall_seconds": seconds}))
        result = with_earlier_slices(result_of(job, code), job)
        job.result_file.write_text(json.dumps(asdict(result)))
        return result

    assert ends(saved, 25.0).wall_seconds == 25.0
    assert ends(saved, 30.0).wall_seconds == 55.0
    assert ends(finished, 5.0).wall_seconds == 60.0
