"""Handle signals, the time limit and garbage collection, and make process-wide settings."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from megafp8.ops.memory import keep_freed_memory
from megafp8.parallel.launch import heard_signals, leave_dead_terminal, signals_are_passed_on


class StopRequest:
    """Remember the first signal, so that training can save and stop after the current step.

    Use it as a context around training. A second signal ends the process at once, unless a launcher
    passes signals on: then it may be the first one again, and the launcher ends its ranks at its
    own second one. `answer` is called with the first one inside its handler, so that the user sees
    at once what follows.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._leaves_at_second = not signals_are_passed_on()
        self.answer: Callable[[signal.Signals], None] = lambda number: None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in heard_signals():
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_dead_terminal()
        if self.signal is not None:
            if self._leaves_at_second:
                os._exit(128 + number)  # the exit code that a shell reports after a signal
            return
        self.signal = signal.Signals(number)
        self.answer(self.signal)


class TimeLimit:
    """Decide when training must stop so that it can save within `seconds` after `began`.

    The limit is due when the rest of the current step, one more step and one save would not fit,
    each as slow as the slowest so far. A save that runs in the background has to end before that.

    `began` and `clock` are in seconds of the same clock. The time of a step includes the validation
    and the periodic save after it. `seconds` None says that there is no limit.
    """

    def __init__(
        self, seconds: float | None, began: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self._began, self._clock = seconds, began, clock
        self._last: float | None = None
        self._longest_step = self._longest_save = self._longest_rest = 0.0

    def start(self) -> None:
        """Take note that the first step begins."""
        self._last = self._clock()

    def saved(self, seconds: float) -> None:
        """Take note that a save took `seconds`."""
        self._longest_save = max(self._longest_save, seconds)

    def is_due(self, under_way: float | None = None) -> bool:
        """Return whether training must stop after this step. Call it once in each step.

        `under_way` is the time in seconds since a background save began, or None if none runs.
        """
        now = self._clock()
        if self._last is not None:
            self._longest_step = max(self._longest_step, now - self._last)
        self._last = now
        if self.seconds is None:
            return False
        one_save = max(self._longest_save, under_way or 0.0)
        saves = one_save if under_way is None else 2 * one_save
        return now - self._began + self._longest_rest + self._longest_step + saves >= self.seconds

    def step_ended(self) -> None:
        """Take note that the step in which `is_due` was called is over, except for its save."""
        assert self._last is not None, "no step has begun"
        self._longest_rest = max(self._longest_rest, self._clock() - self._last)


class Garbage:
    """Let Python collect garbage every `interval` steps and at no other time.

    It applies while the context is entered. With an interval of 0, Python collects as usual.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> Garbage:
        self._was_enabled = gc.isenabled()
        if self._interval:
            gc.collect()
            gc.disable()
        return self

    def after_step(self, step: int) -> None:
        """Collect garbage if it is due after `step`."""
        if self._interval and step % self._interval == 0:
            gc.collect()

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            gc.enable()


def prepare_process(device: torch.device, *, fp32: bool, deterministic: bool = False) -> None:
    """Make the settings of torch and of the process that every run on `device` needs.

    `fp32` says that the run computes in FP32, `deterministic` that torch must refuse operations
    that are not deterministic.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    if deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports Inductor
        torch.use_deterministic_algorithms(deterministic)
        # torch would also fill whatever `torch.empty` returns, a pass over memory for each tensor,
        # and refuse FP4, which it cannot fill. Nothing reads such memory.
        settings: Any = torch.utils.deterministic  # whose type does not have the property
        settings.fill_uninitialized_memory = False
    if device.type == "cuda":  # cuBLAS may add up the parts of a product in BF16 or FP16 otherwise
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if device.type == "cpu":
        keep_freed_memory()
        if fp32:
            choose_float32_precision()


def choose_float32_precision() -> str:
    """Set torch to its fastest FP32 matrix products that keep FP32's error; return the setting.

    "medium" is faster on some CPUs with the error of FP32. On CPUs with AMX, it means BF16. The
    relative error of one product, which must be below 1e-6, tells which case applies.
    """
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 512, generator=generator)
    b = torch.randn(512, 256, generator=generator)
    exact = a.double() @ b.double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision("medium")
    error = float((a @ b - exact).norm() / exact.norm())
    if error >= 1e-6:
        torch.set_float32_matmul_precision("highest")
        return "highest"
    return "medium"
