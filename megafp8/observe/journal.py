"""Keep what a run said: console.log for people, and events.jsonl and samples.jsonl for reports.

All of them only grow. A run that continues appends to them, so that they tell of every start, of
every save and of every warning, also of steps that were trained again after an interruption.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from megafp8.files import to_json
from megafp8.observe.console import Console, PlainConsole, Row, StepReport, Validation
from megafp8.secrets import hide_values, redacted

CONSOLE_FILE = "console.log"
EVENTS_FILE = "events.jsonl"
SAMPLES_FILE = "samples.jsonl"


def append_line(path: Path, line: bytes) -> None:
    """Append a whole line to a file, or nothing; the file is made if it does not exist.

    Half a line that a killed process left is cut off, so that the new line does not join it.

    Raises:
        OSError: The line cannot be written, as on a full disk.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            size = path.read_bytes().rfind(b"\n") + 1
            os.ftruncate(descriptor, size)
        try:
            if (written := os.write(descriptor, line)) != len(line):
                raise OSError(f"wrote {written} of {len(line)} bytes")
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


class JournaledConsole(Console):
    """Show everything on another console, and keep it in the files of a run.

    A disk that fails costs the records with one warning, never the run.

    Args:
        shown: The console on which everything is shown; closing it is its owner's part.
        directory: The run's directory, which exists.
    """

    def __init__(self, shown: Console, directory: Path) -> None:
        self._shown = shown
        self._directory = directory
        self._warned = False
        self._step: Callable[[], int] = lambda: 0  # `follow` sets it when there is a step
        self._log = Console()  # which shows nothing
        try:
            self._stream = open(directory / CONSOLE_FILE, "a", encoding="utf-8", errors="replace")
            self._log = PlainConsole(self._stream)
        except OSError as error:
            self._lost(CONSOLE_FILE, error)

    # ---- records

    def record(self, kind: str, text: str, **more: object) -> None:
        """Append an event to events.jsonl; `more` are further fields, as JSON can hold them.

        The error of a run that failed is kept in console.log too; the command itself shows it.
        """
        if kind == "failed":
            self._log.event(f"error: {text}")
        self._append(EVENTS_FILE, redacted({"kind": kind, "text": text, **more}))

    def follow(self, step: Callable[[], int]) -> None:
        self._step = step

    def sample(self, step: int, prompt: str, text: str) -> None:
        self._shown.sample(step, prompt, text)
        self._log.sample(step, prompt, text)
        # What a model writes has names of secrets as well; it knows none of their values.
        texts = {"prompt": hide_values(prompt), "text": hide_values(text)}
        self._append(SAMPLES_FILE, texts)

    def _append(self, name: str, fields: Mapping[str, object]) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = to_json({"time": now, "step": self._step(), **fields}) + "\n"
        try:
            append_line(self._directory / name, line.encode())
        except OSError as error:
            self._lost(name, error)

    def _lost(self, name: str, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            path = self._directory / name
            self._shown.warn(f"{path}: cannot be written ({error}); training continues without it")

    # ---- what every console does

    def start(self, total_steps: int, first_step: int = 0) -> None:
        self._shown.start(total_steps, first_step)
        self._log.start(total_steps, first_step)

    def header(self, lines: Sequence[str]) -> None:
        self._shown.header(lines)
        self._log.header(lines)

    def settings(self, settings: Sequence[Mapping[str, object]]) -> None:
        self._shown.settings(settings)
        self._log.settings(settings)

    def step(self, report: StepReport) -> None:
        self._shown.step(report)
        self._log.step(report)
        if report.notes:
            self.record("skipped", "; ".join(report.notes))

    @property
    def wants_progress(self) -> bool:
        return self._shown.wants_progress

    def progress(self, report: StepReport) -> None:
        self._shown.progress(report)

    def validating(self, done: int, total: int) -> None:
        self._shown.validating(done, total)

    def validation(self, result: Validation) -> None:
        self._shown.validation(result)
        self._log.validation(result)

    def event(self, text: str, *, kind: str = "note") -> None:
        self._shown.event(text)
        self._log.event(text)
        self.record(kind, text)

    def answer(self, text: str) -> None:
        """Show what follows a signal; nothing is written inside the signal's handler."""
        self._shown.answer(text)

    def warn(self, text: str) -> None:
        self._shown.warn(text)
        self._log.warn(text)
        self.record("warning", text)

    def finish(self, rows: Sequence[Row], lines: Sequence[str] = ()) -> None:
        self._shown.finish(rows, lines)
        self._log.finish(rows, lines)

    def close(self) -> None:
        """Close console.log; the console that shows everything stays open. It is safe to repeat."""
        if isinstance(self._log, PlainConsole):
            self._log = Console()
            try:
                self._stream.close()
            except OSError as error:
                self._lost(CONSOLE_FILE, error)
