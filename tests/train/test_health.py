"""FP8 health is written at log steps and warned of once, and does not change training."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.cli import inspect
from megafp8.fp8.health import HealthProbe, UpdateProbe, num_nonfinite
from megafp8.fp8.recipe_settings import checked_recipe
from megafp8.fp8.recipes.nvfp4 import Nvfp4
from megafp8.fp8.scaling import ScalingState
from megafp8.observe.health import HEALTH_FILE, read_health
from megafp8.observe.trackers import CompositeTracker
from megafp8.report.page import run_page
from megafp8.report.record import read_run
from megafp8.report.verdict import weakest_tensors
from megafp8.specs import Fp8Recipe, GPTSpec, HealthSpec, TensorHealth
from megafp8.specs.precision import ModuleRule, RecipeName
from megafp8.specs.recipes import RECIPES
from megafp8.specs.run import HealthMode
from megafp8.train.report.fp8 import HealthLog
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.report.made import make_run
from tests.tiny import build_run, gpt_spec, microbatch, moe_spec


def run(
    directory: Path,
    mode: HealthMode,
    steps: int = 3,
    state: TrainState | None = None,
    **limits: float,
) -> tuple[list[float], list[str]]:
    state = state or build_run(compute="bf16", fp8=Fp8Recipe(amax_history_len=4))
    warnings: list[str] = []
    spec = HealthSpec(mode=mode, **limits)
    log = HealthLog(state, spec, directory, 0, warnings.append)
    losses = []
    for number in range(1, steps + 1):
        step = state.step + 1
        numbers = log.begin()
        batches = [microbatch(number), microbatch(50 + number)]
        result = train_step(state, batches, more=numbers)
        losses.append(result.loss)
        state.step += 1
        log.end(step, CompositeTracker([]), result.more)
    log.close()
    return losses, warnings


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize("mode", ["scales", "full"])
def test_an_expert_without_tokens_is_no_fault(
    mode: HealthMode, recipe: RecipeName, tmp_path: Path
) -> None:
    """Its weight is recorded alone, and with histories the log knows that its input's is empty."""
    moe = moe_spec(score_function="sigmoid", has_expert_bias=True, layers=(True, True))
    model = gpt_spec(bias=False, activation="swiglu", moe=moe)
    history = {"amax_history_len": 4} if recipe == "delayed" else {}
    state = build_run(model=model, fp8=Fp8Recipe(name=recipe, **history))
    assert state.model.parts.routers[1].bias is not None
    state.model.parts.routers[1].bias[2] = -9.0  # never chosen
    log = HealthLog(state, HealthSpec(mode=mode), tmp_path, 0, pytest.fail)
    least = []
    for step in (1, 2):
        result = train_step(state, [microbatch(step), microbatch(50 + step)], more=log.begin())
        state.step += 1
        log.end(step, CompositeTracker([]), result.more)
        least.append(log.least_updates)
        counts = result.tokens_of_experts
        assert [list(row) for row in counts] == [
            r.counts.tolist() for r in state.model.parts.routers
        ]
        assert counts[1][2] == 0 and all(counts[0])
    assert least == [0, 0] if recipe == "delayed" else least == [None, None]
    word = "ok" if mode == "full" else "amaxes ok"
    assert str(log.verdict()).startswith(f"FP8 health: {word}") and log.word() == f"FP8 {word}"
    record = read_health(tmp_path / HEALTH_FILE)[-1]
    found = [name for name in record.tensors if name.startswith("layers.1.mlp.experts.2.")]
    assert found == [f"layers.1.mlp.experts.2.fc{number}.weight" for number in (1, 2)]
    assert "layers.1.mlp.experts.1.fc1.input" in record.tensors and not record.num_nonfinite


@pytest.mark.parametrize("mode", ["scales", "full"])
def test_all_tensors_are_recorded_and_training_is_untouched(
    mode: HealthMode, tmp_path: Path
) -> None:
    plain, _ = run(tmp_path, "off")
    assert not (tmp_path / HEALTH_FILE).exists()
    losses, _ = run(tmp_path, mode)
    assert losses == plain
    records = read_health(tmp_path / HEALTH_FILE)
    assert [record.step for record in records] == [1, 2, 3]
    assert all(len(record.tensors) == 2 * 4 * 3 for record in records)
    health = records[-1].tensors["layers.1.mlp.fc2.grad_output"]
    assert health.amax > 0 and (health.snr_db is not None) == (mode == "full")


