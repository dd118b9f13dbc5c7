"""Write and read metrics.jsonl, which has one strict JSON object for each log step.

Runs are compared by this file. Its floats therefore read back bit for bit, its keys keep one order,
and it never holds half a line, since one write appends a line. A run that continues from step N
drops the lines that an earlier process wrote about later steps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from megafp8.files import Warn, to_json, warn_on_stderr, write_atomically
from megafp8.foreign import parse_json

# These keys come first and in this order; any other key follows, sorted by name.
KEY_ORDER = (
    "step",
    "consumed_samples",
    "consumed_tokens",
    "loss",
    "val_loss",
    "grad_norm",
    "lr",
    "step_seconds",
    "tokens_per_second",
    "tflops_causal",
    "tflops_full",
    "mfu_causal",
    "mfu_full",
    "hfu_causal",
    "hfu_full",
    "peak_memory_bytes",
    "data_wait_fraction",
)
_RANK = {key: index for index, key in enumerate(KEY_ORDER)}
_FROM_STRING = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Value = float | int | str | None


class MetricsFile:
    """Append lines to the file `path`.

    A disk that fails costs the lines, with one warning, never the run. Each line is flushed to the
    disk (fsync), so that it survives a crash of the machine.

    Args:
        path: The file, which is made if it does not exist; its directory must exist.
        resume_step: The step that training continues from. Lines of later steps are dropped, and so
            is a last line that a crash left incomplete. `None` keeps all complete lines.
        warn: Called once if writing fails.
    """

    def __init__(
        self, path: str | Path, *, resume_step: int | None = None, warn: Warn = warn_on_stderr
    ) -> None:
        self.path = Path(path)
        self._warn = warn
        self._warned = False
        self._descriptor: int | None = None
        try:
            self._drop(resume_step)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o666)
        except OSError as error:
            self._lost(error)

    def log(self, values: Mapping[str, object], *, unless_last: bool = False) -> bool:
        """Append one line. `values` must hold `step`; `val_loss` marks a validation line.

        With `unless_last`, nothing is appended if the file ends with the same line already. The
        result is then False, and True otherwise.
        """
        assert "step" in values, f"a metrics line needs its step, got only {sorted(values)}"
        if self._descriptor is None:
            return True
        keys = sorted(values, key=lambda key: (_RANK.get(key, len(_RANK)), key))
        line = (to_json({key: values[key] for key in keys}) + "\n").encode()
        try:
            size = os.fstat(self._descriptor).st_size
            if unless_last and self.path.read_bytes().splitlines(keepends=True)[-1:] == [line]:
                return False
            try:
                written = os.write(self._descriptor, line)
                if written != len(line):
                    raise OSError(f"wrote {written} of {len(line)} bytes")
            except OSError:
                os.ftruncate(self._descriptor, size)  # the next line must not follow a part of one
                raise
            os.fsync(self._descriptor)
        except OSError as error:
            self._lost(error)
        return True

    def rewind(self, step: int) -> None:
        try:
            self._drop(step)
            if self._descriptor is not None:  # the file was replaced: open the new one
                os.close(self._descriptor)
                self._descriptor = None
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self._lost(error)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop(self, resume_step: int | None) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_bytes().decode("utf-8", "replace").splitlines(keepends=True)
        kept = [line for line in lines if _is_whole(line)]
        if resume_step is not None:
            kept = [line for line in kept if _step_of(line) <= resume_step]
        if kept != lines:
            write_atomically(self.path, "".join(kept))

    def _lost(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"{self.path}: cannot be written ({error}); training continues without it")


def _parse(line: str) -> dict[str, Value] | None:
    try:
        values = parse_json(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _is_whole(line: str) -> bool:
    return line.endswith("\n") and _parse(line) is not None


def _step_of(line: str) -> float:
    step = (_parse(line) or {}).get("step")
    return step if isinstance(step, int) else math.inf


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Return all complete lines of a metrics.jsonl, each as its numbers by key.

    `"NaN"`, `"Infinity"` and `"-Infinity"` become floats again. Other strings and nulls are left
    out, so that every value is a number.
    """
    text = Path(path).read_text(encoding="utf-8")
    rows: list[dict[str, float]] = []
    for line in text.splitlines():
        values = _parse(line)
        if values is None:
            continue
        row: dict[str, float] = {}
        for key, value in values.items():
            number = _FROM_STRING.get(value) if isinstance(value, str) else value
            if isinstance(number, int | float):
                row[key] = number
        rows.append(row)
    return rows
