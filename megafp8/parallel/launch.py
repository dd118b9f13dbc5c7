"""Start a job's ranks on this machine and watch them, or join those that torchrun has started.

Torch's elastic launcher ends the other ranks as soon as one of them exits, which kills ranks that
are still saving. It also gives no exit code after a signal, and its ranks become orphans if it is
killed. This launcher lives as long as its ranks, and no rank outlives it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megafp8.errors import ExitCode, RunError
from megafp8.files import PROGRESS
from megafp8.parallel.ends import LAST_END, lost_connection, tell_end
from megafp8.specs import ParallelSpec

OUR_CODES = {int(code) for code in ExitCode} - {int(ExitCode.CRASHED)}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What asks a run to save and leave; the last one comes when its terminal is closed."""
POLL_SECONDS = 0.05
RESTARTED = (int(ExitCode.CRASHED), int(ExitCode.HUNG))
"""What another start may mend; a setting or a loss that is not finite it will not."""
SHUTDOWN_SECONDS = 120.0
"""After a signal, ranks that show no progress for so long are killed.

Progress is a step that begins, a validated batch, or a part of a checkpoint that is written,
flushed or read. At most 1 GiB is flushed at once, so that 9 MB/s for each rank are fast enough.
"""
GRACE_SECONDS = 5.0  # time for ranks that see another rank's error to report their own
LAUNCHER = "MEGAFP8LAUNCHER_PID"
PARENT = "MEGAFP8_PARENT_PID"
"""The variable by which a command that runs training jobs tells them to end with it."""
_HERE = "127.0.0.1"  # all ranks of our launcher are on this machine
_SHUTDOWN = "MEGAFP8_SHUTDOWN_SECONDS"
_NOTES = "MEGAFP8_NOTES"
_PROGRESS_NAME = "progress"
_CHECKPOINT_NAME = "checkpoint"  # holds the path of the newest one
_FOLLOWER = "MEGAFP8_FOLLOWER_PID"  # the job that follows a command; its ranks inherit it
_PR_SET_PDEATHSIG = 1  # prctl.h


def is_rank() -> bool:
    """Return whether a launcher (ours or torchrun) has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def has_launcher() -> bool:
    """Return whether this process is a rank of our own launcher."""
    return is_rank() and LAUNCHER in os.environ


def signals_are_passed_on() -> bool:
    """Return whether the launcher of this rank, ours or torchrun, passes its signals on.

    A command that runs jobs (`job_environment`) does so too. What ends a whole job, such as
    systemd, signals the launcher and its ranks, so that each rank gets the signal twice.
    """
    if is_rank() and not {LAUNCHER, "TORCHELASTIC_RUN_ID"}.isdisjoint(os.environ):
        return True
    return os.environ.get(_FOLLOWER) == str(os.getpid())


def heard_signals() -> list[signal.Signals]:
    """Return the signals at which a run saves: not SIGHUP under `nohup`, which ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (ignored and number == signal.SIGHUP)]


def leave_dead_terminal() -> None:
    """Send what is printed to the null device if the terminal is gone, as after SIGHUP.

    Otherwise the next line would raise an error, before a run is saved.
    """
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream)
            os.close(nothing)


