"""Build one of this repository's distributions, which the pyproject.toml beside it describes.

The folders of the other distributions have links to this file. It does what a pyproject.toml
cannot: their package is the folder itself, with all packages below it; they need each other in the
version of the file VERSION; and an install that lacks another of these distributions in this
version is refused, with the line that works, before pip asks an index for its name. A source
archive has this file too, in a folder of another name than the package.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup

HERE = Path(__file__).absolute().parent  # of the link
IS_ARCHIVE = (HERE / "PKG-INFO").is_file()
ROOT = HERE if IS_ARCHIVE or (HERE / "megafp8").is_dir() else HERE.parent
KINDS = ("c", "h", "json", "md", "safetensors", "yaml")
VERSION = (HERE / "VERSION").read_text("utf-8").strip()
DATA = ["py.typed", "VERSION", *(f"**/*.{kind}" for kind in KINDS)]


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]


PLACES = {
    project(path.parent)["name"]: path.parent.resolve()
    for path in (ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml")) if path.is_file()
}  # fmt: skip
"""The folders of all distributions of this repository, by their names."""
OURS = {*PLACES}
if IS_ARCHIVE:  # it has one folder, and its maker wrote down what it needs in which version
    OURS |= {*re.findall(rf"^Requires-Dist: ([\w-]+)=={re.escape(VERSION)}(?=;|$| )",
                         (HERE / "PKG-INFO").read_text("utf-8"), re.MULTILINE)}  # fmt: skip


class OfOneVersion(Distribution):
    """Need the other distributions of this repository in the version of this one."""

    def parse_config_files(self, *args: Any, **words: Any) -> None:
        """Read pyproject.toml, in which their names have no version."""
        super().parse_config_files(*args, **words)
        self.install_requires = self.metadata.install_requires = of_version(self.install_requires)
        extras = {extra: of_version(lines) for extra, lines in self.extras_require.items()}
        self.extras_require = self.metadata.extras_require = extras


def of_version(requirements: list[str]) -> list[str]:
    """Return requirements in which distributions of this repository have its version."""
    return [f"{line}=={VERSION}" if line in OURS else line for line in requirements]


def needed(name: str, extras: list[str]) -> list[str]:
    """Return which distributions of this repository the one called `name` needs, lowest first."""
    table = project(PLACES[name])
    optional = table.get("optional-dependencies", {})
    lines = [*table["dependencies"], *(line for e in extras for line in optional.get(e, ()))]
    names = [re.split(r"[^\w-]", line, maxsplit=1)[0] for line in lines]  # without versions
    below = [other for other in names if other in PLACES and other != name]
    found = [lower for other in below for lower in (*needed(other, []), other)]
    return list(dict.fromkeys(found))


def is_installed(name: str) -> bool:
    """Whether the environment into which pip installs has `name` in this version."""
    code = f"import importlib.metadata as m; assert m.version({name!r}) == {VERSION!r}"
    return not subprocess.run([sys.executable, "-I", "-c", code], capture_output=True).returncode


def refuse_if_another_is_missing() -> None:
    """Exit with the line that works if pip would ask an index for one of our distributions."""
    process = Path(f"/proc/{os.getppid()}")  # pip's, or that of uv
    try:
        words = (process / "cmdline").read_bytes().decode().split("\0")[:-1]
        cwd = Path(os.readlink(process / "cwd"))
    except (OSError, UnicodeDecodeError):
        return
    kind = next((word for word in words if word in ("install", "wheel")), None)
    elsewhere = re.compile(r"--(no-deps|find-links|requirement|(extra-)?index-url)|-[rfi]")
    if kind is None or any(elsewhere.match(word) for word in words):
        return
    own, mine, given = project(HERE)["name"], None, set()
    for number, word in enumerate(words):
        path, _, extras = word.partition("[")
        for name, place in PLACES.items():
            if (cwd / path).resolve() == place or re.match(rf"{re.escape(name)}-\d", path):
                given.add(name)
                mine = (number, extras.rstrip("]").split(",")) if name == own else mine
    if mine is None:
        return
    number, extras = mine
    lacking = [n for n in needed(own, extras) if n not in given and not is_installed(n)]
    if lacking:
        mark = ["-e"] if words[number - 1] in ("-e", "--editable") else []
        more = [w for n in lacking for w in (*mark, _from(cwd, PLACES[n]))]
        rest = words[words.index(kind) + 1 :]
        at = number - len(mark) - words.index(kind) - 1
        tool = ["uv", "pip"] if Path(words[0]).name == "uv" else ["pip"]
        line = shlex.join([*tool, kind, *rest[:at], *more, *rest[at:]])
        sys.exit(
            f"{own} needs {' and '.join(lacking)} {VERSION} of the same repository, which no "
            f"package index has. Install all of them in one command:\n    {line}"
        )


def _from(cwd: Path, place: Path) -> str:
    path = os.path.relpath(place, cwd)
    return path if path.startswith(".") else f"./{path}"


def name() -> str:
    """Return the package's name: that of its folder, which a source archive has written down."""
    if not IS_ARCHIVE:
        return HERE.name
    (written,) = HERE.glob("*.egg-info/top_level.txt")
    return written.read_text("utf-8").strip()


def packages(top: str) -> list[str]:
    """Return the package of this folder and those below it."""
    below = sorted(file.parent.relative_to(HERE) for file in HERE.glob("**/__init__.py"))
    return [".".join((top, *path.parts)) for path in below if "build" not in path.parts]


refuse_if_another_is_missing()
if (HERE / "megafp8").is_dir():
    setup(distclass=OfOneVersion)
else:
    setup(
        distclass=OfOneVersion,
        script_name="setup.py",  # so named it is no module of the package
        packages=packages(name()),
        package_dir={name(): "."},
        package_data={name(): DATA},
        options={"build": {"build_base": str(ROOT / "build" / name())}},
    )
