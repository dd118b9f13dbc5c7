"""Say at the start of a run what its settings lead to where a user may expect something else.

A note is about settings that run as they are, as in NeMo. Settings that cannot be used are errors,
and `load` reports them.
"""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.keys import Values
from megafp8.config.values import SCHEDULES, steps_or_ratio, warmup_steps, wsd_decay_steps

_SCHED = "model.optim.sched"
_STEPS = "trainer.max_steps"


def notes(values: Values) -> Iterator[str]:
    """Yield a line about each setting that has less effect than its value says.

    There is one such line: where a schedule ends whose parts have more steps than the run.
    """
    steps, name = values[_STEPS], values[f"{_SCHED}.name"]
    lengths = {part: _length(values, part) for part in ("warmup", "hold", "constant", "wsd_decay")}
    parts = {part: n for part, n in lengths.items() if f"{part}_steps" in SCHEDULES[name] and n}
    if sum(parts.values()) <= steps:
        return
    shown = " and ".join(f"{_SCHED}.{part}_steps={length}" for part, length in parts.items())
    warmup, hold = lengths["warmup"], parts.get("hold", 0)
    if warmup >= steps:
        end = "the run ends in the warm-up, before the highest rate"
    elif warmup + hold >= steps:
        end = "the run ends at the highest rate, before the decay"
    elif name == "WSD" and not warmup:
        end = "the run begins in the decay, below the highest rate"
    elif name == "WSD":
        end = "the decay begins before the warm-up ends, and the rate jumps there"
    else:
        end = "there is no decay: the rate is the lowest one right after the warm-up"
    theirs = "Megatron" if name == "WSD" else "NeMo"
    yield f"cut: {shown} ({name}) do not fit into {_STEPS}={steps}: {end}, as in {theirs}"


def _length(values: Values, part: str) -> int:
    """Return the steps of a part of the schedule, given as a number or as a share of the run."""
    key, steps = f"{_SCHED}.{part}", values[_STEPS]
    given = steps_or_ratio(values[f"{key}_steps"], values[f"{key}_ratio"], steps)
    defaults = {"warmup": warmup_steps, "wsd_decay": wsd_decay_steps}
    return defaults[part](given, steps) if part in defaults else given or 0
