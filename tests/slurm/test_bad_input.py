"""Errors of a job are reported once, soon, by rank 0, and no rank stays."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from datetime import datetime

import pytest

from tests.slurm.jobs import ROOT, WAYS, Cluster, Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]


def error_of(job: Job) -> str:
    """Return the one error line of a job."""
    assert job.wait(90) == "FAILED", job.log
    assert job.restarts == 0 and not job.pids_of_ranks()
    began, ended = (datetime.fromisoformat(job.field(f"{which}Time")) for which in ("Start", "End"))
    assert (ended - began).total_seconds() < 30, job.log
    lines = [line for line in job.log.splitlines() if "error: " in line]
    lines = [line for line in lines if not line.startswith(("srun: ", "slurmstepd-"))]
    lines = [line for line in lines if "slurmstepd" not in line]
    assert len(lines) == 1, job.log
    assert "Traceback" not in job.log
    return lines[0]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"CONTAINER_MOUNTS": "/data"}, "CONTAINER_MOUNTS=/data without CONTAINER_IMAGE"),
        ({"CONTAINER_IMAGE": "/no/such.sqsh"}, "CONTAINER_IMAGE=/no/such.sqsh: no such file"),
        ({"CONTAINER_IMAGE": "nvcr.io/x"}, "this Slurm has no pyxis"),
        ({"PYTHON": "/usr/bin/python3"}, "/usr/bin/python3 has no torch here: set CONTAINER_IMAGE"),
        ({"MEGAFP8_DIR": "/tmp"}, "/tmp has no pretrain_gpt.py"),
        ({"LAUNCHER": "mpirun"}, "LAUNCHER=mpirun: it is srun or torchrun"),
    ],
)
def test_the_script_says_it(cluster: Cluster, environment: dict[str, str], said: str) -> None:
    if "PYTHON" in environment:
        environment = environment | {"PYTHONPATH": ""}
    job = cluster.submit("bad", environment=environment)
    line = error_of(job)
    assert line.startswith("pretrain.sbatch: error: ") and said in line


def test_gpus_that_are_not_there(cluster: Cluster) -> None:
    """The run asks for GPUs, the job does not. The script is not used: it takes whole nodes."""
    began = time.monotonic()
    done = subprocess.run(
        ["srun", "--nodes=1", "--ntasks=2", "--kill-on-bad-exit=1", "--label", sys.executable]
        + [str(ROOT / "pretrain_gpt.py"), *cluster.argv("bad", "trainer.accelerator=gpu")]
        + ["trainer.devices=2"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode != 0 and time.monotonic() - began < 30
    lines = [line for line in done.stderr.splitlines() if re.match(r"\d: error: ", line)]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("0: error: trainer.accelerator=gpu: PyTorch finds no GPU")


def test_gpus_that_slurm_gave_and_torch_does_not_see(cluster: Cluster) -> None:
    job = cluster.submit("bad", "trainer.accelerator=auto", sbatch=("--gpus-per-node=2",))
    line = error_of(job)
    assert line.startswith(
        "pretrain.sbatch: error: Slurm gave GPU(s) 0,1 to this job, and the inst"
    )


def test_another_number_of_ranks(cluster: Cluster) -> None:
    line = error_of(cluster.submit("bad", "trainer.devices=4"))
    assert line.startswith("0: error: trainer.devices=4: with trainer.num_nodes=2 the layout has 8")
    assert "but 4 were started" in line


@pytest.mark.parametrize("way", WAYS)
def test_a_refused_setting_is_one_line(cluster: Cluster, way: str) -> None:
    job = cluster.submit("bad", "trainer.max_stepz=3", environment=cluster.start_with(way))
    assert "trainer.max_stepz" in error_of(job)
    assert job.field("ExitCode") == "2:0" and len(job.log.splitlines()) < 20, job.log


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_is_not_finite(cluster: Cluster, way: str) -> None:
    more = ["model.optim.lr=1e4", "trainer.gradient_clip_val=0", "trainer.max_restarts=2"]
    job = cluster.submit(f"infinite {way}", *more, environment=cluster.start_with(way))
    assert job.wait(90) == "FAILED" and job.field("ExitCode") == "3:0", job.log
    assert job.restarts == 0, "another start would come to the same"


def test_a_port_in_use(cluster: Cluster) -> None:
    port = "24999"
    server = (
        "import socket, time; s = socket.create_server(('', %s)); print(flush=True); time.sleep(99)"
    )
    holder = subprocess.Popen(
        ["nsenter", "--net=/run/netns/megafp8-node1", sys.executable, "-c", server % port],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        line = error_of(cluster.submit("bad", environment={"MASTER_PORT": port}))
    finally:
        holder.kill()
        holder.communicate()
    assert "MASTER_ADDR=node1 MASTER_PORT=24999: rank 0 cannot listen there on node1" in line
    assert line.startswith("0: error: ")


@pytest.mark.parametrize("host", ["10.88.0.99", "nowhere.invalid"])
def test_a_master_that_is_not_there(cluster: Cluster, host: str) -> None:
    line = error_of(cluster.submit("bad", environment={"MASTER_ADDR": host}))
    assert line.startswith(f"0: error: MASTER_ADDR={host} MASTER_PORT=")


def test_several_nodes_without_srun(cluster: Cluster) -> None:
    """The batch shell has SLURM_NTASKS=4 and SLURM_PROCID=0, but is not a rank."""
    command = f"cd {cluster.environment['MEGAFP8_DIR']}; {sys.executable} pretrain_gpt.py "
    log = cluster.folder / "logs" / "bare.out"
    options = ["--nodes=2", "--ntasks-per-node=2", "--wait", f"--output={log}"]
    more = ("trainer.num_nodes=2", "trainer.devices=2")
    words = " ".join(cluster.argv("bare", *more))
    with pytest.raises(AssertionError):
        cluster.run("sbatch", *options, f"--wrap={command}{words}")
    assert log.read_text().startswith("error: trainer.num_nodes=2: one command starts ranks on its")
