"""A damaged checkpoint is detected and named, and the one before it is used."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.train.runs import Done, Place, assert_same


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
