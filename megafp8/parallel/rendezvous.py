"""Let ranks that our launcher has not started find each other, and report why they cannot.

Rank 0 serves a store at MASTER_ADDR:MASTER_PORT, and the other ranks connect to it. What cannot
work (a port in use, an address of another machine) is reported at once instead of after a
collective's long timeout.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import queue
import resource
import socket
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megafp8.errors import RunError
from megafp8.ops import torch_private
from megafp8.parallel.environment import JOIN_SECONDS, check_environment, join_seconds

Store = Any  # torch's stubs lack its stores
UNREACHABLE_SECONDS = 20.0  # for a name that does not resolve or a network without a route
WAITING_SECONDS = 24 * 3600.0
"""How long ranks wait for one that works on files. If a rank dies, its connections break, so that
the others learn of it at once. During training `trainer.step_timeout`, if it is set, finds one that
hangs; before the first step nothing does. torch does not let this time be set with
TORCH_DISTRIBUTED_DEBUG=DETAIL: the ranks then wait for `JOIN_SECONDS`."""
_NOTICE_SECONDS = 30.0


def gpu_index(environment: Mapping[str, str], num_gpus: int) -> int:
    """Return which of the `num_gpus` visible GPUs belongs to this process.

    Raises:
        RunError: There are more ranks on this node than GPUs visible to each.
    """
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    if local_rank < num_gpus:
        return local_rank
    is_bound = bool({"SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"} & environment.keys())
    # Slurm also has --tres-per-task=gres/gpu:1, and --ntasks-per-gpu, which binds by itself.
    is_bound |= "gpu" in environment.get("SLURM_TRES_PER_TASK", "")
    if num_gpus == 1 and (is_bound or environment.get("SLURM_NTASKS_PER_GPU") == "1"):
        return 0  # each task sees only its own GPU
    raise RunError(
        f"{environment.get('LOCAL_WORLD_SIZE', local_rank + 1)} ranks run on "
        f"{socket.gethostname()}, which shows {num_gpus} GPU(s) to each. Ask for one GPU a rank "
        "(Slurm: --gpus-per-node as large as --ntasks-per-node), or start fewer ranks"
    )


def connect(backend: str) -> Store:
    """Join the default process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

    Returns the store that the ranks share.

    Raises:
        RunError: The ranks cannot find each other; the message names the address or port and why.
    """
    check_environment(os.environ)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _warn_of_hosts_that_never_meet(os.environ)
        shared, rank, size = next(iter(rendezvous("env://")))  # our launcher's, or torchrun's
        # torchrun's store outlives its ranks and holds the addresses of those that have died.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = _for_next_job(dist.PrefixStore(f"start{start}", shared), rank)  # type: ignore[attr-defined]
        _join(backend, store, rank, size)
        return store
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise RunError(
            f"{', '.join(missing)} must be set for a rank. Start ranks with srun, torchrun, or "
            "one command with trainer.devices"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    seconds = join_seconds(os.environ)
    store = serve(host, port) if rank == 0 else reach(host, port, seconds, f"rank {rank}")
    await_all(store, rank, size, f"{host}:{port}", seconds)
    _join(backend, store, rank, size)
    return store


def _for_next_job(store: Store, rank: int) -> Store:
    """Return the part of the launcher's store that belongs to the job which joins now.

    The store outlives a job of a sweep, and torch gives the groups of each job the same names. Each
    rank counts its own joins in the store. All ranks join equally often, so their counts agree.
    """
    job = store.add(f"joined/{rank}", 1)
    return dist.PrefixStore(f"job{job}", store)  # type: ignore[attr-defined]


def _warn_of_hosts_that_never_meet(environment: Mapping[str, str]) -> None:
    """Warn if torchrun's agents on several hosts would send restarted ranks to different stores.

    Each agent counts only the restarts after its own ranks' deaths, so the counts, which name the
    stores, would differ between hosts.
    """
    several = int(environment.get("GROUP_WORLD_SIZE", "1")) > 1
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if several and restarts and environment.get("RANK") == "0":
        warnings.warn(
            "torchrun --max-restarts over several hosts: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, else ranks may not find each other again",
            stacklevel=2,
        )


def _join(backend: str, store: Store, rank: int, size: int) -> None:
    groups = dist.PrefixStore("groups", store)  # type: ignore[attr-defined]  # not in its stubs
    # NCCL connects now, where an error can be reported, instead of in the first collective.
    device = local_gpu() if backend == "nccl" else None
    dist.init_process_group(backend, store=groups, rank=rank, world_size=size, device_id=device)


def group_that_waits() -> dist.ProcessGroup:
    """Return a new group of all ranks, in which they wait for each other as long as files take.

    A checkpoint may take longer to write or to read than the timeout of a group that trains, which
    is 10 minutes with NCCL. The new group is one of gloo's: it sends from host memory over TCP. All
    ranks call this function together.

    Raises:
        RunError: The ranks cannot connect.
    """
    _allow_open_files(dist.get_world_size())
    try:
        group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=JOIN_SECONDS)
        )
    except RuntimeError as error:
        raise RunError(
            f"{socket.gethostname()} cannot connect to the other ranks over TCP: "
            f"{str(error).strip().splitlines()[0]}. Set GLOO_SOCKET_IFNAME to the network "
            "interface by which the hosts reach each other"
        ) from error
    torch_private.set_timeout(group, WAITING_SECONDS)
    return group


def _allow_open_files(more: int) -> None:
    """Raise this process's limit of open files by `more`, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = soft + more
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve(host: str, port: int) -> Store:
    """Return rank 0's store; other ranks can connect to it from now on.

    It listens on the address of this machine that MASTER_ADDR names. It listens on all addresses
    where that name leads to this machine by other ways only: through a router, or because this
    machine calls itself 127.0.1.1, as Debian does, and others know its address in the network.
    """
    place = f"MASTER_ADDR={host} MASTER_PORT={port}"
    listener = _listen(_address(host), port, place)
    try:
        _check_is_here(host, port, place)
    except RunError:
        listener.close()
        raise
    return _store(host, port, is_master=True, listen_fd=listener.detach())


