"""Expand the words of a shell script and decide its conditions, without running anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megafp8.config.api import SettingError
from megafp8_migrate import shell_values
from megafp8_migrate.shell_values import BREAK, Script, WordPart, fields_of, joined

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_STEPS = 20_000
"""The most nodes that are read; a script in which functions call each other has no end."""
MAX_SPENT = 1 << 24
"""The most characters that are read, copied and written on the way to a script's commands."""
_WORD = 16
"""What a word costs beside its characters."""

NAME = re.compile(r"[A-Za-z_]\w*")
_EXPANSION = re.compile(r"\$\{(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!])(\[[^\]]*\])?(:?[-=+?])?", re.ASCII)


def text_of(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")


def size_of(value: Node | str | list[str] | None) -> int:
    """Return the characters of a value, or the bytes of a node, with what its words cost."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(len(item) + _WORD for item in value)
    return 0 if value is None else value.end_byte - value.start_byte


def _stands_for_several(word: str) -> bool:
    """Whether a word stands for names of files (`a/*.bin`), or for several words (`{a,b}`)."""
    start = re.split("['\"]", word, maxsplit=1)[0]
    braces = re.findall(r"(?<!\$)\{([^{}]*)\}", start)
    is_path = "/" in start and not {"*", "?"}.isdisjoint(start)
    return is_path or any("," in inside or ".." in inside for inside in braces)


def _without_blanks(node: Node) -> tuple[str, str]:
    """Return the blanks with which the parser begins an expansion in a string, and the rest."""
    text = text_of(node)
    rest = text.lstrip(" \t\r\n\\")
    return text[: len(text) - len(rest)], rest


def _unescaped(raw: bytes | str) -> str:
    raw = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
    text = re.sub(r"\\\r?\n", "", raw)
    return re.sub(r'\\([\\"$`])', r"\1", text)


@dataclass
class Words:
    """Expand words, and decide `[ ... ]` and `[[ ... ]]`, with what is known of the variables.

    Attributes:
        script: What was read so far, with the holes.
        values: The variables: a text, or a list of texts for an array. `@` has the arguments of
            the script, or of the function that is followed, if they are known.
        steps: The nodes that were read.
        spent: The characters that reading has taken, of at most MAX_SPENT.
        place: The line that is followed.
        file: The name of another script that is being read.
    """

    script: Script
    values: dict[str, Any]
    steps: int = 0
    spent: int = 0
    place: int = 1
    file: str = ""

    def line(self, place: Node | int) -> str:
        """Return `line 3`, or `line 3 of common.sh` in another script."""
        number = place if isinstance(place, int) else place.start_point[0] + 1
        return f"line {number}" + (f" of {self.file}" if self.file else "")

    def spend(self, amount: int) -> None:
        """Count characters; a script whose values double in each line has no end.

        Raises:
            SettingError: There are too many; the error names the line.
        """
        self.spent += amount
        if self.spent > MAX_SPENT:
            raise self.too_large(f"stands for too much, over {MAX_SPENT} characters in all")

    def too_large(self, reason: str) -> SettingError:
        """Return the error about a script that is not read to its end, which names the line."""
        hint = "Give the command of the training alone"
        return SettingError("script", None, f"{reason} ({self.line(self.place)})", hint)

    def fields(self, node: Node) -> list[str]:
        """Return the words that one word of the script becomes."""
        is_bare = node.type in ("word", "concatenation", "brace_expression")
        if is_bare and _stands_for_several(text_of(node)):
            return [self._hole(text_of(node))]
        words = fields_of(self.pieces(node, quoted=False))
        self.spend(size_of(words))
        return words

    def pieces(self, node: Node, *, quoted: bool) -> list[WordPart]:
        """Return the text of a word in pieces, of which the unquoted ones are split at blanks."""
        self.steps += 1
        self.spend(_WORD + size_of(node))
        if self.steps > MAX_STEPS:
            raise self.too_large("has too many words")
        kind = node.type
        if kind == "raw_string":
            return [WordPart(text_of(node)[1:-1], True)]
        if kind in ("string", "translated_string", "concatenation", "heredoc_body"):
            inner = quoted or kind != "concatenation"
            return self._with_gaps(node, quoted=inner)
        if "expansion" in kind or "substitution" in kind:
            blanks, text = _without_blanks(node)
            before = [WordPart(_unescaped(blanks), quoted)] if blanks else []
            return before + self._expanded(node, text, quoted=quoted)
        text = text_of(node)
        if kind in ("word", "command_name"):
            text = re.sub(r"\\\r?\n", "", text)
            if text.startswith("~"):  # the folder of a user
                return [WordPart(self._hole("~") + text[1:], True)]
            text = re.sub(r"\\(.)", r"\1", text)
        elif "$" in text or "`" in text:
            text = self._hole(text)
        return [WordPart(text, True)]  # the parser has split the words of the script itself

    def _expanded(self, node: Node, text: str, *, quoted: bool) -> list[WordPart]:
        """Return what an expansion stands for, whose text has no blanks before it."""
        if node.type == "simple_expansion":
            return self._variable(text[1:], "", quoted=quoted)
        if node.type == "expansion":
            return self._expansion(node, text, quoted=quoted)
        if node.type == "arithmetic_expansion":
            return [WordPart(self._arithmetic(text), quoted)]
        return [WordPart(self._hole(text), quoted)]

    def _with_gaps(self, node: Node, *, quoted: bool) -> list[WordPart]:
        """Return the pieces of a string's parts, and of the text between them."""
        is_string = node.type in ("string", "translated_string")
        raw = node.text or b""
        start, end = node.start_byte, node.end_byte
        place = start + (raw.index(b'"') + 1 if is_string and b'"' in raw else 0)
        last = end - 1 if is_string and raw.endswith(b'"') else end
        parts: list[WordPart] = []
        for child in node.named_children:
            gap = _unescaped(raw[place - start : child.start_byte - start])
            parts.append(WordPart(gap, quoted or not gap.isspace()))
            if child.type in ("string_content", "heredoc_content"):
                parts.append(WordPart(_unescaped(child.text or b""), True))
            else:
                parts += self.pieces(child, quoted=quoted)
            place = child.end_byte
        parts.append(WordPart(_unescaped(raw[place - start : max(place, last) - start]), True))
        return parts

    def _hole(self, source: str) -> str:
        return self.script.holes.new(source)

    def _variable(self, name: str, index: str, *, quoted: bool) -> list[WordPart]:
        value: Any
        self.spend(size_of(self.values.get("@" if name[:1] in "@*#0123456789" else name)))
        if name in ("@", "*"):
            value = self.values.get("@", self._hole("$@"))
        elif name.isdigit() and name != "0":
            value = self.element(self.values.get("@", []), int(name[:6]) - 1)
            value = self._hole(f"${name}") if value is None else value
        elif name == "#":
            known = self.values.get("@")
            has_hole = known is None or self.script.holes.inside("".join(known))
            value = self._hole("$#") if has_hole else str(len(known or []))
        elif name in self.values:
            value = self.values[name]
        else:
            value = self._hole(f"${name}" if NAME.fullmatch(name) else f"${{{name}}}")
        whole = index in ("[@]", "[*]") or name in ("@", "*")
        if isinstance(value, str) and self.script.holes.inside(value):
            return [WordPart(value, quoted)]
        if not whole and (index or isinstance(value, list)):
            place = self.place_of(index) if index else 0
            listed = value if isinstance(value, list) else [value]
            named = f"${{{name}{index}}}" if index else f"${name}"
            if place is None or place < -len(listed):
                value = self._hole(named)
            elif place >= len(listed) and not self.script.holes.inside("".join(listed)):
                value = ""
            else:
                value = self.element(listed, place)
                value = self._hole(named) if value is None else value
        if not isinstance(value, list):
            return [WordPart(value, quoted)]
        return self._listed(value, quoted=quoted, is_star="*" in (name, index[1:-1]))

    def _listed(self, value: list[str], *, quoted: bool, is_star: bool) -> list[WordPart]:
        pieces = []
        for number, item in enumerate(value):
            if number:
                pieces.append(WordPart(" ", True) if quoted and is_star else BREAK)
            pieces.append(WordPart(item, quoted))
        return pieces

    def forget(self, pattern: str, text: str, where: str) -> None:
        """Forget the values of variables that a text sets in a way that is not followed."""
        self.spend(len(text))
        for match in re.finditer(pattern, text):
            name = next(filter(None, match.groups()))
            self.values[name] = self._hole(f"{where}, which sets {name}")

    def element(self, listed: list[str], place: int) -> str | None:
        """Return an element, or None if it is not there or one before it may be several words."""
        before = listed[:place] if place >= 0 else listed[place + 1 :]
        if place >= len(listed) or self.script.holes.inside("".join(before)):
            return None
        return listed[place]

    def place_of(self, index: str) -> int | None:
        """Return the number in an index as `[3]`, `[-1]` or `[i + 1]`; None if it is not known."""
        inner = index[1:-1].removeprefix("$((").removesuffix("))")
        names = {name: self.values.get(name) for name in NAME.findall(inner)}
        known = {name: value for name, value in names.items() if isinstance(value, str)}
        return shell_values.arithmetic(f"$(({inner}))", known)

    def _expansion(self, node: Node, text: str, *, quoted: bool) -> list[WordPart]:
        match = _EXPANSION.match(text)
        if match is None:
            return [WordPart(self._hole(text), quoted)]
        counts, name, index, operator = match.groups()
        ends = text[match.end() :] == "}"
        if counts or (operator is None and not ends):
            result = self._counted(name, index) if counts and ends else None
            if not counts:
                result = self._cut(name, index or "", text[match.end() : -1], quoted=quoted)
            return result or [WordPart(self._hole(text), quoted)]
        if operator is None:
            return self._variable(name, index or "", quoted=quoted)
        value = self.values.get("@" if name == "*" or name.isdigit() else name)
        self.spend(size_of(value))
        if name.isdigit():
            value = self.element(self.values.get("@", []), int(name[:6]) - 1)
            known = self.values.get("@", [])
            if value is None and self.script.holes.inside("".join(known)):
                return [WordPart(self._hole(text), quoted)]
        elif index and index not in ("[@]", "[*]"):
            return [WordPart(self._hole(text), quoted)]
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

    def _counted(self, name: str, index: str | None) -> list[WordPart] | None:
        """Return the length of a text, or the number of elements, if it is known."""
        value = self.values.get(name)
        self.spend(size_of(value))
        if index not in (None, "[@]", "[*]") or value is None:
            return None
        if isinstance(value, list) is (index is None):
            value = (value[0] if value else "") if index is None else [value]
        return (
            None if self.script.holes.inside("".join(value)) else [WordPart(str(len(value)), True)]
        )

    def _cut(self, name: str, index: str, operation: str, *, quoted: bool) -> list[WordPart] | None:
        """Return what `${NAME%suffix}` or `${NAME#prefix}` stands for, if it is known."""
        value = joined(self._variable(name, index, quoted=True))
        is_list = index in ("[@]", "[*]") or name in ("@", "*")
        if is_list or self.script.holes.inside(value):
            return None
        self.spend(len(operation) + shell_values.cost_of_cut(value))
        result = shell_values.cut(value, operation)
        return None if result is None else [WordPart(result, quoted)]

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
        self.forget(shell_values.SETS, text, f"${text[1:]}")
        for name in set(NAME.findall(text)):
            value = self.values.get(name)
            if isinstance(value, str):
                known[name] = value
        result = shell_values.arithmetic(text, known)
        return self._hole(text) if result is None else str(result)

    # --- conditions -------------------------------------------------------------------------------

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
