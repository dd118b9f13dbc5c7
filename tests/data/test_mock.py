"""Random tokens in place of data: what they are, that they repeat, and what they rule out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from megafp8.config.load import load
from megafp8.config.resolve import data_spec
from megafp8.data.mock import MockData
from megafp8.runs.run_data import check_data, open_data
from megafp8.specs import DataSpec
from tests.config.helpers import the_problem


def mock_spec(*more: str) -> DataSpec:
    return data_spec(load(["model.data.data_prefix=mock", "model.tokenizer.vocab_size=300", *more]))


def opened(spec: DataSpec) -> MockData:
    check_data(spec)
    data = open_data(spec, print)
    assert isinstance(data, MockData)
    return data


def test_tokens_are_uniform_and_repeat() -> None:
    """Each of 300 tokens is drawn with the same probability; chi-square within 6 deviations."""
    spec = mock_spec()
    data, again = opened(spec), opened(spec)
    samples = np.stack([data.train[number] for number in range(400)])
    assert samples.shape == (400, 257) and samples.dtype == np.int64
    counts = np.bincount(samples.ravel(), minlength=300)
    assert len(counts) == 300
    expected = samples.size / 300
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 299) < 6 * math.sqrt(2 * 299)
    assert np.array_equal(data.train[3], again.train[3])
    assert data.fingerprint == again.fingerprint
    other = opened(replace(spec, seed=spec.seed + 1))
    for different in (data.train[4], data.validation[3], other.train[3]):
        assert not np.array_equal(data.train[3], different)
    assert other.fingerprint != data.fingerprint


def test_what_a_run_reads_fits_together() -> None:
    data = opened(mock_spec())
    tokens = data.validation_tokens()
    assert len(tokens) == data.num_final_tokens <= data.num_validation_tokens
    assert np.array_equal(tokens[:256], data.validation[0][1:])
    assert len(data.validation_text()) == 4 * len(tokens)
    assert data.validation_prompt(3) == data.validation[0][:3].tolist()
    assert data.train_token_counts().shape == (300,) and data.rules is None
    assert opened(mock_spec("model.data.reset_attention_mask=True")).rules is not None


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.data.data_prefix=[1,mock,1,/data/a]", "model.data.data_prefix"),
        ("model.data.shuffle_documents=False", "model.data.shuffle_documents"),
        ("model.data.dataloader_type=cyclic", "model.data.dataloader_type"),
        ("model.data.splits_string=[8,1,1]", "model.data.splits_string"),
    ],
)
def test_what_has_no_effect_with_it_is_refused(override: str, key: str) -> None:
    given = () if key == "model.data.data_prefix" else ("model.data.data_prefix=mock",)
    problem = the_problem(*given, override)
    assert problem.key == key and "mock" in problem.reason
