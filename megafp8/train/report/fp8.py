"""Report how FP8 runs: the fraction of FLOPs, the kernels, and the health of the tensors.

The fraction is that of a step's GEMM FLOPs, computed from the model that was built. Kernels are FP8
tensor cores or an emulation, and Triton, C or torch for the casts. Attention's two products are
never in FP8 and not included here; summary.json has the counted fraction with and without them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from megafp8.backends.te.layer import TeLayer
from megafp8.backends.te.state import TeScaling
from megafp8.backends.torchao import TorchaoLinear
from megafp8.errors import ConfigError
from megafp8.files import Warn
from megafp8.observe.health import HEALTH_FILE, HealthRecord, complaints, merged, scalars
from megafp8.observe.metrics import MetricsFile
from megafp8.observe.trackers import CompositeTracker
from megafp8.parallel.agreement import gather
from megafp8.parallel.parts import linears_of
from megafp8.precision.engine import Engine
from megafp8.precision.formats import DTYPE_NAMES
from megafp8.precision.gemm import wide_dtype
from megafp8.precision.health import HealthProbe, TableProbe, num_nonfinite
from megafp8.precision.kernels.compile import library
from megafp8.precision.linear import Linear
from megafp8.precision.scaling import ScalingState
from megafp8.specs import Fp8Recipe, GPTSpec, HealthSpec, RunSpec
from megafp8.specs.precision import GEMMS, PlannedGemms
from megafp8.specs.recipes import HIGH_PRECISION, find_recipe, label_of, traits_of
from megafp8.train.state import TrainState


@dataclass(frozen=True)
class PrecisionShare:
    """Hold the GEMM FLOPs of one token, forward and backward, over the whole model.

    `higher` names the linears that are not in FP8, or only in part, each with the reason.
    """

    fp8_flops: int
    total_flops: int
    higher: tuple[str, ...]

    @property
    def share(self) -> float:
        """Fraction of the FLOPs that are in FP8, 0 to 1."""
        return self.fp8_flops / max(1, self.total_flops)


@dataclass(frozen=True)
class LinearFlops:
    """Hold the GEMM FLOPs of one token over the linears of one rank.

    `reasons` has the names of the linears that are not wholly in FP8, by reason.
    """

    fp8: int
    total: int
    reasons: dict[str, list[str]]


def share_of_ranks(
    parts: Sequence[LinearFlops], spec: GPTSpec, num_replicas: int
) -> PrecisionShare:
    """Return the FP8 fraction of a model, given the FLOPs of all ranks.

    Each part of the model is on `num_replicas` ranks.
    """
    total = sum(part.total for part in parts) // num_replicas
    head = 2 * spec.vocab_size * spec.hidden_size * len(GEMMS)
    reasons: dict[str, list[str]] = defaultdict(list)
    for part in parts:
        for why, names in part.reasons.items():
            reasons[why] += names
    higher = [f"head ({head / max(1, total + head):.0%}; never in FP8)"]
    higher += [f"{_names(list(dict.fromkeys(n)))} ({why})" for why, n in reasons.items()]
    fp8 = sum(part.fp8 for part in parts) // num_replicas
    return PrecisionShare(fp8, total + head, tuple(higher))


def share_of(spec: RunSpec, state: TrainState) -> PrecisionShare | None:
    """Return the FP8 fraction of a run's steps, or None for a run without FP8.

    All ranks call it together.

    Raises:
        ConfigError: The run asks for FP8, and no product would run in it.
    """
    recipe = spec.precision.fp8
    if recipe is None:
        return None
    parts = gather(state.mesh, linear_flops(state.model, recipe))
    share = share_of_ranks(parts, spec.model, state.mesh.data.size)
    require_fp8(share)
    return share


def linear_flops(model: nn.Module, recipe: Fp8Recipe) -> LinearFlops:
    """Return the FLOPs of one rank's model, of our own linears and of other backends' modules."""
    fp8 = total = 0
    reasons: dict[str, list[str]] = defaultdict(list)
    for linear in linears_of(model):
        flops = 2 * linear.weight.numel()
        total += flops * len(GEMMS)
        if linear.quantizer is None:
            reasons[_why(linear, recipe)].append(linear.name)
            continue
        fp8 += flops * len(linear.quantizer.fp8_gemms)
        for gemm in GEMMS:
            if not linear.quantizer.is_fp8(gemm):
                own = find_recipe(recipe.precision_of(linear.name)).traits.high_precision
                why = "model.fp8_recipe" if gemm in own else "chosen by product"
                reasons[f"{gemm}, {why}"].append(linear.name)
    for planned in _planned(model):
        total += planned.flops * len(GEMMS)
        fp8 += planned.flops * len(planned.fp8)
        if len(planned.fp8) < len(GEMMS):
            missing = ", ".join(gemm for gemm in GEMMS if gemm not in planned.fp8)
            reasons[f"{missing}, {planned.reason}"].append(planned.name)
    return LinearFlops(fp8, total, dict(reasons))


def require_fp8(share: PrecisionShare) -> None:
    """Raise `ConfigError` if no product is in FP8, since the run asks for FP8."""
    if share.fp8_flops == 0:
        raise ConfigError(
            "model.fp8",
            True,
            "no product would run in FP8: " + "; ".join(share.higher),
            "Leave some linears to FP8 in model.fp8_modules, or set model.fp8=False",
        )


def _why(linear: Linear, recipe: Fp8Recipe) -> str:
    rule = next((rule for rule in recipe.modules if rule.matches(linear.name)), None)
    return "first or last, kept by torchao's default" if rule is None else rule.source


def _planned(model: nn.Module) -> Iterator[PlannedGemms]:
    for module in model.modules():
        if isinstance(module, TorchaoLinear | TeLayer):
            yield module.planned()


def _names(names: list[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{len(names)} linears, {names[0]} to {names[-1]}"


def kernels_of(recipe: Fp8Recipe, engine: Engine, device: torch.device, work: torch.dtype) -> str:
    """Return a description of the kernels that run the recipe's products and casts on `device`.

    `engine` is the scaling state's; `work` is the dtype of the products' results.
    """
    named = [recipe.name, *(rule.precision for rule in recipe.modules)]
    recipes = [name for name in dict.fromkeys(named) if name != HIGH_PRECISION]
    in_hardware = [
        all(
            layout is not None and engine.multiplies(layout, work)
            for layout in find_recipe(name).traits.layouts
        )
        for name in recipes
    ]
    wide = DTYPE_NAMES[wide_dtype(device, work)].upper()
    kinds = " and ".join(dict.fromkeys(find_recipe(name).traits.kind for name in recipes))
    over = f"{kinds} bytes"
    if kinds == "simulated":
        wide, over = "FP32", "the values of the rule"
    cores, emulated = "FP8 tensor cores", f"emulated: {wide} GEMMs over {over}"
    if all(in_hardware):
        products = cores
    elif not any(in_hardware):
        products = emulated
    else:
        mixed = zip(recipes, in_hardware, strict=True)
        products = ", ".join(f"{label_of(name)} on {cores}" for name, runs in mixed if runs)
        products += f", the others {emulated}"
    casts = _caster(engine, device)
    in_torch = [name for name in recipes if not find_recipe(name).has_kernels()]
    if in_torch and casts != "torch":
        casts = (
            "torch"
            if len(in_torch) == len(recipes)
            else f"{casts}, of {label_of(in_torch[0])} in torch"
        )
    return f"{products}, casts in {casts}"


def _caster(engine: Engine, device: torch.device) -> str:
    if engine.uses_triton:
        return "Triton"
    return "C" if device.type == "cpu" and library().lib is not None else "torch"


MOST_WARNINGS = 3  # tensors that are named in one step; the file has all of them


class HealthLog:
    """Log the FP8 health of one run. Call `begin` before a step that is logged, `end` after it."""

    def __init__(
        self, state: TrainState, spec: HealthSpec, run_dir: Path | None, step: int, warn: Warn
    ) -> None:
        """Open health.jsonl in `run_dir`, which is None on ranks that do not write.

        `step` is the step that training continues from.
        """
        self._state, self._spec, self._warn = state, spec, warn
        self._probe: HealthProbe | TableProbe | None = None
        if isinstance(state.scaling, TeScaling) and spec.mode != "off":
            self._probe = TableProbe(state.scaling)
        elif isinstance(state.scaling, ScalingState) and spec.mode != "off":
            if state.graphs is not None and spec.reads_tables(state.scaling.recipe):
                self._probe = TableProbe(state.scaling)  # so that logged steps replay, too
            else:
                self._probe = HealthProbe(state.scaling, spec.mode)
        self._file: MetricsFile | None = None
        if self._probe is not None and run_dir is not None:
            self._file = MetricsFile(run_dir / HEALTH_FILE, resume_step=step, warn=warn)
        self._warned: set[str] = set()
        self._num_tensors = 0
        self._is_attached = False

    def begin(self) -> None:
        """Measure the casts from now on, until `end` or `abandon`."""
        if self._probe is not None:
            self._probe.attach()
            self._is_attached = True

    def end(self, step: int, trackers: CompositeTracker) -> None:
        """Write what was measured since `begin` as the health of `step`, and warn of bad tensors.

        All ranks call it together. It does nothing if there was no `begin`.
        """
        if self._probe is None or not self._is_attached:
            return
        self._is_attached = False
        scaling = self._state.scaling
        assert isinstance(scaling, ScalingState)
        mesh = self._state.mesh  # no rank works on files here, so the ranks' own network will do
        seen = gather(mesh, (self._probe.detach(), num_nonfinite(scaling)), mesh.world.group)
        if self._file is None:
            return
        nonfinite: dict[str, int] = {}
        for _, counts in seen:
            nonfinite |= {name: max(n, nonfinite.get(name, 0)) for name, n in counts.items()}
        record = HealthRecord(step, merged(part for part, _ in seen), nonfinite)
        self._file.log(record.to_dict())
        trackers.log(step, scalars(record))
        self._complain(record)

    def verdict(self) -> str | None:
        """Return the health of the last logged step in a few words, or None if there is none."""
        if not self._num_tensors:
            return None
        bad = len(self._warned)
        return f"FP8 health: {bad} of {self._num_tensors} tensors bad" if bad else "FP8 health ok"

    def abandon(self) -> None:
        """Forget what was measured since `begin`, because the step will be done again."""
        if self._probe is not None and self._is_attached:
            self._probe.detach()
            self._is_attached = False

    def rewind(self, step: int) -> None:
        """Drop the records of steps after `step`, when training goes back to a checkpoint."""
        if self._file is not None:
            self._file.rewind(step)

    def close(self) -> None:
        """Close health.jsonl."""
        if self._file is not None:
            self._file.close()

    def _complain(self, record: HealthRecord) -> None:
        """Warn of each bad tensor once, and again only after it has been good in between."""
        scaling = self._state.scaling
        assert isinstance(scaling, ScalingState)
        recipe = scaling.recipe

        def normally_saturated(name: str) -> float:
            traits = traits_of(recipe.precision_of(name.rpartition(".")[0]))
            return 0.0 if traits is None else traits.max_saturated

        found = complaints(record, self._spec, normally_saturated)
        new = [name for name in found if name not in self._warned]
        for name in new[:MOST_WARNINGS]:
            self._warn(f"step {record.step}: {name} in FP8: {found[name]}")
        if len(new) > MOST_WARNINGS:
            rest = len(new) - MOST_WARNINGS
            self._warn(f"step {record.step}: and {rest} more tensors; all are in {HEALTH_FILE}")
        self._warned, self._num_tensors = set(found), len(record.tensors)
