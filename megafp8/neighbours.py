"""Find the other packages of this repository, which may be missing: by their names, when needed.

No module here imports those above `megafp8`; what they can do is asked for by the name of a module.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from megafp8.errors import RunError

FOLDERS = ("fp8_numerics", "te_cpu", "fp8_coverage", ".", "megafp8_migrate")
"""The packages of this repository, each after those that it needs."""


def part_in_another_package(name: str, module: str) -> Any:
    """Return the module of another package of this repository that does a part of `name`.

    Raises:
        RunError: There is no such package; the error has the line that installs it.
    """
    if is_there(module):
        return import_module(module)
    folder = module.partition(".")[0]
    raise RunError(f"{name} needs the package {folder}. {how_to_install(folder)}")


def is_there(module: str) -> bool:
    """Whether a module can be imported; a folder that is no package is no module."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # of the package that has it
        return False
    return spec is not None and spec.origin is not None


def how_to_install(folder: str) -> str:
    """Return the sentence that says how a package of this repository is installed.

    Its neighbours are in the same line, since pip would look for them in an index otherwise, as it
    does for a folder's name without `./` or `-e` before it.
    """
    needed = FOLDERS[: FOLDERS.index(folder) + 1]
    clone = Path(__file__).parents[1]
    if not all((clone / name / "pyproject.toml").is_file() for name in needed):
        paths = (name if name == "." else f"./{name}" for name in needed)
        return "In a clone of megafp8: pip install " + " ".join(f"-e {path}" for path in paths)
    paths = (quote(str(clone / name)) for name in needed)
    return "Install it: pip install " + " ".join(f"-e {path}" for path in paths)
