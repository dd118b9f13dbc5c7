"""Prepare the pages of the documentation's site; `make docs-site` builds it with MkDocs.

The README is the site's first page. A link to a file of the repository that is no page leads to a
copy of that file in the site, so that the site needs neither the repository nor a network.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the site that are files at the repository's top."""
LINK = re.compile(r"(?<=\]\()([^)\s#]*)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def linked(text: str, source: str) -> dict[str, str]:
    """Return the repository's paths to which a page links, by the link's text.

    Args:
        text: The page in Markdown.
        source: The page's path in the repository.
    """
    plain = CODE.sub("", text)
    targets = {match[1] for match in LINK.finditer(plain) if match[1]}
    return {
        target: posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        for target in targets
        if "://" not in target and not target.startswith("mailto:")
    }


def place_of(path: str) -> str:
    """Return where the site has a file of the repository, relative to the site's pages."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.txt" if (ROOT / path).is_file() else f"source/{path}/index.txt"


def source_of(page: File) -> str:
    """Return the path in the repository of a page's file."""
    for source, place in PAGES.items():
        if page.src_uri == place:
            return source
    return f"docs/{page.src_uri}"


def on_config(config: MkDocsConfig) -> None:
    """Give headings the anchors that GitHub gives them, which the pages' links have."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the repository's top, and copies of all files to which a page links."""
    for source, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text("utf-8")))
    copied = set()
    for page in list(files.documentation_pages()):
        for path in linked(page.content_string, source_of(page)).values():
            place, there = place_of(path), ROOT / path
            if not place.startswith("source/") or place in copied or not there.exists():
                continue
            copied.add(place)
            text = listing(there) if there.is_dir() else there.read_text("utf-8")
            files.append(File.generated(config, place, content=text))
    return files


def listing(folder: Path) -> str:
    """Return the names of a folder's files, one in a line."""
    return "\n".join(sorted(path.name for path in folder.iterdir() if path.is_file())) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead to the site's files."""
    here = posixpath.dirname(page.file.src_uri)
    places = linked(markdown, source_of(page.file))

    def replaced(match: re.Match[str]) -> str:
        if match[1] not in places:
            return match[0]
        target = posixpath.relpath(place_of(places[match[1]]), here or ".")
        fragment = match[2] or ""
        return target + ("" if target.endswith(".txt") else fragment)

    parts = CODE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(replaced, part) for i, part in enumerate(parts))


CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
LONG = re.compile(r"[^\s<>]{24,}(?![^<>]*>)")
"""A long word, outside of tags."""


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let long names in tables break after their signs, so that wide tables fit the page."""

    def breakable(cell: re.Match[str]) -> str:
        return LONG.sub(
            lambda word: re.sub(r"(?<=[.,/:=_])(?=[\w{&\"*[])", "<wbr>", word[0]), cell[0]
        )

    return CELL.sub(breakable, html)
