"""Define which tokens make which sample, by index maps over an indexed dataset.

A stream is an end-of-document token, as if a document had just ended, followed by documents in some
order. A window is `seq_length + 1` tokens of the stream, and windows start `seq_length` apart. So
the last token of a window is the first of the next one, and every token but the leading one is
predicted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megafp8.data.index_maps import (
    EpochMap,
    IndexCache,
    cached_epoch_map,
    epoch_map,
    sequences_of,
    shuffled,
)
from megafp8.data.indexed import IndexedDataset, bin_path, idx_path
from megafp8.errors import DataError
from megafp8.specs.data import IGNORE

# Purposes keep the orders drawn from one seed apart from each other.
_SPLIT, _DOCUMENTS, _WINDOWS = 1, 2, 3
_EPOCHS_KEPT = 2  # batches can cross from one epoch into the next


class SampleSource(Protocol):
    """Describe an endless stream of training samples."""

    @property
    def num_samples_per_epoch(self) -> int:
        """Return the number of samples after which the stream has read all its data once."""

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        """Return sample `index` >= 0 of the endless stream, [seq_length + 1]."""


@dataclass(frozen=True)
class Repeated:
    """Repeat the first `num_samples` samples of a stream forever."""

    source: SampleSource
    num_samples: int

    @property
    def num_samples_per_epoch(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        """Return sample `index` modulo `num_samples`, [seq_length + 1]."""
        return self.source[index % self.num_samples]


class FiniteSource(Protocol):
    """Describe samples that are each evaluated once."""

    @property
    def num_samples(self) -> int:
        """Return the number of samples."""

    @property
    def seq_length(self) -> int:
        """Return the number of tokens that a sample predicts."""

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        """Return sample `index` < num_samples, [seq_length + 1]; beyond the last token it is
        IGNORE.
        """


@dataclass(frozen=True)
class Splits:
    """Hold the documents of each split, in the order in which they were drawn, int64."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


def split_documents(
    tokens_per_document: NDArray[np.int64],
    weights: tuple[float, ...],
    seed: int,
    source: object,
    needs_validation: bool = True,
) -> Splits:
    """Divide whole documents among train, validation and test, by their tokens.

    The documents are shuffled first, because neighbours are alike. A document goes to the split
    that its middle token falls into, so each split has its share of tokens to within half a
    document.

    Args:
        tokens_per_document: The tokens of each document, [num_documents].
        weights: The relative sizes of train, validation and, optionally, test.
        seed: The seed of the shuffle.
        source: The name of the dataset in errors.
        needs_validation: Whether a validation without a document is an error.

    Raises:
        DataError: Train or validation would get no token.
    """
    parts = _parted(tokens_per_document, weights, seed)
    empty = _first_empty(tokens_per_document, parts)
    if empty is not None and (needs_validation or empty == "train"):
        fitting = (
            other
            for other in ((900, 100, 0), (800, 200, 0), (700, 300, 0), (500, 500, 0))
            if _first_empty(tokens_per_document, _parted(tokens_per_document, other, seed)) is None
        )
        other = next(fitting, None)
        hint = "Use a dataset of more documents (megafp8 preprocess --document paragraph)"
        if other is not None:
            value = ",".join(map(str, other))
            hint = f"Give 'model.data.splits_string=\"{value}\"', or use more documents"
        raise DataError(
            source,
            "documents",
            f"splits {','.join(f'{w:g}' for w in weights)} leave the {empty} split empty: "
            f"{len(tokens_per_document)} documents, {tokens_per_document.sum()} tokens, split by "
            "whole documents",
            hint,
        )
    return Splits(*parts)


def _first_empty(
    tokens_per_document: NDArray[np.int64], parts: Sequence[NDArray[np.int64]]
) -> str | None:
    """Return which of train and validation has no token; None if both have some."""
    names = zip(("train", "validation"), parts, strict=False)
    return next((name for name, part in names if not tokens_per_document[part].sum()), None)


def _parted(
    tokens_per_document: NDArray[np.int64], weights: Sequence[float], seed: int
) -> list[NDArray[np.int64]]:
    """Return the documents of the three splits, of which some may be empty."""
    shares = np.asarray([*weights, 0.0, 0.0, 0.0][:3], dtype=np.float64)
    order = shuffled(len(tokens_per_document), seed, _SPLIT)
    sizes = tokens_per_document[order]
    middles = np.cumsum(sizes) - sizes / 2
    total = int(sizes.sum())
    bounds = np.cumsum(shares) / shares.sum() * total
    split_of = np.searchsorted(bounds[:2], middles, side="right")
    return [order[split_of == number] for number in range(3)]


