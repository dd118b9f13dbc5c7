"""Keep secrets, such as API keys and tokens, out of messages and files."""

from __future__ import annotations

import os
import re

HIDDEN = "***"

_WORDS = (
    r"(?:api_?key|access_?key|private_?key|secret|token(?!_dispatcher)|password|passwd"
    r"|credentials?)"
)
_NAME = re.compile(rf"(?:^|[^a-z0-9]){_WORDS}(?:$|[^a-z0-9])", re.IGNORECASE)
# Matches `api_key=VALUE` and `'api_key': 'VALUE'`; VALUE ends at a blank, comma or brace that is
# not in quotes.
_SETTING = re.compile(
    rf"((?:^|[^A-Za-z0-9]){_WORDS}(?![A-Za-z0-9])[\w.\-]*['\"]?\s*[=:]\s*)"
    r"(\\?\"(?:[^\"\\]|\\.)*\"|\\?'(?:[^'\\]|\\.)*'|[^\s,}]+)",
    re.IGNORECASE,
)
_SHORTEST = 8  # letters; hiding shorter values of variables would hide ordinary words


def is_secret_name(name: str) -> bool:
    """Whether a key or an environment variable is named like a secret, as `HF_TOKEN`."""
    return _NAME.search(name) is not None


def secret_values() -> dict[str, str]:
    """Return the values of environment variables that are named like secrets, by their names."""
    return {n: v for n, v in os.environ.items() if is_secret_name(n) and len(v) >= _SHORTEST}


def variable_in(value: object) -> str | None:
    """Return the environment variable whose secret is in a value, or None.

    An interpolation such as `${oc.env:HF_TOKEN}` puts a secret into a value.
    """
    text = str(value)
    return next((name for name, secret in secret_values().items() if secret in text), None)


def hide(text: str) -> str:
    """Return the text with `***` for secrets of the environment and for values named like one."""
    for secret in secret_values().values():
        text = text.replace(secret, HIDDEN)
    return _SETTING.sub(rf"\g<1>{HIDDEN}", text)
