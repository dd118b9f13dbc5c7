"""Test which directory a run works in, and that no two runs work in one."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fp8_numerics import caches
from megafp8 import files
from megafp8.errors import ConfigError, ExitCode, RunError
from megafp8.runs import directory
from megafp8.runs.directory import RunChoice, RunLock, choose_run, is_locked
from megafp8.runs.find import DIVERGED, FINISHED
from megafp8.specs import RunSpec
from tests.config.helpers import run_spec as settings_of
from tests.tiny import run_spec

HERE = Path(__file__).parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from megafp8.runs.directory import RunLock
lock = RunLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""
STARTER = """
import sys
from pathlib import Path
from megafp8.runs.directory import choose_run
print("ready", flush=True)
sys.stdin.readline()
choice = choose_run(Path(sys.argv[1]), None, "same", True, False)
print(choice.path.name, choice.continues, flush=True)
sys.stdin.readline()
"""


@contextmanager
def holder(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(run_dir)]
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def choose(exp_dir: Path, name: str | None = None, identity: str = "a", **more: bool) -> RunChoice:
    options = {"resume_if_exists": True, "is_sweep": False, **more}
    return choose_run(exp_dir, name, identity, **options)


def spec_of(exp_dir: Path, name: str | None) -> RunSpec:
    """Return a run that works in `exp_dir` and may continue."""
    spec = run_spec()
    observe = dataclasses.replace(
        spec.observe, exp_dir=str(exp_dir), name=name, resume_if_exists=True
    )
    return dataclasses.replace(spec, observe=observe)


def open_files(below: Path) -> list[str]:
    """Return the files that this process has open in a directory."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [name for name in map(os.readlink, links) if name.startswith(f"{below}/")]


def begin_and_end(exp_dir: Path, name: str | None = None, **more: bool) -> Path:
    choice = choose(exp_dir, name, **more)
    choice.lock.release()
    return choice.path


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with holder(tmp_path) as process:
        assert is_locked(tmp_path)
        with pytest.raises(RunError, match=f"in use by process {process.pid} on "):
            RunLock.acquire(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not is_locked(tmp_path)
        with RunLock.acquire(tmp_path) as lock:
            assert is_locked(tmp_path)
            with pytest.raises(RunError, match=f"process {os.getpid()} on "):
                RunLock.acquire(tmp_path)
    lock.release()
    assert not is_locked(tmp_path)


def test_a_forked_helper_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = """
import os, sys, time
from pathlib import Path
from megafp8.runs.directory import RunLock
lock = RunLock.acquire(Path(sys.argv[1]))
if os.fork() == 0:
    print("alive", flush=True)
    time.sleep(60)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    pipe = subprocess.PIPE
    parent = subprocess.Popen(
        command, cwd=HERE, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    )
    try:
        assert parent.stdout is not None and parent.stdin is not None
        assert parent.stdout.readline() == "alive\n"
        assert is_locked(tmp_path)
        parent.stdin.write("\n")
        parent.stdin.close()
        assert parent.wait() == -signal.SIGKILL
        assert not is_locked(tmp_path)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)  # the child that we left behind
        parent.stdout.close() if parent.stdout else None


def test_a_released_lock_leaves_nothing_in_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hook: hooks.append(hook))
    locks = []
    for number in range(3):
        choice = choose(tmp_path, f"run {number}")
        assert choice.lock is not None and len(open_files(tmp_path)) == 1
        locks.append(weakref.ref(choice.lock))
        choice.release()
        assert not open_files(tmp_path)
    del choice
    gc.collect()
    assert not hooks, "a hook stays until the process ends"
    assert [lock() for lock in locks] == [None, None, None]


def test_named(tmp_path: Path) -> None:
    first = choose(tmp_path, "mine")
    assert first.path == tmp_path / "mine" and not first.continues
    with pytest.raises(RunError, match="in use"):
        choose(tmp_path, "mine")
    first.lock.release()
    again = choose(tmp_path, "mine")
    assert again.continues and "mine" in again.reason
    directory.mark(again.path, FINISHED)
    again.lock.release()
    other = choose(tmp_path, "mine", "other settings")  # finished: still that one
    assert other.continues
    other.lock.release()
    with pytest.raises(RunError, match="resume_if_exists=true"):
        choose(tmp_path, "mine", resume_if_exists=False)
    assert not is_locked(other.path)


def test_a_refused_run_leaves_what_was_there(tmp_path: Path) -> None:
    """A shell may write to a file of the run's own names, as in `… > console.log`."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "console.log").write_text("the error message")
    choice = choose(tmp_path, "mine")
    (tmp_path / "mine" / "events.jsonl").write_text("")
    assert not choice.continues and directory.withdraw(choice)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["console.log"]
    again = choose(tmp_path, "new")
    (again.path / "tokenizer").mkdir()
    (again.path / "tokenizer" / "tokenizer.json").write_text("{}")
    assert directory.withdraw(again) and not (tmp_path / "new").exists()


def test_named_without_a_record(tmp_path: Path) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "copied" / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "configured").mkdir()
    (tmp_path / "configured" / "config.yaml").write_text("")
    assert not choose(tmp_path, "empty").continues
    assert choose(tmp_path, "copied").continues
    assert choose(tmp_path, "configured").continues
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"identity"')
    with pytest.raises(RunError, match=r"torn/run\.json: it is not JSON"):
        choose(tmp_path, "torn")
    assert not is_locked(tmp_path / "torn")


