"""Say of which settings Transformer Engine computes something else than a file asks for.

Its recipe classes accept arguments that they do not know. So `interval` and
`override_linear_precision`, which version 2.0 removed, change nothing in Accelerate and NeMo with a
later version, without a message. Read in the sources of 2.4 to 2.20.
"""

from __future__ import annotations

from typing import Any

_NATIVE = "on a GPU model.fp8_backend=auto takes native for it, as te refuses it"
_INTERVAL = (
    "the numbers change if the old run used Transformer Engine 2.0 or later: that ignores the "
    f"interval and computes scales at every update, as model.fp8_interval=1 does; {_NATIVE}"
)
_PRODUCTS = (
    "the numbers change if the old run used Transformer Engine 2.0 or later: that ignores the "
    f"setting and runs all three products in FP8, as without it; {_NATIVE}"
)


def note_of(key: str, value: Any) -> str:
    """Return what the report says of a setting that acts here and not there; empty for others."""
    if key == "model.fp8_interval" and value != 1:
        return _INTERVAL
    if key == "model.override_linear_precision" and value != [False, False, False]:
        return _PRODUCTS
    if key == "model.fp8_wgrad" and value is False:
        return _PRODUCTS
    return ""
