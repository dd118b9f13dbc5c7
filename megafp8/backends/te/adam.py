"""Find Transformer Engine's fused Adam, where the package is installed."""

from __future__ import annotations

import importlib.util
from typing import Any


def fused_adam() -> Any | None:
    """Return the class, or None where the package is missing or lacks it.

    The first import takes seconds.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except (ImportError, OSError, RuntimeError):  # built for another torch or without its libraries
        return None
    return FusedAdam
