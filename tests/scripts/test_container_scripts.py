"""The container's scripts say what is wrong, and count what passed, without a container."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from scripts.nightly import counted
from tests.ranks import ROOT

SCRIPTS = ROOT / "scripts" / "container"
PYTHON = """\
#!/usr/bin/env bash
# Stand in for Python inside the image: leave what a run and a sweep leave.
for word in "$@"; do
    case $word in
    exp_manager.explicit_log_dir=*)
        mkdir -p "${word#*=}" "$WANDB_DIR/offline-run-1"
        echo '{"status": "finished"}' >"${word#*=}/summary.json" ;;
    hydra.sweep.dir=*)
        for job in 0 1; do
            folder=${word#*=}/$job
            mkdir -p "$folder"
            [ "$job" -ge "$FINISHED" ] || echo '{"status": "finished"}' >"$folder/summary.json"
        done ;;
    esac
done
"""


def run(script: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPTS / script), *words],
        capture_output=True,
        text=True,
        env=os.environ | more,
    )


@pytest.mark.parametrize("has_base", [False, True])
def test_the_image_starts_in_its_folder_and_behind_the_bases_entrypoint(
    has_base: bool, tmp_path: Path
) -> None:
    """The script runs with folders of this machine in place of those of the image."""
    places = {"/workspace/megafp8": tmp_path, "/opt/nvidia": tmp_path / "nvidia"}
    text = (SCRIPTS / "entrypoint.sh").read_text()
    for place, here in places.items():
        assert place in text
        text = text.replace(place, str(here))
    programs = {tmp_path / "python3": 'echo "$PWD $*"'}
    if has_base:
        (tmp_path / "nvidia").mkdir()
        programs[tmp_path / "nvidia" / "nvidia_entrypoint.sh"] = 'echo NVIDIA; exec "$@"'
    for path, script in programs.items():
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", text, "entrypoint.sh", "a=1", "b=x y"],
        cwd="/",
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    expected = f"{tmp_path} pretrain_gpt.py a=1 b=x y\n"
    assert done.stdout == ("NVIDIA\n" if has_base else "") + expected


@pytest.mark.parametrize("words", [[], ["a", "b"]])
def test_unpack_without_a_folder_prints_its_usage(words: list[str], tmp_path: Path) -> None:
    done = run("unpack.sh", *words, STORE=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "container: error: usage: unpack.sh DIR\n"


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_the_sweep_in_the_image_counts_its_jobs(finished: int, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run("inside.sh", PATH=path, MEGAFP8_DIR=str(tmp_path), FINISHED=str(finished))
    result = counted(done.stdout, tmp_path / "no.xml", done.returncode, 1.0)
    if finished == 2:
        assert done.returncode == 0, done.stderr
        assert result.passed == 1
        twice = counted("5 passed in 1.00s\n" + done.stdout, tmp_path / "no.xml", 0, 1.0)
        assert twice.passed == 6
    else:
        assert done.returncode == 1
        assert f"container: error: {finished} of 2 jobs of the sweep finished" in done.stdout
