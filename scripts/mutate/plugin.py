"""Let hypothesis report its first counterexample in pytest, without looking for a smaller one."""

from __future__ import annotations

from hypothesis import Phase, settings


def pytest_configure(config: object) -> None:
    """Leave out shrinking, which takes minutes; the same examples are tried in every run."""
    settings.register_profile(
        "mutate",
        settings.get_profile("ci"),
        phases=(Phase.explicit, Phase.generate),
        database=None,
    )
    settings.load_profile("mutate")
