"""Say which packages this repository has: each check reads the list here.

A package is a folder with a pyproject.toml, but that of megafp8 is at the top of the repository.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MAIN = "megafp8"
BESIDE = ("benchmarks", "examples", "hydra_plugins", "scripts", "tests")
"""Folders with Python that are no distribution's package; `hydra_plugins` is in megafp8's."""
AT_THE_TOP = ("finetune_gpt.py", "pretrain_gpt.py", "setup.py")
LEFT_BY_BUILDS = ("build", "dist")


@cache
def packages(tree: Path = ROOT) -> tuple[str, ...]:
    """Return the packages of a tree by the names under which they are imported, megafp8 first."""
    return (MAIN, *sorted(file.parent.name for file in tree.glob("*/pyproject.toml")))


def projects(tree: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Return the table `project` of each package's pyproject.toml."""
    files = {
        name: (tree if name == MAIN else tree / name) / "pyproject.toml" for name in packages(tree)
    }
    return {name: tomllib.loads(f.read_text("utf-8"))["project"] for name, f in files.items()}


def sources(tree: Path, *folders: str) -> list[Path]:
    """Return the Python files of folders, or of all packages of a tree, sorted in each folder.

    Links are left out, since what they lead to is a file of another folder.
    """
    return [
        path
        for folder in folders or packages(tree)
        for path in sorted((tree / folder).rglob("*.py"))
        if not path.is_symlink() and not set(path.relative_to(tree).parts) & set(LEFT_BY_BUILDS)
    ]


def is_ours(module: str, tree: Path = ROOT) -> bool:
    """Whether a dotted name of a module belongs to a package of a tree."""
    return module.partition(".")[0] in packages(tree)
