"""What a process cannot read, and what a newer version wrote, is no damage: nothing is renamed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from megafp8.checkpoint import reader, store, verify
from megafp8.checkpoint.best import Best
from megafp8.checkpoint.manifest import Placement
from megafp8.errors import CheckpointError, RunError, UnreadableError
from megafp8.files import why_unreadable
from megafp8.parallel.mesh import single_rank
from megafp8.runs import directory
from megafp8.runs.directory import choose_run, recorded_settings
from megafp8.train.load import newest_after_cleanup
from tests.checkpoint.test_damage import rewrite_manifest

ROOT = Path(__file__).parents[2]
Save = Callable[[Path, int], Path]
LOOK = """
import os, resource, sys
from pathlib import Path
from megafp8.errors import UserError
from megafp8.parallel.mesh import single_rank
from megafp8.train.load import newest_after_cleanup
root, user = sys.argv[1], int(sys.argv[2])
mesh = single_rank("cpu")
if user:
    os.setuid(user)
for limit in sys.argv[3:]:
    if os.fork():
        os.wait()
        continue
    if int(limit):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
    try:
        print(newest_after_cleanup(Path(root), mesh, print), flush=True)
    except UserError as error:
        print("refused:", error, flush=True)
    os._exit(0)  # at once, without taking down torch
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a folder that every user of this machine may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def look(root: Path, *limits: int, user: int = 0) -> list[str]:
    """Return what a starting run says that looks for its newest checkpoint, a line each.

    `limits` are numbers of files that a process may have open; 0 leaves the limit as it is.
    """
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(root), str(user), *map(str, limits)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


