"""Say what this machine has, as one line of JSON: GPUs, versions, and what it can only emulate.

python benchmarks/gpu_header.py
"""

from __future__ import annotations

import json
import platform
from typing import Any

import torch
from gpu_common import card, device_and_name

from megafp8.backends.te.names import why_te_cannot
from megafp8.fp8.engine import unsupported
from megafp8.ops.torch_build import driver_version
from megafp8.specs.recipes import RECIPES, find_recipe


def emulated(device: torch.device) -> dict[str, str]:
    """Return the recipes whose products this device does not have, each with the reason."""
    found = {}
    for name in RECIPES:
        for layout in find_recipe(name).traits.layouts:
            if (why := unsupported(device, layout or "other")) is not None:
                found[name] = why
    return found


def header() -> dict[str, Any]:
    """Return the names, numbers and versions that results depend on."""
    device, name = device_and_name()
    return {
        "device": name,
        "gpus": torch.cuda.device_count(),
        "driver": driver_version() or card().get("driver_version"),
        "card": card(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "emulated": emulated(device),
        "no_transformer_engine": why_te_cannot(device, None),
    }


if __name__ == "__main__":
    print(json.dumps(header()))
