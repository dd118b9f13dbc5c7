"""Decide the conditions of a shell script whose values are known."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from megafp8.cli.migrate import shell_values
from megafp8.cli.migrate.shell_values import joined
from megafp8.cli.migrate.shell_words import Words, text_of

if TYPE_CHECKING:
    from tree_sitter import Node


class Conditions(Words):
    """Decide `[ ... ]`, `[[ ... ]]` and their combinations."""

    def test(self, node: Node) -> bool | None:
        """Return what a test says, or None if it is not known."""
        if node.type in ("test_command", "parenthesized_expression") and node.named_children:
            return self.test(node.named_children[-1])
        if node.type == "list" and len(node.named_children) == 2:
            first, second = (self.test(child) for child in node.named_children)
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
            inside = self.test(operand)
            return None if inside is None else not inside
        text = self.known(operand)
        if text is None or operator not in ("-z", "-n"):
            return None
        return (text == "") is (operator == "-z")

    def _binary(self, node: Node) -> bool | None:
        left, right = node.named_children[0], node.named_children[-1]
        operator = next((c.type for c in node.children if not c.is_named), "")
        if operator == "" and len(node.named_children) == 3:
            operator = text_of(node.named_children[1])
        if operator in ("&&", "||"):
            return _combined(self.test(left), self.test(right), is_and=operator == "&&")
        first, second = self.known(left), self.known(right)
        if first is None or second is None:
            return None
        if operator in ("=", "==", "!=") and re.search(r"[][*?\\]", second):
            if right.type not in ("string", "raw_string") and _is_pattern(node):
                fits = shell_values.fits(first, text_of(right))
                return None if fits is None else fits is (operator != "!=")
        return shell_values.compared(first, operator, second)

    def known(self, node: Node) -> str | None:
        text = joined(self.pieces(node, quoted=True))
        return None if self.script.holes.inside(text) else text


def _is_pattern(node: Node | None) -> bool:
    """Whether a comparison stands in `[[ ]]`, where its right side is a pattern."""
    while node is not None and node.type != "test_command":
        node = node.parent
    return node is not None and node.children[0].type == "[["


def _combined(first: bool | None, second: bool | None, *, is_and: bool) -> bool | None:
    if first is (not is_and) or second is (not is_and):
        return not is_and
    return None if None in (first, second) else is_and
