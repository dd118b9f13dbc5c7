"""Keep the FP8 health of each tensor at log steps (health.jsonl), and compare it with limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megafp8.errors import CheckpointError
from megafp8.foreign import MAX_LINES_BYTES, parse_json, read_bytes
from megafp8.specs import HealthSpec, TensorHealth

HEALTH_FILE = "health.jsonl"
ROLES = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class HealthRecord:
    """Hold the FP8 health of one log step.

    `num_nonfinite` counts non-finite values since the run began; only tensors that had any are in
    it.
    """

    step: int
    tensors: Mapping[str, TensorHealth]
    num_nonfinite: Mapping[str, int]

    def to_dict(self) -> dict[str, object]:
        """Return the record as one line of health.jsonl, without measures that were not taken."""
        return {
            "step": self.step,
            "tensors": {
                name: {k: v for k, v in dataclasses.asdict(health).items() if v is not None}
                for name, health in self.tensors.items()
            },
            "num_nonfinite": dict(self.num_nonfinite),
        }


def merged(parts: Iterable[Mapping[str, TensorHealth]]) -> dict[str, TensorHealth]:
    """Return the worst health of each tensor among what several ranks measured.

    Ranks hold equal numbers of a tensor's values, so that the fraction over all ranks is at most
    the largest of theirs.
    """
    worst_of: dict[str, TensorHealth] = {}
    for part in parts:
        for name, new in part.items():
            old = worst_of.get(name)
            worst_of[name] = new if old is None else _worst(old, new)
    return worst_of


def _worst(a: TensorHealth, b: TensorHealth) -> TensorHealth:
    def pick(x: float | None, y: float | None, *, largest: bool) -> float | None:
        known = [v for v in (x, y) if v is not None]
        return (max if largest else min)(known) if known else None

    return TensorHealth(
        amax=max(a.amax, b.amax),
        quant_scale=min(a.quant_scale, b.quant_scale),
        underflow=pick(a.underflow, b.underflow, largest=True),
        overflow=pick(a.overflow, b.overflow, largest=True),
        snr_db=pick(a.snr_db, b.snr_db, largest=False),
    )


def complaints(
    record: HealthRecord,
    limits: HealthSpec,
    normally_saturated: Callable[[str], float] = lambda _: 0.0,
) -> dict[str, str]:
    """Return the tensors that are beyond a limit; each value says what is wrong with the tensor.

    `normally_saturated` returns the fraction of a tensor's values that may saturate by its recipe,
    where that is more than the limit.
    """
    complaints_of: dict[str, str] = {}
    for name, health in record.tensors.items():
        problems = []
        if not math.isfinite(health.amax):
            problems.append("holds a NaN or an infinity")
        if health.underflow is not None and health.underflow > limits.max_underflow:
            problems.append(f"{health.underflow:.1%} of its values underflow to zero")
        max_overflow = max(limits.max_overflow, normally_saturated(name))
        if health.overflow is not None and health.overflow > max_overflow:
            problems.append(f"{health.overflow:.2%} of its values saturate")
        if health.snr_db is not None and health.snr_db < limits.min_snr_db:
            ratio = f"{health.snr_db:.1f} dB"
            problems.append(f"the signal-to-noise ratio of its worst row is {ratio}")
        if problems:
            complaints_of[name] = ", ".join(problems)
    return complaints_of


def scalars(record: HealthRecord) -> dict[str, float]:
    """Return the worst value of each measure for each role, as named scalars for curves."""
    values: dict[str, float] = {}
    for role in ROLES:
        of_role = [h for name, h in record.tensors.items() if name.endswith(f".{role}")]
        if not of_role:
            continue
        values[f"fp8/{role}/amax_max"] = max(h.amax for h in of_role)
        values[f"fp8/{role}/quant_scale_min"] = min(h.quant_scale for h in of_role)
        for field, worst in (("underflow", max), ("overflow", max), ("snr_db", min)):
            known = [v for h in of_role if (v := getattr(h, field)) is not None]
            if known:
                values[f"fp8/{role}/{field}_worst"] = worst(known)
    values["fp8/num_nonfinite"] = float(sum(record.num_nonfinite.values()))
    return values


def read_health(path: Path) -> list[HealthRecord]:
    """Return all records of a health.jsonl.

    Raises:
        CheckpointError: The file does not exist or does not hold such records.
    """
    try:
        lines = [parse_json(line) for line in read_bytes(path, MAX_LINES_BYTES).splitlines()]
        return [
            HealthRecord(
                int(line["step"]),
                {name: _tensor(values) for name, values in line["tensors"].items()},
                {name: int(count) for name, count in line["num_nonfinite"].items()},
            )
            for line in lines
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            path,
            f"cannot be read as FP8 health ({error})",
            "Give the directory of a run with model.fp8=True and model.fp8_health=scales or full",
        ) from error


def _tensor(values: Mapping[str, object]) -> TensorHealth:
    return TensorHealth(**{name: float(value) for name, value in values.items()})  # type: ignore[arg-type]
