"""Find where a framework's code reads a setting, and which environment variables decide about it.

The files are parsed and not run. A reading is an attribute (`config.fp8_margin`), a `getattr` or a
key. It depends on the environment if a condition around it, or before it in the same block, uses a
variable: directly, through a name that is set from one, or through a function of the same package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

_READERS = frozenset({"getenv", "get", "environ"})
_DEEP = 3
"""How many names and functions are followed from a condition to a variable."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_MEMBERSHIP = (ast.In, ast.NotIn)  # codespell:ignore


@dataclass(frozen=True)
class Reading:
    """Hold a line that reads a setting, and the environment variables that decide about it."""

    place: str
    variables: tuple[str, ...] = ()


@dataclass
class _File:
    path: Path
    shown: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError):
            return ast.Module(body=[], type_ignores=[])

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}


@dataclass
class Code:
    """Hold the Python files of a framework.

    Attributes:
        folders: The folders on the path of imports.
        packages: The packages in them, such as `megatron`.
    """

    folders: Sequence[Path]
    packages: Sequence[str]
    _files: dict[str, _File] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for folder in self.folders:
            for package in self.packages:
                paths = (folder / package).rglob("*.py")
                for path in sorted(path for path in paths if path.is_file()):  # and no FIFO
                    shown = path.relative_to(folder).as_posix()
                    text = path.read_text(encoding="utf-8", errors="replace")
                    self._files.setdefault(shown, _File(path, shown, text))

    def mentions(self, word: str) -> bool:
        """Whether any file has a text that is this word, as the name of an environment variable."""
        quoted = re.compile(f"[\"']{re.escape(word)}[\"']")
        return any(quoted.search(file.text) for file in self._files.values())

    def readings(self, *names: str, in_files: str = "") -> list[Reading]:
        """Return each line that reads a setting by one of its names.

        Args:
            names: Attributes, keys and texts that stand for the setting.
            in_files: A text that a file must have to be searched.
        """
        by_place: dict[str, Reading] = {}
        for file in self._files.values():
            if in_files in file.text and any(name in file.text for name in names):
                for node in _reading_nodes(file.tree, frozenset(names)):
                    place = f"{file.shown}:{node.lineno}"
                    if place not in by_place:
                        variables = sorted(set(self._deciding(file, node)))
                        by_place[place] = Reading(place, tuple(variables))
        return list(by_place.values())

    # --- variables of the environment -------------------------------------------------------------

    def _deciding(self, file: _File, node: ast.AST) -> Iterator[str]:
        """Yield the variables in the conditions of a reading, and of what it is assigned to."""
        for place in (node, *_aliases(file, node)):
            for condition in _conditions(file, place):
                yield from self._variables(file, condition, _function_of(file, place), _DEEP)

    def _variables(
        self, file: _File, node: ast.AST, function: ast.AST | None, deep: int
    ) -> Iterator[str]:
        """Yield the variables that an expression depends on, through names and functions."""
        yield from _read_directly(node)
        if deep == 0:
            return
        for inner in ast.walk(node):
            if not isinstance(inner, ast.Name) or not isinstance(inner.ctx, ast.Load):
                continue
            for where, value in self._defined(file, inner.id, function):
                yield from self._variables(where, value, None, deep - 1)

    def _defined(
        self, file: _File, name: str, function: ast.AST | None
    ) -> Iterator[tuple[_File, ast.AST]]:
        """Yield what a name stands for: values that are assigned, and functions."""
        for scope in filter(None, (function, file.tree)):
            body = ast.walk(scope) if scope is function else iter(file.tree.body)
            for node in body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and _sets(node, name):
                    if node.value is not None:
                        yield file, node.value
                elif isinstance(node, _Function) and node.name == name and node is not function:
                    yield file, node
                elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                    yield from self._imported(node, name)

    def _imported(self, node: ast.ImportFrom, name: str) -> Iterator[tuple[_File, ast.AST]]:
        names = [a.name for a in node.names if (a.asname or a.name) == name]
        stem = (node.module or "").replace(".", "/")
        other = self._files.get(f"{stem}.py") or self._files.get(f"{stem}/__init__.py")
        if not names or other is None:
            return
        for inner in other.tree.body:
            if isinstance(inner, ast.Assign | ast.AnnAssign) and _sets(inner, names[0]):
                if inner.value is not None:
                    yield other, inner.value
            elif isinstance(inner, _Function) and inner.name == names[0]:
                yield other, inner


