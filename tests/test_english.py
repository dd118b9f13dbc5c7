"""Hold docstrings, comments, messages and documentation to plain English (rule 11).

Three things are checked in the source: words and phrases that stand for the field's own terms,
docstrings that are not sentences, and public names without a docstring. The documentation is
searched for the same words and phrases.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch

import pytest

from scripts.packages import AT_THE_TOP, ROOT, packages, sources

FOLDERS = (*packages(), "benchmarks", "examples", "hydra_plugins", "scripts")

NOT_YET: tuple[str, ...] = ()
"""Patterns of the files that are not written in plain English yet; a new file is checked."""

PAGES = [
    *(file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "docs").rglob("*.md"))),
    "README.md",
    *(f"{name}/README.md" for name in packages()[1:]),
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "AGENTS.md",
]

PHRASES = {
    r"told": "reported, shown, named",
    r"ways? out": "hint",
    r"nobody": "no process, no user, no code",
    r"anew": "again",
    r"said so": "set it",
    r"rooms?": "disk space, memory, package",
    r"(?:gone|goes|go) on": "continue",
    r"as if nothing had happened": "what is the same afterwards",
    r"comes? along": "is included",
    r"put together": "gathered, assembled",
    r"sign of life": "progress",
}
"""Words and phrases that stand for the field's own terms, with better ones."""

PREPOSITIONS = frozenset(
    """about after as at before beside besides between but by during else for from if in inside into
    like none of on once only over since so than that till to under until what when where which
    while who why with within without""".split()
)
"""First words after which no subject and verb follow."""