@pytest.mark.parametrize("end", [FINISHED, DIVERGED])
def test_unnamed_continues_the_newest_unfinished_of_the_same_settings(
    tmp_path: Path, end: str
) -> None:
    exp_dir = tmp_path / "made" / "here"
    old, new = begin_and_end(exp_dir, "old"), begin_and_end(exp_dir, "new")
    begin = choose(exp_dir)
    assert begin.path == new and begin.continues and "newest unfinished" in begin.reason
    directory.mark(new, end)
    begin.lock.release()
    assert begin_and_end(exp_dir) == old
    directory.mark(old, "stopped by signal")
    assert begin_and_end(exp_dir) == old
    fresh = choose(exp_dir, identity="b")
    assert not fresh.continues and fresh.path not in (old, new)
    assert not choose(exp_dir, resume_if_exists=False).continues


def test_a_run_whose_record_lacks_its_time_is_the_last_to_be_continued(tmp_path: Path) -> None:
    old, new = begin_and_end(tmp_path, "old"), begin_and_end(tmp_path, "new")
    record = json.loads((old / "run.json").read_text())
    del record["created"]
    (old / "run.json").write_text(json.dumps(record))
    assert choose(tmp_path).path == new


def test_unnamed_skips_the_living_and_the_damaged_and_says_so(tmp_path: Path) -> None:
    alive = choose(tmp_path)
    torn = begin_and_end(tmp_path, "torn")
    (torn / "run.json").write_text("")
    fresh = choose(tmp_path)
    assert not fresh.continues and fresh.path not in (alive.path, torn)
    assert f"{alive.path.name} is in use" in fresh.reason and "torn has a damaged" in fresh.reason


def test_one_that_finished_between_look_and_lock_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, acquire = begin_and_end(tmp_path), RunLock.acquire

    def finishes_first(run_dir: Path) -> RunLock:
        directory.mark(path, FINISHED)
        return acquire(run_dir)

    monkeypatch.setattr(RunLock, "acquire", finishes_first)
    choice = choose(tmp_path)
    assert not choice.continues and choice.path != path
    assert not is_locked(path)


def test_sweep_jobs_and_other_runs_never_meet(tmp_path: Path) -> None:
    plain = begin_and_end(tmp_path)
    job = begin_and_end(tmp_path, is_sweep=True)
    assert job != plain
    assert begin_and_end(tmp_path) == plain
    assert begin_and_end(tmp_path, is_sweep=True) == job
    assert json.loads((job / "run.json").read_text())["sweep"] is True


def test_many_in_the_same_second_are_all_different(tmp_path: Path) -> None:
    chosen = [choose(tmp_path) for _ in range(10)]
    assert len({choice.path for choice in chosen}) == 10
    assert all(is_locked(choice.path) for choice in chosen)


def test_processes_that_start_at_once_never_share(tmp_path: Path) -> None:
    unfinished = choose(tmp_path, identity="same")
    unfinished.lock.release()
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", STARTER, str(tmp_path)]
    processes = [
        subprocess.Popen(command, cwd=HERE, stdin=pipe, stdout=pipe, text=True) for _ in range(4)
    ]
    try:
        assert all(p.stdout and p.stdout.readline() == "ready\n" for p in processes)
        for p in processes:
            assert p.stdin
            p.stdin.write("\n")
            p.stdin.flush()
        answers = [p.stdout.readline().split() for p in processes if p.stdout]
    finally:
        for p in processes:
            p.kill()
            p.communicate()
    assert len({name for name, _ in answers}) == 4
    assert [name for name, continues in answers if continues == "True"] == [unfinished.path.name]


@pytest.mark.parametrize(
    "name",
    ["", " ", ".", "..", "a/b", "/a", "../a", ".hidden", "a\0b", "a\nb", "x" * 201, "é" * 101],
)
def test_bad_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match=r"exp_manager\.name"):
        choose(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_good_names(tmp_path: Path) -> None:
    for name in ("gpt 125m", "größe=1,lr=1e-3", "x" * 200, "a..b"):
        assert choose(tmp_path, name).path.parent == tmp_path


def test_an_unusable_place_is_an_error_with_a_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in (None, "mine"):
        with pytest.raises(RunError, match=r"file.*: making .* failed with E.*choose another"):
            choose(tmp_path / "file", name)


CALLS = {
    "directory": ("mkdir", "making the "),
    "listing": ("listdir", "entering the run's directory"),
    "lock file": ("open", "opening the lock"),
    "emptied lock": ("ftruncate", "writing the lock"),
    "lock": ("pwrite", "writing the lock"),
}
"""The function of `os` that fails at each point, and the words of the error."""


def fail_at(monkeypatch: pytest.MonkeyPatch, where: str, number: int) -> str:
    """Let the disk fail at one of `CALLS`, or when the file of that name is put in its place.

    Return the words for it.
    """

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    def put(draft: Path, path: Path) -> Any:
        return fails() if path.name == where else real_put(draft, path)

    real_put = files.put
    if where in CALLS:
        name, words = CALLS[where]
        monkeypatch.setattr(os, name, fails)
        return words
    monkeypatch.setattr(files, "put", put)
    return "writing the settings" if where == "config.yaml" else "writing the file"


DISK_ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO]


