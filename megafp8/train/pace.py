"""Estimate from the first steps how long a run will take, and suggest what would be faster."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from fp8_numerics.dtypes import DTYPES
from fp8_numerics.gemm import GemmCounter, gemm
from megafp8.observe.units import format_duration
from megafp8.specs import RunSpec

LONG_SECONDS = 30 * 60
SLOWER_BY = 1.5  # least time ratio, products in the run's dtype over FP32, to suggest FP32
LARGEST_SIDE = 512  # of the matrices that are multiplied as a test: at most 0.27 GFLOP


class Span(NamedTuple):
    """Hold what some steps together took: samples, seconds, and of these the wait for data."""

    steps: int
    samples: int
    seconds: float
    waited: float


class Pace:
    """Time the steps of one process. The first one has costs that the others do not have."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._seconds = float("inf")
        self.total_seconds = 0.0  # of all steps of this process
        self._since_line = Span(0, 0, 0.0, 0.0)

    def after_step(self, step: Span) -> None:
        """Take note of one step; its seconds include the time that it waited for data."""
        self.total_seconds += step.seconds
        self.num_steps += 1
        since = self._since_line
        self._since_line = Span(
            since.steps + step.steps, since.samples + step.samples,
            since.seconds + step.seconds, since.waited + step.waited,
        )  # fmt: skip
        if self.num_steps <= 2:
            self._seconds = min(self._seconds, step.seconds)

    def since_line(self) -> Span:
        """Return the steps since the last call: a line speaks of all of them.

        The step of a line alone would be a wrong measure: it is the one that measures FP8 health.
        """
        span, self._since_line = self._since_line, Span(0, 0, 0.0, 0.0)
        return span

    def slow(self, spec: RunSpec, step: int, device: torch.device) -> str | None:
        """Return, after the second step, a warning if the run will take long on a CPU, else None.

        Args:
            spec: The run.
            step: The number of steps that are done.
            device: The device on which the run computes.
        """
        seconds_left = (spec.train.max_steps - step) * self._seconds
        limit = spec.train.max_time_seconds
        if self.num_steps != 2 or device.type != "cpu" or seconds_left <= LONG_SECONDS:
            return None
        if limit is not None and limit <= LONG_SECONDS:
            return None  # trainer.max_time ends this process before
        text = f"at {self._seconds:.3g} s a step, the {spec.train.max_steps - step} steps that are "
        text += f"left take {format_duration(seconds_left)} on this CPU, without validation. "
        return text + "Faster: " + "; ".join(_suggestions(spec, step, self._seconds, device))


def _suggestions(spec: RunSpec, step: int, seconds: float, device: torch.device) -> list[str]:
    """Return what would make a run faster that takes `seconds` a step."""
    suggestions = []
    steps = step + int(LONG_SECONDS / seconds)
    if steps > step:
        suggestions.append(f"trainer.max_steps={steps} (half an hour)")
    else:
        suggestions.append("a smaller model: one step alone takes more than half an hour")
    smallest = spec.train.micro_batch_size * spec.parallel.dp
    if spec.train.global_batch_size > smallest:
        suggestions.append(
            f"a model.global_batch_size below {spec.train.global_batch_size}, with fewer tokens a "
            "step (a new run)"
        )
    slowdown = _slowdown_against_fp32(spec, device)
    if slowdown >= SLOWER_BY:
        name = spec.precision.compute.upper()
        suggestions.append(
            f"trainer.precision=32 (a new run): a product of {name} matrices took {slowdown:.1f} "
            "times as long here as one of FP32 matrices"
        )
    return suggestions


def _slowdown_against_fp32(spec: RunSpec, device: torch.device) -> float:
    """Return how many times as long as in FP32 a product takes in the dtype of the run."""
    dtype = DTYPES[spec.precision.compute]
    if dtype == torch.float32:
        return 1.0
    model = spec.model
    sides = (spec.data.seq_length, model.hidden_size, model.ffn_hidden_size)
    m, k, n = (min(LARGEST_SIDE, side) for side in sides)
    return _seconds_of(m, k, n, dtype, device) / _seconds_of(m, k, n, torch.float32, device)


def _seconds_of(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the time of a product: the shorter of two, after one that is not counted."""
    a_MK = torch.ones(m, k, dtype=dtype, device=device)
    b_KN = torch.ones(k, n, dtype=dtype, device=device)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        gemm(a_MK, b_KN, work=dtype, counter=GemmCounter(), place="pace")
        took.append(time.perf_counter() - began)
    return min(took[1:])
