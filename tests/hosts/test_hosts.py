"""torchrun over two hosts with addresses of their own; one of them is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.hosts.conftest import Host
from tests.train.runs import ENVIRONMENT, ROOT, STEPS, Place, wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1500)]
SCRIPT = str(ROOT / "pretrain_gpt.py")
HANG = 45  # seconds without a sign of life; the first step is slow


def start(host: Host, place: Place, hosts: list[Host]) -> subprocess.Popen[bytes]:
    """This host's part of a job of one rank on each."""
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={len(hosts)}", "--nproc_per_node=1", "--max-restarts=0"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:29400", "--rdzv-id=test"),
        f"--local-addr={host.address}",
        f"--rdzv-conf=is_host={host is hosts[0]}",  # else it looks its own name up
        SCRIPT,
        *place.argv(
            f"trainer.num_nodes={len(hosts)}",
            "model.tensor_model_parallel_size=2",
            f"trainer.step_timeout={HANG}",
        ),
    ]
    with open(place.cwd / f"{host.name}.txt", "wb") as output:
        return subprocess.Popen(
            host.command(*torchrun),
            cwd=place.cwd,
            env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def losses(place: Place) -> list[float]:
    return [line["loss"] for line in place.metrics() if "loss" in line]


def test_one_of_two_hosts_is_lost(hosts: list[Host], place: Place, undisturbed: tuple) -> None:
    """The other learns of it by itself and leaves; alone, without tensor parallelism, it goes on
    from the last checkpoint. One rank's losses are the reference: within FP8's bound throughout."""
    jobs = [start(host, place, hosts) for host in hosts]
    log = place.cwd / f"{hosts[0].name}.txt"
    wait_until(lambda: place.last_step() >= 5 or jobs[0].poll() is not None, "step 5 on two")
    assert jobs[0].poll() is None, log.read_text()
    assert all(len(host.pids()) >= 2 for host in hosts), "an agent and a rank on each"
    hosts[1].lose()
    wait_until(lambda: jobs[0].poll() is not None, "the end on the first host")
    jobs[1].wait(30)
    assert jobs[0].returncode != 0
    text = log.read_text()
    assert "rank 1 hangs" in text or "Connection closed" in text or "reset by peer" in text, text
    assert not hosts[0].pids() and not hosts[1].pids(), "no orphans"
    reached = max(place.steps())
    assert 4 <= reached < STEPS

    alone = subprocess.run(
        hosts[0].command(sys.executable, SCRIPT, *place.argv()),
        cwd=place.cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert f"step_{reached:08d}" in alone.stdout and place.steps()[-1] == STEPS
    assert losses(place) == pytest.approx(losses(undisturbed[0]), rel=5e-3)
    assert len(losses(place)) == STEPS