def test_a_tensor_is_warned_of_once(tmp_path: Path) -> None:
    _, warnings = run(tmp_path, "full", min_snr_db=199.0)
    assert len(warnings) == 4  # three names and how many more, at the first step only
    assert "in delayed: its signal-to-noise ratio is" in warnings[0]
    assert "and 21 more tensors" in warnings[3]


def healthy(name: str, directory: Path) -> list[str]:
    """The warnings of five sound steps."""
    model = gpt_spec(hidden_size=64, ffn_hidden_size=128)
    state = build_run(compute="bf16", fp8=checked_recipe(name), model=model)
    _, warnings = run(directory, "full", 5, state)
    assert len(read_health(directory / HEALTH_FILE)) == 5
    return warnings


OWN = Path(__file__).parents[1] / "own_recipes"
INT8 = f"{OWN}/simulated_int8.py:Int8"


@pytest.mark.parametrize("name", [*RECIPES, INT8, f"{OWN}/four_bits.py:FourBits"])
def test_a_healthy_run_is_not_warned_of(name: str, tmp_path: Path) -> None:
    assert healthy(name, tmp_path) == []


def test_nvfp4_needs_its_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traits = replace(Nvfp4.traits, max_saturated=0.0)
    monkeypatch.setattr(Nvfp4, "traits", traits)
    assert any("saturate" in warning for warning in healthy("nvfp4", tmp_path))


