"""Ranks that die are started again as often as `trainer.max_restarts` says, and no other code is.
After a signal ranks have time to save as long as they make progress.

The ranks run a few lines of Python and train nothing; tests/train/test_restarts.py has real runs.
One test starts real processes. In the others the launcher and its ranks are forks of a process that
has imported torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megafp8.checkpoint import shardfile, verify
from megafp8.checkpoint.manifest import Placement
from megafp8.checkpoint.step_directories import steps
from megafp8.errors import RunError
from megafp8.parallel.launch import launch
from megafp8.parallel.mesh import single_rank
from megafp8.parallel.watchdog import Limit, Watchdog
from megafp8.train import saver, validate
from tests.train.runs import ROOT, Driver, wait_until

RANK = """\
import os, pathlib, signal, sys
starts = pathlib.Path(sys.argv[1], os.environ["RANK"])
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
with starts.open("a") as file:
    file.write(restart + os.environ["WORLD_SIZE"] + " ")
if int(restart) < int(sys.argv[2]) and os.environ["RANK"] == "0":
    if sys.argv[3] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(sys.argv[3]))
"""
JOB = "import sys; from megafp8.parallel.launch import launch; sys.exit(launch([sys.argv[1]], \
sys.argv[3:], 2, max_restarts=int(sys.argv[2])))"


def starts(
    driver: Driver | None, folder: Path, max_restarts: int, deaths: int, how: str
) -> tuple[int, str, list[str]]:
    """Run a job of two ranks whose rank 0 ends early in the first `deaths` starts.

    Without a driver the processes are real ones. Return the exit code, stderr, and the starts that
    each rank has noted: restart, world size.
    """
    script = folder / "rank.py"
    script.write_text(RANK)
    words = ["-c", JOB, str(script), str(max_restarts), str(folder), str(deaths), how]
    if driver is None:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    else:
        done = driver.run_python(*words, cwd=ROOT, folder=folder)
    return done.returncode, done.stderr, (folder / "0").read_text().split()


def test_a_rank_that_dies_is_started_again(tmp_path: Path) -> None:
    code, errors, noted = starts(None, tmp_path, 2, 1, "killed")
    assert code == 0 and noted == ["02", "12"]
    assert "rank 0 died (signal SIGKILL)" in errors
    assert "starting all ranks again: restart 1 of 2" in errors


NOTING = """\
import os, pathlib, signal, sys, time
from megafp8.parallel.launch import note_checkpoint, note_death
if os.environ["RANK"] != "0":
    time.sleep(3600)
if sys.argv[1] != "none":
    note_checkpoint(pathlib.Path("runs/old"))
    note_checkpoint(pathlib.Path(sys.argv[1]))
if sys.argv[2] == "emptied":
    import shutil
    shutil.rmtree(os.environ["MEGAFP8_NOTES"], ignore_errors=True)
