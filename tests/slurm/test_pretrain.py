"""Whole jobs on a real Slurm: whatever happens, the losses are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from tests.slurm.jobs import STEPS, WAYS, Cluster, Job, has_pending

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]
Metrics = list[list[tuple[str, str]]]


def assert_finished_as(job: Job, undisturbed: Metrics) -> None:
    assert job.wait() == "COMPLETED", job.log
    assert job.metrics() == undisturbed
    assert json.loads((job.dir / "run.json").read_text())["status"] == "finished"
    assert not job.pids_of_ranks()


CRASHES = """import signal


def crash(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


signal.signal(signal.SIGQUIT, crash)
"""


def crashing(cluster: Cluster) -> dict[str, str]:
    """Return variables with which a rank that gets SIGQUIT raises an exception.

    Python reads `sitecustomize.py` when it starts.
    """
    planted = cluster.folder / "planted"
    planted.mkdir(exist_ok=True)
    (planted / "sitecustomize.py").write_text(CRASHES)
    return {"PYTHONPATH": f"{planted}:{cluster.environment['PYTHONPATH']}"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_a_job_goes_on_after_every_end(cluster: Cluster, undisturbed: Metrics, way: str) -> None:
    """One job comes to one end after the other, alike in each way to start its ranks."""
    steps = [int(dict(line)["step"]) for line in undisturbed if "lr" in dict(line)]
    assert steps == list(range(1, STEPS + 1))
    job = cluster.submit(
        f"ends_{way}", "trainer.max_restarts=3", "trainer.step_timeout=30",
        environment=cluster.start_with(way) | crashing(cluster),
    )  # fmt: skip
    ends = {
        "75 after USR1": lambda: cluster.run("scancel", "--batch", "--signal=USR1", job.number),
        "137": lambda: os.kill(job.pids_of_workers()[3], signal.SIGKILL),
        "1": lambda: os.kill(job.pids_of_workers()[2], signal.SIGQUIT),
        "4": lambda: os.kill(job.pids_of_workers()[3], signal.SIGSTOP),
    }
    for number, (code, bring_about) in enumerate(ends.items(), start=1):
        last = job.last_step()
        job.until_step(last + 1)
        bring_about()
        job.until(lambda number=number: job.restarts == number, f"the restart after {code}", 180)
        seen = re.findall(r"the step has ended with code (.*)", job.log)
        assert seen == list(ends)[:number], job.log
    assert "rank 2 on node2 crashed" in job.log and "rank 3 on node2 hung" not in job.log
    job.until_step(job.last_step() + 1)
    assert "rank 3 on node2 hung" in job.log, "what the last start says of the one before it"
    cluster.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    cluster.resume("node2")
    job.until(lambda: job.restarts == 5, "the restart after the loss of a node")
    assert_finished_as(job, undisturbed)


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


@pytest.mark.parametrize("way", WAYS)
def test_preemption(cluster: Cluster, undisturbed: Metrics, way: str) -> None:
    job = cluster.submit(f"preempted_{way}", environment=cluster.start_with(way))
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


def test_crashes_without_progress_end_the_job(cluster: Cluster) -> None:
    more = [
        "trainer.max_restarts=1",
        "exp_manager.checkpoint_callback_params.every_n_train_steps=99",
    ]
    job = cluster.submit("crashes", *more, environment=crashing(cluster))
    first_step = re.compile(rf"step +1/{STEPS} \| loss")
    for restarts in (1, 2):
        job.until(lambda n=restarts: len(first_step.findall(job.log)) == n, "step 1 of a start")
        os.kill(job.pids_of_ranks()[2], signal.SIGQUIT)
        job.until(lambda restarts=restarts: job.restarts == restarts, "the restart")
    assert job.wait(90) == "FAILED" and job.field("ExitCode") == "2:0", job.log
    assert "2 restarts have begun at step 0, and none reached its next checkpoint" in job.log
    assert job.log.count("saved none; rank 2 on node2 crashed") == 2, job.log
    assert "All of them ended on node2" in job.log and "--exclude=node2" in job.log


def test_a_hang_ends_a_job_that_asks_for_no_restarts(cluster: Cluster) -> None:
    job = cluster.submit("hang", "trainer.step_timeout=30")
    job.until_step(5)
    os.kill(job.pids_of_ranks()[3], signal.SIGSTOP)
    assert job.wait(180) == "FAILED" and job.field("ExitCode") == "4:0", job.log
    assert "rank 3 hangs: it does not even answer" in job.log and job.restarts == 0


def test_a_job_that_may_not_be_requeued(cluster: Cluster, undisturbed: Metrics) -> None:
    job = cluster.submit("kept", sbatch=("--no-requeue",))
    job.until_step(2)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    assert job.wait(90) == "FAILED" and job.field("ExitCode") == "75:0", job.log
    assert "not requeued, since this job was submitted with --no-requeue" in job.log
    assert_finished_as(cluster.submit("kept"), undisturbed)


@pytest.mark.parametrize("way", WAYS)
def test_max_time_saves_and_requeues(cluster: Cluster, undisturbed: Metrics, way: str) -> None:
    environment = cluster.start_with(way)
    job = cluster.submit(f"max_time_{way}", "trainer.max_time=00:00:30", environment=environment)
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


@pytest.mark.parametrize("way", WAYS)
def test_saved_and_stopped_by_hand(cluster: Cluster, undisturbed: Metrics, way: str) -> None:
    """The line that the log shows then is the one that submitted the job."""
    name = f"stopped_{way}"
    job = cluster.submit(name, environment=cluster.start_with(way))
    job.until_step(2)
    cluster.run("scancel", "--batch", "--signal=USR2", job.number)
    assert job.wait(60) == "FAILED" and job.field("ExitCode") == "75:0"
    assert job.restarts == 0 and not job.pids_of_ranks()
    assert "saved on SIGUSR1" in job.log

    assert job.field("JobName") == f"megafp8:{name}"
    line = json.loads((job.dir / "summary.json").read_text())["continue_command"]
    assert line.startswith("env ") and "trainer.num_nodes" not in line
    assert f"continue with  {line}" in job.log.replace("\n0: ", ""), "srun breaks long lines"

    def submit_again() -> Job:
        said = cluster.run("bash", "-c", line)
        return Job(cluster, name, said.split()[-1])

    again = submit_again()
    again.until_step(job.last_step() + 2)
    cluster.run("scancel", again.number)
    assert again.wait(60) == "CANCELLED"
    assert again.restarts == 0 and not again.pids_of_ranks()
    assert_finished_as(submit_again(), undisturbed)
