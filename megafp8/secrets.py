"""Keep secrets, such as API keys and tokens, out of messages and files.

A secret is the value of an environment variable or of a key that is named like one, what an address
has for the login, and a text of a form that only keys have, as `AKIA…`. `redacted` hides secrets in
settings and `hide` in text that leaves the process, by one rule. `hide_values` leaves out names and
forms; it serves text that is not ours, as the content of whole files. Only the secret is hidden.
`shown` also keeps control characters and endless values from a terminal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

HIDDEN = "***"
_SHORTEST = 8  # letters; hiding shorter values of variables would hide ordinary words

# --- names ----------------------------------------------------------------------------------------

_SECRET = frozenset(
    "secret password passwd pswd passphrase passcode credential cred cookie authorization bearer "
    "jwt sshpass dbpass userpass".split()
)
"""The words that make any name a secret's."""
_ENDINGS = ("secret", "password", "passwd", "passphrase", "apikey", "accesskey", "secretkey",
            "privatekey", "authkey", "sshkey")  # fmt: skip
"""The ends of words that do so too, as in `dbpassword`."""
_KEYS = frozenset("api access private signing encryption auth".split())
"""The words with which `key` is a secret wherever the two stand, as in `AWS_ACCESS_KEY_ID`."""
_LAST = frozenset("key pass auth oauth pat pwd pw".split())
"""The words that name a secret at the end of a name, as in `GITHUB_PAT`, unless what stands before
them is in `_ORDINARY`. `_MORE` may follow."""
_WITH_ANOTHER = frozenset("key pwd pw".split())
"""Those of `_LAST` that do so only after another word."""
_ORDINARY = frozenset(
    # keys
    "all answer any audio batch cache column completion content data dict each every feature field "
    "first foreign group image index inert input item json label last message metric missing "
    "monitor new next nn norm num other our output own partition primary prompt public query "
    "question record role share sort source state target text unexpected unknown yaml "
    # passes; the rest is `old_pwd`, `no_auth` and the like
    "backward by forward full multi no of old one per second single third two use without".split()
)
_MORE = frozenset("prod dev staging test old new value file path base header string env".split())
_BEFORE_TOKEN = frozenset(
    "active added additional all any batch begin bos by bytes chunk cls completion consumed "
    "context count counted draft drop dropped each embed end eod eos eot every extra final first "
    "fresh generated giga global image input label last local many mask max microbatch min multi "
    "n new next no num number of one output own pad padded per plain previous prompt routed "
    "sample seen sep some special start stop sub suppress target text tik to total train trained "
    "training unique unk val valid validated validation video vocab".split()
)
_AFTER_TOKEN = frozenset(
    "byte dispatch dispatcher drop dropping dtype embedding id ids in length level limit loss "
    "multiple order parallel per position prediction probability rate shift suffix sum to type "
    "weight window".split()
)
"""The words beside which a token is a part of a text, as in `max_tokens` or `token_dispatcher`."""

_SEGMENTS = re.compile(r"[^\w \-]+")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_COUNT = re.compile(r"[\d.,]+[kMGT%]?")
_OPAQUE = re.compile(r"\b[0-9a-f]{40}\b")
"""A key of Weights & Biases, which its texts call `key` alone."""


@lru_cache(maxsize=1024)  # each message asks about all variables of the environment
def is_secret_name(name: str) -> bool:
    """Whether a key or an environment variable is named like a secret, as `HF_TOKEN`.

    One key of a path is enough. The words of a key are divided by `_`, `-` and blanks, or by
    capital letters as in `clientSecret`, and may be plurals.
    """
    for segment in _SEGMENTS.split(name):
        if _are_secret([_singular(word.lower()) for word in _WORDS.findall(segment)]):
            return True
    return False


def _singular(word: str) -> str:
    return word if len(word) < 4 or word.endswith("ss") else word.removesuffix("s")


