"""Find mutants: versions of a file that differ in one place.

Python is changed by operators of the library Cosmic Ray. Annotations are never evaluated and stay.
C sources are changed by a short list of our own. Of each place one mutant is a candidate, and a
seed orders all candidates, by their text: unrelated changes of a file leave the order as it is.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

NAMES = (
    *(f"ReplaceBinaryOperator_{pair}" for pair in (
        "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "Mul_Add", "FloorDiv_Mul", "Mod_Add",
        "Pow_Mul", "LShift_RShift", "RShift_LShift", "BitAnd_BitXor",
    )),
    *(f"ReplaceComparisonOperator_{pair}" for pair in (
        "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_GtE", "GtE_Lt",
        "Gt_LtE", "LtE_Gt", "Is_IsNot", "IsNot_Is",
    )),
    "ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Not", "AddNot",
    "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "NumberReplacer",
    "ZeroIterationForLoop",
)  # fmt: skip
IN_C = {
    "+": ("-",), "-": ("+",), "*": ("+",), "/": ("*",), "<": ("<=", ">="), ">": (">=", "<="),
    "<=": ("<",), ">=": (">",), "==": ("!=",), "!=": ("==",), "&&": ("||",), "||": ("&&",),
    "<<": (">>",), ">>": ("<<",), "&": ("|",), "|": ("&",), "^": ("|",), "+=": ("-=",),
    "-=": ("+=",), "|=": ("&=",), "&=": ("|=",),
}  # fmt: skip
C_TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|^[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<number>\b(?:0x[0-9a-fA-F]+|\d+\.?\d*(?:[eE][+-]?\d+)?)[uUlLfF]*)
    |(?P<operator>->|\+\+|--|<<=|>>=|[-+*/&|^<>=!]=|<<|>>|&&|\|\||[-+*/&|^<>])
    |(?P<word>\w+)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Mutant:
    """Describe one change of one file."""

    file: str  # relative to the repository
    line: int
    before: str  # the line, without spaces around it
    after: str
    source: str  # of the whole file, with the change
    original: str  # of the whole file
    key: str  # the same in every checkout whose line has the same text


@dataclass(frozen=True)
class _Change:
    begin: tuple[int, int]  # line, column
    operator: str
    number: int  # of the changes that the operator can make in this file
    source: str = ""  # of C, the whole file


@dataclass(frozen=True)
class Place:
    """Hold the one change of a place in a file that the seed chose; `make` applies it."""

    order: str
    key: str
    file: str
    source: str
    change: _Change

    def make(self) -> Mutant | None:
        """Return the mutant; None if it is no Python, or means the same."""
        mutated = self.change.source or _mutated(self.source, self.change)
        if mutated is None:
            return None
        line = self.change.begin[0]
        pairs = zip(self.source.splitlines(), mutated.splitlines(), strict=False)
        before, after = next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))
        return Mutant(self.file, line, before, after, mutated, self.source, self.key)


def places(root: Path, files: Iterable[str], seed: int) -> list[Place]:
    """Return one change of each place in the files, in the order that the seed gives them."""
    found = []
    for file in files:
        source = Path(root, file).read_text()
        changes = c_changes(source) if file.endswith((".c", ".h")) else python_changes(source)
        lines, seen = source.splitlines(), Counter[str]()
        at: dict[tuple[int, int], list[Place]] = {}
        for change in changes:
            name = f"{lines[change.begin[0] - 1].strip()}\0{change.begin[1]}\0{change.operator}"
            seen[name] += 1
            text = f"{file}\0{name}\0{seen[name]}"
            place = Place(_digest(f"{seed}\0{text}"), _digest(text)[:16], file, source, change)
            at.setdefault(change.begin, []).append(place)
        found += [min(own, key=lambda place: place.order) for own in at.values()]
    return sorted(found, key=lambda place: place.order)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _mutated(source: str, change: _Change) -> str | None:
    """Return the changed source; None if it is no Python, or means the same."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    mutated = mutate_code(source, get_operator(f"core/{change.operator}")(), change.number)
    try:
        is_same = mutated is None or _meaning(mutated) == _meaning(source)
    except SyntaxError:
        return None
    return None if is_same else mutated


def _meaning(source: str) -> str:
    """Return the syntax tree as text, without the marks of parameters that take only keywords."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            node.defaults += [default for default in node.kw_defaults if default is not None]
            node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
    return ast.dump(tree)


def python_changes(source: str) -> Iterator[_Change]:
    """Yield what Cosmic Ray's operators can change in a module, outside of annotations."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    spared = _annotations(source)
    nodes = list(ast_nodes(get_ast(source)))
    for name in NAMES:
        operator, number = get_operator(f"core/{name}")(), 0
        for node in nodes:
            for begin, _ in operator.mutation_positions(node):
                if not any(first <= begin < last for first, last in spared):
                    yield _Change(begin, name, number)
                number += 1


def _annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where annotations, and definitions of types, begin and end."""
    found: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            found.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            found.append(node.annotation)
    return [((e.lineno, e.col_offset), (e.end_lineno or 0, e.end_col_offset or 0)) for e in found]


def c_changes(source: str) -> Iterator[_Change]:
    """Yield changes of operators and numbers in C, outside of comments and the preprocessor's."""
    numbers: Counter[str] = Counter()
    for found in C_TOKEN.finditer(source):
        token, kind = found.group(), found.lastgroup
        if kind == "number":
            others: tuple[str, ...] = (f"({token} + 1)",)
        elif kind == "operator" and not _is_pointer(source, found):
            others = IN_C.get(token, ())
        else:
            continue
        line = source.count("\n", 0, found.start()) + 1
        column = found.start() - source.rfind("\n", 0, found.start()) - 1
        for other in others:
            numbers[other] += 1
            mutated = source[: found.start()] + other + source[found.end() :]
            yield _Change((line, column), f"C: {token} to {other}", numbers[other], mutated)


def _is_pointer(source: str, found: re.Match[str]) -> bool:
    """Whether a star or an ampersand is no operator between two values."""
    if found.group() not in "*&-+":
        return False
    before = source[: found.start()].rstrip()
    if not before or before[-1] in "(,=*&|<>?:{;+-/!":
        return True
    word = re.search(r"\w+$", before)
    types = {"float", "char", "void", "double", "int", "return", "const", "restrict"}
    is_struct = re.search(r"\bstruct \w+$", before) is not None
    return is_struct or (
        word is not None and (word.group() in types or word.group().endswith("_t"))
    )
