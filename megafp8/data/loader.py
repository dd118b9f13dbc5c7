"""Make microbatches for one data-parallel rank, read ahead in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megafp8.data.samples import FiniteSource, SampleSource
from megafp8.specs.data import IGNORE

STEPS_AHEAD = 2
BEGINS = 1  # marks a token with which a document begins, where a sample says so itself
PAD_ID = 0  # any token is right here: no counted position attends to padding


# B samples of a microbatch, S tokens of a sample
@dataclass(frozen=True, kw_only=True)
class DocumentRules:
    """Hold NeMo's three switches; a token that ends a document belongs to that document.

    Where windows mark the beginnings of documents, `eod_id` does not matter for the first two.
    """

    eod_id: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def position_ids(
        self, tokens_BS: NDArray[np.int64], marks_BS: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64] | None:
        """Return each token's position since its document's or the sample's start, int64 [B, S].

        The result is None if `reset_position_ids` is off. `marks_BS` is BEGINS where a document
        begins; without it documents begin after `eod_id`.
        """
        if not self.reset_position_ids:
            return None
        places_BS = np.broadcast_to(np.arange(tokens_BS.shape[1]), tokens_BS.shape)
        starts_BS = np.where(self._begins(tokens_BS, marks_BS), places_BS, 0)
        positions_BS: NDArray[np.int64] = places_BS - np.maximum.accumulate(starts_BS, axis=1)
        return positions_BS

    def cu_seqlens(
        self, tokens_BS: NDArray[np.int64], marks_BS: NDArray[np.int64] | None = None
    ) -> NDArray[np.int32] | None:
        """Return where each document begins among the B * S tokens, then B * S: int32 [N + 1].

        Each sample begins with a document. The result is None if `reset_attention_mask` is off.
        `marks_BS` is that of `position_ids`.
        """
        if not self.reset_attention_mask:
            return None
        begins_BS = self._begins(tokens_BS, marks_BS)
        begins_BS[:, 0] = True
        return np.append(np.flatnonzero(begins_BS), begins_BS.size).astype(np.int32)

    def targets(
        self, tokens_BS: NDArray[np.int64], targets_BS: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the targets [B, S]; if `eod_mask_loss`, nothing is predicted after a document's
        end.
        """
        if not self.eod_mask_loss:
            return targets_BS
        masked_BS: NDArray[np.int64] = np.where(tokens_BS == self.eod_id, IGNORE, targets_BS)
        return masked_BS

    def _begins(
        self, tokens_BS: NDArray[np.int64], marks_BS: NDArray[np.int64] | None
    ) -> NDArray[np.bool_]:
        """Return where a document begins inside the sample: where it is marked, or without marks
        after each end of a document.
        """
        if marks_BS is not None:
            return np.equal(marks_BS, BEGINS)
        begins_BS = np.zeros(tokens_BS.shape, np.bool_)
        begins_BS[:, 1:] = tokens_BS[:, :-1] == self.eod_id
        return begins_BS


# B samples of a microbatch, S tokens of a sample, N documents of a microbatch
@dataclass(frozen=True)
class Microbatch:
    """Hold what one forward pass reads: writable, contiguous int64 arrays of [B, S].

    `targets_BS` is IGNORE (-100) where nothing is predicted. If documents are kept apart,
    `position_ids_BS` counts from each document's first token, and `cu_seqlens_N1` (int32) has the
    place of each document's first token among all B * S tokens, then B * S. A token attends only to
    tokens of its document.
    """

    tokens_BS: NDArray[np.int64]  # noqa: N815 (shape suffix)
    targets_BS: NDArray[np.int64]  # noqa: N815 (shape suffix)
    position_ids_BS: NDArray[np.int64] | None = None  # noqa: N815 (shape suffix)
    cu_seqlens_N1: NDArray[np.int32] | None = None  # noqa: N815 (shape suffix)

    @property
    def num_targets(self) -> int:
        """Return the number of targets that are counted."""
        return int(np.count_nonzero(self.targets_BS != IGNORE))


def microbatch(
    windows: Sequence[NDArray[np.int64]], rules: DocumentRules | None = None
) -> Microbatch:
    """Return the inputs and targets of windows.

    A window is [S + 1] tokens, or [3, S + 1]: tokens, the same tokens with IGNORE where nothing is
    predicted, and BEGINS where a document begins.
    """
    stacked = np.stack(windows)
    marks_BS: NDArray[np.int64] | None = None
    windows_BT = predicted_BT = stacked
    if stacked.ndim == 3:
        windows_BT, predicted_BT, marks_BT = np.moveaxis(stacked, 1, 0)
        marks_BS = marks_BT[:, :-1]
    raw_BS = windows_BT[:, :-1]  # includes padding, which ends no document
    tokens_BS = np.ascontiguousarray(np.where(raw_BS == IGNORE, PAD_ID, raw_BS))
    targets_BS = predicted_BT[:, 1:].copy()
    if rules is None:
        return Microbatch(tokens_BS, targets_BS)
    return Microbatch(
        tokens_BS,
        rules.targets(raw_BS, targets_BS),
        rules.position_ids(raw_BS, marks_BS),
        rules.cu_seqlens(raw_BS, marks_BS),
    )


def pinned(batch: Microbatch) -> Microbatch:
    """Return the same arrays in page-locked memory, which is freed with them."""
    import torch

    arrays = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    moved = {
        name: torch.from_numpy(array).pin_memory().numpy()
        for name, array in arrays
        if array is not None
    }
    return replace(batch, **moved)


