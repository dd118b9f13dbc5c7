"""A job that is started again and again without getting further is stopped.

Slurm, torchrun and our own launcher start jobs again and say how often they have.
`restarts.json` in the run's directory counts. A start that a person makes begins a new count.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megafp8.errors import RunError
from megafp8.files import read_json, write_json_atomically
from megafp8.observe.metrics import read_metrics
from megafp8.parallel.launch import LAUNCHER
from megafp8.parallel.slurm import restart_count

RECORD = "restarts.json"
MAX_WITHOUT_PROGRESS = 3


def check_progress(run_dir: Path, step: int, environment: Mapping[str, str] = os.environ) -> None:
    """Count this start of the run, which continues from `step`, the newest checkpoint's.

    Call it before the metrics of later steps are dropped: they say how far the last start got.

    Raises:
        RunError: It is the third restart in a row that begins at the same step; lists them.
    """
    job, restart = starter(environment)
    if job is None:
        (run_dir / RECORD).unlink(missing_ok=True)
        return
    record = _record(run_dir) if restart > 0 else {}
    same_job = record.get("job") == job
    starts: list[dict[str, Any]] = []
    if same_job and record.get("step") == step:
        starts = list(record.get("starts", []))
        if starts:
            starts[-1]["reached"] = max(step, _last_logged(run_dir))
    starts.append(
        {
            "restart": restart,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "nodes": environment.get("SLURM_JOB_NODELIST"),
        }
    )
    fields = {"job": job, "step": step, "starts": starts}
    write_json_atomically(run_dir / RECORD, fields)
    if len(starts) > MAX_WITHOUT_PROGRESS:
        raise RunError(_report(run_dir, step, starts))


def starter(environment: Mapping[str, str]) -> tuple[str | None, int]:
    """Return a name for the job that something starts again, and how often this has been done.

    The name is None where nothing would start the job again.
    """
    names, count = [], 0
    if "SLURM_JOB_ID" in environment:
        names.append(environment["SLURM_JOB_ID"])
        count += restart_count(environment)
    if environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":  # torchrun's, or our launcher's
        own = environment.get(LAUNCHER) or environment.get("TORCHELASTIC_RUN_ID", "")
        names.append(f"launcher {own}")
        count += int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return " ".join(names) or None, count


def _last_logged(run_dir: Path) -> int:
    try:
        lines = read_metrics(run_dir / "metrics.jsonl")
    except (OSError, ValueError):
        return 0
    return max((int(line.get("step", 0)) for line in lines), default=0)


def _record(run_dir: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = read_json(run_dir / RECORD)
    except RunError:  # not there, or half written by a foreign hand: begin a new count
        return {}
    starts = record.get("starts")
    well_formed = isinstance(starts, list) and all(isinstance(start, dict) for start in starts)
    return record if well_formed else {}


def _report(run_dir: Path, step: int, starts: list[dict[str, Any]]) -> str:
    lines = [
        f"  {start.get('time')} on {start.get('nodes') or start.get('host')}: "
        f"reached step {start.get('reached', step)}, saved none"
        for start in starts[:-1]
    ]
    return (
        f"{run_dir}: {MAX_WITHOUT_PROGRESS} restarts have begun at step {step} and none got to its "
        "next checkpoint:\n" + "\n".join(lines) + "\n"
        "The log says how each ended. If it is time or memory: a longer time limit, more "
        "frequent checkpoints (exp_manager.checkpoint_callback_params.every_n_train_steps), other "
        "nodes (--exclude). Submitting the job or giving the command again begins a new count"
    )
