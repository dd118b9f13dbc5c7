"""Test runs over random tokens, as NeMo's `data_impl: mock` makes them."""

from __future__ import annotations

import math

import pytest

from tests.train.runs import Place

MOCK = "model.data.data_impl=mock"


def test_a_run_over_random_tokens_learns_their_number_alone(place: Place) -> None:
    mock = ["model.data.data_prefix=mock", "model.tokenizer.vocab_size=300"]
    done = place.run(MOCK, *mock, "model.optim.lr=0.003")
    assert done.code == 0, done.output
    assert "data: mock: random tokens of a vocabulary of 300; no data are read" in done.output
    losses = [row["loss"] for row in place.metrics() if "loss" in row]
    assert losses[-1] == pytest.approx(math.log(300), rel=0.05)
    assert place.summary()["val_loss"] == pytest.approx(math.log(300), rel=0.05)
