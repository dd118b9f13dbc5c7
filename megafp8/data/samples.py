"""Which tokens make which sample: pure index maps over an indexed dataset.

A stream is an end-of-document token, as if a document had just ended, followed by documents in
some order. A window is `seq_length + 1` tokens of it; windows start `seq_length` apart, so each
one's last token is the next one's first, and every token but the leading one is predicted once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megafp8.data.indexed import IndexedDataset, bin_path, idx_path
from megafp8.errors import DataError

IGNORE = -100  # a target that is not counted; the default of torch's cross entropy
# Purposes keep the orders drawn from one seed apart from each other.
_SPLIT, _DOCUMENTS, _WINDOWS = 1, 2, 3
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)


class SampleSource(Protocol):
    """An endless stream of training samples."""

    @property
    def num_samples_per_epoch(self) -> int: ...

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        """Sample `index` >= 0 of the endless stream, [seq_length + 1]."""


@dataclass(frozen=True)
class Repeated:
    """The first `num_samples` samples of a stream, again and again."""

    source: SampleSource
    num_samples: int

    @property
    def num_samples_per_epoch(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        return self.source[index % self.num_samples]


class FiniteSource(Protocol):
    """Samples that are each evaluated once."""

    @property
    def num_samples(self) -> int: ...

    @property
    def seq_length(self) -> int: ...

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        """Sample `index` < num_samples, [seq_length + 1], IGNORE beyond the end."""


@dataclass(frozen=True)
class Splits:
    """Documents of each split, in the order in which they were drawn, int64."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


def shuffled(count: int, *key: int) -> NDArray[np.int64]:
    """A permutation of `range(count)` that depends on `key` alone.

    Sorts by SplitMix64 of a counter. NumPy may change what its own generators return from one
    version to the next, and a run must continue with the same order.
    """
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _splitmix64(state ^ np.uint64(part & 0xFFFF_FFFF_FFFF_FFFF))
    order = _splitmix64(state + np.arange(count, dtype=np.uint64) * _GOLDEN)
    return np.argsort(order, kind="stable").astype(np.int64)


def split_documents(
    tokens_per_document: NDArray[np.int64],
    weights: tuple[float, ...],
    seed: int,
    source: object,
) -> Splits:
    """Shares whole documents out to train, validation and test, by tokens.

    The documents are shuffled first, because neighbours are alike. A document goes where its
    middle token falls, so each split has its share of tokens to within half a document.

    Args:
        tokens_per_document: [num_documents].
        weights: Relative sizes of train, validation and, if there, test.
        seed: Of the shuffle.
        source: What to name in errors.

    Raises:
        DataError: Train or validation would get no token.
    """
    shares = np.asarray([*weights, 0.0, 0.0, 0.0][:3], dtype=np.float64)
    order = shuffled(len(tokens_per_document), seed, _SPLIT)
    sizes = tokens_per_document[order]
    middles = np.cumsum(sizes) - sizes / 2
    total = int(sizes.sum())
    bounds = np.cumsum(shares) / shares.sum() * total
    split_of = np.searchsorted(bounds[:2], middles, side="right")
    parts = [order[split_of == number] for number in range(3)]
    for name, part in zip(("train", "validation"), parts, strict=False):
        if int(tokens_per_document[part].sum()) == 0:
            raise DataError(
                source,
                "documents",
                f"splits {','.join(f'{w:g}' for w in weights)} leave the {name} split empty: "
                f"{len(order)} documents, {total} tokens, split by whole documents",
                "Change model.data.splits_string, or use a dataset of more documents",
            )
    return Splits(*parts)


def check_vocabulary(tokens: NDArray[np.int64], vocab_size: int, dataset: IndexedDataset) -> None:
    """Raises DataError if a token is outside the vocabulary, before it indexes an embedding."""
    # One unsigned comparison finds negative tokens too.
    if tokens.size and int(tokens.view(np.uint64).max()) >= vocab_size:
        raise DataError(
            bin_path(dataset.prefix),
            "tokens",
            f"{int(tokens.min())}..{int(tokens.max())} are not inside the tokenizer's "
            f"vocabulary of {vocab_size}",
            "Use the tokenizer that the dataset was tokenized with",
        )


