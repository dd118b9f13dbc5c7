"""The header of a run says what a user must know before the first step."""

from __future__ import annotations

import os

import pytest

from megafp8.train.report.header import sharing
from tests.tiny import run_spec


def test_ranks_that_share_cores_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    one = run_spec()
    assert one.parallel.devices_per_node == 1 and sharing(one, "cpu") == ""
    three = run_spec(world=3)
    assert sharing(three, "cpu") == "; 3 ranks share 2 cores, so a step takes longer"
    assert sharing(three, "cuda") == "" and sharing(run_spec(world=2), "cpu") == ""
