"""Tests of `fast_dev_run` from the shell, and of the precision that its summary names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megafp8.cli.main import run_app
from megafp8.cli.pretrain import task
from megafp8.config.errors import SettingError
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.prepare import prepare
from megafp8.train.validate import with_validation_batches
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
    assert summary["unigram_bits_per_byte"] > 0 and summary["xz_bits_per_byte"] is None
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


def validation_loss(place: Place, name: str, limit: str) -> float:
    done = place.run(f"trainer.limit_val_batches={limit}", "trainer.max_steps=4",
                     f"exp_manager.name={name}")  # fmt: skip
    assert done.code == 0, done.output
    (row,) = [row for row in place.metrics(name) if "val_loss" in row]
    loss: float = row["val_loss"]
    return loss


def test_a_share_of_the_validation_split(place: Place) -> None:
    """1.0 is every batch and its last validation every token; half of them is a number too."""
    spec = resolve(load(place.argv("trainer.limit_val_batches=1.0")), lambda: False)
    data = prepare(spec.data, print)
    whole = with_validation_batches(spec, data).train
    assert whole.last_validation_is_whole
    in_all = data.periodic_validation.num_samples // 4
    assert in_all > 1 and whole.limit_val_batches == in_all
    half = replace(spec, train=replace(spec.train, val_share=0.5))
    counted = with_validation_batches(half, data).train
    assert counted.limit_val_batches == in_all // 2 and not counted.last_validation_is_whole
    tiny = replace(spec, train=replace(spec.train, val_share=0.5 / in_all))
    with pytest.raises(SettingError, match="is less than one of the validation split's") as error:
        with_validation_batches(tiny, data)
    least = float(error.value.hint.split()[3].rstrip(","))
    again = replace(spec, train=replace(spec.train, val_share=least))
    assert with_validation_batches(again, data).train.limit_val_batches == 1
    by_share = validation_loss(place, "share", "0.5")
    assert by_share == validation_loss(place, "number", str(in_all // 2))
    assert by_share != validation_loss(place, "all", "1.0")
    assert place.summary("all")["val_tokens"] == data.num_validation_tokens
