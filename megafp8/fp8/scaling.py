"""Keep the scales of delayed scaling: one table of amaxes, histories and scales per direction.

The rule is Transformer Engine's fused update (delayed_scaling.cu), per tensor, once a microbatch:

    a0 = amax staged since the last update (the MAX over ranks where amaxes are reduced)
    a0 == 0 or not finite:  nothing rolls, the scale stays
    else the history rolls: the oldest entry leaves, a0 becomes the newest
    "max":         amax = max over the last `amax_history_len` updates, the leaving entry included
    "most_recent": amax = a0
    quant_scale = (fp8_max * 2**-margin) / amax in FP32, FLT_MAX where that overflows

With `interval` N (which Transformer Engine has dropped) the scale follows only a tensor's 1st,
(N+1)-th, (2N+1)-th … update; amaxes enter the history at every update.

One point differs on purpose: a non-finite a0 (a NaN counts as +inf) is treated as "did not occur"
and counted, while Transformer Engine lets an infinity freeze the scale for a whole history
(docs/reference/numerics.md). So a tensor that did not occur keeps its state, and therefore a weight
that is quantized once a step rolls once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.formats import FORMATS, Fp8Format
from fp8_numerics.gemm import EMULATED, Engine
from megafp8.fp8.draws import ONE_SAMPLE, Draws, Moment, Tokens
from megafp8.fp8.engine import engine_of
from megafp8.ops import torch_private
from megafp8.specs import Fp8Recipe
from megafp8.specs.recipe import Seen

_FIELDS = ("amax", "history", "quant_scale", "num_updates", "num_nonfinite")
FLOAT32_MAX = torch.finfo(torch.float32).max
Direction = Literal["forward", "backward"]
ReduceMax = Callable[[torch.Tensor], object]  # reduces its argument in place
Update = Callable[[Seen], tuple[torch.Tensor, torch.Tensor]]  # -> the next history and scales


@dataclass(slots=True)
class Pending:
    """Hold a tensor and the operations under way that give the tensor its value.

    `sent` is what these operations send: it is kept alive, and must not change before `wait`.
    """

    tensor: torch.Tensor
    works: Sequence[dist.Work] = ()  # empty: the tensor has its value
    sent: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Wait until the operations are done and return the tensor."""
        for work in self.works:
            work.wait()
        return self.tensor


StartReduceMax = Callable[[torch.Tensor], Pending]  # in place, valid after `wait`
# An observer sees each tensor as it is quantized: its name, the tensor, and what the products that
# sum along its last and along its first dim will read (None for a product that is not in FP8).
Observer = Callable[[str, torch.Tensor, Fp8Tensor | None, Fp8Tensor | None], None]


@dataclass(frozen=True)
class Slot:
    """Name one tensor's row in a table."""

    table: ScaleTable
    index: int


@dataclass(frozen=True)
class _Reciprocals:
    """Hold the dequant_scales of one version of a table's quant_scales.

    `rows` has each tensor's quant_scale and dequant_scale, 0-d.
    """

    quant_scale: torch.Tensor
    version: int
    dequant_scale: torch.Tensor
    rows: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, quant_scale: torch.Tensor, dequant_scale: torch.Tensor) -> _Reciprocals:
        rows = list(zip(quant_scale.unbind(), dequant_scale.unbind(), strict=True))
        return cls(quant_scale, torch_private.version_of(quant_scale), dequant_scale, rows)

    def are_of(self, quant_scale: torch.Tensor) -> bool:
        same = self.quant_scale is quant_scale
        return same and self.version == torch_private.version_of(quant_scale)


TableScales = tuple[torch.Tensor, _Reciprocals | None]  # None: not computed yet


