"""Keep secrets, such as API keys and tokens, out of messages and files.

A secret is the value of an environment variable or of a key that is named like one, or the password
in an address. `redacted` hides secrets in settings, `hide_values` in text that leaves the process,
and `hide` also what a text calls a secret by its name. Only the secret is hidden. `shown` also
keeps control characters and endless values from a terminal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

HIDDEN = "***"

_WORDS = (
    r"(?:api_?keys?|access_?keys?|private_?keys?|secrets?|token(?!_dispatcher)|[a-z]*passwords?"
    r"|[a-z]*passwd|passphrases?|credentials?|(?<=[a-z0-9]_)pwd)"
)
_NAME = re.compile(rf"(?:^|[^a-z0-9]){_WORDS}(?:$|[^a-z0-9])", re.IGNORECASE)
# Matches `api_key=VALUE` and `'api_key': 'VALUE'`; VALUE ends at a blank, comma or brace that is
# not in quotes. A name that is a part of a path, as in `/etc/passwd: missing`, is none. What
# stands before the word ends at the next `+`, `~` or `@`, after which another match may begin: long
# texts of these characters would take hours otherwise.
_SETTING = re.compile(
    rf"((?<![\w./\-])(?:[\w.\-]*[^A-Za-z0-9/\s'\"=:])?{_WORDS}(?![A-Za-z0-9])[\w.\-]*['\"]?"
    r"\s*[=:]\s*)"
    r"(\\?\"(?:[^\"\\]|\\.)*\"|\\?'(?:[^'\\]|\\.)*'|[^\s,}]+)",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(?<=://)([^\s/:@'\"]*):([^\s/@'\"]+)(?=@)")
_SHORTEST = 8  # letters; hiding shorter values of variables would hide ordinary words

_LONGEST_WORD = 400  # characters; paths are shorter, values of a wrong setting may be of any length
_LONGEST_LINE = 4000
_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


def is_secret_name(name: str) -> bool:
    """Whether a key or an environment variable is named like a secret, as `HF_TOKEN`."""
    return _NAME.search(name) is not None


def secret_values() -> dict[str, str]:
    """Return the values of environment variables that are named like secrets, by their names.

    Short values are left out, and so are paths of files that exist: such a variable says where a
    secret is, and its value occurs in ordinary messages.
    """
    return {name: text for name, text in os.environ.items() if _is_secret(name, text)}


def _is_secret(name: str, text: str) -> bool:
    if not is_secret_name(name) or len(text) < _SHORTEST:
        return False
    return not (text.startswith("/") and os.path.exists(text))


def variable_in(value: object, secrets: Mapping[str, str] | None = None) -> str | None:
    """Return the environment variable whose secret is in a value, or None.

    An interpolation such as `${oc.env:HF_TOKEN}` puts a secret into a value, which may be a list
    or a dict. `secrets` are those of `secret_values`, for callers that look at many values.
    """
    secrets = secret_values() if secrets is None else secrets
    texts = list(_texts(value))
    return next((name for name, s in secrets.items() if any(s in text for text in texts)), None)


def has_password(value: object) -> bool:
    """Whether a value has an address with a password, as `https://me:password@host/`."""
    return any(_IN_ADDRESS.search(text) for text in _texts(value))


def named_secrets(value: object, name: str = "") -> Iterator[str]:
    """Yield the texts in a value that stand below a key named like a secret."""
    if is_secret_name(name):
        yield from (text for text in _texts(value) if len(text) >= _SHORTEST and "${" not in text)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_secrets(item, str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from named_secrets(item)


def _texts(value: object) -> Iterator[str]:
    """Yield all texts and numbers in a value as text, keys of dicts included."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def redacted(
    value: Any,
    name: str = "",
    known: Collection[str] = (),
    secrets: Mapping[str, str] | None = None,
) -> Any:
    """Return a value with `***` in the place of each secret in it.

    Args:
        value: A setting's value, perhaps with lists and dicts.
        name: The setting's key. Below a key that is named like a secret everything is hidden but
            null, booleans and references to other settings.
        known: Further secrets, which are hidden wherever they occur.
        secrets: Those of `secret_values`, for callers that look at many values.
    """
    if value is None or isinstance(value, bool) or value == "":
        return value
    secrets = secret_values() if secrets is None else secrets
    if isinstance(value, Mapping):
        return {
            hide_values(key, known, secrets) if isinstance(key, str) else key: redacted(
                item, f"{name}.{key}", known, secrets
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(item, name, known, secrets) for item in value]
    if is_secret_name(name) and not (isinstance(value, str) and value.startswith("${")):
        return HIDDEN
    if isinstance(value, str):
        return hide_values(value, known, secrets)
    return HIDDEN if str(value) in {*known, *secrets.values()} else value


def hide_values(
    text: str, known: Collection[str] = (), secrets: Mapping[str, str] | None = None
) -> str:
    """Return the text with `***` for secrets of the environment and passwords in addresses."""
    secrets = secret_values() if secrets is None else secrets
    for secret in sorted({*known, *secrets.values()}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _IN_ADDRESS.sub(rf"\g<1>:{HIDDEN}", text) if "://" in text else text


def hide(text: str) -> str:
    """Return the text as `hide_values` does, with `***` also for values named like a secret."""
    return _SETTING.sub(rf"\g<1>{HIDDEN}", hide_values(text))


# --- text from outside on a terminal --------------------------------------------------------------


def printable(text: str, kept: str = "\n\t") -> str:
    r"""Return a text without control characters: an escape sequence becomes `\x1b[…` in letters.

    A terminal obeys such characters, and those that change the direction of a line show another
    text than the one that is there.

    Args:
        text: The text.
        kept: Control characters that stay: line feeds and tabs, unless the text is a single line.
    """
    if text.isascii() and text.translate(dict.fromkeys(map(ord, kept))).isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def one_line(value: object) -> str:
    """Return a value as a user writes it, in quotes if it would not fit into one line."""
    text = "null" if value is None else str(value)
    return text if text.isprintable() else repr(text)


def shortened(text: str) -> str:
    """Return a text in which words and lines of any length have their middle left out."""
    if len(text) <= _LONGEST_WORD:
        return text
    text = _WORD.sub(lambda found: cut(found[0]), text)
    return "\n".join(cut(line, _LONGEST_LINE) for line in text.split("\n"))


def cut(text: str, most: int = _LONGEST_WORD) -> str:
    """Return a text of any length with its middle left out, if it has more than `most` letters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}… ({len(text)} characters) …{text[-most // 4 :]}"


def shown(text: str) -> str:
    """Return a message as it may reach a terminal: no secret, no control character, not endless."""
    return printable(shortened(hide(text)))


def say(*lines: str) -> None:
    """Print lines as `shown` returns them."""
    print(shown("\n".join(lines)), flush=True)
