"""Say which versions of Transformer Engine settings may name, without importing it or torch."""

from __future__ import annotations

import importlib.metadata
import re

OLDEST = (2, 4)
"""The oldest version that works; 2.2 and 2.3 keep the gradient quantizers of the MLP in other
columns of the scaling tensors."""
NEWEST_TRIED = (2, 20)
"""The newest version that was tried; `te_cpu` has all of them in its table."""
DEFAULT_VERSION = "2.12.0"
"""The version whose Python runs on a CPU where none was asked for."""
DOCUMENTS_ON_CPU = "2.11"
"""The first version whose attention without flash attention and cuDNN, which a CPU lacks, keeps
documents apart; earlier ones leave it out for `qkv_format="thd"`."""
HEAD_NORMS = "2.7"
"""The first version that can normalize queries and keys before it rotates them."""
FIRST_WITH_NVFP4 = "2.8"
"""The first version that has `NVFP4BlockScaling`."""
_WHOLE = re.compile(r"\d+\.\d+\.\d+(\.post\d+)?")


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: "2.12.0" -> (2, 12)."""
    return tuple(int(number) for number in version.split(".")[:2])


def installed_version(distribution: str = "transformer-engine") -> str | None:
    """Return the version that is installed here, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_before(version: str, first: str) -> bool:
    """Whether a version is whole and earlier than `first`."""
    return bool(_WHOLE.fullmatch(version)) and release_of(version) < release_of(first)


def why_not_version(version: str) -> str | None:
    """Return why a version is too old, or too new to be known, or None."""
    if release_of(version) < OLDEST:
        return f"{version} is too old: it must be {'.'.join(map(str, OLDEST))} or later"
    if release_of(version)[0] > NEWEST_TRIED[0]:
        newest = ".".join(map(str, NEWEST_TRIED))
        return f"{version} is too new to be known here: versions up to {newest} were tried"
    return None


def why_not_on_cpu(version: str) -> str | None:
    """Return why the Python of a version cannot be fetched to run on a CPU, or None."""
    if not _WHOLE.fullmatch(version):
        return f"is no whole version, such as {DEFAULT_VERSION}"
    return why_not_version(version)
