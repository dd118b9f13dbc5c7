"""Show a run's progress to the people who watch it.

A terminal gets one live block at the bottom (bar, loss and its curve, speed, time left) under
permanent lines for validations, checkpoints and warnings. A file, a pipe or a dumb terminal gets
one plain line for each log step; the line names each number, so that `grep` and `tail -f` are
useful.

One rank prints; the others hold a `SilentConsole`. A console never raises because of the stream
that it prints on: when the terminal or the pipe is closed, it prints nothing more and training
continues.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TextIO

from megafp8.observe.experts import ExpertLoad
from megafp8.observe.units import (
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_percent,
    in_columns,
    plural,
)
from megafp8.secrets import cut, hide, one_line, printable

Row = tuple[str, str]
LEAST_DATA_WAIT = 0.01  # of a step's time, from which on it is shown


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Hold the result of a validation; `val_loss` is in nats per token."""

    step: int
    val_loss: float
    perplexity: float | None = None
    bits_per_byte: float | None = None
    seconds: float | None = None

    def line(self) -> str:
        """Return the result as a line."""
        parts = [f"val loss {format_number(self.val_loss)}"]
        if self.perplexity is not None:
            parts.append(f"perplexity {format_number(self.perplexity, 2)}")
        if self.bits_per_byte is not None:
            parts.append(f"{format_number(self.bits_per_byte, 3)} bits/byte")
        if self.seconds is not None:
            parts.append(f"validated in {self.seconds:.1f} s")
        return " | ".join(parts)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Hold the numbers of a step that is shown; times and speeds are of all since the last one."""

    step: int  # optimizer steps done, this one included
    loss: float  # nats per token
    grad_norm: float  # before clipping
    lr: float
    step_seconds: float
    tokens_per_second: float
    tflops_causal: float  # model TFLOP/s over all ranks; see flops.py
    tflops_full: float
    mfu_causal: float  # fractions of the peak of all ranks; see utilization.py
    mfu_full: float
    hfu_causal: float
    hfu_full: float
    memory_bytes: int | None  # peak of the printing rank, if it is known
    data_wait_fraction: float  # of the step's time, 0 to 1
    shows_utilization: bool = True  # a CPU's peak is measured and varies, so that it says little
    health: str | None = None  # the FP8 health of the last logged step, in a few words
    curve: tuple[float, ...] = ()  # the training loss from the first step on, in means of steps
    added: Mapping[str, float] = field(default_factory=dict)  # what layers add to the loss
    experts: ExpertLoad | None = None  # of a model that has some
    notes: tuple[str, ...] = ()  # unusual events, such as "not finite: weights unchanged"


class Console:
    """Define the interface of all consoles, and show nothing.

    Call `start` once, the other methods in any order, and `close` at the end (or use `with`).
    """

    def start(self, total_steps: int, first_step: int = 0) -> None:
        """Begin to show a run of `total_steps` optimizer steps.

        `first_step` is the number of steps that were done before this process, 0 in a new run.
        """

    def header(self, lines: Sequence[str]) -> None:
        """Show lines that describe the run. The call may come before `start`."""

    def settings(self, settings: Sequence[Mapping[str, object]]) -> None:
        """Show the settings that are not the default job's: key, value, origin, default."""

    def step(self, report: StepReport) -> None:
        """Show the numbers of a step: of this process's first one, of log steps, of the last."""

    @property
    def wants_progress(self) -> bool:
        """Whether `progress` would show anything at this moment."""
        return False

    def progress(self, report: StepReport) -> None:
        """Show the numbers of a step that is not logged, where that is possible."""

    def validating(self, done: int, total: int) -> None:
        """Show that `done` of `total` microbatches of a validation are done."""

    def validation(self, result: Validation) -> None:
        """Show the result of a validation."""

    def event(self, text: str, *, kind: str = "note") -> None:
        """Show a line about an event, such as a saved checkpoint or a continued run.

        `kind` says what happened, for the run's record; no console shows it.
        """

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Show a text that the model wrote after `prompt`, when `step` steps were done."""
        self.event(f"a sample after {plural(step, 'step')}, the model continues {prompt!r}:")
        for line in (prompt + text).splitlines():
            shown = "".join(c if c.isprintable() else "\ufffd" for c in line.expandtabs(4))
            self.event(f"  {shown}")

    def answer(self, text: str) -> None:
        """Show at once that a signal came, from inside its handler, and what follows."""

    def record(self, kind: str, text: str, **more: object) -> None:
        """Keep an event in the run's record without showing it; most consoles have no record."""

    def follow(self, step: Callable[[], int]) -> None:
        """Use `step`, which returns the number of steps that are done, for the run's record."""

    def warn(self, text: str) -> None:
        """Show a warning: a problem that does not stop the run."""

    def finish(self, rows: Sequence[Row], lines: Sequence[str] = ()) -> None:
        """Show the table at the end of a run, as `RunSummary.rows` returns it, then plain lines."""

    def close(self) -> None:
        """Leave the terminal as it was. A second call, or one during an exception, is safe."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SilentConsole(Console):
    """Show nothing: this is the console of every rank that does not print."""


class Eta:
    """Estimate the time left from the wall clock of the last reports.

    The time of validations and checkpoints is included.
    """

    WINDOW = 20  # reports

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._seen: deque[tuple[int, float]] = deque(maxlen=self.WINDOW)
        self.total_steps = 0
        self._per_step = float("nan")

    def start(self, total_steps: int) -> None:
        """Begin to count the time of a run of `total_steps` steps."""
        self.total_steps, self._began = total_steps, self._clock()

    def seconds(self, report: StepReport) -> float:
        """Return the seconds left after a step that is logged, and take note of its time."""
        self._seen.append((report.step, self._clock()))
        (first_step, first_time), (last_step, last_time) = self._seen[0], self._seen[-1]
        if last_step > first_step:
            self._per_step = (last_time - first_time) / (last_step - first_step)
        else:
            self._per_step = report.step_seconds
            # The first report, or the first after a rollback: older times do not count.
            self._seen = deque([self._seen[-1]], maxlen=self.WINDOW)
        return self.left(report)

    def left(self, report: StepReport) -> float:
        """Return the seconds left after a step, at the pace of the last reports.

        The first step takes longer than others: until the second report, the time since the first
        one counts.
        """
        per_step = self._per_step
        if len(self._seen) == 1 and report.step > self._seen[0][0]:
            per_step = (self._clock() - self._seen[0][1]) / (report.step - self._seen[0][0])
        elif math.isnan(per_step):
            per_step = report.step_seconds
        return per_step * (self.total_steps - report.step)

    def elapsed(self) -> float:
        """Return the seconds since `start`."""
        return self._clock() - self._began


def quality_of(report: StepReport) -> list[str]:
    """Return how well training goes, in parts of a line."""
    return [
        f"grad norm {format_number(report.grad_norm, 2):>4}",
        f"lr {report.lr:.1e}",
        *(f"{name} {format_number(value, 3)}" for name, value in report.added.items()),
        *([] if report.experts is None else [report.experts.text()]),
        *([] if report.health is None else [report.health]),
    ]


def cost_of(report: StepReport) -> list[str]:
    """Return what a step takes, in parts of a line; metrics.jsonl has the speed in other units."""
    parts = [f"{format_count(report.tokens_per_second):>5} tok/s"]
    if report.shows_utilization:
        parts.append(_utilization(report))
    if report.memory_bytes is not None:
        parts.append(f"mem {format_bytes(report.memory_bytes)}")
    if report.data_wait_fraction >= LEAST_DATA_WAIT:
        parts.append(f"data wait {100 * report.data_wait_fraction:.0f} %")
    return parts


def _utilization(report: StepReport) -> str:
    """Return the utilization with causal attention; HFU is named where it is not MFU."""
    text = f"MFU {format_percent(report.mfu_causal)}"
    if report.hfu_causal != report.mfu_causal:
        text += f", HFU {format_percent(report.hfu_causal)}"
    return text


def settings_lines(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the settings that are not the default job's as lines with aligned columns."""
    rows = [
        (
            str(row["key"]),
            cut(one_line(row["value"])),
            str(row["origin"]),
            cut(one_line(row["default"])),
        )
        for row in settings
        if "${" not in str(row["origin"])  # a value that follows another setting
    ]
    keys = max((len(key) for key, *_ in rows), default=0)
    values = max((len(value) for _, value, *_ in rows if len(value) <= 30), default=0)
    return [
        f"  {key:<{keys}}  {value:<{values}}  {origin}, default job {default}"
        for key, value, origin, default in rows
    ]


