"""What stands for a text that is too long to read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.data import prepare as prepare_module
from megafp8.data.excerpt import excerpt
from megafp8.data.prepare import prepare
from tests.data.helpers import data_spec, tiny_corpus


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 3000))
def test_even_and_no_more_than_asked_for(lengths: list[int], limit: int) -> None:
    tokens = np.array(lengths)
    total = sum(lengths)
    chosen = excerpt(tokens, total, limit)
    if total <= limit:
        assert chosen.tolist() == list(range(len(lengths)))
        return
    assert len(chosen) == 1 or tokens[chosen].sum() <= limit
    assert chosen[0] == 0 and len(set(np.diff(chosen).tolist())) <= 1
    assert chosen[-1] < len(lengths)


def test_equal_documents_fill_the_limit() -> None:
    tokens = np.full(10_000, 10)
    assert tokens[excerpt(tokens, 100_000, 7_000)].sum() == pytest.approx(7_000, rel=0.05)
    # Two datasets share it by their sizes.
    assert tokens[excerpt(tokens, 400_000, 28_000)].sum() == pytest.approx(7_000, rel=0.05)


def test_a_long_text_is_validated_and_counted_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = data_spec(tmp_path)
    whole = prepare(spec, lambda line: None, tiny_corpus())
    assert whole.num_final_tokens == whole.num_validation_tokens
    monkeypatch.setattr(prepare_module, "VALIDATION_TOKENS", whole.num_validation_tokens // 2)
    monkeypatch.setattr(prepare_module, "COUNTED_TOKENS", 1000)
    data = prepare(spec, lambda line: None, tiny_corpus())
    (part,), (every,) = data.final_parts, data.validation_parts
    assert 0 < data.num_final_tokens <= data.num_validation_tokens // 2
    assert set(part.documents.tolist()) < set(every.documents.tolist())
    # The loss, the bytes and the predictors beside it are all of these documents.
    assert len(data.validation_tokens()) == data.num_final_tokens == part.num_tokens
    predicted = [n for i in range(data.validation.num_samples) for n in data.validation[i][1:]]
    assert [n for n in predicted if n >= 0] == data.validation_tokens().tolist()
    texts = [data.document_text(part.opened, int(d)) for d in part.documents]
    assert data.validation_text() == b"".join(texts)
    assert 0 < data.train_token_counts().sum() <= 1000 < data.num_train_tokens
    # Validation during training draws from everything still.
    assert data.periodic_validation.num_samples == whole.periodic_validation.num_samples
    assert data.fingerprint == whole.fingerprint
