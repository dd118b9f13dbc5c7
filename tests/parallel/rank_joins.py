"""What ranks do when they join again, or wait long for one of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megafp8.checkpoint import store
from megafp8.checkpoint.step_directories import step_name
from megafp8.ops import torch_private
from megafp8.parallel.agreement import wait_for_all
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import join, leave
from megafp8.specs import ParallelSpec
from megafp8.train import state_dict
from megafp8.train.load import newest_after_cleanup
from megafp8.train.saver import Saver
from tests.kit.cases import Case
from tests.limits import HANG_SECONDS
from tests.ranks import Rank


def join_again(rank: Rank, times: int) -> list[float]:
    """Join `times` times, as the jobs of a sweep do, and return each job's sum over the ranks."""
    sums = []
    for job in range(times):
        mesh = join(ParallelSpec(devices_per_node=rank.size, tp=rank.size))
        for axis in (mesh.world, mesh.tp):
            sums.append(axis.all_reduce_sum(torch.tensor(float(10**job * (rank.index + 1)))).item())
        assert mesh.store is not None and not mesh.store.check(["of this job"])
        axis.all_gather(torch.zeros(1))  # no rank has set the key yet
        mesh.store.set("of this job", os.environ["RANK"])
        leave()
    return sums


def wait_for_files(rank: Rank, folder: str, timeout: float) -> list[str]:
    """Save, find and load a checkpoint, in each of which one rank works while the other one waits.

    Return what this rank did while the other one waited in `Mesh.agreement`. The save lasts longer
    than the `timeout` that collectives of training have meanwhile.
    """
    waits, noted = Path(folder, f"rank {1 - rank.index} waits"), list[str]()
    own = Path(folder, f"rank {rank.index} waits")

    def slow(module: Any, name: str, slow_rank: int) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def slowed(*args: Any) -> Any:
            if rank.index == slow_rank:
                seen = 0
                while seen < 5:  # in a wrong group the other rank is never seen
                    seen = seen + 1 if waits.exists() else 0
                    time.sleep(0.02)
                if name == "write_shard":
                    time.sleep(timeout + 1)
                noted.append(name)
            return function(*args)

        setattr(module, name, slowed)

    def noting(name: str) -> None:
        """Let a collective show that this rank waits in `Mesh.agreement`."""
        function: Callable[..., Any] = getattr(dist, name)

        def collective(*args: Any, **more: Any) -> Any:
            if more.get("group") is not mesh.agreement:
                return function(*args, **more)
            own.touch()
            try:
                return function(*args, **more)
            finally:
                own.unlink()

        setattr(dist, name, collective)

    slow(store, "write_shard", 1)
    slow(store, "verify", 0)
    slow(store, "why_damaged", 0)
    slow(state_dict, "_load_states", 1)
    mesh = join(ParallelSpec(devices_per_node=rank.size))
    for name in ("broadcast", "all_gather"):  # by which agreement.py sends objects
        noting(name)
    state = Case(parallel=ParallelSpec(devices_per_node=rank.size)).build(mesh)
    root = Path(folder, "checkpoints")
    groups = [axis.group for axis in vars(mesh).values() if isinstance(axis, Axis) and axis.group]
    for group in groups:
        torch_private.set_timeout(group, timeout)
    Saver(root, 1, {"config": {}, "data_fingerprint": ""}).save(state)
    for group in groups:
        torch_private.set_timeout(group, HANG_SECONDS)
    newest = newest_after_cleanup(root, mesh, print)
    assert newest == root / step_name(0)
    state_dict.load_checkpoint(newest, state, print)
    assert mesh.world.all_reduce_sum(torch.ones(1)).item() == rank.size
    state_dict.load_weights(store.Reader(newest), state, print)
    assert mesh.world.all_reduce_sum(torch.ones(1)).item() == rank.size
    return noted


def miss_a_rank(rank: Rank) -> str:
    """Wait for a rank that closes its connections, as a dying one does; return the error."""
    mesh = join(ParallelSpec(devices_per_node=rank.size))
    error = ""
    try:
        if rank.index == 0:
            wait_for_all(mesh)
    except RuntimeError as caught:
        error = str(caught)
    leave()
    return error