def prepare_allocator(environment: MutableMapping[str, str]) -> None:
    """Set PYTORCH_ALLOC_CONF=expandable_segments:True unless the user has set the variable.

    CUDA memory that one tensor has freed can then serve tensors of other sizes. torch reads the
    variable once, so this function must be called before CUDA starts.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def prepare_connections(parallel: ParallelSpec, environment: MutableMapping[str, str]) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor parallelism, unless the user has set it.

    With one queue to the GPU, kernels start in the order in which they were launched, so that a
    message that was launched before a product begins before it and overlaps it. Megatron and
    Transformer Engine ask for it up to Hopper. FSDP's messages need several queues. CUDA reads the
    variable once, so this function must be called before CUDA starts.
    """
    if parallel.accelerator == "gpu" and parallel.tp > 1 and parallel.fsdp is None:
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def follow_launcher() -> None:
    """Make this process end when our launcher, or the command whose job it is, ends (Linux only).

    It does so however that one ends. A process without either is not changed. The ranks of a job do
    not see the command's variable: they follow their launcher.
    """
    parent = os.environ.get(LAUNCHER) if is_rank() else os.environ.pop(PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the call above
        os._exit(int(ExitCode.CRASHED))
    os.environ[_FOLLOWER] = str(os.getpid())


def training_program() -> list[str]:
    """Return the arguments of Python that run a training job, before the job's own arguments."""
    script = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
    if script.is_file():  # this is a clone, which need not be installed
        return [str(script)]
    return ["-P", "-m", "megafp8", "pretrain"]


def job_environment() -> dict[str, str]:
    """Return the environment for a job that is to end when this process ends, however it ends."""
    return {**os.environ, PARENT: str(os.getpid())}


def run_process(main: Callable[[], int]) -> NoReturn:
    """Call `main` and end this process with the exit code that it returns.

    If `main` raises, the traceback is printed and the process ends without running destructors:
    those of process groups can wait for ranks that will never answer. Of a broken connection one
    line is printed, since each rank of a large job has it and the rank that was lost explains it.
    """
    try:
        code, lost = main(), None
    except Exception as error:
        if not is_rank():
            raise
        lost = lost_connection(error)
        if lost is None:
            traceback.print_exc()
        else:
            _tell(f"rank {os.environ['RANK']}: the connection to another rank broke ({lost})")
        code = int(ExitCode.CRASHED)
    leave_process(code, is_lost=lost is not None)


def leave_process(code: int, *, is_lost: bool = False) -> NoReturn:
    """End this process with `code`; a rank ends without running destructors.

    gloo's threads sometimes abort in destructors, and the job would then count as crashed.
    `is_lost` says that the connection to another rank broke.
    """
    if is_rank():
        tell_end(code, is_lost=is_lost)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def launch(
    program: Sequence[str], argv: Sequence[str], num_ranks: int, *, max_restarts: int = 0
) -> int:
    """Run `python program… argv…` as `num_ranks` ranks here; return the job's exit code.

    The first signal that asks to save and leave is passed on to every rank; the second one ends all
    ranks at once. If ranks die or hang, all ranks are started again, up to `max_restarts` times,
    and resume the run from its newest checkpoint. After the last time it is said how each start
    ended, and on which host.

    Raises:
        RunError: MEGAFP8_SHUTDOWN_SECONDS is no number of seconds.
    """
    patience = _patience(os.environ)
    signals: list[signal.Signals] = []
    ends_at_second = not signals_are_passed_on()
    ends: list[str] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_dead_terminal()
        if not signals or ends_at_second:
            signals.append(signal.Signals(number))

    previous = {number: signal.signal(number, receive) for number in heard_signals()}
    try:
        for restart in range(max_restarts + 1):
            counts = {
                "TORCHELASTIC_RESTART_COUNT": str(restart),  # torch's names of the restart counts
                "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
                LAST_END: ends[-1] if ends else "",
            }
            command = [sys.executable, "-u", *program, *argv]
            code = _run(command, num_ranks, counts, signals, patience, ends)
            if signals or code not in RESTARTED:
                return code
            if restart == max_restarts:
                _tell_all(ends)
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
    patience: float,
    ends: list[str],
) -> int:
    """Run all ranks once and return the job's exit code; no process of the job is left then.

    `counts` are the ranks' variables of restarts, `signals` those received so far, and `patience`
    the seconds without progress after which ranks are ended. How it ended is added to `ends`.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in its stubs

    # The launcher serves the store, so the ranks get a port that is already listening. Each start
    # has a new store, without the addresses of ranks that are dead.
    # The socket is ours, because torch's own listens on all addresses of the machine.
    listener = socket.create_server((_HERE, 0), backlog=2048)
    port = listener.getsockname()[1]
    store = TCPStore(
        _HERE,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    notes = Path(tempfile.mkdtemp(prefix="megafp8-"))  # where ranks write why they died
    (notes / _PROGRESS_NAME).touch()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            rank_variables = _environment(rank, num_ranks, store.port, notes)
            # Each rank has its own session: Ctrl-C reaches only the launcher, which passes it on.
            ranks.append(
                subprocess.Popen(
                    command, env={**os.environ, **rank_variables, **counts}, start_new_session=True
                )
            )
        return _watch(ranks, signals, notes, patience, ends)
    finally:
        _end(ranks)
        shutil.rmtree(notes, ignore_errors=True)


def note_death(error: BaseException) -> None:
    """Write why this rank dies to a file that the launcher reports after all ranks have left."""
    folder = os.environ.get(_NOTES)
    if folder is not None and is_rank():
        text = str(error).strip().splitlines()
        note = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        try:
            Path(folder, os.environ["RANK"]).write_text(note)
        except OSError:
            pass  # the traceback on stderr tells the same


def note_checkpoint(path: Path) -> None:
    """Show our launcher the newest checkpoint of the run; other launchers keep no notes."""
    folder = os.environ.get(_NOTES)
    if folder is not None and is_rank():
        draft = Path(folder, f"{_CHECKPOINT_NAME}.{os.environ['RANK']}")
        try:
            draft.write_text(str(path))
            draft.rename(Path(folder, _CHECKPOINT_NAME))
        except OSError:
            pass  # the launcher then reports a rank's death without the path


def _environment(rank: int, num_ranks: int, port: int, notes: Path) -> Mapping[str, str]:
    """Return the variables of a rank: torchrun's, and those by which our launcher hears it."""
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this machine
        # Messages about lost connections would hide the message of the rank that failed.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {name: os.environ.get(name, value) for name, value in defaults.items()} | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": _HERE,
        "MASTER_PORT": str(port),
        # Torch's name for a store that the launcher, not rank 0, serves.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER: str(os.getpid()),
        _NOTES: str(notes),
        PROGRESS: str(notes / _PROGRESS_NAME),
    }


