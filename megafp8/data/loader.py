"""Microbatches for one data-parallel rank, read ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megafp8.data.samples import IGNORE, FiniteSource, SampleSource

STEPS_AHEAD = 2
PAD_ID = 0  # any token will do: no counted position attends to padding


# B samples of a microbatch, S tokens of a sample
@dataclass(frozen=True)
class Microbatch:
    """What one forward pass reads: writable, contiguous int64 arrays of [B, S].

    `targets_BS` is IGNORE (-100) where nothing is to be predicted.
    """

    tokens_BS: NDArray[np.int64]  # noqa: N815 (shape suffix)
    targets_BS: NDArray[np.int64]  # noqa: N815 (shape suffix)

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.targets_BS != IGNORE))


def microbatch(windows: Sequence[NDArray[np.int64]]) -> Microbatch:
    """Inputs and targets of windows of [S + 1] each."""
    windows_BT = np.stack(windows)
    tokens_BS = np.where(windows_BT[:, :-1] == IGNORE, PAD_ID, windows_BT[:, :-1])
    return Microbatch(np.ascontiguousarray(tokens_BS), windows_BT[:, 1:].copy())


def rank_samples(
    consumed_samples: int, num_microbatches: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> NDArray[np.int64]:
    """Numbers of one rank's samples of the global batch after `consumed_samples`: [M, B].

    Sample b of microbatch m is `consumed + m * (B * dp_size) + dp_rank * B + b`: over all ranks
    these are the next M * B * dp_size numbers, at any `dp_size`.
    """
    first_of_microbatch = np.arange(num_microbatches)[:, None] * (micro_batch_size * dp_size)
    within = dp_rank * micro_batch_size + np.arange(micro_batch_size)
    numbers: NDArray[np.int64] = consumed_samples + first_of_microbatch + within
    return numbers


class Loader:
    """Iterates optimizer steps: each item is the list of this rank's microbatches.

    A thread reads up to two steps ahead. An exception in it is raised by the `next` that needed
    the failed step, and by every one after it. Use it in a `with`, or call `close`.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        micro_batch_size: int,
        num_microbatches: int | Callable[[int], int],
        dp_rank: int,
        dp_size: int,
        consumed_samples: int = 0,
    ) -> None:
        """Starts to read ahead.

        Args:
            source: The endless training stream.
            micro_batch_size: Samples per microbatch and rank.
            num_microbatches: Microbatches per rank and step; a function tells those of the step
                that begins after so many consumed samples.
            dp_rank: This rank's place on the data-parallel axis.
            dp_size: Ranks on that axis.
            consumed_samples: Samples that all ranks together have trained on already.
        """
        assert 0 <= dp_rank < dp_size, f"dp_rank {dp_rank} of {dp_size}"
        self._source = source
        self._num_microbatches = num_microbatches
        self._layout = (micro_batch_size, dp_rank, dp_size)
        self._round_size = micro_batch_size * dp_size
        self.consumed_samples = consumed_samples  # by the steps handed out so far
        self._ready: queue.Queue[list[Microbatch] | BaseException] = queue.Queue(STEPS_AHEAD)
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._read_ahead, args=(consumed_samples,), name="data-loader", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[list[Microbatch]]:
        return self

    def __next__(self) -> list[Microbatch]:
        if self._closing.is_set():
            raise RuntimeError("the loader is closed")
        if self._failure is None:
            step = self._ready.get()
            if not isinstance(step, BaseException):
                self.consumed_samples += len(step) * self._round_size
                return step
            self._failure = step
        raise self._failure

    def close(self) -> None:
        """Ends the thread; safe to call twice."""
        self._closing.set()
        while self._thread.is_alive():
            try:  # a full queue would keep the thread waiting
                self._ready.get_nowait()
            except queue.Empty:
                pass
            self._thread.join(timeout=0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read_ahead(self, consumed_samples: int) -> None:
        while not self._closing.is_set():
            item: list[Microbatch] | BaseException
            try:
                item = self._step(consumed_samples)
            # Whatever it is, `next` has to raise it: nothing else would ever wake it.
            except BaseException as error:
                item = error
            self._ready.put(item)
            if isinstance(item, BaseException):
                return
            consumed_samples += len(item) * self._round_size

    def _step(self, consumed_samples: int) -> list[Microbatch]:
        count = self._num_microbatches
        count = count if isinstance(count, int) else count(consumed_samples)
        return [
            microbatch([self._source[int(number)] for number in numbers])
            for numbers in rank_samples(consumed_samples, count, *self._layout)
        ]


def validation_batches(
    source: FiniteSource,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    limit: int | None = None,
) -> Iterator[Microbatch]:
    """This rank's share of the validation samples, each in one microbatch of one rank.

    Every rank gets the same number of microbatches, all full, because ranks meet in collectives;
    samples that fill up the last ones have no targets, only IGNORE.

    Args:
        source: The validation samples.
        micro_batch_size: Samples per microbatch.
        dp_rank: This rank's place on the data-parallel axis.
        dp_size: Ranks on that axis.
        limit: At most so many samples over all ranks, spread evenly over the source; the choice is
            the same for every layout. None: all of them.
    """
    total = source.num_samples
    count = total if limit is None else min(limit, total)
    chosen = np.arange(count, dtype=np.int64) * total // max(count, 1)
    nothing = np.full(source.seq_length + 1, IGNORE, np.int64)
    per_round = micro_batch_size * dp_size
    for first in range(0, count, per_round):
        (numbers,) = rank_samples(first, 1, micro_batch_size, dp_rank, dp_size)
        yield microbatch([source[int(chosen[n])] if n < count else nothing for n in numbers])
