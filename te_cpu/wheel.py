"""Transformer Engine's Python, fetched once as a wheel and kept in a cache of its own.

The wheel `transformer-engine` holds all Python and no compiled code. It never goes into
site-packages, where other packages would find it and try to use it.

    python -m te_cpu [VERSION or WHEEL …]

fills the cache, without a network where the path of a wheel is given. The cache is
`$MEGAFP8_TE_SOURCES`, else `megafp8/te` in `$XDG_CACHE_HOME` or `~/.cache`, with one folder for
each version. Each folder has the wheel and, unpacked in `sources`, its files.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fp8_numerics.caches import built_beside, cache_folder, locked, move_away, own_folder, put
from te_cpu.errors import VersionError
from te_cpu.versions import DEFAULT_VERSION, HASHES, release_of, why_not

PACKAGE = "transformer-engine"
EXTENSION = "transformer_engine_torch"
KNOWN_HASHES = HASHES
_NAME = re.compile(r"transformer_engine-([^-]+)-.*\.whl")


@dataclass(frozen=True)
class Sources:
    """Hold the unpacked Python of one version.

    `is_known` says whether its wheel has the hash that is listed here; other versions have none.
    """

    version: str
    folder: Path
    is_known: bool


def loaded() -> Sources | None:
    """Return the version whose Python this process has loaded on the CPU; None before."""
    found = getattr(sys.modules.get(EXTENSION), "sources", None)
    return found if isinstance(found, Sources) else None


def version_in_use() -> tuple[int, ...]:
    """Return the first two numbers of the version that is loaded; before, those of the default."""
    found = loaded()
    return release_of(DEFAULT_VERSION if found is None else found.version)


def te_folder() -> Path:
    """Return the folder in which the versions are kept."""
    given = os.environ.get("MEGAFP8_TE_SOURCES")
    return Path(given) if given else cache_folder() / "te"


def version_of(given: str) -> str:
    """Return the version that a wheel's path names; anything else is a version already.

    Raises:
        VersionError: The path is not that of the wheel with the Python.
    """
    if not given.endswith(".whl"):
        return given
    if (found := _NAME.fullmatch(Path(given).name)) is None:
        reason = "is not named as the wheel with its Python, transformer_engine-VERSION-….whl"
        hint = f"Get that wheel with `pip download --no-deps {PACKAGE}=={DEFAULT_VERSION}`"
        raise VersionError(PACKAGE, given, reason, hint)
    return found[1]


def sources(version: str = DEFAULT_VERSION, *, fetch: bool = True) -> Sources:
    """Return the Python of `version`, downloaded if the cache lacks it and `fetch` allows that.

    The path of a wheel (`….whl`) may be given in place of a version: that wheel is copied into the
    cache.

    Every call compares the wheel's hash with the known one and every unpacked file with the
    wheel's own record; damaged files are unpacked again.

    Raises:
        VersionError: The version is malformed or too old, cannot be fetched, or has another hash.
    """
    given, version = version, version_of(version)
    _check_version(version)
    folder = _own(te_folder(), version) / version
    if given != version:
        _adopt(Path(given), version, folder)
    if (wheel := _wheel_in(folder)) is None or not _is_intact(folder / "sources", wheel):
        with _filling(folder, version):
            wheel = _wheel_in(folder)  # another process may have brought it meanwhile
            if wheel is None:
                if not fetch:
                    raise _absent(version, folder, "downloads are off here")
                wheel = _download(version, folder)
            _check_hash(version, wheel)
            if not _is_intact(folder / "sources", wheel):
                _unpack(wheel, folder / "sources")
    _check_hash(version, wheel)
    return Sources(version, folder / "sources", version in KNOWN_HASHES)


def _adopt(given: Path, version: str, folder: Path) -> None:
    """Copy a user's wheel into the cache, if the cache does not have it."""
    hint = f"Get it with `pip download --no-deps {PACKAGE}=={version}`"
    if not given.is_file():
        raise VersionError(PACKAGE, given, "there is no such file", hint)
    try:
        digest = _check_hash(version, given, hint)
        with _filling(folder, version):
            if (kept := _wheel_in(folder)) is None:
                with tempfile.TemporaryDirectory(dir=folder, prefix="copying-") as fresh:
                    put(Path(shutil.copy(given, fresh)), folder / given.name)
            elif _check_hash(version, kept) != digest:
                reason = f"the cache has another wheel of this version, {kept}"
                raise VersionError(PACKAGE, given, reason, "Delete one of the two")
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise VersionError(PACKAGE, given, reason, hint) from error


def _own(folder: Path, version: str) -> Path:
    """Return the folder if no other user can write it, since its Python is run.

    A folder that the user has named is the user's own decision.
    """
    if os.environ.get("MEGAFP8_TE_SOURCES"):
        return folder
    try:
        return own_folder(folder)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        hint = "Name a folder of your own with XDG_CACHE_HOME or MEGAFP8_TE_SOURCES"
        raise VersionError(PACKAGE, version, reason, hint) from error


