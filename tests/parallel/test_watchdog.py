"""Test who is said to hang: reports of ranks as watchdogs write them, and whole watchdogs."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafp8.errors import ExitCode
from megafp8.fp8.health import HealthProbe, TableProbe
from megafp8.fp8.scaling import Pending
from megafp8.optim.clipping import grad_norm
from megafp8.parallel import watchdog
from megafp8.parallel.collectives import Axis, Traffic
from megafp8.parallel.mesh import single_rank
from megafp8.parallel.watchdog import Limit, describe_hang, is_waiting
from megafp8.train.step import ReadBack
from megafp8.train.validate import evaluate


def report(
    waits: bool, collectives: int, *, is_queued: bool = False, stage: int = 0
) -> dict[str, object]:
    return {
        "waits": waits,
        "what": "step 7",
        "collectives": collectives,
        "is_queued": is_queued,
        "stage": stage,
        "stacks": f"a stack of {collectives}",
    }


def test_who_hangs() -> None:
    text = describe_hang({0: report(True, 5), 1: report(False, 4), 2: report(True, 5)}, 3, "9 s")
    assert "rank 1 hangs in step 7, after 4 collectives" in text and "a stack of 4" in text
    assert "rank(s) 0, 2 wait" in text and "a stack of 5" not in text
    text = describe_hang({0: report(True, 5), 2: report(True, 5)}, 3, "9 s")
    assert "rank 1 hangs: it does not even answer" in text and "rank(s) 0, 2 wait" in text
    text = describe_hang({0: report(True, 5), 1: report(True, 3)}, 2, "9 s")
    assert "rank 1 hangs in step 7, after 3 collectives" in text, "all wait: the one behind"


def test_this_test_does_not_wait_for_other_ranks() -> None:
    assert not is_waiting(sys._getframe()) and not is_waiting(None)


def test_a_rank_that_waits_for_a_started_collective_waits() -> None:
    """The thread is in `Work.wait` of torch, which has no Python frame of its own."""
    seen: list[bool] = []

    class Work:
        def wait(self) -> None:
            seen.append(is_waiting(sys._getframe(1)))

    Pending(torch.zeros(1), (Work(),)).wait()  # type: ignore[arg-type]
    assert seen == [True]


@pytest.mark.parametrize("reads", [ReadBack.wait, HealthProbe.detach, TableProbe.detach, evaluate])
def test_a_rank_that_reads_what_a_gpu_computes_waits(reads: Callable[..., object]) -> None:
    """Each function copies numbers to the host; the first is the step's only one."""
    frame: Any = SimpleNamespace(f_code=inspect.unwrap(reads).__code__)
    assert is_waiting(frame, True) and not is_waiting(frame, False)
    before: Any = SimpleNamespace(f_code=grad_norm.__code__)
    assert not is_waiting(before, True), "nothing there waits"


def test_who_hangs_on_gpus() -> None:
    """All ranks wait where they read a result, so that counts of collectives are compared first."""

    def on_gpu(waits: bool, collectives: int, stage: int = 0) -> dict[str, object]:
        return report(waits, collectives, is_queued=True, stage=stage)

    text = describe_hang({0: on_gpu(False, 5), 1: on_gpu(False, 4), 2: on_gpu(False, 5)}, 3, "9 s")
    assert "rank 1 hangs in step 7, after 4 collectives" in text and "rank(s) 0, 2 wait" in text
    assert text.count("hangs in") == 1
    text = describe_hang({0: on_gpu(False, 5), 2: on_gpu(False, 4)}, 3, "9 s")
    assert "rank 1 hangs: it does not even answer" in text and "rank(s) 0, 2 wait" in text
    assert "hangs in" not in text
    stages = {0: on_gpu(True, 5, 0), 1: on_gpu(True, 9, 1), 2: on_gpu(True, 5, 0)}
    text = describe_hang(stages | {3: on_gpu(True, 8, 1)}, 4, "9 s")
    assert "rank 3 hangs" in text and text.count("hangs in") == 1, "behind its own stage"
    text = describe_hang(stages | {3: on_gpu(False, 9, 1)}, 4, "9 s")
    assert "rank 3 hangs" in text and text.count("hangs in") == 1, "reads no result"
    text = describe_hang(stages | {3: on_gpu(True, 9, 1)}, 4, "9 s")
    assert "hangs in" not in text and "rank(s) 0, 1, 2, 3 all wait for their GPUs" in text
    assert "is not visible to the ranks" in text and "a stack of 5" in text


