"""A run's console.log, events.jsonl and samples.jsonl, and the curve of its loss."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import os
from pathlib import Path

import pytest

from megafp8.observe.console import PlainConsole
from megafp8.observe.curve import MOST_POINTS, LossCurve, logged_curve, sparkline
from megafp8.observe.journal import JournaledConsole
from tests.observe.test_console import REPORT, use_everything


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_everything_shown_is_kept(tmp_path: Path) -> None:
    shown = io.StringIO()
    for _ in range(2):  # a run that continues appends
        use_everything(JournaledConsole(PlainConsole(shown), tmp_path))
    kept = (tmp_path / "console.log").read_text()
    without_answers = "".join(
        line for line in shown.getvalue().splitlines(keepends=True) if line != "answer\n"
    )
    assert kept == without_answers and kept.count("event\n") == 2


def test_events_and_samples(tmp_path: Path) -> None:
    step = 7
    with JournaledConsole(PlainConsole(io.StringIO()), tmp_path) as journal:
        journal.follow(lambda: step)
        journal.event("step 7 saved", kind="save")
        journal.warn("disk is full")
        journal.record("end", "finished", reached=7, loss=math.nan)
        journal.step(dataclasses.replace(REPORT, notes=("not finite: weights unchanged",)))
        journal.sample(7, "def", " f():\n\x07")
    events = lines_of(tmp_path / "events.jsonl")
    assert [(e["kind"], e["text"]) for e in events] == [
        ("save", "step 7 saved"),
        ("warning", "disk is full"),
        ("end", "finished"),
        ("skipped", "not finite: weights unchanged"),
    ]
    assert all(event["step"] == 7 for event in events) and events[2]["loss"] == "NaN"
    (sample,) = lines_of(tmp_path / "samples.jsonl")
    assert (sample["prompt"], sample["text"]) == ("def", " f():\n\x07")
    assert "\x07" not in (tmp_path / "console.log").read_text()


def test_the_error_of_a_failed_run_is_kept_and_not_shown_twice(tmp_path: Path) -> None:
    shown = io.StringIO()
    with JournaledConsole(PlainConsole(shown), tmp_path) as journal:
        journal.record("failed", "NonFiniteError: step 3")
    assert (tmp_path / "console.log").read_text() == "error: NonFiniteError: step 3\n"
    assert shown.getvalue() == "" and lines_of(tmp_path / "events.jsonl")[0]["kind"] == "failed"


def test_a_directory_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    shown = io.StringIO()
    use_everything(JournaledConsole(PlainConsole(shown), tmp_path / "missing"))
    assert shown.getvalue().count("training continues without it") == 1
    assert "event\n" in shown.getvalue()


def test_half_a_line_never_joins_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that becomes full writes a part of a line, and so does a process that is killed."""
    file, write = tmp_path / "events.jsonl", os.write
    console = JournaledConsole(PlainConsole(io.StringIO()), tmp_path)
    console.record("note", "first")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
        console.record("note", "lost")
    with monkeypatch.context() as patch:  # the disk is full in the middle of the line

        def full(descriptor: int, data: bytes) -> int:
            write(descriptor, data[:7])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "write", full)
        console.record("note", "lost too")
    console.record("note", "second")
    assert [line["text"] for line in lines_of(file)] == ["first", "second"]
    with open(file, "a") as stream:
        stream.write('{"time": "2026-')
    console.record("note", "third")
    assert [line["text"] for line in lines_of(file)] == ["first", "second", "third"]
    file.write_text("half")
    console.record("note", "fourth")
    assert [line["text"] for line in lines_of(file)] == ["fourth"]
    console.close()


def test_the_curve_keeps_means_and_the_last_losses() -> None:
    curve = LossCurve(window=3)
    assert curve.recent is None and curve.points == ()
    for loss in (4.0, math.nan, 3.0, 2.0, 1.0):
        curve.add(loss)
    assert curve.recent == (2.0, 3) and curve.points == (4.0, 3.0, 2.0, 1.0)
    long = LossCurve(window=10)
    count = 10 * MOST_POINTS + 3
    for step in range(count):
        long.add(float(step))
    assert len(long.points) <= MOST_POINTS + 1 and long.recent == (count - 5.5, 10)
    assert list(long.points) == sorted(long.points)
    assert long.points[0] == pytest.approx((len(range(16)) - 1) / 2)  # the mean of 16 steps


def test_the_curve_of_a_run_that_continues(tmp_path: Path) -> None:
    """A run that logs every 10 steps has as many points per step before its end as after it."""
    file, whole = tmp_path / "metrics.jsonl", LossCurve(window=10)
    losses = {step: float(-(-step // 10)) for step in range(1, 101)}  # 1 up to step 10, and so on
    for loss in losses.values():
        whole.add(loss)
    logged = [f'{{"step": {step}, "loss": {losses[step]}}}' for step in range(10, 101, 10)]
    file.write_text("\n".join([*logged[:5], '{"step": 50, "val_loss": 9.0}', *logged[5:]]) + "\n")
    assert logged_curve(file, 100, window=10).points == whole.points
    back = logged_curve(file, 55, window=10)  # the lines after step 55 are not of this run any more
    assert back.points == whole.points[:50] and back.recent is None
    back.add(7.0)
    assert back.recent == (7.0, 1), "a logged loss is not the loss of one of the last steps"
    assert logged_curve(tmp_path / "missing", 100, window=10).points == ()


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([], 5, ""),
        ([1.0], 5, "▁"),
        ([2.0, 2.0], 5, "▁▁"),
        ([0.0, 7.0], 5, "▁█"),
        ([7.0, math.nan, 0.0, math.inf], 5, "█▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 0, 4, 4, 7, 7], 3, "▁▅█"),
        ([1.0], 0, ""),
    ],
)
def test_sparkline(values: list[float], width: int, bars: str) -> None:
    assert sparkline(values, width) == bars
