"""A run that could not save its checkpoints ends before its first step."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from megafp8.runs.preflight import num_more
from megafp8.specs import CheckpointSpec
from tests.train.runs import TWO_RANKS, Done, Place

CALLBACK = "exp_manager.checkpoint_callback_params"


def size_of(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.iterdir())


def test_too_little_disk_space(place: Place, undisturbed: tuple[Place, Done]) -> None:
    """Every 2 of 12 steps save and 3 are kept: 4 exist while the newest is verified."""
    done = place.run(fault=["little_disk_space", 3_000_000])
    assert done.code == 2 and place.last_step() == 0, done.output
    said = re.search(
        r"checkpoints: 4 checkpoints, kept at once, need (\d+) bytes and 3000000 are free",
        done.output,
    )
    assert said is not None and "Traceback" not in done.output, done.output
    each = size_of(undisturbed[0].checkpoint(12))
    assert 4 * each <= int(said[1]) < 6 * each
    assert not list(place.dir().glob("checkpoints/*"))
    done = place.run(fault=["little_disk_space", int(said[1])])
    assert done.code == 0
    done = place.run("trainer.max_steps=20", fault=["little_disk_space", int(said[1]) // 4])
    assert done.code == 0, "three lie there already: one more is needed"


def test_all_ranks_try(place: Place) -> None:
    fault = ["in_rank", 1, "failing_fsync", errno.EIO]
    done = place.run(*TWO_RANKS, fault=fault)
    assert done.code == 2 and place.last_step() == 0, done.output
    assert done.output.count("rank1.probe: a first small file failed with EIO") == 1
    assert not list(place.dir().glob("checkpoints/*"))


@pytest.mark.parametrize("ranks", [[], TWO_RANKS], ids=["one rank", "two ranks"])
def test_a_disk_that_is_full_when_the_run_directory_is_entered(
    place: Place, ranks: list[str]
) -> None:
    """Without an error that all ranks share, the second rank would wait until it is killed."""
    fault: list[object] = ["failing_pwrite", errno.ENOSPC]
    done = place.run(*ranks, fault=["in_rank", 0, *fault] if ranks else fault)
    assert done.code == 2 and "Traceback" not in done.output, done.output
    said = "runs/job/.lock: writing the lock failed with ENOSPC (No space left on device). Free"
    assert done.output.count(said) == 1, done.output
    assert "rank" not in done.output, "the launcher reports no rank that died"


def test_a_disk_that_is_full_when_the_tokenizer_is_written(place: Place) -> None:
    done = place.run(*TWO_RANKS, fault=["in_rank", 0, "failing_tokenizer", errno.ENOSPC])
    assert done.code == 2 and "Traceback" not in done.output, done.output
    assert done.output.count("runs/job/tokenizer.json: writing the file failed with ENOSPC") == 1
    assert "rank 1" not in done.output, "the second rank has learned of the error"
    assert not place.dir().exists()


@pytest.mark.parametrize(
    ("changes", "step", "there", "expected"),
    [
        ({}, 0, 0, 4),  # 3 kept and the new one
        ({}, 0, 3, 1),
        ({"keep": 10}, 0, 0, 6),  # no more than the run saves
        ({"keep": 10}, 7, 3, 3),  # of steps 8, 10, 12
        ({"save_top_k": 1}, 0, 0, 5),
        ({"save_top_k": -1}, 0, 0, 6),
        ({"every_n_train_steps": None}, 0, 0, 1),
        ({"every_n_train_steps": None, "train_time_interval_seconds": 1.0}, 0, 0, 4),
        ({"every_n_train_steps": 5}, 0, 0, 3),  # 5, 10, 12
    ],
)
def test_how_many(changes: dict[str, object], step: int, there: int, expected: int) -> None:
    usual: dict[str, object] = {
        "every_n_train_steps": 2,
        "train_time_interval_seconds": None,
        "save_last": True,
        "keep": 3,
    }
    spec = CheckpointSpec(**{**usual, **changes})  # type: ignore[arg-type]
    assert num_more(spec, step, 12, there) == expected
