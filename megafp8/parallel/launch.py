"""Start a job's ranks on this machine through torch's elastic launcher, or join a launcher's."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence

from megafp8.errors import ExitCode

OUR_CODES = {int(code) for code in ExitCode} - {int(ExitCode.CRASHED)}
SHUTDOWN_SECONDS = 120.0  # for a rank to finish its step and save after a signal


def is_rank() -> bool:
    """Whether a launcher (ours or torchrun) has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(script: str, argv: Sequence[str], num_ranks: int) -> int:
    """Run `script argv…` as `num_ranks` ranks here; returns the job's exit code.

    Signals that ask to save and leave are passed on to every rank.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    for name, value in _environment(num_ranks).items():
        os.environ.setdefault(name, value)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        launch_agent(config, sys.executable, ["-u", script, *argv])
    except ChildFailedError as error:
        return _code_of(error)
    except SignalException as error:
        # The ranks have been given the signal, have saved and left.
        print(f"megafp8: {signal.Signals(error.sigval).name}: all ranks have left", file=sys.stderr)
        return int(ExitCode.SAVED_ON_SIGNAL)
    return int(ExitCode.FINISHED)


def _environment(num_ranks: int) -> Mapping[str, str]:
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    return {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this machine
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1",
        # The launcher's own log would bury a rank's message under a page of text.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def _code_of(error: object) -> int:
    """The exit code of the rank that failed first; names it unless it has spoken for itself."""
    failures: dict[int, object] = error.failures  # type: ignore[attr-defined]
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp)  # type: ignore[attr-defined]
    code = int(first.exitcode)  # type: ignore[attr-defined]
    if code in OUR_CODES:
        return code
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    print(f"megafp8: rank {rank} died ({how}); the other ranks were ended", file=sys.stderr)
    return int(ExitCode.CRASHED)
