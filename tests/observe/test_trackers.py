"""Trackers record values, a tracker that fails does not stop a run, a missing package is named."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pytest

from megafp8.errors import ConfigError
from megafp8.observe import trackers
from megafp8.observe.trackers import CompositeTracker, TensorBoardTracker, Tracker, open_trackers
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
    section = "exp_manager.wandb_logger_kwargs"
    given = {"project": "p", "name": "n", "entity": "team", "group": "g", "mode": "offline"}
    overrides = [f"{section}.{key}={value}" for key, value in given.items()]
    spec = run_spec("exp_manager.create_wandb_logger=True", f"{section}.tags=[a,b]", *overrides)
    open_trackers(spec.observe, tmp_path).close()
    assert {key: fake.given[key] for key in given} == given
    assert fake.given["tags"] == ("a", "b")
    bare = run_spec("exp_manager.create_wandb_logger=True")
    open_trackers(bare.observe, tmp_path).close()
    assert {fake.given[key] for key in (*given, "tags")} == {None}


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
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


def test_wandb_ends_with_every_version_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Run.finish` took `exit_code` and `quiet` in 0.17, and takes `exit_code` alone in 0.31."""
    ended: list[str] = []

    class Older:
        id = "older"

        def define_metric(self, *_: object, **__: object) -> None: ...

        def log(self, values: Mapping[str, float]) -> None: ...

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


@pytest.mark.parametrize("error", [ValueError("Invalid project name 'a/b'"), OSError("no route")])
def test_wandb_that_cannot_begin_is_one_message(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing login, a refused name and a lost connection raise errors of wandb's own."""

    def init(**_: object) -> None:
        raise error

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ConfigError, match=r"create_wandb_logger=True.*wandb login") as caught:
        open_trackers(observe_spec(wandb=True), tmp_path)
    assert str(error) in str(caught.value)


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
