"""What keys of several sections accept."""

from __future__ import annotations

from megafp8.config.keys import Valid
from megafp8.config.values import parse_interval_seconds

PATH = Valid("a path", bool)


def is_interval(value: object) -> bool:
    """Null, or more than 0 seconds, as a number or "HH:MM:SS"."""
    seconds = parse_interval_seconds(value)
    return value is None or (seconds is not None and seconds > 0)
