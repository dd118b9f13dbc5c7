"""Start a job's ranks on this machine and watch them, or join those that torchrun has started.

Torch's elastic launcher ends the other ranks as soon as one of them leaves, and so cuts short
those that still save; it also tells no exit code after a signal and leaves orphans if it is
killed. Ours lives as long as its ranks, and no rank outlives it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megafp8.errors import ExitCode

OUR_CODES = {int(code) for code in ExitCode} - {int(ExitCode.CRASHED)}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
POLL_SECONDS = 0.05
RESTARTED = (int(ExitCode.CRASHED), int(ExitCode.HUNG))
"""What another start may mend; a setting or a loss that is not finite it will not."""
SHUTDOWN_SECONDS = 120.0  # for a rank to finish its step and save after a signal
GRACE_SECONDS = 5.0  # for ranks that learn of another one's error to say theirs
LAUNCHER = "MEGAFP8LAUNCHER_PID"
_NOTES = "MEGAFP8_NOTES"
_PR_SET_PDEATHSIG = 1  # prctl.h


def is_rank() -> bool:
    """Whether a launcher (ours or torchrun) has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def has_launcher() -> bool:
    """Whether this process is a rank of our own launcher."""
    return is_rank() and LAUNCHER in os.environ


def prepare_allocator(environment: MutableMapping[str, str]) -> None:
    """Let CUDA's allocator grow its segments, so that memory freed in one size serves another.

    torch reads this once, before CUDA starts. What the user has chosen stays.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def follow_launcher() -> None:
    """A rank of ours dies with its launcher, however that dies (Linux); others are left alone."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not is_rank() or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before we asked
        os._exit(int(ExitCode.CRASHED))


def run_process(main: Callable[[], int]) -> NoReturn:
    """Call `main` and end this process with the exit code that it returns.

    A rank whose `main` raises prints the traceback and leaves without destructors too: those of
    process groups can wait for ranks that will never answer.
    """
    try:
        code = main()
    except Exception:
        if not is_rank():
            raise
        traceback.print_exc()
        code = int(ExitCode.CRASHED)
    leave_process(code)


