"""The loader: the same samples at every layout, from any point, and no silent thread."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megafp8.data.loader import (
    IGNORE,
    DocumentRules,
    Loader,
    Microbatch,
    microbatch,
    rank_samples,
    validation_batches,
)
from megafp8.parallel.mesh import single_rank
from megafp8.train.step import local_batch
from tests.documents import ids_of
from tests.limits import HANG_SECONDS

EOD = 3


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40), st.integers(0, 5))
def test_positions_documents_and_targets(tokens: list[int], padding: int) -> None:
    window = np.array([*tokens, *[IGNORE] * padding])
    rules = DocumentRules(
        eod_id=EOD, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
    )
    batch = microbatch([window, window], rules)
    documents = ids_of(batch)
    position = document = 0
    inputs = window[:-1].tolist()
    for place, token in enumerate(inputs):
        assert batch.position_ids_BS[1, place] == position
        assert documents[1, place] == document
        target = IGNORE if token == EOD else window[place + 1]
        assert batch.targets_BS[1, place] == target
        position += 1
        if token == EOD:  # it belongs to the document that it ends
            position, document = 0, document + 1
    assert batch.cu_seqlens_N1.dtype == np.int32 and batch.position_ids_BS.dtype == np.int64
    assert (batch.tokens_BS >= 0).all()


def test_each_switch_alone() -> None:
    windows = [np.array([1, EOD, 2, 4, EOD, 1])]
    plain = microbatch(windows)
    none = microbatch(windows, DocumentRules(eod_id=EOD))
    for batch in (plain, none):
        assert batch.position_ids_BS is None and batch.cu_seqlens_N1 is None
        assert batch.targets_BS.tolist() == [[EOD, 2, 4, EOD, 1]]
    positions = microbatch(windows, DocumentRules(eod_id=EOD, reset_position_ids=True))
    assert positions.position_ids_BS.tolist() == [[0, 1, 0, 1, 2]]
    assert positions.cu_seqlens_N1 is None
    documents = microbatch(windows, DocumentRules(eod_id=EOD, reset_attention_mask=True))
    assert documents.cu_seqlens_N1.tolist() == [0, 2, 5]
    assert documents.position_ids_BS is None
    masked = microbatch(windows, DocumentRules(eod_id=EOD, eod_mask_loss=True))
    assert masked.targets_BS.tolist() == [[EOD, IGNORE, 4, EOD, IGNORE]]


def test_padding_that_looks_like_an_end_is_none() -> None:
    """Padding becomes token 0, which may be the end of a document of some tokenizer."""
    rules = DocumentRules(eod_id=0, reset_position_ids=True, reset_attention_mask=True)
    batch = microbatch([np.array([5, 6, IGNORE, IGNORE, IGNORE])], rules)
    assert batch.tokens_BS.tolist() == [[5, 6, 0, 0]]
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 3]]
    assert batch.cu_seqlens_N1.tolist() == [0, 4]


SEQ = 4


class Numbers:
    """Sample i is [10 i, 10 i + 1, ...]; some samples may fail."""

    num_samples_per_epoch = 1000
    seq_length = SEQ

    def __init__(self, num_samples: int = 0, fails_at: int | None = None) -> None:
        self.num_samples = num_samples
        self.fails_at = fails_at
        self.read: list[int] = []

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        if index == self.fails_at:
            raise OSError("disk gone")
        self.read.append(index)
        return index * 10 + np.arange(SEQ + 1)


def _samples(steps: list[list[Microbatch]]) -> list[int]:
    return [int(row[0]) // 10 for step in steps for mb in step for row in mb.tokens_BS]


def _take(count: int, consumed: int, micro: int, num: int, rank: int, dp: int) -> list[list]:
    with Loader(
        Numbers(),
        micro_batch_size=micro,
        num_microbatches=num,
        dp_rank=rank,
        dp_size=dp,
        consumed_samples=consumed,
    ) as loader:
        return [next(loader) for _ in range(count)]


@pytest.mark.parametrize("consumed", [0, 1, 7, 16, 1003])
@pytest.mark.parametrize("dp", [1, 2, 4, 8])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_global_batch_is_the_same_samples_at_every_layout(
    consumed: int, dp: int, micro: int
) -> None:
    num = 16 // (micro * dp)
    ranks = [_take(3, consumed, micro, num, rank, dp) for rank in range(dp)]
    for step in range(3):
        got = [s for rank in ranks for s in _samples([rank[step]])]
        start = consumed + 16 * step
        assert sorted(got) == list(range(start, start + 16))


def test_the_place_of_each_sample() -> None:
    assert rank_samples(100, 2, 3, 1, 4).tolist() == [[103, 104, 105], [115, 116, 117]]


def test_resuming_continues_the_stream() -> None:
    whole = _samples(_take(6, 0, 2, 2, 1, 2))
    for done in range(6):
        assert _samples(_take(6 - done, done * 8, 2, 2, 1, 2)) == whole[done * 4 :]


def test_microbatch_arrays() -> None:
    (microbatches,) = _take(1, 0, 2, 3, 0, 1)
    assert len(microbatches) == 3
    mb = microbatches[1]
    assert mb.tokens_BS.tolist() == [[20, 21, 22, 23], [30, 31, 32, 33]]
    assert mb.targets_BS.tolist() == [[21, 22, 23, 24], [31, 32, 33, 34]]
    for array in (mb.tokens_BS, mb.targets_BS):
        assert array.dtype == np.int64 and array.flags.writeable and array.flags.c_contiguous
    assert mb.num_targets == 8


def test_consumed_samples_counts_what_was_handed_out() -> None:
    with Loader(
        Numbers(), micro_batch_size=2, num_microbatches=3, dp_rank=0, dp_size=2, consumed_samples=5
    ) as loader:
        assert loader.consumed_samples == 5
        next(loader)
        time.sleep(0.05)  # reading ahead does not count
        assert loader.consumed_samples == 17


def test_reading_ahead_is_bounded() -> None:
    source = Numbers()
    with Loader(source, micro_batch_size=1, num_microbatches=1, dp_rank=0, dp_size=1) as loader:
        next(loader)
        deadline = time.monotonic() + HANG_SECONDS
        while len(source.read) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        # One handed out, two in the queue, one in the thread's hand.
        assert source.read == [0, 1, 2, 3]


def test_an_error_in_the_thread_is_raised_by_the_next_that_needed_it() -> None:
    source = Numbers(fails_at=5)
    with Loader(source, micro_batch_size=2, num_microbatches=1, dp_rank=0, dp_size=1) as loader:
        assert _samples([next(loader), next(loader)]) == [0, 1, 2, 3]
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone"):
                next(loader)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_close_ends_the_thread(taken: int) -> None:
    loader = Loader(Numbers(), micro_batch_size=1, num_microbatches=1, dp_rank=0, dp_size=1)
    for _ in range(taken):
        next(loader)
    loader.close()
    loader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("data-loader")]
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("total", [0, 1, 10, 24])
def test_validation_shares_every_sample_once(dp: int, micro: int, total: int) -> None:
    ranks = [list(validation_batches(Numbers(total), micro, r, dp)) for r in range(dp)]
    assert len({len(rank) for rank in ranks}) == 1, "ranks meet in collectives"
    rows = [row for rank in ranks for mb in rank for row in mb.targets_BS]
    assert all(len(mb.targets_BS) == micro for rank in ranks for mb in rank)
    counted = [int(row[0]) // 10 for row in rows if row[0] != IGNORE]
    assert sorted(counted) == list(range(total))
    assert sum(mb.num_targets for rank in ranks for mb in rank) == total * SEQ
    assert all((mb.tokens_BS >= 0).all() for rank in ranks for mb in rank)


@pytest.mark.parametrize("limit", [0, 1, 5, 24, 99])
def test_limited_validation_is_the_same_samples_at_every_layout(limit: int) -> None:
    def chosen(micro: int, dp: int) -> list[int]:
        batches = [
            mb for r in range(dp) for mb in validation_batches(Numbers(24), micro, r, dp, limit)
        ]
        rows = [row for mb in batches for row in mb.targets_BS if row[0] != IGNORE]
        return sorted(int(row[0]) // 10 for row in rows)

    want = chosen(1, 1)
    assert len(want) == len(set(want)) == min(limit, 24)
    assert limit != 5 or want == [0, 4, 9, 14, 19]
    assert chosen(2, 3) == chosen(4, 2) == want


def test_padding_inside_a_window() -> None:
    class Padded(Numbers):
        def __getitem__(self, index: int, /) -> NDArray[np.int64]:
            return np.array([7, 8, IGNORE, IGNORE, IGNORE])

    (mb,) = validation_batches(Padded(1), 1, 0, 1)
    assert mb.targets_BS.tolist() == [[8, IGNORE, IGNORE, IGNORE]]
    assert mb.tokens_BS.tolist() == [[7, 8, 0, 0]]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_change_who_reads_and_not_what(workers: int) -> None:
    readers: set[str] = set()

    class Watched(Numbers):
        def __getitem__(self, index: int, /) -> NDArray[np.int64]:
            readers.add(threading.current_thread().name)
            time.sleep(0.002)
            return super().__getitem__(index)

    with Loader(
        Watched(), micro_batch_size=2, num_microbatches=2, dp_rank=0, dp_size=1, num_workers=workers
    ) as loader:
        assert _samples([next(loader) for _ in range(12)]) == list(range(48))
    assert len(readers) == max(1, workers)
    assert all(name.startswith("data-loader") for name in readers) == (workers > 0)


@pytest.mark.parametrize("total", [3, 12, 19, 24])
@pytest.mark.parametrize("limit", [None, 4, 16])
def test_validation_by_whole_global_batches(total: int, limit: int | None) -> None:
    batches = [
        mb
        for rank in range(2)
        for mb in validation_batches(Numbers(total), 2, rank, 2, limit, multiple_of=8)
    ]
    counted = sum(int((mb.targets_BS[:, 0] != IGNORE).sum()) for mb in batches)
    count = min(total, limit or total)
    assert counted == (count // 8 * 8 or count)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_pinned_where_asked_for(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array, before `next` hands it out; here without a GPU to pin for."""
    moved: dict[int, torch.Tensor] = {}

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        moved[copy.data_ptr()] = copy
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    rules = DocumentRules(
        eod_id=1, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
    )
    step: dict[bool, list[Microbatch]] = {}
    for pins in (False, True):
        with Loader(
            Numbers(),
            micro_batch_size=2,
            num_microbatches=2,
            dp_rank=0,
            dp_size=1,
            rules=rules,
            num_workers=num_workers,
            pin_memory=pins,
        ) as loader:
            step[pins] = next(loader)
    for plain, pinned in zip(step[False], step[True], strict=True):
        for field in dataclasses.fields(Microbatch):
            array, other = getattr(plain, field.name), getattr(pinned, field.name)
            assert np.array_equal(array, other) and array.dtype == other.dtype
            assert other.ctypes.data in moved and array.ctypes.data not in moved


@pytest.mark.gpu
def test_pinned_on_a_gpu() -> None:
    with Loader(
        Numbers(), micro_batch_size=2, num_microbatches=1, dp_rank=0, dp_size=1, pin_memory=True
    ) as loader:
        (batch,) = next(loader)
    assert torch.from_numpy(batch.tokens_BS).is_pinned()
    there = local_batch(batch, single_rank(torch.device("cuda")))
    assert np.array_equal(there.tokens_BS.cpu().numpy(), batch.tokens_BS)
