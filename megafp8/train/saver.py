"""Write a run's checkpoints on all ranks together, at once or in the background.

In the background, a thread hashes and writes a copy of the state without Python's lock. A second
process would need the copy sent to it, and a forked process may not use a GPU or torch's threads.
"""

from __future__ import annotations

import math
import platform
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megafp8
from megafp8.checkpoint import store
from megafp8.checkpoint.best import METRICS, NONE, Best
from megafp8.checkpoint.manifest import Placement
from megafp8.checkpoint.reader import SCALES
from megafp8.checkpoint.step_directories import set_aside, step_name
from megafp8.errors import NonFiniteError, UserError
from megafp8.files import note_progress, os_errors_reported
from megafp8.ops import torch_private
from megafp8.parallel.agreement import first_known, on_all, on_main, raise_on_all
from megafp8.parallel.launch import note_checkpoint
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.rendezvous import group_that_waits
from megafp8.train import state_dict
from megafp8.train.scaling_dict import SCALING_LAYOUT, scaling_layout
from megafp8.train.state import TrainState

Notify = Callable[[str], None]

# Torch divides larger tensors among threads. For the thread that writes in the background, it would
# start more threads, which compete with those that train.
_ELEMENTS_OF_ONE_THREAD = 16384

_ALIGNMENT_BYTES = 64


class Saver:
    """Write a run's checkpoints under `root`, and keep the newest and the best ones."""

    def __init__(self, root: Path, keep: int, meta: dict[str, Any], best: Best = NONE) -> None:
        self.root, self.keep, self.meta, self.best = root, keep, meta, best
        self.metrics: dict[str, float] = {}  # the last measured values, by name
        self._known_good: Collection[Path] = ()
        self.last_step: int | None = None  # step of the newest checkpoint of this run
        self._versions = {
            "megafp8": megafp8.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "commit": _commit(),
        }

    def save(self, state: TrainState) -> Path:
        """Save the state and return the checkpoint's directory. All ranks call it together.

        Raises:
            CheckpointError: Some rank failed to write; every rank raises.
            NonFiniteError: The state has a value that is not finite, and is therefore not saved.
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
        """Save `pieces` and `meta`, which were taken from a state at `step`; see `save`.

        The ranks agree within `group`, or within that of the mesh if it is None.
        """
        if bad := first_known(mesh, _first_nonfinite(pieces), group):
            raise_on_all(
                NonFiniteError(
                    f"step {step}: {bad} is not finite: this step was not saved. The same command "
                    "continues from the checkpoint before it; lower model.optim.lr if this happens "
                    "again"
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
            note_checkpoint(committed)
            self._known_good = store.prune(self.root, self.keep, self._known_good, best=self.best)
            return committed

        final = on_main(mesh, commit, group)
        self.last_step = step
        return final

    def path_of(self, step: int) -> Path:
        """Return the directory of the checkpoint of `step`."""
        return self.root / step_name(step)

    def meta_of(self, state: TrainState) -> dict[str, Any]:
        """Return the scalars of the state, and the metrics that were measured last."""
        return {
            **self.meta,
            SCALING_LAYOUT: scaling_layout(state),
            METRICS: {n: v for n, v in sorted(self.metrics.items()) if math.isfinite(v)},
            "consumed_samples": state.consumed_samples,
            "num_updates": state.optimizer.num_updates,
            "num_skipped": state.num_skipped,
            "loss_scale": None if state.loss_scale is None else state.loss_scale.state(),
            "versions": self._versions,
        }


def newest_after_cleanup(root: Path, mesh: Mesh, notify: Notify) -> Path | None:
    """Return the newest checkpoint that verifies, or None; the main rank finds it for all.

    Newer checkpoints, which are damaged, are renamed, because pruning needs the newest one to be
    good. Checkpoints that a killed process left half written are deleted, to free disk space.
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
        if placement.name.startswith(("model/", "optimizer/", SCALES)):
            flat = placement.tensor.detach().flatten()
            flat = flat.float() if flat.itemsize == 1 else flat  # torch has no test for FP8
            parts = flat.split(_ELEMENTS_OF_ONE_THREAD) if flat.device.type == "cpu" else (flat,)
            if not all(torch.isfinite(part).all() for part in parts):
                return placement.name
            note_progress()
    return None


