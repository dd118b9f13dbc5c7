"""The releases of Python and of other packages that tests of this project have run with.

The table of docs/guide/versions.md has the same numbers, and `doctor` compares what is installed.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Tried:
    """Hold releases that were tried, oldest first.

    Attributes:
        whole: With these the whole fast suite has passed.
        part: With these a part of it has, mostly the tests of what uses the package.
    """

    whole: tuple[str, ...]
    part: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = (("", self.whole), ("in part ", self.part))
        return ", ".join(f"{how}{', '.join(releases)}" for how, releases in parts if releases)


TRIED = {
    "python": Tried(("3.11", "3.12"), ("3.13",)),
    "torch": Tried(("2.11.0", "2.13.0", "2.15.0"), ("2.12.0", "2.14.1")),
    "triton": Tried(("3.6.0", "3.9.0"), ("3.7.0", "3.7.1", "3.8.0")),
    "torchao": Tried(("0.18.0",), ("0.14.0",)),
    "transformers": Tried(("5.23.0", "5.24.0"), ("5.0.0",)),
    "hydra-core": Tried(("1.3.8",), ("1.3.2",)),
    "omegaconf": Tried(("2.3.1",), ("2.3.0",)),
    "datasets": Tried(("5.2.0",), ("5.0.0",)),
    "wandb": Tried(("0.31.0",), ("0.18.0",)),
}


def untried() -> Iterator[tuple[str, str, Tried]]:
    """Yield the packages whose installed release was not tried: name, release, what was tried.

    Releases count as one that differ in the last of three numbers, and in the build of torch.
    """
    for name, tried in TRIED.items():
        try:
            installed = platform.python_version() if name == "python" else version(name)
        except PackageNotFoundError:
            continue
        if _minor(installed) not in {_minor(release) for release in (*tried.whole, *tried.part)}:
            yield name, installed, tried


def _minor(release: str) -> str:
    return ".".join(release.split("+")[0].split(".")[:2])
