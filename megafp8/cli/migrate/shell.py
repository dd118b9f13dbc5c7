"""Read the commands that a shell script would run, without running anything.

tree-sitter-bash parses the script, also a damaged one. What is known from the script alone is
expanded: variables, arrays, `${NAME:-default}`, arithmetic of whole numbers, tests of known values,
functions. Everything else is a hole in the text, which names what it depends on: an argument of the
script, the environment, the output of a command, a condition. Only a subset of bash is expanded;
what is not in it becomes a hole too, so that no value is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megafp8.cli.migrate import shell_values
from megafp8.cli.migrate.shell_values import Script, ShellCommand, joined
from megafp8.cli.migrate.shell_words import MAX_STEPS, NAME, Words, text_of, too_large
from megafp8.config.errors import SettingError

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_DEPTH = 60
MAX_TEXT = 1 << 18
"""The longest value of a variable, in characters."""

_BLOCKS = frozenset({
    "program", "compound_statement", "subshell", "do_group", "redirected_statement", "pipeline",
    "else_clause", "elif_clause", "negated_command", "variable_assignments",
})  # fmt: skip
_SHELLS = ("sbatch", "bash", "sh", "zsh")
_NO_WORDS = frozenset(
    {"variable_assignment", "file_redirect", "heredoc_redirect", "herestring_redirect"}
)
_UNKNOWN_ORDER = frozenset({"for_statement", "c_style_for_statement", "while_statement"})


def read_script(
    text: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Script:
    """Return the commands of a shell script.

    Args:
        text: The script.
        arguments: What `$1`, `$2`, ... stand for.
        environment: Values of variables that the script does not set.

    Raises:
        SettingError: tree-sitter is not installed, or the script is too long or too deep to read.
    """
    reader = _Reader(Script(), dict(environment or {}), list(arguments))
    try:
        reader.run_text(shell_values.clean(text), 0)
    except RecursionError as error:
        raise too_large("is nested too deeply") from error
    return reader.script


def _parse(text: str) -> Node:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise SettingError(
            "script", None, f"needs the package {error.name}, which reads shell scripts",
            "Install it: pip install tree-sitter tree-sitter-bash",
        ) from error  # fmt: skip
    language = tree_sitter.Language(tree_sitter_bash.language())
    return tree_sitter.Parser(language).parse(text.encode("utf-8", "replace")).root_node


@dataclass
class _Reader(Words):
    functions: dict[str, Node] = field(default_factory=dict)
    condition: str = ""
    exported: set[str] = field(default_factory=set)

    def run_text(self, text: str, depth: int) -> None:
        root = _parse(text)
        self._report_errors(root)
        self.run(root, depth)

    def _report_errors(self, root: Node) -> None:
        if not root.has_error:
            return
        waiting: list[Node] = [root]
        found: list[int] = []
        while waiting and len(found) < 5:
            node = waiting.pop()
            if node.is_error or node.is_missing:
                found.append(node.start_point[0] + 1)
            else:
                waiting += [child for child in node.children if child.has_error or child.is_missing]
        self.script.unread += [f"line {line}" for line in sorted(set(found))]

    # --- statements -------------------------------------------------------------------------------

    def run(self, node: Node, depth: int) -> None:
        """Follow one statement, and those inside of it."""
        self.steps += 1
        if self.steps > MAX_STEPS or depth > MAX_DEPTH:
            raise too_large("has too many statements, or is nested too deeply")
        kind = node.type
        if kind == "redirected_statement" and self._runs_its_input(node):
            self._input(node, depth)
        elif kind in _BLOCKS or kind == "ERROR":
            for child in node.named_children:
                self.run(child, depth + 1)
        elif kind == "variable_assignment":
            self._assign(node)
        elif kind == "declaration_command":
            for child in node.named_children:
                if child.type == "variable_assignment":
                    self._assign(child)
            if text_of(node).startswith("export"):
                self._export(node.named_children)
        elif kind == "list":
            self._list(node, depth)
        elif kind == "if_statement":
            self._if(node, depth)
        elif kind == "case_statement":
            self._undecided([c for c in node.named_children if c.type == "case_item"], node, depth)
        elif kind == "case_item":
            for child in node.named_children[1:]:
                self.run(child, depth + 1)
        elif kind in _UNKNOWN_ORDER:
            self._loop(node, depth)
        elif kind == "function_definition":
            name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
            if name is not None and body is not None:
                self.functions[text_of(name)] = body
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
                outer = dict(self.values)
                self.run_text(joined(self.pieces(child, quoted=True)), depth + 1)
                self.values = outer
            elif child.type == "heredoc_redirect":
                waiting += child.named_children

    def _list(self, node: Node, depth: int) -> None:
        first, *others = node.named_children
        operator = next((c.type for c in node.children if c.type in ("&&", "||")), "&&")
        is_true = self._test(first)
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
        branches = [c for c in body if c.type in ("elif_clause", "else_clause")]
        first = [c for c in body if c not in branches]
        decided = None if condition is None else self._test(condition)
        if condition is not None and decided is not None:
            said = "true" if decided else "false"
            where = f"line {condition.start_point[0] + 1}"
            self.script.assumed[f"condition {text_of(condition)} ({where})"] = f"is {said}"
        if decided is True:
            for child in first:
                self.run(child, depth + 1)
        elif decided is False:
            if branches and branches[0].type == "else_clause":
                self.run(branches[0], depth + 1)
            elif branches:
                self._elif(branches, depth)
        else:
            self._undecided([first, *branches], condition or node, depth)

    def _elif(self, branches: list[Node], depth: int) -> None:
        clause, *rest = branches
        if clause.type == "else_clause":
            self.run(clause, depth + 1)
            return
        condition, *body = clause.named_children
        decided = self._test(condition)
        if decided is None:
            self._undecided([body, *rest], condition, depth)
        elif decided:
            for child in body:
                self.run(child, depth + 1)
        elif rest:
            self._elif(rest, depth)

    def _loop(self, node: Node, depth: int) -> None:
        variable = node.child_by_field_name("variable")
        hole = self.script.holes.new(f"the loop of line {node.start_point[0] + 1}")
        if variable is not None:
            self.values[text_of(variable)] = hole
        body = node.child_by_field_name("body")
        if body is not None:
            for name in _assigned_in(body):
                self.values[name] = hole
            self._undecided([body], node, depth)

    def _undecided(self, branches: Sequence[Node | list[Node]], why: Node, depth: int) -> None:
        """Follow branches of which nothing says which runs; what they set is not known after."""
        line = why.start_point[0] + 1
        said = f"the condition of line {line}"
        before, old, after = dict(self.values), self.condition, []
        self.condition = old or said
        for branch in branches:
            self.values = dict(before)
            for node in branch if isinstance(branch, list) else [branch]:
                self.run(node, depth + 1)
            after.append(self.values)
        self.condition, self.values = old, before
        for name in {name for values in after for name in values}:
            found = [values.get(name) for values in (before, *after)]
            if any(value != found[0] for value in found):
                self.values[name] = self._merged(found, said)

    def _merged(self, found: list[Any], said: str) -> Any:
        """Return an array that keeps its common start, or a hole."""
        hole = self.script.holes.new(said)
        lists = [value for value in found if isinstance(value, list)]
        if len(lists) < len(found):
            return hole
        common = 0
        while all(len(v) > common and v[common] == lists[0][common] for v in lists):
            common += 1
        return [*lists[0][:common], hole]

    def _assign(self, node: Node) -> None:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None:
            return
        adds = any(child.type == "+=" for child in node.children)
        name = NAME.match(text_of(target))
        if name is None:
            return
        if target.type == "subscript":
            self.values[name[0]] = self.script.holes.new(f"an element of {name[0]} that is set")
            return
        old = self.values.get(name[0])
        new: Any
        if value is not None and value.type == "array":
            new = [text for child in _without_comments(value) for text in self.fields(child)]
            known = old if isinstance(old, list) else [] if old is None else [old]
            new = [*known, *new] if adds else new
        else:
            new = "" if value is None else joined(self.pieces(value, quoted=True))
            if adds and isinstance(old, list):
                new = [(old[0] if old else "") + new, *old[1:]]
            elif adds:
                new = (old or "") + new
        if len("".join(new)) > MAX_TEXT:
            new = self.script.holes.new(f"{name[0]}, which is too long")
        self.values[name[0]] = new

    def _command(self, node: Node, depth: int) -> None:
        words: list[str] = []
        name = node.child_by_field_name("name")
        line = node.start_point[0] if name is None else name.start_point[0]
        prefixes = [c for c in node.named_children if c.type == "variable_assignment"]
        before = [c for c in prefixes if c.end_point[0] < line and "\\\n" not in text_of(node)]
        for child in before:  # the parser takes `A=1 B=2` and the next line's command for one
            self._assign(child)
        for child in _without_comments(node):
            if child.type not in _NO_WORDS:
                parts = child.named_children if child.type == "command_name" else [child]
                for part in parts or [child]:
                    words += self.fields(part)
        saved, exported = dict(self.values), set(self.exported)
        prefixes = [child for child in prefixes if child not in before]
        for child in prefixes:  # these are for the command alone, after its expansion
            self._assign(child)
        self._export(prefixes)
        alone = self.values != saved
        if words:
            self._run_words(words, line + 1, depth)
        if alone:
            self.values = saved
        self.exported = exported

    def _export(self, nodes: Sequence[Node]) -> None:
        """Note the names that commands find in their environment."""
        for node in nodes:
            name = NAME.match(text_of(node))
            if name is not None:
                self.exported.add(name[0])

    def _environment(self) -> dict[str, str]:
        found = {name: self.values.get(name) for name in sorted(self.exported)}
        return {name: value for name, value in found.items() if isinstance(value, str)}

    def _run_words(self, words: list[str], line: int, depth: int) -> None:
        name = words[0]
        if name in self.functions:
            outer, self.arguments = self.arguments, words[1:]
            self.run(self.functions[name], depth + 1)
            self.arguments = outer
        elif name in ("source", "."):
            said = self.script.holes.shown(" ".join(words[1:]))
            self.script.unread.append(f"line {line}, which reads another script ({said})")
        elif name == "eval":
            self.run_text(" ".join(words[1:]), depth + 1)
        elif name in ("unset", "read", "mapfile", "readarray"):
            for word in words[1:]:
                if NAME.fullmatch(word):
                    self.values[word] = self.script.holes.new(f"line {line} ({name} {word})")
        else:
            self.script.commands.append(
                ShellCommand(tuple(words), line, self.condition, self._environment())
            )
            for text in words[1:]:
                if "\n" in text.strip() or " --" in text:
                    self._run_inner(text, depth)

    def _run_inner(self, text: str, depth: int) -> None:
        """Follow a text that is a command itself, as after `bash -c` or `srun ... bash -c`."""
        outer = dict(self.values)
        self.run_text(text, depth + 1)
        self.values = outer

    # --- tests ------------------------------------------------------------------------------------

    def _test(self, node: Node) -> bool | None:
        """Return what a test says, or None if it is not known."""
        if node.type in ("test_command", "parenthesized_expression") and node.named_children:
            return self._test(node.named_children[-1])
        if node.type == "list" and len(node.named_children) == 2:
            first, second = (self._test(child) for child in node.named_children)
            is_and = any(child.type == "&&" for child in node.children)
            return _combined(first, second, is_and=is_and)
        if node.type in ("unary_expression", "negated_command") and node.named_children:
            return self._unary(node)
        if node.type == "binary_expression" and len(node.named_children) >= 2:
            return self._binary(node)
        return None

    def _unary(self, node: Node) -> bool | None:
        operator = text_of(node.children[0])
        operand = node.named_children[-1]
        if operator == "!":
            inside = self._test(operand)
            return None if inside is None else not inside
        text = self._value(operand)
        if text is None or operator not in ("-z", "-n"):
            return None
        return (text == "") is (operator == "-z")

    def _binary(self, node: Node) -> bool | None:
        left, right = node.named_children[0], node.named_children[-1]
        operator = next((c.type for c in node.children if not c.is_named), "")
        if operator == "" and len(node.named_children) == 3:
            operator = text_of(node.named_children[1])
        if operator in ("&&", "||"):
            return _combined(self._test(left), self._test(right), is_and=operator == "&&")
        first, second = self._value(left), self._value(right)
        if first is None or second is None:
            return None
        if right.type in ("extglob_pattern", "regex") and re.search(r"[*?\[]", second):
            return None
        return shell_values.compared(first, operator, second)

    def _value(self, node: Node) -> str | None:
        text = joined(self.pieces(node, quoted=True))
        return None if self.script.holes.inside(text) else text


def _without_comments(node: Node) -> Iterator[Node]:
    """Yield a node's parts; the parser takes a comment after a word for words."""
    line = -1
    for child in node.named_children:
        starts = child.start_point[0]
        if child.type == "comment" or starts == line:
            continue
        if child.type != "variable_assignment" and (child.text or b"").startswith(b"#"):
            line = starts
            continue
        yield child


def _combined(first: bool | None, second: bool | None, *, is_and: bool) -> bool | None:
    if first is (not is_and) or second is (not is_and):
        return not is_and
    return None if None in (first, second) else is_and


def _assigned_in(node: Node) -> Iterator[str]:
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current.type == "variable_assignment":
            target = current.child_by_field_name("name")
            found = NAME.match(text_of(target)) if target is not None else None
            if found is not None:
                yield found[0]
        waiting += current.named_children
