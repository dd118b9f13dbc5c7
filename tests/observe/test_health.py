"""Records of FP8 health are written, read, merged over ranks and compared with limits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megafp8.errors import CheckpointError
from megafp8.observe.health import HealthRecord, complaints, merged, read_health, scalars
from megafp8.observe.metrics import MetricsFile
from megafp8.specs import HealthSpec, TensorHealth

WELL = TensorHealth(amax=2.0, quant_scale=224.0, underflow=0.0, overflow=0.0, snr_db=30.0)
RECORD = HealthRecord(10, {"a.input": WELL, "a.weight": TensorHealth(amax=1, quant_scale=3)}, {})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "health.jsonl"
    odd = TensorHealth(amax=math.inf, quant_scale=1e-30, snr_db=-math.inf)
    records = [RECORD, HealthRecord(20, {"b.grad_output": odd}, {"b.grad_output": 3})]
    with MetricsFile(path) as file:
        for record in records:
            file.log(record.to_dict())
    assert read_health(path) == records


@pytest.mark.parametrize(
    "text", ["nonsense\n", '{"step": 1}\n', "[]\n", '{"step": "x", "tensors": {}}']
)
def test_a_foreign_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "health.jsonl"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read as FP8 health"):
        read_health(path)
    with pytest.raises(CheckpointError):
        read_health(tmp_path / "none.jsonl")


def test_ranks_merge_to_the_worst() -> None:
    other = TensorHealth(amax=5.0, quant_scale=90.0, underflow=0.2, overflow=0.0, snr_db=12.0)
    both = merged([{"a": WELL}, {"a": other, "b": WELL}])
    assert both["b"] == WELL
    assert both["a"] == TensorHealth(
        amax=5.0, quant_scale=90.0, underflow=0.2, overflow=0.0, snr_db=12.0
    )


@pytest.mark.parametrize(
    ("health", "word"),
    [
        (TensorHealth(amax=1, quant_scale=1, underflow=0.6), "underflow"),
        (TensorHealth(amax=1, quant_scale=1, overflow=0.02), "saturate"),
        (TensorHealth(amax=1, quant_scale=1, snr_db=4.0), "dB"),
        (TensorHealth(amax=math.inf, quant_scale=1), "infinity"),
    ],
)
def test_limits(health: TensorHealth, word: str) -> None:
    record = HealthRecord(1, {"good.input": WELL, "bad.input": health}, {})
    found = complaints(record, HealthSpec())
    assert found.keys() == {"bad.input"} and word in found["bad.input"]
    lax = HealthSpec(max_underflow=1, max_overflow=1, min_snr_db=-200)
    assert bool(complaints(record, lax)) == (word == "infinity")


def test_curves_are_the_worst_of_each_role() -> None:
    low = TensorHealth(amax=1.0, quant_scale=448.0, underflow=0.25, overflow=0.0, snr_db=9.0)
    values = scalars(HealthRecord(1, {"a.input": WELL, "b.input": low}, {"a.input": 2}))
    assert values["fp8/input/amax_max"] == 2.0
    assert values["fp8/input/underflow_worst"] == 0.25
    assert values["fp8/input/snr_db_worst"] == 9.0
    assert values["fp8/num_nonfinite"] == 2.0