def _patience(environment: Mapping[str, str]) -> float:
    """Return the seconds without progress after which signalled ranks are killed."""
    text = environment.get(_SHUTDOWN, str(SHUTDOWN_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds > 0:
        return seconds
    raise RunError(
        f"{_SHUTDOWN}={text}: is not a number of seconds above 0. Set it to the longest time in "
        f"which a rank that saves may show no progress, or unset it ({SHUTDOWN_SECONDS:.0f})"
    )


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]],
    signals: Sequence[signal.Signals],
    notes: Path,
    patience: float,
    ends: list[str],
) -> int:
    """Wait for the ranks and return the job's exit code.

    A rank that has failed gives the others `GRACE_SECONDS`. After a signal, all ranks have time to
    save as long as one of them makes progress, and `patience` seconds after that.
    """
    first_failed: int | None = None
    passed_on = False
    deadline = last_progress = float("inf")
    noted = 0
    while any(rank.poll() is None for rank in ranks):
        now = time.monotonic()
        if now > deadline or now - last_progress > patience:
            break
        time.sleep(POLL_SECONDS)
        if len(signals) > 1:
            return 128 + signals[1]
        if signals and not passed_on:
            passed_on = True
            for rank in ranks:
                rank.send_signal(signals[0])
        if passed_on and (newest := _progress(notes)) != noted:
            noted, last_progress = newest, time.monotonic()
        if first_failed is None:
            failed = [i for i, rank in enumerate(ranks) if _is_failure(rank.poll())]
            first_failed = min(failed, key=lambda i: precedence(_code(ranks[i])), default=None)
            if first_failed is not None:
                was_killed = _code(ranks[first_failed]) < 0
                deadline = time.monotonic() + (0 if was_killed else GRACE_SECONDS)
    asked = signals[0] if signals else None
    return _code_of_job(ranks, first_failed, asked, notes, patience, ends)


