"""Read the commands that a shell script would run, without running anything.

tree-sitter-bash parses the script, also a damaged one. What is known from the script alone is
expanded: variables, arrays, `${NAME:-default}`, `${NAME%suffix}`, arithmetic of whole numbers,
tests and `case` of known values, functions, and scripts that `source` reads. Everything else is a
hole in the text, which names what it depends on: an argument of the script, the environment, the
output of a command, a condition. Only a subset of bash is expanded; what is not in it becomes a
hole too, so that no value is guessed.

Scripts are read because a user has one before the first run, whose log has Megatron's arguments.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megafp8.config.api import SettingError
from megafp8_migrate import shell_values
from megafp8_migrate.shell_assign import Assignments, assigned_in, without_comments
from megafp8_migrate.shell_values import Script, ShellCommand, joined
from megafp8_migrate.shell_words import MAX_STEPS, NAME, size_of, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_DEPTH = 60
MAX_COMMAND = 5_000
"""The most words of a command."""
_PARSE_SECONDS = 2.0
"""How long the parser may compute, for a script and all that it reads: the time and the memory of
some damaged texts grow with the square of their length."""
_LONGEST_TEST = 80
"""The longest condition that a line of the report shows."""
_BLOCKS = frozenset({
    "program", "compound_statement", "do_group", "redirected_statement", "else_clause",
    "elif_clause", "negated_command", "variable_assignments", "ERROR",
})  # fmt: skip
_SETS = {"let": shell_values.SETS, "printf": r"(?<=-v )([A-Za-z_]\w*)",
         "getopts": r"(?<= )([A-Za-z_]\w*)$"}  # fmt: skip
"""Commands that set variables, with patterns of the names in their text."""
_PRINT = frozenset({"echo", ":", "true", "false", "test", "["})
"""Commands that start nothing and set nothing."""
_SELF = r"""["']?\$\{?(0|BASH_SOURCE(\[0\])?)\}?["']?"""
_FOLDER = rf"\$\(dirname {_SELF}\)"
_BESIDE = re.compile(
    rf"""^(\./|({_FOLDER}|\$\(cd ["']?{_FOLDER}["']?( >/dev/null 2>&1)? && pwd( -P)?\))/)"""
)
"""The folder of the script itself, before the name of another one."""
_SHELLS = ("sbatch", "bash", "sh", "zsh")
_NO_WORDS = frozenset(
    {"variable_assignment", "file_redirect", "heredoc_redirect", "herestring_redirect"}
)
_UNKNOWN_ORDER = frozenset({"for_statement", "c_style_for_statement", "while_statement"})


class _Ended(Exception):  # noqa: N818  # it is no error
    """Say that the script, or the function, does nothing after this."""

    def __init__(self, *, function: bool) -> None:
        self.function = function


def read_script(
    text: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    beside: Callable[[str], str | None] = lambda name: None,
) -> Script:
    """Return the commands of a shell script.

    Args:
        text: The script.
        arguments: What `$1`, `$2`, ... stand for.
        environment: Values of variables that the script does not set.
        beside: Returns the text of another script beside this one, or None if there is none.

    Raises:
        SettingError: tree-sitter is not installed, or the script is too long or too deep to read.
    """
    values: dict[str, Any] = dict(environment or {})
    if arguments:
        values["@"] = list(arguments)
    reader = _Reader(Script(), values, beside=beside)
    if "\r\n" in text:
        reader.script.assumed["line ends"] = "lines end as on Windows, which bash does not read"
    try:
        reader.run_text(shell_values.clean(text), 0)
    except _Ended:
        pass
    except RecursionError as error:
        raise reader.too_large("is nested too deeply") from error
    return reader.script


def _parse(text: str, seconds: float) -> Node | None:
    """Return the tree of a text; None if the parser computes longer than `seconds`."""
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise SettingError(
            "script", None, f"needs the package {error.name}, which reads shell scripts",
            "Install it: pip install tree-sitter tree-sitter-bash",
        ) from error  # fmt: skip
    language = tree_sitter.Language(tree_sitter_bash.language())
    data, began = text.encode("utf-8", "replace"), time.process_time()
    try:  # the parser asks whether to end where it is given a function in place of a text
        return (
            tree_sitter.Parser(language)
            .parse(
                lambda start, _: data[start : start + (1 << 12)],
                progress_callback=lambda *_: time.process_time() - began > seconds,
            )
            .root_node
        )
    except ValueError:
        return None


@dataclass
class _Reader(Assignments):
    beside: Callable[[str], str | None] = lambda name: None
    functions: dict[str, list[Node]] = field(default_factory=dict)
    condition: str = ""
    parsed_seconds: float = 0.0
    is_inside: bool = False
    """Whether the text of a word is followed, whose lines are not the script's."""

    def run_text(self, text: str, depth: int, *, is_inside: bool = False) -> None:
        """Follow a script, or the text of a word that is one."""
        self.spend(8 * len(text))
        began = time.process_time()
        root = _parse(text, _PARSE_SECONDS - self.parsed_seconds)
        self.parsed_seconds += time.process_time() - began
        if root is None:
            raise self.too_large("is too damaged to be parsed")
        self._report_errors(root)
        outer, self.is_inside = self.is_inside, self.is_inside or is_inside
        try:
            self.run(root, depth)
        finally:
            self.is_inside = outer

    def _report_errors(self, root: Node) -> None:
        if not root.has_error:
            return
        waiting: list[Node] = [root]
        lines: list[int] = []
        while waiting and len(lines) < 5:
            node = waiting.pop()
            if node.is_error or node.is_missing:
                lines.append(node.start_point[0] + 1)
            else:
                waiting += [child for child in node.children if child.has_error or child.is_missing]
        self.script.unread += [self.line(line) for line in sorted(set(lines))]

    # --- statements -------------------------------------------------------------------------------

    def _run_all(self, nodes: Sequence[Node], depth: int) -> None:
        for node in nodes:
            self.run(node, depth + 1)

    def run(self, node: Node, depth: int) -> None:
        """Follow one statement, and those inside of it."""
        self.steps += 1
        if not self.is_inside:
            self.place = node.start_point[0] + 1
        if self.steps > MAX_STEPS or depth > MAX_DEPTH:
            raise self.too_large("has too many statements, or is nested too deeply")
        kind = node.type
        if kind == "redirected_statement" and self._runs_its_input(node):
            self._input(node, depth)
        elif kind == "compound_statement" and text_of(node).startswith("(("):
            self.forget(shell_values.SETS, text_of(node), self.line(node))
        elif kind in _BLOCKS:
            for child in node.named_children:
                if child.next_sibling is not None and child.next_sibling.type == "&":
                    self._apart([child], depth)
                else:
                    self.run(child, depth + 1)
        elif kind in ("subshell", "pipeline"):
            for child in [node] if kind == "subshell" else node.named_children:
                self._apart(child.named_children if kind == "subshell" else [child], depth)
        elif kind == "variable_assignment":
            self.assign(node)
        elif kind == "declaration_command":
            self.declare(node)
        elif kind == "unset_command":
            for name in re.findall(r"[A-Za-z_]\w*", text_of(node))[1:]:
                self.values[name] = self.script.holes.new(f"{self.line(node)} (unset {name})")
        elif kind == "list":
            self._list(node, depth)
        elif kind == "if_statement":
            self._if(node, depth)
        elif kind == "case_statement":
            self._case(node, depth)
        elif kind in _UNKNOWN_ORDER:
            self._loop(node, depth)
        elif kind == "function_definition":
            name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
            if name is not None and body is not None:
                old = self.functions.get(text_of(name), []) if self.condition else []
                self.functions[text_of(name)] = [*old, body]
        elif kind == "command":
            self._command(node, depth)

    def _runs_its_input(self, node: Node) -> bool:
        """Whether a command runs the lines below it (`sbatch <<EOF`) as a script."""
        body = node.child_by_field_name("body")
        name = None if body is None else body.child_by_field_name("name")
        return name is not None and text_of(name).rpartition("/")[2] in _SHELLS

    def _input(self, node: Node, depth: int) -> None:
        waiting = list(node.named_children)
        while waiting:
            child = waiting.pop()
            if child.type == "heredoc_body":
                self._apart(joined(self.pieces(child, quoted=True)), depth)
            elif child.type == "heredoc_redirect":
                waiting += child.named_children

    def _list(self, node: Node, depth: int) -> None:
        first, *others = node.named_children
        operator = next((c.type for c in node.children if c.type in ("&&", "||")), "&&")
        is_true = self.test(first)
        self.run(first, depth + 1)
        for other in others:
            if first.type == "test_command" or operator == "||":
                wanted = operator == "&&"
                if is_true is None:
                    self._undecided([other], first, depth)
                elif is_true is wanted:
                    self.run(other, depth + 1)
            else:
                self.run(other, depth + 1)

    def _if(self, node: Node, depth: int) -> None:
        condition = node.child_by_field_name("condition")
        body = [c for c in node.named_children if c != condition]
        others = [c for c in body if c.type in ("elif_clause", "else_clause")]
        self._branch(condition or node, [c for c in body if c not in others], others, depth)

    def _branch(self, condition: Node, body: list[Node], others: list[Node], depth: int) -> None:
        """Follow what a condition decides about: its body, or the `elif` and `else` after it."""
        self.spend(size_of(condition))
        decided = self.test(condition)
        if decided is None:
            self._undecided([body, *others], condition, depth)
            return
        said = "true" if decided else "false"
        what = f"condition {text_of(condition)} ({self.line(condition)})"
        self.script.assumed[what] = f"is {said}"
        if decided:
            self._run_all(body, depth)
        elif others and others[0].type == "else_clause":
            self.run(others[0], depth + 1)
        elif others:
            inner, *body = others[0].named_children
            self._branch(inner, body, others[1:], depth)

    def _case(self, node: Node, depth: int) -> None:
        """Follow the branch of the first pattern that fits, or all if nothing says which does."""
        word = node.child_by_field_name("value")
        text = None if word is None else self.known(word)
        items = [child for child in node.named_children if child.type == "case_item"]
        for item in items:
            patterns = _patterns(item)
            fits = [None if text is None else shell_values.fits(text, text_of(p)) for p in patterns]
            goes_on = any(child.type in (";&", ";;&") for child in item.children)
            if None in fits or goes_on:
                bodies = [one.named_children[len(_patterns(one)) :] for one in items]
                self._undecided(bodies, node, depth)
                return
            if True in fits:
                what = f"case {text_of(word) if word else ''} ({self.line(node)})"
                self.script.assumed[what] = f"takes {text_of(patterns[fits.index(True)])}"
                self._run_all(item.named_children[len(patterns) :], depth)
                return

    def _loop(self, node: Node, depth: int) -> None:
        variable = node.child_by_field_name("variable")
        hole = self.script.holes.new(f"the loop of {self.line(node)}")
        if variable is not None:
            self.values[text_of(variable)] = hole
        body = node.child_by_field_name("body")
        if body is not None:
            for name in assigned_in(node, self.spend):
                self.values[name] = [hole] if name == "@" else hole
            self._undecided([body], node, depth)

    def _undecided(self, branches: Sequence[Node | list[Node]], why: Node, depth: int) -> None:
        """Follow branches of which nothing says which runs; what they set is not known after."""
        # A copy of the variables for each branch, which are compared at the end
        self.spend((len(branches) + 1) * (16 * len(self.values) + size_of(why)))
        test = text_of(why) if why.type == "test_command" else ""
        shown = f"{test} " if 0 < len(test) <= _LONGEST_TEST and "\n" not in test else ""
        said = f"the condition {shown}of {self.line(why)}"
        before, old, after = dict(self.values), self.condition, []
        self.condition = old or said
        for branch in branches:
            self.values = dict(before)
            try:
                self._run_all(branch if isinstance(branch, list) else [branch], depth)
                after.append(self.values)
            except _Ended:  # what follows runs only if this branch does not
                continue
        self.condition, self.values = old, before
        lists = [value for values in after for value in values.values() if isinstance(value, list)]
        self.spend(sum(map(len, lists)))
        for name in {name for values in after for name in values}:
            alternatives = [values.get(name) for values in (before, *after)]
            if any(value != alternatives[0] for value in alternatives):
                merged = self.merged(alternatives, said)
                self.values[name] = [merged] if name == "@" and isinstance(merged, str) else merged

    def _apart(self, inside: Sequence[Node] | str, depth: int) -> None:
        """Follow what runs in a shell of its own, whose variables and end are its own."""
        self.spend(len(self.values))
        outer = dict(self.values)
        try:
            if isinstance(inside, str):
                self.run_text(inside, depth + 1, is_inside=True)
            else:
                self._run_all(inside, depth)
        except _Ended:
            pass
        self.values = outer

    def _command(self, node: Node, depth: int) -> None:
        words: list[str] = []
        self.spend(size_of(node) + len(self.values) + len(self.exported))
        name = node.child_by_field_name("name")
        line = node.start_point[0] if name is None else name.start_point[0]
        prefixes = [c for c in node.named_children if c.type == "variable_assignment"]
        before = [c for c in prefixes if c.end_point[0] < line and "\\\n" not in text_of(node)]
        for child in before:  # the parser takes `A=1 B=2` and the next line's command for one
            self.assign(child)
        for child in without_comments(node):
            if child.type not in _NO_WORDS:
                parts = child.named_children if child.type == "command_name" else [child]
                for part in parts or [child]:
                    words += self.fields(part)
        saved, exported = dict(self.values), set(self.exported)
        prefixes = [child for child in prefixes if child not in before]
        for child in prefixes:  # these are for the command alone, after its expansion
            self.assign(child)
        self.export(prefixes)
        alone = self.values != saved
        if words:
            self._run_words(words, line + 1, depth)
        if alone:
            self.values = saved
        self.exported = exported

    def _run_words(self, words: list[str], line: int, depth: int) -> None:
        name = words[0]
        if name in self.functions:
            self._call(self.functions[name], words[1:], line, depth)
        elif name in ("source", "."):
            self._source(words[1:], line, depth)
        elif name == "eval":
            if self.script.holes.inside(" ".join(words)):
                self.script.unread.append(f"{self.line(line)}, which evaluates what is not known")
            self.run_text(" ".join(words[1:]), depth + 1, is_inside=True)
        elif name in ("read", "mapfile", "readarray"):
            for word in words[1:]:
                if found := NAME.match(word):
                    said = f"{self.line(line)} ({name} {word})"
                    self.values[found[0]] = self.script.holes.new(said)
        elif name in _SETS:
            self.forget(_SETS[name], " ".join(words), self.line(line))
        elif name == "set" and len(words) > 1 and ("--" in words or words[1][0] not in "-+"):
            self.values["@"] = words[words.index("--") + 1 :] if "--" in words else words[1:]
        elif name == "shift":
            self.shift(words[1:])
        elif name in ("exit", "return"):
            raise _Ended(function=name == "return")
        elif name not in _PRINT:
            self._note(words, line, depth)

    def _note(self, words: list[str], line: int, depth: int) -> None:
        """Note a command, and follow those in its words."""
        if len(words) > MAX_COMMAND:
            raise self.too_large(f"has a command of too many words, over {MAX_COMMAND}")
        if words[0].startswith("--"):
            self.script.unread.append(
                f"{self.line(line)}, whose {words[0]} is a command of its own for bash"
            )
        self.script.commands.append(
            ShellCommand(tuple(words), line, self.condition, self.environment())
        )
        for text in words[1:]:
            if "\n" in text.strip() or " --" in text:
                self._apart(text, depth)  # as after `bash -c` or `srun ... bash -c`
        if words[0] == "exec" and len(words) > 1:
            raise _Ended(function=False)

    def _call(self, bodies: list[Node], arguments: list[str], line: int, depth: int) -> None:
        """Follow a function, of which several bodies may be the one that runs."""
        outer = self.values.get("@")
        self.values["@"] = arguments
        self.locals.append({})
        try:
            if len(bodies) > 1:
                self._undecided(bodies, bodies[-1], depth)
            else:
                self.run(bodies[0], depth + 1)
        except _Ended as end:
            if not end.function:
                raise
        finally:
            for name, value in (self.locals.pop() | {"@": outer}).items():
                self.values[name] = value
                if value is None:
                    del self.values[name]

    def _source(self, words: list[str], line: int, depth: int) -> None:
        """Follow another script that lies beside this one; other ones are not read."""
        said = self.script.holes.shown(words[0]) if words else ""
        place = _BESIDE.sub("", said)
        text = self.beside(place)
        if text is None:
            self.script.unread.append(f"{self.line(line)}, which reads another script ({said})")
            return
        self.script.assumed[f"source {place} ({self.line(line)})"] = "is the file beside the script"
        outer, arguments = (self.file, self.place), self.values.get("@")
        self.file, self.place = place, 1
        self.values |= {"@": words[1:]} if words[1:] else {}
        try:
            self.run_text(shell_values.clean(text), depth + 1)
        except _Ended as end:
            if not end.function:
                raise
        finally:
            self.file, self.place = outer
            if words[1:] and arguments is not None:
                self.values["@"] = arguments
            elif words[1:]:
                del self.values["@"]


def _patterns(item: Node) -> list[Node]:
    """Return the patterns of an item of `case`, which come first among its parts."""
    return item.children_by_field_name("value") or item.named_children[:1]
