"""Test which build of torch the set-up installs; no package is downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.ops.torch_build import driver_version, why_no_gpu
from scripts.packages import packages
from tests.ranks import ROOT

PYTHON = """\
#!/usr/bin/env bash
# Stand in for Python: note what pip is asked for, and have the torch that it would have installed.
case "$1 $2" in
"-m venv") mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
"-m pip")
    shift 2
    echo "$*" >>"$FOLDER/pip"
    echo "${PIP_CONSTRAINT-}" >>"$FOLDER/constraints"
    case $* in
    uninstall*torch) rm "$FOLDER/torch" ;;
    *torch==*+cpu) echo cpu >"$FOLDER/torch" ;;
    *torch[=\\>]*) echo "${GIVES:-cuda}" >"$FOLDER/torch" ;;
    esac ;;
"-m megafp8"*) ;;
"- ")
    script=$(cat)
    case $script in
    *find_spec*) cat "$FOLDER/torch" ;;
    *'version("torch")'*) [ -e "$FOLDER/torch" ] ;;
    *"import pip"*) ;;
    *) "$REAL" - <<<"$script" ;;
    esac ;;
*) exec "$REAL" "$@" ;;
esac
"""
RANGE = "install torch>=2.11,<2.16"
CPU = "install torch==2.13.0+cpu"


def set_up(
    folder: Path, *arguments: str, **more: str
) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """Run the set-up, and return what it asked pip for about torch, in this call alone."""
    python, calls = folder / "python", folder / "pip"
    python.write_text(PYTHON)
    python.chmod(0o755)
    calls.write_text("")
    own = {"PYTHON": str(python), "VENV": str(folder / "venv"), "FOLDER": str(folder)}
    unset = {"TORCH_PIN": "", "TORCH_BUILD": "", "REAL": sys.executable}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup_env.sh"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | unset | own | more,
    )
    return [line for line in calls.read_text().splitlines() if "torch" in line], done


@pytest.fixture
def gpu(tmp_path: Path) -> str:
    """Return a PATH with an nvidia-smi that lists a GPU."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho GPU 0\n")
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


def test_a_machine_with_a_gpu_gets_a_cuda_build_unless_asked(tmp_path: Path, gpu: str) -> None:
    asked, done = set_up(tmp_path, PATH=gpu)
    assert (asked, done.returncode) == ([RANGE], 0), done.stderr
    asked, done = set_up(tmp_path, PATH=gpu, TORCH_BUILD="cpu")
    assert (asked, done.returncode) == ([CPU], 0), done.stderr


@pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists(), reason="this machine has an NVIDIA GPU"
)
def test_a_login_node_gets_a_cuda_build_if_asked(tmp_path: Path) -> None:
    asked, done = set_up(tmp_path)
    assert asked == [CPU] and "TORCH_BUILD=cuda installs a CUDA build" in done.stdout, done.stderr
    asked, done = set_up(tmp_path, TORCH_BUILD="cuda")
    assert asked == ["uninstall --yes torch", RANGE] and done.returncode == 0, done.stderr
    for build in ("cuda", "auto"):  # what is installed is kept
        asked, done = set_up(tmp_path, TORCH_BUILD=build)
        assert (asked, done.returncode) == ([], 0), done.stderr


def test_the_version_of_a_cuda_build_can_be_chosen(tmp_path: Path) -> None:
    venv = str(tmp_path / "build" / "torch-2.11")  # in a folder that is not there yet
    asked, done = set_up(tmp_path, TORCH_BUILD="cuda", TORCH_PIN="2.11.0", VENV=venv)
    assert (asked, done.returncode) == (["install torch==2.11.0"], 0), done.stderr


def test_an_index_without_cuda_builds_is_reported(tmp_path: Path) -> None:
    _, done = set_up(tmp_path, TORCH_BUILD="cuda", GIVES="cpu")
    assert done.returncode == 1 and "the package index gave a CPU build" in done.stderr


def test_an_images_own_constraints_exclude_nothing_that_is_needed(tmp_path: Path) -> None:
    """NVIDIA's images pin what they have by this variable, which pip and its builds read."""
    _, done = set_up(tmp_path, "--in-place", PIP_CONSTRAINT="/etc/pip/constraint.txt")
    assert done.returncode == 0, done.stderr
    assert set((tmp_path / "constraints").read_text().split("\n")) == {""}
    assert "PIP_CONSTRAINT=/etc/pip/constraint.txt" in done.stdout


def test_a_wrong_build_is_refused(tmp_path: Path) -> None:
    asked, done = set_up(tmp_path, TORCH_BUILD="gpu")
    assert (asked, done.returncode) == ([], 2)
    assert done.stderr == "setup: error: TORCH_BUILD=gpu: it is auto, cpu or cuda\n"


@pytest.mark.parametrize(
    ("cuda", "hip", "said"),
    [
        ("None", "None", "the installed PyTorch 9.0 is a CPU build"),
        ("'13.0'", "None", None),
        ("None", "'7.0'", None),
    ],
)
def test_a_cpu_build_is_recognized(cuda: str, hip: str, said: str | None, tmp_path: Path) -> None:
    version = tmp_path / "version.py"
    version.write_text(f"__version__ = '9.0'\ncuda = {cuda}\nhip = {hip}\n")
    found = why_no_gpu(version, tmp_path / "no driver")
    assert (None if found is None else found.reason) == said
    assert why_no_gpu(tmp_path / "none.py") is None


@pytest.mark.parametrize(
    ("cuda", "driver", "is_too_old"),
    [
        ("13.0", "550.54.15", True),
        ("13.0", "580.65.06", False),
        ("12.8", "550.54.15", False),
        ("12.8", "470.82.01", True),
    ],
)
def test_a_driver_that_is_too_old_is_named(
    cuda: str, driver: str, is_too_old: bool, tmp_path: Path
) -> None:
    version, file = tmp_path / "version.py", tmp_path / "driver"
    version.write_text(f"__version__ = '9.0+cu'\ncuda = '{cuda}'\nhip = None\n")
    file.write_text(
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Thu Jan 1 00:00:00 UTC 2026\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    assert driver_version(file) == driver
    found = why_no_gpu(version, file)
    assert (found is not None) == is_too_old
    if found is not None:
        assert driver in found.reason and f"CUDA {cuda}" in found.reason


def test_transformer_engine_is_built_against_the_torch_that_is_there() -> None:
    """Each line that names its extra `pytorch` has the flag; without it pip takes another torch."""
    texts = {
        path: path.read_text("utf-8")
        for pattern in (
            *("*.md", "docs/**/*.md", "pyproject.toml", "scripts/*.sh"),
            *(f"{name}/**/*.{kind}" for name in packages() for kind in ("md", "py", "toml")),
        )
        for path in ROOT.glob(pattern)
        if path.name != "CHANGELOG.md"
    }
    lines = [
        f"{path.relative_to(ROOT)}: {line}"
        for path, text in texts.items()
        for line in text.splitlines()
        if "transformer-engine[" in line
    ]
    assert len(lines) >= 4
    assert [line for line in lines if "--no-build-isolation" not in line] == []
