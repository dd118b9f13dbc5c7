"""Test that every change of a checkpoint's files is found."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.checkpoint import store
from megafp8.errors import CheckpointError

Save = Callable[[Path, int], Path]
NUM_FLIPS = 400


def rewrite_manifest(step_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and its hash, as someone would who knows about the hash."""
    path = step_dir / "manifest.json"
    tree = json.loads(path.read_bytes())
    change(tree)
    content = json.dumps(tree).encode()
    path.write_bytes(content)
    line = f"{hashlib.sha256(content).hexdigest()}  manifest.json\n"
    (step_dir / "manifest.sha256").write_text(line)


def test_every_flipped_bit_is_found(tmp_path: Path, save: Save) -> None:
    step_dir = save(tmp_path, 5)
    draw = random.Random(1)
    files = sorted(step_dir.iterdir())
    assert len(files) == 4
    for number in range(NUM_FLIPS):
        path = files[number % len(files)]
        good = path.read_bytes()
        bad, bit = bytearray(good), draw.randrange(8 * len(good))
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointError) as caught:
            store.verify(step_dir)
        # A wrong hash file accuses the manifest: which of the two changed, nobody can tell.
        assert path.name in str(caught.value)
        path.write_bytes(good)
    store.verify(step_dir)


def test_every_truncation_or_addition_is_found(tmp_path: Path, save: Save) -> None:
    step_dir = save(tmp_path, 5)
    for path in sorted(step_dir.iterdir()):
        good = path.read_bytes()
        lengths = {0, 1, 7, 8, len(good) // 2, len(good) - 1}
        for bad in [good[:length] for length in lengths] + [good + b"\n", good + bytes(4096)]:
            path.write_bytes(bad)
            with pytest.raises(CheckpointError):
                store.verify(step_dir)
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path.name}: is missing"):
            store.verify(step_dir)
        path.write_bytes(good)
    store.verify(step_dir)


def test_the_message_names_file_and_both_values(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, 5) / "model-rank1.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-4])
    with pytest.raises(
        CheckpointError, match=f"rank1.*{len(good) - 4} bytes, expected {len(good)}"
    ):
        store.verify(path.parent)
    path.write_bytes(good[:-1] + b"?")
    actual, expected = (hashlib.sha256(x).hexdigest() for x in (good[:-1] + b"?", good))
    with pytest.raises(CheckpointError, match=f"rank1.*{actual}, expected {expected}"):
        store.verify(path.parent)


def files_of(tree: dict[str, Any]) -> dict[str, Any]:
    return tree["files"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update(format_version=2), "format_version is 2, not 1"),
        (lambda t: t.pop("step"), "step"),
        (lambda t: t.update(step=6), "is the manifest of step 6"),
        (lambda t: t.update(step=True), "step"),
        (lambda t: t.update(meta=[]), "meta"),
        (lambda t: t.update(files={}), "files"),
        (lambda t: t.update(files=[1]), "wrong type"),
        (lambda t: t["files"].pop(), "weight: pieces hold 30 of 60"),
        (lambda t: t["files"].append(t["files"][0]), "occurs twice"),
        (lambda t: files_of(t).update(file_name="../model-rank0.safetensors"), "not a plain name"),
        (lambda t: files_of(t).update(file_name="/etc/passwd"), "not a plain name"),
        (lambda t: files_of(t).update(file_name=".."), "not a plain name"),
        (lambda t: files_of(t).update(file_name="manifest.json"), "not a plain name"),
        (lambda t: files_of(t).update(sha256="0" * 63), "sha256"),
        (lambda t: files_of(t).update(size=-1), "size"),
        (lambda t: files_of(t)["pieces"][0].update(offset=[1, 0]), "overlap"),
        (lambda t: files_of(t)["pieces"][0].update(offset=[5, 0]), "leaves the shape"),
        (lambda t: files_of(t)["pieces"][0].update(offset=[0]), "differ in length"),
        (lambda t: files_of(t)["pieces"][0].update(dtype="F31"), "unknown"),
        (lambda t: files_of(t)["pieces"][0].update(dtype="I32"), "disagree"),
        (lambda t: files_of(t)["pieces"][0].update(key="other"), "other tensors"),
    ],
)
def test_a_wrong_manifest_with_a_right_hash_is_refused(
    tmp_path: Path, save: Save, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    step_dir = save(tmp_path, 5)
    rewrite_manifest(step_dir, change)
    with pytest.raises(CheckpointError, match=said):
        store.verify(step_dir)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe"])
def test_a_manifest_that_is_no_json_object_is_refused(
    tmp_path: Path, save: Save, content: bytes
) -> None:
    step_dir = save(tmp_path, 5)
    (step_dir / "manifest.json").write_bytes(content)
    line = f"{hashlib.sha256(content).hexdigest()}  manifest.json\n"
    (step_dir / "manifest.sha256").write_text(line)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        store.verify(step_dir)


@pytest.mark.parametrize("name", ["model-rank0.safetensors", "manifest.json", "manifest.sha256"])
def test_links_are_refused(tmp_path: Path, save: Save, name: str) -> None:
    step_dir = save(tmp_path, 5)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(step_dir / name, elsewhere)
    (step_dir / name).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="symbolic link"):
        store.verify(step_dir)
    with pytest.raises(CheckpointError, match="symbolic link"):
        store.Reader(step_dir)


