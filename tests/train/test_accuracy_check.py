"""`model.fp8_accuracy_check` warns of linears that lose too much, and changes no bit of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.config.checks.precision_schedule import is_valid
from megafp8.config.load import load
from megafp8.config.precision_changes import with_change
from megafp8.config.resume import with_defaults
from megafp8.errors import UserError
from megafp8.fp8.noise import NoiseProbe
from megafp8.fp8.scaling import ScalingState
from megafp8.observe.accuracy import LOGGED_STEPS
from megafp8.observe.trackers import CompositeTracker
from megafp8.parallel.parts import linears_of
from megafp8.train import state_dict
from megafp8.train.report.accuracy import patterns_of
from megafp8.train.report.fp8 import HealthLog
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.ranks import run_ranks
from tests.tiny import microbatch
from tests.train import precision_schedule_work
from tests.train.accuracy_work import squares_of_a_step
from tests.train.precision_schedule_work import LAST, SIZES, built, different, saved

WARN, FULL = "model.fp8_accuracy_check=warn", "model.fp8_health=full"


def logged_steps(
    state: TrainState,
    directory: Path,
    spoil: Any = None,
    steps: int = LOGGED_STEPS,
    goes_back_after: int | None = None,
) -> list[str]:
    """Return the warnings of steps that are all logged; `spoil` acts on the state before each."""
    warnings: list[str] = []
    directory.mkdir(exist_ok=True)
    spec = state.backend.spec.observe.health
    log = HealthLog(state, spec, directory, state.step, warnings.append)
    for _ in range(steps):
        if spoil is not None:
            spoil(state)
        batches = [microbatch(2 * state.step + n, 4) for n in range(2)]
        result = train_step(state, batches, more=log.begin())
        state.step += 1
        log.end(state.step, CompositeTracker([]), result.more)
        if state.step == goes_back_after:
            log.rewind(state.step)
    log.close()
    return [text for text in warnings if "costs accuracy" in text]


@pytest.mark.parametrize("health", ["scales", "full"])
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_the_check_changes_no_bit(recipe: str, health: str, tmp_path: Path) -> None:
    if (recipe, health) == ("nvfp4", "scales"):
        with pytest.raises(UserError, match=r"(?s)fp8_accuracy_check.*fp8_health=full"):
            built(f"model.fp8_recipe={recipe}", WARN)
        return
    settings = [f"model.fp8_recipe={recipe}", f"model.fp8_health={health}"]
    one, other = built(*settings), built(*settings, WARN)
    assert logged_steps(one, tmp_path / "a") == logged_steps(other, tmp_path / "b") == []
    assert different(one, other) == []
    assert (tmp_path / "a/health.jsonl").read_text() == (tmp_path / "b/health.jsonl").read_text()


def stuck(factor: float) -> Any:
    """Multiply the scale of one linear's gradients, which then stays, after the first step."""

    def spoil(state: TrainState) -> None:
        assert isinstance(state.scaling, ScalingState)
        if state.step == 1:
            table = state.scaling.tables["backward"]
            table.quant_scale[table.names.index("layers.1.mlp.fc2.grad_output")] *= factor

    return spoil


@pytest.mark.parametrize(
    ("factor", "health", "reason"),
    [
        (2.0**-40, "scales", "numbers begin at"),
        (2.0**10, "scales", "times the largest number"),
        (2.0**-31, "full", "times its noise, below √3"),
    ],
    ids=["far too small", "too large", "too small"],
)
def test_a_stuck_scale_is_named_with_a_schedule_that_continues(
    factor: float, health: str, reason: str, tmp_path: Path
) -> None:
    rare = "model.fp8_interval=64"  # updates until the next scale
    settings = ["model.fp8_recipe=delayed", rare, f"model.fp8_health={health}", WARN]
    state = built(*settings)
    warnings = logged_steps(state, tmp_path, stuck(factor), LAST - 1)
    (text,) = warnings  # the first step has no scale yet to be stuck
    assert text.startswith(f"step {LOGGED_STEPS + 1}: FP8 costs accuracy: layers.1.mlp.fc2: ")
    assert reason in text
    line = text.split('"')[1]
    assert line == (
        f"model.precision_schedule=[{{from: {LOGGED_STEPS + 1}, modules: ['layers.1.mlp.fc2'], "
        "recipe: bf16}]"
    )
    earlier = built(*settings)
    logged_steps(earlier, tmp_path / "earlier", stuck(factor), 2)
    continued = built(*settings, line)
    path = saved(earlier, tmp_path / "root")
    state_dict.load_checkpoint(path, continued, lambda _: None)
    assert len(continued.phases) == 2


