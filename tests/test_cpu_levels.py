"""What is the same on every CPU is tried on the least one that this machine can imitate."""

from __future__ import annotations

import pytest

from tests.cpu_levels import IMITATIONS, QUICK, missing, run_tests


def test_casts_linears_a_run_and_two_ranks_on_the_least_cpu() -> None:
    name = next(iter(IMITATIONS))
    if reason := missing(IMITATIONS[name].level):
        pytest.skip(reason)
    done = run_tests(name, QUICK, "-x", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
