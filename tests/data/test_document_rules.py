"""The three switches on documents inside a sample, against a plain reading of what they say."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megafp8.data.document_rules import IGNORE, DocumentRules
from megafp8.data.loader import microbatch

EOD = 3


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40), st.integers(0, 5))
def test_positions_documents_and_targets(tokens: list[int], padding: int) -> None:
    window = np.array([*tokens, *[IGNORE] * padding])
    rules = DocumentRules(
        eod_id=EOD, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
    )
    batch = microbatch([window, window], rules)
    position = document = 0
    inputs = window[:-1].tolist()
    for place, token in enumerate(inputs):
        assert batch.position_ids_BS[1, place] == position
        assert batch.document_ids_BS[1, place] == document
        target = IGNORE if token == EOD else window[place + 1]
        assert batch.targets_BS[1, place] == target
        position += 1
        if token == EOD:  # it belongs to the document that it ends
            position, document = 0, document + 1
    assert batch.document_ids_BS.dtype == np.int32 and batch.position_ids_BS.dtype == np.int64
    assert (batch.tokens_BS >= 0).all()


def test_each_switch_alone() -> None:
    windows = [np.array([1, EOD, 2, 4, EOD, 1])]
    plain = microbatch(windows)
    none = microbatch(windows, DocumentRules(eod_id=EOD))
    for batch in (plain, none):
        assert batch.position_ids_BS is None and batch.document_ids_BS is None
        assert batch.targets_BS.tolist() == [[EOD, 2, 4, EOD, 1]]
    positions = microbatch(windows, DocumentRules(eod_id=EOD, reset_position_ids=True))
    assert positions.position_ids_BS.tolist() == [[0, 1, 0, 1, 2]]
    assert positions.document_ids_BS is None
    documents = microbatch(windows, DocumentRules(eod_id=EOD, reset_attention_mask=True))
    assert documents.document_ids_BS.tolist() == [[0, 0, 1, 1, 1]]
    assert documents.position_ids_BS is None
    masked = microbatch(windows, DocumentRules(eod_id=EOD, eod_mask_loss=True))
    assert masked.targets_BS.tolist() == [[EOD, IGNORE, 4, EOD, IGNORE]]


def test_padding_that_looks_like_an_end_is_none() -> None:
    """Padding becomes token 0, which may be the end of a document of some tokenizer."""
    rules = DocumentRules(eod_id=0, reset_position_ids=True, reset_attention_mask=True)
    batch = microbatch([np.array([5, 6, IGNORE, IGNORE, IGNORE])], rules)
    assert batch.tokens_BS.tolist() == [[5, 6, 0, 0]]
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 3]]
    assert batch.document_ids_BS.tolist() == [[0, 0, 0, 0]]
