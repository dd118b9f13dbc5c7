"""A job whose ranks run in the unpacked image, without root's help: `make test-slurm-container`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.slurm.jobs import STEPS, Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
FOLDER = "MEGAFP8_IMAGE_FOLDER"
OF_IMAGE = "/usr/bin/python3"  # on the host this interpreter has no torch (test_bad_input.py)


@pytest.fixture
def inside(cluster: Cluster) -> Mapping[str, str]:
    """Return the variables with which the job script runs its ranks in the image."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        pytest.skip(f"{FOLDER} names no unpacked image: make test-slurm-container")
    assert (Path(folder) / "workspace/megafp8/pretrain_gpt.py").is_file(), folder
    return {
        "CONTAINER_IMAGE": folder,
        "CONTAINER_MOUNTS": str(cluster.folder),
        "MEGAFP8_DIR": "/workspace/megafp8",
        "PYTHON": OF_IMAGE,
        "PYTHONPATH": "",
    }


def test_a_job_in_the_image_is_preempted_requeued_and_continues(
    cluster: Cluster, undisturbed: list[list[tuple[str, str]]], inside: Mapping[str, str]
) -> None:
    """The losses are those of an undisturbed job outside the image, bit for bit."""
    job = cluster.submit("contained", environment=inside)
    job.until(lambda: job.last_step() >= 2, "step 2", 300)
    assert job.last_step() < STEPS, "too late"
    cluster.run(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive",
        "--output=/dev/null", "--wrap=sleep 1",
    )  # fmt: skip
    job.until(lambda: job.restarts == 1, "the restart")
    saved = job.last_step()
    assert "saved on SIGTERM" in job.log, job.log
    assert job.wait(400) == "COMPLETED", job.log
    assert f"continuing after step {saved} of {STEPS}" in job.log
    assert job.metrics() == undisturbed
    assert json.loads((job.dir / "run.json").read_text())["status"] == "finished"
    assert not job.pids_of_ranks()
