"""Keys that mean nothing unless another key switches their feature on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megafp8.config.schema import all_keys

_PARAMS = "exp_manager.checkpoint_callback_params"
_NSYS = "model.nsys_profile"


class Switch(NamedTuple):
    """While `key` has the value `off`, `details` have no effect."""

    key: str
    off: Any
    details: tuple[str, ...]
    way_out: str


SWITCHES = (
    Switch(
        f"{_PARAMS}.save_top_k",
        0,
        (f"{_PARAMS}.monitor", f"{_PARAMS}.mode"),
        f"Set {_PARAMS}.save_top_k to how many of the best checkpoints stay",
    ),
    Switch(
        f"{_NSYS}.enabled",
        False,
        tuple(f"{_NSYS}.{name}" for name in ("start_step", "end_step", "ranks", "gen_shape")),
        f"Set {_NSYS}.enabled=True",
    ),
)


def without_effect(values: Mapping[str, Any]) -> Iterator[tuple[str, Switch]]:
    """Each detail that has another value than its default while its feature is off."""
    for switch in SWITCHES:
        if switch.key not in values or values[switch.key] != switch.off:
            continue
        for detail in switch.details:
            if detail in values and values[detail] != all_keys()[detail].default:
                yield detail, switch
