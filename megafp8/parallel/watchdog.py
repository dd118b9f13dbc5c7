"""Find a rank that hangs, report its name and stacks, and end all ranks.

A rank that hangs anywhere stops every other rank in its next collective. Each rank watches itself.
If its step lasts too long, it writes to the store whether it waits for other ranks and where it is.
A rank that does not wait, or that writes nothing, is the one that hangs.

On GPUs a collective is queued and returns at once. The ranks continue until they read a result, so
all of them stop there, including the one that the others wait for. Therefore the number of started
collectives is compared first: a rank that has started fewer than another rank of its pipeline stage
is behind.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from torch.distributed import DistError

from megafp8.errors import ExitCode
from megafp8.files import note_progress
from megafp8.fp8.scaling import Pending
from megafp8.parallel.ends import tell_end
from megafp8.parallel.mesh import Mesh

REPORT_SECONDS = 3.0  # time for the other ranks to notice and report
LINGER_SECONDS = 1.0  # rank 0 may serve the store that other ranks still read
WITHOUT_GIL_SECONDS = 6.0  # then a rank that cannot run Python is ended
LEAST_SECONDS = 600.0  # that an automatic limit leaves: torch's own for gloo and NCCL is no less
TIMES_LONGEST = 20.0
FREE_STEPS = 2
_WAITING = ("torch/distributed/", "megafp8/parallel/collectives.py", "te_cpu/cuda.py")
_READING = tuple(f"megafp8/train/{name}.py" for name in ("step", "validate", "process"))
# Here a rank reads a result that a GPU still computes.
_READING += ("torch/cuda/", "megafp8/fp8/health.py")


class Limit:
    """Say after how many seconds without progress a rank is taken to hang.

    Args:
        given: `trainer.step_timeout`: seconds, 0 for no limit, or None for the usual.
        is_unwatched: Whether no user may be watching, as in a Slurm job. Then the usual is a limit:
            `TIMES_LONGEST` of the run's longest step, and `LEAST_SECONDS` at least. The first
            `FREE_STEPS` steps, which compile, have none, and neither has what comes after a step:
            validation, and a save.
        clock: Returns seconds; `time.monotonic` unless given.
    """

    def __init__(
        self,
        given: float | None,
        *,
        is_unwatched: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.given = given or None
        self.is_automatic = given is None and is_unwatched
        self._clock = clock or time.monotonic
        self._last = self._clock()
        self._num_steps, self._longest = 0, 0.0
        self._in_step = True

    @property
    def seconds(self) -> float | None:
        """How long the rank may show no progress now; None if there is no limit now."""
        if not self.is_automatic:
            return self.given
        if not self._in_step or self._num_steps < FREE_STEPS:
            return None
        return max(LEAST_SECONDS, TIMES_LONGEST * self._longest)

    def beat(self) -> None:
        """Take note of progress: a step begins."""
        self._last, self._in_step = self._clock(), True

    def after_step(self) -> None:
        """Take note that a step is over, before what is due after it."""
        self._num_steps += 1
        if self._num_steps > FREE_STEPS:
            self._longest = max(self._longest, self._clock() - self._last)
        self._in_step = False

    def is_over(self) -> bool:
        """Return whether the rank has shown no progress for too long."""
        seconds = self.seconds
        return seconds is not None and self._clock() - self._last > seconds

    def describe(self) -> str:
        """Return the limit in words."""
        if not self.is_automatic:
            return f"trainer.step_timeout={self.given} s"
        return (
            f"{self.seconds or LEAST_SECONDS:.0f} s in a step, which is {TIMES_LONGEST:g} times "
            f"the longest one and at least {LEAST_SECONDS / 60:g} minutes"
        )


class Watchdog:
    """Watch this rank while its context is active.

    The rank must call `beat` at every sign of progress. Without a limit nothing is watched here.
    """

    def __init__(self, mesh: Mesh, limit: Limit) -> None:
        self.mesh, self.limit = mesh, limit
        self._is_watched = limit.is_automatic or limit.given is not None
        self._main = threading.get_ident()
        self._what = "the start"
        self._done = threading.Event()

    def __enter__(self) -> Self:
        if self._is_watched:
            self.beat("the start")
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._is_watched:
            faulthandler.cancel_dump_traceback_later()

    def beat(self, activity: str) -> None:
        """Restart the limit and note that `activity` begins now; our launcher sees it, too."""
        note_progress()
        if not self._is_watched:
            return
        self._what = activity
        self.limit.beat()
        self._watch_without_python()

    def after_step(self) -> None:
        """Take note that a step is over, before what is due after it."""
        if self.limit.is_automatic:
            self.limit.after_step()
            self._watch_without_python()

    def _watch_without_python(self) -> None:
        """Let a C thread watch, too: it also runs while something holds Python's lock."""
        seconds = self.limit.seconds
        if seconds is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(seconds + WITHOUT_GIL_SECONDS, exit=True)

    def _watch(self) -> None:
        pause = min(0.2, (self.limit.given or LEAST_SECONDS) / 10)
        while not self._done.wait(pause):
            if self.limit.is_over():
                self._expire()

    def _expire(self) -> None:
        """End this process after a hang, once one rank has reported what all of them were doing."""
        rank = self.mesh.world.rank
        try:
            reports = self._exchange(self._report())
        except (DistError, RuntimeError):  # rank 0 has left, after a report: this rank was late
            reports = {}
        if not reports:
            pass
        elif rank == min(reports):
            print(
                describe_hang(reports, self.mesh.world.size, self.limit.describe()), file=sys.stderr
            )
            sys.stderr.flush()
        else:  # the reporting rank would fail on a lost connection before it has reported
            time.sleep(LINGER_SECONDS)
        if rank == 0:
            time.sleep(LINGER_SECONDS)
        size = self.mesh.world.size
        missing = set(range(size)) - reports.keys() if reports else set()
        tell_end(int(ExitCode.HUNG), hanging=sorted(missing | _hanging(reports, size).keys()))
        os._exit(int(ExitCode.HUNG))

    def _report(self) -> dict[str, Any]:
        """Return where this rank is, as JSON values."""
        is_queued = self.mesh.device.type == "cuda"
        return {
            "waits": is_waiting(sys._current_frames().get(self._main), is_queued),
            "what": self._what,
            "collectives": sum(self.mesh.traffic.num_calls.values()),
            "is_queued": is_queued,
            "stage": self.mesh.pp.rank,
            "stacks": _stacks(),
        }

    def _exchange(self, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the reports of all ranks that wrote one, by rank."""
        world, store = self.mesh.world, self.mesh.store
        reports = {world.rank: own}
        if store is None:
            return reports
        store.set(f"hang/{world.rank}", json.dumps(own))
        deadline = time.monotonic() + REPORT_SECONDS
        while len(reports) < world.size and time.monotonic() < deadline:
            for other in set(range(world.size)) - reports.keys():
                if store.check([f"hang/{other}"]):
                    reports[other] = json.loads(store.get(f"hang/{other}"))
            time.sleep(0.05)
        return reports


def describe_hang(reports: dict[int, dict[str, Any]], world_size: int, limit: str) -> str:
    """Return a text that names the ranks that hang, with the stacks of one of them."""
    lines = [f"megafp8: no progress for {limit}"]
    for rank in sorted(set(range(world_size)) - reports.keys()):
        lines.append(f"megafp8: rank {rank} hangs: it does not even answer; the others wait for it")
    busy = _hanging(reports, world_size)
    for rank, report in sorted(busy.items()):
        done = f"after {report['collectives']} collectives"
        lines.append(f"megafp8: rank {rank} hangs in {report['what']}, {done}. Its stacks:")
        lines.append(report["stacks"].rstrip())
    waiting = [str(rank) for rank in sorted(reports.keys() - busy.keys())]
    if not busy and len(reports) == world_size:
        rank, report = min(reports.items())
        lines.append(
            f"megafp8: rank(s) {', '.join(waiting)} all wait for their GPUs in {report['what']}, "
            "and none of a pipeline stage has started fewer collectives than the others: which "
            f"GPU hangs is not visible to the ranks. The stacks of rank {rank}:"
        )
        lines.append(report["stacks"].rstrip())
    elif waiting:
        lines.append(f"megafp8: rank(s) {', '.join(waiting)} wait for others; all leave")
    return "\n".join(lines)


def _hanging(reports: dict[int, dict[str, Any]], world_size: int) -> dict[int, dict[str, Any]]:
    """Return the reports of those ranks that the other ranks wait for."""
    is_queued = all(report["is_queued"] for report in reports.values())
    if is_queued:
        if len(reports) < world_size:
            return {}  # the ranks that wrote no report hang
        fewest: dict[int, int] = {}  # compared within a stage: stages run different collectives
        most: dict[int, int] = {}
        for report in reports.values():
            stage, count = report["stage"], report["collectives"]
            fewest[stage] = min(count, fewest.get(stage, count))
            most[stage] = max(count, most.get(stage, count))
        behind = {
            rank: report
            for rank, report in reports.items()
            if report["collectives"] == fewest[report["stage"]] < most[report["stage"]]
        }
        if behind:
            return behind
    busy = {rank: report for rank, report in reports.items() if not report["waits"]}
    if not busy and not is_queued and len(reports) == world_size:  # the ranks wait for each other
        count = min(report["collectives"] for report in reports.values())
        busy = {r: report for r, report in reports.items() if report["collectives"] == count}
    return busy


def is_waiting(frame: FrameType | None, is_queued: bool = False) -> bool:
    """Return whether a thread's innermost Python frame is a call into another rank.

    With `is_queued` a frame that reads what a GPU computes after such a call counts too.
    """
    if frame is None:
        return False
    path = frame.f_code.co_filename.replace(os.sep, "/")
    return frame.f_code is Pending.wait.__code__ or any(
        part in path for part in (_WAITING + _READING if is_queued else _WAITING)
    )


def _stacks() -> str:
    """Return the stacks of all threads; faulthandler needs a real file to write them."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read()
