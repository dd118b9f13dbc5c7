"""Test that the tests of Slurm fail, and are not skipped, if they are asked for and cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.asked import asked_for
from tests.slurm.conftest import refuse_without_programs


def test_the_packages_to_install_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.UsageError, match="slurmctld, slurmd, munged, ip, bwrap cannot"):
        refuse_without_programs()
    for name in ("slurmctld", "slurmd", "munged", "ip", "bwrap"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    refuse_without_programs()


@pytest.mark.parametrize(
    ("markers", "asked"),
    [("slurm", True), ("slurm or hosts", True), ("", False), ("not slurm", False), ("slow", False)],
)
def test_only_the_marker_asks_for_them(markers: str, asked: bool) -> None:
    assert asked_for("slurm", markers) is asked
