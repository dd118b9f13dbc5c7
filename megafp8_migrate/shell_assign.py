"""Keep the variables of a shell script: what it assigns, declares, exports and shifts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megafp8_migrate.shell_values import joined
from megafp8_migrate.shell_words import NAME, Words, size_of, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_TEXT = 1 << 18
"""The longest value of a variable, in characters."""
_LOCAL = re.compile(r"(local|declare|typeset)\b(?!.*\s-\w*g)")
_TYPED = re.compile(r"\w+\s+(-[a-zA-Z]+\s+)*-[a-zA-Z]*[Ailnu]")
"""Declarations after which a value is not the text that is assigned, as `declare -i`."""


@dataclass
class Assignments(Words):
    """Hold the names that are exported, and the values that functions give back at their end.

    Attributes:
        exported: The variables that commands find in their environment.
        locals: Of each function that is followed: the values of its local names outside of it.
    """

    exported: set[str] = field(default_factory=set)
    locals: list[dict[str, Any]] = field(default_factory=list)

    def assign(self, node: Node) -> None:
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
        if name[0] == "IFS" and value is not None:
            self.script.unread.append(f"{self.line(node)}, which sets IFS")
        old = self.values.get(name[0])
        self.spend(size_of(value) + (size_of(old) if adds else 0))
        new: Any
        if value is not None and value.type == "array":
            new = [text for child in without_comments(value) for text in self.fields(child)]
            known = old if isinstance(old, list) else [] if old is None else [old]
            new = [*known, *new] if adds else new
            if re.search(r"[(\s]\[[^]\s]*\]=", text_of(value)):
                new = self.script.holes.new(f"{name[0]}, whose elements have names")
        else:
            new = "" if value is None else joined(self.pieces(value, quoted=True))
            if adds and isinstance(old, list):
                new = [(old[0] if old else "") + new, *old[1:]]
            elif adds:
                new = (self.script.holes.new(f"${name[0]}") if old is None else old) + new
        if len("".join(new)) > MAX_TEXT:
            new = self.script.holes.new(f"{name[0]}, which is too long")
        self.values[name[0]] = new

    def declare(self, node: Node) -> None:
        text = text_of(node)
        self.spend(len(text))
        is_local = bool(self.locals) and _LOCAL.match(text) is not None
        is_typed = _TYPED.match(text) is not None
        for child in node.named_children:
            match = NAME.match(text_of(child))
            if match is None or child.type not in ("variable_assignment", "variable_name"):
                continue
            if is_local:
                self.locals[-1].setdefault(match[0], self.values.get(match[0]))
            if child.type == "variable_assignment":
                self.assign(child)
            elif is_local:
                self.values[match[0]] = ""
            if is_typed:
                self.values[match[0]] = self.script.holes.new(f"{match[0]}, which is declared")
        if text.startswith("export"):
            self.export(node.named_children)

    def merged(self, alternatives: list[Any], said: str) -> Any:
        """Return an array that keeps its common start, or a hole."""
        hole = self.script.holes.new(said)
        lists = [value for value in alternatives if isinstance(value, list)]
        if len(lists) < len(alternatives):
            return hole
        common = 0
        while all(len(v) > common and v[common] == lists[0][common] for v in lists):
            common += 1
        return [*lists[0][:common], hole]

    def export(self, nodes: Sequence[Node]) -> None:
        """Note the names that commands find in their environment."""
        for node in nodes:
            name = NAME.match(text_of(node))
            if name is not None:
                self.exported.add(name[0])

    def environment(self) -> dict[str, str]:
        self.spend(len(self.exported))
        exported = {name: self.values.get(name) for name in sorted(self.exported)}
        return {name: value for name, value in exported.items() if isinstance(value, str)}

    def shift(self, words: list[str]) -> None:
        count = int(words[0]) if words and words[0].isdecimal() and len(words[0]) < 5 else 1
        known: list[str] = self.values.get("@", [])
        self.spend(len(known))
        if count > len(known) or (words and not words[0].isdecimal()):
            self.values["@"] = [self.script.holes.new("what shift leaves of the arguments")]
        else:
            self.values["@"] = known[count:]


def without_comments(node: Node) -> Iterator[Node]:
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


def assigned_in(node: Node, spend: Callable[[int], None]) -> Iterator[str]:
    """Yield the names that a loop sets, and `@` if it changes the arguments.

    `spend` counts the characters that are read.
    """
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current.type == "variable_assignment":
            target = current.child_by_field_name("name")
            match = NAME.match(text_of(target)) if target is not None else None
            if match is not None:
                yield match[0]
        elif current.type == "command":
            name = current.child_by_field_name("name")
            if name is not None and text_of(name) in ("shift", "set"):
                yield "@"
        elif current.type in ("postfix_expression", "unary_expression"):
            spend(size_of(current))
            yield from NAME.findall(text_of(current))
        waiting += current.named_children
