"""A program with the application's own command line, as a fork and as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.app import ROOT, SCRIPT, Shell
from tests.train.runs import Driver


@pytest.fixture
def shell(driver: Driver, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Return what runs the script in the test's folder, as a fork of a process with all imports."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "app.py"
        script.write_text(SCRIPT)
        output = tmp_path_factory.mktemp("output")
        return driver.run_python(str(script), *args, cwd=tmp_path, folder=output)

    return run


@pytest.fixture
def process(tmp_path: Path) -> Shell:
    """Return what runs the script in a process of its own, which looks for plugins again."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "app.py"
        script.write_text(SCRIPT)
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
        command = [sys.executable, str(script), *args]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    return run