class ScaleTable:
    """Hold the scales of every tensor of one direction, with one update and one reduction for all.

    An update starts its reduction over ranks at once, and the first cast of the next microbatch
    waits for it (`settled`). By that time the other direction's pass has been computed. Whoever
    reads the fields below, except `amax`, calls `settled` first; so does `ScalingState.tables`. An
    update takes the amaxes that are staged, and the next microbatch stages its amaxes in another
    tensor than the one that is reduced.

        amax           [tensors]            staged since the last update (TE's history slot 0)
        history        [tensors, length-1]  earlier amaxes, oldest first (TE's slots 1 to length-1)
        quant_scale    [tensors]
        num_updates    [tensors] int64      how often the history has rolled
        num_nonfinite  [tensors] int64      updates that met a NaN or an infinity

    All but the last two are FP32. `dequant_scale` [tensors] is derived from `quant_scale`.

    With `keeps_addresses` these tensors stay where they are and updates write into them, as a CUDA
    graph needs it that reads them; an update then takes a copy of the staged amaxes.
    """

    def __init__(self, recipe: Fp8Recipe, fmt: Fp8Format) -> None:
        self._under_way: tuple[torch.Tensor, Pending] | None = None  # amaxes and their reduction
        self._reciprocals: _Reciprocals | None = None
        # the staged amaxes, and those of each tensor
        self._staged: tuple[torch.Tensor | None, Sequence[torch.Tensor]] = None, ()
        self._zeros: torch.Tensor | None = None  # staged amaxes of earlier, which a kernel zeroed
        self.keeps_addresses = False
        self.updates: list[tuple[torch.Tensor, torch.Tensor]] | None = (
            None  # a probe's, see `_roll`
        )
        self.recipe = recipe
        self.fmt = fmt
        self.names: list[str] = []
        self._has: set[str] = set()  # the names: a model of many experts has 100,000
        self.elsewhere: set[str] = set()  # of the names: tensors that other ranks cast
        self._own: dict[Update, list[int]] = {}  # the rows that have another rule
        self.engine = EMULATED
        self._device = torch.device("cpu")

    # A field gets memory when it is used first, once for all rows: tables have thousands of them.

    @cached_property
    def amax(self) -> torch.Tensor:
        """Return the staged amaxes."""
        return self._rows(0.0)

    @cached_property
    def history(self) -> torch.Tensor:
        """Return the earlier amaxes."""
        return self._rows(0.0, self.recipe.amax_history_len - 1)

    @cached_property
    def quant_scale(self) -> torch.Tensor:
        """Return the scales, 1 at first."""
        return self._rows(1.0)

    @cached_property
    def num_updates(self) -> torch.Tensor:
        """Return how often each history has rolled."""
        return self._rows(0)

    @cached_property
    def num_nonfinite(self) -> torch.Tensor:
        """Return how many updates met a NaN or an infinity."""
        return self._rows(0)

    @cached_property
    def _own_rows(self) -> list[tuple[Update, torch.Tensor]]:
        """Return the rows of each other rule, there: a list's copy to a GPU would be waited for."""
        device = self._device
        return [(own, torch.tensor(rows, device=device)) for own, rows in self._own.items()]

    def _rows(self, value: float, *columns: int) -> torch.Tensor:
        """Return a field of which every row has `value`: FP32, or int64 for a whole number."""
        dtype = torch.int64 if isinstance(value, int) else torch.float32
        return torch.full((len(self.names), *columns), value, dtype=dtype, device=self._device)

    def register(self, name: str, own: Update | None = None, *, is_here: bool = True) -> Slot:
        """Add a row for the tensor `name` and return it.

        `own` is the rule of its history and scale, in place of Transformer Engine's. A tensor that
        other ranks cast has a row here too, without `is_here`: ranks reduce their tables by place,
        and must have the same rows (`fp8/rows.py`). All rows are registered before the first
        microbatch: a new row resets the whole table.
        """
        assert name not in self._has, f"{name} is registered twice"
        self._has.add(name)
        if own is not None:
            self._own.setdefault(own, []).append(len(self.names))
        self.names.append(name)
        if not is_here:
            self.elsewhere.add(name)
        for field in (*_FIELDS, "_own_rows"):
            vars(self).pop(field, None)
        return Slot(self, len(self.names) - 1)

    def to(self, device: torch.device) -> None:
        """Move the table's tensors to `device`."""
        self._device = device
        vars(self).pop("_own_rows", None)
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.to(device))

    def take_rows(self, other: ScaleTable) -> None:
        """Take the rows of the tensors that an earlier table has, too, of the same kind."""
        old = {kind: row for row, kind in enumerate(other.kinds())}
        same = [(row, old[kind]) for row, kind in enumerate(self.kinds()) if kind in old]
        if same:
            rows, old_rows = (list(part) for part in zip(*same, strict=True))
            earlier = other.tensors()
            for name, tensor in self.tensors().items():
                tensor[rows] = earlier[name][old_rows]

    def kinds(self) -> list[tuple[str, str, Update | None]]:
        """Return each row's tensor, format and rule (None for Transformer Engine's)."""
        updates = {row: update for update, rows in self._own.items() for row in rows}
        return [(name, self.fmt.name, updates.get(row)) for row, name in enumerate(self.names)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint keeps, by field name."""
        return {name: getattr(self.settled(), name) for name in _FIELDS}

    @property
    def dequant_scale(self) -> torch.Tensor:
        """Return the reciprocals of `quant_scale`; an update makes a new tensor of them."""
        return self._known().dequant_scale

    def cells(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a tensor's quant_scale, dequant_scale, and where a cast raises its amax; all 0-d.

        They are taken apart once for all casts of a microbatch.
        """
        known = self._reciprocals
        if self._under_way is not None or known is None or not known.are_of(self.quant_scale):
            known = self._known()
        staged, amaxes = self._staged
        if staged is not self.amax:
            amaxes = self.amax.unbind()
            self._staged = self.amax, amaxes
        return *known.rows[row], amaxes[row]

    def _known(self) -> _Reciprocals:
        quant_scale, known = self.settled().quant_scale, self._reciprocals
        if known is None or not known.are_of(quant_scale):
            known = self._reciprocals = _Reciprocals.of(quant_scale, quant_scale.reciprocal())
        return known

    @property
    def largest(self) -> float:
        """Return the number to which a scale maps its amax."""
        return self.fmt.max * 2.0**-self.recipe.margin

    def restart(self, row: int, amax: float) -> None:
        """Let a row begin again, with the scale of an amax and an empty history."""
        history, quant_scale = self.settled().history.clone(), self.quant_scale.clone()
        history[row] = 0
        quant_scale[row] = min(self.largest / amax, FLOAT32_MAX)
        self._set("history", history)
        self._set("quant_scale", quant_scale)

    def exchange_scales(self, scales: TableScales) -> TableScales:
        """Let casts use other scales from now on; return those of before."""
        before = self.scales()
        self.quant_scale, self._reciprocals = scales
        return before

    def scales(self) -> TableScales:
        """Return the present scales, with their reciprocals if they are known."""
        return self.settled().quant_scale, self._reciprocals

    def forget_reciprocals(self) -> None:
        """Compute `dequant_scale` again at its next use, into a new tensor."""
        self._reciprocals = None

    def update(self, start_reduce_max: StartReduceMax | None) -> None:
        """Reduce the staged amaxes, roll them into the histories and recompute the scales.

        `start_reduce_max` starts the MAX over ranks in place; None reduces nothing.
        """
        if not self.names:
            return
        staged = self.settled()._take_staged()
        if start_reduce_max is None:
            self._roll(staged)
        else:
            self._under_way = (staged, start_reduce_max(staged))

    def _take_staged(self) -> torch.Tensor:
        """Return the staged amaxes, and begin with zeros."""
        if self.keeps_addresses:
            staged = self.amax.clone()
            self.amax.zero_()
            return staged
        zeros, self._zeros = self._zeros, None
        if zeros is None or zeros.shape != self.amax.shape or zeros.device != self.amax.device:
            zeros = torch.zeros_like(self.amax)
        staged, self.amax = self.amax, zeros
        return staged

    def settled(self) -> ScaleTable:
        """Wait for the update under way, if there is one, finish it, and return the table."""
        if self._under_way is not None:
            (staged, reduction), self._under_way = self._under_way, None
            reduction.wait()
            self._roll(staged)
        return self

    def _roll(self, staged: torch.Tensor) -> None:
        """Roll amaxes into the histories; note them, and the scales that casts had, for a probe."""
        if self.updates is not None:  # the kernel of the update writes zeros over the amaxes
            scales = self.quant_scale.clone() if self.keeps_addresses else self.quant_scale
            self.updates.append((staged.clone(), scales))
        if self.engine.uses_triton and not self._own:
            self._roll_in_one_launch(staged)
            return
        is_finite = staged.isfinite()
        occurred = is_finite & (staged > 0)
        self.num_nonfinite += ~is_finite
        history, window_amax = self.history, staged
        if history.shape[1] > 0:
            if self.recipe.amax_compute_algo == "max":
                window_amax = torch.maximum(staged, history.amax(dim=1))
            history = torch.cat((history[:, 1:], staged[:, None]), dim=1)
        target = torch.full_like(window_amax, self.largest)
        # tensor / tensor is a true division; number / tensor would be a rounded reciprocal times it
        fresh = torch.div(target, window_amax).clamp_(max=FLOAT32_MAX)
        for update, rows in self._own_rows:
            of_rows = (staged[rows], self.history[rows], self.quant_scale[rows])
            history[rows], fresh[rows] = update(Seen(*of_rows, self.fmt, self.recipe))
        if history.shape[1] > 0:
            self._set("history", torch.where(occurred[:, None], history, self.history))
        is_due = occurred & (self.num_updates % self.recipe.interval == 0)
        self._set("quant_scale", torch.where(is_due, fresh, self.quant_scale))
        self.num_updates += occurred

    def _set(self, field: str, value: torch.Tensor) -> None:
        """Give a field its new value: a new tensor, or the same one with `keeps_addresses`."""
        if self.keeps_addresses:
            getattr(self, field).copy_(value)
        else:
            setattr(self, field, value)

    def _roll_in_one_launch(self, staged: torch.Tensor) -> None:
        """Update histories and scales from the amaxes `staged`, by one Triton kernel."""
        from megafp8.fp8.kernels.triton_scales import update_scales

        fields = {**self.tensors(), "amax": staged}
        quant_scale, reciprocals = update_scales(**fields, recipe=self.recipe, fmt=self.fmt)
        self._set("quant_scale", quant_scale)
        if not self.keeps_addresses:
            self._reciprocals = _Reciprocals.of(quant_scale, reciprocals)
            self._zeros = staged


class ScalingState:
    """Hold what the quantizers of one pipeline stage share, and receive the events of a step.

    Training announces the first three for each microbatch; the others are contexts:

        begin_microbatch(i)  i == 0 starts a step: weights are quantized again, their amax recorded
        end_forward()        the forward table is updated; reading a scale waits for the reduction
        end_backward()       the backward table is updated in the same way
        evaluation()         nothing is recorded inside; weights are quantized again
        recomputation()      forward casts inside repeat those of the pass that made the context

    Only `delayed` has rows in the tables; the other recipes keep nothing between microbatches.
    `engine` is the device's way to run casts and products, chosen by `to`. `start_reduce_max`
    starts the MAX of amaxes over the ranks that share them, unless the recipe has `reduce_amax`
    off. With `keeps_addresses` the tables are updated in place; then `end_forward` comes after the
    backward pass, which may still read the scales of the forward pass.
    """

    def __init__(self, recipe: Fp8Recipe, start_reduce_max: StartReduceMax | None = None) -> None:
        self._begin(recipe)
        self.recording = True
        self.fp8_enabled = True  # if False, the linears compute in high precision
        self.marks_infinities = False  # if True, casts make NaN of infinities: none is hidden
        self.observers: list[Observer] = []
        self.weights_version = 0  # raised whenever cached FP8 weights are stale
        self.num_steps = 0  # that have begun; like the version, it is no part of a checkpoint
        self.draws = Draws()
        self.rule_seconds = 0.0  # of the host in rules that are torch operations, in training
        self.engine: Engine = EMULATED  # runs casts, products and updates
        self._start_reduce_max = start_reduce_max if recipe.reduce_amax else None

    def _begin(self, recipe: Fp8Recipe) -> None:
        """Begin with empty tables of a recipe."""
        self.recipe = recipe
        self.forward = ScaleTable(recipe, FORMATS[recipe.forward_format])
        self.backward = ScaleTable(recipe, FORMATS[recipe.gradients_with_history])

    @property
    def keeps_addresses(self) -> bool:
        """Whether everything that outlives a step stays where it is in memory."""
        return self.forward.keeps_addresses

    @keeps_addresses.setter
    def keeps_addresses(self, keeps: bool) -> None:
        self.forward.keeps_addresses = self.backward.keeps_addresses = keeps

    @property
    def tables(self) -> dict[Direction, ScaleTable]:
        """Return the table of each direction, after the updates under way."""
        return {"forward": self.forward.settled(), "backward": self.backward.settled()}

    def change_recipe(self, recipe: Fp8Recipe, requantize: Callable[[], None]) -> None:
        """Scale by another recipe from now on, between two steps.

        `requantize` makes the quantizers of all linears, which register their tensors in tables of
        the new recipe. A tensor that had a history, and has one of the same format now, keeps it
        with its scale; the others begin as in a new run.
        """
        before = self.tables
        self._begin(recipe)
        for table in self.tables.values():
            table.to(before["forward"].amax.device)
        requantize()
        for direction, table in self.tables.items():
            table.take_rows(before[direction])
        self.weights_version += 1

    def to(self, device: torch.device) -> None:
        """Move the tables to `device` and choose its engine."""
        for table in self.tables.values():
            table.to(device)
        self.engine = engine_of(device)

    def begin_microbatch(self, index: int, step: int = 0, tokens: Tokens = ONE_SAMPLE) -> None:
        """Begin microbatch `index` of a step; index 0 makes cached FP8 weights stale.

        Stochastic rounding draws by `step`, which counts those of the whole run, and by the samples
        and positions of the `tokens`.
        """
        self.draws.at = Moment(step, tokens)
        if index == 0:
            self.weights_version += 1
            self.num_steps += 1
        if self.keeps_addresses:  # a graph captures neither an update nor what is older than it
            for table in self.tables.values():
                table.forget_reciprocals()

    def return_to(self, step: int, tokens: Tokens) -> None:
        """Let the casts that follow draw for an earlier microbatch, whose backward pass begins."""
        self.draws.at = Moment(step, tokens)

    def end_forward(self) -> None:
        """Update the forward table, after a microbatch's forward pass."""
        self._update(self.forward)

    def end_backward(self) -> None:
        """Update the backward table, after a microbatch's backward pass."""
        self._update(self.backward)

    def _update(self, table: ScaleTable) -> None:
        table.engine = self.engine
        table.update(self._start_reduce_max)

    @torch.no_grad()
    def forget_staged(self) -> None:
        """Drop the amaxes staged since the last update.

        Weights that are kept in FP8 stage theirs when they are stored. This is for weights that are
        replaced before a product has read them.
        """
        for table in (self.forward, self.backward):
            table.amax.zero_()

    def evaluation(self) -> AbstractContextManager[None]:
        """Return a context in which casts record nothing."""
        return Evaluation(self)

    def recomputation(self) -> AbstractContextManager[None]:
        """Return a context in which forward casts repeat those of the present microbatch.

        It is made in a forward pass and entered when that pass is recomputed, however much later.
        """
        return Recomputation(self)


class Evaluation(AbstractContextManager[None]):
    """Let casts use the present scales and record nothing, inside the context."""

    def __init__(self, state: ScalingState) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._rule_seconds = self._state.rule_seconds
        self._drawn = self._state.draws.snapshot()
        self._state.draws.begin_evaluation()
        self._state.recording = False
        self._state.fp8_enabled = self._state.recipe.fp8_in_evaluation
        self._state.weights_version += 1

    def __exit__(self, *_: object) -> None:
        self._state.rule_seconds = self._rule_seconds
        self._state.draws.restore(self._drawn)
        self._state.recording = True
        self._state.fp8_enabled = True
        self._state.weights_version += 1


class Recomputation(AbstractContextManager[None]):
    """Let forward casts repeat, inside the context, those of the pass that made the context.

    The casts use the scales of that pass and record nothing. An update replaces `quant_scale`, so a
    reference is a snapshot; with several microbatches in flight each has its own. With
    `keeps_addresses` an update writes into `quant_scale`, but it comes after the backward pass, and
    one microbatch is in flight: nothing is recomputed after the scales have moved.
    """

    def __init__(self, state: ScalingState) -> None:
        self._state = state
        self._then = state.forward.scales()
        self._drawn_then = state.draws.snapshot()

    def __enter__(self) -> None:
        self._was_recording = self._state.recording
        self._drawn_now = self._state.draws.snapshot()
        self._state.draws.restore(self._drawn_then)
        self._now = self._state.forward.exchange_scales(self._then)
        self._state.recording = False

    def __exit__(self, *_: object) -> None:
        self._state.draws.restore(self._drawn_now)
        self._then = self._state.forward.exchange_scales(self._now)
        self._state.recording = self._was_recording


class NoScaling:
    """Receive the events of `ScalingState` in a run without FP8, and do nothing."""

    tables: dict[Direction, ScaleTable] = {}
    engine = EMULATED

    def begin_microbatch(self, index: int, step: int = 0, tokens: Tokens = ONE_SAMPLE) -> None:
        """Do nothing."""

    def return_to(self, step: int, tokens: Tokens) -> None:
        """Do nothing."""

    def end_forward(self) -> None:
        """Do nothing."""

    def end_backward(self) -> None:
        """Do nothing."""

    def evaluation(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def recomputation(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()


def formats_of(recipe: Fp8Recipe) -> tuple[Fp8Format, Fp8Format]:
    """Return the formats of (inputs and weights, output gradients) under a recipe."""
    return FORMATS[recipe.forward_format], FORMATS[recipe.backward_format]
