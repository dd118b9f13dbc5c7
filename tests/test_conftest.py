"""Test what conftest.py does with tests before they run."""

from __future__ import annotations

import pytest

from tests.conftest import SLOW_SECONDS, limit_slow_tests


def test_slow_tests_have_half_an_hour_unless_they_have_their_own_limit(
    request: pytest.FixtureRequest,
) -> None:
    def limit(*marks: pytest.MarkDecorator) -> int | None:
        item = pytest.Function.from_parent(request.node.parent, name="one", callobj=lambda: None)
        for mark in marks:
            item.add_marker(mark)
        limit_slow_tests([item])
        found = item.get_closest_marker("timeout")
        return None if found is None else found.args[0]

    assert limit() is None
    assert limit(pytest.mark.slow) == SLOW_SECONDS == 1800
    assert limit(pytest.mark.slow, pytest.mark.timeout(3600)) == 3600
    assert limit(pytest.mark.timeout(60)) == 60
