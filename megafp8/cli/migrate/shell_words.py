"""Expand the words of a shell script, as bash does, without running anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megafp8.cli.migrate import shell_values
from megafp8.cli.migrate.shell_values import BREAK, Script, WordPart, fields_of, joined
from megafp8.config.errors import SettingError

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_STEPS = 20_000
"""The most nodes that are read; a script in which functions call each other has no end."""

NAME = re.compile(r"[A-Za-z_]\w*")
_EXPANSION = re.compile(r"\$\{(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!])(\[[^\]]*\])?(:?[-=+?])?", re.ASCII)


def too_large(reason: str) -> SettingError:
    return SettingError("script", None, reason, "Give the command of the training alone")


def text_of(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")


def _unescaped(raw: bytes) -> str:
    text = re.sub(r"\\\r?\n", "", raw.decode("utf-8", "replace"))
    return re.sub(r'\\([\\"$`])', r"\1", text)


@dataclass
class Words:
    """Expand words with what is known: variables, arrays and the script's arguments.

    Attributes:
        script: What was read so far, with the holes.
        values: The variables: a text, or a list of texts for an array.
        arguments: The script's own arguments, or those of the function that is followed.
        steps: The nodes that were read.
    """

    script: Script
    values: dict[str, Any]
    arguments: list[str]
    steps: int = 0

    def fields(self, node: Node) -> list[str]:
        """Return the words that one word of the script becomes."""
        return fields_of(self.pieces(node, quoted=False))

    def pieces(self, node: Node, *, quoted: bool) -> list[WordPart]:
        """Return the text of a word in pieces, of which the unquoted ones are split at blanks."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise too_large("has too many words")
        kind = node.type
        if kind == "raw_string":
            return [WordPart(text_of(node)[1:-1], True)]
        if kind in ("string", "translated_string", "concatenation", "heredoc_body"):
            inner = quoted or kind != "concatenation"
            return self._with_gaps(node, quoted=inner)
        if kind == "simple_expansion":
            return self._variable(text_of(node)[1:], "", quoted=quoted)
        if kind == "expansion":
            return self._expansion(node, quoted=quoted)
        if kind == "arithmetic_expansion":
            return [WordPart(self._arithmetic(text_of(node)), quoted)]
        if kind in ("command_substitution", "process_substitution"):
            return [WordPart(self._hole(text_of(node)), quoted)]
        text = text_of(node)
        if kind in ("word", "command_name"):
            text = re.sub(r"\\\r?\n", "", text)
            text = re.sub(r"\\(.)", r"\1", text)
        elif "$" in text or "`" in text:
            text = self._hole(text)
        return [WordPart(text, True)]  # the parser has split the words of the script itself

    def _with_gaps(self, node: Node, *, quoted: bool) -> list[WordPart]:
        """Return the pieces of a string's parts, and of the text between them."""
        is_string = node.type in ("string", "translated_string")
        raw = node.text or b""
        start, end = node.start_byte, node.end_byte
        place = start + (raw.index(b'"') + 1 if is_string and b'"' in raw else 0)
        last = end - 1 if is_string and raw.endswith(b'"') else end
        found: list[WordPart] = []
        for child in node.named_children:
            found.append(WordPart(_unescaped(raw[place - start : child.start_byte - start]), True))
            if child.type in ("string_content", "heredoc_content"):
                found.append(WordPart(_unescaped(child.text or b""), True))
            else:
                found += self.pieces(child, quoted=quoted)
            place = child.end_byte
        found.append(WordPart(_unescaped(raw[place - start : max(place, last) - start]), True))
        return found

    def _hole(self, source: str) -> str:
        return self.script.holes.new(source)

    def _variable(self, name: str, index: str, *, quoted: bool) -> list[WordPart]:
        if name in ("@", "*"):
            value: Any = self.arguments or self._hole("$@")
        elif name.isdigit() and name != "0":
            place = int(name) - 1
            there = place < len(self.arguments)
            value = self.arguments[place] if there else self._hole(f"${name}")
        elif name in self.values:
            value = self.values[name]
        else:
            value = self._hole(f"${name}" if NAME.fullmatch(name) else f"${{{name}}}")
        whole = index in ("[@]", "[*]") or name in ("@", "*")
        if isinstance(value, list) and not whole:
            place = int(index[1:-1]) if index[1:-1].isdecimal() and len(index) < 8 else 0
            value = value[place] if place < len(value) else ""
        if not isinstance(value, list):
            return [WordPart(value, quoted)]
        pieces = []
        for number, item in enumerate(value):
            if number:
                pieces.append(
                    WordPart(" ", True) if quoted and "*" in (name, index[1:-1]) else BREAK
                )
            pieces.append(WordPart(item, quoted))
        return pieces

    def _expansion(self, node: Node, *, quoted: bool) -> list[WordPart]:
        text = text_of(node)
        found = _EXPANSION.match(text)
        if found is None:
            return [WordPart(self._hole(text), quoted)]
        counts, name, index, operator = found.groups()
        ends = text[found.end() :] == "}"
        if counts or (operator is None and not ends):
            return [WordPart(self._hole(text), quoted)]
        if operator is None:
            return self._variable(name, index or "", quoted=quoted)
        value = self.arguments if name in ("@", "*") else self.values.get(name)
        if name.isdigit():
            place = int(name[:6]) - 1
            value = self.arguments[place] if 0 <= place < len(self.arguments) else None
        is_set = value is not None and (not operator.startswith(":") or value not in ("", []))
        if isinstance(value, str) and self.script.holes.inside(value):
            return [WordPart(self._hole(text), quoted)]
        if operator.endswith("+"):
            return self._default(node, quoted=quoted) if is_set else []
        if is_set:
            return self._variable(name, index or "", quoted=quoted)
        if operator.endswith("?"):
            return [WordPart(self._hole(text), quoted)]
        default = self._default(node, quoted=quoted)
        said = f"argument {name}" if name.isdigit() else name
        if name not in self.values:
            self.script.assumed[said] = f"has the script's default, {joined(default) or 'nothing'}"
        if operator.endswith("="):
            self.values[name] = joined(default)
        return default

    def _default(self, node: Node, *, quoted: bool) -> list[WordPart]:
        """Return the pieces of what follows the operator in `${NAME:-default}`."""
        after = iter(node.children)
        for child in after:
            if child.type in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
                break
        pieces: list[WordPart] = []
        for child in after:
            if child.type != "}":
                pieces += self.pieces(child, quoted=quoted)
        return pieces

    def _arithmetic(self, text: str) -> str:
        known = {}
        for name in set(NAME.findall(text)):
            value = self.values.get(name)
            if isinstance(value, str):
                known[name] = value
        result = shell_values.arithmetic(text, known)
        return self._hole(text) if result is None else str(result)
