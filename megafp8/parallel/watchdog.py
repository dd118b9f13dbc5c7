"""A rank that hangs is found, named and shown; then all ranks leave.

A hang anywhere stops every rank, in the next collective. Each watches itself and, when its step
lasts too long, tells the others through the store whether it waits for them and where it stands;
one that does not wait, or says nothing, is the one that hangs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from megafp8.errors import ExitCode
from megafp8.parallel.mesh import Mesh

REPORT_SECONDS = 3.0  # for the other ranks to notice too and tell
LINGER_SECONDS = 1.0  # rank 0 may serve the store that the others still read
WITHOUT_GIL_SECONDS = 6.0  # after which a rank that cannot run Python leaves all the same
_WAITING = ("torch/distributed/", "megafp8/parallel/collectives.py")


class Watchdog:
    """Use as a context around training; `beat` at every sign of life. None: no watch."""

    def __init__(self, mesh: Mesh, timeout_seconds: float | None) -> None:
        self.mesh, self.timeout_seconds = mesh, timeout_seconds
        self._main = threading.get_ident()
        self._last = time.monotonic()
        self._what = "the start"
        self._done = threading.Event()

    def __enter__(self) -> Self:
        if self.timeout_seconds is not None:
            self.beat("the start")
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        if self.timeout_seconds is not None:
            faulthandler.cancel_dump_traceback_later()

    def beat(self, what: str) -> None:
        """`what` begins now."""
        if self.timeout_seconds is None:
            return
        self._what, self._last = what, time.monotonic()
        # A thread of C's: it also runs where something holds Python's lock.
        faulthandler.dump_traceback_later(self.timeout_seconds + WITHOUT_GIL_SECONDS, exit=True)

    def _watch(self) -> None:
        assert self.timeout_seconds is not None
        pause = min(0.2, self.timeout_seconds / 10)
        while not self._done.wait(pause):
            if time.monotonic() - self._last > self.timeout_seconds:
                self._expire()

    def _expire(self) -> None:
        rank = self.mesh.world.rank
        own = {
            "waits": is_waiting(sys._current_frames().get(self._main)),
            "what": self._what,
            "collectives": sum(self.mesh.traffic.num_calls.values()),
            "stacks": _stacks(),
        }
        reports = self._exchange(own)
        if rank == min(reports):
            print(describe(reports, self.mesh.world.size, self.timeout_seconds), file=sys.stderr)
            sys.stderr.flush()
        if rank == 0:
            time.sleep(LINGER_SECONDS)
        os._exit(int(ExitCode.HUNG))

    def _exchange(self, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The reports of all ranks that give one, by rank."""
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


def describe(
    reports: dict[int, dict[str, Any]], world_size: int, timeout_seconds: float | None
) -> str:
    """Which rank hangs, and the stacks of one."""
    lines = [f"megafp8: no sign of life for trainer.step_timeout={timeout_seconds} s"]
    for rank in sorted(set(range(world_size)) - reports.keys()):
        lines.append(f"megafp8: rank {rank} hangs: it does not even answer; the others wait for it")
    busy = {rank: report for rank, report in reports.items() if not report["waits"]}
    if not busy and len(reports) == world_size:  # they wait for each other
        fewest = min(report["collectives"] for report in reports.values())
        busy = {r: report for r, report in reports.items() if report["collectives"] == fewest}
    for rank, report in sorted(busy.items()):
        done = f"after {report['collectives']} collectives"
        lines.append(f"megafp8: rank {rank} hangs in {report['what']}, {done}. Its stacks:")
        lines.append(report["stacks"].rstrip())
    waiting = [str(rank) for rank in sorted(reports.keys() - busy.keys())]
    if waiting:
        lines.append(f"megafp8: rank(s) {', '.join(waiting)} wait for others; all leave")
    return "\n".join(lines)


def is_waiting(frame: FrameType | None) -> bool:
    """Whether a thread's innermost Python frame is a call into another rank."""
    if frame is None:
        return False
    path = frame.f_code.co_filename.replace(os.sep, "/")
    return any(part in path for part in _WAITING)


def _stacks() -> str:
    """Every thread's, as faulthandler writes them: it needs a real file."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read()
