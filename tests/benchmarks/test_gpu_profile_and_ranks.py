"""What the GPU benchmarks compute from a profile, and from the losses of ranks."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

from tests.benchmarks.test_gpu_check import loaded


@pytest.mark.parametrize("benchmark", ["gpu_profile"], indirect=True)
def test_a_gpu_is_idle_where_nothing_runs(benchmark: ModuleType) -> None:
    """Works of two streams overlap, and one lies within another: 10 of 100 us are idle."""
    spans = [(0, 40, "a"), (28, 60, "flash_fwd"), (35, 50, "a"), (70, 100, "_cast_kernel")]
    works = [benchmark.Work(name, begin, end) for begin, end, name in reversed(spans)]
    assert benchmark.idle_share(works) == pytest.approx(0.1)
    row = benchmark.row_of(works, Counter({"_cast_kernel": 3000}))
    assert row["step_seconds"] == pytest.approx(50e-6) and row["launches_of_a_step"] == 2
    assert [kernel["name"] for kernel in row["largest"]] == ["a", "flash_fwd", "_cast_kernel"]
    assert row["largest"][0]["launches"] == 2 and row["attention"] == ["flash_fwd"]
    (cast,) = row["triton"]
    assert cast["bytes_per_second"] == pytest.approx(3000 / 30e-6)


@pytest.mark.parametrize("benchmark", ["gpu_profile"], indirect=True)
def test_arguments_are_counted_in_steps_that_are_not_recorded(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting takes time between two launches, in which the GPU may be idle."""
    done: list[str] = []

    @contextmanager
    def inside(name: str) -> Iterator[None]:
        done.append(name)
        yield
        done.append(f"no {name}")

    monkeypatch.setattr(benchmark, "counted_arguments", lambda _: inside("counting"))
    monkeypatch.setattr(benchmark, "profile", lambda **_: inside("recording"))
    monkeypatch.setattr(benchmark, "train_step", lambda *_: done.append("step"))
    monkeypatch.setattr(benchmark, "build", lambda *_: None)
    monkeypatch.setattr(benchmark, "works_of", lambda *_: [])
    monkeypatch.setattr(benchmark, "row_of", lambda *_: {})
    benchmark.measure(argparse.Namespace(tiny=True, variant="fp8"), torch.device("cpu"))
    steps = ["step"] * 2
    counted = ["counting", *steps, "no counting"]
    assert done[3:] == [*counted, "recording", *steps, "no recording"]


@pytest.mark.parametrize("benchmark", ["gpu_ranks"], indirect=True)
def test_a_number_that_is_not_finite_is_no_agreement(benchmark: ModuleType) -> None:
    assert benchmark.apart([2.0, 4.0], [2.0, 5.0]) == pytest.approx(0.2)
    assert benchmark.apart([math.nan, 4.0], [2.0, 4.0]) == math.inf
    assert benchmark.apart([math.inf], [math.inf]) == math.inf
    with pytest.raises(ValueError, match="shorter|longer"):
        benchmark.apart([1.0], [1.0, 1.0])


@pytest.mark.parametrize("benchmark", ["gpu_ranks"], indirect=True)
def test_the_layouts_are_those_of_the_check(benchmark: ModuleType) -> None:
    layouts = benchmark.LAYOUTS
    assert tuple(layouts) == loaded().LAYOUTS and len(layouts) == 10
    assert {layout.ranks for layout in layouts.values()} == {2, 4, 8}
    used = {name for layout in layouts.values() for name in layout.precisions}
    assert used == set(benchmark.PRECISIONS), "each is compared with ranks"
