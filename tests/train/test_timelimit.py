"""Tests of `trainer.max_time`, and of restarts without progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.errors import RunError
from megafp8.parallel.launch import LAST_END, LAUNCHER
from megafp8.runs.restarts import check_progress, most_without_progress
from megafp8.train.process import TimeLimit
from tests.train.runs import Done, Place


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_leaves_time_for_one_more_step_and_a_save() -> None:
    clock = Clock()
    limit = TimeLimit(60.0, began=100.0, clock=clock)
    clock.now = 110.0  # set-up
    limit.start()
    clock.now = 120.0
    assert not limit.is_due()  # 20 + 10
    clock.now = 125.0
    limit.saved(5.0)
    assert not limit.is_due()  # 25 + 10 + 5
    clock.now = 144.9
    assert limit.is_due()  # 44.9 + 19.9 + 5: that step was slow
    assert not TimeLimit(None, 0.0, clock).is_due()


def test_a_save_beside_training_ends_before_the_last_one() -> None:
    clock = Clock()
    limit = TimeLimit(60.0, began=100.0, clock=clock)
    limit.start()
    limit.saved(5.0)
    clock.now = 110.0
    assert not limit.is_due(under_way=8.0)  # 10 + 10 + 2 x 8
    clock.now = 120.0
    assert not limit.is_due()  # 20 + 10 + 5
    clock.now = 130.0
    assert limit.is_due(under_way=10.0)  # 30 + 10 + 2 x 10: the save that ends first takes 10
    clock.now = 135.0
    assert not limit.is_due()  # 35 + 10 + 5


def test_max_time_saves_and_leaves(place: Place, undisturbed: tuple[Place, Done]) -> None:
    limit = ["trainer.max_time=00:00:00:01", "trainer.max_steps=12"]
    done = place.run(*limit, fault=["slow", 0.2])
    assert done.code == 75, done.output
    summary = place.summary()
    assert summary["status"] == "saved on trainer.max_time"
    assert 1 <= summary["step"] < 12 and place.steps()[-1] == summary["step"]
    assert place.run().code == 0
    mine, theirs = (p.checkpoint(12) / "rank0.safetensors" for p in (place, undisturbed[0]))
    assert mine.read_bytes() == theirs.read_bytes()


def restarted(count: int, job: str = "5") -> dict[str, str]:
    counts = {"SLURM_RESTART_COUNT": str(count)} if count else {}
    return {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": f"node{count}", **counts}


def test_three_restarts_without_progress(tmp_path: Path) -> None:
    for count in range(3):
        check_progress(tmp_path, 8, restarted(count))
    (tmp_path / "metrics.jsonl").write_text('{"step":9}\n{"step":11}\n')
    with pytest.raises(RunError) as caught:
        check_progress(tmp_path, 8, restarted(3))
    text = str(caught.value)
    assert "3 restarts have begun at step 8" in text and text.count("saved none") == 3
    assert "on node2: reached step 11" in text
    check_progress(tmp_path, 8, restarted(0, job="6"))  # a user submits the job again
    assert len(json.loads((tmp_path / "restarts.json").read_text())["starts"]) == 1


@pytest.mark.parametrize(
    ("ends", "node"),
    [
        (["node2: task 3: Out Of Memory"] * 2, "node2"),
        (["node2: task 3: Killed", "rank 2 on node2 hung"], "node2"),
        (["rank 0 on node1 crashed", "node2: task 3: Killed"], None),
        (["saved after USR1"] * 2, None),
        (["node2: task 3: Killed", ""], None),
    ],
)
def test_a_node_that_fails_again_is_named_after_the_users_number(
    ends: list[str], node: str | None, tmp_path: Path
) -> None:
    """The job has two nodes each time; a signal is no node."""
    here = {"SLURM_JOB_NODELIST": "node[1-2]"}
    assert check_progress(tmp_path, 8, restarted(0) | here, most=2) is None
    first = restarted(1) | here | {"MEGAFP8_LAST_END": ends[0]}
    line = check_progress(tmp_path, 8, first, most=2)
    assert line is not None and line.endswith(f"reached step 8, and ended: {ends[0]}")
    with pytest.raises(RunError) as caught:
        second = restarted(2) | here | {"MEGAFP8_LAST_END": ends[1]}
        check_progress(tmp_path, 8, second, most=2)
    text = str(caught.value)
    assert "2 restarts have begun at step 8" in text and all(end in text for end in ends)
    where = f"ended on {node}" if node else "ran on node[1-2]"
    assert f"All of them {where}. " in text
    assert (f"--exclude={node}" if node else "other nodes (--exclude)") in text


def test_restarts_by_a_launcher_count_too(tmp_path: Path) -> None:
    def launched(count: int, limit: int = 9) -> dict[str, str]:
        names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
        return dict(zip(names, (str(count), str(limit)), strict=True))

    for count in range(3):
        check_progress(tmp_path, 0, launched(count) | {"TORCHELASTIC_RUN_ID": "7"})
    with pytest.raises(RunError, match="3 restarts have begun at step 0"):
        check_progress(tmp_path, 0, launched(3) | {"TORCHELASTIC_RUN_ID": "7"})
    check_progress(tmp_path, 0, launched(0))
    assert len(json.loads((tmp_path / "restarts.json").read_text())["starts"]) == 1
    for count in range(3):  # Slurm's and the launcher's together
        check_progress(tmp_path, 0, restarted(1) | launched(count))
    with pytest.raises(RunError):
        check_progress(tmp_path, 0, restarted(2) | launched(0) | launched(2))
    check_progress(tmp_path, 0, launched(0, limit=0))
    assert not (tmp_path / "restarts.json").exists()


def test_a_node_that_fails_again_and_again_is_named_with_how_each_start_ended(
    tmp_path: Path,
) -> None:
    """The number is the user's, and each start says in the log how the one before it ended."""
    here = {"SLURM_JOB_NODELIST": "node7", LAST_END: "rank 3 died (signal SIGKILL) on node7"}
    most = most_without_progress(2, restarted(0))
    said = []
    for count in range(3):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 8 + count}) + "\n")
        said.append(check_progress(tmp_path, 8, restarted(count) | here, most))
    began = "the start before it on node7 began at step 8 and reached step"
    ended = "and ended: rank 3 died (signal SIGKILL) on node7"
    assert said == [None, *(f"restart {n}: {began} {8 + n}, {ended}" for n in (1, 2))]
    with pytest.raises(RunError) as caught:
        check_progress(tmp_path, 8, restarted(3) | here, most)
    text = str(caught.value)
    assert "3 restarts have begun at step 8" in text and "All of them ran on node7. " in text
    assert text.count("saved none; rank 3 died (signal SIGKILL) on node7") == 3


