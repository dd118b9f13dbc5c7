"""Say what this machine has for Transformer Engine's Python, and whether it runs here.

    python -m te_cpu doctor [--te-version VERSION]

Nothing is downloaded. The exit code is 0 if a linear in FP8 could be computed, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import re
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from te_cpu import wheel
from te_cpu.errors import TeCpuError
from te_cpu.loading import NEEDED, load
from te_cpu.missing import Missing
from te_cpu.versions import DEFAULT_VERSION, HASHES, why_not

_CALLED = re.compile(r"(?<![\w.])(?:tex|transformer_engine_torch)\.([a-z]\w+)")
_IMPORTED = re.compile(r"from transformer_engine_torch import (\([^)]*\)|[^(\n]*)")
_NAME = re.compile(r"(?<!as )\b(?!as )[a-z]\w+")  # and not by which it is imported


def main(argv: Sequence[str]) -> int:
    """Print the report; its last line says whether the version runs."""
    parser = argparse.ArgumentParser(
        "python -m te_cpu doctor", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    version = f"of Transformer Engine, or the path of its wheel (default {DEFAULT_VERSION})"
    parser.add_argument("--te-version", metavar="VERSION", default=DEFAULT_VERSION, help=version)
    given = parser.parse_args(argv).te_version
    own = Path(__file__).with_name("VERSION").read_text("utf-8").strip()
    torch_version, python = torch.__version__, platform.python_version()
    print(f"te-on-cpu {own}, Python {python}, torch {torch_version}, {platform.machine()}")
    print(f"needed: {', '.join(map(_installed, NEEDED))}")
    refused = {"triton": "its functions in Triton are", "onnxscript": "export to ONNX is"}
    about = [_installed(name) + _refused(name, what) for name, what in refused.items()]
    print(f"optional: {', '.join(about)}")
    _show_versions()
    try:
        _show_kernels(_sources(given))
    except TeCpuError as error:
        print(f"Transformer Engine {given} does not run here: {error}")
        return 1
    version = wheel.version_of(given)
    print(f"Transformer Engine {version} runs here: a linear in FP8 was computed on the CPU")
    return 0


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _refused(package: str, what: str) -> str:
    """Return what is refused without a package, in brackets; nothing if it is installed."""
    return "" if _is_there(package) else f" ({what} refused by name)"


def _installed(package: str) -> str:
    """Return a package with its version, or that it is not installed."""
    if not _is_there(package):
        return f"{package} is not installed"
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} of an unknown version"


def _show_versions() -> None:
    folder = wheel.te_folder()
    names = sorted(path.name for path in folder.glob("*") if why_not(path.name) is None)
    cached = sorted(filter(wheel.is_cached, names), key=_order)
    untried = [name for name in cached if name not in HASHES]
    print(f"cache: {folder}")
    _show_list("  versions in it", cached)
    if untried:
        _show_list("  not among the tried ones", untried)
    _show_list("tried and compared with 2.12.0, bit for bit", sorted(HASHES, key=_order))


def _order(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _show_list(title: str, names: Sequence[str]) -> None:
    text = f"{title}: {', '.join(names) or 'none'}"
    print(textwrap.fill(text, 100, subsequent_indent="    ", break_on_hyphens=False))


def _sources(given: str) -> wheel.Sources:
    """Return the sources of a version or of a wheel's path, after printing which wheel it is."""
    sources = wheel.sources(given, fetch=False)
    file = next(sources.folder.parent.glob("*.whl"))
    known = "has the SHA-256 of PyPI's" if sources.is_known else "has no known SHA-256"
    print(f"wheel: {file} ({known})")
    return sources


def _show_kernels(sources: wheel.Sources) -> None:
    """Compute a linear, and name the functions that its Python uses and that are missing here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        te: Any = load(sources.version)
        linear = te.Linear(32, 32)
        with te.fp8_autocast(enabled=True):
            out = linear(torch.ones(16, 32))
        out.sum().backward()
    extension = sys.modules[wheel.EXTENSION]
    used: set[str] = set()
    for path in (sources.folder / "transformer_engine" / "pytorch").rglob("*.py"):
        text = path.read_text("utf-8")
        used.update(_CALLED.findall(text))
        used.update(name for names in _IMPORTED.findall(text) for name in _NAME.findall(names))
    absent = sorted(name for name in used if isinstance(getattr(extension, name), Missing))
    print(f"kernels: {len(used) - len(absent)} of the {len(used)} that its Python calls")
    _show_list("  missing, each refused by its name", absent)