def _reading_nodes(tree: ast.AST, names: frozenset[str]) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if isinstance(node.ctx, ast.Load):
                yield node
        elif isinstance(node, ast.Call) and _reads_by_name(node, names):
            yield node
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            if isinstance(node.slice, ast.Constant) and node.slice.value in names:
                yield node


def _reads_by_name(node: ast.Call, names: frozenset[str]) -> bool:
    """Whether a call is `getattr(x, NAME)`, `x.get(NAME)`, or reads the environment by it."""
    function = node.func
    called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if not (called in ("getattr", "get", "pop", "getenv") or "env" in called):
        return False
    return any(
        isinstance(inner, ast.Constant) and inner.value in names
        for argument in node.args[:2]
        for inner in ast.walk(argument)
    )


def _conditions(file: _File, node: ast.AST) -> Iterator[ast.AST]:
    """Yield the conditions around a node, and those before it that may leave its block."""
    child = node
    while (parent := file.parents.get(child)) is not None:
        if isinstance(parent, ast.If | ast.While | ast.IfExp):
            yield parent.test
        elif isinstance(parent, ast.BoolOp | ast.Compare):
            yield parent
        if isinstance(child, ast.stmt):
            yield from _leaving(parent, child)
        if isinstance(parent, _Function | ast.Module):
            return
        child = parent


def _leaving(parent: ast.AST, child: ast.stmt) -> Iterator[ast.AST]:
    """Yield the conditions before `child` in its block under which the block is left."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and child in block:
            for before in block[: block.index(child)]:
                if isinstance(before, ast.If) and any(
                    isinstance(inner, ast.Return | ast.Raise | ast.Continue | ast.Break)
                    for inner in ast.walk(before)
                ):
                    yield before.test


def _aliases(file: _File, node: ast.AST) -> Iterator[ast.expr]:
    """Yield where a name or an attribute is read that the statement of a reading sets."""
    statement: ast.AST | None = node
    while statement is not None and not isinstance(statement, ast.stmt):
        statement = file.parents.get(statement)
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    attributes = {target.attr for target in targets if isinstance(target, ast.Attribute)}
    function = _function_of(file, node)
    for inner in ast.walk(function or file.tree):
        if isinstance(inner, ast.Name) and inner.id in names and isinstance(inner.ctx, ast.Load):
            yield inner
    for inner in ast.walk(file.tree) if attributes else ():
        if isinstance(inner, ast.Attribute) and inner.attr in attributes:
            if isinstance(inner.ctx, ast.Load):
                yield inner


def _function_of(file: _File, node: ast.AST) -> ast.AST | None:
    while (parent := file.parents.get(node)) is not None:
        if isinstance(parent, _Function):
            return parent
        node = parent
    return None


def _sets(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)


def _read_directly(node: ast.AST) -> Iterator[str]:
    """Yield the names of variables that `os.environ` or `os.getenv` is asked for."""
    for inner in ast.walk(node):
        text = ""
        if isinstance(inner, ast.Call):
            text, key = ast.unparse(inner.func), inner.args[0] if inner.args else None
        elif isinstance(inner, ast.Subscript):
            text, key = ast.unparse(inner.value), inner.slice
        elif isinstance(inner, ast.Compare) and isinstance(inner.ops[0], _MEMBERSHIP):
            text, key = ast.unparse(inner.comparators[0]), inner.left
        else:
            continue
        if ("environ" in text or "getenv" in text) and isinstance(key, ast.Constant):
            yield str(key.value)