class NcclRanks:
    """Imitate ranks whose collectives are queued on GPUs.

    Every rank but one has started all collectives of a step, and waits where it reads the loss.
    """

    def __init__(self, num_ranks: int, culprit: int) -> None:
        self.messages: dict[str, str] = {}
        traffics = [Traffic() for _ in range(num_ranks)]
        for rank, traffic in enumerate(traffics):
            for _ in range(6 if rank == culprit else 7):
                traffic.add("dp", "all_reduce_sum", torch.zeros(1))
        one = single_rank(torch.device("cuda"))
        self.meshes = [
            replace(one, world=Axis("world", num_ranks, rank), traffic=traffic, store=self)
            for rank, traffic in enumerate(traffics)
        ]

    def set(self, key: str, value: str) -> None:
        self.messages[key] = value

    def get(self, key: str) -> str:
        return self.messages[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.messages for key in keys)


def test_ranks_on_gpus_name_the_one_that_is_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole watchdogs run; each watches a thread that reads a result in `train/step.py`."""
    source = "def read():\n    while not done: sleep(0.01)"
    done: list[bool] = []
    names = {"done": done, "sleep": time.sleep}
    exec(compile(source, "/home/megafp8/train/step.py", "exec"), names)
    reader = threading.Thread(target=names["read"])  # type: ignore[arg-type]
    reader.start()
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(watchdog, "LINGER_SECONDS", 0.0)
    monkeypatch.setenv("MEGAFP8_REQUEUES", "1")
    dogs = [watchdog.Watchdog(mesh, Limit(9.0)) for mesh in NcclRanks(3, culprit=1).meshes]
    for dog in dogs:
        dog._main, dog._what = reader.ident or 0, "step 7"
    expiring = [threading.Thread(target=dog._expire) for dog in dogs]
    for thread in expiring:
        thread.start()
    for thread in expiring:
        thread.join()
    done.append(True)
    reader.join()
    said = capsys.readouterr().err
    assert left == [int(ExitCode.HUNG)] * 3
    assert "rank 1 hangs in step 7, after 6 collectives" in said, said
    assert "rank(s) 0, 2 wait for others" in said and said.count("hangs in") == 1
    assert said.count("ends with code 4 (hang of rank 1)") == 3, "a batch script reads it"


class Clock:
    """Return the time that a test has set, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def take_step(limit: Limit, clock: Clock, seconds: float, after: float = 0.0) -> bool:
    """Let a step last `seconds`, and what follows it `after`; return whether the limit was over."""
    limit.beat()
    clock.now += seconds
    is_over = limit.is_over()
    limit.after_step()
    clock.now += after
    return is_over or limit.is_over()


def test_an_automatic_limit_follows_from_the_steps() -> None:
    clock = Clock()
    limit = Limit(None, is_unwatched=True, clock=clock)
    assert not take_step(limit, clock, 5000.0), "the first steps compile"
    assert not take_step(limit, clock, 5000.0)
    assert not take_step(limit, clock, 3.0, after=9999.0), "validation and saves have no limit"
    assert take_step(limit, clock, 601.0), "ten minutes at least"
    assert "20 times the longest one and at least 10 minutes" in limit.describe()
    slow = Limit(None, is_unwatched=True, clock=clock)
    for _ in range(3):
        take_step(slow, clock, 100.0)
    assert not take_step(slow, clock, 1999.0) and take_step(slow, clock, 40_000.0)


@pytest.mark.parametrize(
    ("given", "is_unwatched", "seconds"),
    [(None, False, None), (0.0, True, None), (0.0, False, None), (9.0, True, 9.0)],
)
def test_a_given_limit_counts(
    given: float | None, is_unwatched: bool, seconds: float | None
) -> None:
    clock = Clock()
    limit = Limit(given, is_unwatched=is_unwatched, clock=clock)
    for _ in range(3):
        take_step(limit, clock, 1.0)
    clock.now += 1e6
    assert limit.seconds == seconds and limit.is_over() == (seconds is not None)
    assert not limit.is_automatic


def test_a_rank_that_comes_too_late_ends_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others have reported, and rank 0 took the store with it."""

    class Gone(NcclRanks):
        def set(self, key: str, value: str) -> None:
            raise torch.distributed.DistNetworkError("Broken pipe")

    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(watchdog, "LINGER_SECONDS", 0.0)
    watchdog.Watchdog(Gone(2, culprit=1).meshes[1], Limit(9.0))._expire()
    assert left == [int(ExitCode.HUNG)] and capsys.readouterr().err == ""
