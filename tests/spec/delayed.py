"""Delayed scaling: when amaxes are recorded, how histories roll, how scales follow.

Source: Transformer Engine's fused update (`common/recipe/delayed_scaling.cu`, `kernel_bulk`), whose
history layout this keeps: slot 0 stages the running amax since the last update, slots 1..L-1 hold
earlier amaxes, oldest first. Histories start at 0, scales at 1; all numbers are float32.

Named deviations from Transformer Engine:

- A non-finite amax (NaN becomes +inf when recorded, so before any reduction) is counted and
  otherwise treated as an amax of 0: it never enters a history. In Transformer Engine an infinity
  stays in the window and freezes the scale for up to L updates.
- Evaluation and recomputation record nothing.
- A recomputed forward sees the scales its microbatch saw, a snapshot taken when it began.
- `fp8_interval` (dead in Transformer Engine since 1.8) works: amaxes enter the history at every
  update of a tensor, its scale follows at the 1st, (N+1)-th, (2N+1)-th, ... of them. Updates are
  counted per tensor, and only those that roll its history: weights have fewer than inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.spec.formats import FORMATS, Codes, Floats32, Format, quantize

Kind = Literal["input", "weight", "grad_output"]
Direction = Literal["forward", "backward"]
Algo = Literal["max", "most_recent"]

ZERO = np.float32(0)
ONE = np.float32(1)
FLT_MAX = np.finfo(np.float32).max


def amax_of(values: Floats32) -> np.float32:
    """The largest magnitude; +inf if any value is NaN or infinite; 0 for an empty tensor."""
    if values.size == 0:
        return ZERO
    if not np.isfinite(values).all():
        return np.float32(np.inf)
    return np.float32(np.abs(values).max())


def scale_from_amax(
    amax: np.float32, previous: np.float32, fp8_max: float, margin: int
) -> np.float32:
    """fp8_max * 2^-margin / amax, the division in float32; the previous scale if amax is no use."""
    if not np.isfinite(amax) or amax <= 0:
        return previous
    with np.errstate(over="ignore", under="ignore"):
        scale = np.float32(fp8_max * 2.0**-margin) / amax
    return FLT_MAX if np.isinf(scale) else scale


def dequant_scale_of(quant_scale: np.float32) -> np.float32:
    """The factor that undoes a quant_scale: its reciprocal, rounded to float32."""
    with np.errstate(over="ignore", under="ignore"):
        return ONE / quant_scale


def rolled(history: Floats32, amax: np.float32) -> Floats32:
    """The history with the newest amax at its end, the oldest gone and the staging slot empty."""
    length = len(history)
    new = np.zeros_like(history)
    for i in range(length):
        new[i] = history[i + 1] if i < length - 1 else amax
    new[0] = 0
    return new


def amax_for_scale(history: Floats32, amax: np.float32, algo: Algo) -> np.float32:
    """What the scale follows, from the history *before* it rolls: all L amaxes, the one about to
    be dropped included, or the newest only."""
    if algo == "most_recent":
        return amax
    return np.float32(max([*history[1:], amax]))


@dataclass(frozen=True)
class Recipe:
    """The settings, under the names of `Fp8Recipe`."""

    forward_format: str = "e4m3"
    backward_format: str = "e5m2"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Algo = "max"
    fp8_interval: int = 1


@dataclass
class TensorState:
    """What one quantized tensor carries from step to step."""

    kind: Kind
    fmt: Format
    history: Floats32
    scale: np.float32 = ONE
    num_updates: int = 0
    num_nonfinite: int = 0

    @property
    def direction(self) -> Direction:
        """Gradients are quantized in the backward pass, all else in the forward pass."""
        return "backward" if self.kind == "grad_output" else "forward"

    @property
    def dequant_scale(self) -> np.float32:
        """The reciprocal of the scale."""
        return dequant_scale_of(self.scale)

    def record(self, values: Floats32) -> None:
        """Keep the running amax since the last update."""
        self.history[0] = max(self.history[0], amax_of(values))

    def update(self, reduced_amax: np.float32, recipe: Recipe) -> None:
        """One scale update; `reduced_amax` is this tensor's amax over all ranks, or 0."""
        amax = reduced_amax if reduced_amax != 0 else self.history[0]
        if not np.isfinite(amax):
            self.num_nonfinite += 1
            amax = ZERO
        if amax == 0:
            self.history[0] = 0  # a discarded non-finite amax is staged here
            return
        if self.num_updates % recipe.fp8_interval == 0:
            self.scale = scale_from_amax(
                amax_for_scale(self.history, amax, recipe.amax_compute_algo),
                previous=self.scale,
                fp8_max=self.fmt.max,
                margin=recipe.margin,
            )
        self.history = rolled(self.history, amax)
        self.num_updates += 1