def test_a_copy_under_a_free_name_is_welcome(tmp_path: Path, save: Save) -> None:
    copy = tmp_path / "pretrained"
    shutil.copytree(save(tmp_path, 5), copy)
    store.verify(copy)
    assert store.Reader(copy).step == 5


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_newest_valid_one_is_used_and_the_damaged_named(tmp_path: Path, save: Save) -> None:
    messages: list[str] = []
    assert store.newest_valid(tmp_path / "none", messages.append) is None
    assert store.newest_valid(tmp_path, messages.append) is None
    paths = [save(tmp_path, step) for step in (4, 8, 12)]
    assert store.newest_valid(tmp_path, messages.append) == paths[2] and messages == []
    flip_last_byte(paths[2] / "model-rank0.safetensors")
    (paths[1] / "model-rank1.safetensors").unlink()
    assert store.newest_valid(tmp_path, messages.append) == paths[0]
    assert len(messages) == 2
    assert "step_00000012/model-rank0" in messages[0] and "step_00000004" in messages[0]
    assert "step_00000008/model-rank1" in messages[1] and "missing" in messages[1]
    (paths[0] / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="all 3 checkpoints are damaged"):
        store.newest_valid(tmp_path, messages.append)


def test_damaged_ones_set_aside_still_count_as_existing(tmp_path: Path, save: Save) -> None:
    save(tmp_path, 4).rename(tmp_path / "step_00000004.damaged-1")
    with pytest.raises(CheckpointError, match="all checkpoints there were found damaged"):
        store.newest_valid(tmp_path, print)


MANY_THREADS = """
import sys, threading
from pathlib import Path
from megafp8.checkpoint.verify import _sha256
from megafp8.ops.memory import keep_freed_memory

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

file, count = Path(sys.argv[1]), 6
keep_freed_memory()  # as a run on a CPU does
together = threading.Barrier(count)

def read():
    together.wait()
    _sha256(file)
    together.wait()

threads = [threading.Thread(target=read) for _ in range(count)]
before = resident()
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel is not Linux")
def test_threads_that_verify_leave_no_memory_behind(tmp_path: Path) -> None:
    """The C library keeps what a thread has freed, for each thread, as long as the process lives.

    A buffer of 4 MiB in each of 6 threads would leave 24 MiB.
    """
    (tmp_path / "file").write_bytes(b"x" * 100)
    done = subprocess.run(
        [sys.executable, "-c", MANY_THREADS, str(tmp_path / "file")],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 8 * 1024, "KiB"
