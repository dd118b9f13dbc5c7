"""What the ranks of the tests of FP8-LM's ZeRO do: they measure the memory of gradients."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megafp8.parallel.mesh import join
from megafp8.parallel.scaled_data import ExchangedBucket
from megafp8.train.step import train_step
from tests.kit.cases import Case
from tests.limits import HANG_SECONDS
from tests.optim.sharded_work import on_ranks
from tests.ranks import Rank


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
    rank: Rank, cases: dict[str, Case], steps: int, limits: dict[str, tuple[int, int]]
) -> dict[str, Memory]:
    """The cases have no FP8 numbers but gradients: no products, moments or weights in FP8.

    `limits` has the most bytes that a case may have at a gradient and after a step.
    """
    torch.set_num_threads(1)
    found = {}
    mesh = join(on_ranks(next(iter(cases.values())).parallel, rank))
    for name, asked in cases.items():
        before = live_fp8_bytes()
        case = replace(asked, parallel=on_ranks(asked.parallel, rank))
        state = case.build(mesh)
        reducer, memory = state.reducer, Memory()
        assert reducer is not None and state.optimizer.spec.storage.main_grads == "fp8"
        note: Callable[[nn.Parameter], None] = reducer.note

        at_gradient, after_step = (before + most for most in limits[name])

        def measured(  # type: ignore[no-untyped-def]
            param: nn.Parameter, note=note, memory=memory, before=before, limit=at_gradient
        ) -> None:
            memory.at_gradients[-1].append(live_fp8_bytes_below(limit) - before)
            note(param)

        finish: Callable[[], None] = reducer.finish

        def finished(reducer=reducer, finish=finish, memory=memory) -> None:  # type: ignore[no-untyped-def]
            early = [b for b in reducer.buckets if isinstance(b, ExchangedBucket) and b.has_started]
            memory.started.append(sum(bucket.held.fmt.name == "fp8" for bucket in early))
            finish()

        reducer.note, reducer.finish = measured, finished  # type: ignore[method-assign]
        for _ in range(steps):
            memory.at_gradients.append([])
            memory.losses.append(train_step(state, case.microbatches(state.step, mesh)).loss)
            state.step += 1
            memory.after.append(live_fp8_bytes_below(after_step) - before)
        found[name] = memory
    return found
