"""Mix several datasets by weight.

After any number n of samples, each dataset has given `weight * n` of them, to within one sample:
with K datasets the difference is at most 1 - 1 / (2K - 2). The order is R. Tijdeman's for the
chairman assignment problem (Discrete Mathematics 32, 1980).
Megatron always takes the dataset that lags most, which for some weights of many datasets is off by
more than one sample.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from megafp8.data.samples import FiniteSource, SampleSource

CHUNK = 1 << 13  # samples scheduled at once
CHUNKS_KEPT = 8


class BlendSchedule:
    """Say for each sample of the blend which dataset it comes from and which of its samples it is.

    The schedule is exact: weights are integers, and the order repeats when every dataset has given
    its whole share. Samples are scheduled in chunks when they are first asked for. All earlier
    chunks are scheduled first, which takes about a second per million samples.
    """

    def __init__(self, weights: Sequence[str]) -> None:
        """Take the weights as decimal texts, all above 0."""
        exact = [Fraction(weight) for weight in weights]
        assert exact and min(exact) > 0, weights
        common = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * common) for weight in exact]
        divisor = math.gcd(*whole)
        self.weights = [weight // divisor for weight in whole]
        self.period = sum(self.weights)
        # The counts at the start of each scheduled chunk, and the choices of the last chunks.
        self._counts: list[list[int]] = [[0] * len(whole)]
        self._chunks: dict[int, tuple[NDArray[np.int32], NDArray[np.int64]]] = {}
        self._lock = Lock()

    def __getitem__(self, index: int, /) -> tuple[int, int]:
        """Return (dataset, number of its sample) for sample `index` >= 0 of the blend."""
        periods, place = divmod(index, self.period)
        number, within = divmod(place, CHUNK)
        with self._lock:
            datasets, samples = self._chunk(number)
        dataset = int(datasets[within])
        return dataset, periods * self.weights[dataset] + int(samples[within])

    def counts(self, num_samples: int) -> list[int]:
        """Return how many of the first `num_samples` samples come from each dataset."""
        periods, place = divmod(num_samples, self.period)
        number, within = divmod(place, CHUNK)
        with self._lock:
            datasets, _ = self._chunk(number)
            before = self._counts[number]
        inside = np.bincount(datasets[:within], minlength=len(self.weights))
        return [
            periods * weight + start + int(count)
            for weight, start, count in zip(self.weights, before, inside, strict=True)
        ]

    def _chunk(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        known = self._chunks.get(number)
        if known is not None:
            return known
        first = min(number, len(self._counts) - 1)
        for n in range(first, number + 1):
            chunk, after = _schedule(self.weights, self.period, n * CHUNK, self._counts[n])
            if n + 1 == len(self._counts):
                self._counts.append(after)
        while len(self._chunks) >= CHUNKS_KEPT:
            self._chunks.pop(next(iter(self._chunks)))
        self._chunks[number] = chunk
        return chunk


def _schedule(
    weights: Sequence[int], period: int, start: int, counts: Sequence[int]
) -> tuple[tuple[NDArray[np.int32], NDArray[np.int64]], list[int]]:
    """Return the choices for samples `start` to `start + CHUNK` of a period, and the counts after
    them.

    A dataset may give its sample j at the first n with `weight * n - j >= slack`, with n counted
    from 1, and must give it before `weight * n - j` exceeds `1 - slack`. Of the datasets that may
    give a sample, the one with the earliest deadline is chosen.
    """
    num_datasets = len(weights)
    now = list(counts)
    datasets = np.zeros(CHUNK, np.int32)
    samples = np.zeros(CHUNK, np.int64)
    if num_datasets == 1:
        samples[:] = np.arange(start, start + CHUNK)
        return (datasets, samples), [start + CHUNK]
    # In units of 1 / (parts * period): whole numbers, so nothing is rounded.
    parts = 2 * num_datasets - 2

    def release(dataset: int) -> int:
        return -(-(parts * now[dataset] + 1) * period // (parts * weights[dataset]))

    def deadline(dataset: int) -> float:
        return (parts * now[dataset] + parts - 1) * period / (parts * weights[dataset])

    waiting = [(release(d), d) for d in range(num_datasets)]
    heapq.heapify(waiting)
    ready: list[tuple[float, int]] = []
    for place in range(min(CHUNK, period - start)):
        n = start + place + 1
        while waiting and waiting[0][0] <= n:
            dataset = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (deadline(dataset), dataset))
        dataset = heapq.heappop(ready)[1]
        datasets[place], samples[place] = dataset, now[dataset]
        now[dataset] += 1
        heapq.heappush(waiting, (release(dataset), dataset))
    return (datasets, samples), now


class BlendedSamples:
    """Blend endless streams of samples into one endless stream."""

    def __init__(self, sources: Sequence[SampleSource], weights: Sequence[str]) -> None:
        assert len(sources) == len(weights), f"{len(sources)} sources, {len(weights)} weights"
        self.sources = tuple(sources)
        self.schedule = BlendSchedule(weights)

    @property
    def num_samples_per_epoch(self) -> int:
        """Return the number of samples until the first of the datasets has been read whole."""
        total, weights = self.schedule.period, self.schedule.weights
        pairs = zip(self.sources, weights, strict=True)
        return min(source.num_samples_per_epoch * total // weight for source, weight in pairs)

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        dataset, sample = self.schedule[index]
        return self.sources[dataset][sample]


class JoinedSamples:
    """Join finite sources one after another."""

    def __init__(self, sources: Sequence[FiniteSource]) -> None:
        self._sources = tuple(sources)
        self._ends = np.cumsum([source.num_samples for source in sources]).tolist()

    @property
    def seq_length(self) -> int:
        return self._sources[0].seq_length

    @property
    def num_samples(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        number = bisect_right(self._ends, index)
        return self._sources[number][index - (self._ends[number - 1] if number else 0)]
