"""Test how ranks find each other, and the errors if they do not."""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megafp8.errors import RunError
from megafp8.parallel import rendezvous
from megafp8.parallel.launch import launch
from megafp8.parallel.rendezvous import (
    _warn_of_hosts_that_never_meet,
    await_all,
    gpu_index,
    reach,
    serve,
)
from tests.limits import HANG_SECONDS
from tests.parallel import rank_joins
from tests.ranks import ResultPickler, run_ranks


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_ranks_that_come_one_after_another_meet(port: int) -> None:
    errors: list[BaseException] = []
    stores = []  # rank 0's serves the others until they have left

    def come(rank: int, seconds: float) -> None:
        try:
            time.sleep(seconds)
            store = (
                serve("localhost", port) if rank == 0 else reach("localhost", port, HANG_SECONDS)
            )
            stores.append(store)
            await_all(store, rank, 3, "here", HANG_SECONDS)
            store.set(f"met{rank}", str(rank))
            store.wait(["met0", "met1", "met2"], timedelta(seconds=HANG_SECONDS))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come, args=(r, s)) for r, s in ((0, 0.5), (1, 0), (2, 0.7))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not any(thread.is_alive() for thread in threads)


def test_a_port_in_use() -> None:
    with socket.create_server(("", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(RunError, match=f"MASTER_PORT={taken}: rank 0 cannot listen there"):
            serve("localhost", taken)


def test_a_master_on_another_machine(port: int) -> None:
    with pytest.raises(RunError, match="MASTER_ADDR=192.0.2.1 .* not reachable from rank 0"):
        serve("192.0.2.1", port)  # TEST-NET-1: nobody's
    with pytest.raises(RunError, match="nowhere.invalid does not resolve"):
        serve("nowhere.invalid", port)


def test_a_master_that_is_not_reached(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "UNREACHABLE_SECONDS", 0.5)
    with pytest.raises(RunError, match="does not reach rank 0 at MASTER_ADDR=nowhere.invalid"):
        reach("nowhere.invalid", port, 60)
    with pytest.raises(RunError, match=f"MASTER_PORT={port}: .*refused"):
        reach("127.0.0.1", port, 0.5)


def listener(answer: bytes | None) -> socket.socket:
    """Return a server that sends `answer` and closes, or keeps connections and says nothing."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve_them() -> None:
        with contextlib.ExitStack() as kept:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.enter_context(connection)
                if answer is not None:
                    connection.recv(64)
                    connection.sendall(answer)
                    connection.close()

    threading.Thread(target=serve_them, daemon=True).start()
    return server


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request", b""])
def test_another_program_in_place_of_rank_0(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's client would wait for an answer without end."""
    monkeypatch.setattr(rendezvous, "UNREACHABLE_SECONDS", 0.5)
    with listener(answer) as server:
        port = server.getsockname()[1]
        with pytest.raises(RunError, match=f"MASTER_PORT={port}: what listens there is not rank 0"):
            reach("127.0.0.1", port, HANG_SECONDS)


def test_a_rank_says_that_it_waits_for_rank_0(
    port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: sum(passed), sleep=passed.append)
    monkeypatch.setattr(rendezvous, "time", clock)
    with pytest.raises(RunError, match="If rank 0 does not run, see its errors or start it"):
        reach("127.0.0.1", port, 60.0, "rank 7")
    assert capsys.readouterr().err.count("waiting: rank 7 waits up to 60 s for rank 0 at") == 1


def test_the_page_has_these_waits() -> None:
    guide = Path(__file__).parents[2] / "docs/guide"
    page = "".join((guide / name).read_text("utf-8") for name in ("slurm.md", "containers.md"))
    assert f"says so after {rendezvous.UNREACHABLE_SECONDS:.0f} s." in page
    assert page.count(f"after {rendezvous._NOTICE_SECONDS:.0f} s") == 2
    assert f"wait for each other ({rendezvous.JOIN_SECONDS:.0f})" in page


def test_rank_0_that_never_calls_all(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "UNREACHABLE_SECONDS", 0.2)
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    with pytest.raises(RunError, match="has reached rank 0 at here, .* See what rank 0 says"):
        await_all(store, 1, 2, "here", 0.2)


def test_the_own_address_of_rank_0_that_leads_to_another(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's own client gets no answer, as behind a forwarded port; it must not wait for ever."""
    monkeypatch.setattr(rendezvous, "UNREACHABLE_SECONDS", 0.5)
    with listener(None) as server, pytest.raises(RunError, match="is not rank 0 of a run"):
        rendezvous._store("127.0.0.1", server.getsockname()[1], is_master=False)


def test_ranks_that_do_not_come_are_named(port: int) -> None:
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    store.set("megafp8/here/1", "1")
    with pytest.raises(RunError, match="2 of 4 ranks have not come to here: 2, 3"):
        await_all(store, 0, 4, "here", 0.3)


def test_which_gpu() -> None:
    two = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert gpu_index(two, 2) == 1 and gpu_index({}, 1) == 0
    for name, value in {
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_GPU_BIND": "single:1",
        "SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=1",
        "SLURM_NTASKS_PER_GPU": "1",
    }.items():
        assert gpu_index(two | {name: value}, 1) == 0
    shared = {"SLURM_TRES_PER_TASK": "cpu=8", "SLURM_NTASKS_PER_GPU": "2"}
    with pytest.raises(RunError, match="2 ranks run on .*, which shows 1 GPU"):
        gpu_index(two | shared, 1)


def test_torchruns_restarts_over_hosts_are_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    one = {"RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    _warn_of_hosts_that_never_meet(one)
    _warn_of_hosts_that_never_meet(one | {"GROUP_WORLD_SIZE": "2", "RANK": "1"})
    assert not recwarn.list
    _warn_of_hosts_that_never_meet(one | {"GROUP_WORLD_SIZE": "2"})
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(recwarn.pop().message)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_nccl_gets_the_gpu_of_this_rank(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """So that it connects the ranks at once, where an error is told."""
    given: dict[str, object] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda name, **more: given.update(more))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    rendezvous._join(backend, dist.HashStore(), 3, 4)  # type: ignore[attr-defined]
    assert given["device_id"] == (torch.device("cuda", 3) if backend == "nccl" else None)


def test_the_same_ranks_join_again_for_the_next_job() -> None:
    """The store of torchrun still has the keys and addresses of the first job."""
    sums = [3.0, 3.0, 30.0, 30.0, 300.0, 300.0]
    work = rank_joins.join_again
    assert run_ranks(work, 2, {"times": 3}) == [sums, sums]


def addresses_of(port: int) -> set[str]:
    """Return the addresses on which this machine listens at a port, as Linux writes them."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if int(number, 16) == port and state == "0A":  # LISTEN
                found.add(address)
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_store_listens_where_it_is_needed(host: str, port: int) -> None:
    store = serve(host, port)
    assert addresses_of(port) and addresses_of(port) <= LOOPBACK
    del store


def test_the_address_to_listen_on(monkeypatch: pytest.MonkeyPatch) -> None:
    of: dict[str, list[str]] = {
        "node1": ["10.0.0.5"],
        "two": ["127.0.1.1", "10.0.0.5", "10.0.0.6"],
        "debian": ["127.0.1.1"],  # the others know this machine by another address
        "localhost": ["127.0.0.1"],
        "127.0.0.1": ["127.0.0.1"],
        "router": [],
    }
    monkeypatch.setattr(rendezvous, "_addresses_here", of.__getitem__)
    expected = {
        "node1": "10.0.0.5", "two": "10.0.0.5", "debian": "", "localhost": "127.0.0.1",
        "127.0.0.1": "127.0.0.1", "router": "",
    }  # fmt: skip
    assert {host: rendezvous._address(host) for host in of} == expected


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
def test_the_launchers_store_is_on_the_loopback_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of the launcher writes the port of the store, and where it listens."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib\n"
        "from tests.parallel.test_rendezvous import addresses_of\n"
        "found = sorted(addresses_of(int(os.environ['MASTER_PORT'])))\n"
        f"pathlib.Path({str(tmp_path)!r}, 'found').write_text(' '.join(found))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert launch([str(script)], [], 1) == 0
    assert (tmp_path / "found").read_text() == "0100007F"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11
def test_tensors_that_ranks_return_are_those_that_they_had() -> None:
    """Bits, dtypes, strides and kinds; one that is returned twice is one tensor."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    special = torch.tensor([math.nan, -0.0, math.inf])
    given = [x, x.T, x[:, :2], torch.tensor(3), torch.zeros(0, 2), special, x > 0, x.half(), x]
    given += [each.bfloat16() for each in (x, special, torch.tensor(0.5))]
    given += [torch.nn.Parameter(x.clone()), x.clone().requires_grad_(), x.to_sparse()]
    file = io.BytesIO()
    ResultPickler(file).dump(given)
    found = pickle.loads(file.getvalue())
    assert found[0] is found[8]
    for one, other in zip(found, given, strict=True):
        assert type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        assert one.requires_grad == other.requires_grad and one.layout == other.layout
        if one.layout == torch.strided:
            assert one.stride() == other.stride()
            bits = [each.detach().flatten().view(torch.uint8) for each in (one, other)]
            assert torch.equal(*bits)