def test_a_file_without_permission_stops_the_run(shared: Path, save: Save) -> None:
    save(shared, 2)
    newest, name = save(shared, 4), "model-rank1.safetensors"
    (newest / name).chmod(0)
    (said,) = look(shared, 0, user=65534 if os.getuid() == 0 else 0)
    assert f"refused: {newest / name}: cannot be read now: EACCES (Permission denied)" in said
    assert "chmod" in said and "was left as it is" in said
    assert sorted(path.name for path in shared.iterdir()) == ["step_00000002", "step_00000004"]


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENFILE])
def test_a_manifest_that_cannot_be_read_now_stops_the_run(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    real = os.open

    def fails(path: Path, *flags: int, **options: int) -> int:
        if Path(path) == newest / name:
            raise OSError(number, os.strerror(number))
        return real(path, *flags, **options)

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(UnreadableError) as raised:
        newest_after_cleanup(tmp_path, single_rank("cpu"), print)
    said = str(raised.value)
    assert f"{newest / name}: cannot be read now: {errno.errorcode[number]}" in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000004"]


def test_a_process_with_too_few_files_never_takes_an_older_one(shared: Path, save: Save) -> None:
    """The limit is met at the manifest, at the hash, and where safetensors opens a file."""
    save(shared, 2)
    newest = save(shared, 4)
    said = look(shared, *range(3, 10))
    assert sum("refused:" in each and "EMFILE" in each for each in said) >= 2, said
    assert all("refused:" in each or each == str(newest) for each in said), said
    assert any("ulimit -n" in each for each in said) and said[-1] == str(newest)
    assert sorted(path.name for path in shared.iterdir()) == ["step_00000002", "step_00000004"]


def test_a_newer_format_stops_the_run(tmp_path: Path, save: Save) -> None:
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    rewrite_manifest(newest, lambda tree: tree.update(format_version=2))
    with pytest.raises(UnreadableError, match="Use the version of megafp8 that wrote it"):
        newest_after_cleanup(tmp_path, single_rank("cpu"), print)
    with pytest.raises(UnreadableError):
        store.prune(tmp_path, 1)
    staging = store.begin(tmp_path, 4)
    with pytest.raises(UnreadableError):  # it would replace the checkpoint of the same step
        store.commit(staging, tmp_path, 4, [], {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000004"]
    rewrite_manifest(newest, lambda tree: tree.update(format_version="x"))
    assert newest_after_cleanup(tmp_path, single_rank("cpu"), print) == tmp_path / "step_00000002"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("unable to open file </x> in read-only mode: Too many open files (24)"),
        RuntimeError("unable to mmap 12 bytes from file </x>: Cannot allocate memory (12)"),
        SafetensorError("Error while reading: Too many open files (os error 24)"),
        OSError(errno.ESTALE, "Stale file handle"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_kind_of_error_of_the_system(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """These are the texts of safetensors 0.6 and torch 2.13."""
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    loaded = reader.Reader(newest)

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(verify, "safe_open", fails)
    monkeypatch.setattr(reader, "safe_open", fails)
    with pytest.raises(UnreadableError, match="cannot be read now: E"):
        store.newest_valid(tmp_path, print)
    with pytest.raises(UnreadableError, match="cannot be read now: E"):
        loaded.read("step")


def test_errors_that_are_damage_or_bugs(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = reader.Reader(save(tmp_path, 4))
    for error, kind in (
        (SafetensorError("Error while deserializing header: invalid (12)"), CheckpointError),
        (RuntimeError("The size of tensor a (12) must match"), RuntimeError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
    ):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(reader, "safe_open", fails)
        with pytest.raises(kind) as raised:
            loaded.read("step")
        assert type(raised.value) is kind
    monkeypatch.undo()
    with monkeypatch.context() as patch:  # safetensors says so if no more file can be opened
        patch.setattr(reader, "safe_open", lambda *_, **__: open(tmp_path / "nothing"))
        with pytest.raises(UnreadableError, match="EMFILE"):
            loaded.read("step")
    for path in loaded.path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        loaded.read("step")
    assert why_unreadable(tmp_path, FileNotFoundError(errno.ENOENT, "no")) is None


def test_one_that_cannot_be_read_may_be_the_best(tmp_path: Path, save: Save) -> None:
    paths = [save(tmp_path, step) for step in (1, 2)]
    rewrite_manifest(paths[0], lambda tree: tree.update(format_version=2))
    assert Best(1).of(paths) == {paths[0]}


def test_settings_of_an_older_checkpoint_do_not_take_its_place(tmp_path: Path, save: Save) -> None:
    save(tmp_path / "checkpoints", 2)
    newest = save(tmp_path / "checkpoints", 4)
    rewrite_manifest(newest, lambda tree: tree.update(format_version=2))
    with pytest.raises(UnreadableError):
        recorded_settings(tmp_path)


def test_a_record_that_cannot_be_read_does_not_begin_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_run(tmp_path, None, "a", True, False).release()
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "run.json").read_text())["status"] == "running"
    real = os.open

    def fails(path: Path, *flags: int) -> int:
        if Path(path).name == directory.RECORD_NAME:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *flags)

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(RunError, match="Too many open files"):
        choose_run(tmp_path, None, "a", True, False)
    assert list(tmp_path.iterdir()) == [run]


def test_moments_by_groups_are_refused_by_the_version_that_reads_them(
    tmp_path: Path, place_whole: Callable[[str, torch.Tensor], Placement]
) -> None:
    """megafp8 0.1.0 wrote two numbers for each group of a row beside a moment's elements."""
    name = "optimizer/exp_avg_sq/wte"
    moment = torch.ones(4, 256).to(torch.float8_e4m3fn)
    for step, ranges in ((1, torch.ones(())), (2, torch.ones(4, 2, 2))):
        placements = [place_whole(name, moment), place_whole(reader.SCALES + name, ranges)]
        staging = store.begin(tmp_path, step)
        shard = store.write_shard(staging, "model-rank0.safetensors", placements)
        store.commit(staging, tmp_path, step, [shard], {})
    assert torch.equal(reader.Reader(tmp_path / "step_00000001").read_values(name), moment.float())
    with pytest.raises(UnreadableError, match=r"by groups .* megafp8 0\.1\.0"):
        reader.Reader(tmp_path / "step_00000002")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]
