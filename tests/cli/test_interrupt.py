"""Test how commands end that are interrupted, and that the runs which they train end with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megafp8.jobs import processes
from megafp8.jobs.job import Job
from tests.train.runs import ENVIRONMENT, ROOT, wait_until

INTERRUPTED = """\
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def interrupted(
    folder: Path, package: str, *command: str, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a command that gets Ctrl-C while it imports `package`; return exit code and stderr."""
    (folder / f"{package}.py").write_text(INTERRUPTED)
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("omegaconf", ["pretrain_gpt.py"]),
        ("omegaconf", ["finetune_gpt.py"]),
        ("torch", ["-m", "megafp8", "generate", "latest", "--prompt", "def"]),
        ("torch", ["-m", "megafp8", "export", "latest", "out"]),
    ],
)
def test_ctrl_c_during_imports(package: str, command: list[str], tmp_path: Path) -> None:
    assert interrupted(tmp_path, package, *command) == (130, "megafp8: interrupted\n")


def test_one_of_several_ranks_says_it(tmp_path: Path) -> None:
    code, errors = interrupted(tmp_path, "omegaconf", "pretrain_gpt.py", environment={"RANK": "1"})
    assert (code, errors) == (130, "")


def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    code, errors = interrupted(
        tmp_path, "unused", "-c", "import megafp8.cli; raise ValueError('a bug')"
    )
    assert code == 1 and "Traceback" in errors and errors.endswith("ValueError: a bug\n")


# ---- a command that trains runs in processes of their own

PARENT = """\
import pathlib, signal, sys, threading, time
from megafp8.jobs import processes
from megafp8.jobs.job import Job
processes.training_program = lambda: [sys.argv[1]]
def receive_it_here():  # as the kernel may choose a thread that is not the main one
    while not pathlib.Path("other").exists():
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=receive_it_here, daemon=True).start()
jobs = [Job(seed, (), pathlib.Path(sys.argv[2], str(seed))) for seed in (1, 2)]
codes, interrupted = processes.run_all(jobs, int(sys.argv[3]))
print(sorted(codes.values()), flush=True)
sys.exit(interrupted or 0)
"""
CHILD = """\
import os, pathlib, signal, sys, time
from megafp8.parallel.launch import follow_launcher, heard_signals
follow_launcher()
folder = pathlib.Path(sys.argv[-1].partition("=")[2].strip("'"))
received = []
for number in heard_signals():
    signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
folder.with_suffix(".pid").write_text(str(os.getpid()))
end = time.monotonic() + 60  # of a test that fails
while not received or pathlib.Path("never").exists():
    time.sleep(0.01)
    if time.monotonic() > end:
        sys.exit(0)