def _address(host: str) -> str:
    """Return the address to listen on for `host`; empty for all addresses."""
    addresses = _addresses_here(host)
    loopback = [address for address in addresses if ipaddress.ip_address(address).is_loopback]
    outer = [address for address in addresses if address not in loopback]
    if outer:
        return outer[0]
    is_meant = host == "localhost" or host in loopback
    return loopback[0] if loopback and is_meant else ""


def _addresses_here(host: str) -> list[str]:
    """Return the addresses of `host` that this machine has."""
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []  # `_check_is_here` reports it
    addresses_here = []
    for family, kind, _, _, address in resolved:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind((str(address[0]), 0))  # refused unless it is an address of this machine
            addresses_here.append(str(address[0]))
    return addresses_here


def reach(host: str, port: int, seconds: float, who: str = "this rank") -> Store:
    """Return the store of rank 0, which may start up to `seconds` later.

    After 30 s a line on stderr says what `who` waits for. Rank 0 is looked for before torch's
    client is made, which would wait as long for a name that does not resolve.

    Raises:
        RunError: Rank 0 is not reached in time, or another program answers in its place.
    """
    place = f"MASTER_ADDR={host} MASTER_PORT={port}"
    began = time.monotonic()
    unreachable_since: float | None = None
    last: OSError
    is_noticed = False
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return _store(host, port, is_master=False)
        except ConnectionRefusedError as error:  # its machine answers, and rank 0 is not there yet
            unreachable_since, last, limit = None, error, seconds
        except OSError as error:
            unreachable_since = unreachable_since or time.monotonic() - 5.0
            last, limit = error, min(seconds, UNREACHABLE_SECONDS)
        if time.monotonic() - (unreachable_since or began) > limit:
            raise RunError(
                f"{socket.gethostname()} does not reach rank 0 at {place}: {last}, for "
                f"{limit:g} s. If rank 0 does not run, see its errors or start it (RANK=0); "
                "if it does, set MASTER_ADDR to a name or address of its machine that this one "
                "reaches"
            )
        if not is_noticed and time.monotonic() - began > _NOTICE_SECONDS:
            is_noticed = True
            text = f"megafp8: waiting: {who} waits up to {seconds:g} s for rank 0 at {place}"
            print(f"{text}: rank 0 is not reached ({last})", file=sys.stderr, flush=True)
        time.sleep(0.2)