def _code_of_job(
    ranks: Sequence[subprocess.Popen[bytes]],
    first_failed: int | None,
    asked: signal.Signals | None,
    notes: Path,
    patience: float = SHUTDOWN_SECONDS,
    ends: list[str] | None = None,
) -> int:
    """Return the job's exit code and report the rank that failed first, unless it reported
    itself. How the job failed is added to `ends`.
    """
    codes = [rank.poll() for rank in ranks]
    if first_failed is None:
        failed = [i for i, code in enumerate(codes) if _is_failure(code)]
        first_failed = min(failed, key=lambda i: precedence(_code(ranks[i])), default=None)
    if first_failed is not None:
        code = _code(ranks[first_failed])
        if asked is not None and code in (-asked, 128 + asked):
            _tell(f"{asked.name}: left before training began")
            return 128 + asked
        ends = [] if ends is None else ends
        if code in OUR_CODES:
            how = "hung" if code == ExitCode.HUNG else f"ended with exit code {code}"
            ends.append(f"rank {first_failed} on {socket.gethostname()} {how}")
            return code
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        error = ""
        if (
            code > 0 and (noted := _first_note(notes)) is not None
        ):  # the other ranks die because this one did
            first_failed, error = noted[0], f": {noted[1]}"
        ends.append(f"rank {first_failed} died ({how}) on {socket.gethostname()}{error}")
        _tell(f"{ends[-1]}; the other ranks were ended. {_continuation(notes)}")
        return int(ExitCode.CRASHED)
    if None in codes:
        rank = codes.index(None)
        _tell(
            f"rank {rank} has not left after the signal, and no rank has made progress for "
            f"{patience:g} s: killed. {_SHUTDOWN} allows more time"
        )
        return int(ExitCode.CRASHED)
    if int(ExitCode.SAVED_ON_SIGNAL) in codes:
        _tell(f"{asked.name if asked else 'a signal to a rank'}: all ranks have left")
        return int(ExitCode.SAVED_ON_SIGNAL)
    return int(ExitCode.FINISHED)


def _continuation(notes: Path) -> str:
    """Return what the same command will do, by the newest checkpoint that a rank has noted."""
    try:
        checkpoint = Path(notes, _CHECKPOINT_NAME).read_text()
    except OSError:
        if _progress(notes) < 0:  # the folder of temporary files was emptied
            return "The same command continues from the newest checkpoint, if there is one"
        return "This run had no checkpoint: the same command begins it again"
    return f"The same command continues from {checkpoint}"


def _first_note(notes: Path) -> tuple[int, str] | None:
    """Return the rank that noted an error first, and the error."""
    try:
        files = [file for file in notes.iterdir() if file.name.isdigit()]
        files.sort(key=lambda file: file.stat().st_mtime_ns)
        return (int(files[0].name), files[0].read_text()) if files else None
    except OSError:  # somebody has emptied the folder of temporary files
        return None


def _progress(notes: Path) -> int:
    """Return when a rank last made progress, in nanoseconds; -1 if the file is gone."""
    try:
        return (notes / _PROGRESS_NAME).stat().st_mtime_ns
    except OSError:
        return -1


def _is_failure(code: int | None) -> bool:
    return code not in (None, int(ExitCode.FINISHED), int(ExitCode.SAVED_ON_SIGNAL))


def precedence(code: int) -> tuple[bool, bool, int]:
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
    """Kill the ranks and every process that they have started."""
    for rank in ranks:
        try:
            os.killpg(rank.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for rank in ranks:
        rank.wait()


def _tell_all(ends: Sequence[str]) -> None:
    """Say how each start ended, after the last one that `trainer.max_restarts` allows."""
    if len(ends) > 1:
        starts = "".join(f"\n  start {number}: {end}" for number, end in enumerate(ends, start=1))
        _tell(
            f"trainer.max_restarts={len(ends) - 1} allows no other start. On "
            f"{socket.gethostname()} the starts ended so:{starts}\nThe same command begins a new "
            "count. If this machine is at fault, use another one that sees the run's directory"
        )


def _tell(text: str) -> None:
    print(f"megafp8: {text}", file=sys.stderr, flush=True)
