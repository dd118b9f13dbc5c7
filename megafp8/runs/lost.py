"""Say what a run that continues has lost: checkpoints that it had saved, and parts of its logs.

After each save, `run.json` notes the step and the sizes of the logs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from megafp8.checkpoint.step_directories import step_of, steps, were_set_aside
from megafp8.errors import RunError
from megafp8.files import read_json_object, write_json_atomically
from megafp8.observe.experts import EXPERTS_FILE
from megafp8.observe.health import HEALTH_FILE
from megafp8.observe.journal import CONSOLE_FILE, EVENTS_FILE, SAMPLES_FILE
from megafp8.observe.metrics import read_metrics
from megafp8.runs.find import CHECKPOINTS_DIR, METRICS_NAME, RECORD_NAME, SUMMARY_NAME

SAVES = "saves"  # the key of run.json
_OF_STEPS = (METRICS_NAME, HEALTH_FILE, EXPERTS_FILE)  # a run that continues drops later lines
_LOGS = (*_OF_STEPS, EVENTS_FILE, SAMPLES_FILE, CONSOLE_FILE)
_GAPS_NAMED = 4
Sizes = Mapping[str, int]


def log_sizes(run_dir: Path) -> dict[str, int]:
    """Return the bytes of each log of a run that there is."""
    return {name: (run_dir / name).stat().st_size for name in _LOGS if (run_dir / name).is_file()}


def saves(run_dir: Path) -> dict[int, Sizes]:
    """Return the steps of the newest checkpoints of a run, with the sizes of its logs then."""
    try:
        noted = read_json_object(run_dir / RECORD_NAME).get(SAVES)
    except RunError:  # the record is missing or damaged
        return {}
    return {
        int(step): {name: size for name, size in sizes.items() if type(size) is int}
        for step, sizes in (noted if isinstance(noted, dict) else {}).items()
        if step.isascii() and step.isdigit() and isinstance(sizes, dict)
    }


def note_save(run_dir: Path, step: int, sizes: Sizes) -> None:
    """Note a checkpoint that was saved, and forget those that are not there any more.

    On a disk that is full only the note is lost.
    """
    there = steps(run_dir / CHECKPOINTS_DIR)
    kept = {str(saved): was for saved, was in saves(run_dir).items() if saved in there}
    with suppress(OSError, RunError):
        record = read_json_object(run_dir / RECORD_NAME)
        noted = {**record, SAVES: {**kept, str(step): sizes}}
        write_json_atomically(run_dir / RECORD_NAME, noted)


def newest_saved(run_dir: Path) -> int:
    """Return the step of the newest checkpoint that a run has saved, as it says itself, or -1."""
    try:
        named = str(read_json_object(run_dir / SUMMARY_NAME).get("checkpoint") or "")
    except RunError:
        named = ""
    of_summary = step_of(Path(named).name)
    return max(*saves(run_dir), -1 if of_summary is None else of_summary, -1)


def lost_checkpoint(run_dir: Path) -> str | None:
    """Return in words that newer checkpoints than those there have been saved, or None.

    One that was found damaged, and is still there under another name, is not lost.

    Raises:
        RunError: None is left: the run would begin again and drop the logs of all its steps.
    """
    root, saved = run_dir / CHECKPOINTS_DIR, newest_saved(run_dir)
    there = steps(root)
    if max(there, default=-1) >= saved or were_set_aside(root):
        return None
    gone = f"the checkpoint of step {saved}, which this run has saved, is gone"
    if there:
        return f"{gone}; the newest that is left is that of step {there[-1]}"
    raise RunError(
        f"{root}: {gone}, and no other is left. Put a checkpoint back there, or train again from "
        f"the start under another name; {run_dir} was not changed"
    )


def cut_logs(
    run_dir: Path, known: Mapping[int, Sizes], at_start: Sizes, step: int
) -> Iterator[str]:
    """Yield a line for each log that has less than when the run saved the step it continues at.

    Args:
        run_dir: The run's directory; the logs of steps have no line of a later step any more.
        known: What `saves` returned when the process began.
        at_start: What `log_sizes` returned then, before anything was appended.
        step: The step of the checkpoint from which the run continues.
    """
    saved = max((one for one in known if one <= step), default=None)
    if saved is None:  # by an earlier version
        return
    now = log_sizes(run_dir)
    for name, size in known[saved].items():
        left = (now if name in _OF_STEPS else at_start).get(name, 0)
        if left < size:
            gaps = _gaps(run_dir / name, saved) if name in _OF_STEPS else ""
            yield (
                f"{run_dir / name}: {size - left} bytes are missing that were there when step "
                f"{saved} was saved{gaps}"
            )


def _gaps(path: Path, last: int) -> str:
    """Return in words which steps up to `last` a log of steps does not have."""
    try:
        lines = read_metrics(path)
    except (OSError, ValueError):
        lines = []
    logged = sorted({int(line["step"]) for line in lines if line.get("step", last + 1) <= last})
    if not logged:
        return f"; there is no line of a step up to {last}"
    pairs = list(zip(logged, logged[1:], strict=False))
    usual = statistics.mode(after - before for before, after in pairs) if pairs else 1
    gaps = [pair for pair in pairs if pair[1] - pair[0] > usual]
    if logged[-1] + usual <= last:
        gaps.append((logged[-1], last + 1))
    named = ", ".join(f"between steps {one} and {other}" for one, other in gaps[:_GAPS_NAMED])
    more = ", …" if len(gaps) > _GAPS_NAMED else ""
    return f"; there is no line {named}{more}" if gaps else ""
