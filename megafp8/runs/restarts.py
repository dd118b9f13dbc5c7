"""Stop a job that is restarted again and again without progress, and say where it failed and how.

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
from megafp8.secrets import hide_values

RECORD = "restarts.json"
_NODE = re.compile(r"(?P<a>\S+): tasks? |\bon (?P<b>[\w.-]+)")
MAX_WITHOUT_PROGRESS = 3  # starts that begin at the same step


def most_without_progress(asked: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many starts in a row may begin at the same step.

    Slurm itself sets no limit, so that there it is the first start and `trainer.max_restarts` more,
    if that was `asked` for.
    """
    is_slurms = "SLURM_JOB_ID" in environment and LAUNCHER not in environment
    return asked + 1 if asked and is_slurms else MAX_WITHOUT_PROGRESS


def check_progress(
    run_dir: Path,
    step: int,
    environment: Mapping[str, str] = os.environ,
    most: int = MAX_WITHOUT_PROGRESS,
) -> str | None:
    """Count this start of the run, and return in words how the one before it ended, if one did.

    Call it before the metrics of later steps are dropped, since they show which step the last start
    reached.

    Args:
        run_dir: The run's directory.
        step: The step of the newest checkpoint, from which this start continues.
        environment: Where the starter's variables are.
        most: How many starts in a row may begin at the same step.

    Raises:
        RunError: This is one more; the message lists the starts, where they ran and how they ended.
    """
    job, restart = starter(environment)
    if job is None:
        (run_dir / RECORD).unlink(missing_ok=True)
        return None
    record = _record(run_dir) if restart > 0 else {}
    starts: list[dict[str, Any]] = list(record["starts"]) if record.get("job") == job else []
    before = None
    if starts:
        starts[-1]["reached"] = max(step, _last_logged(run_dir))
        starts[-1]["ended"] = hide_values(environment.get(LAST_END, "")) or None
        before = _in_words(starts[-1], record.get("step"))
        if record.get("step") != step:
            starts = []
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
    if len(starts) > most:
        raise RunError(_report(run_dir, step, starts))
    return None if before is None else f"restart {restart}: the start before it {before}"


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


def _place(start: Mapping[str, Any]) -> str:
    return str(start.get("nodes") or start.get("host") or "an unknown machine")


def _in_words(start: Mapping[str, Any], began: object) -> str:
    """Return where a start ran, from which step to which, and how it ended."""
    ended = f", and ended: {start['ended']}" if start.get("ended") else ""
    return f"on {_place(start)} began at step {began} and reached step {start['reached']}{ended}"


def failing_node(starts: list[dict[str, Any]]) -> str | None:
    """Return the node that each of the starts names as the one where it ended; None if not one."""
    named = [_NODE.search(str(start.get("ended", ""))) for start in starts]
    nodes = {found["a"] or found["b"] for found in named if found is not None}
    return nodes.pop() if len(nodes) == 1 and all(named) else None


def _report(run_dir: Path, step: int, starts: list[dict[str, Any]]) -> str:
    lines = [
        f"  {start.get('time')} on {_place(start)}: reached step {start.get('reached', step)}, "
        "saved none" + (f"; {start['ended']}" if start.get("ended") else "")
        for start in starts[:-1]
    ]
    places, node = {_place(start) for start in starts}, failing_node(starts[:-1])
    if node and node not in places:
        where = f"All of them ended on {node}. "
    else:
        where = f"All of them ran on {places.pop()}. " if len(places) == 1 else ""
    return (
        f"{run_dir}: {len(starts) - 1} restarts have begun at step {step}, and none reached "
        "its next checkpoint:\n" + "\n".join(lines) + f"\n{where}"
        "The log shows how each one ended. If time or memory ran out, use a longer time limit, "
        "more frequent checkpoints (exp_manager.checkpoint_callback_params.every_n_train_steps) or "
        f"other nodes (--exclude{f'={node}' if node else ''}). Submitting the job or running the "
        "command again begins a new count"
    )
