"""Read the tables of settings that exclude each other, together.yaml, or fit, related.yaml.

Rules with several sizes or conditions at once are in `checks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megafp8.config.keys import Values
from megafp8.config.rows import read_rows, refusals
from megafp8.config.rules import Finding

TOGETHER = read_rows(Path(__file__).with_name("together.yaml"))
RELATED = read_rows(Path(__file__).with_name("related.yaml"))


def findings(values: Values) -> Iterator[Finding]:
    """Yield what the tables refuse, and what Transformer Engine cannot do where it is asked for."""
    yield from refusals((*RELATED, *TOGETHER), values)
    if values.get("model.fp8_backend") == "te":
        from megafp8.config import te_layers  # other runs need nothing of it

        yield from te_layers.findings(values)
