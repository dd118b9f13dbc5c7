"""Runs with Muon that are killed, continue, and move between layouts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.train.runs import Driver, Place

STABLE = ["model.optim.sched.name=WSD", "model.optim.sched.warmup_steps=1",
          "model.optim.sched.wsd_decay_steps=0", "model.fp8=True"]  # fmt: skip
LAYOUTS = {
    "one": ["model.optim.name=muon"],
    "dp 2": ["model.optim.name=muon", "trainer.devices=2"],
    "ZeRO-1": ["model.optim.name=dist_muon", "trainer.devices=2"],
    "FSDP": ["model.optim.name=muon", "trainer.devices=2", "model.fsdp=True"],
    "tp 2": [
        "model.optim.name=muon",
        "trainer.devices=2",
        "model.tensor_model_parallel_size=2",
        "model.sequence_parallel=True",
    ],
}


def train(place: Place, layout: str, steps: int, name: str) -> list[float]:
    """Train to a step, and return the losses of all steps of the run."""
    words = [*STABLE, *LAYOUTS[layout], f"trainer.max_steps={steps}", f"exp_manager.name={name}"]
    done = place.run(*words)
    assert done.code == 0, done.output
    return [row["loss"] for row in place.metrics(name) if "loss" in row]


Whole = Callable[[str], list[float]]


@pytest.fixture(scope="module")
def whole(driver: Driver, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return what trains a layout once without an end between, and returns its six losses."""
    place = Place(driver, dataset, tmp_path_factory.mktemp("whole"))
    return cache(lambda layout: train(place, layout, 6, layout.replace(" ", "-")))


@pytest.mark.parametrize("layout", ["one", "ZeRO-1", "FSDP", "tp 2"])
def test_a_run_in_two_parts_has_the_bits_of_one(place: Place, whole: Whole, layout: str) -> None:
    train(place, layout, 3, "parts")
    assert train(place, layout, 6, "parts") == whole(layout) and len(whole(layout)) == 6


@pytest.mark.parametrize("layout", ["ZeRO-1", "tp 2"])
def test_a_killed_rank_costs_no_bit(place: Place, whole: Whole, layout: str) -> None:
    words = [*STABLE, *LAYOUTS[layout], "trainer.max_steps=6", "exp_manager.name=job"]
    killed = place.run(*words, fault=["in_rank", 1, "signalled", int(signal.SIGKILL), 4])
    assert killed.code != 0
    assert train(place, layout, 6, "job") == whole(layout)


def test_two_replicas_may_share_their_states_and_not_lose_a_bit(place: Place, whole: Whole) -> None:
    """Two ranks add the same two numbers in either layout, so that only a lost state would show."""
    for step, layout in zip((2, 4, 6), ("ZeRO-1", "dp 2", "ZeRO-1"), strict=True):
        found = train(place, layout, step, "moved")
    assert found == whole("dp 2")


def test_adamw_may_not_continue_muon(place: Place) -> None:
    train(place, "one", 2, "job")
    done = place.run(*STABLE, "trainer.max_steps=4")
    assert done.code != 0 and "model.optim.name" in done.output
