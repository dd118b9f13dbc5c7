"""What a continued run says of later updates that are others than those so far."""

from __future__ import annotations

from typing import Any

import pytest

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.train.load import changed_updates

WSD = ("model.optim.sched.name=WSD", "model.optim.sched.wsd_decay_steps=20")
TWO = ("trainer.devices=2", "model.tensor_model_parallel_size=2", "model.sequence_parallel=False")
BLOCKS = ("model.optim.name=muon", "model.optim.muon_tp_mode=blockwise")


def settings(*words: str) -> Any:
    return resolve(load([*words]), lambda: False).resolved


@pytest.mark.parametrize(("step", "rises"), [(79, False), (80, False), (95, True), (100, True)])
def test_a_run_prolonged_in_its_decay_says_that_its_rate_rises(step: int, rises: bool) -> None:
    """WSD's decay began after step 80; a run of 200 steps is at its highest rate until 180."""
    short, long = (settings(*WSD, f"trainer.max_steps={steps}") for steps in (100, 200))
    lines = list(changed_updates(short, long, step))
    assert len(lines) == rises
    if rises:
        assert f"the learning rate of step {step + 1} is 2.0e-03" in lines[0]
        assert "its schedule had 100 steps, and has 200" in lines[0]
    assert not list(changed_updates(short, short, step))


def test_another_number_of_ranks_is_another_optimizer_with_muon_in_blocks() -> None:
    blocks, one = settings(*BLOCKS, *TWO), settings("model.optim.name=muon")
    for old, new, count in ((blocks, one, "was 2, and is 1"), (one, blocks, "was 1, and is 2")):
        (line,) = changed_updates(old, new, 3)
        assert "another optimizer" in line and line.endswith(count)
    whole = settings("model.optim.name=muon", *TWO)
    assert not list(changed_updates(whole, one, 3))
    assert not list(changed_updates(blocks, blocks, 3))
    assert not list(changed_updates(settings(*TWO), settings(), 3))
