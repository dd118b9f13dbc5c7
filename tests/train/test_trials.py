"""Tests of `fast_dev_run` from the shell, and of the precision that its summary names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megafp8.cli.main import run_app
from pretrain_gpt import task
from tests.train.runs import JOB, Place

PLAIN = ("model.fp8_amax_history_len=1024",)


def trial(place: Place, *more: str) -> tuple[str, dict[str, Any], Path]:
    done = place.run("trainer.fast_dev_run=2", "exp_manager.create_tensorboard_logger=True", *more)
    assert done.code == 0, done.output
    (directory,) = (place.cwd / "runs").iterdir()
    return done.output, place.summary(directory.name), directory


def test_a_trial_is_short_to_its_end(place: Place) -> None:
    output, summary, directory = trial(place, "trainer.limit_val_batches=50")
    assert "fast_dev_run: 2 steps, validation on 2 global batches" in output
    assert "whole validation text" not in output and "a sample" not in output
    assert "continue with" not in output and summary["continue_command"] is None
    assert summary["unigram_bits_per_byte"] is None and summary["xz_bits_per_byte"] is None
    assert summary["step"] == 2 and summary["val_loss"] > 0
    assert directory.name != "job" and not (directory / "checkpoints").exists()
    assert not list(directory.glob("*tfevents*"))


@pytest.mark.parametrize(
    ("more", "kernel"),
    [
        ((), "native emulated"),
        ((*PLAIN, "model.fp8_backend=torchao", "model.fp8_recipe=tensorwise"), "torchao emulated"),
        ((*PLAIN, "model.fp8=False"), None),
    ],
)
def test_what_ran_in_fp8_and_by_what(place: Place, more: tuple[str, ...], kernel: str) -> None:
    if kernel == "torchao emulated":
        pytest.importorskip("torchao")
    output, summary, _ = trial(place, *more)
    counted = summary["fp8_share_of_gemm_flops"]
    assert counted == pytest.approx(summary["fp8_share_planned"], rel=1e-9)
    if kernel is None:
        assert counted == 0 and summary["fp8_share_by_kernel"] == {} and "FP8:" not in output
        return
    assert 0 < counted < 1 and summary["fp8_share_by_kernel"] == {kernel: counted}
    line = f"FP8: {counted:.1%} of the GEMM FLOPs of a step without attention ({kernel}); "
    line += f"in higher precision: {'; '.join(summary['higher_precision'])}"
    assert line in output
    first_or_last = "layers.0.attention.qkv, layers.1.mlp.fc2 (first or last"
    assert (first_or_last in output) == (kernel == "torchao emulated")
    assert "precision" in output and summary["precision"] in output


def test_one_command_is_one_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert run_app([*JOB, "trainer.num_nodes=2"], task) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "error: trainer.num_nodes=2: one command starts ranks on its own machine"
    )
    assert "srun" in said and not list(tmp_path.iterdir())


def test_no_validation_at_all(place: Place) -> None:
    none = "trainer.limit_val_batches=0"
    done = place.run(none, "trainer.max_steps=3", "trainer.val_check_interval=1")
    assert done.code == 0 and "limit_val_batches=0: no validation" in done.output, done.output
    assert not [row for row in place.metrics() if "val_loss" in row]
    assert place.summary()["val_loss"] is None and "validating on" not in done.output
    refused = place.run(none, "exp_manager.checkpoint_callback_params.save_top_k=2")
    assert refused.code == 2 and "monitor=reduced_train_loss" in refused.output
