"""The documentation builds as a site: every page is in it, links hold, no other host is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_layers import ROOT

GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = {
    *(
        path.relative_to(ROOT / "docs").with_suffix(".html")
        for path in (ROOT / "docs").rglob("*.md")
    ),
    Path("index.html"),  # the README
    Path("contributing.html"),
}


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *options]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    assert len(PAGES) > 25
    found = {path.relative_to(site) for path in site.rglob("*.html")}
    assert found == PAGES | {Path("404.html")}


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    """Scripts, styles, fonts and images are of the site itself; links may leave it."""
    loads = re.compile(
        r"""<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^>]*"""
    )
    for path in site.rglob("*.html"):
        found = [text for text in loads.findall(path.read_text("utf-8")) if "canonical" not in text]
        assert not found, (path, found)
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?https?://", path.read_text("utf-8")), path


def test_words_of_all_parts_can_be_searched(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert places == {page.as_posix() for page in PAGES}
    text = " ".join(entry["text"] for entry in index["docs"])
    for word in ("amax", "fp8_hybrid", "ZeRO-1", "NVFP4"):
        assert word in text


def test_long_names_in_tables_can_break_after_their_signs(site: Path) -> None:
    """Otherwise a column is as wide as a path, and the table is cut at 1,280 pixels."""
    count = 0
    for path in site.rglob("*.html"):
        for cell in re.findall(r"<td[^>]*>(.*?)</td>", path.read_text("utf-8"), re.DOTALL):
            count += cell.count("<wbr>")
            words = re.sub(r"<[^>]+>", "", cell.replace("<wbr>", " ")).split()
            assert max(map(len, words), default=0) <= 48, (path.name, words)
    assert count > 500
    index = (site / "search" / "search_index.json").read_text("utf-8")
    assert "layernorm_mlp/test_selective_activation_checkpoint.py" in index  # as one word


def test_links_to_the_code_lead_to_copies(site: Path) -> None:
    """Each link within the site leads to a file of the site."""
    count = 0
    for path in site.rglob("*.html"):
        if path.name == "404.html":
            continue
        for target in re.findall(r'<a[^>]*? href="([^"#?]+)', path.read_text("utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            count += 1
            assert (path.parent / target).exists(), (path.relative_to(site), target)
    assert count > 500


def test_a_link_that_leads_nowhere_stops_the_build(tmp_path: Path) -> None:
    for name in ("docs", "scripts", "mkdocs.yml"):
        place = tmp_path / name
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, place)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        shutil.copy(ROOT / name, tmp_path)
    page = tmp_path / "docs" / "guide" / "fp8.md"
    page.write_text(page.read_text("utf-8") + "\n[nowhere](nowhere.md), [part](data.md#nowhere)\n")
    done = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0
    assert "'nowhere.md'" in done.stderr and "#nowhere" in done.stderr


def test_the_guide_can_be_read_in_one_sitting() -> None:
    lines = {path.name: len(path.read_text("utf-8").splitlines()) for path in GUIDE}
    assert 20 <= len(lines) <= 28
    assert all(count <= 200 for count in lines.values()), lines
    words = {path.name: len(path.read_text("utf-8").split()) for path in GUIDE}
    assert max(words.values()) <= 1500, words


def test_the_readme_fits_a_hundred_lines() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 100