def await_all(store: Store, rank: int, size: int, place: str, seconds: float) -> None:
    """Return when all ranks have connected; meanwhile rank 0 reports which are missing.

    Raises:
        RunError: Ranks have not come within `seconds`, or rank 0 has left.
    """
    try:
        store.set(f"megafp8/here/{rank}", "1")
        if rank > 0:
            store.wait(["megafp8/all"], timedelta(seconds=seconds + UNREACHABLE_SECONDS))
            return
    except dist.DistError as error:
        raise RunError(
            f"{socket.gethostname()} has reached rank 0 at {place}, and then the wait for the "
            f"other ranks ended: {str(error).splitlines()[0]}. See what rank 0 says"
        ) from error
    began = noticed = time.monotonic()
    while missing := [r for r in range(size) if not store.check([f"megafp8/here/{r}"])]:
        now = time.monotonic()
        text = f"{len(missing)} of {size} ranks have not come to {place}: {_shortened(missing)}"
        if now - began > seconds:
            raise RunError(
                f"after {seconds:.0f} s {text}. See what they say; MEGAFP8_JOIN_SECONDS allows "
                "them more time"
            )
        if now - noticed > _NOTICE_SECONDS:
            noticed = now
            print(f"megafp8: waiting: {text}", file=sys.stderr, flush=True)
        time.sleep(0.05)
    store.set("megafp8/all", "1")


def _listen(address: str, port: int, place: str) -> socket.socket:
    """Return a socket that listens on `address`, or on all addresses if it is empty."""
    try:
        if address:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=2048)
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048
        )
    except OSError as error:
        if not address and (
            error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) or not socket.has_ipv6
        ):
            return _listen("0.0.0.0", port, place)
        raise _cannot_listen(place, error) from error


def _cannot_listen(place: str, error: OSError) -> RunError:
    reason = os.strerror(error.errno or 0)
    return RunError(
        f"{place}: rank 0 cannot listen there on {socket.gethostname()} ({reason}). "
        "Another job may use the port, or two tasks are rank 0: choose another MASTER_PORT"
    )


def _check_is_here(host: str, port: int, place: str) -> None:
    """Raise RunError unless `host` is an address of this machine or forwards to it."""
    here = socket.gethostname()
    hint = f"Set MASTER_ADDR to a name or address of {here}, where rank 0 runs"
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RunError(f"{place}: {host} does not resolve on {here} ({error}). {hint}") from error
    if _addresses_here(host):
        return
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        raise RunError(f"{place}: is not reachable from rank 0 ({error}). {hint}") from error


def _store(host: str, port: int, *, is_master: bool, listen_fd: int | None = None) -> Store:
    """Return torch's store, which is made in a thread, since its client may wait without end."""
    results: queue.SimpleQueue[Store | RuntimeError] = queue.SimpleQueue()

    def make() -> None:
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]  # missing in its stubs
                host,
                port,
                is_master=is_master,
                wait_for_workers=False,
                timeout=timedelta(seconds=UNREACHABLE_SECONDS),
                master_listen_fd=listen_fd,
            )
        except RuntimeError as error:
            results.put(error)
        else:
            results.put(store)

    threading.Thread(target=make, daemon=True).start()
    try:
        result = results.get(timeout=2 * UNREACHABLE_SECONDS)
    except queue.Empty:
        result = RuntimeError("it has not answered")
    if isinstance(result, RuntimeError):
        raise RunError(
            f"MASTER_ADDR={host} MASTER_PORT={port}: what listens there is not rank 0 of a run: "
            f"{str(result).splitlines()[0]}. Another program may use the port: choose another "
            "MASTER_PORT for all ranks, and start rank 0 (RANK=0) on that machine"
        ) from result
    return result


def _shortened(ranks: list[int]) -> str:
    text = ", ".join(str(rank) for rank in ranks[:8])
    return text + (", …" if len(ranks) > 8 else "")


def local_gpu() -> torch.device:
    """Return the device of this rank's GPU."""
    return torch.device("cuda", gpu_index(os.environ, torch.cuda.device_count()))
