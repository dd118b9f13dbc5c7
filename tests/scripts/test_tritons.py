"""The kernels are compiled with the Triton of every supported PyTorch, and with no other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import tritons
from tests.test_layers import ROOT

SEES = """
import os
import triton

def test_version():
    assert triton.__version__ == os.environ["MEGAFP8_TESTS_TRITON"]
"""


def test_every_supported_torch_has_its_triton() -> None:
    script = (ROOT / "scripts/setup_env.sh").read_text()
    (text,) = re.findall(r"CUDA_TORCH=\$\{CUDA_TORCH:-'(.*)'\}", script)
    supported = Requirement(text).specifier
    assert set(tritons.TRITONS) == {f"2.{n}" for n in range(99) if supported.contains(f"2.{n}.0")}


def test_the_developers_environment_admits_each() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = map(Requirement, project["optional-dependencies"]["dev"])
    (triton,) = (requirement for requirement in wanted if requirement.name == "triton")
    assert all(triton.specifier.contains(version) for version in tritons.TRITONS.values())


def test_the_tests_see_the_version_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two folders stand for installed versions; the second one has another version inside."""
    for version, inside in (("0.1", "0.1"), ("0.2", "0.3")):
        (tmp_path / version / f"triton-{version}.dist-info").mkdir(parents=True)
        (tmp_path / version / "triton.py").write_text(f"__version__ = {inside!r}\n")
    (tmp_path / "test_sees.py").write_text(SEES)
    monkeypatch.setattr(tritons, "TESTS", str(tmp_path / "test_sees.py"))
    assert tritons.main(["0.1", "--folder", str(tmp_path)]) == 0
    assert "1 passed" in capfd.readouterr().out
    assert tritons.main(["0.1", "0.2", "--folder", str(tmp_path)]) == 1
    assert "failed with triton 0.2\n" in capfd.readouterr().out