def test_a_rollback_counts_logged_steps_anew(tmp_path: Path) -> None:
    settings = ["model.fp8_recipe=delayed", "model.fp8_interval=64", "model.fp8_health=scales"]
    state, back = built(*settings, WARN), LOGGED_STEPS  # one step less was beyond the limit
    (text,) = logged_steps(state, tmp_path, stuck(2.0**-40), LAST, goes_back_after=back)
    assert text.startswith(f"step {back + LOGGED_STEPS}: ")


def test_each_gradient_has_its_own_norm() -> None:
    """Also where some gradients are in FP8 and others are not."""
    state = built("model.fp8_recipe=tensorwise", "model.optim.fp8_opt_level=O2")
    train_step(state, [microbatch(0, 4)])
    grads = state.masters.stored_grads
    assert len({grad.fmt.name for grad in grads}) == 2
    expected = torch.stack([grad.values().double().square().sum() for grad in grads])
    torch.testing.assert_close(state.masters.squared_norms(), expected, rtol=1e-5, atol=0)


def test_a_layer_that_is_computed_again_counts_once() -> None:
    settings = ["granularity=full", "method=uniform"]
    state = built(
        "model.fp8_recipe=tensorwise",
        *(f"model.activations_checkpoint_{setting}" for setting in settings),
    )
    assert isinstance(state.scaling, ScalingState)
    probe, batch = NoiseProbe(state.scaling), microbatch(0, 4)
    probe.attach()
    train_step(state, [batch])
    found = probe.detach()
    assert len(found) == 2 * 8
    assert {tensor.rows for tensor in found.values()} == {batch.tokens_BS.size}


def test_ranks_find_the_squares_of_one_rank() -> None:
    settings = ["model.fp8_recipe=tensorwise", "model.hidden_dropout=0"]
    (one,) = {
        str(found): found for found in run_ranks(squares_of_a_step, 1, {"settings": settings})
    }.values()
    assert len(one) == 8 and all(g > n > 0 for g, n in one.values())
    tp = ["model.tensor_model_parallel_size=2", "model.sequence_parallel=True"]
    for layout in (tp, ["model.fsdp=True"], ["model.optim.name=distributed_fused_adam"], []):
        for found in run_ranks(squares_of_a_step, 2, {"settings": [*settings, *layout]}):
            assert found.keys() == one.keys()
            for name in one:
                # a layout rounds sums elsewhere; BF16 has 8 bits of significand
                assert found[name] == pytest.approx(one[name], rel=2**-5), (layout, name)


def test_a_rank_without_rows_counts_its_part_of_the_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for an expert: another rank's noise is compared with the gradient of both."""
    state = built("model.fp8_recipe=tensorwise", FULL, WARN)
    log = HealthLog(state, state.backend.spec.observe.health, tmp_path, 0, lambda _: None)
    detach, name = NoiseProbe.detach, "layers.0.mlp.fc1"

    def without_one(probe: NoiseProbe) -> dict[str, Any]:
        return {n: noise for n, noise in detach(probe).items() if not n.startswith(name)}

    monkeypatch.setattr(NoiseProbe, "detach", without_one)
    result = train_step(state, [microbatch(0, 4)], more=log.begin())
    assert log._check is not None
    found = log._check.squares(result.more)
    assert all(
        gradient > 0 and (noise > 0) == (n != name) for n, (gradient, noise) in found.items()
    )
    assert name in found
    assert list(log._check._beyond({}, [{name: (1.0, 0.5)}, {name: (0.0, 0.0)}])) != []
    assert list(log._check._beyond({}, [{name: (1.0, 0.5)}, {name: (9.0, 0.0)}])) == []


