"""N steps, `kill -9` and the same command give what 2N steps give, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.train.runs import STEPS, Done, Driver, Place, assert_same

pytestmark = pytest.mark.kill

SEED = 20261121
RANDOM_ROUNDS, RANDOM_KILLS = 3, 5  # of each round
TORN_ROUNDS, TORN_KILLS = 1, 5  # of each round: tensors' files half written

KILLED = -signal.SIGKILL


def test_the_suite_kills_often_enough() -> None:
    assert RANDOM_ROUNDS * RANDOM_KILLS + TORN_ROUNDS * TORN_KILLS >= 20
    assert TORN_ROUNDS * TORN_KILLS >= 5


def test_twice_undisturbed_is_the_same(place: Place, undisturbed: tuple[Place, Done]) -> None:
    assert place.run().code == 0
    assert_same(place, undisturbed[0])


@pytest.mark.parametrize("number", range(RANDOM_ROUNDS))
def test_killed_at_random(
    driver: Driver, dataset: Path, tmp_path: Path, undisturbed: tuple[Place, Done], number: int
) -> None:
    """Runs are repeated as often as necessary: a kill after the end of a run does not count."""
    chance = random.Random(SEED + number)
    reference, whole = undisturbed
    step_seconds = max(line.get("step_seconds", 0) for line in reference.metrics())
    after: list[tuple[int, int]] = []  # the newest checkpoint, the last logged step
    for attempt in range(100):
        place = Place(driver, dataset, tmp_path / str(attempt))
        place.cwd.mkdir()
        while True:
            child = place.start()
            if len(after) >= RANDOM_KILLS:
                done = child.wait()
            elif len(after) % 2:  # at any moment of the process, including its start
                done = child.wait(chance.uniform(0, whole.seconds))
            else:  # at any moment of training, of saving and of what comes after
                at_step = chance.randint(0, STEPS)
                while (done := child.wait(0)) is None and place.last_step() < at_step:
                    time.sleep(0.002)  # a busy loop would take CPU time from the run
                done = done or child.wait(chance.uniform(0, 2 * step_seconds))
            if done is None:
                os.kill(child.pid, signal.SIGKILL)
                done = child.wait()
                assert done is not None
            if done.code != KILLED:
                assert done.code == 0, done.output
                break
            after.append((max(place.steps(), default=0), place.last_step()))
        assert_same(place, reference, unpruned=max(len(after), 1))
        if len(after) >= RANDOM_KILLS:
            break
    print(f"seed {SEED + number}: {len(after)} kills after (checkpoint, logged step) {after}")
    assert len(after) >= RANDOM_KILLS


@pytest.mark.parametrize("number", range(TORN_ROUNDS))
def test_killed_while_files_are_half_written(
    place: Place, undisturbed: tuple[Place, Done], number: int
) -> None:
    """The same run is repeated, and killed each time in some write of a later save."""
    chance = random.Random(SEED + 100 + number)
    writes = _writes_of_a_save(undisturbed[0])
    whole = (undisturbed[0].checkpoint(STEPS) / "rank0.safetensors").stat().st_size
    at_writes: list[int] = []
    for kill in range(TORN_KILLS):
        # The kill comes on the way to the next checkpoint, or to the one after it.
        at_write = chance.randint(1, writes) + (writes if kill % 2 else 0)
        done = place.run(fault=["killed_in_write", at_write])
        assert done.code == KILLED, done.output
        # Only this part is there: the next start removes the parts of an earlier kill.
        (torn,) = (place.dir() / "checkpoints").glob(".staging-*/*.safetensors")
        assert 0 < torn.stat().st_size < whole
        at_writes.append(at_write)
    print(f"seed {SEED + 100 + number}: torn writes {at_writes} of {writes} a save")
    assert len(at_writes) == TORN_KILLS
    assert place.run().code == 0
    assert_same(place, undisturbed[0])


@pytest.mark.parametrize("at", [1, 3])
def test_killed_while_the_manifest_is_half_written(
    place: Place, undisturbed: tuple[Place, Done], at: int
) -> None:
    done = place.run(fault=["killed_in_manifest", at])
    assert done.code == KILLED, done.output
    assert place.steps() == [2, 4][: at - 1]
    assert place.run().code == 0
    assert_same(place, undisturbed[0])


@pytest.mark.parametrize("before", ["summarize", "show_sample", "write_summary", "mark"])
def test_killed_at_the_very_end(place: Place, undisturbed: tuple[Place, Done], before: str) -> None:
    """The run is trained and saved but has not ended: the same command does the rest, once."""
    done = place.run(fault=["killed_before", before])
    assert done.code == KILLED, done.output
    assert place.steps()[-1] == STEPS and place.status() == "running"
    done = place.run()
    assert done.code == 0 and "nothing is left to do" in done.output
    assert_same(place, undisturbed[0])


def _writes_of_a_save(reference: Place) -> int:
    """There is one write for the header and one for each tensor (all are smaller than a chunk)."""
    from safetensors import safe_open

    path = reference.checkpoint(STEPS) / "rank0.safetensors"
    with safe_open(str(path), framework="np") as file:
        return 1 + len(list(file.keys()))
