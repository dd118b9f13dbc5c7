"""Give pytest the fixture `fp8_coverage`.

def test_the_model_runs_in_fp8(fp8_coverage):
    with fp8_coverage(model) as c:
        model(batch).sum().backward()
    c.assert_at_least(0.85)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fp8_coverage.record import coverage


@pytest.fixture
def fp8_coverage() -> type[coverage]:
    """Return `fp8_coverage.coverage`."""
    from fp8_coverage.record import coverage

    return coverage
