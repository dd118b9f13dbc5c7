"""Count what ranks really hold by other means than the dry run's.

Python's garbage collector knows all tensors, and torch's profiler sees the allocator.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megafp8.backends.te.quantized import is_quantized, memory_of
from megafp8.data.loader import Microbatch
from megafp8.optim.masters import Masters
from megafp8.parallel.mesh import join
from megafp8.plan.dryrun import RankShare, rank_share
from megafp8.plan.dryrun_step import forward, stages_of
from megafp8.specs import ParallelSpec, RunSpec
from megafp8.specs.te_versions import DEFAULT_VERSION
from megafp8.train.build import build, make_masters
from megafp8.train.live_bytes import LiveBytes
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from tests.limits import HANG_SECONDS
from tests.ranks import Rank

NUM_STEPS = 5
NUM_STEPS_OF_TE = 2


def storages() -> dict[int, torch.UntypedStorage]:
    """Return each storage with memory that some Python object refers to, by address."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    # Fake and functional tensors that a compilation has left in this process have no memory.
    # A tensor that wraps others, such as a DTensor of FSDP or a quantized tensor of Transformer
    # Engine, has none of its own either: its parts are listed. A sparse one has no storage, and
    # torch keeps those that were unpickled in this process.
    real = [
        each
        for each in tensors
        if each.layout == torch.strided
        and not issubclass(type(each), (FakeTensor, FunctionalTensor))
        and not is_traceable_wrapper_subclass(each)
        and not torch._is_functional_tensor(each)
        and not is_quantized(each)
    ]
    found = [each.untyped_storage() for each in real if each.device.type == "cpu"]
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


def allocated(run: Any) -> tuple[int, int, object]:
    """Return the bytes that `run()` has allocated and not freed, their peak, and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return now, most, result


def fresh_bytes(before: dict[int, torch.UntypedStorage]) -> int:
    """Return the bytes of the storages that were made since `before = storages()`.

    `before` keeps its storages, so that no new tensor has the address of a freed one. A tensor at
    such an address would be missing from the sum.
    """
    return sum(each.nbytes() for place, each in storages().items() if place not in before)


Kept = dict[str, list[dict[int, int]]]
"""The bytes that the dry run says a microbatch keeps: by case, rank and stage."""


def measure(rank: Rank, cases: dict[str, RunSpec], planned: Kept) -> dict[str, dict[str, Any]]:
    """Return for each case: parameters, bytes from step to step, and of a microbatch by stage.

    Routers divide tokens evenly.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megafp8.models.router.best", in_turn)
        return {name: of_a_rank(spec, planned[name][rank.index]) for name, spec in cases.items()}


def in_turn(scores_TE: torch.Tensor, count: int) -> torch.Tensor:
    """Return the next `count` experts for each token."""
    tokens, experts = scores_TE.shape
    return (torch.arange(tokens * count).view(tokens, count) % experts).sort(-1).values


def built(spec: RunSpec) -> tuple[TrainState, int]:
    """Build a rank's state, ready for a microbatch; return it with its bytes."""
    mesh = join(spec.parallel)
    before = storages()
    state = build(spec, mesh)
    state.backend.scaling_tensors(state.model)  # scale tables get memory when they are first used
    held = fresh_bytes(before)
    held -= len(state.masters.masters) * 4  # Adam's step count of each master weight
    states = [*state.masters.stored, *state.masters.grad_of.values()]
    ones = [x.dequant_scale.untyped_storage() for x in states if x.fmt.name == "fp32"]
    held -= sum({one.data_ptr(): one.nbytes() for one in ones}.values())  # the scales 1
    state.sink.begin_step()
    if state.reducer is not None:
        state.reducer.begin_step(1)
    state.scaling.begin_microbatch(0)
    for gpt in stages_of(state).values():
        forward(gpt, spec, state)  # quantizes the weights
    return state, held


def of_a_rank(spec: RunSpec, planned: dict[int, int]) -> dict[str, Any]:
    """Return the bytes of a microbatch on a rank.

    Gloo's threads free tensors on their own, which a profiler does not see. Therefore this function
    watches real storages as the dry run watches its own, and waits for these threads until there
    are no more bytes than `planned` for each stage, but for the 1 % that a test allows.
    """
    state, held = built(spec)
    kept = {}
    with LiveBytes(memory_of=state.backend.memory_of) as watched:
        for index, gpt in stages_of(state).items():
            output = forward(gpt, spec, state)
            until = time.monotonic() + HANG_SECONDS
            while watched.bytes() > 1.01 * planned[index] and time.monotonic() < until:
                time.sleep(0.05)
            kept[index] = watched.bytes()
            del output
    params = sum(param.numel() for param in state.model.parameters())
    return {"params": params, "held": held, "kept": kept}


