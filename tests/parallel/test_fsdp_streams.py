"""FSDP's gathers in FP8 keep what another stream has yet to read, shown on a double of streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megafp8.parallel.mesh import join
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec, StorageSpec
from megafp8.train.step import train_step
from tests.parallel.streams import Stream, current_stream, streams
from tests.tiny import build_run, gpt_spec, microbatch, optim_spec


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process that believes to be the first of two: its collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    monkeypatch.setattr("megafp8.parallel.rendezvous.group_that_waits", lambda: None)  # gloo's
    yield
    dist.destroy_process_group()


STORED = StorageSpec(main_grads="fp8", main_params="fp16", exp_avg="fp8", exp_avg_sq="fp16")


@pytest.mark.parametrize("storage", [StorageSpec(), STORED], ids=["FP32", "FP8-LM"])
@pytest.mark.parametrize("strategy", ["full", "grad"])
def test_what_is_gathered_and_summed_lives_until_it_has_been_read(
    two_ranks: None, strategy: str, storage: StorageSpec
) -> None:
    """The scales of gathered weights; at a level also masters, and sums of gradients in FP8."""
    fsdp = FsdpSpec(strategy=strategy)  # type: ignore[arg-type]
    with streams() as memory:
        state = build_run(
            join(ParallelSpec(devices_per_node=2, fsdp=fsdp)),
            compute="bf16",
            fp8=Fp8Recipe(amax_history_len=4, params_in_fp8=True),
            model=gpt_spec(num_layers=4),
            parallel=ParallelSpec(devices_per_node=2, fsdp=fsdp),
            optim=optim_spec(storage=storage),
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
