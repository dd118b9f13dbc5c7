"""FP8 health is written at log steps and warned of once, and does not change training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megafp8.fp8.recipes.nvfp4 import Nvfp4
from megafp8.observe.health import HEALTH_FILE, read_health
from megafp8.observe.trackers import CompositeTracker
from megafp8.specs import Fp8Recipe, HealthSpec
from megafp8.specs.run import HealthMode
from megafp8.train.report.fp8 import HealthLog
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.tiny import build_run, gpt_spec, microbatch


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
    for step in range(1, steps + 1):
        log.begin()
        losses.append(train_step(state, [microbatch(step), microbatch(50 + step)]).loss)
        state.step += 1
        log.end(step, CompositeTracker([]))
    log.close()
    return losses, warnings


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
    assert "in FP8: the signal-to-noise ratio of its worst row is" in warnings[0]
    assert "and 21 more tensors" in warnings[3]


def healthy(name: str, directory: Path) -> list[str]:
    """The warnings of five sound steps."""
    model = gpt_spec(hidden_size=64, ffn_hidden_size=128)
    state = build_run(compute="bf16", fp8=Fp8Recipe(name=name), model=model)
    _, warnings = run(directory, "full", 5, state)
    assert len(read_health(directory / HEALTH_FILE)) == 5
    return warnings


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_healthy_run_in_blocks_is_not_warned_of(name: str, tmp_path: Path) -> None:
    assert healthy(name, tmp_path) == []


def test_nvfp4_needs_its_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traits = replace(Nvfp4.traits, max_saturated=0.0)
    monkeypatch.setattr(Nvfp4, "traits", traits)
    assert any("saturate" in warning for warning in healthy("nvfp4", tmp_path))
