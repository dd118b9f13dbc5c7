"""Keep the state of a converted model: its events, scales, health, and what is saved of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from fp8_numerics.gemm import GemmCounter
from fp8_numerics.kernels.triton_launch import on_device_of
from megafp8.fp8.census import Census, names, patterns_of
from megafp8.fp8.converted import MULTIPLYING, Converted, Fp8Error, Phase, Shared, Stamp, is_sharded
from megafp8.fp8.draws import Tokens
from megafp8.fp8.health import HealthProbe, normally_saturated, num_nonfinite
from megafp8.fp8.reads import Reads
from megafp8.fp8.scaling import ScalingState
from megafp8.observe.health import HealthRecord, complaints
from megafp8.specs.precision import Fp8Recipe
from megafp8.specs.recipes import label_of, traits_of
from megafp8.specs.run import HealthMode, HealthSpec, TensorHealth

FIELDS = ("history", "quant_scale", "num_updates", "num_nonfinite")
"""The fields of a scale table that are saved; a staged amax is 0 between microbatches."""
STEP = "step"
"""The key of the number of steps, which is saved for recipes that round stochastically."""


@dataclass(frozen=True)
class Scale:
    """Describe one tensor's delayed scale between microbatches."""

    quant_scale: float  # the next microbatch is multiplied by it before the cast
    num_updates: int  # microbatches whose amax has entered the history
    num_nonfinite: int  # microbatches that met a NaN or an infinity


@dataclass
class HealthReport:
    """Report what FP8 did to each tensor, by its name; filled when its context ends.

    `recipe` says what is normal for a tensor. `idle` has the linears that were never called since
    the conversion: their weights are multiplied elsewhere, or not at all.
    """

    recipe: Fp8Recipe
    tensors: dict[str, TensorHealth] = field(default_factory=dict)
    num_nonfinite: dict[str, int] = field(default_factory=dict)  # since the conversion
    idle: list[str] = field(default_factory=list)

    def complaints(self, limits: HealthSpec | None = None) -> dict[str, str]:
        """Return the tensors beyond a limit, and the idle linears, and what is wrong with each.

        A recipe that saturates some values of healthy tensors has a limit of its own for these.
        """
        record = HealthRecord(0, self.tensors, self.num_nonfinite)
        found = complaints(record, limits or HealthSpec(), partial(normally_saturated, self.recipe))
        return found | dict.fromkeys(self.idle, "the linear was never called, so FP8 never ran")


