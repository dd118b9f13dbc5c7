"""Waiting threads of OpenMP spin on idle cores, and sleep soon beside other programs."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megafp8.ops import waiting
from megafp8.ops.waiting import BRIEF_SPINS, OURS, SPINS, CoreTimes, Waiting, prepare_threads

CHOSEN_BY_US = {"GOMP_SPINCOUNT": str(SPINS), OURS: str(SPINS)}


class FakeCrowd:
    """Stands for the sleeping threads; counts how many were begun and ended."""

    begun = ended = 0

    def __init__(self, threads: int) -> None:
        FakeCrowd.begun += 1

    def close(self) -> None:
        FakeCrowd.ended += 1


@pytest.fixture(autouse=True)
def crowds(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeCrowd]]:
    FakeCrowd.begun = FakeCrowd.ended = 0
    monkeypatch.setattr(waiting, "Crowd", FakeCrowd)
    yield FakeCrowd


class Cores:
    """Stands for /proc/stat: other processes use `others` cores, and this process 1.5."""

    def __init__(self) -> None:
        self.others = 0.0
        self.now = CoreTimes(at=100.0, busy=50.0, own=3.0)

    def __call__(self) -> CoreTimes:
        return self.now

    def after(self, seconds: float) -> None:
        now, own = self.now, 1.5 * seconds
        self.now = CoreTimes(
            now.at + seconds, now.busy + own + self.others * seconds, now.own + own
        )


def watch(cores: Cores, threads: int = 2, num_cores: float = 2, **environment: str) -> Waiting:
    given = environment or CHOSEN_BY_US
    return Waiting(threads, given, cores=num_cores, read=cores)


@pytest.mark.parametrize("chosen", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_the_users_choice_is_kept(chosen: dict[str, str], crowds: type[FakeCrowd]) -> None:
    environment = dict(chosen)
    prepare_threads(environment, is_foreign_rank=False)
    assert environment == chosen
    cores = Cores()
    it = watch(cores, **environment)
    cores.others = 2.0
    cores.after(1.0)
    it.look()
    assert crowds.begun == 0
    assert it.describe().endswith(f"waiting threads spin as {next(iter(chosen))} says")


def test_a_child_knows_that_the_choice_is_ours_unless_the_user_changes_it() -> None:
    environment: dict[str, str] = {}
    prepare_threads(environment, is_foreign_rank=False)
    assert environment == CHOSEN_BY_US
    child = dict(environment)
    prepare_threads(child, is_foreign_rank=False)  # of a sweep, or a rank of our launcher
    assert child == CHOSEN_BY_US
    changed = environment | {"GOMP_SPINCOUNT": "7"}
    assert "as GOMP_SPINCOUNT says" in watch(Cores(), **changed).describe()


def test_ranks_of_other_launchers_sleep_soon(crowds: type[FakeCrowd]) -> None:
    environment: dict[str, str] = {}
    prepare_threads(environment, is_foreign_rank=True)
    assert environment == {"GOMP_SPINCOUNT": str(BRIEF_SPINS)}
    cores = Cores()
    it = watch(cores, **environment)
    cores.others = 2.0
    cores.after(1.0)
    it.look()
    assert crowds.begun == 0


def test_openmp_reads_the_number() -> None:
    program = """if True:
        import os
        from megafp8.ops.waiting import prepare_threads
        prepare_threads(os.environ, is_foreign_rank=False)
        import torch
    """
    unset = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", OURS}
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in done.stderr


@pytest.mark.parametrize(
    ("others", "threads", "num_cores", "is_brief"),
    [
        (0.0, 2, 2, False),
        (0.4, 2, 2, False),  # the system's own work
        (0.6, 2, 2, True),
        (2.0, 2, 2, True),
        (1.0, 2, 4, False),  # two cores are left
        (3.0, 2, 4, True),
        (2.0, 1, 2, False),  # one thread waits for none
        (0.0, 2, 1.0, True),  # a container's share is less than the threads would use
    ],
)
def test_other_work_decides(
    others: float, threads: int, num_cores: float, is_brief: bool, crowds: type[FakeCrowd]
) -> None:
    cores = Cores()
    it = watch(cores, threads, num_cores)
    cores.others = others
    cores.after(0.5)
    it.look()
    assert it.is_brief == is_brief and crowds.begun == is_brief
    assert ("sleep soon" in it.describe()) == is_brief
    it.close()
    assert crowds.ended == crowds.begun


def test_a_load_that_comes_and_goes_is_followed(crowds: type[FakeCrowd]) -> None:
    cores = Cores()
    it = watch(cores)
    seen = []
    for others in (0.0, 1.0, 1.0, 0.4, 0.2, 0.4, 1.0):  # 0.4 is at the border: nothing changes
        cores.others = others
        cores.after(1.0)
        it.after_step(1, 1.0)
        seen.append(it.is_brief)
    assert seen == [False, True, True, True, False, False, True]
    assert (crowds.begun, crowds.ended) == (2, 1)


def test_a_run_that_becomes_much_slower_says_so_once() -> None:
    cores, said = Cores(), []
    it = watch(cores)
    for step in range(1, 13):
        is_late = step > 6
        cores.others = 1.0 if is_late else 0.0
        seconds = 0.8 if is_late else 0.4
        cores.after(seconds)
        said.append(it.after_step(step, seconds))
    (warning,) = [text for text in said if text]
    assert warning == (
        "step 8: other processes use 1.0 of 2 cores, and a step takes 0.8 s in place of 0.4 s"
    )


def test_steps_that_are_slower_by_themselves_are_no_fault_of_others() -> None:
    cores = Cores()
    it = watch(cores)
    for seconds in (1.0, 1.0, 5.0, 5.0):
        cores.after(seconds)
        assert it.after_step(1, seconds) is None


def test_short_steps_are_looked_at_together() -> None:
    cores = Cores()
    it = watch(cores)
    cores.others = 2.0
    for _ in range(7):
        cores.after(0.125)
        it.after_step(1, 0.125)
    assert not it.is_brief, "no look before a second is over"
    cores.after(0.125)
    it.after_step(1, 0.125)
    assert it.is_brief


def test_a_header_names_a_smaller_number_of_threads() -> None:
    cores = Cores()
    it = watch(cores)
    cores.others = 1.1
    cores.after(0.5)
    it.look()
    assert it.describe() == (
        "threads: 2 on 2 cores, of which other processes use 1.1; waiting threads sleep soon; "
        "OMP_NUM_THREADS=1 may be faster (a new run: sums get other last bits)"
    )


def test_a_system_that_tells_nothing_is_left_alone(crowds: type[FakeCrowd]) -> None:
    it = Waiting(2, CHOSEN_BY_US, cores=2, read=lambda: None)
    it.look()
    assert it.after_step(1, 5.0) is None and crowds.begun == 0
    assert it.describe() == "threads: 2 on 2 cores"


def test_times_of_this_machine_are_read() -> None:
    first = waiting.read_core_times()
    if first is None:
        pytest.skip("this system does not tell what its cores do")
    sum(range(3_000_000))
    second = waiting.read_core_times()
    assert second is not None and second.own > first.own and second.at > first.at
    assert second.busy >= first.busy > 0
    assert dataclasses.astuple(second) != dataclasses.astuple(first)


SPINNING = """if True:
    import os, resource, sys, time
    import torch
    from megafp8.ops.waiting import Crowd
    x = torch.randn(200_000)
    def cpu_seconds():
        before = time.process_time()
        for _ in range(300):
            x.add(1.0)  # both threads work; then the second waits for the next loop
            time.sleep(0.002)
        return time.process_time() - before
    cpu_seconds()
    spinning = cpu_seconds()
    crowd = Crowd(2)
    crowded = cpu_seconds()
    crowd.close()
    print(spinning, crowded, cpu_seconds())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: OpenMP never spins long")
def test_sleeping_threads_let_openmp_sleep_and_their_end_lets_it_spin() -> None:
    """The second thread spins for most of the 2 ms between two loops, or for microseconds.

    CPU time is compared, not wall time: other programs may take cores, and no time of theirs
    counts. A spinning thread that gets half of a core still uses several times as much.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000000"}
    done = subprocess.run(
        [sys.executable, "-c", SPINNING],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    spinning, crowded, again = map(float, done.stdout.split())
    assert crowded < spinning / 2 and crowded < again / 2, done.stdout
