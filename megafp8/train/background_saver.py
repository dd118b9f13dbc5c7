"""Write checkpoints in the background, from a copy of the state.

A thread hashes and writes the copy without Python's lock. A second process would need the copy sent
to it, and a forked process may not use a GPU or torch's threads.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megafp8.checkpoint.manifest import Placement
from megafp8.ops import torch_private
from megafp8.parallel.rendezvous import group_that_waits
from megafp8.train import state_dict
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState

_ALIGNMENT_BYTES = 64


class Snapshot:
    """Hold memory for a copy of every tensor that this rank writes.

    The memory is one block, which is allocated and written to at the beginning. It is page-locked
    if the state is on a GPU, so that copies run at the bus's speed. Tensors that the state has
    later, as after a change of precision, get a block of their own when they are first copied.
    """

    def __init__(self, placements: Iterable[Placement]) -> None:
        self._copies: dict[tuple[str, tuple[int, ...]], Placement] = {}
        self._allocate([p for p in placements if _is_written(p)])

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the copies take."""
        return sum(copy.tensor.nbytes for copy in self._copies.values())

    def _allocate(self, written: Sequence[Placement]) -> None:
        """Give the copies one block of memory, page-locked where a GPU copies into it."""
        starts, size = [], 0
        for placement in written:
            starts.append(size)
            size += -(-placement.tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        block = torch.ones(size, dtype=torch.uint8)  # the first write to a page takes longest
        if any(p.tensor.is_cuda for p in written):
            _lock_pages(block)
        for p, start in zip(written, starts, strict=True):
            self._copies[p.name, p.offset] = _over(p, block[start : start + p.tensor.nbytes])

    def _has_memory_for(self, placement: Placement) -> bool:
        copy = self._copies.get((placement.name, placement.offset))
        return copy is not None and _form(copy) == _form(placement)

    def take(self, placements: Iterable[Placement]) -> list[Placement]:
        """Copy the tensors of `placements`, and return placements of the copies, without replicas.

        The state may change as soon as this method returns. The copies stay the same until the next
        call.
        """
        written = [p for p in placements if _is_written(p)]
        if not written:  # a replica, which writes nothing
            return []
        if new := [p for p in written if not self._has_memory_for(p)]:
            self._allocate(new)
        copies = [self._copies[p.name, p.offset] for p in written]
        sources = [p.tensor.detach() for p in written]
        # One call copies all, since most tensors are rows of FP8 tables of a few bytes each.
        torch_private.copy_all_([p.tensor for p in copies], sources, non_blocking=True)
        if any(source.is_cuda for source in sources):
            torch.cuda.current_stream().synchronize()
        return copies


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


def _form(placement: Placement) -> tuple[object, ...]:
    return placement.global_shape, placement.tensor.shape, placement.tensor.dtype


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