def rank_samples(
    consumed_samples: int, num_microbatches: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> NDArray[np.int64]:
    """Return the numbers [M, B] of one rank's samples of the global batch after `consumed_samples`.

    Sample b of microbatch m is `consumed + m * (B * dp_size) + dp_rank * B + b`. Over all ranks
    these are the next M * B * dp_size numbers, for any `dp_size`.
    """
    first_of_microbatch = np.arange(num_microbatches)[:, None] * (micro_batch_size * dp_size)
    within = dp_rank * micro_batch_size + np.arange(micro_batch_size)
    numbers: NDArray[np.int64] = consumed_samples + first_of_microbatch + within
    return numbers


class Loader:
    """Iterate over optimizer steps: each item is the list of this rank's microbatches.

    Threads read ahead, each a whole step. An exception in a thread is raised by the `next` that
    needed the failed step and by every later one. Use the loader as a context manager, or call
    `close`.
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
        rules: DocumentRules | None = None,
        num_workers: int = 1,
        pin_memory: bool = False,
    ) -> None:
        """Start to read ahead.

        Args:
            source: The endless training stream; several threads may read it at once.
            micro_batch_size: The samples per microbatch and rank.
            num_microbatches: The microbatches per rank and step, or a function from the consumed
                samples at a step's start to those of that step.
            dp_rank: This rank's position on the data-parallel axis.
            dp_size: The number of ranks on that axis.
            consumed_samples: The samples that all ranks together have trained on already.
            rules: The rules for document ends; None applies none.
            num_workers: The number of threads; with 0 `next` itself reads.
            pin_memory: Whether arrays are page-locked, so that a GPU copies them while it computes.
        """
        assert 0 <= dp_rank < dp_size, f"dp_rank {dp_rank} of {dp_size}"
        self._source, self._rules, self._pins = source, rules, pin_memory
        self._num_microbatches = num_microbatches
        self._layout = (micro_batch_size, dp_rank, dp_size)
        self._round_size = micro_batch_size * dp_size
        self.consumed_samples = consumed_samples  # the samples of the steps returned so far
        self._asked_for = (
            consumed_samples  # the samples of the steps that threads read or have read
        )
        self._ready: deque[Future[list[Microbatch]]] = deque()
        self._closed = False
        self._failure: BaseException | None = None
        self._threads = (
            ThreadPoolExecutor(num_workers, thread_name_prefix="data-loader")
            if num_workers
            else None
        )
        for _ in range(STEPS_AHEAD + num_workers if num_workers else 0):
            self._read_ahead()

    def __iter__(self) -> Iterator[list[Microbatch]]:
        return self

    def __next__(self) -> list[Microbatch]:
        if self._closed:
            raise RuntimeError("the loader is closed")
        if self._failure is None:
            try:
                step = self._next_step()
            # Every later `next` must raise the same exception, whatever it is.
            except BaseException as error:
                self._failure = error
            else:
                self.consumed_samples += len(step) * self._round_size
                return step
        raise self._failure

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_step(self) -> list[Microbatch]:
        if self._threads is None:
            return self._step(self.consumed_samples)
        step = self._ready.popleft().result()
        self._read_ahead()
        return step

    def _read_ahead(self) -> None:
        assert self._threads is not None
        self._ready.append(self._threads.submit(self._step, self._asked_for))
        self._asked_for += self._count(self._asked_for) * self._round_size

    def _count(self, consumed_samples: int) -> int:
        """Return the number of microbatches of the step that begins there."""
        count = self._num_microbatches
        return count if isinstance(count, int) else count(consumed_samples)

    def _step(self, consumed_samples: int) -> list[Microbatch]:
        count = self._count(consumed_samples)
        step = [
            microbatch([self._source[int(number)] for number in numbers], self._rules)
            for numbers in rank_samples(consumed_samples, count, *self._layout)
        ]
        return [pinned(batch) for batch in step] if self._pins else step


def validation_batches(
    source: FiniteSource,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    limit: int | None = None,
    *,
    multiple_of: int = 1,
    rules: DocumentRules | None = None,
) -> Iterator[Microbatch]:
    """Yield this rank's share of the validation samples; each sample is in one microbatch of one
    rank.

    Every rank gets the same number of full microbatches, because ranks meet in collectives. Samples
    that fill up the last microbatches have only IGNORE as targets.

    Args:
        source: The validation samples.
        micro_batch_size: The samples per microbatch.
        dp_rank: This rank's position on the data-parallel axis.
        dp_size: The number of ranks on that axis.
        limit: The largest number of samples over all ranks, spread evenly over the source and the
            same for every layout; None takes all.
        multiple_of: The samples over all ranks are a multiple of this number; if there are fewer
            samples than that, all are taken.
        rules: The rules for document ends; None applies none.
    """
    total, count = source.num_samples, _num_chosen(source, limit, multiple_of)
    chosen = np.arange(count, dtype=np.int64) * total // max(count, 1)
    nothing = np.full_like(source[0], IGNORE)
    per_round = micro_batch_size * dp_size
    for first in range(0, count, per_round):
        (numbers,) = rank_samples(first, 1, micro_batch_size, dp_rank, dp_size)
        windows = [source[int(chosen[n])] if n < count else nothing for n in numbers]
        yield microbatch(windows, rules)


def num_validation_batches(
    source: FiniteSource,
    micro_batch_size: int,
    dp_size: int,
    limit: int | None = None,
    *,
    multiple_of: int = 1,
) -> int:
    """Return the number of microbatches that `validation_batches` yields with these arguments."""
    return -(-_num_chosen(source, limit, multiple_of) // (micro_batch_size * dp_size))


def _num_chosen(source: FiniteSource, limit: int | None, multiple_of: int) -> int:
    """Return the number of samples of a validation, over all ranks."""
    count = source.num_samples if limit is None else min(limit, source.num_samples)
    return count - count % multiple_of if count >= multiple_of else count
