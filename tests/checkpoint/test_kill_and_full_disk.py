"""Test that a save which fails or is killed leaves all earlier checkpoints as they were."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import store
from megafp8.checkpoint.manifest import Placement
from megafp8.errors import CheckpointError

Save = Callable[[Path, int], Path]

# For n = 1, 2, … a process in a root of its own saves and prunes and, at its n-th system call that
# changes the disk, kills itself; until one lives to the end.
WRITER = """
import itertools, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import save_two_shards
from megafp8.checkpoint import store

write = os.write
left = 0
def deadly(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            if function is write:  # a torn write: some bytes reach the file
                function(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

for calls in itertools.count(1):
    root = Path(sys.argv[1], str(calls))
    save_two_shards(root, 1)
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    else:
        left = calls
        for name in ("write", "fsync", "rename", "mkdir", "unlink", "rmdir"):
            setattr(os, name, deadly(getattr(os, name)))
        for step in (2, 3):
            save_two_shards(root, step)
            store.prune(root, 1)
        os._exit(0)
"""


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_killed_at_any_point_a_whole_checkpoint_remains(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
    here = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    roots = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(roots) > 40
    newest_steps = []
    for root in roots:
        messages: list[str] = []
        newest = store.newest_valid(root, messages.append)
        assert newest is not None and messages == []  # what has a valid name is whole, always
        for step in store.steps(root):
            store.verify(root / f"step_{step:08d}")
        store.prune(root, 1)
        assert names(root) == [newest.name]
        newest_steps.append(store.steps(root)[0])
    assert newest_steps == sorted(newest_steps) and set(newest_steps) == {1, 2, 3}


def test_full_disk(tmp_path: Path) -> None:
    """The disk is really full: a tmpfs of 2 MB in a mount namespace of its own."""
    mount, here = tmp_path / "small", Path(__file__).parents[2]
    mount.mkdir()
    script = textwrap.dedent("""
        import sys, torch
        from pathlib import Path
        from megafp8.checkpoint import store
        from megafp8.checkpoint.manifest import Placement
        from megafp8.errors import CheckpointError
        root = Path(sys.argv[1])
        for step, elements in ((1, 100_000), (2, 1_000_000)):
            piece = Placement("x", (elements,), (0,), torch.ones(elements))
            try:
                staging = store.begin(root, step)
                shard = store.write_shard(staging, "a.safetensors", [piece])
                store.commit(staging, root, step, [shard], {})
            except CheckpointError as error:
                print(step, error)
        print(sorted(path.name for path in root.iterdir()))
        store.verify(root / "step_00000001")
    """)
    in_namespace = 'mount -t tmpfs -o size=2m tmpfs "$1" || exit 77; exec "$2" -c "$3" "$1"'
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("no unshare here to mount a small file system with")
    command = [unshare, "-m", "sh", "-c", in_namespace, "sh", mount, sys.executable, script]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("may not mount a small file system here")
    assert done.returncode == 0, done.stderr
    complaint, left = done.stdout.splitlines()
    assert complaint.startswith("2 ") and "ENOSPC" in complaint and "Free space" in complaint
    assert left == "['step_00000001']"


def test_file_size_limit(tmp_path: Path, save: Save) -> None:
    save(tmp_path, 1)
    staging = store.begin(tmp_path, 2)
    piece = Placement("x", (100_000,), (0,), torch.ones(100_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"a\.safetensors.*EFBIG.*ulimit"):
            store.write_shard(staging, "a.safetensors", [piece])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step_00000001"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("function", ["write", "fsync", "mkdir", "rename"])
def test_errors_of_the_system_have_a_hint(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch, function: str, number: int
) -> None:
    save(tmp_path, 1)

    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, fails)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2)
    monkeypatch.undo()
    said = str(caught.value)
    assert errno.errorcode[number] in said and str(tmp_path) in said
    assert "older checkpoints" in said or "move the run" in said
    assert names(tmp_path) == ["step_00000001"]
    store.verify(tmp_path / "step_00000001")


def test_one_rank_failing_leaves_the_other_ranks_files_to_discard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = store.begin(tmp_path, 1)
    store.write_shard(staging, "a.safetensors", [])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "bad")))
        with pytest.raises(CheckpointError):
            store.write_shard(staging, "b.safetensors", [])
    assert names(staging) == ["a.safetensors"]
    store.discard(staging)
    store.discard(staging)
    assert names(tmp_path) == []
    with pytest.raises(CheckpointError, match="other ranks"):
        store.write_shard(staging, "c.safetensors", [])
