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

import atexit
import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TextIO

from megafp8.observe.curve import sparkline
from megafp8.observe.units import (
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_tflops,
    plural,
)

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.live import Live

Row = tuple[str, str]
LEAST_DATA_WAIT = 0.01  # of a step's time, from which on it is shown
SPARKLINE = 24  # bars
WIDE = 110  # columns of a terminal, from which on the block has fewer lines


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Hold the numbers of one step that is shown; they are of this step alone."""

    step: int  # optimizer steps done, this one included
    loss: float  # nats per token
    grad_norm: float  # before clipping
    lr: float
    step_seconds: float
    tokens_per_second: float
    tflops_causal: float  # model TFLOP/s over all ranks; see plan.flops
    tflops_full: float
    mfu_causal: float  # fractions of the peak of all ranks; see plan.utilization
    mfu_full: float
    hfu_causal: float
    hfu_full: float
    memory_bytes: int  # peak of the printing rank
    data_wait_fraction: float  # of the step's time, 0 to 1
    health: str | None = None  # the FP8 health of the last logged step, in a few words
    curve: tuple[float, ...] = ()  # the training loss from the first step on, in means of steps
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

    def validation(
        self,
        step: int,
        val_loss: float,
        *,
        perplexity: float | None = None,
        bits_per_byte: float | None = None,
        seconds: float | None = None,
    ) -> None:
        """Show the result of a validation; `val_loss` is in nats per token."""

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


class _Eta:
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


def _quality(report: StepReport) -> list[str]:
    return [
        f"grad norm {format_number(report.grad_norm, 2):>4}",
        f"lr {report.lr:.1e}",
    ]


def _cost(report: StepReport) -> list[str]:
    parts = [
        f"{report.step_seconds:.3g} s/step",
        f"{format_count(report.tokens_per_second):>5} tok/s",
        format_tflops(report.tflops_causal),
        _utilization(report),
        f"mem {format_bytes(report.memory_bytes)}",
    ]
    if report.data_wait_fraction >= LEAST_DATA_WAIT:
        parts.append(f"data wait {100 * report.data_wait_fraction:.0f} %")
    return parts


def _utilization(report: StepReport) -> str:
    """Return the utilization with causal attention; HFU is named where it is not MFU."""
    text = f"MFU {format_percent(report.mfu_causal)}"
    if report.hfu_causal != report.mfu_causal:
        text += f", HFU {format_percent(report.hfu_causal)}"
    return text


def _validation_line(
    val_loss: float,
    perplexity: float | None,
    bits_per_byte: float | None,
    seconds: float | None,
) -> str:
    parts = [f"val loss {format_number(val_loss)}"]
    if perplexity is not None:
        parts.append(f"perplexity {format_number(perplexity, 2)}")
    if bits_per_byte is not None:
        parts.append(f"{format_number(bits_per_byte, 3)} bits/byte")
    if seconds is not None:
        parts.append(f"validated in {seconds:.1f} s")
    return " | ".join(parts)


def _settings_lines(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the settings that are not the default job's as lines with aligned columns."""
    rows = [
        (str(row["key"]), _one_line(row["value"]), str(row["origin"]), _one_line(row["default"]))
        for row in settings
        if "${" not in str(row["origin"])  # a value that follows another setting
    ]
    keys = max((len(key) for key, *_ in rows), default=0)
    values = max((len(value) for _, value, *_ in rows if len(value) <= 30), default=0)
    return [
        f"  {key:<{keys}}  {value:<{values}}  {origin}, default job {default}"
        for key, value, origin, default in rows
    ]


def _one_line(value: object) -> str:
    text = "null" if value is None else str(value)
    return text if text.isprintable() else repr(text)


