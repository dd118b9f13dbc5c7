"""Test constraints.txt: one version of each package that the developers' environment needs."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_layers import ROOT

LINES = [
    line
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
]


def test_each_line_is_a_name_and_a_version() -> None:
    """No local build, hash or address is named."""
    assert len(LINES) > 50
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in LINES)


def test_every_requirement_of_the_developers_is_pinned_and_allows_the_pin() -> None:
    pins = {
        canonicalize_name(name): version for name, _, version in (p.partition("==") for p in LINES)
    }
    files = (ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml"))
    projects = [tomllib.loads(file.read_text("utf-8"))["project"] for file in files]
    ours = {project["name"] for project in projects}
    lines = [line for project in projects for line in project["dependencies"]]
    for text in (*lines, *projects[0]["optional-dependencies"]["dev"]):
        wanted = Requirement(text)
        if wanted.name in ours:  # it is installed from this repository
            assert not wanted.specifier, text
        elif wanted.marker is None or wanted.marker.evaluate({"python_version": "3.11"}):
            version = pins[canonicalize_name(wanted.name)]
            assert wanted.specifier.contains(version, prereleases=True), (text, version)