def ranked_first(directory: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The tensors that `inspect`, the page and a comparison name first, of a run's health."""
    assert inspect.main([str(directory)]) == 0
    first = next(line for line in capsys.readouterr().out.splitlines() if "layers." in line)
    path = make_run(directory / "made")
    shutil.copy(directory / HEALTH_FILE, path / HEALTH_FILE)
    record = read_run(path)
    (card,) = re.findall(r"<small>FP8 health</small>.*?worst (\S+),", run_page(record))
    return {first.split()[0], card, next(iter(weakest_tensors(record)))}


@pytest.mark.parametrize("plant", ["TwoBits", "Outlier", "Underflow"])
@pytest.mark.parametrize(
    ("recipe", "model"),
    [("delayed", {}), ("rowwise", {"activation": "swiglu", "bias": False}), ("nvfp4", {})],
)
def test_a_planted_bad_linear_comes_first_everywhere(
    recipe: str, model: dict[str, Any], plant: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Two bits; 8-bit integers whose scale an outlier of 1e3 sets; 60 % of underflow."""
    bad, rule = "layers.1.mlp.fc1", checked_recipe(f"{OWN}/bad_linears.py:{plant}").name
    fp8 = replace(checked_recipe(recipe), modules=(ModuleRule(bad, rule),))
    sizes = gpt_spec(hidden_size=64, ffn_hidden_size=128, **model)
    state = build_run(compute="bf16", fp8=fp8, model=sizes)
    _, warnings = run(tmp_path, "full", 2, state)
    (worst,) = ranked_first(tmp_path, capsys)
    assert worst.rpartition(".")[0] == bad
    assert warnings[0].startswith(f"step 1: {bad}.") and f"{plant} (bad_linears.py)" in warnings[0]


@pytest.mark.parametrize("recipe", [INT8, "nvfp4", f"{OWN}/four_bits.py:FourBits"])
def test_a_channel_of_1e3_comes_first_where_the_others_lose_by_it(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A norm makes a channel of a linear's input that large, and its weights as much smaller."""
    model = gpt_spec(hidden_size=64, ffn_hidden_size=128)
    state = build_run(compute="bf16", fp8=checked_recipe(recipe), model=model)
    tensors = dict(state.model.named_parameters())
    with torch.no_grad():
        tensors["layers.1.mlp_norm.weight"][5] *= 1e3
        tensors["layers.1.mlp.fc1.weight"][:, 5] /= 1e3
    run(tmp_path, "full", 1, state)
    assert ranked_first(tmp_path, capsys) == {"layers.1.mlp.fc1.input"}


def test_full_health_at_few_steps(tmp_path: Path) -> None:
    """The first logged step of each hundred, and the last; never before step 100."""

    def full_steps(last: int, every: int) -> list[int]:
        logged = [step for step in range(1, last + 1) if step % every == 0 or step in (1, last)]
        mode = HealthSpec(mode="auto").mode_at
        return [step for step in logged if mode(step, last, every) == "full"]

    assert full_steps(300, 10) == [100, 200, 300]
    assert full_steps(350, 7) == [105, 203, 350]
    assert full_steps(99, 10) == [] and full_steps(150, 1) == [150]
    assert full_steps(600, 250) == [250, 500, 600] and full_steps(600, 150) == [150, 300, 450, 600]
    for last, every in product(range(1, 700, 9), (1, 7, 10, 30, 250)):
        assert len(full_steps(last, every)) <= last / 100

    found: dict[HealthMode, tuple[list[float], list[str]]] = {}
    modes: tuple[HealthMode, ...] = ("off", "auto")
    for mode in modes:
        state = build_run(compute="bf16", fp8=Fp8Recipe(amax_history_len=4))
        spec = state.backend.spec
        state.backend.spec = replace(spec, train=replace(spec.train, max_steps=100))
        state.step = 97
        found[mode] = run(tmp_path, mode, 4, state, min_snr_db=30.0)
    records = read_health(tmp_path / HEALTH_FILE)
    assert [record.is_full for record in records] == [False, False, True, False]
    warnings = found["auto"][1]
    assert found["auto"][0] == found["off"][0] and "signal-to-noise" in warnings[0]
    assert records[2].beyond and not records[3].beyond and len(warnings) == 4


LLAMA = gpt_spec(activation="swiglu", normalization="rmsnorm", bias=False)


@pytest.mark.parametrize(
    ("fp8", "model", "spoilt"),
    [
        (Fp8Recipe(amax_history_len=4), None, 1.0),
        (Fp8Recipe(amax_history_len=1, amax_compute_algo="most_recent"), None, 1.0),
        (Fp8Recipe(amax_history_len=8, interval=2, margin=1), LLAMA, 1.0),
        (Fp8Recipe(amax_history_len=4), None, math.inf),
        (Fp8Recipe(amax_history_len=4), None, 0.0),
    ],
    ids=["history", "one amax", "Llama", "not finite", "zeros"],
)
def test_updates_have_the_numbers_that_a_probe_of_the_casts_sees(
    fp8: Fp8Recipe, model: GPTSpec | None, spoilt: float
) -> None:
    """Steps of three microbatches; the third step's input of the layers is spoilt."""
    state = build_run(compute="bf16", fp8=fp8, model=model)
    assert isinstance(state.scaling, ScalingState)
    casts, updates = HealthProbe(state.scaling, "scales"), UpdateProbe(state.scaling)
    for number in range(4):
        if number == 2:
            with torch.no_grad():
                state.masters.params[0].mul_(spoilt)
        casts.attach()
        updates.attach()
        result = train_step(
            state, [microbatch(3 * number + i) for i in range(3)], more=updates.numbers
        )
        state.step += 1
        measured, counts = updates.measures(result.more)
        assert measured == casts.detach() and len(measured) == 2 * 4 * 3
        assert counts == num_nonfinite(state.scaling)
        assert bool(counts) == (spoilt == math.inf and number >= 2)
    assert state.scaling.forward.updates is state.scaling.backward.updates is None


def test_a_weight_that_is_kept_in_fp8_counts_in_the_step_that_reads_it() -> None:
    """A probe of the casts sees it as the step before stores it."""
    state = build_run(compute="bf16", fp8=Fp8Recipe(amax_history_len=4, params_in_fp8=True))
    assert isinstance(state.scaling, ScalingState)
    casts, updates = HealthProbe(state.scaling, "scales"), UpdateProbe(state.scaling)
    stored: dict[str, TensorHealth] = {}
    for number in range(4):
        casts.attach()
        updates.attach()
        result = train_step(state, [microbatch(number)], more=updates.numbers)
        state.step += 1
        measured, _ = updates.measures(result.more)
        seen = casts.detach()
        weights = {name for name in seen if name.endswith(".weight")}
        assert len(weights) == 2 * 4 and measured.keys() == seen.keys()
        for name in seen.keys() - weights:
            assert measured[name] == seen[name]
        if number:
            assert {name: measured[name] for name in weights} == stored
        stored = {name: seen[name] for name in weights}


def test_an_abandoned_step_leaves_no_probe(tmp_path: Path) -> None:
    """The step after a rollback is measured from its own first update."""
    state = build_run(compute="bf16", fp8=Fp8Recipe(amax_history_len=4))
    log = HealthLog(state, HealthSpec(), tmp_path, 0, lambda text: None)
    log.begin()
    train_step(state, [microbatch(1)])
    log.abandon()
    assert isinstance(state.scaling, ScalingState) and state.scaling.forward.updates is None
    log.close()
