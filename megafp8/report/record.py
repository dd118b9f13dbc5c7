"""Read what a run has left in its directory, as far as it can be read.

A file that is missing or damaged costs only what it holds: the problem is named, and the rest is
read. Nothing here imports torch, so that a report is made in a moment.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from megafp8.errors import RunError
from megafp8.foreign import (
    MAX_LINES_BYTES,
    ForeignFileError,
    parse_json,
    parse_yaml,
    read_bytes,
    read_json,
    read_yaml_text,
)
from megafp8.observe.experts import EXPERTS_FILE
from megafp8.observe.health import HEALTH_FILE, NO_RECORD, HealthRecord, record_of
from megafp8.observe.journal import CONSOLE_FILE, EVENTS_FILE, SAMPLES_FILE
from megafp8.runs.find import (
    CHECKPOINTS_DIR,
    CONFIG_NAME,
    ENDED,
    METRICS_NAME,
    RECORD_NAME,
    SUMMARY_NAME,
    is_run,
)
from megafp8.runs.lock import is_locked

MOST_STEPS = 120  # whose FP8 health and experts' tokens are read, evenly spread over the run
TAIL_LINES = 15  # of console.log, shown for a run that failed
MAX_STEP = 2**53
LARGE = 1e100  # a larger number is shown as infinity, so that no mean or square overflows
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Hold what a run has left behind.

    Attributes:
        path: The run's directory.
        status: One word: finished, diverged, running, failed, stopped or unfinished.
        problems: What could not be read, each as a sentence with the file's name.
        config: The resolved configuration, as dotted keys.
        config_text: The same as it is written in config.yaml.
        changed: The settings that are not the default job's: key, value, origin, default.
        metrics: The lines of logged steps, in the order of their steps.
        validations: The lines of validations.
        health: Lines of health.jsonl, at most `MOST_STEPS`.
        experts: Lines of experts.jsonl, at most as many.
        events: Starts, saves, warnings and the end, in the order of their times.
        samples: Texts that the model wrote.
        summary: The figures of the run's end.
        tail: The last lines of the console.
        checkpoints: The names of the folders of its checkpoints.
    """

    path: Path
    status: str
    problems: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    changed: Sequence[Line] = ()
    metrics: Sequence[Line] = ()
    validations: Sequence[Line] = ()
    health: Sequence[Line] = ()
    experts: Sequence[Line] = ()
    events: Sequence[Line] = ()
    samples: Sequence[Line] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    tail: Sequence[str] = ()
    checkpoints: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Return the name of the run's directory, in letters that UTF-8 has."""
        return self.path.absolute().name.encode("utf-8", "replace").decode()

    @property
    def last_step(self) -> int:
        """Return the step of the last line of metrics, or 0."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def max_steps(self) -> int | None:
        """Return the number of steps that the run was to have, if it is known."""
        total = self.config.get("trainer.max_steps", self.summary.get("total_steps"))
        trial = self.config.get("trainer.fast_dev_run")
        total = int(trial) if isinstance(trial, int) and trial else total
        return total if _is_step(total) else None

    @property
    def last_health(self) -> HealthRecord | None:
        """The last record with what the tensors lose in FP8, of the lines that can be read."""
        for line in reversed(self.health):
            with contextlib.suppress(*NO_RECORD):
                if (record := record_of(line)).is_full:
                    return record
        return None

    def figure(self, key: str) -> float | None:
        """Return a figure of the summary, or of the last line that has it."""
        figure = self.summary.get(key)
        if isinstance(figure, int | float) and not isinstance(figure, bool):
            return float(figure)
        lines = self.validations if key == "val_loss" else self.metrics
        name = {"train_loss": "loss"}.get(key, key)
        for line in reversed(lines):
            if _is_number(line.get(name)):
                return float(line[name])
        return None


def read_run(path: Path, status: str | None = None) -> RunRecord:
    """Return everything that can be read of a run.

    Args:
        path: The run's directory.
        status: The status of a run that writes its own last report; otherwise it is read.

    Raises:
        RunError: The directory is missing, or no run has worked in it.
    """
    if not is_run(path):
        what = "has no run: there is neither run.json nor metrics.jsonl" if path.is_dir() else ""
        raise RunError(f"{path}: {what or 'is no directory'}. Name the directory of a run")
    problems: list[str] = []
    config_text, config = _config(path, problems)
    lines = _numbered(path, problems)
    events = _lines(path / EVENTS_FILE, problems)
    summary = _summary(path, problems)
    starts = [event for event in events if event.get("kind") == "start"]
    settings = starts[-1].get("settings") if starts else None
    changed = (settings if isinstance(settings, dict) else summary).get("non_default")
    health = _spread(path / HEALTH_FILE, "tensors", problems)
    experts = _spread(path / EXPERTS_FILE, "tokens", problems)
    samples = _lines(path / SAMPLES_FILE, problems)
    status = status or _status(path, events, problems)
    return RunRecord(
        path=path,
        status=status,
        problems=tuple(problems),  # after everything is read
        config=config,
        config_text=config_text,
        changed=[row for row in changed if isinstance(row, dict)]
        if isinstance(changed, list)
        else [],
        metrics=[line for line in lines if _is_number(line.get("loss"))],
        validations=[line for line in lines if _is_number(line.get("val_loss"))],
        health=health,
        experts=experts,
        events=events,
        samples=samples,
        summary=summary,
        tail=_tail(path / CONSOLE_FILE),
        checkpoints=sorted(each.name for each in (path / CHECKPOINTS_DIR).glob("step_*/")),
    )


def logged_steps(path: Path) -> list[Line]:
    """Return the lines of a run's logged steps, as far as they can be read."""
    return [line for line in _numbered(path, []) if _is_number(line.get("loss"))]


