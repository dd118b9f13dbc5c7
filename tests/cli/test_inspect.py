"""Test `megafp8 inspect` with the health file of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.cli.inspect import main
from megafp8.observe.health import HealthRecord
from megafp8.observe.metrics import MetricsFile
from megafp8.specs import TensorHealth


@pytest.fixture
def run(tmp_path: Path) -> Path:
    def health(size: float) -> TensorHealth:
        return TensorHealth(
            amax=size, quant_scale=448 / size, underflow=size / 100, overflow=0.0, snr_db=30 - size
        )

    with MetricsFile(tmp_path / "health.jsonl") as file:
        for step in (10, 20, 30):
            tensors = {f"layers.{i}.mlp.fc1.input": health(i + step / 10) for i in range(25)}
            file.log(HealthRecord(step, tensors, {"layers.3.mlp.fc1.input": 2}).to_dict())
    return tmp_path


def test_the_worst_come_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 30: 20 of 25 tensors, by snr" in lines[0]
    names = [line.split()[0] for line in lines if line.strip().startswith("layers.")]
    assert names[:2] == ["layers.24.mlp.fc1.input", "layers.23.mlp.fc1.input"]
    assert any("layers.3.mlp.fc1.input: 2" in line for line in lines)


def test_a_step_without_fp8_names_the_last_one_with_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricsFile(run / "health.jsonl") as file:
        file.log(HealthRecord(40, {}, {}).to_dict())
    assert main([str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "No linear was in FP8 in step 40. The last step with one is 30: --step 30" in shown
    assert "Only amaxes" not in shown


def test_another_step_and_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--step", "10", "--all", "--sort", "name"]) == 0
    assert "step 10: 25 of 25 tensors, by name" in capsys.readouterr().out


def test_what_cannot_be_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--step", "11"]) == 2
    assert "has no step 11. The nearest of its 3 steps are 10, 20, 30" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "error:" in capsys.readouterr().err
