"""Whole jobs on a real Slurm: whatever happens, the losses are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.slurm.jobs import STEPS, Cluster, Job, has_pending

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]
Metrics = list[list[tuple[str, str]]]


def assert_finished_as(job: Job, undisturbed: Metrics) -> None:
    assert job.wait() == "COMPLETED", job.log
    assert job.metrics() == undisturbed
    assert json.loads((job.dir / "run.json").read_text())["status"] == "finished"
    assert not job.pids_of_ranks()


def test_two_nodes_with_two_ranks_each(cluster: Cluster, undisturbed: Metrics) -> None:
    steps = [int(dict(line)["step"]) for line in undisturbed if "lr" in dict(line)]
    assert steps == list(range(1, STEPS + 1))
    job = cluster.submit("torchrun", environment={"LAUNCHER": "torchrun"})
    assert_finished_as(job, undisturbed)  # the other launcher, the same ranks


def test_the_time_limit_saves_and_requeues(cluster: Cluster, undisturbed: Metrics) -> None:
    job = cluster.submit("limit", sbatch=("--signal=B:USR1@80",))
    job.until_step(2)
    ranks = job.signal_ranks(signal.SIGSTOP)  # Slurm looks at the time every 30 s only
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=2")
    job.until(lambda: all(has_pending(rank, signal.SIGUSR1) for rank in ranks), "the signal")
    job.signal_ranks(signal.SIGCONT)
    job.until(lambda: job.restarts == 1, "the restart")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=10")
    assert "the step has ended with code 75 after USR1" in job.log
    saved = job.last_step()  # the step that was under way is not lost
    assert_finished_as(job, undisturbed)
    assert f"continuing after step {saved} of {STEPS}" in job.log


def test_preemption(cluster: Cluster, undisturbed: Metrics) -> None:
    job = cluster.submit("preempted")
    job.until_step(2)
    other = cluster.run(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive",
        "--output=/dev/null", "--wrap=sleep 1",
    ).strip()  # fmt: skip
    job.until(lambda: job.restarts == 1, "the restart")
    saved = job.last_step()
    assert "saved on SIGTERM" in job.log, job.log
    assert_finished_as(job, undisturbed)
    assert f"continuing after step {saved} of {STEPS}" in job.log
    assert Job(cluster, "other", other).field("JobState") == "COMPLETED"


def test_kill_9_of_a_rank(cluster: Cluster, undisturbed: Metrics) -> None:
    job = cluster.submit("killed")
    job.until_step(5)
    ranks = job.pids_of_ranks()
    assert sorted(ranks) == [0, 1, 2, 3]
    os.kill(ranks[3], signal.SIGKILL)
    job.until(lambda: job.restarts == 1, "the restart")
    assert "the step has ended with code 137\n" in job.log, job.log
    assert_finished_as(job, undisturbed)


@pytest.mark.parametrize("launcher", ["torchrun"])
def test_kill_9_of_a_rank_of_another_launcher(
    cluster: Cluster, undisturbed: Metrics, launcher: str
) -> None:
    job = cluster.submit("killed_there", environment={"LAUNCHER": launcher})
    job.until_step(5)
    victim = job.pids_of_workers()[3]
    os.kill(victim, signal.SIGKILL)
    job.until(lambda: job.restarts == 1, "the restart")
    assert "the step has ended with code 137\n" in job.log, job.log
    assert_finished_as(job, undisturbed)


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_hang(cluster: Cluster, undisturbed: Metrics, restarts: int) -> None:
    """The rank that is stopped is named; the job's code is 4, and it starts again if asked."""
    more = [f"trainer.max_restarts={restarts}"] if restarts else []
    job = cluster.submit(f"hang{restarts}", "trainer.step_timeout=30", *more)
    job.until_step(5)
    os.kill(job.pids_of_ranks()[3], signal.SIGSTOP)
    if not restarts:
        assert job.wait(180) == "FAILED" and job.field("ExitCode") == "4:0", job.log
        assert "rank 3 hangs: it does not even answer" in job.log
        return
    job.until(lambda: job.restarts == 1, "the restart", 180)
    assert "requeued: the same job continues (trainer.max_restarts=2)" in job.log
    assert_finished_as(job, undisturbed)


def test_a_job_that_may_not_be_requeued(cluster: Cluster, undisturbed: Metrics) -> None:
    job = cluster.submit("kept", sbatch=("--no-requeue",))
    job.until_step(2)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    assert job.wait(90) == "FAILED" and job.field("ExitCode") == "75:0", job.log
    assert "not requeued, since this job was submitted with --no-requeue" in job.log
    assert_finished_as(cluster.submit("kept"), undisturbed)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_max_time_saves_and_requeues(cluster: Cluster, undisturbed: Metrics, launcher: str) -> None:
    job = cluster.submit(
        f"max_time_{launcher}", "trainer.max_time=00:00:30", environment={"LAUNCHER": launcher}
    )
    job.until_step(1)
    for pid in (ranks := job.pids_of_workers().values()):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(20)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    job.until(lambda: job.restarts == 1, "the restart")
    assert "saved on trainer.max_time" in job.log, job.log
    assert "ended with code 75\n" in job.log
    assert_finished_as(job, undisturbed)


def test_saved_and_stopped_by_hand(cluster: Cluster, undisturbed: Metrics) -> None:
    job = cluster.submit("stopped")
    job.until_step(2)
    cluster.run("scancel", "--batch", "--signal=USR2", job.number)
    assert job.wait(60) == "FAILED" and job.field("ExitCode") == "75:0"
    assert job.restarts == 0 and not job.pids_of_ranks()
    assert "saved on SIGUSR1" in job.log

    again = cluster.submit("stopped")  # the same command continues
    again.until_step(job.last_step() + 2)
    cluster.run("scancel", again.number)
    assert again.wait(60) == "CANCELLED"
    assert again.restarts == 0 and not again.pids_of_ranks()
