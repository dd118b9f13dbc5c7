"""Stop a job that is restarted again and again without progress.

Slurm, torchrun and megafp8's launcher restart jobs and say how often they have. `restarts.json` in
the run's directory counts restarts. A start by a user begins a new count.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megafp8.errors import RunError
from megafp8.files import read_json_object, write_json_atomically
from megafp8.observe.metrics import read_metrics
from megafp8.parallel.ends import LAST_END
from megafp8.parallel.launch import LAUNCHER
from megafp8.parallel.slurm import restart_count

RECORD = "restarts.json"
MAX_WITHOUT_PROGRESS = 3
_NODE = re.compile(r"(?P<a>\S+): tasks? |\bon (?P<b>\S+) ")


def check_progress(
    run_dir: Path,
    step: int,
    environment: Mapping[str, str] = os.environ,
    *,
    max_restarts: int = 0,
) -> list[str]:
    """Count this start of the run, which continues from `step`, that of the newest checkpoint.

    Call it before the metrics of later steps are dropped, since they show which step the last start
    reached.

    Args:
        run_dir: The run's directory.
        step: The step of the newest checkpoint, or 0.
        environment: Says who has started the run, and how the start before ended.
        max_restarts: `trainer.max_restarts`. On Slurm, as many restarts without progress end the
            run; our own launcher counts all of them by itself.

    Returns:
        A line for each start before this one at the same step.

    Raises:
        RunError: This is one consecutive restart at the same step too many; the message lists them,
            and names the node on which all of them ended, if it is one.
    """
    job, restart = starter(environment)
    if job is None:
        (run_dir / RECORD).unlink(missing_ok=True)
        return []
    record = _record(run_dir) if restart > 0 else {}
    same_job = record.get("job") == job
    starts: list[dict[str, Any]] = []
    if same_job and record.get("step") == step:
        starts = list(record.get("starts", []))
        if starts:
            starts[-1]["reached"] = max(step, _last_logged(run_dir))
            if why := environment.get(LAST_END):
                starts[-1]["ended"] = why
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
    limit = (max_restarts if "SLURM_JOB_ID" in environment else 0) or MAX_WITHOUT_PROGRESS
    if len(starts) > limit:
        raise RunError(_report(run_dir, step, starts))
    return _lines(step, starts)


def starter(environment: Mapping[str, str]) -> tuple[str | None, int]:
    """Return a name for the job and the number of its restarts, by whatever restarts it.

    The name is None if nothing would restart the job.
    """
    names, count = [], 0
    if "SLURM_JOB_ID" in environment:
        names.append(environment["SLURM_JOB_ID"])
        count += restart_count(environment)
    if environment.get("TORCHELASTIC_MAX_RESTARTS", "0") not in (
        "",
        "0",
    ):  # set by torchrun or by megafp8's launcher
        own = environment.get(LAUNCHER) or environment.get("TORCHELASTIC_RUN_ID", "")
        names.append(f"launcher {own}")
        count += int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0)
    return " ".join(names) or None, count


def _last_logged(run_dir: Path) -> int:
    try:
        lines = read_metrics(run_dir / "metrics.jsonl")
    except (OSError, ValueError):
        return 0
    steps = (line.get("step", 0) for line in lines)
    return max((int(step) for step in steps if math.isfinite(step)), default=0)


def _record(run_dir: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = read_json_object(run_dir / RECORD)
    except RunError:  # the file is missing or damaged: begin a new count
        return {}
    starts = record.get("starts")
    well_formed = isinstance(starts, list) and all(isinstance(start, dict) for start in starts)
    return record if well_formed else {}


def _lines(step: int, starts: list[dict[str, Any]]) -> list[str]:
    """Return a line for each start but the last one."""
    return [
        f"{start.get('time')} on {start.get('nodes') or start.get('host')}: "
        f"reached step {start.get('reached', step)}, saved none"
        + (f"; ended: {start['ended']}" if start.get("ended") else "")
        for start in starts[:-1]
    ]


def failing_node(starts: list[dict[str, Any]]) -> str | None:
    """Return the node that each of the starts names as the one where it ended; None if not one."""
    named = [_NODE.search(str(start.get("ended", ""))) for start in starts]
    nodes = {found["a"] or found["b"] for found in named if found is not None}
    return nodes.pop() if len(nodes) == 1 and all(named) else None


def _report(run_dir: Path, step: int, starts: list[dict[str, Any]]) -> str:
    count, lines = len(starts) - 1, "\n".join(f"  {line}" for line in _lines(step, starts))
    node = failing_node(starts[:-1])
    exclude = "other nodes (--exclude)" if node is None else f"other nodes (--exclude={node})"
    all_there = "" if node is None else f"All of them ended on {node}. "
    return (
        f"{run_dir}: {count} restarts have begun at step {step}, and none reached "
        f"its next checkpoint:\n{lines}\n{all_there}"
        "The log shows how each one ended. If time or memory ran out, use a longer time limit, "
        "more frequent checkpoints (exp_manager.checkpoint_callback_params.every_n_train_steps) or "
        f"{exclude}. Submitting the job or running the command again begins a new count"
    )
