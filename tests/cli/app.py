"""The text of a program whose command line is the application's, and what runs it in a test."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """\
import sys
from megafp8.cli.main import run_app
from megafp8.config.resolve import resolve
from megafp8.errors import RunError

def task(loaded, info):
    spec = resolve(loaded.values, lambda: False)
    job = f"job={info.job_num} dir={info.directory} log_dir={spec.observe.explicit_log_dir}"
    print(f"fp8={spec.precision.fp8 is not None} {job} sweep={info.is_sweep}")
    assert spec.model.num_layers != 99, "a bug"
    if spec.model.num_layers == 95:
        return 2
    if spec.model.num_layers in (96, 97):
        if spec.model.num_layers == 97:
            (info.directory / "config.yaml.new").write_text("model: {num_layers: 97}")
            (info.directory / "config.yaml.new").replace(info.directory / "config.yaml")
        raise RunError("no disk" if spec.model.num_layers == 97 else "a run of other settings")
    return {1: 0, 2: 3, 3: 75}.get(spec.model.num_layers, 0)

sys.exit(run_app(sys.argv[1:], task))
"""
Shell = Callable[..., subprocess.CompletedProcess[str]]