if sys.argv[2] == "error":
    note_death(ValueError("the cause"))
    sys.exit(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("checkpoint", "how", "said"),
    [
        ("none", "killed", "This run had no checkpoint: the same command begins it again"),
        ("runs/a/step_7", "killed", "The same command continues from runs/a/step_7"),
        ("runs/a/step_7", "error", "The same command continues from runs/a/step_7"),
        ("runs/a/step_7", "emptied", "The same command continues from the newest checkpoint, if "),
    ],
)
def test_what_the_same_command_will_do(
    driver: Driver, checkpoint: str, how: str, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(NOTING)
    words = ["-c", JOB, str(script), "0", checkpoint, how]
    done = driver.run_python(*words, cwd=ROOT, folder=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and f"; the other ranks were ended. {said}" in last, last
    assert ("ValueError: the cause" in last) == (how == "error")


EARLY = """\
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
pathlib.Path(sys.argv[1], os.environ["RANK"] + ".ready").touch()
time.sleep(3600)
"""


def test_ranks_that_leave_before_training_have_not_died(driver: Driver, tmp_path: Path) -> None:
    """A rank that Ctrl-C reaches during its imports ends with 130."""
    script = tmp_path / "rank.py"
    script.write_text(EARLY)
    words = ["-c", JOB, str(script), "0", str(tmp_path)]
    job = driver.start_python(*words, cwd=ROOT, folder=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == 2 or job.has_ended(), "ranks")
    os.kill(job.pid, signal.SIGINT)
    done = job.wait()
    said = "megafp8: SIGINT: left before training began\n"
    assert (done.returncode, done.stderr) == (130, said)


def test_not_more_often_than_asked(driver: Driver, tmp_path: Path) -> None:
    code, said, noted = starts(driver, tmp_path, 1, 9, "killed")
    assert code not in (0, 2) and noted == ["02", "12"]
    host = socket.gethostname()
    ends = [f"  start {n}: rank 0 died (signal SIGKILL) on {host}" for n in (1, 2)]
    assert "\n".join(ends) in said and "trainer.max_restarts=1 allows no other start" in said
    assert f"On {host} the starts ended so" in said and "use another one" in said


@pytest.mark.parametrize("code", [2, 3])
def test_an_error_to_correct_is_not_tried_again(driver: Driver, code: int, tmp_path: Path) -> None:
    found, _, noted = starts(driver, tmp_path, 2, 9, str(code))
    assert found == code and noted == ["02"]


SAVING = """\
import os, pathlib, signal, sys, time
import torch
from megafp8.checkpoint import store
from megafp8.checkpoint.manifest import Placement

folder, rank, how, pause = pathlib.Path(sys.argv[1]), int(os.environ["RANK"]), sys.argv[2], 2.0
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
(folder / f"{rank}.ready").touch()
while not told:
    time.sleep(0.01)

def seconds_pass(seconds):
    "Move the launcher's clock on, and wait until it has seen the time and any progress before."
    (folder / "new").write_text(str(float((folder / "clock").read_text()) + seconds))
    (folder / "new").rename(folder / "clock")
    looked = (folder / "looked").stat().st_size
    while (folder / "looked").stat().st_size < looked + 4:
        time.sleep(0.01)

def hang():
    while not (folder / "checkpoints0/step_00000001").exists():
        time.sleep(0.01)
    for _ in range(10):
        seconds_pass(pause)
    time.sleep(3600)

if rank == 1 and how:
    write = os.write
    before = {"slow": lambda: seconds_pass(pause), "hang": hang}[how]
    os.write = lambda *given: (before(), write(*given))[1]
tensors = [Placement(f"weight{n}", (8,), (0,), torch.ones(8)) for n in range(6)]
root = folder / f"checkpoints{rank}"
staging = store.begin(root, 1)
store.commit(staging, root, 1, [store.write_shard(staging, "a.safetensors", tensors)], {})
sys.exit(75)
"""
CLOCK = """\
import pathlib, sys, time
from types import SimpleNamespace
from megafp8.parallel import launch
def now(folder=pathlib.Path(sys.argv[3])):
    with (folder / "looked").open("a") as file:
        file.write(".")
    return float((folder / "clock").read_text())
launch.time = SimpleNamespace(monotonic=now, sleep=time.sleep)
"""
PATIENCE = 12.0


def told_to_leave(
    driver: Driver, folder: Path, how: str = "", *, is_cleaned: bool = False
) -> tuple[int, str, list[list[int]]]:
    """Tell a job of two ranks to leave; before each write of rank 1, two seconds of the launcher's
    clock pass if it is `slow`, or ten times two if it is to `hang`.

    With `is_cleaned` the launcher's temporary folder is deleted before. Return the exit code,
    stderr, and the steps that each rank has saved.
    """
    script = folder / "rank.py"
    script.write_text(SAVING)
    (folder / "clock").write_text("0")
    words = ["-c", CLOCK + JOB, str(script), "0", str(folder), how]
    environment = {"MEGAFP8_SHUTDOWN_SECONDS": str(PATIENCE), "TMPDIR": str(folder)}
    job = driver.start_python(*words, cwd=ROOT, folder=folder, env=environment)
    wait_until(lambda: len(list(folder.glob("*.ready"))) == 2 or job.has_ended(), "ranks")
    if is_cleaned:
        (temporary,) = folder.glob("megafp8-*")
        shutil.rmtree(temporary)
    os.kill(job.pid, signal.SIGTERM)
    done = job.wait()
    saved = [steps(folder / f"checkpoints{rank}") for rank in (0, 1)]
    return done.returncode, done.stderr, saved


def test_a_rank_that_saves_is_waited_for(driver: Driver, tmp_path: Path) -> None:
    """The 7 writes of rank 1 take longer than a rank may show no progress; each one is shorter."""
    code, errors, saved = told_to_leave(driver, tmp_path, "slow")
    assert (code, saved) == (75, [[1], [1]]), errors
    assert float((tmp_path / "clock").read_text()) >= 7 * 2 > PATIENCE
    assert "SIGTERM: all ranks have left" in errors


def test_ranks_save_though_the_folder_of_temporary_files_was_emptied(
    driver: Driver, tmp_path: Path
) -> None:
    code, errors, saved = told_to_leave(driver, tmp_path, is_cleaned=True)
    assert (code, saved) == (75, [[1], [1]]), errors


def test_a_rank_that_hangs_while_it_saves_is_killed(driver: Driver, tmp_path: Path) -> None:
    code, errors, saved = told_to_leave(driver, tmp_path, "hang")
    assert (code, saved) == (1, [[1], []]), errors
    assert "rank 1 has not left after the signal, and no rank has made progress for 12 s" in errors
    # Whether rank 0's last progress was seen at 0 s or at 2 s is left open.
    assert PATIENCE < float((tmp_path / "clock").read_text()) <= PATIENCE + 4


@pytest.mark.parametrize("wrong", ["soon", "-1", "nan", ""])
def test_a_wrong_time_for_saving_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFP8_SHUTDOWN_SECONDS", wrong)
    with pytest.raises(RunError, match=f"MEGAFP8_SHUTDOWN_SECONDS={wrong}: is not a number"):
        launch(["rank.py"], [], 2)


def test_what_counts_as_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are written, flushed or hashed, checked tensors, steps and validated batches."""
    shown: list[str] = []
    monkeypatch.setenv("MEGAFP8_PROGRESS", "the launcher's file")
    monkeypatch.setattr(os, "utime", shown.append)

    def num_shown() -> int:
        count = len(shown)
        shown.clear()
        return count

    monkeypatch.setattr(shardfile, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(shardfile, "_FLUSH_BYTES", 250)
    monkeypatch.setattr(verify, "_CHUNK_BYTES", 100)
    path = tmp_path / "a.safetensors"
    size, sha256 = shardfile.write_safetensors(path, {"a": torch.arange(1000).to(torch.uint8)})
    header = size - 1000
    after_header, flushes = 0, 0
    for written in (header, *range(header + 100, size + 1, 100)):
        if written - after_header >= 250:
            after_header, flushes = written, flushes + 1
    assert flushes >= 3 and num_shown() == 11 + flushes + 1
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest() == verify._sha256(path)
    assert num_shown() == -(-size // 100)
    Watchdog(single_rank(), Limit(None)).beat("step 1")
    assert num_shown() == 1
    whole = [Placement(f"model/{name}", (2,), (0,), torch.ones(2)) for name in "abc"]
    assert saver._first_nonfinite(whole) is None and num_shown() == 3
    run = SimpleNamespace(console=SimpleNamespace(validating=lambda done, total: None))
    assert list(validate._shown(run, [1, 2], 2)) == [1, 2] and num_shown() == 2  # type: ignore
