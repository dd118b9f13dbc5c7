"""Whole runs whose ranks share each sequence (context parallelism)."""

from __future__ import annotations

import signal

import pytest
from safetensors import safe_open

from tests.train.runs import STEPS, Driver, Place, wait_until

SHARED = ["trainer.devices=2", "model.context_parallel_size=2"]
UNDROPPED = [f"model.{name}_dropout=0" for name in ("hidden", "attention", "ffn")]


@pytest.mark.slow
def test_one_process_two_ranks_one_process(place: Place, driver: Driver) -> None:
    """Data are the same, either run reads the other's checkpoints, losses differ by rounding."""
    alone = Place(driver, place.data, place.cwd / "alone")
    alone.cwd.mkdir()
    assert alone.run(*UNDROPPED).code == 0
    done = place.run(*UNDROPPED, fault=["signalled", int(signal.SIGTERM), 4])
    assert done.code == 75, done.output
    process = place.command(*UNDROPPED, *SHARED)
    wait_until(lambda: place.last_step() >= 6 or process.poll() is not None, "step 6")
    process.terminate()
    assert process.wait() == 75, place.command_output
    assert "context parallel 2" in place.command_output
    assert "continuing after step 4 of 12" in place.command_output
    at = place.summary()["step"]
    assert 6 <= at < STEPS
    with safe_open(place.checkpoint(at) / "rank1.safetensors", "pt") as second:
        assert not [name for name in second.keys() if name.startswith(("model/", "optimizer/"))]
    done = place.run(*UNDROPPED)
    assert done.code == 0 and f"continuing after step {at} of 12" in done.output, done.output
    mine, theirs = (
        [row for row in p.metrics() if "lr" in row or "val_loss" in row] for p in (place, alone)
    )
    assert [row["step"] for row in mine if "lr" in row] == list(range(1, STEPS + 1))
    for ours, other in zip(mine, theirs, strict=True):
        assert ours["consumed_samples"] == other["consumed_samples"]
        assert ours.keys() == other.keys()
        for name in {"loss", "val_loss"} & ours.keys():
            assert ours[name] == pytest.approx(other[name], rel=1e-2)
