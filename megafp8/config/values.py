"""Values that may be written in more than one way, and the one meaning they have."""

from __future__ import annotations

import math
import re
from typing import Literal

from megafp8.specs.precision import HIGH_PRECISION, RECIPES, ModuleRule

PRECISIONS: dict[int | str, Literal["bf16", "fp16", "fp32"]] = {
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    32: "fp32",
    "32": "fp32",
    "32-true": "fp32",
    16: "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
}

OPTIMIZERS = ("adam", "adamw", "fused_adam", "distributed_fused_adam")
"""NeMo's fused ones are Apex's with `adam_w_mode=True`: the same updates as `adamw`."""

LATER_OPTIMIZERS = (
    "megatron_fused_adam", "mcore_distributed_optim", "sgd", "adadelta",
    "adamax", "adagrad", "rmsprop", "rprop", "novograd", "adafactor", "adan", "lamb", "lion",
)  # fmt: skip
"""NeMo's others."""

WARMUP, CONSTANT, HOLD = ("warmup_steps", "warmup_ratio"), ("constant_steps", "constant_ratio"), (
    "hold_steps", "hold_ratio",
)  # fmt: skip
SCHEDULES: dict[str, tuple[str, ...]] = {
    "CosineAnnealing": (*WARMUP, *CONSTANT),
    "WarmupPolicy": WARMUP,
    "WarmupHoldPolicy": WARMUP,
    "WarmupAnnealing": WARMUP,
    "PolynomialDecayAnnealing": (*WARMUP, "power"),
    "PolynomialHoldDecayAnnealing": (*WARMUP, *HOLD, "power"),
    "SquareAnnealing": WARMUP,
    "SquareRootAnnealing": WARMUP,
    "InverseSquareRootAnnealing": WARMUP,
    "NoamAnnealing": (*WARMUP, "d_model"),
    "NoamHoldAnnealing": (*WARMUP, *HOLD, "decay_rate"),
}
"""NeMo's schedules, and which keys of `model.optim.sched` each reads beside `min_lr`."""

LATER_SCHEDULES = (
    "T5InverseSquareRootAnnealing", "StepLR", "ExponentialLR", "ReduceLROnPlateau", "CyclicLR",
)  # fmt: skip
"""NeMo's others: without model.optim.lr, by epochs, by the loss, or up again."""

DEFAULT_EXP_DIR = "runs"

_CLOCK = re.compile(r"(?:(\d{1,4}):)?(\d{1,4}):([0-5]?\d):([0-5]?\d)", re.ASCII)


def parse_interval_seconds(value: object) -> float | None:
    """Seconds of `90`, `"90"`, `"HH:MM:SS"` or `"DD:HH:MM:SS"`; None if it is none of these."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and (clock := _CLOCK.fullmatch(value.strip())):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    return _finite(value)


def parse_splits(value: object) -> tuple[float, ...] | None:
    """Numbers of `"900,50,50"` or `[900, 50, 50]`; None if one of them is not a number."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        return None
    numbers = [_finite(part) for part in parts]
    return None if None in numbers else tuple(n for n in numbers if n is not None)


def is_rampup(value: object) -> bool:
    """Whether `value` is [start, increment, samples]."""
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        return False
    whole = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    return whole and all(0 < v <= 2**53 for v in value)


def share_of(steps: int | None, ratio: float | None, max_steps: int) -> int | None:
    """Steps given as such or as a share of the run (NeMo rounds it down); None if neither is."""
    return steps if ratio is None else int(ratio * max_steps)


def parse_modules(value: object) -> tuple[ModuleRule, ...] | None:
    """The rules of `["*.fc2:high_precision"]`; None if one of them is none."""
    if not isinstance(value, (list, tuple)):
        return None
    rules = []
    for text in value:
        pattern, _, choice = str(text).rpartition(":")
        if not pattern or choice not in (*RECIPES, HIGH_PRECISION):
            return None
        rules.append(ModuleRule(pattern, choice))
    return tuple(rules)


def parse_layout(value: object) -> tuple[int, ...] | None:
    """The whole numbers of `"4,4,3,5"`, each at least 1; None if it is anything else."""
    parts = str(value).split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        return None
    layers = tuple(int(part) for part in parts)
    return layers if min(layers) > 0 else None


def format_number(number: float) -> str:
    """The shortest spelling: `50`, not `50.0`."""
    return str(int(number)) if number == int(number) else repr(number)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def plain(value: object) -> str:
    """A value as YAML has it: `null`, `True`, `10`."""
    return "null" if value is None else str(value)


def one_line(value: object) -> str:
    """As `plain`, for a line of a report."""
    text = plain(value)
    return text if text.isprintable() else repr(text)