@dataclass(frozen=True)
class Quantized:
    """A payload with its own copy of the factor that undoes its scale."""

    codes: Codes
    fmt: Format
    quant_scale: np.float32

    @property
    def dequant_scale(self) -> np.float32:
        """The reciprocal of the scale this payload was made with."""
        return dequant_scale_of(self.quant_scale)


class DelayedScalingModel:
    """The scaling state of one pipeline stage on one rank, and the events that change it.

    A step is `begin_microbatch(0)`, quantizations, `end_forward()`, more, `end_backward()`, then
    microbatch 1 and so on; under a pipeline the forward of a later microbatch may come before the
    backward of an earlier one. `end_*` update the scales of that direction, once a microbatch.
    """

    def __init__(self, tensors: Mapping[str, Kind], recipe: Recipe | None = None) -> None:
        self.recipe = recipe or Recipe()
        self.states: dict[str, TensorState] = {}
        for name, kind in tensors.items():
            backward = kind == "grad_output"
            fmt = FORMATS[self.recipe.backward_format if backward else self.recipe.forward_format]
            history = np.zeros(self.recipe.amax_history_len, dtype=np.float32)
            self.states[name] = TensorState(kind, fmt, history)
        self._microbatch: int | None = None
        self._snapshots: dict[int, dict[str, np.float32]] = {}  # forward scales by microbatch
        self._weights: dict[str, Quantized] = {}  # this step's, made at microbatch 0
        self._recomputing: int | None = None
        self._evaluating = False

    # Events

    def begin_microbatch(self, index: int) -> None:
        """The forward of a microbatch begins; index 0 begins an optimizer step."""
        if index == 0:
            self._snapshots.clear()
            self._weights.clear()
        self._microbatch = index
        self._snapshots[index] = {
            name: state.scale for name, state in self.states.items() if state.direction == "forward"
        }

    def end_forward(self, reduced: Mapping[str, np.float32] | None = None) -> None:
        """Update inputs and weights, with amaxes from `reduce` or this rank's own."""
        self._end("forward", reduced)

    def end_backward(self, reduced: Mapping[str, np.float32] | None = None) -> None:
        """Update output gradients, with amaxes from `reduce` or this rank's own."""
        self._end("backward", reduced)

    @contextmanager
    def recompute(self, index: int) -> Iterator[None]:
        """The forward of a microbatch runs again: same payloads, nothing changes."""
        self._recomputing = index
        try:
            yield
        finally:
            self._recomputing = None

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forwards outside training: today's scales, today's weights, nothing changes."""
        self._evaluating = True
        try:
            yield
        finally:
            self._evaluating = False

    # What happens between them

    def quantize(self, name: str, values: Floats32) -> Quantized:
        """Quantize a tensor with the scale it has now and record its amax.

        A weight is quantized and recorded at microbatch 0 only; later microbatches of the step get
        that payload again, though the scale has moved on.
        """
        state = self.states[name]
        if state.kind == "grad_output" and (self._evaluating or self._recomputing is not None):
            raise ValueError(f"{name}: a gradient in evaluation or recomputation")

        if self._evaluating:
            return _quantized(values, state.scale, state.fmt)
        if self._recomputing is not None:
            if state.kind == "weight":
                return self._weight_of_this_step(name)
            return _quantized(values, self._snapshots[self._recomputing][name], state.fmt)
        if self._microbatch is None:
            raise ValueError(f"{name}: quantized before begin_microbatch")
        if state.kind == "weight" and self._microbatch > 0:
            return self._weight_of_this_step(name)

        state.record(values)
        result = _quantized(values, state.scale, state.fmt)
        if state.kind == "weight":
            self._weights[name] = result
        return result

    def staged(self, direction: Direction) -> dict[str, np.float32]:
        """The amaxes recorded since the last update; 0 for a tensor that did not occur."""
        return {
            name: np.float32(state.history[0])
            for name, state in self.states.items()
            if state.direction == direction
        }

    def _weight_of_this_step(self, name: str) -> Quantized:
        if name not in self._weights:
            raise ValueError(f"{name}: not quantized at microbatch 0 of this step")
        return self._weights[name]

    def _end(self, direction: Direction, reduced: Mapping[str, np.float32] | None) -> None:
        if self._evaluating or self._recomputing is not None:
            return
        amaxes = self.staged(direction) if reduced is None else reduced
        for name in self.staged(direction):
            self.states[name].update(np.float32(amaxes[name]), self.recipe)


def reduce(models: Sequence[DelayedScalingModel], direction: Direction) -> dict[str, np.float32]:
    """The all-reduce: each tensor's largest staged amax over ranks that hold the same tensors."""
    staged = [model.staged(direction) for model in models]
    if any(rank.keys() != staged[0].keys() for rank in staged):
        raise ValueError("the ranks hold different tensors")
    return {name: np.float32(max(rank[name] for rank in staged)) for name in staged[0]}


def _quantized(values: Floats32, scale: np.float32, fmt: Format) -> Quantized:
    return Quantized(quantize(values, scale, fmt), fmt, scale)
