"""What ranks really hold, counted by others than the dry run: Python's garbage collector, which
knows all tensors, and torch's profiler, which sees the allocator."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile

from megafp8.parallel.mesh import join
from megafp8.specs import RunSpec
from megafp8.train.build import build
from megafp8.train.dryrun import LiveBytes, forward, stages_of
from megafp8.train.state import TrainState
from tests.ranks import Rank


def alive() -> dict[int, int]:
    """Bytes by the address of each storage that some Python object refers to."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    # What a compilation in the same process has left has no memory.
    real = [each for each in tensors if not issubclass(type(each), FakeTensor)]
    storages = [each.untyped_storage() for each in real if each.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def allocated(run: Any) -> tuple[int, int, object]:
    """Bytes that `run()` has allocated and not given back, the most there were, what it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return now, most, result


def measure(rank: Rank, cases: dict[str, RunSpec]) -> dict[str, dict[str, Any]]:
    """Of each case: parameters, bytes from step to step, of a microbatch by stage."""
    return {name: of_a_rank(spec) for name, spec in cases.items()}


def built(spec: RunSpec) -> tuple[TrainState, int]:
    """A rank's state and its bytes, ready for a microbatch."""
    mesh = join(spec.parallel)
    before = alive()
    state = build(spec, mesh)
    held = sum(size for place, size in alive().items() if place not in before)
    held -= len(state.masters.masters) * 4  # Adam's step count beside each master
    state.sink.begin_step()
    if state.reducer is not None:
        state.reducer.begin_step(1)
    state.scaling.begin_microbatch(0)
    for gpt in stages_of(state).values():
        forward(gpt, spec, state)  # quantizes the weights
    return state, held


def of_a_rank(spec: RunSpec) -> dict[str, Any]:
    """Gloo's threads give tensors back on their own, which a profiler does not see: so real
    storages are watched here as the dry run watches its own."""
    state, held = built(spec)
    kept = {}
    with LiveBytes() as watched:
        for index, gpt in stages_of(state).items():
            output = forward(gpt, spec, state)
            time.sleep(0.2)
            kept[index] = watched.bytes()
            del output
    params = sum(param.numel() for param in state.model.parameters())
    return {"params": params, "held": held, "kept": kept}


def alone(spec: RunSpec) -> tuple[int, int, int]:
    """Of one rank: bytes from step to step, between forward and backward, at the worst moment."""
    state, held = built(spec)
    kept, first, output = allocated(lambda: forward(stages_of(state)[0], spec, state))
    assert isinstance(output, torch.Tensor)
    _, second, _ = allocated(output.backward)
    return held, kept, max(first, kept + second)