time.sleep(0.2)  # a second signal would come now
folder.with_suffix(".saved").write_text(" ".join(received))
sys.exit(75)
"""


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("at_once", [1, 2])
def test_at_an_error_the_runs_save_and_leave(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compare … | head` trained its run to the end, though no reader was left."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(processes, "training_program", lambda: [str(tmp_path / "child.py")])
    begun = [tmp_path / f"{num}.pid" for num in range(at_once)]

    def without_a_reader(lines: object) -> None:
        wait_until(lambda: all(file.exists() for file in begun), "the runs")
        raise BrokenPipeError

    monkeypatch.setattr(processes, "_show", without_a_reader)
    with pytest.raises(BrokenPipeError):
        processes.run_all([Job(num, (), tmp_path / str(num)) for num in range(3)], at_once)
    assert [(tmp_path / f"{num}.saved").exists() for num in range(3)] == [
        num < at_once for num in range(3)
    ]


@contextmanager
def comparing(
    folder: Path, at_once: int = 1, *, before: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Yield a process that trains two runs, which train nothing, and those runs that have begun."""
    (folder / "child.py").write_text(CHILD)
    (folder / "parent.py").write_text(PARENT)
    words = [sys.executable, "parent.py", "child.py", str(folder), str(at_once)]
    with open(folder / "out.txt", "wb") as output:
        process = subprocess.Popen(
            ["sh", "-c", f'{before} exec "$@"', "sh", *words],
            cwd=folder,
            env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        files = [folder / f"{seed}.pid" for seed in range(1, at_once + 1)]
        has_text = lambda: all(file.exists() and file.read_text() for file in files)  # noqa: E731
        wait_until(lambda: has_text() or process.poll() is not None, "the runs")
        runs = [int(file.read_text()) for file in files]
        yield process, runs
        wait_until(lambda: not any(map(is_alive, runs)), "no run is left")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_to_a_comparison_is_passed_on_once(
    name: str, at_once: int, tmp_path: Path
) -> None:
    """It ended by SIGTERM alone, and its run went on; Ctrl-C comes to the whole group."""
    with comparing(tmp_path, at_once) as (process, runs):
        assert [os.getsid(run) for run in runs] == runs, "Ctrl-C does not come to the runs"
        os.killpg(process.pid, signal.Signals[name])
        assert process.wait() == 75, (tmp_path / "out.txt").read_text()
        saved = [tmp_path / f"{seed}.saved" for seed in range(1, at_once + 1)]
        assert [file.read_text() for file in saved] == [name] * at_once
    assert "[75, 75]" in (tmp_path / "out.txt").read_text()
    assert not (tmp_path / "2.pid").exists() or at_once == 2, "no run begins after a signal"


def test_a_second_signal_ends_the_runs_of_a_comparison_at_once(tmp_path: Path) -> None:
    (tmp_path / "never").touch()
    with comparing(tmp_path) as (process, _):
        process.terminate()
        process.send_signal(
            signal.SIGINT
        )  # of another kind: it cannot fall together with the first
        assert process.wait() in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert not (tmp_path / "1.saved").exists()


def test_a_signal_that_another_thread_receives_reaches_the_runs(tmp_path: Path) -> None:
    """The main thread slept on: a signal wakes the thread that the kernel chose."""
    with comparing(tmp_path) as (process, _):
        (tmp_path / "other").touch()
        assert process.wait() == 75
        assert (tmp_path / "1.saved").read_text() == "SIGTERM"


def test_two_signals_while_a_run_starts_end_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come after the run's process is there and before it is known here."""
    start, sent = subprocess.Popen, []

    def slow(*args: object, **options: object) -> subprocess.Popen[bytes]:
        process = start(*args, **options)  # type: ignore[call-overload]
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        sent.append(process)
        return process  # type: ignore[no-any-return]

    monkeypatch.setattr(processes.subprocess, "Popen", slow)
    with processes._Signals() as signals:
        command = [sys.executable, "-c", "import signal, time; time.sleep(10_000)"]
        process = signals.start(command, quiet=True)
        assert process.wait() == -signal.SIGKILL
    assert sent == [process] and len(signals.received) == 2


def test_no_run_starts_after_one_that_a_signal_reached_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job(seed, (), tmp_path / str(seed)) for seed in (1, 2)]
    monkeypatch.setattr(processes, "_run", lambda job, *_, **__: 75 if job is jobs[0] else 0)
    assert processes.run_all(jobs, 1) == ({jobs[0]: 75, jobs[1]: 75}, 75)


def test_the_code_of_a_killed_run_is_that_of_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    monkeypatch.setattr(processes, "training_program", lambda: killed)
    job = Job(0, (), tmp_path / "run")
    assert processes.run_all([job], 1) == ({job: 128 + signal.SIGKILL}, None)


def test_a_killed_comparison_leaves_no_run(tmp_path: Path) -> None:
    with comparing(tmp_path, 2) as (process, _):
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "1.saved").exists()


def test_a_comparison_under_nohup_hears_no_hang_up(tmp_path: Path) -> None:
    with comparing(tmp_path, before="trap '' HUP;") as (process, (run,)):
        os.killpg(process.pid, signal.SIGHUP)
        os.kill(run, signal.SIGHUP)
        process.terminate()
        assert process.wait() == 75
    assert (tmp_path / "1.saved").read_text() == "SIGTERM"
