"""The file metrics.jsonl is exact and strict JSON, with complete lines and no repeated steps."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.files import to_json, write_atomically
from megafp8.observe.metrics import MetricsFile, read_metrics


def refuse_constant(word: str) -> float:
    raise AssertionError(f"{word} is not strict JSON")


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(), min_size=1))
def test_floats_read_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, float]
) -> None:
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.log({"step": 1, **values})
    json.loads(path.read_text(), parse_constant=refuse_constant)
    (row,) = read_metrics(path)
    for key, value in values.items():
        got = row[key]
        assert (math.isnan(got) and math.isnan(value)) or (
            got == value and math.copysign(1, got) == math.copysign(1, value)
        )


def test_lines_and_their_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.log({"lr": 1e-3, "zeta": 1, "fp8/underflow": 0.5, "loss": math.nan, "step": 10})
        file.log({"val_loss": math.inf, "step": 10, "consumed_samples": 40, "x": -math.inf})
    assert path.read_text() == (
        '{"step": 10, "loss": "NaN", "lr": 0.001, "fp8/underflow": 0.5, "zeta": 1}\n'
        '{"step": 10, "consumed_samples": 40, "val_loss": "Infinity", "x": "-Infinity"}\n'
    )


def test_a_line_is_on_disk_before_log_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.log({"step": 1})
    assert read_metrics(path) == [{"step": 1}]
    file.close()
    file.close()
    file.log({"step": 2})  # after the end nothing is written, without an error
    assert len(read_metrics(path)) == 1


def test_continuing_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in (10, 20, 30):
            file.log({"step": step, "loss": float(step)})
            file.log({"step": step, "val_loss": float(step)})
    with path.open("a") as raw:
        raw.write('{"step": 40, "lo')
    with MetricsFile(path, resume_step=20) as file:
        file.log({"step": 30, "loss": 31.0})
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [10, 10, 20, 20, 30]
    assert rows[-1]["loss"] == 31.0


def test_without_a_resume_step_whole_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "note": "a\\u2028b"}\n{"st')
    with MetricsFile(path) as file:
        file.log({"step": 3})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_rewind_while_open(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in (1, 2, 3):
            file.log({"step": step})
        file.rewind(1)
        file.log({"step": 2, "loss": 0.5})
    assert read_metrics(path) == [{"step": 1}, {"step": 2, "loss": 0.5}]


def test_a_full_disk_costs_a_warning_and_leaves_no_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, warn=warnings.append)
    file.log({"step": 1})
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:7]))
    file.log({"step": 2})
    file.log({"step": 3})
    monkeypatch.setattr(os, "write", real_write)
    file.log({"step": 4})
    file.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 4]
    assert len(warnings) == 1
    assert str(path) in warnings[0]


def test_a_directory_that_is_not_there_costs_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    file = MetricsFile(tmp_path / "gone" / "metrics.jsonl", warn=warnings.append)
    file.log({"step": 1})
    file.rewind(0)
    file.close()
    assert len(warnings) == 1


def test_a_line_needs_a_step(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m.jsonl") as file, pytest.raises(AssertionError, match="step"):
        file.log({"loss": 1.0})


def test_numpy_and_torch_scalars_become_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    text = to_json({"a": numpy.float32(0.1), "b": torch.tensor(2), "c": numpy.float64("nan")})
    assert json.loads(text) == {"a": float(numpy.float32(0.1)), "b": 2, "c": "NaN"}


def test_atomic_write_leaves_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8), st.data())
def test_killed_at_any_byte_it_ends_as_an_undisturbed_one(
    tmp_path_factory: pytest.TempPathFactory, resume_step: int, data: st.DataObject
) -> None:
    """A kill leaves any prefix that has the checkpoint's lines; the rest is written again."""
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"

    def log(first: int) -> bytes:
        with MetricsFile(path, resume_step=first - 1) as metrics:
            for step in range(first, 9):
                metrics.log({"step": step, "loss": 1 / (step + 1), "note": "\u00e9\u2028"})
        return path.read_bytes()

    undisturbed = log(1)
    ends = [0, *(i + 1 for i, byte in enumerate(undisturbed) if byte == ord("\n"))]
    cut = data.draw(st.integers(ends[resume_step], len(undisturbed)))
    path.write_bytes(undisturbed[:cut])
    assert log(resume_step + 1) == undisturbed
