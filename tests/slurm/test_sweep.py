"""Sweeps run as Slurm job arrays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.slurm.jobs import ROOT, Cluster, Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]
FEW = ["trainer.max_steps=4", "model.global_batch_size=8"]


def sweep(cluster: Cluster, name: str, *more: str) -> subprocess.Popen[str]:
    given = {word.partition("=")[0] for word in more}
    few = [word for word in FEW if word.partition("=")[0] not in given]
    argv = cluster.argv("unused", *few, *more)
    argv = [word for word in argv if not word.startswith("exp_manager.")]
    argv += [
        f"hydra.sweep.dir='{cluster.folder}/{name}'",
        "exp_manager.create_tensorboard_logger=False",
    ]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), "-m", *argv],
        cwd=cluster.folder,
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_sweep_of_two_jobs_with_two_ranks(cluster: Cluster) -> None:
    ranks = ["hydra/launcher=submitit_slurm_ranks", "hydra.launcher.gpus_per_node=null"]
    ranks += ["trainer.devices=2", "hydra.launcher.tasks_per_node=2", "model.optim.lr=1e-3,5e-4"]
    process = sweep(cluster, "ranks", *ranks)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    for number, rate in enumerate(("1e-3", "5e-4")):  # the same, here and one after the other
        here = cluster.argv(f"here{number}", *FEW, "trainer.devices=2", f"model.optim.lr={rate}")
        cluster.run(sys.executable, str(ROOT / "pretrain_gpt.py"), *here)
    mine = [Job(cluster, f"../ranks/{number}", "0").metrics() for number in (0, 1)]
    theirs = [Job(cluster, f"here{number}", "0").metrics() for number in (0, 1)]
    assert mine == theirs and mine[0] != mine[1]


def test_a_killed_job_is_reported(cluster: Cluster) -> None:
    process = sweep(
        cluster, "killed", "hydra/launcher=submitit_slurm", "trainer.devices=1",
        "model.tensor_model_parallel_size=1", "trainer.max_steps=100000,2",
    )  # fmt: skip
    try:
        kill_first_job(cluster, process)
    finally:
        process.kill()
        process.wait()


def await_first_job(cluster: Cluster, name: str, process: subprocess.Popen[str]) -> None:
    metrics = cluster.folder / name / "0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)


def kill_first_job(cluster: Cluster, process: subprocess.Popen[str]) -> None:
    await_first_job(cluster, "killed", process)
    number = cluster.run("squeue", "--noheader", "--array", "--states=R", "--format=%i|%A|%K")
    first = next(line.split("|") for line in number.split() if line.split("|")[2] == "0")
    victims = Job(cluster, "killed", first[1]).pids_of_submitit()
    assert victims
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "[sweep] job 0 (" in output and " died (state FAILED)" in output, output
    assert "job 1 (" not in output  # the other job continues


@pytest.mark.parametrize("by", ["scontrol requeue", "scancel --signal=USR2"])
def test_a_requeued_job_is_final_when_it_has_run_again(cluster: Cluster, by: str) -> None:
    """Preemption does the first: the job saves, leaves a result, and Slurm starts it again.

    The other is what a time limit does: the job saves, and submitit requeues it.
    """
    name = f"requeued by {by.split()[0]}"
    process = sweep(
        cluster, name, "hydra/launcher=submitit_slurm", "trainer.devices=1",
        "model.tensor_model_parallel_size=1", "trainer.max_steps=60,2",
    )  # fmt: skip
    await_first_job(cluster, name, process)
    number = cluster.run("squeue", "--noheader", "--array", "--states=R", "--format=%i|%K")
    first = next(line.split("|")[0] for line in number.split() if line.split("|")[1] == "0")
    cluster.run(*by.split(), first)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert ("was saved, and Slurm runs it again" in output) == (by == "scontrol requeue"), output
    log = (cluster.folder / name / "0" / "console.log").read_text()
    assert "saved on SIGTERM" in log and "error: " not in log, log
    results = json.loads((cluster.folder / name / "sweep.json").read_text())
    assert "saved on a signal" not in output and "is validated against" not in output, output
    assert str(results).count("'code': 0") == 2, results
    slice_of_the_end = json.loads((cluster.folder / name / "0" / "summary.json").read_text())
    assert results[0]["wall_seconds"] > slice_of_the_end["wall_seconds"], "both slices count"


def test_the_lines_of_an_interrupted_sweep_are_true(cluster: Cluster) -> None:
    """The one ends its jobs; the other, in the same words, takes them up again."""
    given = ["hydra/launcher=submitit_slurm", "trainer.devices=1", "trainer.max_steps=60,2"]
    given.append("model.tensor_model_parallel_size=1")
    process = sweep(cluster, "interrupted", *given)
    await_first_job(cluster, "interrupted", process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in output, output
    ends = re.search(r"(scancel \d+) ends them", output)
    assert ends is not None and f"hydra.sweep.dir={cluster.folder}/interrupted" in output, output
    cluster.run(*ends[1].split())
    deadline = time.monotonic() + 60
    while cluster.run("squeue", "--noheader"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process = sweep(cluster, "interrupted", *given)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    results = json.loads((cluster.folder / "interrupted" / "sweep.json").read_text())
    assert [result["outcome"] for result in results] == ["finished", "finished"]