def _are_secret(words: list[str]) -> bool:
    """Whether the words of one key, in lower case and in the singular, name a secret."""
    if any(word in _SECRET or word.endswith(_ENDINGS) for word in words):
        return True
    if any(first in _KEYS and second == "key" for first, second in pairwise(words)):
        return True
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        if word.endswith("token") and after not in _AFTER_TOKEN:
            if not {before, word[:-5]} & _BEFORE_TOKEN:
                return True
    while words and words[-1] in _MORE:
        words = words[:-1]
    before, last = ["", "", *words][-2:]
    return last in _LAST and before not in _ORDINARY and bool(before or last not in _WITH_ANOTHER)


@lru_cache(maxsize=1024)
def _may_be_named(name: str) -> bool:
    """Whether a value of this name may be a secret by its name: what decides next is the value."""
    return name.lower().endswith("key") or is_secret_name(name)


def _is_named(name: str, value: object) -> bool:
    """Whether a value is a secret by its name; a number of `tokens` counts those of a text."""
    if not _may_be_named(name):
        return False
    end, text = name.lower()[-6:], str(value)
    if end.endswith("key") and _OPAQUE.search(text):
        return True
    counts = end == "tokens" and (name == "--tokens" or _COUNT.fullmatch(text))  # of `plan`
    return is_secret_name(name) and not counts


# --- what is a secret -----------------------------------------------------------------------------


def secret_values() -> dict[str, str]:
    """Return the values of environment variables that are named like secrets, by their names.

    Short values are left out, and so are paths of files that exist: such a variable says where a
    secret is, and its value occurs in ordinary messages.
    """
    names = [name for name in os.environ if _may_be_named(name)]
    values = ((name, os.environ.get(name, "")) for name in names)
    return {name: text for name, text in values if _is_secret(name, text)}


def _is_secret(name: str, text: str) -> bool:
    if len(text) < _SHORTEST or not _is_named(name, text):
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


def has_login(value: object) -> bool:
    """Whether a value has an address with a password or token, as `https://me:password@host/`."""
    return any(_ADDRESS.sub(_without_login, text) != text for text in _texts(value))


def named_secrets(value: object, name: str = "") -> Iterator[str]:
    """Yield the texts in a value that stand below a key named like a secret."""
    if _is_named(name, value):  # a text that refers to another setting is none itself
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


# --- hiding it ------------------------------------------------------------------------------------

_ADDRESS = re.compile(r"(?P<scheme>(?<![\w+.\-])[\w+.\-]++)?://[^\s'\"<>\\]+")
_LOGIN = re.compile(r"(?<=://)([^/?#]*)@")
_QUERY = re.compile(r"(?<=[?&#])(?P<name>[\w.\-]+)=(?P<value>[^&#\s'\"]+)")
_IN_QUERIES = frozenset("key sig signature pw pwd x-amz-signature x-goog-signature".split())
"""Names that are a secret's in the query of an address alone."""