class TokenStream:
    """A leading end-of-document token and then documents in a given order."""

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: NDArray[np.int64],
        eod_id: int,
        vocab_size: int,
    ) -> None:
        first = dataset.documents_D1[documents]
        counts = dataset.documents_D1[documents + 1] - first
        # The sequences of all documents, one range after another, without a Python loop.
        before = np.cumsum(counts) - counts
        self._sequences = np.repeat(first - before, counts) + np.arange(int(counts.sum()))
        self._ends = 1 + np.cumsum(dataset.lengths_N[self._sequences], dtype=np.int64)
        self._dataset, self._eod_id, self._vocab_size = dataset, eod_id, vocab_size
        self.num_tokens = int(self._ends[-1]) if len(self._ends) else 1  # with the leading one

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start` to `stop` of the stream, as a copy.

        Raises:
            DataError: A token is outside the vocabulary.
        """
        assert 0 <= start <= stop <= self.num_tokens, f"[{start}, {stop}) of {self.num_tokens}"
        tokens = np.empty(stop - start, np.int64)
        at = start
        if at == 0 < stop:
            tokens[0] = self._eod_id
            at = 1
        number = int(np.searchsorted(self._ends, at, side="right"))
        while at < stop:
            sequence, end = int(self._sequences[number]), int(self._ends[number])
            begin = end - int(self._dataset.lengths_N[sequence])
            until = min(stop, end)
            tokens[at - start : until - start] = self._dataset.sequence(
                sequence, at - begin, until - begin
            )
            at, number = until, number + 1
        check_vocabulary(tokens, self._vocab_size, self._dataset)
        return tokens


class TrainSamples:
    """The endless training stream: epochs of shuffled documents, cut and shuffled again.

    Each epoch has its own order of documents and, over the windows cut from those, its own order
    of samples. Tokens after the last whole window, fewer than `seq_length`, are left out; which
    ones those are changes from epoch to epoch.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: NDArray[np.int64],
        *,
        seq_length: int,
        seed: int,
        eod_id: int,
        vocab_size: int,
    ) -> None:
        """Raises DataError when the documents do not fill one window."""
        self._dataset, self._documents = dataset, documents
        self.seq_length, self._seed = seq_length, seed
        self._eod_id, self._vocab_size = eod_id, vocab_size
        self.num_tokens = int(dataset.tokens_per_document()[documents].sum())
        self._num_samples = self.num_tokens // seq_length
        self._epochs: dict[int, tuple[TokenStream, NDArray[np.int64]]] = {}
        if self._num_samples == 0:
            raise DataError(
                idx_path(dataset.prefix),
                "train split",
                f"has {self.num_tokens} tokens, not enough for one sample of {seq_length}",
                "Lower model.data.seq_length, or use a larger dataset",
            )

    @property
    def num_samples_per_epoch(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        epoch, window = self.locate(index)
        start = window * self.seq_length
        return self._epoch(epoch)[0].read(start, start + self.seq_length + 1)

    def locate(self, index: int) -> tuple[int, int]:
        """Epoch and window of sample `index` of the endless stream."""
        assert index >= 0, f"sample {index}"
        epoch, position = divmod(index, self._num_samples)
        return epoch, int(self._epoch(epoch)[1][position])

    def _epoch(self, epoch: int) -> tuple[TokenStream, NDArray[np.int64]]:
        """The epoch's stream and order of windows; two are kept, for batches across a border."""
        known = self._epochs.get(epoch)
        if known is None:
            documents = self._documents[
                shuffled(len(self._documents), self._seed, _DOCUMENTS, epoch)
            ]
            known = (
                TokenStream(self._dataset, documents, self._eod_id, self._vocab_size),
                shuffled(self._num_samples, self._seed, _WINDOWS, epoch),
            )
            while len(self._epochs) > 1:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = known
        return known


class ValidationSamples:
    """Every validation token predicted exactly once, in document order, unshuffled."""

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: NDArray[np.int64],
        *,
        seq_length: int,
        eod_id: int,
        vocab_size: int,
    ) -> None:
        self._stream = TokenStream(dataset, documents, eod_id, vocab_size)
        self._seq_length = seq_length
        self.num_tokens = self._stream.num_tokens - 1  # predicted ones

    @property
    def seq_length(self) -> int:
        return self._seq_length

    @property
    def num_samples(self) -> int:
        return -(-self.num_tokens // self._seq_length)

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        start = index * self._seq_length
        stop = min(start + self._seq_length + 1, self._stream.num_tokens)
        window = np.full(self._seq_length + 1, IGNORE, np.int64)
        window[: stop - start] = self._stream.read(start, stop)
        return window

    def tokens(self) -> NDArray[np.int64]:
        """All predicted tokens in order: those of the documents, with their ends."""
        return self._stream.read(1, self._stream.num_tokens)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014), a bijection on 64 bits."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))