def test_a_weight_without_a_cast_gradient_is_not_judged(tmp_path: Path) -> None:
    state = built("model.fp8_recipe=delayed", FULL, WARN, "model.fp8_wgrad=False")
    log = HealthLog(state, state.backend.spec.observe.health, tmp_path, 0, lambda _: None)
    result = train_step(state, [microbatch(0, 4)], more=log.begin())
    assert log._check is not None and log._check.squares(result.more) == {}
    assert linears_of(state.model)


@pytest.mark.parametrize(
    ("named", "patterns"),
    [
        (["layers.0.mlp.fc1", "layers.1.mlp.fc1"], ["*.mlp.fc1"]),
        (["layers.1.mlp.fc2"], ["layers.1.mlp.fc2"]),
        (["layers.0.mlp.fc1", "layers.1.mlp.fc1", "layers.0.mlp.fc2"],
         ["*.mlp.fc1", "layers.0.mlp.fc2"]),
        (["layers.0.mlp.fc1", "layers.0.mlp.fc2", "layers.1.mlp.fc1", "layers.1.mlp.fc2"], None),
    ],
)  # fmt: skip
def test_patterns_name_these_linears_alone(named: list[str], patterns: list[str] | None) -> None:
    all_fp8 = [f"layers.{n}.mlp.{fc}" for n in (0, 1) for fc in ("fc1", "fc2")]
    assert patterns_of(named, all_fp8) == patterns


def values() -> dict[str, Any]:
    return with_defaults(built("model.fp8_recipe=tensorwise").backend.spec.resolved)


def test_later_entries_that_change_nothing_any_more_are_left_out() -> None:
    given = [
        {"from": 4, "modules": ["*.qkv"], "recipe": "bf16"},
        {"from": 0.9, "modules": ["*.fc1"], "recipe": "mxfp8"},
    ]
    line = with_change(
        given, LAST, {"from": 3, "recipe": "bf16"}, partial(is_valid, values=values())
    )
    assert load([*SIZES, "model.fp8=True", line])["model.precision_schedule"] == [
        {"from": 3, "recipe": "bf16"},
        given[1],
    ]


def test_the_last_step_asks_for_more_steps(tmp_path: Path) -> None:
    settings = ["model.fp8_recipe=delayed", "model.fp8_interval=64", "model.fp8_health=scales"]
    steps = f"trainer.max_steps={LOGGED_STEPS + 1}"
    sizes = [size for size in SIZES if "max_steps" not in size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision_schedule_work, "SIZES", sizes)
        state = built(*settings, WARN, steps)
    (text,) = logged_steps(state, tmp_path, stuck(2.0**-40), LOGGED_STEPS + 1)
    assert ' with a larger trainer.max_steps and "model.precision_schedule=[{from: 4, ' in text


def test_a_schedule_gets_one_more_entry_in_its_place() -> None:
    given = [
        {"from": 1, "products": ["grad_weight"], "recipe": "bf16"},
        {"from": 0.5, "products": ["output"], "recipe": "bf16"},
        {"from": 5, "recipe": "bf16"},
    ]
    entry = {"from": 4, "modules": ["*.mlp.fc2"], "recipe": "bf16"}
    line = with_change(given, LAST, entry, partial(is_valid, values=values()))
    again = load([*SIZES, "model.fp8=True", line])
    starts = [e["from"] for e in again["model.precision_schedule"]]
    assert starts == [1, 0.5, 4, 5] and again["model.precision_schedule"][2] == entry