def is_cached(version: str = DEFAULT_VERSION) -> bool:
    """Whether `sources` would need no network."""
    return _wheel_in(te_folder() / version) is not None


def fill_command(version: str = DEFAULT_VERSION) -> str:
    """Return the shell command that puts a version into the cache."""
    folder = te_folder() / version
    return f"pip download --no-deps -d {folder} {PACKAGE}=={version}"


def _check_version(version: str) -> None:
    if (reason := why_not(version)) is not None:
        raise VersionError(PACKAGE, version, reason, f"Use {DEFAULT_VERSION}, or leave it out")


def _wheel_in(folder: Path) -> Path | None:
    """Return the wheel of the version that the folder is named after."""
    return next(iter(sorted(folder.glob(f"transformer_engine-{folder.name}-*.whl"))), None)


def _check_hash(
    version: str, wheel: Path, hint: str = "Delete the file, and it is fetched again"
) -> str:
    """Return the wheel's SHA-256; another one than the known one is an error."""
    known = KNOWN_HASHES.get(version)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if known is not None and found != known:
        reason = f"{wheel} has the SHA-256 {found}, and PyPI's wheel of this version has {known}"
        raise VersionError(PACKAGE, version, reason, hint)
    return found


def _is_intact(folder: Path, wheel: Path) -> bool:
    """Whether every file of the wheel's record lies in `folder` with the recorded hash."""
    if not folder.is_dir():
        return False
    try:
        with zipfile.ZipFile(wheel) as archive:
            record = next(n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
            rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
        return all(
            _record_hash(folder / path) == recorded for path, recorded, *_ in rows if recorded
        )
    except (OSError, zipfile.BadZipFile, StopIteration):
        return False


def _record_hash(file: Path) -> str:
    """Return a hash as a wheel's RECORD writes it (PEP 376): unpadded URL-safe base64."""
    digest = hashlib.sha256(file.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _unpack(wheel: Path, target: Path) -> None:
    """Unpack beside `target`, then put the whole in its place."""
    try:
        with built_beside(target) as fresh, zipfile.ZipFile(wheel) as archive:
            archive.extractall(fresh)
            if target.exists():
                move_away(target)
    except (OSError, zipfile.BadZipFile) as error:
        reason = f"{wheel} cannot be unpacked ({error})"
        raise VersionError(PACKAGE, target.parent.name, reason, "Delete the file") from error


def _download(version: str, folder: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=folder, prefix="downloading-") as fresh:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--retries", "1", "--timeout", "15", "--dest", fresh]
        done = subprocess.run(
            [*command, f"{PACKAGE}=={version}"], capture_output=True, text=True, check=False
        )
        wheel = next(iter(Path(fresh).glob(f"transformer_engine-{version}-*.whl")), None)
        if done.returncode != 0 or wheel is None:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
            if any("(from versions: " in line and ": none)" not in line for line in lines):
                hint = f"Use {DEFAULT_VERSION}, or another one that `python -m te_cpu doctor` lists"
                raise VersionError(PACKAGE, version, "the package index has no such version", hint)
            raise _absent(version, folder, (lines or ["pip download found no wheel"])[-1].strip())
        _check_hash(version, wheel)
        return wheel.rename(folder / wheel.name)


def _absent(version: str, folder: Path, why: str) -> VersionError:
    return VersionError(
        PACKAGE,
        version,
        f"its Python is not in {folder} and could not be fetched ({why})",
        f"Fill the cache with `{fill_command(version)}` (on another machine, and copy the folder, "
        "if this one has no network)",
    )


@contextmanager
def _filling(folder: Path, version: str) -> Iterator[None]:
    """Let one process at a time fill `folder`; ranks that start together wait for each other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            yield
    except OSError as error:
        reason = f"its cache cannot be written ({error})"
        hint = "Name another folder with MEGAFP8_TE_SOURCES"
        raise VersionError(PACKAGE, version, reason, hint) from error


def main(argv: Sequence[str]) -> int:
    """Fetch versions and say where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m te_cpu",
        description="Fetch Transformer Engine's Python into the cache, and say where it is.",
        epilog=f"The cache is {te_folder()}; MEGAFP8_TE_SOURCES names another folder. Other "
        "commands: `python -m te_cpu run` runs a program, `python -m te_cpu doctor` says what this "
        "machine has; each with --help.",
    )
    about = f"a version of Transformer Engine, by default {DEFAULT_VERSION}, or a wheel's path"
    parser.add_argument("versions", metavar="VERSION", nargs="*", help=about)
    versions = parser.parse_args(argv).versions or [DEFAULT_VERSION]
    for word in versions:
        if not word[:1].isdigit() and not word.endswith(".whl"):
            reason = f"{word} is no version, no wheel's path, and none of the commands run, doctor"
            hint = f"`python -m te_cpu run {word}` runs a program"
            print(f"te_cpu: {reason}. {hint}", file=sys.stderr)
            return 2
    for version in versions:
        try:
            print(f"{PACKAGE} {version}: {sources(version).folder}")
        except VersionError as error:
            print(error, file=sys.stderr)
            return 2
    return 0
