"""Report how FP8 runs: the fraction of FLOPs, the kernels, and the health of the tensors.

The fraction is that of a step's GEMM FLOPs, computed from the model that was built. Kernels are FP8
tensor cores or an emulation, and Triton, C or torch for the casts. Attention's two products are
never in FP8 and not included here; summary.json has the counted fraction with and without them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from megafp8.errors import ConfigError
from megafp8.files import Warn
from megafp8.fp8.health import (
    HealthProbe,
    TableProbe,
    UpdateProbe,
    normally_saturated,
    num_nonfinite,
    num_updates,
)
from megafp8.fp8.scaling import ScalingState
from megafp8.observe.flops import gemm_flops_per_token
from megafp8.observe.health import (
    HEALTH_FILE,
    HealthRecord,
    complaints,
    merged,
    scalars,
    state_of,
    verdict,
)
from megafp8.observe.metrics import MetricsFile
from megafp8.observe.trackers import CompositeTracker
from megafp8.parallel.agreement import gather
from megafp8.specs import GPTSpec, HealthSpec, RunSpec
from megafp8.specs.precision import GEMMS, PlannedGemms
from megafp8.specs.recipes import label_of
from megafp8.train.report.accuracy import AccuracyCheck
from megafp8.train.state import TrainState

EXPERT_INPUT = re.compile(r"\.experts\.\d+\.fc1\.input$")
MOST_WARNINGS = 3  # tensors that are named in one step; the file has all of them


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
    flops = gemm_flops_per_token(spec)
    head, name = int(flops.head), "head"
    if flops.router:
        head, name = head + int(flops.router), "head and routers"
    reasons: dict[str, list[str]] = defaultdict(list)
    for part in parts:
        for why, names in part.reasons.items():
            reasons[why] += names
    higher = [f"{name} ({head / max(1, total + head):.0%}; never in FP8)"]
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
    parts = gather(state.mesh, linear_flops(state.backend.planned(state.model)))
    share = share_of_ranks(parts, spec.model, state.mesh.data.size)
    if not spec.precision.schedule:  # otherwise a later phase may be the one in FP8
        require_fp8(share)
    return share


def linear_flops(planned: Iterable[PlannedGemms]) -> LinearFlops:
    """Return the FLOPs of linears, in FP8 and in all."""
    fp8 = total = 0
    reasons: dict[str, list[str]] = defaultdict(list)
    for linear in planned:
        total += linear.flops * len(GEMMS)
        fp8 += linear.flops * len(linear.fp8)
        for reason in linear.reasons:
            reasons[reason].append(linear.name)
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


def _names(names: list[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{len(names)} linears, {names[0]} to {names[-1]}"


class HealthLog:
    """Log the FP8 health of one run.

    Call `begin` before a step that is logged, and `end` after it.
    """

    def __init__(
        self, state: TrainState, spec: HealthSpec, run_dir: Path | None, step: int, warn: Warn
    ) -> None:
        """Open health.jsonl in `run_dir`, which is None on ranks that do not write.

        `step` is the step that training continues from.
        """
        self._state, self._spec, self._warn = state, spec, warn
        self._probe = self._new_probe(step)
        self._check: AccuracyCheck | None = None
        if spec.accuracy_check == "warn" and self._probe is not None:
            self._check = AccuracyCheck(state, measures=spec.mode == "full")
        self._file: MetricsFile | None = None
        if self._probe is not None and run_dir is not None:
            self._file = MetricsFile(run_dir / HEALTH_FILE, resume_step=step, warn=warn)
        self._last: HealthRecord | None = None
        self._last_full: HealthRecord | None = None
        self.least_updates: int | None = None  # of an expert's input, as of the last `end`
        self._is_attached = False

    def _new_probe(self, step: int) -> HealthProbe | UpdateProbe | TableProbe | None:
        """Return what measures a logged step, or None."""
        state, train = self._state, self._state.backend.spec.train
        mode = self._spec.mode_at(step, train.max_steps, train.log_every_n_steps)
        if not isinstance(state.scaling, ScalingState) or mode == "off":
            return None
        if not state.backend.shows_casts:
            return TableProbe(state.scaling)
        if mode == "scales" and self._spec.reads_tables(state.scaling.recipe):  # as CUDA graphs do
            return UpdateProbe(state.scaling)
        return HealthProbe(state.scaling, mode)

    def begin(self) -> Callable[[], torch.Tensor] | None:
        """Measure the casts from now on, until `end` or `abandon`.

        The result returns what `end` needs of the device, FP64 [numbers], for the step to bring to
        the host in its own copy, so that a logged step waits no more often than others. It is None
        where nothing is measured, or where `end` reads the device itself.
        """
        if self._probe is None:
            return None
        self._probe = self._new_probe(self._state.step + 1)
        assert self._probe is not None
        self._probe.attach()
        self._is_attached = True
        squared_norms = None if self._check is None else self._check.begin()
        return self._probe.numbers if isinstance(self._probe, UpdateProbe) else squared_norms

    def end(self, step: int, trackers: CompositeTracker, numbers: Sequence[float]) -> None:
        """Write what was measured since `begin` as the health of `step`, and warn of bad tensors.

        `numbers` are the values of what `begin` returned, in this step. All ranks call it together.
        It does nothing if there was no `begin`.
        """
        if self._probe is None or not self._is_attached:
            return
        self._is_attached = False
        scaling = self._state.scaling
        assert isinstance(scaling, ScalingState)
        mesh = self._state.mesh  # no rank works on files here, so the ranks' own network will do
        if isinstance(self._probe, UpdateProbe):
            own = self._probe.measures(numbers)
            updates = self._probe.num_updates(numbers)
        else:
            own = (self._probe.detach(), num_nonfinite(scaling))
            updates = num_updates(scaling) if self._state.model.spec.moe is not None else {}
        of_experts = [n for name, n in updates.items() if EXPERT_INPUT.search(name)]
        squares, names = None, []
        if self._check is not None:
            squares = self._check.squares(numbers)
            planned = self._state.backend.planned(self._state.model)
            names = [linear.name for linear in planned if linear.fp8]
        seen = gather(mesh, (*own, of_experts, squares, names), mesh.world.group)
        self.least_updates = min((n for _, _, some, *_ in seen for n in some), default=None)
        if self._file is None:
            return
        nonfinite: dict[str, int] = {}
        for _, counts, *_ in seen:
            nonfinite |= {name: max(n, nonfinite.get(name, 0)) for name, n in counts.items()}
        record = HealthRecord(step, merged(part for part, *_ in seen), nonfinite)
        scaling = self._state.scaling
        assert isinstance(scaling, ScalingState)  # otherwise there is no probe and no `end`
        saturated = partial(normally_saturated, scaling.recipe)
        record = replace(record, beyond=complaints(record, self._spec, saturated))
        self._file.log(record.to_dict())
        trackers.log(step, scalars(record))
        self._complain(record)
        if self._check is not None:
            parts = [part for *_, part, _ in seen if part is not None]
            in_fp8 = dict.fromkeys(name for *_, names in seen for name in names)
            self._check.warn_of(step, record.tensors, parts, list(in_fp8), self._warn)

    def verdict(self) -> str | None:
        """Return the health of the last logged steps in a few words, or None if there is none."""
        if self._last is None:
            return None
        return f"FP8 health: {verdict(self._last)}"

    def word(self) -> str | None:
        """Return what a step's line says of the health of the last logged steps, if it is known."""
        return None if self._last is None else f"FP8 {state_of(self._last)}"

    def abandon(self) -> None:
        """Forget what was measured since `begin`, because the step will be done again."""
        if self._probe is not None and self._is_attached:
            self._probe.detach()
            if self._check is not None:
                self._check.abandon()
            self._is_attached = False

    def rewind(self, step: int) -> None:
        """Drop the records of steps after `step`, when training goes back to a checkpoint."""
        if self._file is not None:
            self._file.rewind(step)
        if self._check is not None:
            self._check.rewind()

    def close(self) -> None:
        """Close health.jsonl."""
        if self._file is not None:
            self._file.close()

    def _complain(self, record: HealthRecord) -> None:
        """Warn of each bad tensor once, and again only after it has been good in between.

        Until the losses of tensors are measured again, the last ones count.
        """
        warned: Mapping[str, str] = {} if self._last is None else self._last.beyond
        new = [name for name in record.beyond if name not in warned]
        for name in new[:MOST_WARNINGS]:
            label = self._label_of(name)
            self._warn(f"step {record.step}: {name} in {label}: {record.beyond[name]}")
        if len(new) > MOST_WARNINGS:
            rest = len(new) - MOST_WARNINGS
            self._warn(f"step {record.step}: and {rest} more tensors; all are in {HEALTH_FILE}")
        if record.is_full:
            self._last_full = self._last = record
        elif (full := self._last_full) is not None:
            self._last = replace(full, beyond={**full.beyond, **record.beyond})
        else:
            self._last = record

    def _label_of(self, tensor: str) -> str:
        """Return what the precision of a tensor's linear is called."""
        scaling = self._state.scaling
        assert isinstance(scaling, ScalingState)
        return label_of(scaling.recipe.precision_of(tensor.rpartition(".")[0]))
