"""Extract Transformer Engine's signatures from its wheels, for the test double to accept.

    python scripts/te_signatures.py 2.4.0 2.12.0 2.20.2

The program downloads the wheels of those versions to a cache (a few hundred kilobytes each, Python
code only), reads parameter names, kinds and defaults with `ast`, without running that code, and
writes `tests/backends/te/te_signatures.json`. Tests that need the real recipe classes use
the same cache: `$MEGAFP8_TE_SOURCES`, or `~/.cache/megafp8/te` by default.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

from megafp8.backends.te.cpu.wheel import sources

OUTPUT = Path(__file__).parents[1] / "tests/backends/te/te_signatures.json"
PACKAGE = "transformer_engine"

# Name in the JSON: (files that may have it, class, function). The first file that has it counts.
FUNCTIONS = {
    "TransformerLayer.__init__": (["pytorch/transformer.py"], "TransformerLayer", "__init__"),
    "TransformerLayer.forward": (["pytorch/transformer.py"], "TransformerLayer", "forward"),
    "init_fp8_meta_tensors": (
        ["pytorch/module/base.py"], "TransformerEngineBaseModule", "init_fp8_meta_tensors"
    ),
    "get_fp8_meta_tensors": (
        ["pytorch/module/base.py"], "TransformerEngineBaseModule", "get_fp8_meta_tensors"
    ),
    "reset_fp8_meta_tensors": (
        ["pytorch/module/base.py"], "TransformerEngineBaseModule", "reset_fp8_meta_tensors"
    ),
    "FusedAdam.__init__": (["pytorch/optimizers/fused_adam.py"], "FusedAdam", "__init__"),
}  # fmt: skip
QUANTIZATION = ["pytorch/quantization.py", "pytorch/fp8.py"]
for _name in ("fp8_autocast", "fp8_model_init", "quantized_model_init"):
    FUNCTIONS[_name] = (QUANTIZATION, "", _name)
FUNCTIONS["autocast"] = (QUANTIZATION, "autocast", "__init__")  # a class in later versions
RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")


def parameters(node: ast.FunctionDef) -> list[dict[str, Any]]:
    """Return name, kind and default (as text, if there is one) of each parameter but self."""
    args = node.args
    found = []
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    for arg, default in zip(positional, defaults, strict=True):
        found.append(_parameter(arg.arg, "positional or keyword", default))
    if args.vararg:
        found.append(_parameter(args.vararg.arg, "variadic positional", None))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(_parameter(arg.arg, "keyword-only", default))
    if args.kwarg:
        found.append(_parameter(args.kwarg.arg, "variadic keyword", None))
    return [p for p in found if p["name"] not in ("self", "cls")]


def _parameter(name: str, kind: str, default: ast.expr | None) -> dict[str, Any]:
    entry = {"name": name, "kind": kind}
    return entry if default is None else {**entry, "default": ast.unparse(default)}


def fields(node: ast.ClassDef) -> list[dict[str, Any]]:
    """Return the dataclass fields of a recipe, which are its annotated names."""
    return [
        _parameter(item.target.id, "positional or keyword", item.value)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def find(tree: ast.Module, owner: str, name: str) -> ast.FunctionDef | None:
    """Return a function, or a method of a class; a function `owner` may replace that class."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
            return next((item for item in methods if item.name == name), None)
        if isinstance(node, ast.FunctionDef) and node.name == (owner or name):
            return node
    return None


def signatures(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the signatures that megafp8 calls, by name, as far as a version has them."""
    package, found = root / PACKAGE, {}
    for key, (files, owner, name) in FUNCTIONS.items():
        for file in files:
            path = package / file
            node = find(ast.parse(path.read_text("utf-8")), owner, name) if path.exists() else None
            if node is not None:
                found[key] = parameters(node)
                break
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
