"""Nothing outside of `backends` and `config` asks which backend runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from megafp8.specs.backends import BACKENDS
from tests.test_layers import ROOT, imported_names

MAY_ASK = ("backends", "config", "te_cpu")
KEYS = ("fp8_backend", "model.fp8_backend")


def questions(source: str) -> Iterator[str]:
    """Yield each comparison with a backend's name, and each question for a backend's class."""
    tree = ast.parse(source)
    classes = {
        name.rpartition(".")[2]
        for name in imported_names(source, ("megafp8", "x"), is_package=False)
        if name.startswith("megafp8.backends") and "protocol" not in name
    }
    for node in ast.walk(tree):
        asks = False
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks = any(_is_backend(side) for each in sides for side in ast.walk(each))
        elif isinstance(node, ast.Match):
            asks = _is_backend(node.subject)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asks = any(isinstance(n, ast.Name) and n.id in classes for n in ast.walk(node.args[1]))
        if asks:
            yield f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}"


def _is_backend(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("backend", *KEYS)
    return isinstance(node, ast.Constant) and node.value in (*BACKENDS, *KEYS)


def test_no_other_package_asks_which_backend_runs() -> None:
    found = {}
    for path in (ROOT / "megafp8").rglob("*.py"):
        name = path.relative_to(ROOT / "megafp8").as_posix()
        if name.split("/")[0] not in MAY_ASK:
            found[name] = list(questions(path.read_text("utf-8")))
    assert len(found) > 100
    assert {name: asked for name, asked in found.items() if asked} == {}


@pytest.mark.parametrize(
    "source",
    [
        "if spec.precision.backend == 'te': pass",
        "x = precision.backend not in known",
        "backend = name()\nif backend != 'torchao': pass",
        "if values['model.fp8_backend'] in wanted: pass",
        "match spec.precision.backend:\n    case 'te': pass",
        "from megafp8.backends.te.state import TeScaling\nisinstance(x, int | TeScaling)",
        "from megafp8.backends import torchao\nisinstance(x, torchao.TorchaoLinear)",
    ],
)
def test_a_planted_question_is_found(source: str) -> None:
    assert len(list(questions(source))) == 1
    assert not list(questions("BACKENDS[spec.precision.backend].keeps_inputs"))


def test_two_files_of_the_trainer_import_backends() -> None:
    found = {
        path.relative_to(ROOT / "megafp8").as_posix()
        for package in ("train", "optim", "cli")
        for path in Path(ROOT / "megafp8" / package).rglob("*.py")
        if any(
            name.startswith("megafp8.backends")
            for name in imported_names(path.read_text("utf-8"), ("megafp8", "x"), is_package=False)
        )
    }
    assert found == {"train/build.py", "train/state.py"}
