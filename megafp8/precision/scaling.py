"""Delayed scaling: one table of amaxes, histories and scales per direction.

The rule is Transformer Engine's fused update (delayed_scaling.cu), per tensor, once a microbatch:

    a0 = amax staged since the last update (the MAX over ranks where amaxes are reduced)
    a0 == 0 or not finite:  nothing rolls, the scale stays
    else the history rolls: the oldest entry leaves, a0 becomes the newest
    "max":         amax = max over the last `amax_history_len` updates, the leaving entry included
    "most_recent": amax = a0
    quant_scale = (fp8_max * 2**-margin) / amax in FP32, FLT_MAX where that overflows

With `interval` N (TE has dropped it) the scale follows a tensor's 1st, (N+1)-th, (2N+1)-th … update
only; amaxes enter the history at every one.

We differ in one point, on purpose: a non-finite a0 (a NaN counts as +inf) is treated as "did not
occur" and counted, where TE lets an infinity freeze the scale for a whole history
(docs/numerics.md). So a tensor that did not occur keeps its state, which is also what makes a
weight that is quantized once a step roll once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megafp8.precision.engine import EMULATED, Engine, engine_of
from megafp8.precision.formats import Fp8Format, formats_of
from megafp8.precision.tensor import Fp8Tensor
from megafp8.specs import Fp8Recipe

FLOAT32_MAX = torch.finfo(torch.float32).max
Direction = Literal["forward", "backward"]
ReduceMax = Callable[[torch.Tensor], object]  # in place


class Waitable(Protocol):
    def wait(self) -> object: ...


StartReduceMax = Callable[[torch.Tensor], Waitable]  # in place, over when it has been waited for
# Sees each tensor as it is quantized: its name, the tensor, and what the products that sum along
# its last and along its first dim will read (None: nothing in FP8).
Observer = Callable[[str, torch.Tensor, Fp8Tensor | None, Fp8Tensor | None], None]


@dataclass(frozen=True)
class Slot:
    """One tensor's place in a table."""

    table: ScaleTable
    index: int
    fmt: Fp8Format

    @property
    def quant_scale(self) -> torch.Tensor:
        """0-d FP32 view of the current scale."""
        return self.table.quant_scale[self.index]

    @property
    def amax(self) -> torch.Tensor:
        """0-d FP32 view of the amax staged since the last update."""
        return self.table.amax[self.index]


