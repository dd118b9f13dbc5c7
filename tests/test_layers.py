"""A module imports packages of strictly lower floors (layers) or its own package.

Imports are read from the source, so that one inside a function, under TYPE_CHECKING or given to
`importlib.import_module` as a literal counts like any other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from scripts.packages import AT_THE_TOP, BESIDE, ROOT, packages, sources

MAY_IMPORT = {
    "fp8_coverage": (),
    "fp8_numerics": (),
    "te_cpu": ("fp8_numerics",),
    "megafp8": ("fp8_coverage", "fp8_numerics", "te_cpu"),
    "megafp8_migrate": ("fp8_coverage", "fp8_numerics", "te_cpu", "megafp8"),
}
"""The packages of this repository, and which of the others each of them may import."""
IMPORTS_TE_CPU = "megafp8/backends/te/*"  # of the files of megafp8

FLOORS = {
    "specs": 0,
    "errors": 0,
    "secrets": 0,
    "foreign": 0,
    "ops": 0,
    "files": 1,
    "neighbours": 1,
    "config": 2,
    "data": 2,
    "observe": 2,
    "models": 2,
    "fp8": 3,
    "parallel": 4,
    "optim": 5,
    "checkpoint": 6,
    "backends": 6,
    "runs": 7,
    "report": 8,
    "train": 9,
    "plan": 10,
    "jobs": 11,
    "cli": 12,
}
TOP_FLOOR = 13  # pretrain_gpt.py, __main__.py, examples/ and benchmarks/ may import all packages
WITHOUT_TORCH = (
    "specs",
    "errors",
    "foreign",
    "secrets",
    "files",
    "config",
    "plan",
    "report",
)
DRY_RUN = "megafp8/plan/dryrun*.py"  # the files of `plan` that import torch
BESIDE_OURS = "benchmarks/plain_gpt.py"  # plain PyTorch: it must not import megafp8
TE_ALONE = (
    "megafp8/backends/te/*",
    "te_cpu/*",
    "megafp8/optim/kernels.py",
    "benchmarks/te_trace.py",
)
OWN_FILE_ONLY = {
    "transformer_engine": TE_ALONE,
    "transformer_engine_torch": TE_ALONE,
    "torchao": ("megafp8/backends/torchao.py", "benchmarks/optimizer.py"),
}
OF_TE_ITSELF = (  # may import Transformer Engine
    "examples/07_transformer_engine_on_a_laptop.py",
    "examples/11_layer_on_transformer_engine/*",
)


@cache  # two tests ask about the same files
def imported_names(source: str, module: tuple[str, ...], is_package: bool) -> list[str]:
    """Return every dotted name that `source` imports; relative names are made absolute.

    `from a import b` gives `a.b`: b may be a module. `module` is the file's own dotted name.
    """
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names]
            case ast.ImportFrom(module=target, names=names, level=level):
                base = list(module if is_package else module[:-1])
                prefix = base[: len(base) - level + 1] if level else []
                stem = [*prefix, *(target.split(".") if target else [])]
                found += [".".join([*stem, alias.name]) for alias in names]
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                called = function.attr if isinstance(function, ast.Attribute) else ""
                called = function.id if isinstance(function, ast.Name) else called
                if called in ("import_module", "__import__", "importorskip"):
                    found.append(name)
    return found


def violations(path: str, source: str) -> list[str]:
    """Return what the file at `path` (relative to the repository) imports and must not import."""
    parts = Path(path).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = parts[:-1] if is_package else parts
    package = module[1] if module[0] == "megafp8" and len(module) > 1 else None
    found = []
    for name in imported_names(source, module, is_package):
        top, _, rest = name.partition(".")
        if path == BESIDE_OURS:
            continue
        own = OWN_FILE_ONLY.get(top)
        if own is not None and not any(fnmatch(path, p) for p in (*own, *OF_TE_ITSELF)):
            found.append(f"{path}: only {' and '.join(own)} may import {top}")
        if top == "torch" and package in WITHOUT_TORCH and not fnmatch(path, DRY_RUN):
            found.append(f"{path}: '{package}' must not import torch")
        if module[0] not in MAY_IMPORT or path == "megafp8/__main__.py":
            continue  # the top floor
        if top not in MAY_IMPORT:
            if f"{top}.py" in AT_THE_TOP or top in BESIDE:
                found.append(f"{path}: must not import '{top}' from above the package")
            continue
        if top != module[0] and top not in MAY_IMPORT[module[0]]:
            found.append(f"{path}: '{module[0]}' must not import '{top}'")
        elif top == "te_cpu" and module[0] == "megafp8" and not fnmatch(path, IMPORTS_TE_CPU):
            found.append(f"{path}: only {IMPORTS_TE_CPU} may import te_cpu")
        if top != module[0] or top != "megafp8":
            continue  # other packages have no floors
        target = rest.split(".")[0]
        if target not in FLOORS:
            if target.startswith("__") or not target:
                continue  # megafp8 itself: its version
            found.append(f"{path}: '{target}' has no floor; give it one in tests/test_layers.py")
        elif package is None:
            found.append(
                f"{path}: the package itself must import no package, but imports '{target}'"
            )
        elif target != package and FLOORS[target] >= FLOORS.get(package, -1):
            found.append(
                f"{path}: '{package}' (floor {FLOORS.get(package)}) must not import "
                f"'{target}' (floor {FLOORS[target]})"
            )
    return found


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Return groups of files of the package that import each other in a circle, each group sorted.

    `sources` are the files' texts by path, relative to the repository. A file that is in no group
    can be read after those that it imports. Imports inside functions and those of a package's
    `__init__` count; that `import a.b` runs `a/__init__.py` does not.
    """
    modules = {}
    for path in sources:
        parts = Path(path).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    arrows: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        is_package = path.endswith("__init__.py")
        for target in imported_names(sources[path], tuple(name.split(".")), is_package):
            while target and target not in modules:  # a class or function of a module
                target = target.rpartition(".")[0]
            found.add(target)
        arrows[name] = found - {name, ""}
    reached = {name: _reached(name, arrows) for name in modules}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in modules
        if name in reached[name]
    }
    return sorted([list(group) for group in groups])


