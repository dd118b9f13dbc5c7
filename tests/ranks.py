"""Run a function as N gloo ranks, each a process of its own, and collect what they return.

    results = run_ranks("tests.parallel.rank_work:train", 2, {"steps": 20})

The function gets `ranks.Rank` and the arguments; it lives in a module that the ranks can import.
A rank takes seconds to import torch: put several cases into one function.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Rank:
    """What a rank knows about itself."""

    index: int
    size: int


def run_ranks(
    function: str, size: int, arguments: Mapping[str, Any] | None = None, timeout: float = 120.0
) -> list[Any]:
    """Each rank's result, by rank. The first rank that fails ends the others; its error is raised.

    `function` is `module:name`. Results are pickled; tensors may be among them.
    """
    from torch.distributed import TCPStore

    # The rendezvous lives here, on a port the system chose, so that no two tests can collide.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        work = (function, dict(arguments or {}), timeout)
        Path(folder, "arguments").write_bytes(pickle.dumps(work))
        processes = [_start(rank, size, store.port, folder) for rank in range(size)]
        try:
            _wait(processes, folder, timeout)
            return [pickle.loads(Path(folder, f"result{r}").read_bytes()) for r in range(size)]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _start(rank: int, size: int, port: int, folder: str) -> subprocess.Popen[bytes]:
    with Path(folder, f"stderr{rank}").open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", folder],
            cwd=ROOT,
            env={**os.environ, **_environment(rank, size, port)},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )


def _wait(processes: list[subprocess.Popen[bytes]], folder: str, timeout: float) -> None:
    end = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed or time.monotonic() > end + 10:
            break
        time.sleep(0.02)
    failed = [rank for rank, process in enumerate(processes) if process.poll()]
    if failed:
        errors = [Path(folder, f"stderr{rank}").read_text(errors="replace") for rank in failed]
        reports = [f"rank {r} failed:\n{error}" for r, error in zip(failed, errors, strict=True)]
        raise RuntimeError("\n".join(reports))
    running = [rank for rank, process in enumerate(processes) if process.poll() is None]
    if running:
        raise TimeoutError(f"ranks {running} were still running after {timeout} s")


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the parent's
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONPATH": str(ROOT),
    }


def main(folder: str) -> None:
    """One rank."""
    import torch.distributed as dist

    rank = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    target, arguments, timeout = pickle.loads(Path(folder, "arguments").read_bytes())
    module, _, name = target.partition(":")
    faulthandler.dump_traceback_later(timeout, exit=True)  # says where it hangs
    function = getattr(importlib.import_module(module), name)
    try:
        result = function(rank, **arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # no goodbye to the other ranks, which may be waiting in a collective
    Path(folder, f"result{rank.index}").write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
