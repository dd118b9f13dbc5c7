"""Index maps: each token and each window exactly where and as often as promised."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megafp8.data.index_maps import shuffled
from megafp8.data.indexed import IndexedDataset, IndexedWriter
from megafp8.data.samples import (
    SampleOrder,
    TrainSamples,
    ValidationSamples,
    split_documents,
)
from megafp8.errors import DataError
from megafp8.specs.data import IGNORE
from tests.data.helpers import EOD, numbered_documents, write_dataset

SEQ = 8
VOCAB = 60000


def _train(data: IndexedDataset, seed: int = 3, seq_length: int = SEQ) -> TrainSamples:
    everything = np.arange(data.num_documents)
    return TrainSamples(
        data,
        everything,
        seq_length=seq_length,
        order=SampleOrder(seed=seed),
        eod_id=EOD,
        vocab_size=VOCAB,
    )


def _validation(data: IndexedDataset, seq_length: int = SEQ) -> ValidationSamples:
    documents = np.arange(data.num_documents)[::-1].copy()
    return ValidationSamples(data, documents, seq_length=seq_length, eod_id=EOD, vocab_size=VOCAB)


@pytest.fixture
def data(tmp_path: Path) -> IndexedDataset:
    return write_dataset(tmp_path / "d", numbered_documents(30))


def test_shuffled_is_a_permutation_that_only_its_key_decides() -> None:
    orders = [shuffled(1000, *key) for key in [(1, 2), (2, 1), (1, 2, 0), (-1, 2), (2**70, 2)]]
    for order in orders:
        assert sorted(order.tolist()) == list(range(1000))
    assert len({order.tobytes() for order in orders}) == len(orders)
    assert np.array_equal(shuffled(1000, 1, 2), orders[0])
    # Pinned: a run must continue with the same order under any later NumPy.
    assert shuffled(8, 1234, 1).tolist() == [6, 5, 1, 4, 7, 0, 3, 2]
    assert shuffled(0, 1).tolist() == []


def test_shuffled_equals_its_plain_specification() -> None:
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    state = mix(mix(0 ^ 5) ^ 6)
    draws = [mix((state + i * 0x9E3779B97F4A7C15) & mask) for i in range(50)]
    assert shuffled(50, 5, 6).tolist() == sorted(range(50), key=draws.__getitem__)


@pytest.mark.parametrize("seed", range(5))
def test_splits_share_every_document_once_by_tokens(seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, 500, 400)
    splits = split_documents(tokens, (90.0, 6.0, 4.0), seed, "x")
    together = np.concatenate([splits.train, splits.validation, splits.test])
    assert sorted(together.tolist()) == list(range(400))
    for part, share in zip((splits.train, splits.validation, splits.test), (90, 6, 4), strict=True):
        assert abs(tokens[part].sum() / tokens.sum() - share / 100) < 0.005
    again = split_documents(tokens, (0.9, 0.06, 0.04), seed, "x")
    assert np.array_equal(again.train, splits.train), "only the relative sizes count"
    other = split_documents(tokens, (90.0, 6.0, 4.0), seed + 1, "x")
    assert not np.array_equal(other.train, splits.train)


def test_two_weights_leave_no_test_split() -> None:
    assert len(split_documents(np.full(10, 5), (1.0, 1.0), 0, "x").test) == 0


@pytest.mark.parametrize(
    ("tokens", "weights"),
    [
        ([], (9.0, 1.0, 0.0)),
        ([5], (9.0, 1.0, 0.0)),
        ([5, 5], (999.0, 1.0, 0.0)),
        ([0, 0], (1.0, 1.0)),
    ],
)
def test_an_empty_split_is_refused(tokens: list[int], weights: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="split empty"):
        split_documents(np.asarray(tokens, np.int64), weights, 0, "some.idx")


def test_each_train_window_comes_once_an_epoch(data: IndexedDataset) -> None:
    train = _train(data)
    per_epoch = train.num_samples_per_epoch
    assert per_epoch == data.num_tokens // SEQ
    for epoch in range(3):
        places = [train.locate(epoch * per_epoch + i) for i in range(per_epoch)]
        assert {e for e, _ in places} == {epoch}
        assert sorted(w for _, w in places) == list(range(per_epoch))


def test_train_windows_are_cut_from_whole_documents_in_a_row(data: IndexedDataset) -> None:
    """Windows put back in order are the documents, in some order, after an EOD."""
    train = _train(data)
    per_epoch = train.num_samples_per_epoch
    for epoch in (0, 1):
        windows = {}
        for i in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            windows[train.locate(i)[1]] = train[i]
        stream = [EOD] + [t for w in range(per_epoch) for t in windows[w][1:].tolist()]
        for w in range(per_epoch):
            assert windows[w].tolist() == stream[w * SEQ : (w + 1) * SEQ + 1]
        known = {tuple(data.document(d)) for d in range(data.num_documents)}
        at = 1
        while at < len(stream) and EOD in stream[at:]:
            end = stream.index(EOD, at) + 1
            if end - at > 1:  # documents of only an EOD are alike
                known.remove(tuple(stream[at:end]))
            at = end
        left_out = data.num_tokens - (at - 1)
        assert sum(len(d) for d in known if len(d) > 1) <= left_out < SEQ + 40


def test_epochs_and_seeds_differ_and_repeat(data: IndexedDataset) -> None:
    train, per_epoch = _train(data), _train(data).num_samples_per_epoch
    first = [train[i].tolist() for i in range(2 * per_epoch)]
    assert first[:per_epoch] != first[per_epoch:]
    again = _train(data)
    # In any order of access, and across the two kept epochs: the map has no memory.
    for i in reversed(range(2 * per_epoch)):
        assert again[i].tolist() == first[i]
    assert again[7 * per_epoch + 3].tolist() == train[7 * per_epoch + 3].tolist()
    assert [_train(data, seed=4)[i].tolist() for i in range(per_epoch)] != first[:per_epoch]


def test_too_few_train_tokens_are_refused(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "d", [[1, 2, EOD]])
    assert _train(data, seq_length=3)[0].tolist() == [EOD, 1, 2, EOD]
    with pytest.raises(DataError, match="not enough for one sample of 4"):
        _train(data, seq_length=4)


@pytest.mark.parametrize("seq_length", [1, 7, 8, 10_000])
def test_validation_predicts_every_token_once(data: IndexedDataset, seq_length: int) -> None:
    validation = _validation(data, seq_length)
    windows = [validation[i] for i in range(validation.num_samples)]
    assert all(len(w) == seq_length + 1 and w.dtype == np.int64 for w in windows)
    targets = np.concatenate([w[1:] for w in windows])
    want = np.concatenate([data.document(d) for d in reversed(range(data.num_documents))])
    assert np.array_equal(targets[targets != IGNORE], want)
    assert np.array_equal(validation.tokens(), want)
    assert np.all(targets[len(want) :] == IGNORE) and len(targets) - len(want) < seq_length
    assert windows[0][0] == EOD
    for before, after in zip(windows, windows[1:], strict=False):
        assert before[-1] == after[0]
    with pytest.raises(IndexError):
        validation[validation.num_samples]


def test_documents_of_several_or_no_sequences(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", "int32") as writer:
        writer.add_document([1, 2], [], [3, EOD])
        writer.add_document()
        writer.add_document([])
        writer.add_document([4, 5], [EOD])
    data = IndexedDataset(tmp_path / "d")
    assert _validation(data, 3).tokens().tolist() == [4, 5, EOD, 1, 2, 3, EOD]
    assert _validation(data, 3)[1].tolist() == [EOD, 1, 2, 3]


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path, token: int) -> None:
    data = write_dataset(tmp_path / "d", [[1, token, EOD]], "int32")
    with pytest.raises(DataError, match="vocabulary"):
        _validation(data)[0]


def test_a_refused_split_names_one_that_fits() -> None:
    tokens = np.full(12, 1000)
    with pytest.raises(DataError) as caught:
        split_documents(tokens, (990, 5, 5), 1, "mine")
    value = re.search(r"splits_string=\"([\d,]+)\"'", str(caught.value))
    assert value is not None
    weights = tuple(map(float, value[1].split(",")))
    splits = split_documents(tokens, weights, 1, "mine")
    assert len(splits.train) and len(splits.validation)
    with pytest.raises(DataError, match="--document paragraph"):
        split_documents(tokens[:1], (990, 5, 5), 1, "mine")
