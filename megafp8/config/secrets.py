"""Keys and tokens stay out of messages and files: what looks like one, and how it is hidden."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

HIDDEN = "***"

_WORDS = r"(?:api_?key|access_?key|private_?key|secret|token|password|passwd|credentials?)"
_NAME = re.compile(rf"(?:^|[^a-z0-9]){_WORDS}(?:$|[^a-z0-9])", re.IGNORECASE)
# `api_key=VALUE`, `'api_key': 'VALUE'`: ends at a blank, comma or brace outside of quotes.
_SETTING = re.compile(
    rf"((?:^|[^A-Za-z0-9]){_WORDS}(?![A-Za-z0-9])[\w.\-]*['\"]?\s*[=:]\s*)"
    r"(\\?\"(?:[^\"\\]|\\.)*\"|\\?'(?:[^'\\]|\\.)*'|[^\s,}]+)",
    re.IGNORECASE,
)
_SHORTEST = 8  # shorter values of the environment would hide ordinary words


def is_secret_name(name: str) -> bool:
    """Whether a key or a variable is called like a secret: `HF_TOKEN`, `wandb.api_key`."""
    return _NAME.search(name) is not None


def secret_values(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment's secrets by their variables' names."""
    environ = os.environ if environ is None else environ
    return {n: v for n, v in environ.items() if is_secret_name(n) and len(v) >= _SHORTEST}


def variable_in(value: object) -> str | None:
    """The variable whose secret a value holds, as `${oc.env:HF_TOKEN}` would bring it along."""
    text = str(value)
    return next((name for name, secret in secret_values().items() if secret in text), None)


def hide(text: str) -> str:
    """The text without secrets: neither those of the environment nor what is named like one."""
    for secret in secret_values().values():
        text = text.replace(secret, HIDDEN)
    return _SETTING.sub(rf"\g<1>{HIDDEN}", text)
