"""Keep the FP8 health of each tensor at log steps (health.jsonl), and compare it with limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megafp8.errors import CheckpointError
from megafp8.foreign import MAX_LINES_BYTES, parse_json, read_bytes
from megafp8.specs import HealthSpec, TensorHealth

HEALTH_FILE = "health.jsonl"
ROLES = ("input", "weight", "grad_output")
NO_RECORD = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""What `record_of` raises for a line that is no record."""


@dataclass(frozen=True)
class HealthRecord:
    """Hold the FP8 health of one log step.

    `num_nonfinite` counts non-finite values since the run began; only tensors that had any are in
    it. `beyond` says of each tensor beyond a limit what is wrong.
    """

    step: int
    tensors: Mapping[str, TensorHealth]
    num_nonfinite: Mapping[str, int]
    beyond: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether it was measured what the tensors lose in FP8."""
        return any(health.snr_db is not None for health in self.tensors.values())

    def to_dict(self) -> dict[str, object]:
        """Return the record as one line of health.jsonl, without measures that were not taken."""
        return {
            "step": self.step,
            "tensors": {
                name: {k: v for k, v in dataclasses.asdict(health).items() if v is not None}
                for name, health in self.tensors.items()
            },
            "num_nonfinite": dict(self.num_nonfinite),
            **({"beyond": dict(self.beyond)} if self.beyond else {}),
        }


def worst_first(tensors: Mapping[str, TensorHealth]) -> list[str]:
    """Return the measured tensors by what FP8 adds to their products, the most harmed one first.

    This order is the one of the console, the page, `inspect` and comparisons.
    `megafp8.fp8.health.noise_in_products` has the measure.
    """
    known = ((health.snr_db, name) for name, health in tensors.items() if health.snr_db is not None)
    return [name for _, name in sorted(known)]


def last_full(records: Sequence[HealthRecord]) -> HealthRecord | None:
    """Return the last record with what the tensors lose in FP8, or None."""
    return next((record for record in reversed(records) if record.is_full), None)


def state_of(record: HealthRecord) -> str:
    """Return in a few words how many tensors are beyond a limit, and whether of amaxes alone."""
    bad = len(record.beyond)
    if bad:
        return f"{bad} of {len(record.tensors)} tensors bad"
    return "ok" if record.is_full else "amaxes ok"


def worst_of(record: HealthRecord) -> str:
    """Return in a few words which tensor is harmed most; nothing if that was not measured."""
    worst = next(iter(worst_first(record.tensors)), None)
    return "" if worst is None else f"worst {worst}, {record.tensors[worst].snr_db:.1f} dB"


def verdict(record: HealthRecord) -> str:
    """Return in a few words which tensors are beyond a limit, and which one is harmed most."""
    return "; ".join(filter(None, (state_of(record), worst_of(record))))


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
    """Return the tensors beyond a limit, the worst first, each with what is wrong with it.

    `normally_saturated` returns the fraction of a tensor's values that may saturate by its recipe,
    where that is more than the limit.
    """
    complaints_of: dict[str, str] = {}
    ranked = worst_first(record.tensors)
    for name in (*ranked, *(name for name in record.tensors if name not in set(ranked))):
        health, problems = record.tensors[name], []
        if not math.isfinite(health.amax):
            problems.append("holds a NaN or an infinity")
        if health.underflow is not None and health.underflow > limits.max_underflow:
            problems.append(f"{health.underflow:.1%} of its values underflow to zero")
        max_overflow = max(limits.max_overflow, normally_saturated(name))
        if health.overflow is not None and health.overflow > max_overflow:
            problems.append(f"{health.overflow:.2%} of its values saturate")
        if health.snr_db is not None and health.snr_db < limits.min_snr_db:
            problems.append(f"its signal-to-noise ratio is {health.snr_db:.1f} dB")
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
        for measure, worst in (("underflow", max), ("overflow", max), ("snr_db", min)):
            known = [v for h in of_role if (v := getattr(h, measure)) is not None]
            if known:
                values[f"fp8/{role}/{measure}_worst"] = worst(known)
    values["fp8/num_nonfinite"] = float(sum(record.num_nonfinite.values()))
    return values


def read_health(path: Path) -> list[HealthRecord]:
    """Return all records of a health.jsonl.

    Raises:
        CheckpointError: The file does not exist or does not hold such records.
    """
    try:
        lines = [parse_json(line) for line in read_bytes(path, MAX_LINES_BYTES).splitlines()]
        return [record_of(line) for line in lines]
    except (OSError, *NO_RECORD) as error:
        raise CheckpointError(
            path,
            f"cannot be read as FP8 health ({error})",
            "Give the directory of a run with model.fp8=True and model.fp8_health=scales or full",
        ) from error


def record_of(line: Mapping[str, Any]) -> HealthRecord:
    """Return the record of one line of health.jsonl, or raise one of `NO_RECORD`."""
    return HealthRecord(
        int(line["step"]),
        {name: _tensor(values) for name, values in line["tensors"].items()},
        {name: int(count) for name, count in line["num_nonfinite"].items()},
        {name: str(text) for name, text in line.get("beyond", {}).items()},
    )


def _tensor(values: Mapping[str, object]) -> TensorHealth:
    return TensorHealth(**{name: float(value) for name, value in values.items()})  # type: ignore[arg-type]
