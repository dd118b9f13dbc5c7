"""Traces: a recorded run is done again bit for bit; every committed trace is replayed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import megafp8
from benchmarks.traces import RecordedScaling, Trace, replay
from megafp8.errors import DataError
from megafp8.fp8.scaling import ScalingState
from megafp8.specs import Fp8Recipe
from megafp8.train.step import train_step
from megafp8.train.validate import evaluate
from tests.tiny import build_run, microbatch

COMMITTED = sorted(Path(__file__).with_name("traces").glob("*.json"))
RECIPES = {
    "max": Fp8Recipe(amax_history_len=4),
    "most_recent": Fp8Recipe(
        amax_history_len=3, amax_compute_algo="most_recent", margin=1, backward_format="e4m3"
    ),
    "interval": Fp8Recipe(amax_history_len=5, interval=2),
    "length 1": Fp8Recipe(amax_history_len=1),
}


def record(recipe: Fp8Recipe, steps: int = 4, compute: str = "bf16") -> Trace:
    """Steps of two microbatches of the tiny GPT, with a validation between two of them."""
    state = build_run(compute=compute, fp8=recipe)
    assert isinstance(state.scaling, ScalingState)
    recorded = RecordedScaling(
        state.scaling,
        version=megafp8.__version__,
        sample_updates=frozenset({0, 3}),
        history_every=3,
    )
    state.scaling = recorded  # type: ignore[assignment]
    for number in range(steps):
        train_step(state, [microbatch(2 * number), microbatch(2 * number + 1)])
        state.step += 1
        if number == 0:
            evaluate(state, [microbatch(99)])
    return recorded.trace


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recorded_run_replays_bit_for_bit(
    recipe: Fp8Recipe, compute: str, tmp_path: Path
) -> None:
    record(recipe, compute=compute).save(tmp_path / "run")
    trace = Trace.load(tmp_path / "run")
    assert dataclasses.replace(trace.recipe, reduce_amax=recipe.reduce_amax) == recipe
    assert {d: len(a) for d, a in trace.amax.items()} == {"forward": 8, "backward": 8}
    assert len(trace.names["forward"]) == 16 and len(trace.names["backward"]) == 8
    # Update 3 is a second microbatch: its weights were cast before update 2.
    assert sum(s.update == 0 for s in trace.samples) == 24
    assert sum(s.update == 3 for s in trace.samples) == 16
    assert replay(trace) == []


def test_events_are_those_of_a_step() -> None:
    """Weights are cast and roll once a step, inputs and gradients once a microbatch."""
    trace = record(RECIPES["max"], steps=2)
    assert [e for e in trace.events if not e.startswith("cast")] == 2 * [
        "begin 0", "update forward", "update backward",
        "begin 1", "update forward", "update backward",
    ]  # fmt: skip
    casts = [e.removeprefix("cast ") for e in trace.events if e.startswith("cast")]
    for name in trace.names["forward"]:
        is_weight = name.endswith(".weight")
        assert casts.count(name) == (2 if is_weight else 4), name
        column = trace.names["forward"].index(name)
        occurred = [bool(amax[column] > 0) for amax in trace.amax["forward"]]
        assert occurred == [True, not is_weight] * 2
    assert all(casts.count(name) == 4 for name in trace.names["backward"])


def test_a_changed_bit_is_found() -> None:
    trace = record(RECIPES["max"])
    trace.quant_scale["forward"][5][3] *= 1 + 2**-23
    trace.history["backward"][6][2, 1] += 1
    trace.samples[0].payload.view(torch.uint8)[0, 0] ^= 1
    found = replay(trace)
    assert len(found) == 3
    assert trace.names["forward"][3] in found[0] and "scale" in found[0]
    assert trace.names["backward"][2] in found[1] and "history" in found[1]
    assert "1 payload bytes differ" in found[2]


def test_another_rule_is_found() -> None:
    """A trace made under `max` is none of `most_recent`, nor of another margin."""
    trace = record(RECIPES["max"])
    for changes in ({"amax_compute_algo": "most_recent"}, {"margin": 1}):
        trace.recipe = dataclasses.replace(RECIPES["max"], **changes)
        assert replay(trace)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match="99"):
        Trace.load(tmp_path / "x")


def test_there_are_committed_traces() -> None:
    assert COMMITTED


@pytest.mark.parametrize("path", COMMITTED, ids=[path.stem for path in COMMITTED])
def test_a_committed_trace_replays_bit_for_bit(path: Path) -> None:
    trace = Trace.load(path)
    assert replay(trace) == []
    assert all(len(amaxes) >= 20 for amaxes in trace.amax.values()) and trace.samples
