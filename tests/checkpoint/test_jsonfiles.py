"""JSON that survives a kill and logs that end where their checkpoint does."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.checkpoint.jsonfiles import read_json, truncate_jsonl, write_json_atomically
from megafp8.errors import RunError


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


def lines_until(last_step: int) -> bytes:
    records = ({"step": s, "loss": 1 / (s + 1), "text": "é\u2028"} for s in range(1, last_step + 1))
    return b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in records)


def test_the_log_ends_at_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert truncate_jsonl(path, 5) == 0 and not path.exists()
    path.write_bytes(lines_until(9))
    assert truncate_jsonl(path, 5) == 4
    assert path.read_bytes() == lines_until(5)
    assert truncate_jsonl(path, 5) == 0
    assert truncate_jsonl(path, 0) == 5 and path.read_bytes() == b""
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8), st.data())
def test_killed_at_any_byte_it_ends_as_an_undisturbed_one(
    last_step: int, data: st.DataObject
) -> None:
    import tempfile

    whole = lines_until(8)
    written = data.draw(st.integers(len(lines_until(last_step)), len(whole)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        path.write_bytes(whole[:written])
        truncate_jsonl(path, last_step)
        assert path.read_bytes() == lines_until(last_step)


def test_lines_that_are_no_records_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    bad = [b'{"step": 2, "lo\n', b"\n", b"[1]\n", b'{"step": true}\n', b'{"loss": 1}\n', b"\xff\n"]
    path.write_bytes(lines_until(1) + b"".join(bad) + b'{"step": 2, "loss": NaN}\n{"step": 3}')
    assert truncate_jsonl(path, 9) == len(bad) + 1
    assert path.read_bytes() == lines_until(1) + b'{"step": 2, "loss": NaN}\n'