class Fp8State:
    """Hold the scales of FP8 linears and the events that move them; `fp8.convert` returns one.

    `linears` has the converted modules by name. Their tensors are named after them, with `.input`,
    `.weight` or `.grad_output` at the end.
    """

    def __init__(self, shared: Shared, census: Census, model: nn.Module) -> None:
        self._shared, self._census, self._model = shared, census, model
        self._share: float | None = None
        self._was_watched = False  # a microbatch with products has ended
        # Watched linears: those that were named, and idle ones whose weights have gradients.
        self._judged: set[str] = set()
        self._is_doubtful = False  # there are such linears that were not watched
        self._stamps: dict[str, Stamp] = {}  # of the weights, at a step's first microbatch
        # Stochastic rounding draws by it.
        self._step = torch.zeros((), dtype=torch.int64, device="cpu")
        self._num_microbatches = 0  # of the present step

    def __repr__(self) -> str:
        """Return three lines: what is converted, by which recipe, and what stays as it was."""
        kinds = (type(each).__name__.removeprefix("Fp8") for each in self.linears.values())
        recipes = (label_of(self.recipe.precision_of(name)) for name in self.linears)
        idle = self._idle()
        never = names(idle) if len(idle) < len(self.linears) else ""
        return "\n".join(self._census.lines(kinds, recipes, never, self.share))

    @property
    def recipe(self) -> Fp8Recipe:
        """The recipe that the model was converted with."""
        return self._shared.scaling.recipe

    @property
    def linears(self) -> Mapping[str, Converted]:
        """Return the converted modules by name."""
        return self._shared.linears

    @property
    def scaling(self) -> ScalingState:
        """Return the scale tables and their observers, for code that wants to see every cast."""
        return self._shared.scaling

    @property
    def counter(self) -> GemmCounter:
        """Return the FLOPs that the converted linears really ran, by precision."""
        return self._shared.counter

    @property
    def share(self) -> float | None:
        """Return the share of FP8 in the FLOPs of the first microbatch; None where it is not known.

        All products count, those of other code too, in both passes, but for attention and the
        output layer.
        """
        return self._share

    @contextmanager
    def microbatch(
        self, *, first: bool = True, samples: Sequence[int] | None = None
    ) -> Iterator[None]:
        """Enclose forward and backward of one microbatch; at the end delayed scales are updated.

        Args:
            first: Whether this is the first microbatch since the weights changed: their amaxes are
                recorded then, and later ones repeat their scales. With gradient accumulation, pass
                `first=i == 0` for microbatch `i` of an optimizer step.
            samples: The numbers of the samples (the first dim of the inputs) among those of this
                step, on all ranks. Stochastic rounding draws by them, so that ranks and other
                divisions into microbatches draw what one process does. None counts microbatches
                instead, on each rank.

        An exception inside leaves the scales as they were before.

        Raises:
            Fp8Error: `first=False` although a weight has changed, or contexts are nested.
        """
        scaling = self._shared.scaling
        with self._phase("microbatch"):
            if first:
                self._begin_step()
            else:
                self._check_same_weights()
            self._step += first
            self._num_microbatches = 0 if first else self._num_microbatches + 1
            tokens = Tokens((self._num_microbatches,) if samples is None else tuple(samples))
            scaling.begin_microbatch(0 if first else 1, int(self._step), tokens)
            uses = {name: linear.fp8.num_uses for name, linear in self.linears.items()}
            own = self._ran()
            reads = self._reads() if self._is_doubtful or not self._was_watched else None
            try:
                with reads or nullcontext():
                    yield
            except BaseException:
                for table in scaling.tables.values():
                    table.amax = torch.zeros_like(table.amax)
                scaling.weights_version += 1
                self._stamps.clear()
                raise
            with on_device_of(scaling.forward.amax):  # a kernel updates a table
                scaling.end_forward()
                scaling.end_backward()
            self._shared.has_scales = True
            if reads is not None and not self._was_watched:
                self._take_share(reads, own)
            self._judge(reads, uses)

    @contextmanager
    def evaluation(self, *, keep_weights: bool = False) -> Iterator[None]:
        """Enclose forward passes that leave no trace in the scales.

        Args:
            keep_weights: Quantize each weight once for all passes inside, which is faster for few
                tokens at a time. No weight may change then: a write that torch counts is refused,
                one that it does not count (through `.data`, into a flat buffer) is not seen.

        `recipe.fp8_in_evaluation=False` computes them in high precision. A forward pass under
        `torch.no_grad()` outside of every context is an evaluation too.
        """
        self._shared.say_without_scales()
        with self._phase("evaluation"), self._shared.scaling.evaluation():
            with self._kept_weights() if keep_weights else nullcontext():
                yield
        self._stamps.clear()  # the weights are quantized again, so a step may not continue

    @contextmanager
    def _kept_weights(self) -> Iterator[None]:
        """Let linears keep their FP8 weights inside the context."""
        bounds = [linear.fp8 for linear in self.linears.values()]
        for bound, linear in zip(bounds, self.linears.values(), strict=True):
            bound.kept_stamp, bound.weight_form.kept = linear.stamp(), {}
        try:
            yield
        finally:
            for bound in bounds:
                bound.kept_stamp = bound.weight_form.kept = None

    @contextmanager
    def health(self, mode: HealthMode = "full") -> Iterator[HealthReport]:
        """Measure the casts inside, of training and of evaluation; fill the report at the end.

        `full` compares each tensor with its FP8 values, which takes a few passes over it; `scales`
        measures amaxes and scales alone. Waits for the device at the end.

        Raises:
            Fp8Error: The mode is unknown, or nothing was cast to FP8 inside, so that an empty
                report would look healthy.
        """
        if mode not in ("full", "scales"):
            raise Fp8Error(f"mode={mode!r}", "measures nothing", "Use 'full' or 'scales'")
        report = HealthReport(self.recipe)
        probe = HealthProbe(self._shared.scaling, mode, with_untraced=True)
        probe.attach()
        try:
            yield report
        finally:
            report.tensors = probe.detach()
            report.num_nonfinite = num_nonfinite(self._shared.scaling)
            report.idle = self._idle()
        if not report.tensors:
            raise Fp8Error(
                "state.health()",
                "no tensor was cast to FP8 inside, so nothing was measured",
                "Enclose forward passes of the model; recipe.fp8_in_evaluation=False evaluates "
                "without FP8",
            )

    def scales(self) -> dict[str, Scale]:
        """Return the delayed scale of each tensor; waits for the device.

        Raises:
            Fp8Error: No linear has delayed scaling; the other recipes keep no scale.
        """
        scales: dict[str, Scale] = {}
        for table in self._shared.scaling.tables.values():
            columns = (table.quant_scale, table.num_updates, table.num_nonfinite)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            scales |= {n: Scale(*row) for n, row in zip(table.names, rows, strict=True)}
        if not scales:
            raise Fp8Error(
                f"recipe={self.recipe.name!r}",
                "takes scales from each tensor itself and keeps none",
                "Look at the scales of a step with `with state.health('scales') as report:`",
            )
        return scales

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the scales as plain tensors by name, copies, for safetensors or torch.save.

        Keys are `<linear>.<role>/<field>`. Recipes without delayed scaling keep nothing, so their
        dictionary is empty, but for the number of steps where they round stochastically.
        """
        self._refuse_inside("state_dict()")
        return {key: row.detach().clone() for key, row in self._rows()}

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned, on this state's device; all of it or nothing.

        Raises:
            Fp8Error: The tensors are not those of this model and recipe.
        """
        self._refuse_inside("load_state_dict()")
        known = dict(self._rows())
        hint = "Convert the same model with the same recipe and skip"
        if not isinstance(saved, Mapping):
            raise Fp8Error(
                "state.load_state_dict()",
                f"takes a dictionary of tensors and got {type(saved).__name__}: {saved!r:.60}",
                "Give what state.state_dict() returned, such as checkpoint['fp8']",
            )
        for key, value in saved.items():
            if not isinstance(value, torch.Tensor):
                raise Fp8Error(str(key), f"is a {type(value).__name__} in the saved state", hint)
        for key in known.keys() ^ saved.keys():
            reason = (
                "is missing in the saved state" if key in known else "belongs to no linear here"
            )
            raise Fp8Error(key, reason, hint)
        for key, row in known.items():
            got = saved[key]
            if got.shape != row.shape or got.dtype != row.dtype:
                raise Fp8Error(
                    key,
                    f"is {got.dtype} of shape {tuple(got.shape)} in the saved state, and "
                    f"{row.dtype} of shape {tuple(row.shape)} here",
                    hint,
                )
        for table in self._shared.scaling.tables.values():
            for name in FIELDS if table.names else ():
                rows = [saved[f"{tensor}/{name}"].to(table.amax.device) for tensor in table.names]
                setattr(table, name, torch.stack(rows))
        if STEP in saved:
            self._step.copy_(saved[STEP])
        self._shared.has_scales = self._shared.scales_are_fresh = True

    def _rows(self) -> Iterator[tuple[str, torch.Tensor]]:
        for table in self._shared.scaling.tables.values():
            for name in FIELDS:
                rows = getattr(table, name)
                yield from ((f"{tensor}/{name}", rows[i]) for i, tensor in enumerate(table.names))
        if self._is_random():
            yield STEP, self._step

    def _is_random(self) -> bool:
        """Whether a linear's recipe rounds stochastically."""
        names = {self.recipe.precision_of(name) for name in self.linears}
        traits = (traits_of(name) for name in names)
        return any(casts.is_random for t in traits if t is not None for casts in t.casts.values())

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        """Let the converted linears run in `phase` inside the context."""
        self._refuse_inside(f"{phase}()")
        self._shared.is_copy = False  # this state may have been copied together with its model
        self._shared.follow()
        self._shared.phase, self._shared.scales_are_fresh = phase, False
        try:
            yield
        finally:
            self._shared.phase = "outside"

    def _idle(self) -> list[str]:
        """Return the names of the linears that were never called."""
        return [name for name, linear in self.linears.items() if not linear.fp8.num_uses]

    def _reads(self) -> Reads:
        """Return what finds the converted weights by which other code multiplies."""
        fixed = [*self._model.parameters(), *self._model.buffers()]
        plain = [tensor for tensor in fixed if type(tensor) in (torch.Tensor, nn.Parameter)]
        weights = {
            name: [w for w in linear.stored_weights() if type(w) in (torch.Tensor, nn.Parameter)]
            for name, linear in self.linears.items()
        }
        modules = dict(self._model.named_modules())
        heads = [getattr(modules.get(n), "weight", None) for n in self._census.output_layers]
        weights_of_heads = [w for w in heads if type(w) is nn.Parameter]
        return Reads(plain, weights, weights_of_heads, lambda: MULTIPLYING.depth > 0)

    def _ran(self) -> dict[str, int]:
        """Return the FLOPs that converted linears ran but output layers, by precision."""
        all_of_them = self.counter.by_precision()
        return {key: n - self._shared.of_heads[key] for key, n in all_of_them.items()}

    def _take_share(self, reads: Reads, before: Mapping[str, int]) -> None:
        """Compute the share of FP8 from what ran, and the counts of before."""
        ran = {key: n - before.get(key, 0) for key, n in self._ran().items()}
        whole = sum(ran.values()) + reads.flops["linear"]
        self._share = ran.get("fp8", 0) / whole if whole and reads.is_counted else None

    def _judge(self, reads: Reads | None, uses: Mapping[str, int]) -> None:
        """Name linears that did not run, while other code multiplied by their weights.

        A linear that did not run is no fault by itself: its layer may have been left out. If its
        weight has a gradient, the next microbatch is watched, unless this one was.

        Raises:
            Fp8Error: This is the first microbatch that is watched. Later ones warn.
        """
        idle = [name for name in self._idle() if name not in self._judged]
        with_gradients = {
            name
            for name in idle
            if any(w.is_leaf and w.grad is not None for w in self.linears[name].stored_weights())
        }
        if reads is None:
            self._is_doubtful = bool(with_gradients)
            return
        ran = any(linear.fp8.num_uses > uses[n] for n, linear in self.linears.items())
        if not ran and not reads.saw_products:
            return
        self._judged |= with_gradients
        is_first, self._was_watched, self._is_doubtful = not self._was_watched, True, False
        read = [n for n in uses if n in reads.found and self.linears[n].fp8.num_uses == uses[n]]
        self._judged.update(read)
        if not read:
            return
        skip = [*self._census.skip, *patterns_of(read, self.linears, set(read))]
        error = Fp8Error(
            names(read),
            "converted, but other code multiplies by the weight in high precision, and the linear "
            "did not run in FP8",
            f"Call the module where its weight is read, or use skip={skip!r} in fp8.convert",
        )
        if is_first:
            raise error
        warnings.warn(str(error), stacklevel=4)

    def _refuse_inside(self, call: str) -> None:
        if self._shared.phase != "outside":
            raise Fp8Error(
                f"state.{call}",
                f"is used inside of state.{self._shared.phase}()",
                "Leave that context first",
            )

    def _begin_step(self) -> None:
        """Remember each weight's address and version, to detect a change before the step ends.

        A weight that is sharded is gathered again for the backward pass.
        """
        self._stamps = {}
        for name, linear in self.linears.items():
            is_gathered = any(map(is_sharded, linear.stored_weights()))
            linear.fp8.weight_form.is_saved_for_backward = not is_gathered
            self._stamps[name] = linear.stamp()

    def _check_same_weights(self) -> None:
        """Raise `Fp8Error` if a weight has changed since the step's first microbatch."""
        if not self._stamps:
            raise Fp8Error(
                "state.microbatch(first=False)",
                "no microbatch of this step came before it",
                "Pass first=True for the first microbatch of each optimizer step",
            )
        for name, linear in self.linears.items():
            if linear.stamp() != self._stamps.get(name):
                raise Fp8Error(
                    name,
                    "its weight has changed since the first microbatch of the step",
                    "Pass first=True to state.microbatch() after optimizer.step()",
                )