NOUN_FIRST = frozenset("a all an any both each every its no one ours the their these those".split())
VERB = re.compile(
    r"\b(is|are|was|were|has|have|had|does|do|can|cannot|may|must|shall|will|holds?|reads?|runs?)\b"
)
ALLOWED_WITHOUT_DOCSTRING = 0.02

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def first_sentence(docstring: str) -> str:
    """Return the docstring's text up to its first full stop or empty line, in one line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.:;])\s", paragraph)[0]


def why_no_sentence(docstring: str) -> str | None:
    """Return what is wrong with the beginning of a docstring, or None.

    It should begin with a verb ("Return …"), with "Whether", or with a subject that a verb follows.
    """
    sentence = first_sentence(docstring)
    word = sentence.split(" ")[0].rstrip(",.:;")
    if word.lower() in PREPOSITIONS:
        return f"begins with '{word}'"
    if not re.fullmatch(r"[A-Z]?[A-Za-z'-]+", word):
        verb_follows = VERB.search(sentence) is not None
        return None if verb_follows else f"begins with '{word}' and has no verb"
    if word.lower() in NOUN_FIRST and VERB.search(sentence) is None:
        return f"'{sentence}' has no verb"
    return None


def nodes(tree: ast.Module) -> Iterator[tuple[Documented, bool]]:
    """Yield the module, its classes and functions, and whether each one is public.

    Functions inside functions and what private classes hold are not public. A setter is left out,
    since its property has the docstring.
    """
    yield tree, True

    def inside(parent: ast.AST, is_open: bool) -> Iterator[tuple[Documented, bool]]:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = [d.attr for d in node.decorator_list if isinstance(d, ast.Attribute)]
                if "setter" not in decorators:
                    is_public = is_open and not node.name.startswith("_")
                    yield node, is_public
                    yield from inside(node, is_public and isinstance(node, ast.ClassDef))
            elif not isinstance(node, ast.expr):
                yield from inside(node, is_open)

    yield from inside(tree, True)


def texts(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment and of each string, docstrings included."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def listed_phrases(text: str) -> Iterator[str]:
    """Yield each listed phrase that is in `text`, with better words."""
    for phrase, better in PHRASES.items():
        if found := re.search(rf"\b{phrase}\b", " ".join(text.split()), re.IGNORECASE):
            yield f"'{found[0]}': say instead: {better}"


def complaints(path: str, source: str) -> Iterator[str]:
    """Yield what is wrong with the English of a file, but for docstrings that are missing."""
    tree = ast.parse(source)
    for line, text in texts(source, tree):
        for phrase in listed_phrases(text):
            yield f"{path}:{line}: {phrase}"
        if re.match(r"#\s*else\b", text):
            yield f"{path}:{line}: '{text}': a comment is a sentence too"
    for node, _ in nodes(tree):
        docstring = ast.get_docstring(node)
        if docstring is not None and (reason := why_no_sentence(docstring)) is not None:
            line = 1 if isinstance(node, ast.Module) else node.lineno
            yield f"{path}:{line}: {getattr(node, 'name', 'the module')}: {reason}"


def checked_files() -> list[tuple[str, str]]:
    """Return the path and the source of every file that must be in plain English."""
    files = [*sources(ROOT, *FOLDERS), *(ROOT / name for name in AT_THE_TOP)]
    paths = [file.relative_to(ROOT).as_posix() for file in files]
    done = [path for path in paths if not any(fnmatch(path, pattern) for pattern in NOT_YET)]
    return [(path, (ROOT / path).read_text("utf-8")) for path in done]


def test_docstrings_comments_and_messages_are_plain_english() -> None:
    files = checked_files()
    assert any(path == "megafp8/errors.py" for path, _ in files), "no source files found"
    found = [line for path, source in files for line in complaints(path, source)]
    assert not found, "\n".join(found)


def methods_of(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def implementations(trees: list[ast.Module]) -> set[ast.AST]:
    """Return the methods whose meaning is documented at the method that they implement.

    That is a method with a docstring of a class above theirs, or of a protocol: a class with all
    the methods of a protocol that has several implements it, whether it names it or not.
    """
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    named: dict[str, list[ast.ClassDef]] = {}
    for node in classes:
        named.setdefault(node.name, []).append(node)

    def above(node: ast.ClassDef) -> list[ast.ClassDef]:
        names = [re.split(r"[.[]", ast.unparse(base))[0] for base in node.bases]
        direct = [each for name in names for each in named.get(name, []) if each is not node]
        return [*direct, *(each for base in direct for each in above(base))]

    protocols = [
        node
        for node in classes
        if "Protocol" in map(ast.unparse, node.bases) and len(methods_of(node)) > 1
    ]
    found: set[ast.AST] = set()
    for node in classes:
        bases = above(node)
        names = {name for each in (node, *bases) for name in methods_of(each)}
        bases += [each for each in protocols if each is not node and set(methods_of(each)) <= names]
        documented = {
            name
            for base in bases
            for name, method in methods_of(base).items()
            if ast.get_docstring(method)
        }
        found |= {method for name, method in methods_of(node).items() if name in documented}
    return found


def test_public_names_have_docstrings() -> None:
    trees = {path: ast.parse(source) for path, source in checked_files()}
    implemented = implementations(list(trees.values()))
    public, missing = 0, []
    for path, tree in trees.items():
        for node, is_public in nodes(tree):
            public += is_public
            if is_public and ast.get_docstring(node) is None and node not in implemented:
                missing.append(f"{path}: {getattr(node, 'name', 'the module')}")
    assert len(missing) <= ALLOWED_WITHOUT_DOCSTRING * public, "\n".join(missing)


def test_an_implementation_is_documented_by_its_protocol() -> None:
    tree = ast.parse(
        "class P(Protocol):\n    def a(self): 'Do it.'\n    def b(self): ...\n"
        "class Q(Protocol):\n    def c(self): 'Do it.'\n"
        "class Named(P):\n    def a(self): ...\n"
        "class Below(Named):\n    def a(self): ...\n    def c(self): ...\n"
        "class Alike:\n    def a(self): ...\n    def b(self): ...\n"
        "class Half:\n    def a(self): ...\n"
    )
    found = implementations([tree])
    named = {
        (node.name, each.name)
        for node in tree.body
        for each in methods_of(node).values()
        if each in found
    }
    assert named == {("Named", "a"), ("Below", "a"), ("Alike", "a")}


def prose_of(page: str) -> str:
    """Return a page of Markdown without its code."""
    without_blocks = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", "", without_blocks)


@pytest.mark.parametrize("page", PAGES)
def test_the_documentation_is_plain_english(page: str) -> None:
    assert not list(listed_phrases(prose_of((ROOT / page).read_text("utf-8"))))


def test_a_listed_phrase_is_found_in_a_page() -> None:
    assert list(listed_phrases(prose_of("A failure is\ntold.")))
    assert not list(listed_phrases(prose_of("`told`\n```\ntold\n```\n")))


def test_every_pattern_matches_a_file() -> None:
    paths = [file.relative_to(ROOT).as_posix() for file in sources(ROOT)]
    stale = [pattern for pattern in NOT_YET if not any(fnmatch(path, pattern) for path in paths)]
    assert not stale, f"no file matches {stale}: remove it from NOT_YET"


@pytest.mark.parametrize(
    "docstring",
    [
        "Of tensors that training makes anew.",
        "As `plain`, for a line of a report.",
        "None for what the sink has taken.",
        "`forward` of what `producer` makes of `x`.",
        "(weight pieces, bias pieces) of a fused weight.",
        "[B, S] -> [B, S, D].",
        "The kernel, and for the log why.",
        "Why torchao cannot run this recipe here.",
        "Where a run's records go.",
    ],
)
def test_a_docstring_without_subject_or_verb_is_found(docstring: str) -> None:
    assert why_no_sentence(docstring) is not None
    assert list(complaints("a.py", f'def f():\n    """{docstring}"""\n'))


@pytest.mark.parametrize(
    "docstring",
    [
        "Return the scale.",
        "Whether the tensor is sharded.",
        "The scale is a 0-d FP32 tensor.",
        "`tables` are copies of the module's tensors.",
    ],
)
def test_a_sentence_is_accepted(docstring: str) -> None:
    assert not list(complaints("a.py", f'"""{docstring}"""\n'))


@pytest.mark.parametrize(
    "line",
    [
        "x = 1  # the main rank is told of it",
        "x = 1  # else autograd does it",
        'raise ValueError("no room on the disk")',
        'raise ValueError(f"{x} has a way out")',
    ],
)
def test_a_listed_phrase_is_found_in_comments_and_messages(line: str) -> None:
    assert list(complaints("a.py", f'"""Do something."""\n{line}\n'))


def test_public_names_are_those_that_another_module_can_use() -> None:
    source = (
        "def a():\n    def b(): ...\n"
        "class C:\n    def d(self): ...\n    def _e(self): ...\n    def __f__(self): ...\n"
        "    @property\n    def g(self): ...\n    @g.setter\n    def g(self, x): ...\n"
        "class _H:\n    def i(self): ...\n"
        "if True:\n    def j(): ...\n"
    )
    found = [getattr(node, "name", "module") for node, public in nodes(ast.parse(source)) if public]
    assert found == ["module", "a", "C", "d", "g", "j"]
