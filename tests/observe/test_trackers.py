"""Trackers record values, a tracker that fails does not stop a run, a missing package is named."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import json
import math
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megafp8.errors import ConfigError
from megafp8.files import Warn
from megafp8.observe import background, trackers
from megafp8.observe.background import Background, Tracker
from megafp8.observe.metrics import MetricsFile
from megafp8.observe.trackers import CompositeTracker, TensorBoardTracker, open_trackers
from megafp8.specs import ObserveSpec
from tests.config.helpers import run_spec


def observe_spec(tensorboard: bool = False, wandb: bool = False) -> ObserveSpec:
    return ObserveSpec(
        exp_dir=".",
        name=None,
        explicit_log_dir=None,
        resume_if_exists=False,
        create_tensorboard_logger=tensorboard,
        create_wandb_logger=wandb,
        wandb_project="project",
        wandb_name=None,
    )


class Recorder:
    def __init__(self, fail_at: int = -1, fail_close: bool = False) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.fail_at, self.fail_close, self.closed = fail_at, fail_close, 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fail_at:
            raise OSError(28, "No space left on device")
        self.seen.append((step, dict(values)))

    def rewind(self, step: int) -> None:
        self.seen.append((-step, {}))

    def close(self) -> None:
        self.closed += 1
        if self.fail_close:
            raise RuntimeError("first line\nsecond line")


def test_a_failing_tracker_is_reported_once_and_not_used_again() -> None:
    warnings: list[str] = []
    good, bad = Recorder(), Recorder(fail_at=2)
    assert isinstance(good, Tracker)
    tracker = CompositeTracker([bad, good], warn=warnings.append)
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1.0})
    tracker.close()
    tracker.close()
    assert [step for step, _ in good.seen] == [1, 2, 3]
    assert [step for step, _ in bad.seen] == [1]
    assert len(warnings) == 1
    assert "Recorder" in warnings[0] and "No space left" in warnings[0]
    assert good.closed == 1


def test_figures_have_the_names_of_nemo_and_megatron() -> None:
    recorder = Recorder()
    values = {"loss": 3.0, "step_seconds": 0.5, "tflops_causal": 7.0}
    CompositeTracker([recorder]).log(1, values)
    CompositeTracker([recorder]).log(2, {"val_loss": 1.0})
    CompositeTracker([recorder]).log(3, {"val_loss": 1e6})
    assert recorder.seen == [
        (1, {"reduced_train_loss": 3.0, "lm loss": 3.0, "train_step_timing in s": 0.5,
             "iteration-time": 0.5, "tflops_causal": 7.0}),
        (2, {"val_loss": 1.0, "lm loss validation": 1.0, "lm loss validation ppl": math.e}),
        (3, {"val_loss": 1e6, "lm loss validation": 1e6, "lm loss validation ppl": math.inf}),
    ]  # fmt: skip


def test_a_failing_close_is_reported_and_others_still_close() -> None:
    warnings: list[str] = []
    first, last = Recorder(), Recorder(fail_close=True)
    CompositeTracker([first, last], warn=warnings.append).close()
    assert first.closed == last.closed == 1
    assert warnings == [
        "Recorder failed (RuntimeError: first line); its last values may be missing"
    ]


def test_nothing_asked_for_nothing_imported(tmp_path: Path) -> None:
    program = (
        "import sys, megafp8.observe\n"
        "assert not {'rich', 'tensorboard', 'wandb', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    tracker = open_trackers(observe_spec(), tmp_path)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_curves_continue_without_overlap(tmp_path: Path) -> None:
    tracker = open_trackers(observe_spec(tensorboard=True), tmp_path)
    for step in (10, 20, 30):
        tracker.log(step, {"loss": float(step), "lr": 0.5})
    tracker.close()
    again = TensorBoardTracker(tmp_path, resume_step=20)
    again.log(30, {"reduced_train_loss": 31.0})
    again.close()
    assert scalars(tmp_path, "reduced_train_loss") == [(10, 10.0), (20, 20.0), (30, 31.0)]
    assert scalars(tmp_path, "lm loss") == [(10, 10.0), (20, 20.0)]
    assert scalars(tmp_path, "lr") == [(10, 0.5), (20, 0.5)]


def test_tensorboard_goes_back_with_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of one second are read in the order of their names, which end with a process's count.
    event_file_writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    tracker = open_trackers(observe_spec(tensorboard=True), tmp_path)
    for attempt in (1.0, 2.0):
        for step in (2, 4, 5, 6):
            if step > 2 or attempt == 1:
                tracker.log(step, {"loss": attempt * step, "consumed_samples": 8 * step})
            if step == 5:
                tracker.log(step, {"val_loss": attempt, "consumed_samples": 8 * step})
        if attempt == 1:
            tracker.rewind(3)
    tracker.close()
    assert scalars(tmp_path, "lm loss") == [(2, 2.0), (4, 8.0), (5, 10.0), (6, 12.0)]
    assert scalars(tmp_path, "val_loss") == [(5, 2.0)]
    assert scalars(tmp_path, "consumed_samples") == [(2, 16), (4, 32), (5, 40), (6, 48)]


def test_tensorboard_that_cannot_write_costs_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    (tmp_path / "file").write_text("in the way")
    tracker = open_trackers(
        observe_spec(tensorboard=True), tmp_path / "file" / "run", warn=warnings.append
    )
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert len(warnings) == 1


def test_wandb_missing_names_the_key_and_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        open_trackers(observe_spec(tensorboard=True, wandb=True), tmp_path)
    assert "exp_manager.create_wandb_logger=True" in str(caught.value)
    assert "pip install" in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "refused before anything is written"


class FakeWandb:
    """Stand for the package wandb, and record what `init` was given."""

    def __init__(self) -> None:
        self.given: dict[str, object] = {}

    def init(self, **given: object) -> FakeWandb:
        self.given = given
        return self

    id = "abc"

    def define_metric(self, *names: str, **more: str) -> None:
        pass

    def finish(self, quiet: bool) -> None:
        pass


def test_wandb_gets_what_the_settings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.delenv("WANDB_NAME", raising=False)
    section = "exp_manager.wandb_logger_kwargs"
    given = {"project": "p", "name": "n", "entity": "team", "group": "g", "mode": "offline"}
    given |= {"job_type": "t", "notes": "a-note"}
    overrides = [f"{section}.{key}={value}" for key, value in given.items()]
    spec = run_spec("exp_manager.create_wandb_logger=True", f"{section}.tags=[a,b]", *overrides)
    open_trackers(spec.observe, tmp_path).close()
    assert {key: fake.given[key] for key in given} == given
    assert fake.given["tags"] == ("a", "b")
    bare = run_spec("exp_manager.create_wandb_logger=True")
    open_trackers(bare.observe, tmp_path).close()
    assert fake.given["project"] == "megafp8" and fake.given["name"] == tmp_path.name
    rest = ("entity", "group", "job_type", "notes", "mode", "tags")
    assert {fake.given[key] for key in rest} == {None}
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_NAME", "theirs")
    open_trackers(bare.observe, tmp_path).close()
    assert fake.given["project"] == "theirs" and fake.given["name"] is None


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(background, "SILENT_SECONDS", 60.0)  # however busy the machine is
    ids = []
    for resume_step in (None, 2):
        spec, warnings = observe_spec(wandb=True), list[str]()
        tracker = open_trackers(spec, tmp_path, resume_step=resume_step, warn=warnings.append)
        tracker.log(3, {"loss": 1.0, "val_loss": float("nan")})
        tracker.close()
        assert not warnings, "the installed version of wandb refuses a call"
        ids.append((tmp_path / "wandb_run_id.txt").read_text())
    assert ids[0] == ids[1] != ""
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def wandb_file(folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Return the run and the rows of an offline folder, by wandb's own protobuf.

    The file has a header of 7 bytes and LevelDB's log format: blocks of 32 KiB, whose chunks have
    a checksum, a length and a kind (1 whole, 2 first, 3 middle, 4 last).
    """
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its own process writes the file, and has the last block until it ends
    (file,) = folder.glob("*.wandb")
    content, position, parts, found, rows = file.read_bytes(), 7, b"", None, []
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        chunk = content[position + 7 : position + 7 + length]
        parts = chunk if kind in (1, 2) else parts + chunk
        position += 7 + length
        if kind in (1, 4):
            record = Record.FromString(parts)
            if record.HasField("run"):
                found = record.run
            elif record.HasField("history"):
                items = record.history.item
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                rows.append({k: v for k, v in row.items() if k not in ("_timestamp", "_runtime")})
    return found, rows