def leave_process(code: int) -> NoReturn:
    """End this process. A rank leaves without destructors: gloo's threads at times abort in them,
    and the job would count as crashed.
    """
    if is_rank():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def launch(script: str, argv: Sequence[str], num_ranks: int, *, max_restarts: int = 0) -> int:
    """Run `script argv…` as `num_ranks` ranks here; returns the job's exit code.

    A signal that asks to save and leave is passed on to every rank; a second one ends all at once.
    Ranks that die or hang are all started again, up to `max_restarts` times; they find their way
    back to the run by themselves.
    """
    signals: list[signal.Signals] = []

    def receive(number: int, frame: FrameType | None) -> None:
        signals.append(signal.Signals(number))

    previous = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        for restart in range(max_restarts + 1):
            counts = {
                "TORCHELASTIC_RESTART_COUNT": str(restart),  # torch's names for them
                "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            }
            code = _run([sys.executable, "-u", script, *argv], num_ranks, counts, signals)
            if signals or code not in RESTARTED or restart == max_restarts:
                return code
            _tell(f"starting all ranks again: restart {restart + 1} of {max_restarts}")
        raise AssertionError("unreachable")
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run(
    command: Sequence[str],
    num_ranks: int,
    counts: Mapping[str, str],
    signals: Sequence[signal.Signals],
) -> int:
    """One life of the job; nothing of it is left when this returns its exit code."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in its stubs

    # The ranks meet here: a port that is taken already when they are told of it. Each life has a
    # store of its own, without the addresses of ranks that are dead.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    notes = Path(tempfile.mkdtemp(prefix="megafp8-"))  # what ranks died of
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            own = _environment(rank, num_ranks, store.port, notes)
            # A session of its own: Ctrl-C reaches the launcher alone, which passes it on once.
            ranks.append(
                subprocess.Popen(
                    command, env={**os.environ, **own, **counts}, start_new_session=True
                )
            )
        return _watch(ranks, signals, notes)
    finally:
        _end(ranks)
        shutil.rmtree(notes, ignore_errors=True)


def note_death(error: BaseException) -> None:
    """Tell the launcher what this rank dies of; it says so when all have left."""
    folder = os.environ.get(_NOTES)
    if folder is not None and is_rank():
        text = str(error).strip().splitlines()
        note = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        try:
            Path(folder, os.environ["RANK"]).write_text(note)
        except OSError:
            pass  # its traceback is on stderr all the same


def _environment(rank: int, num_ranks: int, port: int, notes: Path) -> Mapping[str, str]:
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this machine
        # What a rank says of its lost connections would bury another one's message.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {name: os.environ.get(name, value) for name, value in defaults.items()} | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        # Torch's name for a store that the launcher, not rank 0, serves.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER: str(os.getpid()),
        _NOTES: str(notes),
    }


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]], signals: Sequence[signal.Signals], notes: Path
) -> int:
    """Wait for the ranks; returns the job's exit code."""
    first_failed: int | None = None
    passed_on = False
    deadline = float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if len(signals) > 1:
            return 128 + signals[1]
        if signals and not passed_on:
            passed_on = True
            deadline = time.monotonic() + SHUTDOWN_SECONDS
            for rank in ranks:
                rank.send_signal(signals[0])
        if first_failed is None:
            failed = [i for i, rank in enumerate(ranks) if _is_failure(rank.poll())]
            first_failed = min(failed, key=lambda i: _precedence(_code(ranks[i])), default=None)
            if first_failed is not None:
                was_killed = _code(ranks[first_failed]) < 0
                deadline = time.monotonic() + (0 if was_killed else GRACE_SECONDS)
    return _code_of_job(ranks, first_failed, signals[0] if signals else None, notes)


def _code_of_job(
    ranks: Sequence[subprocess.Popen[bytes]],
    first_failed: int | None,
    asked: signal.Signals | None,
    notes: Path,
) -> int:
    """Names the rank that failed first, unless it has spoken for itself."""
    codes = [rank.poll() for rank in ranks]
    if first_failed is None:
        failed = [i for i, code in enumerate(codes) if _is_failure(code)]
        first_failed = min(failed, key=lambda i: _precedence(_code(ranks[i])), default=None)
    if first_failed is not None:
        code = _code(ranks[first_failed])
        if asked is not None and code == -asked:
            _tell(f"{asked.name}: left before training began")
            return 128 + asked
        if code in OUR_CODES:
            return code
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        error = ""
        if code > 0 and (noted := _first_note(notes)) is not None:  # others die of its death
            first_failed, error = noted[0], f": {noted[1]}"
        _tell(f"rank {first_failed} died ({how}){error}; the other ranks were ended")
        return int(ExitCode.CRASHED)
    if None in codes:
        rank = codes.index(None)
        _tell(f"rank {rank} has not left {SHUTDOWN_SECONDS:.0f} s after the signal: killed")
        return int(ExitCode.CRASHED)
    if int(ExitCode.SAVED_ON_SIGNAL) in codes:
        _tell(f"{asked.name if asked else 'a signal to a rank'}: all ranks have left")
        return int(ExitCode.SAVED_ON_SIGNAL)
    return int(ExitCode.FINISHED)


def _first_note(notes: Path) -> tuple[int, str] | None:
    """The rank that noted an error first, and the error."""
    files = sorted(notes.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    return (int(files[0].name), files[0].read_text()) if files else None


def _is_failure(code: int | None) -> bool:
    return code not in (None, int(ExitCode.FINISHED), int(ExitCode.SAVED_ON_SIGNAL))


def _precedence(code: int) -> tuple[bool, bool, int]:
    """Return a sort key by which the exit code that explains the others comes first.

    A rank that was killed comes first, then one that ended with a code of ours, such as that of a
    hung rank. Ranks that crashed come last, since they may have lost their connection to the first.
    """
    return code >= 0, code == ExitCode.CRASHED, code


def _code(rank: subprocess.Popen[bytes]) -> int:
    code = rank.poll()
    assert code is not None, "it has ended"
    return code


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Nothing that a rank has started outlives the job either."""
    for rank in ranks:
        try:
            os.killpg(rank.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for rank in ranks:
        rank.wait()


def _tell(text: str) -> None:
    print(f"megafp8: {text}", file=sys.stderr, flush=True)
