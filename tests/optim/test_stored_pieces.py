"""ZeRO over tensors in few bits, in one process: how a rank lays its part out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megafp8.optim.stored_split import SplitStoredMasters
from megafp8.optim.stored_zero import ShardedStoredMasters
from megafp8.parallel.mesh import single_rank
from megafp8.specs import ParallelSpec
from tests.optim.test_stored_ranks import case

ALONE = case("O2", zero=True, parallel=ParallelSpec())


def masters(shard_by: str, *, frees: bool = False) -> ShardedStoredMasters | SplitStoredMasters:
    """Return the masters of a small model, all of which this process has."""
    optim = replace(ALONE.optim, shard_by=shard_by, shards_grads=frees)  # type: ignore[arg-type]
    made = replace(ALONE, optim=optim).build(single_rank()).masters
    assert isinstance(made, ShardedStoredMasters | SplitStoredMasters)
    return made


@pytest.mark.parametrize("shard_by", ["tensors", "elements"])
def test_one_rank_has_no_gradients_of_others_to_free(shard_by: str) -> None:
    assert not masters(shard_by, frees=True).frees_grads


def test_the_scales_of_an_owner_s_weights_lie_in_the_model_s_order() -> None:
    """A gathering of the scales fills a row for each weight; a weight reads its own row."""
    found = masters("tensors")
    assert isinstance(found, ShardedStoredMasters)
    weights = [found.own_weights[param] for param in found.params if param in found.own_weights]
    assert len(weights) > 2
    for row, weight in enumerate(weights):
        assert weight.dequant_scale.data_ptr() == found._scales[row].data_ptr()


def test_a_tied_weight_is_alone_in_its_group() -> None:
    """All stages that have it divide it alike, whichever place it has among the parameters."""
    found = masters("elements")
    assert isinstance(found, SplitStoredMasters)
    for tied in found.params:
        found._tied = frozenset([tied])
        kinds = {param: found._kind(param, torch.float32).alone for param in found.params}
        others = {alone for param, alone in kinds.items() if param is not tied}
        assert kinds[tied] not in others and others == {0}