@pytest.mark.parametrize("number", DISK_ERRORS, ids=[errno.errorcode[n] for n in DISK_ERRORS])
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((None, w) for w in ("directory", "lock file", "lock", "run.json", "config.yaml")),
        *(("mine", w) for w in ("directory", "listing", "lock file", "emptied lock")),
        *(("mine", w) for w in ("run.json", "config.yaml")),
    ],
)
def test_a_disk_that_fails_when_a_directory_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, where: str, number: int
) -> None:
    """Every failure is a user's error with folder, reason and hint, and leaves no new run."""
    exp_dir = tmp_path / "runs"
    with monkeypatch.context() as patch:
        doing = fail_at(patch, where, number)
        with pytest.raises(RunError) as raised:
            directory.enter(spec_of(exp_dir, name), is_sweep=False)
    said = str(raised.value)
    assert said.startswith(str(exp_dir)) and doing in said, said
    assert f"failed with {errno.errorcode[number]} ({os.strerror(number)}). " in said
    hint = said.rpartition("). ")[2]
    assert "move the run" in hint, said
    assert raised.value.exit_code == ExitCode.USER_ERROR
    assert not open_files(tmp_path), "a lock stays open"
    left = [path for path in exp_dir.rglob("*") if path.is_file() and path.name != ".lock"]
    assert not left and (name is not None or not list(exp_dir.glob("*")))
    choice = directory.enter(spec_of(exp_dir, name), is_sweep=False)  # the disk works again
    assert not choice.continues and is_locked(choice.path)
    choice.release()


@pytest.mark.parametrize("name", [None, "mine"])
@pytest.mark.parametrize("where", ["lock", "config.yaml"])
def test_a_disk_that_fails_when_a_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, where: str
) -> None:
    """A full disk begins no other run in place of the one that would continue."""
    spec = spec_of(tmp_path, name)
    first = directory.enter(spec, is_sweep=False)
    first.release()
    before = sorted(path.name for path in first.path.iterdir())
    with monkeypatch.context() as patch:
        fail_at(patch, where, errno.ENOSPC)
        with pytest.raises(RunError, match=rf"{first.path}/.*failed with ENOSPC"):
            directory.enter(spec, is_sweep=False)
    assert list(tmp_path.iterdir()) == [first.path] and not open_files(tmp_path)
    assert sorted(path.name for path in first.path.iterdir()) == before
    again = directory.enter(spec, is_sweep=False)
    assert again.continues and again.path == first.path
    again.release()


def test_a_run_that_continues_says_which_settings_have_changed(tmp_path: Path) -> None:
    """The values are compared with those of last time; where a run is kept does not count."""
    place = [f"exp_manager.exp_dir={tmp_path}", "exp_manager.name=a"]
    longer = [*place, "trainer.max_steps=7", "model.micro_batch_size=2"]
    expected = "; changed since: trainer.max_steps 900 to 7, model.micro_batch_size 4 to 2"
    moved = [f"exp_manager.explicit_log_dir={tmp_path / 'a'}", *longer[2:]]
    for overrides, said in ((place, None), (longer, expected), (longer, ""), (moved, "")):
        choice = directory.enter(settings_of(*overrides), is_sweep=False)
        choice.release()
        assert choice.reason == ("new run a" if said is None else f"continues run a{said}")


def test_a_sweep_over_another_ones_jobs_is_told_what_chooses_the_directory(tmp_path: Path) -> None:
    def job(*overrides: str) -> RunSpec:
        log_dir = f"exp_manager.explicit_log_dir={tmp_path / 'sweep' / '0'}"
        return settings_of(log_dir, "exp_manager.resume_if_exists=True", *overrides)

    directory.enter(job(), is_sweep=True).release()
    with pytest.raises(ConfigError, match=r"or another hydra\.sweep\.dir for a new run"):
        directory.enter(job("model.seed=7"), is_sweep=True)


def test_another_users_run_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, acquire = begin_and_end(tmp_path), os.open

    def refused(path: Any, *args: Any, **kwargs: Any) -> int:
        if Path(path) == old / directory.LOCK_NAME:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return acquire(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refused)
    fresh = choose(tmp_path)
    assert not fresh.continues and f"{old.name} is another user's" in fresh.reason
    fresh.release()


def test_the_lock_follows_no_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("weights")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(precious)
    with pytest.raises(RunError, match=r"\.lock: opening the lock .*remove the link"):
        RunLock.acquire(tmp_path / "run")
    assert not is_locked(tmp_path / "run") and precious.read_text() == "weights"
    with pytest.raises(OSError), caches.locked(tmp_path / "run" / ".lock"):
        pass
