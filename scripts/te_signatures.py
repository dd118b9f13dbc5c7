"""Extract the fields of Transformer Engine's recipe classes from its wheels, for tests.

    python scripts/te_signatures.py 2.4.0 2.12.0 2.20.2

The program downloads the wheels of those versions to a cache (a few hundred kilobytes each, Python
code only), reads names and defaults with `ast`, without running that code, and writes
`tests/backends/te/te_signatures.json`. Tests that need the real recipe classes use
the same cache: `$MEGAFP8_TE_SOURCES`, or `~/.cache/megafp8/te` by default.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

from te_cpu.wheel import sources

OUTPUT = Path(__file__).parents[1] / "tests/backends/te/te_signatures.json"
PACKAGE = "transformer_engine"

RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")


def _field(name: str, default: ast.expr | None) -> dict[str, Any]:
    entry = {"name": name}
    return entry if default is None else {**entry, "default": ast.unparse(default)}


def fields(node: ast.ClassDef) -> list[dict[str, Any]]:
    """Return the dataclass fields of a recipe, which are its annotated names."""
    return [
        _field(item.target.id, item.value)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def signatures(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the fields of each recipe class that a version has, by the name of the class."""
    package, found = root / PACKAGE, {}
    tree = ast.parse((package / "common/recipe/__init__.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in RECIPES:
            found[node.name] = fields(node)
    return found


def as_text(table: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Return the table as JSON with one callable on each line."""
    versions = []
    for version, callables in table.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in callables.items()]
        versions.append(f" {json.dumps(version)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(versions) + "\n}\n"


def main() -> None:
    """Write the signatures of all versions on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+")
    table = {v: signatures(sources(v).folder) for v in parser.parse_args().versions}
    OUTPUT.write_text(as_text(table), "utf-8")
    print(f"{OUTPUT}: {', '.join(table)}")


if __name__ == "__main__":
    main()
