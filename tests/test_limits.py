"""No test depends on how fast the machine is: limits of time are those of a hang alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.limits import HANG_SECONDS
from tests.ranks import ROOT

OUTSIDE = ("slurm", "hosts")
"""Folders of tests that wait for jobs of a real Slurm, and for ranks on networks of their own."""
LEAST = 600
WAITS = {"run", "communicate", "check_output", "wait", "join", "wait_procs", "run_ranks"}
CLOCKS = {"monotonic", "perf_counter", "time"}


def limits_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each limit of a wait that a busy machine may pass, and each assertion that reads a clock."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = [kw.value for kw in node.keywords if kw.arg in ("timeout", "seconds")]
            if isinstance(node.func, ast.Attribute) and name in ("wait", "join"):
                given += node.args
            for value in given if name in WAITS else ():
                number = getattr(value, "value", None)
                if isinstance(number, int | float) and 0 < number < LEAST:
                    yield node.lineno, f"{name} for {number} s"
        elif isinstance(node, ast.Assert) and "deadline" not in ast.unparse(node.test):
            for part in ast.walk(node.test):
                called = part.func if isinstance(part, ast.Call) else None
                if isinstance(called, ast.Attribute) and called.attr in CLOCKS:
                    if getattr(called.value, "id", "") == "time":
                        yield node.lineno, "an assertion reads a clock"


def test_a_busy_machine_passes_no_limit() -> None:
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.relative_to(ROOT).parts[1] not in OUTSIDE:
            for line, what in limits_of(ast.parse(path.read_text())):
                found[f"{path.relative_to(ROOT)}:{line}"] = what
    assert not found


def test_limits_are_found() -> None:
    source = """
subprocess.run(command, timeout=120)
process.wait(60)
process.communicate(timeout=5)
process.wait()
run_ranks(work, 2, timeout=HANG_SECONDS)
assert time.monotonic() - began < 5
assert thing.monotonic() and process.wait(0) is None
"""
    lines = sorted(line for line, _ in limits_of(ast.parse(source)))
    assert lines == [2, 3, 4, 7] and HANG_SECONDS > LEAST
