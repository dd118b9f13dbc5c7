"""Checkpoints written beside training: a copy of the state now, the files while it trains on.

A thread does: it hashes and writes without Python's lock. A second process would have to be given
the copy, and one that is forked may not touch a GPU or torch's threads.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megafp8.train import saving
from megafp8.train.snapshot import Snapshot
from megafp8.train.state import TrainState

# A rank that is done waits for the slowest. If one dies, the launcher or training ends the others.
_AGREEMENT = timedelta(days=1)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk, and what it took."""

    step: int
    path: Path
    pause_seconds: float  # training stood still
    seconds: float  # from the request on


class BackgroundSaver:
    """Saves what `saver` would, one checkpoint at a time. All ranks make and call it together.

    The ranks' threads agree in a group of their own: their messages never meet training's.
    """

    def __init__(self, saver: saving.Saver, state: TrainState) -> None:
        self._saver = saver
        self._placements = saving.RepeatedPlacements(state)
        self._snapshot = Snapshot(self._placements.now())
        self._group = None
        if state.mesh.world.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=_AGREEMENT)
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self.step: int | None = None  # being written, or written and not yet waited for

    @property
    def num_bytes(self) -> int:
        """What this rank's copy takes, in host memory."""
        return self._snapshot.num_bytes

    def start(self, state: TrainState) -> None:
        """Copy the state and begin to write it; the one before has been waited for."""
        assert self.step is None, "two saves overlap"
        began = time.perf_counter()
        placements = self._snapshot.take(self._placements.now())
        meta = self._saver.meta_of(state)
        pause = time.perf_counter() - began
        step, mesh = state.step, state.mesh

        def write() -> None:
            try:
                path = self._saver.write(mesh, step, placements, meta, self._group)
                self._saved = Saved(step, path, pause, time.perf_counter() - began)
            except BaseException as error:  # raised where training can act on it
                self._error = error

        self._saved = self._error = None
        self.step = step
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def has_ended(self) -> bool:
        """Whether there is something to wait for and the wait is short."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> Saved:
        """What came of the save that `start` began; raises what it raised."""
        assert self._thread is not None, "nothing was begun"
        self._thread.join()
        self._thread, self.step = None, None
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved
