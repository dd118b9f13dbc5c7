"""Start a real Slurm of two nodes once, only for `make test-slurm`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.asked import asked_for
from tests.slurm.jobs import ROOT, Cluster
from tests.train.runs import make_dataset

PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "bwrap")
PACKAGES = "slurmctld slurmd slurm-client munge iproute2 bubblewrap"
UP, DOWN = (ROOT / "scripts/slurm" / f"test_cluster_{way}.sh" for way in ("up", "down"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of_slurm = [item for item in items if item.get_closest_marker("slurm")]
    if of_slurm and asked_for("slurm", config.option.markexpr):
        refuse_without_programs()
        return
    for item in of_slurm:
        item.add_marker(pytest.mark.skip(reason="starts a real Slurm: make test-slurm"))


def refuse_without_programs() -> None:
    """End pytest with the packages to install if a program of Slurm's is missing."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        raise pytest.UsageError(
            f"the tests of Slurm were asked for, and {', '.join(missing)} cannot be found. On "
            f"Debian: apt-get install --no-install-recommends {PACKAGES}"
        )


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    subprocess.run([UP, folder / "cluster", "2", "2", "2"], check=True, timeout=60)
    try:
        yield Cluster(folder, make_dataset(folder / "tiny"))
    finally:
        subprocess.run([DOWN, folder / "cluster"], check=False, timeout=60)


@pytest.fixture(autouse=True)
def no_jobs_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel the jobs that a failed test has left."""
    yield
    if "cluster" in request.fixturenames:
        cluster: Cluster = request.getfixturevalue("cluster")
        if numbers := cluster.run("squeue", "--noheader", "--format=%A").split():
            cluster.run("scancel", *numbers)


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster) -> list[list[tuple[str, str]]]:
    """Return the metrics of a job that is not disturbed."""
    job = cluster.submit("undisturbed")
    assert job.wait(180) == "COMPLETED", job.log
    assert "4 ranks on cpu, tensor parallel 2" in job.log
    return job.metrics()