def _commit() -> str | None:
    """Return the git commit of the code that runs, or None outside of a checkout."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


class Snapshot:
    """Hold memory for a copy of every tensor that this rank writes.

    The memory is one block, which is allocated and written to at the beginning. It is page-locked
    if the state is on a GPU, so that copies run at the bus's speed.
    """

    def __init__(self, placements: Iterable[Placement]) -> None:
        own = [p for p in placements if _is_written(p)]
        starts, size = [], 0
        for placement in own:
            starts.append(size)
            size += -(-placement.tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        block = torch.ones(size, dtype=torch.uint8)  # the first write to a page takes longest
        if any(p.tensor.is_cuda for p in own):
            _lock_pages(block)
        self.num_bytes = sum(p.tensor.nbytes for p in own)
        self._copies = {
            (p.name, p.offset): _over(p, block[start : start + p.tensor.nbytes])
            for p, start in zip(own, starts, strict=True)
        }

    def take(self, placements: Iterable[Placement]) -> list[Placement]:
        """Copy the tensors of `placements`, and return placements of the copies, without replicas.

        The state may change as soon as this method returns. The copies stay the same until the next
        call.
        """
        own = [p for p in placements if _is_written(p)]
        if not own:  # a replica, which writes nothing
            return []
        taken = [self._copies[p.name, p.offset] for p in own]
        sources = [p.tensor.detach() for p in own]
        # One call copies all, since most tensors are rows of FP8 tables of a few bytes each.
        torch_private.copy_all_([p.tensor for p in taken], sources, non_blocking=True)
        if any(source.is_cuda for source in sources):
            torch.cuda.current_stream().synchronize()
        return taken


def _lock_pages(block: torch.Tensor) -> None:
    """Page-lock memory in place, until it is freed.

    torch's `pin_memory` would round its size up to a power of two: 96 GB of state would take 128.
    """
    cudart = torch.cuda.cudart()
    address = block.data_ptr()
    torch.cuda.check_error(cudart.cudaHostRegister(address, block.nbytes, 0))
    weakref.finalize(block.untyped_storage(), cudart.cudaHostUnregister, address)


def _is_written(placement: Placement) -> bool:
    return placement.replica == 0


def _over(placement: Placement, block: torch.Tensor) -> Placement:
    tensor = block.view(placement.tensor.dtype).view(placement.tensor.shape)
    return Placement(placement.name, placement.global_shape, placement.offset, tensor)


@dataclass(frozen=True)
class Saved:
    """Describe a checkpoint that is on the disk, and the time that it took."""

    step: int
    path: Path
    pause_seconds: float  # during which training stood still
    seconds: float  # from the request until it was on the disk


class BackgroundSaver:
    """Save checkpoints in the background, one at a time. All ranks make and call it together.

    The threads of the ranks agree in a process group of their own, so that their messages do not
    mix with those of training.
    """

    def __init__(self, saver: Saver, state: TrainState) -> None:
        self._saver = saver
        self._placements = state_dict.RepeatedPlacements(state)
        self._snapshot = Snapshot(self._placements.now())
        self._group = None
        if state.mesh.world.size > 1:
            self._group = group_that_waits()
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self.step: int | None = None  # of the checkpoint that `wait` is due for

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that this rank's copy of the state takes."""
        return self._snapshot.num_bytes

    def start(self, state: TrainState) -> None:
        """Copy the state and begin to write it. `wait` must have ended the save before."""
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
            except BaseException as error:  # `wait` raises it in the main thread
                self._error = error

        self._saved = self._error = None
        self.step = step
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def has_ended(self) -> bool:
        """Whether a save was begun and its thread has ended, so that `wait` returns at once."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> Saved:
        """Wait for the save that `start` began; return its result or raise its error."""
        assert self._thread is not None, "nothing was begun"
        self._thread.join()
        self._thread, self.step = None, None
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved
