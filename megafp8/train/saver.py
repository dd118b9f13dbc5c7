"""A run's checkpoints: written on all ranks together, now or beside training.

Beside training a thread hashes and writes a copy of the state without Python's lock. A second
process would have to be given the copy, and a forked one may not touch a GPU or torch's threads.
"""

from __future__ import annotations

import math
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megafp8
from megafp8.checkpoint import store
from megafp8.checkpoint.best import METRICS, NONE, Best
from megafp8.checkpoint.layout import set_aside, step_name
from megafp8.checkpoint.placement import Placement
from megafp8.errors import NonFiniteError, UserError
from megafp8.files import os_errors_reported
from megafp8.parallel.agreement import first_known, on_all, on_main, raise_on_all
from megafp8.parallel.mesh import Mesh
from megafp8.train import state_dict
from megafp8.train.state import TrainState

Notify = Callable[[str], None]

# Torch shares out larger tensors among its threads: a thread of the background would get a team of
# its own, beside the one that trains.
_ELEMENTS_OF_ONE_THREAD = 16384


class Saver:
    """Writes a run's checkpoints under `root` and keeps the newest and the best ones."""

    def __init__(self, root: Path, keep: int, meta: dict[str, Any], best: Best = NONE) -> None:
        self.root, self.keep, self.meta, self.best = root, keep, meta, best
        self.metrics: dict[str, float] = {}  # what was measured last, by its name
        self._known_good: Collection[Path] = ()
        self.last_step: int | None = None  # of the newest checkpoint that this run has committed
        self._versions = {
            "megafp8": megafp8.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "commit": _commit(),
        }

    def save(self, state: TrainState) -> Path:
        """All ranks together. Raises `CheckpointError` on every rank if any of them fails.

        A state that is not finite is never saved as good: that is a `NonFiniteError`.
        """
        return self.write(
            state.mesh, state.step, list(state_dict.placements(state)), self.meta_of(state)
        )

    def write(
        self,
        mesh: Mesh,
        step: int,
        pieces: Sequence[Placement],
        meta: dict[str, Any],
        group: dist.ProcessGroup | None = None,
    ) -> Path:
        """`save` of what was taken from a state before. The ranks agree within `group`; None: all
        ranks' own."""
        if bad := first_known(mesh, _first_nonfinite(pieces), group):
            raise_on_all(
                NonFiniteError(
                    f"step {step}: {bad} is not finite: this step was not saved. The same command "
                    "continues from the checkpoint before it; lower model.optim.lr if it comes back"
                )
            )
        staging = on_main(mesh, lambda: store.begin(self.root, step), group)
        file_name = f"rank{mesh.world.rank}.safetensors"
        try:
            entries = on_all(mesh, lambda: store.write_shard(staging, file_name, pieces), group)
        except UserError:
            if mesh.is_main:
                store.discard(staging)
            raise

        def commit() -> Path:
            committed = store.commit(staging, self.root, step, entries, meta)
            self._known_good = store.prune(self.root, self.keep, self._known_good, best=self.best)
            return committed

        final = on_main(mesh, commit, group)
        self.last_step = step
        return final

    def path_of(self, step: int) -> Path:
        return self.root / step_name(step)

    def meta_of(self, state: TrainState) -> dict[str, Any]:
        """The scalars of the state, and what was measured last."""
        return {
            **self.meta,
            METRICS: {n: v for n, v in sorted(self.metrics.items()) if math.isfinite(v)},
            "consumed_samples": state.consumed_samples,
            "num_updates": state.optimizer.num_updates,
            "num_skipped": state.num_skipped,
            "loss_scale": None if state.loss_scale is None else state.loss_scale.state(),
            "versions": self._versions,
        }


def newest_valid(root: Path, mesh: Mesh, notify: Notify) -> Path | None:
    """The newest checkpoint that verifies, found by the main rank for all.

    Damaged ones after it are renamed: they are no longer the newest, which pruning insists on.
    What a killed process left half written goes: it may be what fills the disk.
    """

    def find() -> Path | None:
        store.remove_leftovers(root)
        found = store.newest_valid(root, notify)
        _set_aside_after(found)
        return found

    return on_main(mesh, find)


def _set_aside_after(found: Path | None) -> None:
    if found is None:
        return
    paths = [found.parent / step_name(step) for step in store.steps(found.parent)]
    for path in paths[paths.index(found) + 1 :]:
        with os_errors_reported(path, "setting a damaged checkpoint aside"):
            set_aside(path)


def _first_nonfinite(pieces: Iterable[Placement]) -> str | None:
    for placement in pieces:
        if placement.name.startswith(("model/", "optimizer/")):
            flat = placement.tensor.detach().flatten()
            parts = flat.split(_ELEMENTS_OF_ONE_THREAD) if flat.device.type == "cpu" else (flat,)
            if not all(torch.isfinite(part).all() for part in parts):
                return placement.name
    return None


def _commit() -> str | None:
    """The git commit of the code that runs, if it runs from a checkout."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


_ALIGNMENT_BYTES = 64


class Snapshot:
    """Memory for every tensor that this rank writes, taken and touched when it is made.

    One block: page-locked where the state is on a GPU, so that copies run at the bus's speed.
    """

    def __init__(self, placements: Iterable[Placement]) -> None:
        own = [p for p in placements if _is_written(p)]
        starts, size = [], 0
        for placement in own:
            starts.append(size)
            size += -(-placement.tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        pinned = any(p.tensor.is_cuda for p in own)
        block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        block.fill_(1)  # the first write to a page costs far more than the later ones
        self.num_bytes = sum(p.tensor.nbytes for p in own)
        self._copies = {
            (p.name, p.offset): _over(p, block[start : start + p.tensor.nbytes])
            for p, start in zip(own, starts, strict=True)
        }

    def take(self, placements: Iterable[Placement]) -> list[Placement]:
        """The same placements as they are now, over the copies; replicas stay out.

        The state may change as soon as this returns; the copies hold until the next call.
        """
        own = [p for p in placements if _is_written(p)]
        if not own:  # a replica, which writes nothing
            return []
        taken = [self._copies[p.name, p.offset] for p in own]
        sources = [p.tensor.detach() for p in own]
        # One call for all: most of them are rows of FP8 tables, a few bytes each.
        torch._foreach_copy_([p.tensor for p in taken], sources, non_blocking=True)
        if any(source.is_cuda for source in sources):
            torch.cuda.current_stream().synchronize()
        return taken


def _is_written(placement: Placement) -> bool:
    return placement.replica == 0


def _over(placement: Placement, block: torch.Tensor) -> Placement:
    tensor = block.view(placement.tensor.dtype).view(placement.tensor.shape)
    return Placement(placement.name, placement.global_shape, placement.offset, tensor)


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

    def __init__(self, saver: Saver, state: TrainState) -> None:
        self._saver = saver
        self._placements = state_dict.RepeatedPlacements(state)
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
