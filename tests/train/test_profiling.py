"""The right steps and ranks are profiled, files are complete, and torch checks determinism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.specs import ProfileSpec
from megafp8.train.process import prepare_process
from megafp8.train.report import profile as profiling
from megafp8.train.report.profile import StepProfiler, memory_snapshot_on_oom

CPU = torch.device("cpu")
NUM_STEPS = 6


def profiled(directory: Path, *, rank: int = 0, **changes: Any) -> list[dict[str, Any]] | None:
    """Return the profiled events of six steps, of which step n is a product of size 10 + n."""
    spec = ProfileSpec(**({"enabled": True, "start_step": 2, "end_step": 3} | changes))
    said: list[str] = []
    profiler = StepProfiler(spec, directory, rank, CPU, said.append)
    for step in range(NUM_STEPS):
        profiler.before_step(step)
        a = torch.ones(10 + step, 10 + step)
        torch.mm(a, a)
        profiler.after_step(step)
    profiler.close()
    assert bool(said) == profiler.trace_file.exists()
    if not said:
        return None
    return [e for e in json.loads(profiler.trace_file.read_text())["traceEvents"] if "cat" in e]


def products(events: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    return [event for event in events or [] if event["name"] == "aten::mm"]


@pytest.mark.parametrize(
    ("start", "end", "sizes"),
    [(2, 3, [12, 13]), (0, 0, [10]), (5, 9, [15]), (1, 4, [11, 12, 13, 14])],
)  # fmt: skip
def test_the_steps_asked_for(tmp_path: Path, start: int, end: int, sizes: list[int]) -> None:
    found = products(profiled(tmp_path, start_step=start, end_step=end, gen_shape=True))
    assert [event["args"]["Input Dims"][0][0] for event in found] == sizes


def test_shapes_are_recorded(tmp_path: Path) -> None:
    assert all("Input Dims" not in e["args"] for e in products(profiled(tmp_path)))
    assert all("Input Dims" in e["args"] for e in products(profiled(tmp_path, gen_shape=True)))


def test_other_ranks_are_left_alone(tmp_path: Path) -> None:
    assert profiled(tmp_path, rank=1) is None
    assert profiled(tmp_path, rank=1, ranks=(0, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["profile_rank1.json"]
    assert profiled(tmp_path, enabled=False) is None


def test_a_full_disk_costs_the_profile_only(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("no directory")
    profiler = StepProfiler(
        ProfileSpec(enabled=True, start_step=0, end_step=0), tmp_path / "file", 0, CPU, said.append
    )
    profiler.before_step(0)
    profiler.after_step(0)
    assert len(said) == 1 and "cannot be written" in said[0]


def test_deterministic_refuses_what_is_not() -> None:
    """`put_` without accumulation has no deterministic algorithm, on any device."""
    try:
        prepare_process(CPU, fp32=False, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        torch.empty(2, dtype=torch.float4_e2m1fn_x2)  # torch would fill it, and cannot
    finally:
        prepare_process(CPU, fp32=False)
    assert not torch.are_deterministic_algorithms_enabled()
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_products_on_a_gpu_are_added_up_in_fp32() -> None:
    """cuBLAS divides long sums among its blocks, and torch lets it add up their results in BF16."""
    found: Any = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    before = [getattr(found, name) for name in names]
    try:
        prepare_process(CPU, fp32=False)
        assert [getattr(found, name) for name in names] == before
        prepare_process(torch.device("cuda"), fp32=False)
        assert [getattr(found, name) for name in names] == [False, False]
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(found, name, value)


def test_out_of_memory_leaves_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced recorder stands for CUDA's, since there is no GPU."""
    calls: list[object] = []
    recorder = profiling.torch.cuda.memory
    monkeypatch.setattr(recorder, "_record_memory_history", lambda **k: calls.append(k))
    monkeypatch.setattr(recorder, "_dump_snapshot", lambda file: Path(file).write_bytes(b"all"))
    said: list[str] = []
    with pytest.raises(torch.OutOfMemoryError):
        with memory_snapshot_on_oom(True, tmp_path, 3, said.append):
            raise torch.OutOfMemoryError("CUDA out of memory")
    assert (tmp_path / "memory_rank3.pickle").read_bytes() == b"all"
    assert "memory_rank3.pickle" in said[0] and calls[-1] == {"enabled": None}
    calls.clear()
    with memory_snapshot_on_oom(False, tmp_path, 0, said.append):
        pass
    assert calls == []


@pytest.mark.gpu
def test_nvtx_ranges_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, push = list[str](), torch.cuda.nvtx.range_push
    monkeypatch.setattr(
        torch.cuda.nvtx, "range_push", lambda name: (named.append(name), push(name))
    )
    spec = ProfileSpec(enabled=True, start_step=1, end_step=1, gen_shape=True)
    profiler = StepProfiler(spec, tmp_path, 0, torch.device("cuda"), print)
    for step in range(3):
        profiler.before_step(step)
        torch.ones(4, device="cuda").add_(1)
        profiler.after_step(step)
    torch.cuda.synchronize()
    assert named == ["step 2"]


@pytest.mark.gpu
def test_a_real_out_of_memory(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(torch.OutOfMemoryError):
        with memory_snapshot_on_oom(True, tmp_path, 0, said.append):
            torch.empty(1 << 50, device="cuda")
    assert (tmp_path / "memory_rank0.pickle").stat().st_size > 0
