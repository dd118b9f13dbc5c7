"""Transformer Engine's Python for tests: fetched where it is missing, else the test is skipped with
the command that fetches it. In CI that is a failure, but not where a suite says that it has no
network (`MEGAFP8_TESTS_OFFLINE`), as the one of the image does.

Tests of the other packages ask here, and import `te_cpu` afterwards: without its folder, as where
`scripts.removals` took it out, they are skipped."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

IS_HERE = (Path(__file__).parents[1] / "te_cpu").is_dir()


@functools.cache
def _why_not(version: str) -> str:
    from te_cpu import wheel
    from te_cpu.errors import VersionError

    try:
        wheel.sources(version)
    except VersionError as error:
        return str(error)
    return ""


def need_sources(version: str) -> None:
    """One attempt in a process."""
    if not IS_HERE:
        pytest.skip("te_cpu is not in this tree")
    reason = _why_not(version)
    if reason and os.environ.get("CI") and not os.environ.get("MEGAFP8_TESTS_OFFLINE"):
        pytest.fail(reason)
    elif reason:
        pytest.skip(reason)
