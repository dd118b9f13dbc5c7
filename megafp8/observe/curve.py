"""Keep the curve of the training loss in little memory, and draw it in one line of text."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megafp8.observe.metrics import read_metrics

_LEVELS = "▁▂▃▄▅▆▇█"
MOST_POINTS = 256


class LossCurve:
    """Keep the losses of all steps as at most `MOST_POINTS` means, and the last losses themselves.

    Losses that are not finite are left out.

    Args:
        window: The number of last losses whose mean is the training loss of the run's end.
    """

    def __init__(self, window: int) -> None:
        self._last: deque[float] = deque(maxlen=window)
        self._points: list[float] = []
        self._per_point = 1
        self._open: list[float] = []

    def add(self, loss: float) -> None:
        """Add the loss of the next step."""
        if not math.isfinite(loss):
            return
        self._last.append(loss)
        self._open.append(loss)
        if len(self._open) < self._per_point:
            return
        self._points.append(sum(self._open) / len(self._open))
        self._open.clear()
        if len(self._points) > MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [(a + b) / 2 for a, b in pairs]
            self._per_point *= 2

    def forget_recent(self) -> None:
        """Drop the last losses, so that their mean is of those that follow."""
        self._last.clear()

    @property
    def points(self) -> tuple[float, ...]:
        """Return the curve so far, from the first step to the last."""
        rest = [sum(self._open) / len(self._open)] if self._open else []
        return (*self._points, *rest)

    @property
    def recent(self) -> tuple[float, int] | None:
        """Return the mean of the last losses and their number, or None before the first one."""
        if not self._last:
            return None
        return sum(self._last) / len(self._last), len(self._last)


def logged_curve(metrics: Path, last_step: int, window: int) -> LossCurve:
    """Return the curve of a run that continues after `last_step`, from its `metrics.jsonl`.

    A logged loss stands for all steps since the logged one before it, so that a point of the curve
    is as many steps before the interruption as after it. The mean of the last losses starts empty,
    since it is of steps and not of logged ones. A file that cannot be read gives an empty curve.
    """
    curve, before = LossCurve(window), 0
    try:
        lines = read_metrics(metrics)
    except (OSError, ValueError):
        return curve
    for line in lines:
        step = int(line.get("step", 0))
        if "loss" in line and step <= last_step:
            for _ in range(step - before):
                curve.add(line["loss"])
            before = step
    curve.forget_recent()
    return curve


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as at most `width` bars, the lowest for the smallest value.

    Values that are not finite are left out. Several values share a bar, which shows their mean.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    edges = [index * len(finite) // count for index in range(count + 1)]
    bars = [sum(finite[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(bars), max(bars)
    if high <= low:
        return _LEVELS[0] * count
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round((bar - low) / (high - low) * top)] for bar in bars)