def _header_rows(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return lines `name: text` as pairs; a line without a name has an empty one."""
    rows = []
    for line in lines:
        name, colon, text = line.partition(": ")
        is_named = bool(colon) and len(name) <= 20 and "/" not in name
        rows.append((name, text) if is_named else ("", line))
    return rows


def _flowed(parts: Sequence[str], width: int) -> Iterator[str]:
    """Yield lines of parts, each line with as many parts as fit into `width` columns."""
    line = ""
    for part in parts:
        longer = f"{line} | {part}" if line else part
        if line and len(longer) > width:
            yield line
            longer = part
        line = longer
    if line:
        yield line


def _table_lines(rows: Sequence[Row]) -> list[str]:
    width = max((len(what) for what, _ in rows), default=0)
    return [f"{what:>{width}}  {value}" for what, value in rows]


class PlainConsole(Console):
    """Print plain lines and flush each of them at once."""

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._broken = False
        self._eta = _Eta(clock)

    def start(self, total_steps: int, first_step: int = 0) -> None:
        """Print a line if the run continues after earlier steps."""
        self._eta.start(total_steps)
        if first_step:
            self._line(f"continuing after step {first_step} of {total_steps}")

    def header(self, lines: Sequence[str]) -> None:
        """Print the lines that describe the run."""
        for line in lines:
            self._line(line)

    def settings(self, settings: Sequence[Mapping[str, object]]) -> None:
        """Print the settings that are not the default job's, one a line."""
        for line in _settings_lines(settings):
            self._line(line)

    def step(self, report: StepReport) -> None:
        """Print one line with the numbers of a step."""
        eta = format_duration(self._eta.seconds(report))
        parts = [f"loss {format_number(report.loss)}", *_quality(report), *_cost(report)]
        self._line(" | ".join([self._at(report.step), *parts, f"ETA {eta}", *report.notes]))

    def validation(
        self,
        step: int,
        val_loss: float,
        *,
        perplexity: float | None = None,
        bits_per_byte: float | None = None,
        seconds: float | None = None,
    ) -> None:
        """Print one line with the result of a validation."""
        line = _validation_line(val_loss, perplexity, bits_per_byte, seconds)
        self._line(f"{self._at(step)} | {line}")

    def event(self, text: str, *, kind: str = "note") -> None:
        """Print a line about an event."""
        self._line(text)

    def answer(self, text: str) -> None:
        """Print what follows a signal."""
        self._line(text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._line(f"warning: {text}")

    def finish(self, rows: Sequence[Row], lines: Sequence[str] = ()) -> None:
        """Print the table at the end of a run, then plain lines."""
        for line in ["", *_table_lines(rows), *lines]:
            self._line(line)

    def _at(self, step: int) -> str:
        total = str(self._eta.total_steps)
        return f"step {step:>{len(total)}}/{total}"

    def _line(self, text: str) -> None:
        if self._broken:
            return
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
            _silence(self._stream, error)


def _silence(stream: TextIO, error: Exception) -> None:
    """Point a closed pipe at the null device, so that Python's own last flush succeeds too."""
    if isinstance(error, BrokenPipeError):
        with contextlib.suppress(OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


def _rich_console(stream: TextIO) -> RichConsole:
    from rich.console import Console as RichConsole

    class Raising(RichConsole):
        def on_broken_pipe(self) -> None:
            """Raise the error: rich would end the process here, which its caller must decide."""
            raise

    return Raising(file=stream, force_terminal=True, highlight=False)


class LiveConsole(Console):
    """Show a live block on a terminal, under permanent lines.

    The block is drawn at each report, at most five times a second, and not by a thread, because
    training may fork and uses all cores. The cursor stays visible, so that even a killed run leaves
    the terminal in order.
    """

    SECONDS_BETWEEN_DRAWINGS = 0.2

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._rich = _rich_console(self._stream)
        self._clock = clock
        self._eta = _Eta(clock)
        self._live: Live | None = None
        self._broken = False
        self._last_drawn = -1e9
        self._step = 0
        self._report: StepReport | None = None
        self._val_loss: tuple[int, float] | None = None
        self._validating: tuple[int, int] | None = None
        self._answer: str | None = None
        self._eta_text = format_duration(float("nan"))

    def start(self, total_steps: int, first_step: int = 0) -> None:
        """Draw the block for the first time; print a line if the run continues earlier steps."""
        from rich.live import Live

        self._eta.start(total_steps)
        self._step = first_step
        if first_step:
            self.event(f"continuing after step {first_step} of {total_steps}")
        atexit.register(self.close)
        with self._guard():
            self._live = Live(
                self._block(), console=self._rich, auto_refresh=False, vertical_overflow="crop"
            )
            self._live.start(refresh=True)
            self._rich.show_cursor(True)

    def header(self, lines: Sequence[str]) -> None:
        """Print the lines that describe the run: their names in one column, the text in another."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="bold", min_width=10)
        table.add_column(overflow="fold")
        for name, text in _header_rows(lines):
            table.add_row(Text(name), Text(text))
        self._show(table)

    def settings(self, settings: Sequence[Mapping[str, object]]) -> None:
        """Print the settings that are not the default job's, in a table."""
        for line in _settings_lines(settings):
            self._print(line, style="dim")

    def step(self, report: StepReport) -> None:
        """Draw the block with the numbers of a step."""
        is_first = self._report is None
        self._step, self._report = report.step, report
        self._eta_text = format_duration(self._eta.seconds(report))
        self._draw(force=is_first or report.step >= self._eta.total_steps)

    @property
    def wants_progress(self) -> bool:
        """Whether the block may be drawn again."""
        return self._is_due()

    def progress(self, report: StepReport) -> None:
        """Draw the block with the numbers of a step that is not logged."""
        self._step, self._report = report.step, report
        self._eta_text = format_duration(self._eta.left(report))
        self._draw(force=False)

    def validating(self, done: int, total: int) -> None:
        """Draw how far a validation is."""
        self._validating = (done, total)
        self._draw(force=False)

    def validation(
        self,
        step: int,
        val_loss: float,
        *,
        perplexity: float | None = None,
        bits_per_byte: float | None = None,
        seconds: float | None = None,
    ) -> None:
        """Print the result of a validation, and keep its loss in the block."""
        self._val_loss, self._validating = (step, val_loss), None
        line = _validation_line(val_loss, perplexity, bits_per_byte, seconds)
        self._print(f"{self._at(step)} | {line}", style="cyan")
        self._draw(force=True)

    def event(self, text: str, *, kind: str = "note") -> None:
        """Print a line about an event above the block."""
        self._print(text)

    def answer(self, text: str) -> None:
        """Show in the block what follows a signal.

        If the signal came while the block was drawn, the next drawing shows it.
        """
        self._answer = text
        self._draw(force=True)

    def warn(self, text: str) -> None:
        """Print a warning above the block, in yellow."""
        self._print(f"warning: {text}", style="yellow")

    def finish(self, rows: Sequence[Row], lines: Sequence[str] = ()) -> None:
        """Print the table at the end of a run under the last block, then plain lines."""
        self.close()
        self._print("")
        width = max((len(what) for what, _ in rows), default=0)
        for what, value in rows:
            self._print_pair(f"{what:>{width}}", value)
        for line in lines:
            self._print(line)

    def close(self) -> None:
        """Draw the block for the last time and stop the live display."""
        atexit.unregister(self.close)
        live, self._live = self._live, None
        if live is not None:
            if not self._broken:
                with self._guard():
                    live.update(self._block(), refresh=True)
            with self._guard():
                live.stop()  # also on a broken stream: it restores sys.stdout and sys.stderr

    # ---- drawing

    def _at(self, step: int) -> str:
        total = str(self._eta.total_steps)
        return f"step {step:>{len(total)}}/{total}"

    def _block(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        elapsed = format_duration(self._eta.elapsed())
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(self._at(self._step), style="bold"),
            ProgressBar(total=max(1, self._eta.total_steps), completed=self._step),
            Text(f"{elapsed} elapsed, {self._eta_text} left", style="bold"),
        )
        lines = [Text(text, style=style) for text, style in self._lines()]
        for line in lines:  # a wrapped line would be left behind when the terminal is resized
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(bar, *lines)

    def _lines(self) -> Iterator[tuple[str, str]]:
        """Yield the lines under the bar, each with its style."""
        report = self._report
        if report is None:
            which = "no further step" if self._step else "no step"
            yield f"{which} is done yet", "dim"
        else:
            curve = sparkline(report.curve, SPARKLINE) if self._draws_bars() else ""
            quality = [f"loss {format_number(report.loss)} {curve}".rstrip()]
            if self._val_loss is not None:
                step, loss = self._val_loss
                quality.append(f"val loss {format_number(loss)} at {step}")
            quality += _quality(report)
            cost = _cost(report) if report.health is None else [*_cost(report), report.health]
            if self._rich.width >= WIDE:
                yield " | ".join(quality), "green"
            else:
                yield " | ".join(quality[:-2]), "green"
                cost = [*quality[-2:], *cost]
            yield from ((text, "dim") for text in _flowed(cost, self._rich.width))
            if report.notes:
                yield " | ".join(report.notes), "yellow"
        if self._validating is not None:
            done, total = self._validating
            yield f"validating: {done} of {total} microbatches", "cyan"
        if self._answer is not None:
            yield self._answer, "bold yellow"

    def _draws_bars(self) -> bool:
        return "utf" in (getattr(self._stream, "encoding", None) or "utf-8").lower()

    def _is_due(self) -> bool:
        pause = self._clock() - self._last_drawn
        is_live = self._live is not None and not self._broken
        return is_live and pause >= self.SECONDS_BETWEEN_DRAWINGS

    def _draw(self, *, force: bool) -> None:
        if self._live is None or self._broken or not (force or self._is_due()):
            return
        self._last_drawn = self._clock()
        with self._guard():
            self._live.update(self._block(), refresh=True)

    def _print(self, text: str, style: str | None = None) -> None:
        # soft_wrap lets the terminal wrap lines: a long path or command can be copied whole.
        if self._broken:
            return
        with self._guard():
            self._rich.print(text, style=style, markup=False, soft_wrap=True)

    def _show(self, what: RenderableType) -> None:
        if not self._broken:
            with self._guard():
                self._rich.print(what)

    def _print_pair(self, what: str, value: str) -> None:
        from rich.text import Text

        if self._broken:
            return
        with self._guard():
            self._rich.print(Text.assemble((what, "bold"), "  ", value), soft_wrap=True)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            pass  # a signal handler printed during another print: this line is lost
        except (OSError, ValueError) as error:
            self._broken = True
            _silence(self._stream, error)


def open_console(
    *,
    main_rank: bool = True,
    progress_bar: bool = True,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Console:
    """Return the console for this rank and this stream (standard output if none is given).

    A terminal that can move its cursor gets the live console, anything else the plain one.
    `NO_COLOR` in the environment turns off the colours only; `progress_bar` False asks for the
    plain console everywhere.
    """
    if not main_rank:
        return SilentConsole()
    stream = stream if stream is not None else sys.stdout
    if (
        progress_bar
        and _is_terminal(stream)
        and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    ):
        return LiveConsole(stream, clock=clock)
    return PlainConsole(stream, clock=clock)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError, AttributeError):
        return False
