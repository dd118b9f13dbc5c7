"""Test what the job script of Slurm checks before it starts ranks; a stub stands for srun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

SCRIPT = ROOT / "examples" / "slurm" / "pretrain.sbatch"


def submit(folder: Path, cuda: str, *arguments: str, **more: str) -> tuple[int, str]:
    """Run the script with a torch of the given `cuda`; return its exit code, stdout and stderr."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "version.py").write_text(
        f"__version__ = '9.0'\ncuda = {cuda}\nhip = None\n"
    )
    srun = folder / "srun"
    srun.write_text('#!/bin/sh\necho "srun $*"\n')
    srun.chmod(0o755)
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node1",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(folder),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | job | more,
    )
    return done.returncode, done.stdout + done.stderr


def test_gpus_need_a_cuda_build(tmp_path: Path) -> None:
    code, output = submit(tmp_path, "None", SLURM_GPUS_ON_NODE="2")
    assert code == 2 and "srun" not in output
    error = "pretrain.sbatch: error: Slurm gave GPU(s) 2 to this job, and the installed PyTorch 9.0"
    assert output.startswith(f"{error} is a CPU build. Install a CUDA build")


@pytest.mark.parametrize(
    ("cuda", "arguments", "gpus"),
    [
        ("'13.0'", [], "2"),
        ("None", ["trainer.accelerator=cpu"], "2"),
        ("None", [], "0"),
    ],
)
def test_ranks_start(cuda: str, arguments: list[str], gpus: str, tmp_path: Path) -> None:
    code, output = submit(tmp_path, cuda, *arguments, SLURM_GPUS_ON_NODE=gpus)
    assert code == 0 and "srun --kill-on-bad-exit=1" in output, output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["model.fp8=True"], True),
        (["exp_manager.name=mine"], False),
        (["--config-dir", "there", "--config-name=mine"], False),
        (["-cn", "mine"], False),
    ],
)
def test_the_jobs_number_replaces_no_name_of_a_file(
    arguments: list[str], named: bool, tmp_path: Path
) -> None:
    """Jobs of one file continue one run, whichever number each of them has."""
    code, output = submit(tmp_path, "None", *arguments)
    assert code == 0 and ("exp_manager.name=slurm-1" in output) == named, output


def test_a_folder_gets_the_drivers_libraries_of_the_host(tmp_path: Path) -> None:
    """An image has none, and without them PyTorch finds no GPU."""
    library = tmp_path / "libcuda.so.580.1"
    library.touch()
    (tmp_path / "libcuda.so.1").symlink_to(library)
    listed = f"libcuda.so.1 (libc6,x86-64) => {tmp_path}/libcuda.so.1"
    other = f"libcudart.so.13 (libc6,x86-64) => {tmp_path}/libcudart.so.13"
    for name, script in (("ldconfig", f"echo '{listed}'; echo '{other}'"), ("bwrap", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    image = tmp_path / "image"
    (image / "usr").mkdir(parents=True)
    code, output = submit(tmp_path, "'13.0'", CONTAINER_IMAGE=str(image))
    assert code == 0, output
    assert f"--ro-bind {library} /driver/libcuda.so.1" in output and "cudart" not in output
    assert "--setenv LD_LIBRARY_PATH /driver" in output


def test_lines_of_the_script_are_short() -> None:
    comments = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#")]
    assert max(map(len, comments)) <= 110