def check_vocabulary(tokens: NDArray[np.int64], vocab_size: int, dataset: IndexedDataset) -> None:
    """Raise DataError if a token is outside the vocabulary, before it indexes an embedding."""
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
    """Read a leading end-of-document token and then documents in a given order."""

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: NDArray[np.int64],
        eod_id: int,
        vocab_size: int,
    ) -> None:
        self._sequences = sequences_of(dataset, documents)
        self._ends = 1 + np.cumsum(dataset.lengths_N[self._sequences], dtype=np.int64)
        self._dataset, self._eod_id, self._vocab_size = dataset, eod_id, vocab_size
        # The leading token is included.
        self.num_tokens = int(self._ends[-1]) if len(self._ends) else 1

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens `start` to `stop` of the stream, as a copy.

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


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Say how an epoch's samples are ordered.

    Attributes:
        seed: The seed of every order.
        shuffle_documents: Whether documents are shuffled before windows are cut from them; windows
            are always shuffled.
        recut: Whether each epoch has its own order of documents and so its own windows (`single`);
            otherwise the first epoch's windows are repeated in another order (`cyclic`).
    """

    seed: int
    shuffle_documents: bool = True
    recut: bool = True


class TrainSamples:
    """Read the endless training stream: epochs of documents, cut into windows, which are shuffled.

    The tokens after the last whole window, fewer than `seq_length`, are left out; which tokens
    these are depends on the order of documents.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: NDArray[np.int64],
        *,
        seq_length: int,
        order: SampleOrder,
        eod_id: int,
        vocab_size: int,
        cache: IndexCache | None = None,
        fingerprint: str = "",
    ) -> None:
        """Prepare the stream over some documents of a dataset.

        Args:
            dataset: The dataset to read.
            documents: The documents to train on.
            seq_length: The tokens that a sample predicts.
            order: The order of documents and windows.
            eod_id: The token that ends a document.
            vocab_size: The vocabulary size; every token is below it.
            cache: Keeps index maps; None means that each process computes them.
            fingerprint: The hash of the dataset's content and of `documents`, which names the maps.

        Raises:
            DataError: The documents do not fill one window.
        """
        self._dataset, self._order = dataset, order
        self._documents = documents if order.shuffle_documents else np.sort(documents)
        self.seq_length = seq_length
        self._eod_id, self._vocab_size = eod_id, vocab_size
        self._cache, self._fingerprint = cache or IndexCache(None, print), fingerprint
        self.num_tokens = int(dataset.tokens_per_document()[documents].sum())
        self._num_samples = self.num_tokens // seq_length
        self._epochs: dict[int, EpochMap] = {}
        self._lock = Lock()
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
        known = self.epoch(epoch)
        tokens = np.empty(self.seq_length + 1, np.int64)
        at = 0
        if window == 0:
            tokens[0] = self._eod_id
            at = 1
        place, offset = int(known.first_N[window]), int(known.offset_N[window])
        while at < len(tokens):
            sequence = int(known.sequences_Q[place])
            stop = min(offset + len(tokens) - at, int(self._dataset.lengths_N[sequence]))
            tokens[at : at + stop - offset] = self._dataset.sequence(sequence, offset, stop)
            at += stop - offset
            place, offset = place + 1, 0
        check_vocabulary(tokens, self._vocab_size, self._dataset)
        return tokens

    def locate(self, index: int) -> tuple[int, int]:
        """Return the epoch and the window of sample `index` of the endless stream."""
        assert index >= 0, f"sample {index}"
        epoch, position = divmod(index, self._num_samples)
        return epoch, int(self.epoch(epoch).order_N[position])

    def epoch(self, number: int) -> EpochMap:
        """Return the index map of an epoch; any number of threads may call this."""
        with self._lock:
            known = self._epochs.get(number)
            if known is None:
                known = self._map_of(number)
                while len(self._epochs) >= _EPOCHS_KEPT:
                    self._epochs.pop(next(iter(self._epochs)))
                self._epochs[number] = known
            return known

    def _map_of(self, epoch: int) -> EpochMap:
        """Return the order of an epoch's documents and windows, from the cache if it is there."""
        order, num_windows = self._order, self._num_samples
        cut = epoch if order.recut else 0
        key: dict[str, object] = {
            "data": self._fingerprint,
            "seq_length": self.seq_length,
            "seed": order.seed,
            "epoch": epoch,
            "cut": cut,
            "shuffle_documents": order.shuffle_documents,
        }

        def build() -> dict[str, NDArray[np.integer]]:
            documents = self._documents
            if order.shuffle_documents:
                documents = documents[shuffled(len(documents), order.seed, _DOCUMENTS, cut)]
            return epoch_map(
                self._dataset,
                documents,
                self.seq_length,
                num_windows,
                lambda: shuffled(num_windows, order.seed, _WINDOWS, epoch),
            )

        return cached_epoch_map(self._cache, key, len(self._documents) + 3 * num_windows, build)


class ValidationSamples:
    """Read every validation token to be predicted exactly once, in document order, unshuffled."""

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: NDArray[np.int64],
        *,
        seq_length: int,
        eod_id: int,
        vocab_size: int,
        drop_last: bool = False,
    ) -> None:
        """Prepare the samples; `drop_last` leaves out the last tokens if they do not fill a
        sample.
        """
        self._stream = TokenStream(dataset, documents, eod_id, vocab_size)
        self._seq_length, self._drop_last = seq_length, drop_last
        self.num_tokens = self._stream.num_tokens - 1  # without the leading one

    @property
    def seq_length(self) -> int:
        return self._seq_length

    @property
    def num_samples(self) -> int:
        if self._drop_last:
            return self.num_tokens // self._seq_length
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
        """Return all predicted tokens in order: those of the documents, with their ends."""
        return self._stream.read(1, self._stream.num_tokens)
