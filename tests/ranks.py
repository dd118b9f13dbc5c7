"""Run a function as N gloo ranks, each a process of its own, and collect what they return.

    results = run_ranks(rank_work.train, 2, {"steps": 20})

The function gets `ranks.Rank` and the arguments; ranks import its module.
Ranks are forked from a process that has imported torch and megafp8 already.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.disks import forget_fsync
from tests.limits import HANG_SECONDS

ROOT = Path(__file__).parents[1]
PRELOADED = [
    "megafp8.train.pretrain",
    "megafp8.parallel.pipeline_runner",  # which imports FSDP too
    "tests.tiny",
    "tests.kit.runs",  # and pytest; most ranks import Transformer Engine's backend by it
]


@dataclass(frozen=True)
class Rank:
    """Tell a rank its index and the number of ranks."""

    index: int
    size: int


def run_ranks(
    function: Callable[..., Any],
    size: int,
    arguments: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Run `function` on `size` ranks, and return each rank's result, by rank.

    `function` and results are pickled; results may have tensors.

    Raises:
        RuntimeError: A rank failed; the error is in the message, and the other ranks are ended.
        TimeoutError: A rank hangs; its stacks are in the message.
    """
    from torch.distributed import TCPStore

    # The rendezvous is in this process, on a port that the system chose: tests cannot collide.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        work = pickle.dumps((function, dict(arguments or {})))
        Path(folder, "arguments").write_bytes(work)
        processes = [_start(rank, size, store.port, folder) for rank in range(size)]
        try:
            _wait(processes, folder)
            return [pickle.loads(Path(folder, f"result{r}").read_bytes()) for r in range(size)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _start(rank: int, size: int, port: int, folder: str) -> ForkServerProcess:
    environment = _environment(rank, size, port)
    process = _server().Process(target=main, args=(folder, environment), daemon=True)
    process.start()
    return process


@cache
def _server() -> ForkServerContext:
    """Start a process that imports what every rank needs and forks; torch has no thread in it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
        patch.chdir(ROOT)
        forkserver.ensure_running()
    return context


def _wait(processes: list[ForkServerProcess], folder: str) -> None:
    end = time.monotonic() + HANG_SECONDS
    while living := [process.sentinel for process in processes if process.exitcode is None]:
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed or time.monotonic() > end + 10:
            break
        connection.wait(living, timeout=max(0.0, end + 10 - time.monotonic()))
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    if failed:
        errors = [Path(folder, f"stderr{rank}").read_text(errors="replace") for rank in failed]
        reports = [f"rank {r} failed:\n{error}" for r, error in zip(failed, errors, strict=True)]
        raise RuntimeError("\n".join(reports))
    running = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    if running:
        raise TimeoutError(f"ranks {running} were still running after {HANG_SECONDS} s")


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent process has the store
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


class ResultPickler(pickle.Pickler):
    """Pickle plain tensors as arrays, which takes a tenth of the time of torch's own way."""

    def reducer_override(self, given: Any) -> Any:
        import torch

        if type(given) is not torch.Tensor or given.requires_grad or vars(given):
            return NotImplemented
        if given.layout != torch.strided or not given.is_contiguous():
            return NotImplemented
        if given.dtype == torch.bfloat16:
            return _bf16_of, (given.view(torch.int16).numpy(),)
        if given.dtype in (torch.float32, torch.float64, torch.uint8, torch.int64):
            return torch.from_numpy, (given.numpy(),)
        return NotImplemented


def _bf16_of(bits: Any) -> Any:
    import torch

    return torch.from_numpy(bits).view(torch.bfloat16)


def main(folder: str, environment: Mapping[str, str]) -> None:
    """Run the function as one rank, in a process of its own."""
    import torch.distributed as dist

    os.environ.update(environment)
    os.chdir(ROOT)
    with Path(folder, f"stderr{environment['RANK']}").open("wb") as stderr:
        os.dup2(stderr.fileno(), 2)
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # pytest's may be in its place
    gc.freeze()
    forget_fsync()
    rank = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)  # shows where a rank hangs
    try:
        given = Path(folder, "arguments").read_bytes()
        function, arguments = pickle.loads(given)  # imports the function's module
        result = function(rank, **arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for the other ranks, which may be in a collective
    with Path(folder, f"result{rank.index}").open("wb") as file:
        ResultPickler(file).dump(result)
    if dist.is_initialized():
        dist.monitored_barrier(timeout=timedelta(seconds=HANG_SECONDS))
        dist.destroy_process_group()
