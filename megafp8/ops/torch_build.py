"""Say for which device the installed PyTorch was built, without importing it."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

HINT = "Install a CUDA build of PyTorch (make setup TORCH_BUILD=cuda)"


def why_no_gpu(file: Path | None = None) -> str | None:
    """Return that the installed PyTorch is a CPU build, or None if it is not.

    `file` is PyTorch's version.py, which says for which version of CUDA or ROCm it was built.
    """
    if file is None:
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            return None
        file = Path(found.origin).with_name("version.py")
    if not file.is_file():
        return None
    build = runpy.run_path(str(file))
    if build.get("cuda") is None and build.get("hip") is None:
        return f"the installed PyTorch {build.get('__version__')} is a CPU build"
    return None
