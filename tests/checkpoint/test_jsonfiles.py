"""Test JSON files that survive a kill, and logs that are cut to the checkpoint's step."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megafp8.errors import RunError
from megafp8.files import read_json, write_json_atomically


def test_json_round_trip_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for tree in ({"status": "running", "n": 1}, {"status": "finished"}):
        write_json_atomically(path, tree)
        assert read_json(path) == tree
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
    assert read_json(path) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff"])
def test_damaged_json_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunError, match=r"run\.json"):
        read_json(path)