def offline_folders(directory: Path) -> list[Path]:
    folders = (directory / "wandb").glob("offline-run-*")
    return sorted(folders)


def test_wandb_has_one_row_a_step_and_the_whole_curve_when_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(background, "SILENT_SECONDS", 60.0)  # however busy the machine is
    spec = dataclasses.replace(
        observe_spec(wandb=True), wandb_mode="offline", wandb_group="g", wandb_job_type="t",
        wandb_notes="about it", wandb_project=None,
    )  # fmt: skip
    directory = tmp_path / "the-run"
    directory.mkdir()
    said: list[str] = []
    metrics = MetricsFile(directory / "metrics.jsonl")
    tracker = open_trackers(spec, directory, say=said.append, warn=pytest.fail)
    for attempt in range(2):
        for step in range(1, 8):
            if step <= 3 and attempt:
                continue
            values = {"loss": float(step), "consumed_samples": 8 * step}
            metrics.log({"step": step, **values})
            tracker.log(step, values)
            if step == 5:
                validation = {"val_loss": 0.5, "consumed_samples": 8 * step}
                metrics.log({"step": step, **validation})
                tracker.log(step, validation)
        if not attempt:
            metrics.rewind(3)
            tracker.rewind(3)
    tracker.close()
    (folder,) = offline_folders(directory)
    assert said == [f"Weights & Biases: offline; upload with: wandb sync {folder}"]
    assert tracker.where == said[0].partition(": ")[2]
    run, rows = wandb_file(folder)
    assert (run.project, run.display_name, run.run_group) == ("megafp8", "the-run", "g")
    assert (run.job_type, run.notes) == ("t", "about it")
    assert [row["_step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[4] == {
        "_step": 5, "trainer/global_step": 5, "reduced_train_loss": 5.0, "lm loss": 5.0,
        "consumed_samples": 40, "val_loss": 0.5, "lm loss validation": 0.5,
        "lm loss validation ppl": math.exp(0.5),
    }  # fmt: skip
    with MetricsFile(metrics.path, resume_step=6) as metrics:
        again = open_trackers(spec, directory, resume_step=6, metrics=metrics.path)
        again.log(7, {"loss": 7.5})
        again.close()
    continued, more = wandb_file(offline_folders(directory)[-1])
    assert continued.run_id == run.run_id and more[:6] == rows[:6]
    assert [row["_step"] for row in more] == [1, 2, 3, 4, 5, 6, 7] and more[6]["lm loss"] == 7.5


def test_wandb_ends_with_every_version_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Run.finish` took `exit_code` and `quiet` in 0.17, and takes `exit_code` alone in 0.31."""
    ended: list[str] = []

    class Older:
        id = "older"

        def define_metric(self, *_: object, **__: object) -> None: ...

        def log(self, values: Mapping[str, float], step: int) -> None: ...

        def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
            ended.append(self.id)

    class Newer(Older):
        id = "newer"

        def finish(self, exit_code: int | None = None) -> None:  # type: ignore[override]
            ended.append(self.id)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for kind in (Older, Newer):
        double = types.SimpleNamespace(init=lambda kind=kind, **_: kind())
        monkeypatch.setitem(sys.modules, "wandb", double)
        warnings: list[str] = []
        tracker = open_trackers(observe_spec(wandb=True), tmp_path, warn=warnings.append)
        tracker.log(1, {"loss": 1.0})
        tracker.close()
        assert not warnings
    assert ended == ["older", "newer"]


class UsageError(Exception):
    """Have the name of wandb's error for a missing key."""


class CommError(Exception):
    """Have the name of wandb's error for what the server answers, or does not."""


WRONG_BY_ITSELF = [
    ValueError("Invalid project name 'a/b'"), UsageError("No API key configured"),
    CommError("returned error 403: permission denied"),
]  # fmt: skip
LOST = [OSError("no route"), CommError("Failed to get resume status: deadline exceeded")]


def breaking_wandb(
    monkeypatch: pytest.MonkeyPatch, error: Exception, modes: tuple[str | None, ...] = (None,)
) -> list[FakeWandb]:
    """Put a wandb in place that raises `error` in some modes; return the runs that began."""
    begun: list[FakeWandb] = []

    class Run(FakeWandb):
        offline, dir = True, "there/files"

        def log(self, values: Mapping[str, float], step: int) -> None:
            self.given[str(step)] = dict(values)

        def finish(self) -> None:  # type: ignore[override]
            pass

    def init(mode: str | None, **given: object) -> FakeWandb:
        if mode in modes:
            raise error
        begun.append(Run())
        return begun[-1].init(mode=mode, **given)

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return begun


@pytest.mark.parametrize("error", WRONG_BY_ITSELF, ids=str)
def test_what_is_wrong_by_itself_refuses_a_new_run_alone(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing login and a refused name raise errors of wandb's own."""
    begun = breaking_wandb(monkeypatch, error)
    with pytest.raises(ConfigError, match=r"create_wandb_logger=True.*wandb login") as caught:
        open_trackers(observe_spec(wandb=True), tmp_path)
    assert str(error) in str(caught.value) and not begun
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.log({"step": 3, "loss": 1.0})
    said: list[str] = []
    tracker = open_trackers(
        observe_spec(wandb=True), tmp_path, resume_step=3, metrics=metrics.path,
        say=said.append, warn=said.append,
    )  # fmt: skip
    tracker.log(4, {"lr": 1.0})
    tracker.close()
    assert f"({error}); it is recorded offline" in "".join(said)
    assert begun[0].given["3"] and begun[0].given["4"] == {
        "lr": 1.0, "learning-rate": 1.0, "trainer/global_step": 4
    }  # fmt: skip


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_connection_ends_no_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = breaking_wandb(monkeypatch, error)
    said: list[str] = []
    tracker = open_trackers(observe_spec(wandb=True), tmp_path, say=said.append, warn=said.append)
    tracker.log(1, {"lr": 1.0})
    tracker.close()
    assert begun[0].given["1"] and begun[0].given["mode"] == "offline"
    assert tracker.where == "offline; upload with: wandb sync there" and not tracker.failures
    assert said[0].endswith("it is recorded offline") and said[1].endswith(tracker.where)
    required = dataclasses.replace(observe_spec(wandb=True), wandb_must_start=True)
    for resume_step in (None, 3):
        with pytest.raises(ConfigError, match="create_wandb_logger=True"):
            open_trackers(required, tmp_path, resume_step=resume_step)
    breaking_wandb(monkeypatch, error, (None, "offline"))
    tracker = open_trackers(observe_spec(wandb=True), tmp_path, warn=said.append)
    tracker.log(1, {"lr": 1.0})
    tracker.close()
    assert "training continues without it" in said[-1] and len(tracker.failures) == 1


def test_wandb_gets_again_what_a_killed_process_could_not_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that continues online is told from which step on rows are taken."""
    begun = breaking_wandb(monkeypatch, OSError(), modes=())
    monkeypatch.setattr(FakeWandb, "starting_step", 5, raising=False)
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        for step in range(1, 8):
            metrics.log({"step": step, "loss": 1.0})
    health = {"step": 6, "tensors": {}, "num_nonfinite": {"x": 3}}
    (tmp_path / "health.jsonl").write_text(json.dumps(health) + "\n")
    said: list[str] = []
    for last, first in ((7, 5), (3, 5)):
        with MetricsFile(metrics.path, resume_step=last) as metrics:
            tracker = open_trackers(
                observe_spec(wandb=True), tmp_path, resume_step=last, metrics=metrics.path,
                say=said.append,
            )  # fmt: skip
        for step in range(last + 1, 10):
            tracker.log(step, {"loss": 2.0})
        tracker.close()
        sent = {int(key): row for key, row in begun[-1].given.items() if key.isdecimal()}
        assert sorted(sent) == list(range(first, 10)) and not tracker.failures
    assert "fp8/num_nonfinite" in begun[0].given["6"]  # type: ignore[operator]
    assert [line for line in said if "takes none" in line] == [
        "Weights & Biases has steps up to 4, and takes none of them again"
    ]


def test_a_missing_package_ends_no_run_that_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    warnings: list[str] = []
    tracker = open_trackers(observe_spec(wandb=True), tmp_path, resume_step=2, warn=warnings.append)
    tracker.log(3, {"lr": 1.0})
    tracker.close()
    assert len(warnings) == len(tracker.failures) == 1 and "not installed" in warnings[0]


# --- trackers that block: events decide, no clock -------------------------------------------------


def test_a_tracker_that_begins_late_gets_what_was_logged_before() -> None:
    gate, recorder, warnings, said = threading.Event(), Recorder(), list[str](), list[str]()

    def begin(deferred: Callable[[Warn], Warn]) -> Tracker:
        gate.wait()
        deferred(said.append)("has begun")
        return recorder

    late = Background("late", begin, start_seconds=0, end_seconds=None, warn=warnings.append)
    assert warnings == ["late has not begun yet; training continues, and its curves wait for it"]
    tracker = CompositeTracker([late], warn=warnings.append)
    tracker.log(1, {"lr": 1.0})
    tracker.rewind(0)
    assert recorder.seen == [] and said == []
    gate.set()
    late._has_begun.wait()
    tracker.close()
    assert [step for step, _ in recorder.seen] == [1, 0] and recorder.closed == 1
    assert said == ["has begun"] and not tracker.failures


def test_a_tracker_that_never_begins_ends_no_run() -> None:
    gate, warnings = threading.Event(), list[str]()

    def begin(_: object) -> Tracker:
        gate.wait()
        return Recorder()

    tracker = CompositeTracker(
        [Background("W", begin, start_seconds=0, warn=warnings.append)], warn=warnings.append
    )
    tracker.log(1, {"lr": 1.0})
    tracker.close()
    assert tracker.failures == ["W failed (TimeoutError: it has never begun)"]
    gate.set()


@pytest.mark.parametrize("method", ["log", "close"])
def test_a_tracker_that_blocks_ends_no_run(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST_LINES", 3)
    gate, blocked = threading.Event(), threading.Event()

    def block(*_: object) -> None:
        blocked.set()
        gate.wait()

    recorder, warnings = Recorder(), list[str]()
    setattr(recorder, method, block)
    blocking = Background("B", lambda _: recorder, start_seconds=None, end_seconds=0)
    good = Recorder()
    tracker = CompositeTracker([blocking, good], warn=warnings.append)
    tracker.log(1, {"lr": 1.0})
    if method == "log":
        blocked.wait()
        for step in range(2, 7):
            tracker.log(step, {"lr": 1.0})
        reason = "it has not taken 3 lines"
    else:
        reason = "it does not end"
    tracker.close()
    assert [line.partition(";")[0] for line in warnings] == [f"B failed (TimeoutError: {reason})"]
    assert tracker.failures == [warnings[0].partition(";")[0]]
    assert good.closed == 1 and len(good.seen) == (6 if method == "log" else 1)
    gate.set()


def test_an_error_in_a_trackers_thread_is_reported_once() -> None:
    warnings: list[str] = []
    bad = Background("B", lambda _: Recorder(fail_at=1), start_seconds=None)
    tracker = CompositeTracker([bad], warn=warnings.append)
    tracker.log(1, {"lr": 1.0})
    bad._has_ended.wait()
    tracker.log(2, {"lr": 1.0})
    tracker.log(3, {"lr": 1.0})
    tracker.close()
    assert len(warnings) == 1 and "No space left" in warnings[0] and "without it" in warnings[0]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"../../elsewhere", b"", b"x" * 5000, None])
def test_a_damaged_id_costs_the_curve_and_not_the_run(
    content: bytes | None, tmp_path: Path
) -> None:
    file = tmp_path / "wandb_run_id.txt"
    warnings: list[str] = []
    assert trackers._id_in(file, warnings.append) is None and not warnings
    file.mkdir() if content is None else file.write_bytes(content)
    assert trackers._id_in(file, warnings.append) is None
    assert len(warnings) == 1 and "Weights & Biases begins a new run" in warnings[0]


def test_an_id_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "wandb_run_id.txt").write_text("ab12-cd_3\n")
    assert trackers._id_in(tmp_path / "wandb_run_id.txt", pytest.fail) == "ab12-cd_3"
