"""Show a run on a terminal, and choose the console for a stream."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from megafp8.observe.console import (
    Console,
    Eta,
    PlainConsole,
    Row,
    SilentConsole,
    StepReport,
    Validation,
    cost_of,
    quality_of,
    settings_lines,
    silence,
)
from megafp8.observe.curve import sparkline
from megafp8.observe.units import format_duration, format_number
from megafp8.secrets import hide, printable

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.live import Live

SPARKLINE = 24  # bars
COPIED = ("run", "report", "checkpoint", "curves", "continue with", "where")
"""Rows of the table at the end with paths and commands, which are not broken into lines."""
WIDE = 110  # columns of a terminal, from which on the block has fewer lines


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
        self._eta = Eta(clock)
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
        from rich.live import Live

        self._eta.start(total_steps)
        self._step = first_step
        if 0 < first_step < total_steps:
            self.event(f"continuing after step {first_step} of {total_steps}")
        atexit.register(self.close)
        with self._guard():
            self._live = Live(
                self._block(), console=self._rich, auto_refresh=False, vertical_overflow="crop"
            )
            self._live.start(refresh=True)
            self._rich.show_cursor(True)

    def header(self, lines: Sequence[str]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="bold", min_width=10)
        table.add_column(overflow="fold")
        named = False
        for name, text in _header_rows(lines):
            if name:
                table.add_row(Text(name), Text(text))
                named = True
            else:
                self._print(text)
        if named:
            self._show(table)

    def settings(self, settings: Sequence[Mapping[str, object]]) -> None:
        for line in settings_lines(settings):
            self._print(line, style="dim")

    def step(self, report: StepReport) -> None:
        is_first = self._report is None
        self._step, self._report = report.step, report
        self._eta_text = format_duration(self._eta.seconds(report))
        self._draw(force=is_first or report.step >= self._eta.total_steps)

    @property
    def wants_progress(self) -> bool:
        return self._is_due()

    def progress(self, report: StepReport) -> None:
        self._step, self._report = report.step, report
        self._eta_text = format_duration(self._eta.left(report))
        self._draw(force=False)

    def validating(self, done: int, total: int) -> None:
        self._validating = (done, total)
        self._draw(force=False)

    def validation(self, result: Validation) -> None:
        self._val_loss, self._validating = (result.step, result.val_loss), None
        self._print(f"{self._at(result.step)} | {result.line()}", style="cyan")
        self._draw(force=True)

    def event(self, text: str, *, kind: str = "note") -> None:
        self._print(text)

    def answer(self, text: str) -> None:
        """Show in the block what follows a signal.

        If the signal came while the block was drawn, the next drawing shows it.
        """
        self._answer = text
        self._draw(force=True)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", style="yellow")

    def finish(self, rows: Sequence[Row], lines: Sequence[str] = ()) -> None:
        self.close()
        self._print("")
        width = max((len(what) for what, _ in rows), default=0)
        for what, value in rows:
            self._print_pair(f"{what:>{width}}", value, whole=what in COPIED)
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
            quality += quality_of(report)
            cost = cost_of(report)
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
            self._rich.print(printable(hide(text)), style=style, markup=False, soft_wrap=True)

    def _show(self, what: RenderableType) -> None:
        if not self._broken:
            with self._guard():
                self._rich.print(what)

    def _print_pair(self, what: str, value: str, *, whole: bool) -> None:
        """Print a row of the end table; with `whole`, its value can be copied as one line."""
        from rich.table import Table
        from rich.text import Text

        if self._broken:
            return
        value = printable(hide(value))
        with self._guard():
            if whole:
                self._rich.print(Text.assemble((what, "bold"), "  ", value), soft_wrap=True)
                return
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True, style="bold")
            table.add_column(overflow="fold")
            table.add_row(Text(what), Text(value))
            self._rich.print(table)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            pass  # a signal handler printed during another print: this line is lost
        except (OSError, ValueError) as error:
            self._broken = True
            silence(self._stream, error)


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
