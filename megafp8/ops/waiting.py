"""Choose how long waiting threads of OpenMP spin: long on idle cores, briefly beside other work.

A thread that spins continues at once, but where another process runs on one of the cores, it keeps
the thread that it waits for from running. GNU's OpenMP, which torch uses, spins for
`GOMP_SPINCOUNT` looks, and for 100 looks while a process has more OpenMP threads than cores (the
manual of GNU libgomp, "GOMP_SPINCOUNT"). So this module sets the variable for idle cores, and adds
OpenMP threads that only sleep while the cores are busy. The number of threads that compute stays as
it is, since another number of them adds up in another order.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

SPINS = 20_000
"""How often a waiting thread looks before it sleeps: about half a millisecond."""
BRIEF_SPINS = 1_000
"""The same, for ranks that another launcher starts: they do not know what shares their cores."""
OURS = "MEGAFP8_SPINS"
"""Says to a child process that its `GOMP_SPINCOUNT` is not the user's choice."""

LOOK_SECONDS = 1.0  # least time between two looks: the kernel counts in ticks of 10 ms
SLOWER_BY = 1.5  # least ratio of step times of which a run speaks
_TOLERATED = 0.5  # cores that other work may use beside threads that spin


def prepare_threads(environment: MutableMapping[str, str], *, is_foreign_rank: bool) -> None:
    """Set how long OpenMP's threads spin, unless the user has set how they wait.

    The library reads the variable when torch is imported, so this function must be called before.
    `is_foreign_rank` says that another launcher than ours has started this process.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = str(BRIEF_SPINS if is_foreign_rank else SPINS)
        if not is_foreign_rank:
            environment[OURS] = str(SPINS)


@dataclass(frozen=True)
class CoreTimes:
    """Hold what the cores of this process have done until now, in seconds."""

    at: float  # on the monotonic clock
    busy: float  # of all cores together, whoever used them
    own: float  # of this process alone, in all its threads


def read_core_times() -> CoreTimes | None:
    """Return what the cores of this process have done until now; None where Linux does not tell.

    Time that a hypervisor gave to other machines (`steal`) counts as busy.
    """
    try:
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except (OSError, AttributeError, UnicodeDecodeError):
        return None
    # user nice system idle iowait irq softirq steal; guests are a part of user
    rows = [line.split()[1:9] for line in lines if line.partition(" ")[0] in cores]
    ticks = sum(int(row[column]) for row in rows for column in (0, 1, 2, 5, 6, 7) if len(row) == 8)
    busy = ticks / os.sysconf("SC_CLK_TCK")
    return CoreTimes(time.monotonic(), busy, time.process_time())


def num_cores() -> float:
    """Return how many cores this process may use: those of its mask, or a container's share."""
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    cores = cores or os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


class Waiting:
    """Watch what other processes use of the cores, and let waiting threads spin accordingly.

    Args:
        threads: The number of threads that compute.
        environment: Says whether the user has chosen how threads wait.
        cores: How many cores this process may use.
        read: Reads the times of the cores; tests give others.
    """

    def __init__(
        self,
        threads: int,
        environment: Mapping[str, str],
        *,
        cores: float | None = None,
        read: Callable[[], CoreTimes | None] = read_core_times,
    ) -> None:
        self._threads, self._read = threads, read
        self._cores = num_cores() if cores is None else cores
        self._chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys()
        # A count that this program has set, and that is the same since, is no choice of the user.
        self._is_ours = environment.get(OURS, "") == environment.get("GOMP_SPINCOUNT") is not None
        self._last = read()
        self._crowd: Crowd | None = None
        self._others = 0.0  # cores that other processes used between the last two looks
        self._steps, self._seconds = 0, 0.0  # since the last look
        self._idle_seconds = float("inf")  # a step's, when nothing else used the cores
        self._has_warned = False

    @property
    def is_brief(self) -> bool:
        """Whether waiting threads sleep soon, because other processes use the cores."""
        return self._crowd is not None

    def look(self) -> None:
        """Find out what other processes have used since the last look, and choose."""
        now, before = self._read(), self._last
        if now is None or before is None or now.at <= before.at:
            return
        self._last = now
        used = (now.busy - before.busy) - (now.own - before.own)
        self._others = max(0.0, used / (now.at - before.at))
        free = self._cores - self._threads + _TOLERATED
        # Threads that sleep come back late only if half of the tolerated load is left, so that a
        # load at the border does not switch them at each look.
        is_busy = self._others > (free - _TOLERATED / 2 if self.is_brief else free)
        if is_busy == self.is_brief or not self._is_ours or self._threads == 1:
            return
        if is_busy:
            self._crowd = Crowd(self._threads)
        else:
            self.close()

    def describe(self) -> str:
        """Return a line for a run's header, after a look."""
        line = f"threads: {self._threads} on {self._cores:g} cores"
        if self._last is None:
            return line
        line += f", of which other processes use {self._others:.1f}"
        if self._threads == 1:
            return line
        if not self._is_ours:
            names = " and ".join(sorted(self._chosen)) or "OpenMP"
            return f"{line}; waiting threads spin as {names} says"
        if not self.is_brief:
            return f"{line}; waiting threads spin"
        return f"{line}; waiting threads sleep soon; {self._hint()}"

    def _hint(self) -> str:
        free = max(1, int(self._cores - self._others + _TOLERATED))
        if free >= self._threads:
            return "steps are slower than on idle cores"
        return f"OMP_NUM_THREADS={free} may be faster (a new run: sums get other last bits)"

    def after_step(self, step: int, seconds: float) -> str | None:
        """Take note of a step; look if a second is over, and return a warning, at most once.

        The warning says that steps take much longer since other processes use the cores.
        """
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        if self._seconds < LOOK_SECONDS:
            return None
        mean, self._steps, self._seconds = self._seconds / self._steps, 0, 0.0
        self.look()
        if self._others <= _TOLERATED:
            self._idle_seconds = min(self._idle_seconds, mean)
        if self._has_warned or mean < SLOWER_BY * self._idle_seconds or self._others <= _TOLERATED:
            return None
        self._has_warned = True
        return (
            f"step {step}: other processes use {self._others:.1f} of {self._cores:g} cores, and a "
            f"step takes {mean:.3g} s in place of {self._idle_seconds:.3g} s"
        )

    def close(self) -> None:
        """Let the threads end that make OpenMP's threads sleep soon."""
        if self._crowd is not None:
            self._crowd.close()
            self._crowd = None


class Crowd:
    """Hold more OpenMP threads than there are cores, all asleep, until it is closed.

    GNU's OpenMP counts its threads, and lets all of them spin briefly while there are too many.
    Each of our threads opens one parallel loop of `threads` threads, and sleeps; its others sleep,
    too, and end with it.
    """

    def __init__(self, threads: int) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        missing = max(1, cores - threads + 1)
        count = -(-missing // (threads - 1))
        self._end = threading.Event()
        begun = threading.Barrier(count + 1)
        self._threads = [
            threading.Thread(target=self._sleep, args=(begun,), name="megafp8 sleeps", daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()
        begun.wait()

    def _sleep(self, begun: threading.Barrier) -> None:
        import torch  # settings are read without it

        torch.zeros(1 << 18).add_(1)  # large enough that torch divides it over its threads
        begun.wait()
        self._end.wait()

    def close(self) -> None:
        """Let the threads end, and wait until they have."""
        self._end.set()
        for thread in self._threads:
            thread.join()
