"""Find the code of a framework that is to be audited: installed, a folder, or wheels."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megafp8.config.api import SettingError
from megafp8.foreign import ForeignFileError, check_regular

MAX_BYTES = 1 << 28
"""The largest sum of a wheel's files that is unpacked."""
_MARKS = {
    "megatron-core": ("megatron/core/__init__.py", "megatron/training/arguments.py"),
    "megatron-bridge": ("megatron/bridge/training/mixed_precision.py",),
    "accelerate": ("accelerate/commands/launch.py",),
}
"""The files of each distribution that the audit runs."""
_TRIED = {"megatron-core": "0.19.2", "megatron-bridge": "0.6.2", "accelerate": "1.15.0"}


@dataclass(frozen=True)
class CodeFound:
    """Hold where a distribution's code is, and its version (empty if nothing says it)."""

    distribution: str
    version: str
    folder: Path


def find(distribution: str, given: Sequence[Path], unpacked: Path, needs: int = 9) -> CodeFound:
    """Return where the code of a distribution is.

    Args:
        distribution: A name of `_MARKS`.
        given: Folders and wheels that the user names; an installed package is used without them.
        unpacked: An empty folder into which wheels are unpacked.
        needs: How many of the marked files must be there.

    Raises:
        SettingError: The code is not there; the message says how to get it.
    """
    marks = _MARKS[distribution][:needs]
    places = list(_places(distribution, given, unpacked)) if given else _installed(distribution)
    for folder in places:
        if all((folder / mark).is_file() for mark in marks):
            return CodeFound(distribution, _version(distribution, folder), folder)
    where = ", ".join(map(str, given)) or "this environment"
    raise SettingError(
        "--source", None, f"{distribution} is not in {where}, with {' and '.join(marks)}",
        f"Get it: pip download --no-deps --python-version 3.12 --only-binary=:all: -d wheels "
        f"{distribution}=={_TRIED[distribution]}, then give --source wheels (or a clone)",
    )  # fmt: skip


def _places(distribution: str, given: Sequence[Path], unpacked: Path) -> Iterator[Path]:
    for path in given:
        if not path.exists():
            raise SettingError("--source", str(path), "does not exist", "Give a folder or a wheel")
        if path.suffix == ".whl":
            yield from _unpacked(distribution, path, unpacked)
            continue
        yield from (path.absolute(), path.absolute() / "src")
        for wheel in sorted(path.glob("*.whl")) if path.is_dir() else ():
            yield from _unpacked(distribution, wheel, unpacked)


def _unpacked(distribution: str, wheel: Path, unpacked: Path) -> Iterator[Path]:
    """Unpack the Python files of a wheel; yield the folder if it is the distribution's."""
    if not wheel.name.lower().startswith(distribution.replace("-", "_") + "-"):
        return
    folder = unpacked / wheel.stem
    try:
        check_regular(wheel.stat())
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith((".py", "/METADATA", ".json"))]
            if sum(archive.getinfo(name).file_size for name in names) > MAX_BYTES:
                reason = f"has more than {MAX_BYTES >> 20} MiB of files"
                raise SettingError("--source", str(wheel), reason, "Give another wheel")
            archive.extractall(folder, names)
    except (OSError, ForeignFileError, zipfile.BadZipFile) as error:
        hint = "Download it again"
        raise SettingError("--source", str(wheel), f"cannot be read ({error})", hint) from error
    yield folder


def _installed(distribution: str) -> list[Path]:
    try:
        module_spec = importlib.util.find_spec(distribution.partition("-")[0])
    except (ImportError, ValueError):
        return []
    places = [] if module_spec is None else list(module_spec.submodule_search_locations or ())
    return [Path(place).parent for place in places]


def _version(distribution: str, folder: Path) -> str:
    """Return the version that the metadata beside the code, or its own file, says."""
    start = distribution.replace("-", "_")
    for metadata in folder.glob("*.dist-info/METADATA"):
        if metadata.parent.name.lower().startswith(start + "-") and metadata.is_file():
            match = re.search(r"(?m)^Version: (\S+)", metadata.read_text(errors="replace"))
            return match[1] if match else ""
    package = "megatron/core/package_info.py" if distribution == "megatron-core" else ""
    if package and (folder / package).is_file():
        text = (folder / package).read_text(errors="replace")
        numbers = re.findall(r"(?m)^(?:MAJOR|MINOR|PATCH) = (\d+)", text)
        return ".".join(numbers)
    return ""
