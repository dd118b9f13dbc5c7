"""What people see while a run goes on.

On a terminal: one live block at the bottom (bar, loss, speed, time left) under permanent lines for
validations, checkpoints and warnings. Into a file, a pipe or a dumb terminal: one plain line a log
step, which explains itself without a heading, so that `grep` and `tail -f` serve.

One rank prints; the others hold a `SilentConsole`. A console never raises for what it prints on:
when the terminal or pipe is gone it falls silent and training goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from megafp8.observe.units import format_bytes, format_count, format_duration, format_number

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.live import Live

Row = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step that is shown; numbers are of this step alone."""

    step: int  # optimizer steps done, this one included
    loss: float  # nats per token
    grad_norm: float  # before clipping
    lr: float
    step_seconds: float
    tokens_per_second: float
    tflops_causal: float  # model TFLOP/s over all ranks; see plan.flops
    tflops_full: float
    memory_bytes: int  # peak of the printing rank
    data_wait_fraction: float  # of the step's time, 0 to 1
    notes: tuple[str, ...] = ()  # what is out of the ordinary: "1 step skipped", …


class Console:
    """The interface, and the console that shows nothing.

    Call `start` once, the other methods in any order, `close` at last (or use `with`).
    """

    def start(self, total_steps: int, first_step: int = 0) -> None:
        """`first_step`: steps done before this process (0 on a fresh run)."""

    def header(self, lines: Sequence[str]) -> None:
        """What this run is, before its first step. May come before `start`."""

    def step(self, report: StepReport) -> None:
        """A step whose numbers are shown: the first of this process, log steps, the last."""

    def progress(self, step: int) -> None:
        """A step is done whose numbers are not shown."""

    def validation(
        self,
        step: int,
        val_loss: float,
        *,
        perplexity: float | None = None,
        bits_per_byte: float | None = None,
        seconds: float | None = None,
    ) -> None:
        """A validation's result: `val_loss` in nats per token."""

    def event(self, text: str) -> None:
        """Something that happened: a checkpoint, a signal, a continued run."""

    def warn(self, text: str) -> None:
        """Something that people should know and need not stop for."""

    def finish(self, rows: Sequence[Row], lines: Sequence[str] = ()) -> None:
        """The end: a table of (what, value), as `RunSummary.rows` makes it, then plain lines."""

    def close(self) -> None:
        """Give the terminal back. Safe to call twice and while an exception passes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class SilentConsole(Console):
    """For every rank that does not print."""


class _Eta:
    """Time left, from the wall clock of the last reports: validations and checkpoints count."""

    WINDOW = 20  # reports

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque(maxlen=self.WINDOW)
        self.total_steps = 0
        self._per_step = float("nan")

    def seconds(self, report: StepReport) -> float:
        """Time left after a step that is shown."""
        self._seen.append((report.step, self._clock()))
        (first_step, first_time), (last_step, last_time) = self._seen[0], self._seen[-1]
        if last_step > first_step:
            self._per_step = (last_time - first_time) / (last_step - first_step)
        else:
            self._per_step = report.step_seconds
            self._seen = deque([self._seen[-1]], maxlen=self.WINDOW)  # a rollback starts anew
        return self.left(report.step)

    def left(self, step: int) -> float:
        """Time left after `step`, at the pace of the last report; NaN before the first one."""
        return self._per_step * (self.total_steps - step)


def _quality(report: StepReport) -> list[str]:
    return [
        f"grad norm {format_number(report.grad_norm, 2):>4}",
        f"lr {report.lr:.1e}",
    ]


def _cost(report: StepReport) -> list[str]:
    causal, full = format_number(report.tflops_causal, 2), format_number(report.tflops_full, 2)
    return [
        f"{format_count(report.tokens_per_second):>5} tok/s",
        f"{causal} TFLOP/s causal ({full} full)",
        f"mem {format_bytes(report.memory_bytes)}",
        f"data wait {100 * report.data_wait_fraction:.1f} %",
    ]


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
        parts.append(f"{seconds:.1f} s")
    return " | ".join(parts)


def _table_lines(rows: Sequence[Row]) -> list[str]:
    width = max((len(what) for what, _ in rows), default=0)
    return [f"{what:>{width}}  {value}" for what, value in rows]


class PlainConsole(Console):
    """Plain lines, each flushed at once."""

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._broken = False
        self._eta = _Eta(clock)

    def start(self, total_steps: int, first_step: int = 0) -> None:
        self._eta.total_steps = total_steps
        if first_step:
            self._line(f"continuing after step {first_step} of {total_steps}")

    def header(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._line(line)

    def step(self, report: StepReport) -> None:
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
        line = _validation_line(val_loss, perplexity, bits_per_byte, seconds)
        self._line(f"{self._at(step)} | {line}")

    def event(self, text: str) -> None:
        self._line(text)

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}")

    def finish(self, rows: Sequence[Row], lines: Sequence[str] = ()) -> None:
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
            pass  # a signal handler that prints in the middle of a print: that line is lost
        except (OSError, ValueError) as error:
            self._broken = True
            _silence(self._stream, error)


def _silence(stream: TextIO, error: Exception) -> None:
    """Point a broken standard stream at nothing, so that Python's own last flush succeeds too."""
    if isinstance(error, BrokenPipeError):
        with contextlib.suppress(OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


def _rich_console(stream: TextIO) -> RichConsole:
    from rich.console import Console as RichConsole

    class Raising(RichConsole):
        def on_broken_pipe(self) -> None:
            """Rich would end the process here; whoever called decides that."""
            raise

    return Raising(file=stream, force_terminal=True, highlight=False)


class LiveConsole(Console):
    """A live block on a terminal, under permanent lines.

    No thread draws it (training may fork, and owns the cores): it is drawn at each report, at most
    ten times a second. The cursor stays visible, so that even a killed run leaves nothing to mend.
    """

    SECONDS_BETWEEN_DRAWINGS = 0.1

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
        self._val_loss: float | None = None
        self._eta_text = format_duration(float("nan"))

    def start(self, total_steps: int, first_step: int = 0) -> None:
        from rich.live import Live

        self._eta.total_steps = total_steps
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
        for line in lines:
            self._print(line)

    def step(self, report: StepReport) -> None:
        is_first = self._report is None
        self._step, self._report = report.step, report
        self._eta_text = format_duration(self._eta.seconds(report))
        self._draw(force=is_first or report.step >= self._eta.total_steps)

    def progress(self, step: int) -> None:
        self._step = step
        self._eta_text = format_duration(self._eta.left(step))
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
        self._val_loss = val_loss
        line = _validation_line(val_loss, perplexity, bits_per_byte, seconds)
        self._print(f"{self._at(step)} | {line}", style="cyan")
        self._draw(force=True)

    def event(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", style="yellow")

    def finish(self, rows: Sequence[Row], lines: Sequence[str] = ()) -> None:
        self.close()
        self._print("")
        width = max((len(what) for what, _ in rows), default=0)
        for what, value in rows:
            self._print_pair(f"{what:>{width}}", value)
        for line in lines:
            self._print(line)

    def close(self) -> None:
        atexit.unregister(self.close)
        live, self._live = self._live, None
        if live is not None:
            if not self._broken:
                with self._guard():
                    live.update(self._block(), refresh=True)
            with self._guard():
                live.stop()  # even then: it gives back sys.stdout and sys.stderr

    # ---- drawing

    def _at(self, step: int) -> str:
        total = str(self._eta.total_steps)
        return f"step {step:>{len(total)}}/{total}"

    def _block(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        report = self._report
        shown = "" if report is None else f"numbers of step {report.step} | "
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(self._at(self._step), style="bold"),
            ProgressBar(total=max(1, self._eta.total_steps), completed=self._step),
            Text(f"{shown}ETA {self._eta_text}", style="bold"),
        )
        if report is None:
            which = "no further step" if self._step else "no step"
            return Group(bar, Text(f"{which} is done yet", style="dim"))
        quality = [f"loss {format_number(report.loss)}"]
        if self._val_loss is not None:
            quality.append(f"val loss {format_number(self._val_loss)}")
        quality += [*_quality(report), f"{report.step_seconds:.3g} s/step"]
        lines = [
            Text(" | ".join(quality), style="green"),
            Text(" | ".join(_cost(report)), style="dim"),
        ]
        if report.notes:
            lines.append(Text(" | ".join(report.notes), style="yellow"))
        return Group(bar, *lines)

    def _draw(self, *, force: bool) -> None:
        now = self._clock()
        if (
            self._live is None
            or self._broken
            or not (force or now - self._last_drawn >= self.SECONDS_BETWEEN_DRAWINGS)
        ):
            return
        self._last_drawn = now
        with self._guard():
            self._live.update(self._block(), refresh=True)

    def _print(self, text: str, style: str | None = None) -> None:
        # soft_wrap: the terminal wraps, so that a long path or command can be copied whole.
        if self._broken:
            return
        with self._guard():
            self._rich.print(text, style=style, markup=False, soft_wrap=True)

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
            pass  # a signal handler that prints in the middle of a print: that line is lost
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
    """The console for this rank and this stream (standard output if none is given).

    Live on a terminal that can move its cursor, else plain. `NO_COLOR` takes the colours and leaves
    the rest; `progress_bar` False leaves the plain lines.
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
