"""Test files and folders that survive a kill, locks, and logs that are cut to a step."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fp8_numerics.caches import built_beside, locked
from megafp8.errors import RunError
from megafp8.files import read_json_object, run_errors_reported, write_json_atomically


def test_a_folder_that_the_file_system_refuses_was_not_removed(tmp_path: Path) -> None:
    """/proc answers mkdir with ENOENT, as if a folder above were missing."""
    for path in (Path("/proc/nope"), Path("/proc/nope/run")):
        with (
            pytest.raises(RunError, match=f"{path}: making .*ENOENT.* makes no folders there"),
            run_errors_reported(path, "making the run's directory"),
        ):
            path.mkdir(parents=True)
    gone = tmp_path / "gone" / "staging"
    with (
        pytest.raises(RunError, match="ENOENT.*Something removed it"),
        run_errors_reported(gone, "making the staging directory"),
    ):
        gone.mkdir()


def test_json_round_trip_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for tree in ({"status": "running", "n": 1}, {"status": "finished"}):
        write_json_atomically(path, tree)
        assert read_json_object(path) == tree
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_failed_write_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    write_json_atomically(path, {"old": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"run\.json.*No space left"):
            write_json_atomically(path, {"new": 1})
    assert read_json_object(path) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_folder_appears_whole_and_the_faster_builder_s_stays(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "entry"
    with built_beside(folder) as slow:
        (slow / "by").write_text("slow")
        with built_beside(folder) as fast:
            (fast / "by").write_text("fast")
            assert not folder.exists()
    with pytest.raises(ZeroDivisionError), built_beside(folder):
        raise ZeroDivisionError
    assert (folder / "by").read_text() == "fast"
    assert list(folder.parent.iterdir()) == [folder]


def test_only_builds_that_nobody_writes_any_more_are_deleted(tmp_path: Path) -> None:
    """A folder's own time does not change while a large file grows in it."""
    left, growing = tmp_path / "entry.tmp-left", tmp_path / "entry.tmp-growing"
    for folder in (left, growing):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "array").write_text("a part")
        for path in (folder / "sub" / "array", folder / "sub", folder):
            os.utime(path, (0, 0))
    os.utime(growing / "sub" / "array")
    with built_beside(tmp_path / "entry"):
        pass
    assert not left.exists() and growing.exists()


def test_a_lock_that_is_held_is_noticed_and_released(tmp_path: Path) -> None:
    def refuse() -> None:
        raise RunError("busy")

    for _ in range(2):
        with locked(tmp_path / "lock", refuse):
            with pytest.raises(RunError, match="busy"), locked(tmp_path / "lock", refuse):
                pass


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff"])
def test_damaged_json_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunError, match=r"run\.json"):
        read_json_object(path)