def alone(spec: RunSpec) -> tuple[int, int, int]:
    """Return one rank's bytes from step to step, between forward and backward, and at the peak."""
    state, held = built(spec)
    kept, first, output = allocated(lambda: forward(stages_of(state)[0], spec, state))
    assert isinstance(output, torch.Tensor)
    _, second, _ = allocated(output.backward)
    return held, kept, max(first, kept + second)


def most_in_tensors(spec: RunSpec) -> int:
    """Return the peak of `alone` without what kernels allocate and free inside one operation."""
    state, _ = built(spec)
    with LiveBytes(memory_of=state.backend.memory_of) as watched:
        forward(stages_of(state)[0], spec, state).backward()
    return watched.most


def measure_te(rank: Rank, cases: dict[str, RunSpec], planned: Kept) -> dict[str, dict[str, Any]]:
    """Return what `measure` does, for Transformer Engine's layers."""
    import te_cpu

    te = te_cpu.load()
    found = {}
    for name, spec in cases.items():
        te.module.base.FP8GlobalStateManager.reset()
        found[name] = of_a_rank(spec, planned[name][rank.index])
    return found


def shares_of_te(
    rank: Rank,
    cases: dict[str, RunSpec],
    planted: Mapping[str, Any] | None = None,
    version: str = DEFAULT_VERSION,
    every: Mapping[str, int] | None = None,
) -> dict[str, list[RankShare]]:
    """Return the dry run's shares of ranks, for the layers of a version of Transformer Engine.

    A test may have `planted` wrong values: what names of modules stand for meanwhile. All ranks
    have a share, or each n-th one of a case that is in `every`.
    """
    import te_cpu

    te_cpu.load(version)
    with pytest.MonkeyPatch.context() as patch:
        for place, wrong in (planted or {}).items():
            patch.setattr(place, wrong)
        return {
            name: [
                rank_share(spec, index)
                for index in range(0, spec.parallel.world_size, (every or {}).get(name, 1))
            ]
            for name, spec in cases.items()
        }


@dataclass(frozen=True)
class Most:
    """The most bytes of live tensors on a rank at a time."""

    start: int  # until the master weights are made
    steps: tuple[int, ...]  # in each step


def is_start(real: int, share: RankShare, parallel: ParallelSpec) -> bool:
    """Whether a rank's most bytes at the start are those of its dry run within 1 %.

    A tensor-parallel rank draws whole tensors: in its own memory on a CPU, and in that of the host
    on a GPU, as the dry run counts.
    """
    drawn = 0
    if parallel.tp > 1:
        drawn = 4 * max(math.prod(whole) for _, whole, *_ in share.shapes)
    return 0.99 * share.start <= real <= 1.01 * (share.start + drawn)


def most_of_fsdp(rank: Rank, cases: dict[str, RunSpec]) -> dict[str, Most]:
    """Build each job's state and train a few steps; return the most bytes at a time.

    Gloo's threads free what they sent a little later than NCCL's streams, so that a test takes the
    least of several steps.
    """
    return {name: most_of(spec) for name, spec in cases.items()}


def most_of_fsdp_te(rank: Rank, cases: dict[str, RunSpec]) -> dict[str, Most]:
    """Return what `most_of_fsdp` does, for Transformer Engine's layers.

    What it makes once in a process, its workspace above all, is made before the first case.
    """
    import te_cpu

    found: dict[str, Most] = {}
    first = next(iter(cases.values()))
    for name, spec in {"": first, **cases}.items():
        te_cpu.load().module.base.FP8GlobalStateManager.reset()
        found[name] = most_of(spec, NUM_STEPS_OF_TE if name else 1)
    del found[""]
    return found


def most_of(spec: RunSpec, num_steps: int = NUM_STEPS) -> Most:
    """Return the most bytes of one job on this rank."""
    mesh = join(spec.parallel)
    start = 0

    def counted(*args: Any) -> Masters:
        nonlocal start
        masters = make_masters(*args)
        start = live.most
        return masters

    with LiveBytes("cpu", memory_of) as live, pytest.MonkeyPatch.context() as patch:
        patch.setattr("megafp8.train.build.make_masters", counted)
        state = build(spec, mesh)
        steps = []
        count = spec.train.num_microbatches(mesh.dp.size)
        for step in range(num_steps):
            shape = (spec.train.micro_batch_size, spec.data.seq_length)
            tokens = np.random.default_rng(step).integers(0, 96, shape)
            live.begin()
            train_step(state, [Microbatch(tokens, tokens)] * count)
            steps.append(live.most)
            state.step += 1
    return Most(start, tuple(steps))
