"""Refuse the default job's learning rate for a model that is much wider than the default job's."""

from __future__ import annotations

from collections.abc import Mapping

from megafp8.config.errors import Origin, SettingError
from megafp8.config.keys import MAX_WIDTH, Values

RATE, LOWEST = "model.optim.lr", "model.optim.sched.min_lr"
WIDTH = "model.hidden_size"
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
