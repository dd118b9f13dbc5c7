"""A damaged checkpoint is detected and named, and the one before it is used."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.runs import STEPS, Done, Driver, Place, assert_same


def stopped_at(place: Place, step: int) -> None:
    done = place.run(fault=["signalled", int(signal.SIGTERM), step])
    assert done.code == 75, done.output


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["rank0.safetensors", "manifest.json"])
def test_the_one_before_is_used(place: Place, undisturbed: tuple[Place, Done], file: str) -> None:
    stopped_at(place, 6)
    damaged = place.checkpoint(6) / file
    flip_a_byte(damaged)
    done = place.run()
    assert done.code == 0
    named = [line for line in done.output.splitlines() if "damaged checkpoint" in line]
    assert len(named) == 1 and str(damaged.relative_to(place.cwd)) in named[0], done.output
    assert "step_00000004" in named[0]
    (aside,) = (place.dir() / "checkpoints").glob("*.damaged-*")  # for people to look at
    assert aside.name == "step_00000006.damaged-1"
    assert_same(place, undisturbed[0])


def test_a_truncated_and_a_missing_file(place: Place, undisturbed: tuple[Place, Done]) -> None:
    stopped_at(place, 6)
    tensors = place.checkpoint(6) / "rank0.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    (place.checkpoint(4) / "rank0.safetensors").unlink()
    done = place.run()
    assert done.code == 0
    assert "step_00000006" in done.output and "step_00000004" in done.output
    assert "using the older runs/job/checkpoints/step_00000002" in done.output
    assert_same(place, undisturbed[0])


def test_a_save_before_the_damaged_step_succeeds(
    place: Place, undisturbed: tuple[Place, Done]
) -> None:
    """Step 5 is saved while a damaged step 6 exists: step 5 must count as the newest."""
    stopped_at(place, 6)
    flip_a_byte(place.checkpoint(6) / "rank0.safetensors")
    stopped_at(place, 5)
    assert place.steps() == [2, 4, 5]
    assert place.run().code == 0
    assert_same(place, undisturbed[0])


def test_all_damaged_never_starts_from_scratch(place: Place) -> None:
    stopped_at(place, 3)
    for step in place.steps():
        flip_a_byte(place.checkpoint(step) / "rank0.safetensors")
    done = place.run()
    assert done.code == 2 and "checkpoints are damaged" in done.output
    assert "Traceback" not in done.output
    assert place.steps() == [2, 3]


# ---- what was deleted or cut off between two starts


def copied(place: Place, other: Place) -> None:
    """Put a copy of another place's runs into `place`."""
    shutil.copytree(other.cwd / "runs", place.cwd / "runs")


@pytest.mark.parametrize("left", [[8, 10], [8]], ids=["the newest", "the two newest"])
@pytest.mark.parametrize("steps", [STEPS, STEPS + 2], ids=["same command", "more steps"])
def test_a_finished_run_whose_newest_checkpoints_are_gone_continues(
    place: Place, undisturbed: tuple[Place, Done], left: list[int], steps: int
) -> None:
    """The same command named the deleted checkpoint, and said that nothing was left to do."""
    copied(place, undisturbed[0])
    for step in set(place.steps()) - set(left):
        shutil.rmtree(place.checkpoint(step))
    done = place.run(f"trainer.max_steps={steps}")
    assert done.code == 0, done.output
    gone = "the checkpoint of step 12, which this run has saved, is gone"
    assert f"{gone}; the newest that is left is that of step {left[-1]}" in done.first_line
    if steps == STEPS:
        assert_same(place, undisturbed[0])
    assert Path(place.cwd, place.summary()["checkpoint"]).is_dir()


@pytest.mark.parametrize("damage", [flip_a_byte, Path.unlink], ids=["flipped", "missing"])
def test_a_finished_run_whose_newest_checkpoint_is_damaged_continues(
    place: Place, undisturbed: tuple[Place, Done], damage: Callable[[Path], None]
) -> None:
    copied(place, undisturbed[0])
    damage(place.checkpoint(STEPS) / "rank0.safetensors")
    done = place.run()
    assert done.code == 0 and "continuing from runs/job/checkpoints/step_00000010" in done.output
    assert_same(place, undisturbed[0])


