"""Test that nothing is overwritten, and nothing deleted before a newer checkpoint is verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.checkpoint import step_directories, store
from megafp8.errors import CheckpointError

Save = Callable[[Path, int], Path]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def damage(step_dir: Path) -> None:
    path = step_dir / "model-rank0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x10
    path.write_bytes(content)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_valid_checkpoint_is_never_overwritten(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save(tmp_path, 5)
    inodes = {path.name: path.stat().st_ino for path in first.iterdir()}
    before = contents(first)
    assert save(tmp_path, 5) == first
    assert contents(first) == before
    assert {path.name: path.stat().st_ino for path in first.iterdir()} == inodes
    assert names(tmp_path) == ["step_00000005"]


def test_a_damaged_one_is_set_aside_whole(tmp_path: Path, save: Save) -> None:
    for number in (1, 2):
        damage(save(tmp_path, 5))
        damaged = contents(tmp_path / "step_00000005")
        save(tmp_path, 5)
        store.verify(tmp_path / "step_00000005")
        assert contents(tmp_path / f"step_00000005.damaged-{number}") == damaged
    assert store.steps(tmp_path) == [5]


def test_a_file_in_the_way_is_set_aside_too(tmp_path: Path, save: Save) -> None:
    (tmp_path / "step_00000005").write_text("a note of the user's")
    store.verify(save(tmp_path, 5))
    assert (tmp_path / "step_00000005.damaged-1").read_text() == "a note of the user's"


def test_a_shard_that_got_lost_stops_the_commit(tmp_path: Path) -> None:
    staging = store.begin(tmp_path, 1)
    shard = store.write_shard(staging, "a.safetensors", [])
    (staging / "a.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a\.safetensors: has 0 bytes, expected 16"):
        store.commit(staging, tmp_path, 1, [shard], {})
    assert names(tmp_path) == []


def test_steps_ignores_every_other_name(tmp_path: Path, save: Save) -> None:
    assert store.steps(tmp_path / "none") == []
    save(tmp_path, 123_456_789)
    save(tmp_path, 20)
    for name in ("step_20", "step_00000021.damaged-1", ".staging-step_00000022-x", "step_", "x"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000023").write_text("")
    assert store.steps(tmp_path) == [20, 123_456_789]


def test_prune_keeps_the_newest_valid_ones(tmp_path: Path, save: Save) -> None:
    paths = {step: save(tmp_path, step) for step in (1, 2, 3, 4, 5, 6)}
    damage(paths[5])
    damage(paths[1])
    assert store.prune(tmp_path, 3) == (paths[6], paths[4], paths[3])
    assert store.steps(tmp_path) == [3, 4, 5, 6]  # the damaged one is not counted, and stays
    assert store.prune(tmp_path, 3) == (paths[6], paths[4], paths[3])
    assert store.prune(tmp_path, 1) == (paths[6],)
    assert names(tmp_path) == ["step_00000006"]
    assert store.prune(tmp_path / "none", 1) == ()


def test_prune_removes_nothing_while_the_newest_is_damaged(tmp_path: Path, save: Save) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3)]
    damage(paths[2])
    with pytest.raises(CheckpointError, match="step_00000003"):
        store.prune(tmp_path, 1)
    assert store.steps(tmp_path) == [1, 2, 3]


def test_prune_reads_what_is_known_to_be_good_only_once(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    known = store.prune(tmp_path, 2)
    read: list[Path] = []
    monkeypatch.setattr(store, "verify", read.append)
    newest = save(tmp_path, 3)
    assert store.prune(tmp_path, 2, known_good=known) == (newest, known[0])
    assert read == [newest]


def test_prune_cleans_up_after_dead_writers(tmp_path: Path, save: Save) -> None:
    newest = save(tmp_path, 3)
    dead = store.begin(tmp_path, 4)
    (dead / "half.safetensors").write_bytes(b"half")
    (tmp_path / ".trash-step_00000001-0123456789abcdef").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    store.prune(tmp_path, 1)
    assert names(tmp_path) == sorted(["notes.txt", newest.name])


def test_a_kill_while_deleting_leaves_no_half_checkpoint(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    def killed(path: Path) -> None:
        (path / "manifest.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(step_directories, "remove_tree", killed)
    with pytest.raises(KeyboardInterrupt):
        store.prune(tmp_path, 1)
    assert store.steps(tmp_path) == [2]
    monkeypatch.undo()
    store.prune(tmp_path, 1)
    assert names(tmp_path) == ["step_00000002"]


def test_linked_checkpoints_lose_only_the_link(tmp_path: Path, save: Save) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    save(tmp_path, 1).rename(elsewhere)
    (root / "step_00000001").symlink_to(elsewhere)
    assert store.newest_valid(root, print) == root / "step_00000001"
    save(root, 2)
    store.prune(root, 1)
    assert names(root) == ["step_00000002"]
    store.verify(elsewhere)
