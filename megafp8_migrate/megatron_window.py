"""Translate Megatron's windows of attention: their size, and which layers have none."""

from __future__ import annotations

import re
from typing import Any

from megafp8.config.api import is_skip_frequency, layer_list, window_problem
from megafp8_migrate.megatron_settings import MegatronSettings
from megafp8_migrate.report import Migration

WINDOW, SKIPS = "model.window_size", "model.window_attn_skip_freq"


def window(s: MegatronSettings, m: Migration) -> None:
    """Translate `window_size`, and `window_attn_skip_freq`, which Megatron reads with it alone."""
    size, skips = _pair(s.get("window_size")), s.get("window_attn_skip_freq")
    shown = s.label("window_size")
    problem = window_problem(size)
    if size is None or size == [-1, 0] or size == [-1, -1]:
        if "window_size" in s.given:
            m.drop(shown, s.given["window_size"].said, "a query sees all earlier tokens")
        if skips is not None:
            m.drop(s.label("window_attn_skip_freq"), skips, "no layer has a window")
        return
    if problem is not None:
        m.decide(shown, s.given["window_size"].said, problem, f"Give {WINDOW}=[W,0]")
    else:
        m.change(shown, s.given["window_size"].said, {WINDOW: size})
    if skips is None:
        return
    label, found = s.label("window_attn_skip_freq"), frequency(skips)
    if found is None:
        m.decide(label, skips, "is neither a number nor a list of 0 and 1", f"Give {SKIPS}")
    else:
        m.change(label, skips, {SKIPS: found})


def _pair(value: Any) -> Any:
    """Return the numbers of `4096,0` or `(4096,0)`, as Megatron's parser reads them."""
    if isinstance(value, str) and re.fullmatch(r"\(?\s*-?\d{1,12}\s*,\s*-?\d{1,12}\s*\)?", value):
        return [int(part) for part in value.strip("() ").split(",")]
    return value


def frequency(value: Any) -> int | list[int] | None:
    """Return the layers without a window as our key has them; None if the value says none.

    Megatron evaluates a text such as `([1]*3+[0])*8`, and `layer_list` reads it.
    """
    read = layer_list(value) if isinstance(value, str) else value
    return read if is_skip_frequency(read) else None