@pytest.mark.parametrize("is_old", [False, True], ids=["noted", "by the summary"])
def test_a_run_whose_checkpoints_are_all_gone_does_not_begin_again(
    place: Place, undisturbed: tuple[Place, Done], is_old: bool
) -> None:
    """Training again would have dropped the lines of every step that was logged."""
    copied(place, undisturbed[0])
    if is_old:  # the records of earlier versions note no saves
        record = json.loads((place.dir() / "run.json").read_text())
        assert max(map(int, record.pop("saves"))) == STEPS
        (place.dir() / "run.json").write_text(json.dumps(record))
    moved = (place.dir() / "checkpoints").rename(place.cwd / "moved")
    (place.dir() / ".lock").unlink()
    before = {file.name: file.read_bytes() for file in place.dir().iterdir()}
    done = place.run()  # its result is still known
    assert done.code == 0 and "none of its checkpoints is left" in done.output, done.output
    assert "step_00000012" not in done.output and "continue with" not in done.output
    done = place.run(f"trainer.max_steps={STEPS + 2}")
    assert done.code == 2, done.output
    assert "the checkpoint of step 12" in done.output and "under another name" in done.output
    (place.dir() / ".lock").unlink()
    assert {file.name: file.read_bytes() for file in place.dir().iterdir()} == before
    moved.rename(place.dir() / "checkpoints")
    assert "nothing is left to do" in place.run().output


def test_an_unnamed_run_without_its_checkpoints_is_passed_over(place: Place) -> None:
    done = place.run("exp_manager.name=null", fault=["signalled", int(signal.SIGTERM), 3])
    assert done.code == 75, done.output
    (run,) = (place.cwd / "runs").iterdir()
    shutil.rmtree(run / "checkpoints")
    logged = (run / "metrics.jsonl").read_bytes()
    done = place.run("exp_manager.name=null", fault=["signalled", int(signal.SIGTERM), 2])
    assert done.code == 75, done.output
    assert f"new run {done.first_line.split(':')[0][5:]}" in done.first_line
    assert f"({run.name} has lost its checkpoints)" in done.first_line
    assert (run / "metrics.jsonl").read_bytes() == logged


@pytest.fixture(scope="module")
def stopped(driver: Driver, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return a run that was stopped after step 9, whose checkpoint is its newest."""
    place = Place(driver, dataset, tmp_path_factory.mktemp("stopped"))
    stopped_at(place, 9)
    return place


def lines_of(file: Path, *kept: slice) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(line for part in kept for line in lines[part]))


CUTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "end": ("metrics.jsonl", lambda f: lines_of(f, slice(5)), "no line between steps 4 and 10"),
    "middle": (
        "metrics.jsonl",
        lambda f: lines_of(f, slice(4), slice(6, None)),
        "no line between steps 4 and 6",
    ),
    "damaged line": (
        "metrics.jsonl",
        lambda f: f.write_bytes(f.read_bytes().replace(b'"step": 6,', b'"step": 6;')),
        "no line between steps 5 and 7",
    ),
    "emptied": ("metrics.jsonl", lambda f: f.write_bytes(b""), "no line of a step up to 9"),
    "deleted": ("metrics.jsonl", Path.unlink, "no line of a step up to 9"),
    "health": ("health.jsonl", lambda f: lines_of(f, slice(7)), "no line between steps 7 and 10"),
    "events": ("events.jsonl", lambda f: lines_of(f, slice(3)), "bytes are missing"),
    "no events": ("events.jsonl", Path.unlink, "there when step 9 was saved"),
    "console": ("console.log", lambda f: f.write_bytes(b"\n"), "bytes are missing"),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_log_that_was_cut_off_between_two_starts_is_named(
    place: Place, stopped: Place, cut: str
) -> None:
    """The run continued with a gap in its curves, and no word of it."""
    copied(place, stopped)
    name, does, words = CUTS[cut]
    does(place.dir() / name)
    done = place.run("trainer.max_steps=10")
    assert done.code == 0, done.output
    (said,) = [line for line in done.output.splitlines() if line.startswith("warning: ")]
    assert f"runs/job/{name}: " in said and words in said
    events = (place.dir() / "events.jsonl").read_text().splitlines()
    warnings = [e["text"] for e in map(json.loads, events) if e["kind"] == "warning"]
    assert warnings == [said.removeprefix("warning: ")]


def test_logs_that_are_whole_are_not_warned_of(place: Place, stopped: Place) -> None:
    """Also where the last process was killed, and where checkpoints are saved in the background."""
    copied(place, stopped)
    later = ["exp_manager.checkpoint_callback_params.async_save=True"]
    assert place.run(*later, fault=["killed_in_microbatch", 3, 0]).code == -signal.SIGKILL
    done = place.run(*later)
    assert done.code == 0 and "warning: " not in done.output, done.output
