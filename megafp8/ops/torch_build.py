"""Say for which device the installed PyTorch was built and needs, without importing it."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from typing import NamedTuple

DRIVER = Path("/proc/driver/nvidia/version")
OLDEST_DRIVERS = {12: 525, 13: 580}
"""The oldest driver that runs a major version of CUDA: NVIDIA's table of minor version
compatibility."""


class NoGpu(NamedTuple):
    """Say why PyTorch finds no GPU, and what helps."""

    reason: str
    hint: str


def why_no_gpu(file: Path | None = None, driver: Path = DRIVER) -> NoGpu | None:
    """Return why the installed PyTorch can use no GPU of this machine, or None if that is unknown.

    Args:
        file: PyTorch's version.py, which says for which version of CUDA or ROCm it was built.
        driver: The file in which NVIDIA's driver says its version.
    """
    if file is None:
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            return None
        file = Path(found.origin).with_name("version.py")
    if not file.is_file():
        return None
    build = runpy.run_path(str(file))
    name, cuda = f"the installed PyTorch {build.get('__version__')}", build.get("cuda")
    if cuda is None and build.get("hip") is None:
        return NoGpu(
            f"{name} is a CPU build",
            "Install a CUDA build of PyTorch (make setup TORCH_BUILD=cuda)",
        )
    if cuda is None:
        return None
    oldest, present = OLDEST_DRIVERS.get(int(cuda.split(".")[0]), 0), driver_version(driver)
    if present is not None and int(present.split(".")[0]) < oldest:
        return NoGpu(
            f"{name} is built for CUDA {cuda}, which needs driver {oldest} or newer, and this "
            f"machine has {present}",
            "Update the driver, or install a build for an older CUDA, which "
            "https://pytorch.org/get-started/previous-versions lists",
        )
    return None


def driver_version(file: Path = DRIVER) -> str | None:
    """Return the version of NVIDIA's driver, such as `550.54.15`, or None where there is none."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"NVRM version:.*?\s(\d+\.[\d.]+)\s", text)
    return None if found is None else found[1]