class PlainConsole(Console):
    """Print plain lines and flush each of them at once."""

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._broken = False
        self._eta = Eta(clock)

    def start(self, total_steps: int, first_step: int = 0) -> None:
        self._eta.start(total_steps)
        if 0 < first_step < total_steps:
            self._line(f"continuing after step {first_step} of {total_steps}")

    def header(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._line(line)

    def settings(self, settings: Sequence[Mapping[str, object]]) -> None:
        for line in settings_lines(settings):
            self._line(line)

    def step(self, report: StepReport) -> None:
        eta = format_duration(self._eta.seconds(report))
        parts = [f"loss {format_number(report.loss)}", *quality_of(report), *cost_of(report)]
        self._line(" | ".join([self._at(report.step), *parts, f"ETA {eta}", *report.notes]))

    def validation(self, result: Validation) -> None:
        self._line(f"{self._at(result.step)} | {result.line()}")

    def event(self, text: str, *, kind: str = "note") -> None:
        self._line(text)

    def answer(self, text: str) -> None:
        self._line(text)

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}")

    def finish(self, rows: Sequence[Row], lines: Sequence[str] = ()) -> None:
        for line in ["", *in_columns(rows, right=(0,)), *lines]:
            self._line(line)

    def _at(self, step: int) -> str:
        total = str(self._eta.total_steps)
        return f"step {step:>{len(total)}}/{total}"

    def _line(self, text: str) -> None:
        if self._broken:
            return
        text = printable(hide(text))
        try:
            try:
                self._stream.write(text + "\n")
            except UnicodeEncodeError:  # a path or a message that the locale cannot show
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except RuntimeError:
            pass  # a signal handler printed during another print: this line is lost
        except (OSError, ValueError) as error:
            self._broken = True
            silence(self._stream, error)


def silence(stream: TextIO, error: Exception) -> None:
    """Point a closed pipe or terminal at the null device, so that Python's last flush succeeds."""
    if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO):
        with contextlib.suppress(OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