# A name in a text, with what stands between it and its value, as in `api_key=`, `'api_key': `,
# `env["API_KEY"] = ` and `--api-key `. A part of a path is none, as in `/etc/passwd: missing`.
# Nothing is tried twice: long texts of such characters would take hours otherwise.
_NAMED = re.compile(
    r"(?<![\w./\-?&])(?<!\bper )(?:"
    r"(?P<name>(?:(?i:api|access|private|auth) )?[\w.\-]++)[\\'\"\]]*+\s*+[=:](?!=)\s*+"
    r"|(?P<option>--?[\w\-]++)['\"]?+[,\s]\s*+['\"]?+(?!-))"
)
# A value ends at a blank, comma or brace outside of quotes and brackets; cookies end with a line.
_QUOTED = r"\\?\"(?:[^\"\\]|\\.)*\"|\\?'(?:[^'\\]|\\.)*'"
_VALUE = re.compile(
    rf"{_QUOTED}|\[[^\]]{{0,4000}}\]|\{{[^}}]{{0,4000}}\}}"
    r"|(?:(?:Bearer|Basic|Digest|Token)\s+)?[^\s,}]+",
    re.IGNORECASE,
)
_COOKIES = re.compile(rf"\*{{3}}|{_QUOTED}|[^\n\"']+")
_PROSE = ("tokens", "pass")  # a text says these of something else, unless as `tokens=`
_REFERENCE = re.compile(r"\$\{[\w.:\[\]]+\}")
_FORMS = re.compile(
    r"\bhf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{16,}|\b(?:github_pat|gh[pousr])_\w{20,}|\bwandb_v1_\w{20,}"
    r"|(?<![\w\-])(?:sk|glpat|xox[a-z])-(?=[\w\-]*\d)[\w\-]{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bAIza[\w\-]{35}|\beyJ[\w\-]{10,}\.eyJ[\w\-]{10,}\.[\w\-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
"""Keys of Hugging Face, GitHub, Weights & Biases, OpenAI and others, GitLab, Slack, AWS and Google,
signed tokens (JWT), and private keys."""


def redacted(
    value: Any,
    name: str = "",
    known: Collection[str] = (),
    secrets: Mapping[str, str] | None = None,
) -> Any:
    """Return a value with `***` in the place of each secret in it.

    Args:
        value: A setting's value, perhaps with lists, tuples and dicts.
        name: The setting's key. Below a key that is named like a secret everything is hidden but
            null, booleans and references to other settings.
        known: Further secrets, which are hidden wherever they occur.
        secrets: Those of `secret_values`, for callers that look at many values.
    """
    secrets = secret_values() if secrets is None else secrets
    if isinstance(value, Mapping):
        return {
            redacted(key, "", known, secrets): redacted(item, f"{name}.{key}", known, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [redacted(item, name, known, secrets) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    text = "" if value is None or isinstance(value, bool) else str(value)
    if text and _is_named(name, text):
        safe = text if _REFERENCE.fullmatch(text) else HIDDEN
    else:
        safe = hide(text, known, secrets)
    return value if safe == text else safe


def hide(text: str, known: Collection[str] = (), secrets: Mapping[str, str] | None = None) -> str:
    """Return the text as `hide_values` does, with `***` also for what has a secret's name or form.

    The arguments are those of `redacted`.
    """
    text = _QUERY.sub(_without_value, hide_values(text, known, secrets))
    parts, end = [], 0
    for start, value in _named_in(text):
        parts += [text[end:start], HIDDEN]
        end = start + len(value)
    return _FORMS.sub(HIDDEN, "".join([*parts, text[end:]]))


def _named_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield each value that stands beside a secret's name in a text, and where it begins."""
    end = 0
    for found in _NAMED.finditer(text):
        name = found["name"] or found["option"]
        if found.start() < end or (name in _PROSE and "=" not in found[0]):
            continue
        is_header = name.lower().endswith("cookie") and ":" in found[0]
        matched = (_COOKIES if is_header else _VALUE).match(text, found.end())
        value = "" if matched is None else matched[0]
        value = value.rstrip(":.") or value
        if value and _is_named(name, value):
            yield found.end(), value
            end = found.end() + len(value)


def secrets_in(text: str) -> set[str]:
    """Return the values of a text, as a script or a YAML, that have a secret's name there."""
    values = {value.strip("'\"") for _, value in _named_in(text)}
    return {value for value in values if len(value) >= _SHORTEST and not set(value) & set("${[")}


def hide_values(
    text: str, known: Collection[str] = (), secrets: Mapping[str, str] | None = None
) -> str:
    """Return the text with `***` for secrets of the environment and logins in addresses."""
    secrets = secret_values() if secrets is None else secrets
    for secret in sorted({*known, *secrets.values()}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _ADDRESS.sub(_without_login, text)


def _without_login(address: re.Match[str]) -> str:
    """Return an address without its password and tokens; `ssh://git@host` has none."""
    text = _QUERY.sub(_without_value, address[0])
    login = _LOGIN.search(text)
    is_web = (address["scheme"] or "").lower().endswith(("http", "https"))
    if login is None or not (is_web or ":" in login[1]):
        return text
    return f"{text[: login.start()]}{HIDDEN}{text[login.end(1) :]}"


def _without_value(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if not (name.lower() in _IN_QUERIES or _is_named(name, value)):
        return found[0]
    return f"{name}={HIDDEN}{value[len(value.rstrip('.:')) :]}"


# --- text from outside on a terminal --------------------------------------------------------------

_LONGEST_WORD = 400  # characters; paths are shorter, values of a wrong setting may be of any length
_LONGEST_LINE = 4000
_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


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
