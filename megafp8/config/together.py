"""Read the table of settings that exclude each other, together.yaml.

Rules that depend on sizes are in `checks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megafp8.config.keys import Values
from megafp8.config.rows import read_rows, refusals
from megafp8.config.rules import Finding

TOGETHER = read_rows(Path(__file__).with_name("together.yaml"))


def findings(values: Values) -> Iterator[Finding]:
    """Yield what the table refuses, and what Transformer Engine cannot do where it is asked for."""
    yield from refusals(TOGETHER, values)
    if values.get("model.fp8_backend") == "te":
        from megafp8.config import te_layers  # other runs need nothing of it

        yield from te_layers.findings(values)