class _Settled:
    """A field of a table, looked at only when the update under way is over."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, table: ScaleTable, owner: type | None = None) -> torch.Tensor:
        table.settle()
        value: torch.Tensor = getattr(table, self.name)
        return value

    def __set__(self, table: ScaleTable, value: torch.Tensor) -> None:
        table.settle()
        setattr(table, self.name, value)


class ScaleTable:
    """The scales of every tensor of one direction, contiguous: one update, one reduction for all.

    A reduction is started at its event and waited for when a scale is read again, by which time
    the other direction's pass has been computed.

    amax           [tensors]            staged since the last update (TE's history slot 0)
    history        [tensors, length-1]  earlier amaxes, oldest first (TE's slots 1 to length-1)
    quant_scale    [tensors]
    num_updates    [tensors] int64      how often the history has rolled
    num_nonfinite  [tensors] int64      updates that met a NaN or an infinity
    """

    history, quant_scale = _Settled(), _Settled()
    num_updates, num_nonfinite = _Settled(), _Settled()

    def __init__(self, recipe: Fp8Recipe, fmt: Fp8Format) -> None:
        self._under_way: tuple[torch.Tensor, Waitable] | None = None  # amaxes and their reduction
        self.recipe = recipe
        self.fmt = fmt
        self.names: list[str] = []
        self.engine = EMULATED
        self._allocate(torch.device("cpu"))

    def _allocate(self, device: torch.device) -> None:
        count = len(self.names)
        self.amax = torch.zeros(count, device=device)
        self.history = torch.zeros(count, self.recipe.amax_history_len - 1, device=device)
        self.quant_scale = torch.ones(count, device=device)
        self.num_updates = torch.zeros(count, dtype=torch.int64, device=device)
        self.num_nonfinite = torch.zeros(count, dtype=torch.int64, device=device)

    def register(self, name: str) -> Slot:
        """A new row. All rows are registered before the first `tensors()`-changing event."""
        assert name not in self.names, f"{name} is registered twice"
        self.names.append(name)
        self._allocate(self.amax.device)
        return Slot(self, len(self.names) - 1, self.fmt)

    def to(self, device: torch.device) -> None:
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.to(device))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state that a checkpoint keeps, by field."""
        fields = ("amax", "history", "quant_scale", "num_updates", "num_nonfinite")
        return {name: getattr(self, name) for name in fields}

    def update(self, start_reduce_max: StartReduceMax | None) -> None:
        """Reduce the staged amaxes, roll them into the histories and recompute the scales."""
        if not self.names:
            return
        self.settle()
        staged, self.amax = self.amax, torch.zeros_like(self.amax)
        if start_reduce_max is None:
            self._roll(staged)
        else:
            self._under_way = (staged, start_reduce_max(staged))

    def settle(self) -> None:
        """End the update under way, if there is one."""
        if self._under_way is not None:
            (staged, reduction), self._under_way = self._under_way, None
            reduction.wait()
            self._roll(staged)

    def _roll(self, staged: torch.Tensor) -> None:
        if self.engine.uses_triton:
            self._roll_in_one_launch(staged)
            return
        is_finite = staged.isfinite()
        occurred = is_finite & (staged > 0)
        self.num_nonfinite += ~is_finite
        if self.recipe.amax_compute_algo == "max" and self.history.shape[1] > 0:
            window_amax = torch.maximum(staged, self.history.amax(dim=1))
        else:
            window_amax = staged
        if self.history.shape[1] > 0:
            rolled = torch.cat((self.history[:, 1:], staged[:, None]), dim=1)
            self.history = torch.where(occurred[:, None], rolled, self.history)
        target = torch.full_like(window_amax, self.fmt.max * 2.0**-self.recipe.margin)
        # tensor / tensor is a true division; number / tensor would be a rounded reciprocal times it
        fresh = torch.div(target, window_amax).clamp_(max=FLOAT32_MAX)
        is_due = occurred & (self.num_updates % self.recipe.interval == 0)
        self.quant_scale = torch.where(is_due, fresh, self.quant_scale)
        self.num_updates += occurred

    def _roll_in_one_launch(self, staged: torch.Tensor) -> None:
        from megafp8.precision.kernels.triton_scales import update_scales

        # The kernel writes in place; scales of earlier microbatches must stay (`Recomputation`).
        self.quant_scale = self.quant_scale.clone()
        fields = {**self.tensors(), "amax": staged}
        update_scales(**fields, recipe=self.recipe, fmt=self.fmt)


class ScalingState:
    """What the quantizers of one pipeline stage share, and the events that move it.

    begin_microbatch(i)  i == 0 starts a step: weights are quantized anew and their amax recorded
    end_forward()        forward amaxes are reduced and rolled: begun, over before a scale is read
    end_backward()       backward amaxes likewise
    evaluation()         a context in which nothing is recorded; weights are quantized anew for it
    recomputation()      a context in which forward casts repeat those of the call that made it

    Only `delayed` has rows in the tables; the other recipes keep nothing between microbatches.
    `engine` is how casts and products run: the device's own, chosen by `to`.
    """

    def __init__(self, recipe: Fp8Recipe, start_reduce_max: StartReduceMax | None = None) -> None:
        forward_format, backward_format = formats_of(recipe)
        self.recipe = recipe
        self.forward = ScaleTable(recipe, forward_format)
        self.backward = ScaleTable(recipe, backward_format)
        self.recording = True
        self.fp8_enabled = True  # False: the linears compute in high precision
        self.observers: list[Observer] = []
        self.weights_version = 0  # raised whenever cached FP8 weights are stale
        self._start_reduce_max = start_reduce_max if recipe.reduce_amax else None
        self._engine = EMULATED

    @property
    def engine(self) -> Engine:
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._engine = self.forward.engine = self.backward.engine = engine

    @property
    def tables(self) -> dict[Direction, ScaleTable]:
        return {"forward": self.forward, "backward": self.backward}

    def to(self, device: torch.device) -> None:
        for table in self.tables.values():
            table.to(device)
        self.engine = engine_of(device)

    def begin_microbatch(self, index: int) -> None:
        if index == 0:
            self.weights_version += 1

    def end_forward(self) -> None:
        self.forward.update(self._start_reduce_max)

    def end_backward(self) -> None:
        self.backward.update(self._start_reduce_max)

    def evaluation(self) -> AbstractContextManager[None]:
        return Evaluation(self)

    def recomputation(self) -> AbstractContextManager[None]:
        """To be made in a forward pass and entered when it is recomputed, however much later."""
        return Recomputation(self)


class Evaluation(AbstractContextManager[None]):
    """Context manager: casts use the scales as they are and leave no trace in them."""

    def __init__(self, state: ScalingState) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._state.recording = False
        self._state.fp8_enabled = self._state.recipe.fp8_in_evaluation
        self._state.weights_version += 1

    def __exit__(self, *_: object) -> None:
        self._state.recording = True
        self._state.fp8_enabled = True
        self._state.weights_version += 1


class Recomputation(AbstractContextManager[None]):
    """Context manager: forward casts use the scales of the time it was made, and record nothing.

    An update replaces `quant_scale` and never writes into it, so a reference is a snapshot; with
    several microbatches in flight each has its own.
    """

    def __init__(self, state: ScalingState) -> None:
        self._state = state
        self._then = state.forward.quant_scale

    def __enter__(self) -> None:
        self._now = self._state.forward.quant_scale
        self._was_recording = self._state.recording
        self._state.forward.quant_scale = self._then
        self._state.recording = False

    def __exit__(self, *_: object) -> None:
        self._state.forward.quant_scale = self._now
        self._state.recording = self._was_recording


class NoScaling:
    """The events of `ScalingState` for a run without FP8."""

    tables: dict[Direction, ScaleTable] = {}
    engine = EMULATED

    def begin_microbatch(self, index: int) -> None: ...

    def end_forward(self) -> None: ...

    def end_backward(self) -> None: ...

    def evaluation(self) -> AbstractContextManager[None]:
        return nullcontext()

    def recomputation(self) -> AbstractContextManager[None]:
        return nullcontext()
