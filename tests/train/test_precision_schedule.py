"""A run with `model.precision_schedule` is the run that is stopped, edited and continued."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.config.errors import SettingError
from megafp8.train import state_dict
from megafp8.train.phases import begin_phase
from megafp8.train.state import TrainState
from tests.ranks import Rank, run_ranks
from tests.train.precision_schedule_work import (
    BACKWARD_HIGH,
    FORWARD_HIGH,
    LAST,
    MANY,
    SCHEDULE,
    SWITCH,
    built,
    continue_at_every_step,
    different,
    run_steps,
    saved,
    tensors_of,
)
from tests.train.runs import STEPS, TWO_RANKS, Place, assert_same, timeless_metrics

O2 = "model.optim.fp8_opt_level=O2"
SMOOTHED = Path(__file__).parents[1] / "own_recipes/smoothed.py"
# (the settings of the first phase, the entry, the settings that a user would continue with today)
PAIRS = {
    "nvfp4 to bf16": (["model.fp8_recipe=nvfp4"], "recipe: bf16", ["model.fp8=False"]),
    "delayed to bf16": (["model.fp8_recipe=delayed"], "recipe: bf16", ["model.fp8=False"]),
    "delayed to mxfp8": (
        ["model.fp8_recipe=delayed"], "recipe: mxfp8", ["model.fp8_recipe=mxfp8"]
    ),
    "mxfp8 to delayed": (
        ["model.fp8_recipe=mxfp8"], "recipe: delayed", ["model.fp8_recipe=delayed"]
    ),
    "rowwise to tensorwise": (
        ["model.fp8_recipe=rowwise"], "recipe: tensorwise", ["model.fp8_recipe=tensorwise"]
    ),
    "forward of delayed": (
        ["model.fp8_recipe=delayed"], "products: forward, recipe: bf16",
        ["model.fp8_recipe=delayed", FORWARD_HIGH],
    ),
    "forward of nvfp4": (
        ["model.fp8_recipe=nvfp4"], "products: forward, recipe: bf16",
        ["model.fp8_recipe=nvfp4", FORWARD_HIGH],
    ),
    "backward of mxfp8": (
        ["model.fp8_recipe=mxfp8"], "products: backward, recipe: bf16",
        ["model.fp8_recipe=mxfp8", BACKWARD_HIGH],
    ),
    "delayed to mxfp8 in FP8-LM": (
        ["model.fp8_recipe=delayed", O2], "recipe: mxfp8", ["model.fp8_recipe=mxfp8", O2]
    ),
    "forward of a recipe in a file": (
        [f"model.fp8_recipe={SMOOTHED}"], "products: forward, recipe: bf16",
        [f"model.fp8_recipe={SMOOTHED}", FORWARD_HIGH],
    ),
    "nvfp4 to a recipe in a file": (
        ["model.fp8_recipe=nvfp4"], f"recipe: '{SMOOTHED}'", [f"model.fp8_recipe={SMOOTHED}"]
    ),
    "one kind of linear": (
        ["model.fp8_recipe=delayed"], "modules: '*.fc2', recipe: bf16",
        ["model.fp8_recipe=delayed", "model.fp8_modules=['*.fc2:high_precision']"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "compute"), [*((name, "bf16") for name in PAIRS), ("mxfp8 to delayed", "32")]
)
def test_a_switch_is_a_stop_an_edit_and_a_restart(tmp_path: Path, name: str, compute: str) -> None:
    first, entry, second = PAIRS[name]
    if compute == "32":
        entry = entry.replace("bf16", "high_precision")
    dtype = f"trainer.precision={compute}"
    whole = built(*first, dtype, f"{SCHEDULE}[{{from: {SWITCH}, {entry}}}]")
    stopped = built(*first, dtype)
    losses = run_steps(whole, LAST)
    assert losses[:SWITCH] == run_steps(stopped, SWITCH)
    edited = built(*second, dtype)
    state_dict.load_checkpoint(saved(stopped, tmp_path), edited, lambda _: None)
    assert losses[SWITCH:] == run_steps(edited, LAST)
    assert different(whole, edited) == []
    unchanged = run_steps(stopped, LAST)
    assert losses[SWITCH:] != unchanged  # the switch matters, so equality above says something


SP = "model.sequence_parallel=True"
TP, PP = "model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"
UNDROPPED = "model.hidden_dropout=0"
RECOMPUTED = [
    "model.activations_checkpoint_granularity=full",
    "model.activations_checkpoint_method=uniform",
]
ZERO = "model.optim.name=distributed_fused_adam"
LAYOUTS = {  # the first two are fast
    "1 rank": (1, []),
    "FP8-LM, FSDP 2": (2, [O2, "model.fsdp=True"]),
    "tp 2 with sequence parallelism": (2, [TP, SP]),
    "pp 2": (2, [PP]),
    "zero bubbles": (2, [PP, "model.pipeline_schedule=InterleavedZeroBubble",
                         "model.virtual_pipeline_model_parallel_size=1"]),
    "cp 2": (2, ["model.context_parallel_size=2", UNDROPPED]),
    "FSDP 2": (2, ["model.fsdp=True"]),
    "FSDP 2 with pp 2": (4, [PP, "model.fsdp=True", "model.pipeline_schedule=GPipe"]),
    "ZeRO-1 over 2": (2, [ZERO]),
    "own scales of each rank": (2, [TP, "model.reduce_amax=False"]),
    "recomputed layers": (1, RECOMPUTED),
    "FP16": (1, ["trainer.precision=16", "model.native_amp_init_scale=65536"]),
    "Muon": (1, ["model.optim.name=muon"]),
    "FP8-LM": (1, [O2]),
    "FP8-LM over 2": (2, [O2, ZERO]),
}  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.slow] if number > 1 else [])
        for number, name in enumerate(LAYOUTS)
    ],
)
def test_a_run_that_continues_has_the_same_bits(tmp_path: Path, layout: str) -> None:
    ranks, settings = LAYOUTS[layout]
    many = MANY.replace("bf16", "high_precision") if "FP16" in layout else MANY
    arguments = {"settings": ["model.fp8_recipe=delayed", many, *settings], "root": str(tmp_path)}
    if ranks == 1:
        results = [continue_at_every_step(Rank(0, 1), **arguments)]
    else:
        results = run_ranks(continue_at_every_step, ranks, arguments)
    for found in results:
        assert {what: names for what, names in found.items() if names} == {}


def test_a_state_that_goes_back_has_the_earlier_precision(tmp_path: Path) -> None:
    state = built("model.fp8_recipe=delayed", MANY)
    run_steps(state, 3)
    path = saved(state, tmp_path)
    run_steps(state, LAST)
    at_the_end = tensors_of(state)
    state_dict.load_checkpoint(path, state, lambda _: None)
    run_steps(state, LAST)
    again = tensors_of(state)
    assert [n for n in at_the_end if not torch.equal(at_the_end[n], again[n])] == []


def test_delayed_scales_are_kept_or_begin_anew() -> None:
    entries = (
        "[{from: 2, products: forward, recipe: bf16}, {from: 3, recipe: mxfp8}, "
        "{from: 4, recipe: delayed}]"
    )
    state = built("model.fp8_recipe=delayed", SCHEDULE + entries)
    run_steps(state, 2)
    before = {d: t.quant_scale.clone() for d, t in state.scaling.tables.items()}
    begun = begin_phase(state)
    assert begun is not None and begun.fresh == frozenset()
    assert all(torch.equal(t.quant_scale, before[d]) for d, t in state.scaling.tables.items())
    run_steps(state, 4)
    begun = begin_phase(state)
    assert begun is not None and len(begun.fresh) == 2 * 4 * 3
    for table in state.scaling.tables.values():
        assert (table.quant_scale == 1).all() and (table.history == 0).all()
        assert (table.num_updates == 0).all()


def test_a_delayed_scale_is_kept_beside_other_recipes() -> None:
    """Gradients of delayed scaling are E5M2 beside MXFP8 too, so that no history begins anew."""
    state = built("model.fp8_recipe=mxfp8", "model.fp8_modules=['*.fc2:delayed']",
                  "model.fp8_amax_history_len=8",
                  f"{SCHEDULE}[{{from: 2, modules: '*.fc1', recipe: delayed}}, "
                  "{from: 3, recipe: delayed}]")  # fmt: skip
    run_steps(state, 3)
    before = dict(state.scaling.tables)
    assert (before["backward"].num_updates > 0).all()
    begun = begin_phase(state)
    kept = {f"layers.{n}.mlp.{fc}.{role}" for n in (0, 1) for fc in ("fc1", "fc2")
            for role in ("input", "weight", "grad_output")}  # fmt: skip
    assert begun is not None and begun.fresh.isdisjoint(kept)
    assert len(begun.fresh) == 2 * 4 * 3 - len(kept)
    after = state.scaling.tables
    for name in kept:
        way = "backward" if name.endswith("grad_output") else "forward"
        old, new = (table[way].names.index(name) for table in (before, after))
        history = after[way].history[new]
        assert torch.equal(history, before[way].history[old]) and history.any()
    assert before["backward"].fmt is after["backward"].fmt and after["backward"].fmt.name == "e5m2"


def test_a_delayed_scale_begins_anew_under_another_rule() -> None:
    state = built("model.fp8_recipe=delayed", f"{SCHEDULE}[{{from: 2, recipe: '{SMOOTHED}'}}]")
    run_steps(state, 2)
    before = {name for table in state.scaling.tables.values() for name in table.names}
    begun = begin_phase(state)
    assert begun is not None and begun.fresh and begun.fresh <= before
    for table in state.scaling.tables.values():
        assert (table.quant_scale == 1).all() and (table.history == 0).all()
        assert (table.num_updates == 0).all()


def test_evaluation_at_a_switch_is_in_the_earlier_precision() -> None:
    """A validation after step N comes before the phase that begins after N."""
    state = built("model.fp8_recipe=delayed", f"{SCHEDULE}[{{from: {SWITCH}, recipe: bf16}}]")
    run_steps(state, SWITCH)
    assert not state.scaling.recipe.is_unused
    assert begin_phase(state) is not None and begin_phase(state) is None
    assert state.scaling.recipe.is_unused


def test_a_longer_run_keeps_the_steps_of_fractions(tmp_path: Path) -> None:
    entry = f"{SCHEDULE}[{{from: 0.5, recipe: mxfp8}}]"
    short = built("model.fp8_recipe=delayed", entry)
    run_steps(short, 2)
    longer = built("model.fp8_recipe=delayed", entry, "trainer.max_steps=100")
    said: list[str] = []
    state_dict.load_checkpoint(saved(short, tmp_path), longer, said.append)
    assert [phase.after for phase in longer.phases] == [0, LAST // 2]
    assert any("begins after step 3" in line and "would now be 50" in line for line in said)
    run_steps(short, LAST)
    run_steps(longer, LAST)
    assert longer.scaling.recipe.name == short.scaling.recipe.name == "mxfp8"
    longest = built("model.fp8_recipe=delayed", entry, "trainer.max_steps=200")
    state_dict.load_checkpoint(saved(longer, tmp_path / "longer"), longest, said.append)
    assert [phase.after for phase in longest.phases] == [0, LAST // 2]


def test_only_the_future_may_change(tmp_path: Path) -> None:
    first = built("model.fp8_recipe=delayed", f"{SCHEDULE}[{{from: 2, recipe: mxfp8}}]")
    run_steps(first, 4)
    path = saved(first, tmp_path)

    def continued(entries: str) -> TrainState:
        more = [SCHEDULE + entries] if entries else []
        state = built("model.fp8_recipe=delayed", *more)
        state_dict.load_checkpoint(path, state, lambda _: None)
        return state

    added = continued("[{from: 2, recipe: mxfp8}, {from: 4, recipe: bf16}]")
    run_steps(added, 5)
    assert added.scaling.recipe.is_unused
    same = continued("[{from: 0.34, recipe: mxfp8}]")  # the same step, said in another way
    assert same.scaling.recipe.name == "mxfp8"
    for entries in (
        "",
        "[{from: 3, recipe: mxfp8}]",
        "[{from: 2, recipe: tensorwise}]",
        "[{from: 1, modules: '*.fc1', recipe: bf16}, {from: 2, recipe: mxfp8}]",
    ):
        with pytest.raises(SettingError, match="has trained 4 steps, with these changes"):
            continued(entries)


# --- whole runs -----------------------------------------------------------------------------------

IN_RUNS = (
    f"{SCHEDULE}[{{from: 5, products: forward, recipe: bf16}}, {{from: 0.5, recipe: mxfp8}}, "
    "{from: 8, modules: '*.fc2', recipe: bf16}, {from: 10, recipe: bf16}]"
)


ASYNC = "exp_manager.checkpoint_callback_params.async_save=True"


def events(place: Place, kind: str) -> list[dict[str, Any]]:
    lines = (place.dir() / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["kind"] == kind]


LONGER = f"trainer.max_steps={STEPS + 4}"


def test_a_whole_run_is_prolonged_and_its_past_stays(place: Place) -> None:
    entry = "{from: 0.5, recipe: bf16}"
    assert place.run(f"{SCHEDULE}[{entry}]").code == 0
    past = place.run(f"{SCHEDULE}[{{from: 3, recipe: bf16}}]", LONGER)
    assert past.code == 2 and "Traceback" not in past.output
    assert f"the run has trained {STEPS} steps, with these changes of precision: all" in past.output
    assert "model.precision_schedule=" in past.output.splitlines()[-1]
    longer = place.run(f"{SCHEDULE}[{entry}, {{from: {STEPS + 2}, recipe: mxfp8}}]", LONGER)
    assert longer.code == 0, longer.output
    assert "begins after step 6, as when the run began; from: 0.5 would now be 8" in longer.output
    assert "FP8: 0.0% of the GEMM FLOPs" in longer.output  # of the phase that it continues in
    assert [e["step"] for e in events(place, "precision")] == [6, STEPS + 2]
    assert f"precision schedule: all linears in mxfp8 after step {STEPS + 2}" in longer.output
    page = (place.dir() / "report.html").read_text()
    assert f"<li>steps 7 to {STEPS + 2}: all linears in high precision" in page
    summary = place.summary()
    assert "mxfp8" in summary["precision"]
    assert f"since step {STEPS + 3}, after 2 changes of precision" in summary["precision"]
    assert "fp8_share_planned" not in summary  # each phase has another


@pytest.mark.slow
def test_ranks_refuse_another_past_once(place: Place) -> None:
    assert place.run(f"{SCHEDULE}[{{from: 4, recipe: bf16}}]", *TWO_RANKS).code == 0
    past = place.run(f"{SCHEDULE}[{{from: 3, recipe: bf16}}]", *TWO_RANKS, LONGER)
    assert past.code == 2 and past.output.count("the run has trained") == 1, past.output


@pytest.mark.kill
@pytest.mark.parametrize(
    ("steps", "more"),
    [
        pytest.param(range(5, 7), [], id="at a switch"),
        pytest.param(range(5, 7), TWO_RANKS, id="at a switch of two", marks=pytest.mark.slow),
        pytest.param(
            range(4, 11), ["model.fp8_health=full", ASYNC], id="everywhere", marks=pytest.mark.slow
        ),
    ],
)
def test_runs_killed_around_switches(place: Place, steps: range, more: list[str]) -> None:
    """Each process dies when it has saved its first step; the first process has trained several."""
    whole = replace(place, cwd=place.cwd / "whole")
    killed = replace(place, cwd=place.cwd / "killed")
    for each in (whole, killed):
        each.cwd.mkdir()
    every = "exp_manager.checkpoint_callback_params.every_n_train_steps=1"
    assert whole.run(IN_RUNS, every, *more).code == 0
    one_of_two = ["in_rank", 1] if more is TWO_RANKS else []
    for step in steps:
        number = step if step == steps[0] else 1
        fault = [*one_of_two, "killed_at", "written", number]
        done = killed.run(IN_RUNS, every, *more, fault=fault)
        assert done.code == (1 if one_of_two else -9), done.output
        assert max(killed.steps()) == step, done.output
    assert killed.run(IN_RUNS, every, *more).code == 0
    assert_same(killed, whole)
    phases = [line["precision_phase"] for line in whole.metrics() if "loss" in line]
    assert phases == [0] * 5 + [1] + [2] * 2 + [3] * 2 + [4] * 2
    assert [e["step"] for e in events(whole, "precision")] == [5, 6, 8, 10]
    assert timeless_metrics(whole) == timeless_metrics(killed)
