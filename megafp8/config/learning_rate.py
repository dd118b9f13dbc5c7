"""Say what a job's learning rate leads to, before the job runs.

The default job's rate is refused for a model that is much wider than the default job's, and a
schedule that is longer than the run is noted at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megafp8.config.errors import Origin, SettingError
from megafp8.config.keys import MAX_WIDTH, Values
from megafp8.config.values import (
    SCHEDULES,
    schedule_steps,
    steps_or_ratio,
    warmup_steps,
    wsd_decay_steps,
)

SCHED, STEPS = "model.optim.sched", "trainer.max_steps"
RATE, LOWEST, WIDTH = "model.optim.lr", f"{SCHED}.min_lr", "model.hidden_size"
WIDER = 2
"""The default job's rate is refused where a model is more than so many times as wide. The best rate
of Adam falls about as one over the width (Yang et al. 2022, arXiv 2203.03466), and a rate that is
twice the best one mostly trains still."""


def without_own_rate(
    values: Values, origins: Mapping[str, Origin], default: Mapping[str, object]
) -> SettingError | None:
    """Return the error for a job of another width that has the default job's rate, or None.

    Args:
        values: All settings by their dotted names.
        origins: The layer of each key that a layer after the default job sets.
        default: The default job's own settings; empty for a configuration that does not begin
            with it, which must name a rate anyhow.
    """
    rate, width = default.get(RATE), default.get(WIDTH)
    own = values.get(WIDTH)
    if RATE in origins or not isinstance(rate, float) or not isinstance(width, int):
        return None
    if not isinstance(own, int) or own > MAX_WIDTH:
        return None  # another rule reports it
    if own <= WIDER * width or values.get("trainer.fast_dev_run"):
        return None
    scaled = f"{rate * width / own:.1e}".replace("e-0", "e-")
    lowest = f"{rate * width / own / 10:.1e}".replace("e-0", "e-")
    return SettingError(
        RATE,
        rate,
        f"is the rate of the default job, whose model has {WIDTH}={width}; this one has {own}, and "
        "nothing sets its rate",
        f"Give the rate of your model; with the default job's scaled by the width it would be "
        f"{RATE}={scaled} {LOWEST}={lowest}. {RATE}={rate:g} keeps it",
    )


def schedule_notes(values: Values) -> Iterator[str]:
    """Yield a line about where a schedule ends whose parts have more steps than the run.

    Such a schedule runs as it is, as in NeMo, and a user may expect something else.
    """
    steps, name = schedule_steps(values), values[f"{SCHED}.name"]
    lengths = {part: _length(values, part) for part in ("warmup", "hold", "constant", "wsd_decay")}
    parts = {part: n for part, n in lengths.items() if f"{part}_steps" in SCHEDULES[name] and n}
    if sum(parts.values()) <= steps:  # the run itself may be shorter
        steps, parts = values[STEPS], {"warmup": parts.get("warmup", 0)}
    if sum(parts.values()) <= steps:
        return
    shown = " and ".join(f"{SCHED}.{part}_steps={length}" for part, length in parts.items())
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
    key = STEPS if steps == values[STEPS] else f"{SCHED}.max_steps"
    yield f"cut: {shown} ({name}) do not fit into {key}={steps}: {end}, as in {theirs}"


def _length(values: Values, part: str) -> int:
    """Return the steps of a part of the schedule, given as a number or as a share of the run."""
    key, steps = f"{SCHED}.{part}", schedule_steps(values)
    given = steps_or_ratio(values[f"{key}_steps"], values[f"{key}_ratio"], steps)
    defaults = {"warmup": warmup_steps, "wsd_decay": wsd_decay_steps}
    return defaults[part](given, steps) if part in defaults else given or 0