def test_whose_number_of_restarts_counts() -> None:
    """Slurm has no limit of its own; our launcher counts to `trainer.max_restarts` itself."""
    assert most_without_progress(7, restarted(1)) == 8
    assert most_without_progress(0, restarted(1)) == most_without_progress(7, {}) == 3
    assert most_without_progress(7, restarted(1) | {LAUNCHER: "12"}) == 3


def test_progress_begins_a_new_count(tmp_path: Path) -> None:
    for count in range(9):
        check_progress(tmp_path, count // 3, restarted(count))
        starts = json.loads((tmp_path / "restarts.json").read_text())["starts"]
        assert len(starts) == count % 3 + 1


def test_no_restart_no_count(tmp_path: Path) -> None:
    check_progress(tmp_path, 0, restarted(2))
    for _ in range(5):
        check_progress(tmp_path, 0, {})
    assert not (tmp_path / "restarts.json").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"starts": 3}', '{"starts": [3]}'])
def test_a_damaged_record_counts_from_zero(tmp_path: Path, text: str) -> None:
    (tmp_path / "restarts.json").write_text(text)
    check_progress(tmp_path, 0, restarted(2))
    assert len(json.loads((tmp_path / "restarts.json").read_text())["starts"]) == 1


def test_a_run_that_gets_nowhere_is_stopped(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.run(fault=["killed_in_microbatch", 1, 0]).code == -9
    starts = [{"restart": n} for n in range(3)]
    record = {"job": "5", "step": 0, "starts": starts}
    (place.dir() / "restarts.json").write_text(json.dumps(record))
    environment = {**restarted(3)}
    done = place.run(fault=["environment", environment])
    assert done.code == 2, done.output
    assert "3 restarts have begun at step 0" in done.output and not place.steps()


def test_a_damaged_line_of_metrics_counts_as_no_step(tmp_path: Path) -> None:
    lines = ('{"step": "Infinity"}', '{"step": "NaN"}', '{"step": 9}')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for count in (0, 1):
        check_progress(tmp_path, 8, restarted(count))
    record = json.loads((tmp_path / "restarts.json").read_text())
    assert record["starts"][0]["reached"] == 9
