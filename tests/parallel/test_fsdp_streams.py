"""FSDP's gathers in FP8 keep what another stream has yet to read, shown on a double of streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megafp8.parallel.mesh import join
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec
from megafp8.train.step import train_step
from tests.parallel.streams import Stream, current_stream, streams
from tests.tiny import build_run, gpt_spec, microbatch


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process that believes to be the first of two: its collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    monkeypatch.setattr("megafp8.parallel.rendezvous.group_that_waits", lambda: None)  # gloo's
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", ["full", "grad"])
def test_a_gathered_weights_scale_lives_until_it_has_been_read(
    two_ranks: None, strategy: str
) -> None:
    fsdp = FsdpSpec(strategy=strategy)  # type: ignore[arg-type]
    with streams() as memory:
        state = build_run(
            join(ParallelSpec(devices_per_node=2, fsdp=fsdp)),
            compute="bf16",
            fp8=Fp8Recipe(amax_history_len=4, params_in_fp8=True),
            model=gpt_spec(num_layers=4),
            parallel=ParallelSpec(devices_per_node=2, fsdp=fsdp),
        )
        for step in range(2):
            train_step(state, [microbatch(step), microbatch(step)])
            state.step += 1
    assert memory.crossings > 0
    assert memory.overwritten == set()


def test_the_double_finds_memory_that_is_given_away_too_early() -> None:
    with streams() as memory:
        ours, theirs = current_stream(), Stream()
        for waits in (True, False):
            theirs.wait_stream(ours)
            made = torch.ones(4) + 1
            with torch.cpu.stream(theirs):
                read = made * 2
            if waits:
                ours.wait_stream(theirs)
            del made
            again = torch.zeros(4)
            assert (memory.overwritten == set()) == waits
            del read, again
    assert memory.overwritten == {"aten.add.Tensor"}
