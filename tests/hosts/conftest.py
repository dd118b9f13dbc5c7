"""Two hosts with addresses of their own, made once; only where asked for (`make test-hosts`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.asked import asked_for
from tests.train.conftest import dataset, place, undisturbed
from tests.train.runs import ROOT

__all__ = ["dataset", "place", "undisturbed"]  # fixtures that are used here too

NETWORK = [str(ROOT / "scripts/test_network.sh")]
WHERE = ["mfp8br1", "10.89.0", "mfp8-host", "2"]


@dataclass(frozen=True)
class Host:
    """A network namespace; what runs there has its own address and host name."""

    number: int

    @property
    def name(self) -> str:
        return f"{WHERE[2]}{self.number}"

    @property
    def address(self) -> str:
        return f"{WHERE[1]}.{10 + self.number}"

    def command(self, *words: str) -> list[str]:
        enter = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "sh", "-c"]
        return [*enter, f'hostname {self.name} && exec "$0" "$@"', *words]

    def pids(self) -> list[int]:
        done = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        return [int(word) for word in done.stdout.split()]

    def lose(self) -> None:
        """Nobody hears of it again: first its network goes, then all that runs there."""
        subprocess.run(["ip", "-n", self.name, "link", "set", "eth0", "down"], check=True)
        for pid in self.pids():
            os.kill(pid, 9)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of_hosts = [item for item in items if item.get_closest_marker("hosts")]
    if of_hosts and asked_for("hosts", config.option.markexpr):
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"):
            raise pytest.UsageError(
                "the tests of two hosts were asked for, and need root, ip and nsenter. On Debian: "
                "apt-get install iproute2 util-linux"
            )
        return
    for item in of_hosts:
        item.add_marker(pytest.mark.skip(reason="makes network namespaces: make test-hosts"))


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    subprocess.run([*NETWORK, "up", *WHERE], check=True, timeout=30)
    made = [Host(1), Host(2)]
    try:
        yield made
    finally:
        for host in made:
            for pid in host.pids():
                os.kill(pid, 9)
        subprocess.run([*NETWORK, "down", *WHERE], check=False, timeout=30)
