"""Test that malicious files are refused, run no code, and make nothing be written elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.checkpoint import store
from megafp8.errors import CheckpointError, RunError
from megafp8.files import read_json_object

Save = Callable[[Path, int], Path]
SHARD = "model-rank0.safetensors"


class Gadget:
    """Make a file when the object is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def forge(step_dir: Path, content: bytes) -> None:
    """Replace a file of tensors, and adapt its entry in the manifest and the manifest's hash."""
    (step_dir / SHARD).write_bytes(content)
    tree = json.loads((step_dir / "manifest.json").read_bytes())
    (entry,) = (file for file in tree["files"] if file["file_name"] == SHARD)
    entry["size"], entry["sha256"] = len(content), hashlib.sha256(content).hexdigest()
    write_manifest(step_dir, json.dumps(tree).encode())


def write_manifest(step_dir: Path, content: bytes) -> None:
    (step_dir / "manifest.json").write_bytes(content)
    line = f"{hashlib.sha256(content).hexdigest()}  manifest.json\n"
    (step_dir / "manifest.sha256").write_text(line)


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"weight@0,0": {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}}


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_is_not_run(tmp_path: Path, save: Save, protocol: int) -> None:
    step_dir, mark = save(tmp_path, 5), tmp_path / "was run"
    content = pickle.dumps(Gadget(mark), protocol)
    for name in (SHARD, "manifest.json", "manifest.sha256"):
        good = (step_dir / name).read_bytes()
        (step_dir / name).write_bytes(content)
        with pytest.raises(CheckpointError):
            store.verify(step_dir)
        (step_dir / name).write_bytes(good)
    store.verify(step_dir)
    forge(step_dir, content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        store.verify(step_dir)
    with pytest.raises(CheckpointError):
        store.Reader(step_dir).read("weight")
    write_manifest(step_dir, content)
    with pytest.raises(CheckpointError, match="not JSON"):
        store.verify(step_dir)
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists(), "the gadget works"


@pytest.mark.parametrize(
    "content",
    [
        safetensors({}, length=2**63),
        safetensors({}, length=2**40),
        safetensors(entry([2**31, 2**31], 0, 2**64)),
        safetensors(entry([2**62], 0, 2**64)),
        safetensors(entry([3, 10], 0, 120)),  # data that is not there
        safetensors(entry([3, 10], 0, 4), b"1234"),
        safetensors(entry([3, 10], -120, 0), bytes(120)),
        safetensors(entry([-3, -10], 0, 120), bytes(120)),
        safetensors(b"[" * 100_000),
        safetensors(b"\xff" * 100),
        b"",
        b"\0" * 8,
    ],
)
def test_absurd_headers(tmp_path: Path, save: Save, content: bytes) -> None:
    step_dir = save(tmp_path, 5)
    forge(step_dir, content)
    with pytest.raises(CheckpointError, match=f"{SHARD}: is not a safetensors file"):
        store.verify(step_dir)


@pytest.mark.parametrize(
    "change",
    [
        {"size": 2**70},
        {"pieces": [{"name": "a", "key": "a", "dtype": "F32", "global_shape": [2**62, 2**62],
                     "offset": [0, 0], "shape": [2**62, 2**62]}]},
        {"pieces": [{"name": "a", "key": "a", "dtype": "F32", "global_shape": [1] * 10_000,
                     "offset": [0] * 10_000, "shape": [1] * 10_000}]},
        {"file_name": "../../outside.safetensors"},
        {"file_name": "a/../../b"},
        {"file_name": "a\0b"},
    ],
)  # fmt: skip
def test_absurd_manifests(tmp_path: Path, save: Save, change: dict[str, Any]) -> None:
    step_dir = save(tmp_path, 5)
    tree = json.loads((step_dir / "manifest.json").read_bytes())
    tree["files"][0] |= change
    write_manifest(step_dir, json.dumps(tree).encode())
    with pytest.raises(CheckpointError):
        store.verify(step_dir)


def test_json_as_deep_as_a_well(tmp_path: Path, save: Save) -> None:
    step_dir = save(tmp_path, 5)
    write_manifest(step_dir, b"[" * 200_000)
    with pytest.raises(CheckpointError, match="nested deeper than 64 levels"):
        store.verify(step_dir)
    (tmp_path / "run.json").write_bytes(b"[" * 200_000)
    with pytest.raises(RunError, match="nested deeper than 64 levels"):
        read_json_object(tmp_path / "run.json")


def test_links_lead_nowhere(tmp_path: Path, save: Save) -> None:
    """The name of a checkpoint, a leftover or a file may be a link to another user's directory."""
    root, theirs = tmp_path / "checkpoints", tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "precious").write_text("x")
    for step in (5, 6, 7):
        save(root, step)
    (root / ".staging-step_00000009-0123456789abcdef").symlink_to(theirs)
    (root / ".trash-step_00000001-0123456789abcdef").symlink_to(theirs)
    (root / "step_00000004").symlink_to(theirs)
    (root / "step_00000005" / "link").symlink_to(theirs)
    store.prune(root, 1)
    assert [path.name for path in root.iterdir()] == ["step_00000007"]
    assert (theirs / "precious").read_text() == "x" and len(list(theirs.iterdir())) == 1
