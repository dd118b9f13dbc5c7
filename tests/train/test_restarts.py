"""Runs whose ranks die are started again, by megafp8's launcher or by torchrun."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.train.runs import (
    ENVIRONMENT,
    ROOT,
    TWO_RANKS,
    Done,
    Driver,
    Place,
    assert_same,
    wait_until,
)

pytestmark = pytest.mark.kill
FOUR_BITS = (
    "trainer.devices=4",
    "model.tensor_model_parallel_size=2",
    "model.sequence_parallel=True",
    "model.optim.name=distributed_fused_adam",
    "model.fp8_recipe=nvfp4",
    "model.fp8_amax_history_len=1024",
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def children(pid: int) -> list[int]:
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def kill_a_rank(
    job: subprocess.Popen[bytes], place: Place, at_step: int, num_ranks: int, which: int
) -> list[int]:
    """Kill a rank when `at_step` is logged; return all ranks of that start when all have ended."""
    wait_until(lambda: place.last_step() >= at_step or job.poll() is not None, f"step {at_step}")
    ranks = children(job.pid)
    assert job.poll() is None and len(ranks) == num_ranks, place.command_output
    os.kill(ranks[which], signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, ranks)), "the end of all")
    return ranks


def finish(job: subprocess.Popen[bytes], place: Place, dead: Sequence[int]) -> None:
    """Wait until the job ends by itself; it must succeed and leave no process."""
    last: list[int] = []

    def has_ended() -> bool:
        last[:] = children(job.pid) or last
        return job.poll() is not None

    wait_until(has_ended, "the end of the job")
    assert job.returncode == 0, place.command_output
    assert last and not set(last) & set(dead)
    wait_until(lambda: not any(map(is_alive, last)), "no orphans")


@pytest.mark.slow
def test_a_killed_rank(place: Place, undisturbed: tuple[Place, Done]) -> None:
    """One rank is killed twice: the second start dies too."""
    job = place.command("trainer.max_restarts=2")
    dead = kill_a_rank(job, place, 3, 1, 0)
    wait_until(lambda: children(job.pid) not in ([], dead), "the second start")
    wait_until(lambda: place.last_step() >= 7 or job.poll() is not None, "step 7")
    dead += kill_a_rank(job, place, 7, 1, 0)
    finish(job, place, dead)
    assert "rank 0 died (signal SIGKILL)" in place.command_output
    assert "restart 2 of 2" in place.command_output
    assert_same(place, undisturbed[0], same_settings=False)


@pytest.fixture(scope="module")
def two_ranks(driver: Driver, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return an undisturbed run of two tensor-parallel ranks."""
    place = Place(driver, dataset, tmp_path_factory.mktemp("two"))
    done = place.run(*TWO_RANKS)
    assert done.code == 0, done.output
    return place


def by_launcher(place: Place) -> subprocess.Popen[bytes]:
    return place.command(*TWO_RANKS, "trainer.max_restarts=3")


def by_torchrun(place: Place) -> subprocess.Popen[bytes]:
    with open(place.cwd / "command.txt", "wb") as output:
        return subprocess.Popen(
            [*TORCHRUN, "--max-restarts=3", str(ROOT / "pretrain_gpt.py"), *place.argv(*TWO_RANKS)],
            cwd=place.cwd,
            env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.slow
@pytest.mark.parametrize("start", [by_launcher, by_torchrun])
def test_two_ranks_again_and_again(
    place: Place, two_ranks: Place, start: Callable[[Place], subprocess.Popen[bytes]]
) -> None:
    """Three starts lose a rank; the files are those of an undisturbed run, bit for bit."""
    chance = random.Random(1)
    job, dead, before = start(place), [0], []
    try:
        for at_step in (3, 6, 9):
            old = list(before)
            wait_until(lambda old=old: children(job.pid) not in ([], old), "the next start")
            before = kill_a_rank(job, place, at_step, 2, chance.randrange(2))
            dead += before
        finish(job, place, dead)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()
    assert_same(place, two_ranks, same_settings=False)


@pytest.mark.slow
def test_a_killed_rank_of_nvfp4(place: Place, tmp_path: Path) -> None:
    """Random rounding goes on with the same bits on 4 ranks, after a kill and a restart.

    The ranks share tensors, the sequence and the optimizer's states.
    """
    job = place.command(*FOUR_BITS, "trainer.max_restarts=1")
    dead = kill_a_rank(job, place, 6, 4, 3)
    finish(job, place, dead)
    assert "restart 1 of 1" in place.command_output
    (tmp_path / "calm").mkdir()
    calm = Place(place.driver, place.data, tmp_path / "calm")
    done = calm.run(*FOUR_BITS)
    assert done.code == 0, done.output
    assert_same(place, calm, same_settings=False)


@pytest.mark.parametrize("ranks", [[], TWO_RANKS], ids=["one rank", "two ranks"])
def test_a_machine_that_fails_after_each_restart_is_named_and_left(
    place: Place, undisturbed: tuple[Place, Done], ranks: list[str]
) -> None:
    """The job ends after as many restarts as asked for, and loses the steps since its last save."""
    fails = ["in_rank", len(ranks) // 2, "fail", 6]
    done = place.run("trainer.max_restarts=1", *ranks, fault=fails)
    assert done.code == 1, done.output
    host = socket.gethostname()
    died = f"rank {len(ranks) // 2} died (exit code 1) on {host}: ValueError: the number is 42"
    assert "restart 1 of 1" in done.output and "max_restarts=1 allows no other" in done.output
    assert f"  start 1: {died}\n  start 2: {died}\n" in done.output
    assert place.steps()[-1] == 4 and place.last_step() == 5  # a checkpoint each second step
    said = (
        f"restart 1: the start before it on {host} began at step 0 and reached step 5, and ended:"
    )
    assert f"{said} {died}" in done.output
    lines = (place.dir() / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["text"] for e in events if e["kind"] == "restart"] == [f"{said} {died}"]
    record = json.loads((place.dir() / "restarts.json").read_text())
    assert record["step"] == 4 and [start["host"] for start in record["starts"]] == [host]
    if not ranks:  # the machine is mended
        assert place.run().code == 0
        assert_same(place, undisturbed[0], same_settings=False)


@pytest.mark.slow
def test_three_restarts_without_progress_end_it(place: Place) -> None:
    """Each start fails before it has saved a first checkpoint."""
    done = place.run("trainer.max_restarts=9", fault=["in_rank", 0, "fail", 1])
    assert done.code == 2, done.output
    assert "3 restarts have begun at step 0, and none reached its next checkpoint" in done.output
    assert done.output.count("the number is 42") >= 4
    assert "restart 3 of 9" in done.output and "restart 4 of 9" not in done.output
    record = json.loads((place.dir() / "restarts.json").read_text())
    assert record["step"] == 0 and len(record["starts"]) == 4
    assert place.steps() == [] and place.status() == "running"


@pytest.mark.slow
def test_ranks_of_torchrun_are_not_ours_to_start_again(place: Place) -> None:
    """The setting would have no effect under torchrun; the error names torchrun's own flag."""
    done = place.run(
        *TWO_RANKS,
        "trainer.max_restarts=2",
        fault=[
            "environment",
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        ],
    )
    assert done.code == 2 and "--max-restarts" in done.output, done.output