def _reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    """Return all modules that `start` imports, directly or through other modules."""
    found: set[str] = set()
    left = [start]
    while left:
        new = arrows[left.pop()] - found
        found |= new
        left.extend(new)
    return found


def source_files() -> list[Path]:
    folders = (*packages(), "examples", "benchmarks")
    return sorted([*(ROOT / name for name in AT_THE_TOP), *sources(ROOT, *folders)])


def test_every_file_keeps_to_its_floor() -> None:
    files = source_files()
    assert any(file.name == "console.py" for file in files), "no source files found"
    found = [
        line
        for file in files
        for line in violations(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


KNOWN_CIRCLES: list[list[str]] = []
"""These circles are still to be removed; none may be added."""


def test_no_files_import_each_other_in_a_circle() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sources(ROOT)}
    new = [circle for circle in circles(texts) if circle not in KNOWN_CIRCLES]
    assert new == [], "files import each other in a circle"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from megafp8.a.two import x", "from megafp8.a import one"),
        ("from . import two", "def late():\n    from .one import y"),
        ("import megafp8.a.two", "importlib.import_module('megafp8.a.one')"),
    ],
)
def test_a_planted_circle_is_found(first: str, second: str) -> None:
    sources = {"megafp8/a/one.py": first, "megafp8/a/two.py": second, "megafp8/a/__init__.py": ""}
    assert circles(sources) == [["megafp8.a.one", "megafp8.a.two"]]
    assert circles({**sources, "megafp8/a/two.py": "import torch"}) == []


