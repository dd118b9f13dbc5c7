"""Kill runs again and again, and compare each one bit for bit with a run that was not killed.

    python -m tests.checkpoint.kill_campaign --kills 300 --seed 1 [--json FILE]

A kill is SIGKILL to one rank (the others are then ended, as the launcher does) or to all ranks, at
a random moment or at a named point of a save; see `faults.POINTS`. The same command then continues
the run. After `KILLS_OF_A_RUN` kills the run may end, and its checkpoints, metrics and summary must
be those of the undisturbed run. Only kills of living processes count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.train import faults
from tests.train.runs import STEPS, Child, Driver, Place, assert_same, make_dataset

KILLED = -signal.SIGKILL
KILLS_OF_A_RUN = 6
ASYNC = "exp_manager.checkpoint_callback_params.async_save=True"
SECONDS = 300.0  # that a life may last, on a busy machine
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "tp 2": (2, ("trainer.devices=2", "model.tensor_model_parallel_size=2")),
    "dp 2": (2, ("trainer.devices=2",)),
}
WEIGHTS = (4, 1, 1)  # of the layouts: two ranks cost three times as much


@dataclass
class Job:
    """Hold one kind of run and its undisturbed copy."""

    layout: str
    is_async: bool
    reference: Place | None = None
    seconds: float = 0.0  # of a whole life

    @property
    def name(self) -> str:
        return f"{self.layout}, {'async' if self.is_async else 'sync'}"

    @property
    def size(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def words(self) -> tuple[str, ...]:
        return (*LAYOUTS[self.layout][1], *((ASYNC,) if self.is_async else ()))


@dataclass
class Campaign:
    """Count what was done so far."""

    driver: Driver
    data: Path
    folder: Path
    chance: random.Random
    kills: Counter[str] = field(default_factory=Counter)  # by where
    by_job: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    places: int = 0

    def place(self) -> Place:
        self.places += 1
        cwd = self.folder / str(self.places)
        cwd.mkdir()
        return Place(self.driver, self.data, cwd)

    def begin(self, job: Job, place: Place, fault: list[Any] | None, at_rank: int) -> list[Child]:
        """Start the job's ranks as forks; `fault` happens in one of them."""
        if job.size == 1:
            return [place.start(*job.words, fault=fault)]
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = []
        for rank in range(job.size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(job.size),
                "LOCAL_WORLD_SIZE": str(job.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "GLOO_SOCKET_IFNAME": "lo",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            planted = [["environment", environment]]
            if fault is not None and rank == at_rank:
                planted.append(fault)
            ranks.append(place.start(*job.words, fault=["both", *planted]))
        return ranks

    def prepare(self, job: Job) -> None:
        place, began = self.place(), time.monotonic()
        codes = finish(self.begin(job, place, None, 0))
        assert set(codes) == {0}, (place.cwd / "log.txt").read_text()
        job.reference, job.seconds = place, time.monotonic() - began

    def run(self, job: Job, points: list[str], limit: int) -> None:
        """Start one run, kill it up to `limit` times, and continue it to its end."""
        assert job.reference is not None
        place, done, history = self.place(), 0, []
        while True:
            where = None
            if done < limit:
                where = points.pop() if self.chance.random() < 0.6 and points else "any moment"
            at_rank = self.chance.randrange(job.size)
            fault = None
            if where in faults.POINTS or where in faults.ASYNC_POINTS:
                if where in faults.MAIN_RANKS:
                    at_rank = 0
                fault = ["killed_at", where, self.chance.choice([1, 1, 2])]
            ranks = self.begin(job, place, fault, at_rank)
            if where == "any moment":
                self.kill_some(job, place, ranks, at_rank)
            codes = finish(ranks)
            if KILLED in codes and where is not None:
                self.kills[where] += 1
                self.by_job[job.name] += 1
                done += 1
                history.append((where, max(place.steps(), default=0)))
                continue
            output = (place.cwd / "log.txt").read_text()
            assert set(codes) == {0}, (job.name, history, codes, output[-4000:])
            if where in faults.POINTS or where in faults.ASYNC_POINTS:
                points.insert(0, where)  # the run was over before
            break
        try:
            assert_same(place, job.reference, unpruned=max(done, 1))
        except AssertionError:
            print(f"NOT THE SAME: {job.name} in {place.cwd}, killed at {history}", file=sys.stderr)
            raise
        self.runs += 1

    def kill_some(self, job: Job, place: Place, ranks: list[Child], at_rank: int) -> None:
        """Kill one rank or all ranks, at any moment of the process or of training."""
        chance = self.chance
        if chance.random() < 0.5:
            end = time.monotonic() + chance.uniform(0, job.seconds)
        else:
            begun, at_step = time.monotonic(), chance.randint(0, STEPS - 1)
            while (
                all(code_of(child) is None for child in ranks)
                and place.last_step() < at_step
                and time.monotonic() < begun + SECONDS
            ):
                time.sleep(0.01)
            end = time.monotonic() + chance.uniform(0, job.seconds / STEPS)
        while time.monotonic() < end:
            time.sleep(0.005)
        victims = ranks if chance.random() < 0.5 else [ranks[at_rank]]
        for child in victims:
            kill(child)


def kill(child: Child) -> None:
    """Kill a process, unless it has ended; until it is waited for, no other has its number."""
    if code_of(child) is None:
        os.kill(child.pid, signal.SIGKILL)


ENDED: dict[int, int] = {}  # exit codes of children that the driver has waited for


def code_of(child: Child) -> int | None:
    """Return the exit code of a process, or None while it runs."""
    if child.pid not in ENDED and (done := child.wait(0)) is not None:
        ENDED[child.pid] = done.code
    return ENDED.get(child.pid)


def finish(ranks: list[Child]) -> list[int]:
    """Return the exit codes; when one rank was ended by a signal, end the others too."""
    deadline = time.monotonic() + SECONDS
    while True:
        codes = [code_of(child) for child in ranks]
        if None not in codes:
            for child in ranks:
                ENDED.pop(child.pid)
            return [code for code in codes if code is not None]
        if KILLED in codes or time.monotonic() > deadline:
            for child in ranks:
                kill(child)
            assert time.monotonic() < deadline + 30, f"a life of {SECONDS} s: {ranks[0].output}"
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chance, began = random.Random(given.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        driver = Driver()
        try:
            data = make_dataset(Path(folder, "tiny"))
            campaign = Campaign(driver, data, Path(folder), chance)
            jobs = [Job(layout, is_async) for layout in LAYOUTS for is_async in (False, True)]
            for job in jobs:
                campaign.prepare(job)
            points: dict[bool, list[str]] = {False: [], True: []}
            while (left := given.kills - sum(campaign.kills.values())) > 0:
                (layout,) = chance.choices(list(LAYOUTS), WEIGHTS)
                is_async = chance.random() < 0.5
                (job,) = (j for j in jobs if j.layout == layout and j.is_async == is_async)
                if (
                    len(points[is_async]) < KILLS_OF_A_RUN
                ):  # every point comes before one comes twice
                    more = [*faults.POINTS, *(faults.ASYNC_POINTS if is_async else ())]
                    chance.shuffle(more)
                    points[is_async] = more + points[is_async]
                campaign.run(job, points[is_async], min(left, KILLS_OF_A_RUN))
                report = {
                    "seed": given.seed,
                    "kills": sum(campaign.kills.values()),
                    "runs": campaign.runs,
                    "seconds": round(time.monotonic() - began),
                    "by point": dict(sorted(campaign.kills.items())),
                    "by job": dict(sorted(campaign.by_job.items())),
                }
                line = {k: v for k, v in report.items() if not k.startswith("by")}
                print(json.dumps(line), flush=True)
                if given.json is not None:
                    given.json.write_text(json.dumps(report, indent=1) + "\n")
            print(json.dumps(report, indent=1))
            print(f"{report['kills']} kills, {report['runs']} runs: all as the undisturbed ones")
        finally:
            driver.close()


if __name__ == "__main__":
    main()
