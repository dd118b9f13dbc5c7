"""The table at the end of a run and summary.json have the right rows and values."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

from megafp8.observe.summary import RunSummary, bits_per_byte, write_summary


def test_bits_per_byte() -> None:
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8.0)
    assert bits_per_byte(math.log(256), 4.0) == pytest.approx(2.0)


def full_summary() -> RunSummary:
    return RunSummary(
        status="finished",
        step=600,
        total_steps=600,
        log_dir="/runs/x",
        continue_command="python pretrain_gpt.py trainer.max_steps=1200",
        val_loss=2.5,
        bytes_per_token=3.0,
        unigram_bits_per_byte=3.4,
        xz_bits_per_byte=2.2,
        train_loss=2.4,
        wall_seconds=121.0,
        tokens_per_second=21300.0,
        tflops_causal=0.51,
        tflops_full=0.55,
        mfu_causal=0.4123,
        mfu_full=0.4446,
        hfu_causal=0.4123,
        hfu_full=0.4446,
        peak="1.24 TFLOP/s FP32 a rank (CPU, measured)",
        peak_memory_bytes=1288490188,
        precision="FP8 delayed (native)",
        metrics_file="/runs/x/metrics.jsonl",
        checkpoint="/runs/x/checkpoints/step_600",
        tensorboard_dir="/runs/x",
        extra={"skipped_steps": 0},
    )


def test_rows_say_what_was_reached_and_where_it_is() -> None:
    rows = dict(full_summary().rows())
    assert rows["status"] == "finished, step 600/600"
    assert rows["validation loss"] == "2.5000 nats per token"
    assert rows["perplexity"] == "12.18"
    assert rows["bits per byte"] == "1.202  (unigram 3.400, xz -9 2.200)"
    assert rows["speed"] == "21.3k tokens/s, 0.51 model TFLOP/s causal (0.55 full)"
    peak = "1.24 TFLOP/s FP32 a rank (CPU, measured)"
    assert rows["utilization"] == f"MFU 41.2 % causal (44.5 % full) of {peak}"
    again = dataclasses.replace(full_summary(), hfu_causal=0.55, hfu_full=0.6)
    assert dict(again.rows())["utilization"] == (
        f"MFU 41.2 % causal (44.5 % full), HFU 55.0 % (60.0 %) with recomputation, of {peak}"
    )
    assert rows["continue with"].startswith("python pretrain_gpt.py")
    assert rows["curves"] == "tensorboard --logdir /runs/x"
    assert rows["let it write"] == "megafp8 generate /runs/x" and "without FP8" not in rows


def test_a_run_in_fp8_names_the_command_that_compares_it() -> None:
    done = dataclasses.replace(full_summary(), extra={"fp8_share_of_gemm_flops": 0.7})
    command = "megafp8 compare --config-dir /runs/x --config-name config --seeds 1 2 3"
    assert dict(done.rows())["without FP8"] == command
    own = {"non_default": [{"key": "model.fp8_recipe", "value": "lab.py:Mine"}]}
    done = dataclasses.replace(done, extra={**done.extra, **own})
    assert dict(done.rows())["without FP8"] == f"{command} --trust-recipe"
    for other in ({"checkpoint": None}, {"status": "stopped"}):
        assert "let it write" not in dict(dataclasses.replace(done, **other).rows())


@pytest.mark.parametrize(
    ("verdict", "row"),
    [("FP8 health: ok", "ok"), ("FP8 health: 2 of 24 tensors bad", "2 of 24 tensors bad")],
)
def test_the_row_of_fp8_health_has_its_name_once(verdict: str, row: str) -> None:
    summary = RunSummary(status="x", step=1, total_steps=1, log_dir=".", health=verdict)
    assert ("FP8 health", row) in summary.rows()


def test_what_was_not_measured_is_left_out() -> None:
    summary = RunSummary(status="stopped, saved", step=3, total_steps=9, log_dir="/runs/x")
    assert summary.rows() == [("status", "stopped, saved, step 3/9"), ("run", "/runs/x")]


@pytest.mark.parametrize(
    ("number", "row"),
    [
        (0, ""),
        (3, "3 of 4, whose gradients were not finite"),
        (4, "4 of 4, whose gradients were not finite; no weight has changed"),
    ],
)
def test_skipped_steps_are_said(number: int, row: str) -> None:
    summary = RunSummary(status="finished", step=4, total_steps=4, log_dir="run")
    rows = dict(dataclasses.replace(summary, num_skipped_steps=number).rows())
    assert rows.get("skipped steps", "") == row


def test_summary_json_is_strict_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, full_summary())
    values = json.loads(path.read_text())
    assert values["val_loss"] == 2.5
    assert values["perplexity"] == math.exp(2.5)
    assert values["val_bits_per_byte"] == bits_per_byte(2.5, 3.0)
    assert values["skipped_steps"] == 0
    assert values["consumed_tokens"] is None
    write_summary(
        path,
        RunSummary(status="x", step=1, total_steps=1, log_dir="é", val_loss=math.nan),
    )
    values = json.loads(path.read_text(encoding="utf-8"))
    assert (values["val_loss"], values["perplexity"], values["log_dir"]) == ("NaN", "NaN", "é")
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_huge_loss_has_an_infinite_perplexity() -> None:
    summary = RunSummary(status="x", step=1, total_steps=1, log_dir=".", val_loss=1e4)
    assert summary.perplexity == math.inf
    assert dict(summary.rows())["perplexity"] == "Infinity"


def test_extra_may_not_shadow_a_key() -> None:
    summary = RunSummary(status="x", step=1, total_steps=1, log_dir=".", extra={"step": 2})
    with pytest.raises(AssertionError, match="step"):
        summary.to_dict()


def test_a_validation_in_part_says_so() -> None:
    whole = dataclasses.replace(full_summary(), val_tokens=5_000, val_tokens_in_all=5_000)
    assert dict(whole.rows())["validation loss"] == "2.5000 nats per token"
    part = dataclasses.replace(whole, val_tokens_in_all=2_000_000)
    value = dict(part.rows())["validation loss"]
    assert value == "2.5000 nats per token, over 5.00k of 2.00M tokens"
