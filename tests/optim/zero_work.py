"""What the ranks of the tests of FP8-LM's ZeRO do: they measure the memory of gradients."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from megafp8.parallel.mesh import Mesh
from megafp8.parallel.scaled_data import ExchangedBucket
from tests.kit.cases import Case
from tests.kit.runs import train
from tests.limits import HANG_SECONDS


@dataclass
class Memory:
    """The bytes of FP8 tensors beyond those from before the model was made, by step."""

    at_gradients: list[list[int]] = field(default_factory=list)  # when each was added
    after: list[int] = field(default_factory=list)  # after the step
    losses: list[float] = field(default_factory=list)
    started: list[int] = field(default_factory=list)  # FP8 buckets under way as backward ends


def live_fp8_bytes() -> int:
    """All memory behind FP8 tensors and bytes in this process, by Python's list of objects."""
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.dtype in (torch.uint8, torch.float8_e4m3fn):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def live_fp8_bytes_below(limit: int) -> int:
    """All FP8 bytes, as soon as they are `limit` at most, or when nothing more is to be expected.

    A thread of gloo lets go of what it has sent a moment after the send is complete.
    """
    deadline = time.monotonic() + HANG_SECONDS
    while (live := live_fp8_bytes()) > limit and time.monotonic() < deadline:
        time.sleep(0.01)
    return live


def memory_of_gradients(
    case: Case, mesh: Mesh, limits: dict[tuple[int, bool], tuple[int, int]]
) -> Memory:
    """The cases have no FP8 numbers but gradients: no products, moments or weights in FP8.

    `limits` has, by the number of microbatches and whether this is ZeRO-2, the most bytes that a
    case may have at a gradient and after a step.
    """
    gc.collect()  # of the case before
    before, memory = live_fp8_bytes(), Memory()
    state = case.build(mesh)
    reducer, optim = state.reducer, case.optim
    assert reducer is not None and optim.storage.main_grads == "fp8"
    note: Callable[[nn.Parameter], None] = reducer.note
    finish: Callable[[], None] = reducer.finish
    at_gradient, after_step = limits[case.num_microbatches, optim.shards_grads]

    def measured(param: nn.Parameter) -> None:
        memory.at_gradients[-1].append(live_fp8_bytes_below(before + at_gradient) - before)
        note(param)

    def finished() -> None:
        early = [b for b in reducer.buckets if isinstance(b, ExchangedBucket) and b.has_started]
        memory.started.append(sum(bucket.held.fmt.name == "fp8" for bucket in early))
        finish()

    reducer.note, reducer.finish = measured, finished  # type: ignore[method-assign]
    for _ in range(case.steps):
        memory.at_gradients.append([])
        memory.losses += train(state, case, 1).losses
        memory.after.append(live_fp8_bytes_below(before + after_step) - before)
    return memory