def typical(lines: Sequence[Line], key: str) -> float | None:
    """Return the median over logged steps; the first one is left out, since it warms up.

    Each speed of a run that is shown is this one: in its summary, on its page and in tables.
    """
    values = [float(line[key]) for line in lines if isinstance(line.get(key), int | float)]
    known = [value for value in (values[1:] or values) if math.isfinite(value)]
    return statistics.median(known) if known else None


# The functions below read what they can, and add to `problems` what cannot be read.


def _numbered(path: Path, problems: list[str]) -> list[Line]:
    """Return the lines of metrics.jsonl that name their step."""
    lines = _lines(path / METRICS_NAME, problems, must=True)
    return [line for line in lines if _is_step(line.get("step"))]


def _status(path: Path, events: Sequence[Line], problems: list[str]) -> str:
    if is_locked(path):
        return "running"
    try:
        record = read_json(path / RECORD_NAME)
    except (OSError, ValueError):
        problems.append(f"{RECORD_NAME} is missing or damaged")
        record = {}
    if isinstance(record, dict) and record.get("status") in ENDED:
        return str(record["status"])
    last = next((e for e in reversed(events) if e.get("kind") in ("start", "end", "failed")), {})
    return {"failed": "failed", "end": "stopped"}.get(str(last.get("kind")), "unfinished")


def _config(path: Path, problems: list[str]) -> tuple[str, dict[str, Any]]:
    try:
        text = read_yaml_text(path / CONFIG_NAME)
        return text, dict(_settings_of(text))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        problems.append(f"{CONFIG_NAME} cannot be read ({reason})")
        return "", {}


@lru_cache(maxsize=4)  # a run writes its report at its start and at its end
def _settings_of(text: str) -> dict[str, Any]:
    tree = parse_yaml(text)
    return dict(_dotted(tree)) if isinstance(tree, dict) else {}


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    dotted: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            dotted += _dotted(value, f"{prefix}{key}.")
        else:
            dotted.append((f"{prefix}{key}", value))
    return dotted


def _summary(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        summary = read_json(path / SUMMARY_NAME)
    except FileNotFoundError:
        return {}  # the run has not ended
    except (OSError, ValueError) as error:
        problems.append(f"{SUMMARY_NAME} cannot be read ({error})")
        return {}
    return _value(summary) if isinstance(summary, dict) else {}


def _lines(path: Path, problems: list[str], *, must: bool = False) -> list[Line]:
    try:
        raw = read_bytes(path, MAX_LINES_BYTES).splitlines()
    except FileNotFoundError:
        if must:
            problems.append(f"{path.name} is missing: no step was logged")
        return []
    except (OSError, ForeignFileError) as error:
        problems.append(f"{path.name} cannot be read ({error})")
        return []
    if must and not raw:
        problems.append(f"{path.name} is empty: no step was logged")
    return _parsed(path.name, raw, problems)


def _spread(path: Path, key: str, problems: list[str]) -> list[Line]:
    """Return spread lines of a file that may be large, with their step and an object under a key.

    The last line is one of them.
    """
    try:
        raw = read_bytes(path, MAX_LINES_BYTES).splitlines()
    except FileNotFoundError:
        return []  # a run without FP8, or without experts, has no such file
    except (OSError, ForeignFileError) as error:
        problems.append(f"{path.name} cannot be read ({error})")
        return []
    raw = thinned(raw, MOST_STEPS, lambda line: b'"snr_db"' in line)
    lines = _parsed(path.name, raw, problems)
    return [
        line for line in lines if isinstance(line.get(key), dict) and _is_step(line.get("step"))
    ]


T = TypeVar("T")


def thinned(lines: Sequence[T], most: int, is_full: Callable[[T], bool]) -> list[T]:
    """Return at most so many lines, evenly spread; half of them for those with all measures.

    The last line of both kinds is among them.
    """
    if len(lines) <= most:
        return list(lines)
    full = [index for index, line in enumerate(lines) if is_full(line)]
    rest = sorted(set(range(len(lines))) - set(full))
    num_full = min(len(full), max(most // 2, most - len(rest)))
    kept = [*_evenly(full, num_full), *_evenly(rest, min(len(rest), most - num_full))]
    return [lines[index] for index in sorted(kept)]


def _evenly(indices: Sequence[int], count: int) -> list[int]:
    last = len(indices) - 1
    return [indices[last - i * last // max(1, count - 1)] for i in range(count)]


def _parsed(name: str, raw: Sequence[bytes], problems: list[str]) -> list[Line]:
    lines, bad = [], 0
    for text in raw:
        try:
            line = parse_json(text)
        except ForeignFileError:
            line = None
        if isinstance(line, dict):
            lines.append(_value(line))
        else:
            bad += 1
    if bad:
        problems.append(f"{name} is damaged: {bad} of {len(raw)} lines cannot be read")
    return lines


def _value(value: Any) -> Any:
    """Return a value of a line: NaN and infinities as numbers, also where they are nested."""
    if isinstance(value, str):
        return _NUMBERS.get(value, value)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > LARGE:
        return math.copysign(math.inf, value)
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    return [_value(item) for item in value] if isinstance(value, list) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_STEP


def _tail(path: Path) -> list[str]:
    try:
        text = read_bytes(path, MAX_LINES_BYTES)[-8192:].decode("utf-8", "replace")
    except (OSError, ForeignFileError):
        return []
    return text.splitlines()[-TAIL_LINES:]