def test_every_package_has_a_floor() -> None:
    assert set(MAY_IMPORT) == set(packages()), "say in MAY_IMPORT which packages it may import"
    inside = {
        path.stem
        for path in (ROOT / "megafp8").iterdir()
        if (path.suffix == ".py" and not path.stem.startswith("__")) or any(path.glob("**/*.py"))
    }
    assert inside <= set(FLOORS), f"without a floor: {sorted(inside - set(FLOORS))}"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megafp8/models/gpt.py", "import megafp8.parallel"),
        ("megafp8/models/gpt.py", "from megafp8.fp8 import linear"),
        ("megafp8/models/gpt.py", "from megafp8 import train"),
        ("megafp8/models/gpt.py", "from ..optim.adamw import AdamW"),
        ("megafp8/models/__init__.py", "from .. import parallel"),
        ("megafp8/models/deep/gpt.py", "from ...parallel import mesh"),
        ("megafp8/models/gpt.py", "def late():\n    from megafp8.train.loop import run"),
        ("megafp8/models/gpt.py", "if TYPE_CHECKING:\n    from megafp8.train import loop"),
        ("megafp8/models/gpt.py", "importlib.import_module('megafp8.cli.plan')"),
        ("megafp8/optim/adamw.py", "import megafp8.checkpoint.store"),
        ("megafp8/specs/model.py", "import megafp8.config"),
        ("megafp8/models/gpt.py", "import megafp8.attic"),
        ("megafp8/__init__.py", "from megafp8.train import loop"),
        ("megafp8/train/loop.py", "import pytest, tests.helpers"),
        ("megafp8/config/schema/model.py", "import torch"),
        ("megafp8/plan/memory.py", "def late():\n    from torch import nn"),
        ("megafp8/train/build.py", "from megafp8.plan import memory"),
        ("megafp8/specs/model.py", "import torch.nn.functional as F"),
        ("megafp8/fp8/linear.py", "import transformer_engine.pytorch as te"),
        ("megafp8/fp8/native.py", "from torchao import float8"),
        ("megafp8/backends/te/parts.py", "import torchao"),
        ("megafp8/cli/doctor.py", "import_module('transformer_engine')"),
        ("pretrain_gpt.py", "import torchao"),
        ("fp8_numerics/cast.py", "from megafp8.errors import UserError"),
        ("fp8_numerics/kernels/compile.py", "def late():\n    import te_cpu"),
        ("te_cpu/loading.py", "from megafp8 import __version__"),
        ("te_cpu/gemm.py", "import megafp8_migrate"),
        ("fp8_coverage/record.py", "from fp8_numerics import gemm"),
        ("fp8_numerics/gemm.py", "import fp8_coverage"),
        ("megafp8/train/build.py", "from te_cpu import loading"),
        ("megafp8/cli/commands.py", "import_module('megafp8_migrate.audit')"),
        ("megafp8_migrate/nemo.py", "from tests import tiny"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megafp8/models/gpt.py", "from megafp8.specs import GPTSpec\nimport torch, json"),
        ("megafp8/models/gpt.py", "from megafp8.models import parts\nfrom . import block"),
        ("megafp8/models/gpt.py", "from ..errors import ConfigError"),
        ("megafp8/parallel/tensor.py", "from megafp8.fp8.linear import Fp8Linear"),
        ("megafp8/train/build.py", "from megafp8 import __version__, optim, checkpoint"),
        ("megafp8/backends/te/parts.py", "import transformer_engine.pytorch as te"),
        ("te_cpu/loading.py", "import transformer_engine.common"),
        ("megafp8/backends/torchao.py", "import torchao"),
        ("pretrain_gpt.py", "from megafp8.train import loop\nimport megafp8.cli"),
        ("megafp8/specs/recipe.py", "from fp8_numerics.formats import E4M3"),
        ("megafp8/backends/te/layer.py", "from te_cpu import loading"),
        ("te_cpu/gemm.py", "from fp8_numerics import cast\nfrom te_cpu import quantize"),
        ("te_cpu/loading.py", "import transformer_engine.common"),
        ("megafp8_migrate/audit/host.py", "import te_cpu\nfrom megafp8.cli import job"),
    ],
)
def test_what_is_allowed_is_allowed(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_planning_and_configuration_load_no_torch() -> None:
    """They load torch through no other package either: a wrong key is reported in milliseconds."""
    program = f"""
import importlib, pkgutil, sys
import megafp8
for name in {WITHOUT_TORCH}:
    try:
        package = importlib.import_module("megafp8." + name)
    except ModuleNotFoundError:
        continue
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        if not found.name.endswith("__main__") and "plan.dryrun" not in found.name:
            importlib.import_module(found.name)
        assert "torch" not in sys.modules, found.name + " loads torch"
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "unwanted"),
    [
        ("fp8_numerics", ("numpy", "torch", "megafp8", "megafp8_migrate", "te_cpu")),
        ("fp8_coverage", ("fp8_numerics", "megafp8", "megafp8_migrate", "te_cpu", "transformers")),
        ("te_cpu", ("megafp8", "megafp8_migrate")),
    ],
)
def test_a_package_loads_no_other_one(package: str, unwanted: tuple[str, ...]) -> None:
    """`import fp8_numerics` loads no torch, nor do its formats, and no module of te_cpu loads a
    module of megafp8."""
    program = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    name = found.name.rpartition(".")[2]
    is_light = name in ("formats", "cpu", "caches")
    if is_light if package.__name__ == "fp8_numerics" else name not in ("__main__", "setup"):
        importlib.import_module(found.name)
loaded = [name for name in {unwanted!r} if name in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
