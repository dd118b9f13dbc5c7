"""Results that are equal on every CPU are tested on the oldest CPU that can be imitated here."""

from __future__ import annotations

import sys

import pytest

from tests.cpu_levels import IMITATIONS, QUICK, main, missing, run_tests


def test_casts_linears_a_run_and_two_ranks_on_the_least_cpu() -> None:
    name = next(iter(IMITATIONS))
    if reason := missing(IMITATIONS[name].level):
        pytest.skip(reason)
    done = run_tests(name, QUICK, "-x", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_command_runs_on_an_imitated_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    name = next(iter(IMITATIONS))
    if reason := missing(IMITATIONS[name].level):
        pytest.skip(reason)
    program = "import os; print(os.environ['MEGAFP8_CPU_FLAGS']); raise SystemExit(3)"
    assert main([name, "--", sys.executable, "-c", program]) == 3
    assert capfd.readouterr().out == "sse2\n"
    assert main(["486", "--", sys.executable, "-c", program]) == 2
    assert "unknown CPU '486'" in capfd.readouterr().err
