"""ZeRO over tensors in low precision, in one process: how a rank lays its part out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from megafp8.models.init import pieces_of
from megafp8.optim.adamw import AdamW
from megafp8.optim.masters import Masters
from megafp8.optim.partitions import Partition, Segment, WeightBuffer, group_of
from megafp8.optim.stored_adam import StoredAdam
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import single_rank
from megafp8.specs import ParallelSpec
from megafp8.specs.division import ALIGNMENT, whole_parts
from tests.optim.test_masters_ranks import case

ALONE = case("O2", zero=True, parallel=ParallelSpec())


def masters(shard_by: str, *, frees: bool = False) -> Masters:
    """Return the masters of a small model, all of which this process has."""
    optim = replace(ALONE.optim, shard_by=shard_by, shards_grads=frees)  # type: ignore[arg-type]
    return replace(ALONE, optim=optim).build(single_rank()).masters


@pytest.mark.parametrize("shard_by", ["tensors", "elements"])
def test_one_rank_has_no_gradients_of_others_to_free(shard_by: str) -> None:
    assert not masters(shard_by, frees=True).partition.frees_grads


class Numbering(Axis):
    """Two ranks that agree on the numbers 1, 2, 3 and so on."""

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.arange(1.0, len(tensor) + 1)


@pytest.mark.parametrize("shard_by", ["tensors", "elements"])
def test_each_weight_reads_its_own_of_the_shared_scales(shard_by: str) -> None:
    found = masters(shard_by)
    found.shards_of = {"dense": Numbering("data", 2)}
    found._share_scales()
    weights = [found.own_weights[param] for param in found.own_weights]
    assert len(weights) > 2
    assert [w.dequant_scale.item() for w in weights] == list(range(1, len(weights) + 1))


def in_two_groups(reduction: str = "auto") -> Masters:
    """Every second linear belongs to experts, of which 4 ranks have copies, and the rest to 16."""
    whole = masters("tensors")
    for param in [param for param in whole.params if param in whole.linears][::2]:
        pieces = tuple(replace(piece, group="expert") for piece in pieces_of(param))
        param.pieces = pieces  # type: ignore[attr-defined]
    return Masters(
        whole.params,
        replace(whole.storage, reduction=reduction),  # type: ignore[arg-type]
        Partition("replicated", Axis("data", 16)),
        others={"expert": Partition("replicated", Axis("edp", 4))},
        linears=whole.linears,
    )


def test_ranks_of_each_group_agree_on_its_own_scales_and_amaxes() -> None:
    found = in_two_groups()
    found.shards_of = {"dense": Numbering("data", 2), "expert": Numbering("edp", 2)}
    found._share_scales()
    amaxes = found.agree(torch.zeros(len(found.params))).tolist()
    for group in found.shards_of:
        scales = [w.dequant_scale for p, w in found.own_weights.items() if group_of(p) == group]
        rows = [a for p, a in zip(found.params, amaxes, strict=True) if group_of(p) == group]
        for numbers in (scales, rows):
            assert len(numbers) > 1 and numbers == list(range(1, len(numbers) + 1)), group


def test_each_group_has_its_own_buckets_and_factors() -> None:
    found = in_two_groups()
    members = [(data.name, b) for data, buckets in found.reducer_buckets() for b in buckets]
    owned = [param for _, bucket in members for param in bucket.params]
    assert len(owned) == len(set(owned)) == len(found.params)
    for data, bucket in members:
        (group,) = {group_of(param) for param in bucket.params}
        assert data == {"dense": "data", "expert": "edp"}[group]
    factors = {(group_of(param), factor.item()) for param, factor in found.factor_of()}
    assert factors == {("dense", 1 / 4), ("expert", 1 / 2)}


@pytest.mark.parametrize(("reduction", "factor"), [("pre", 1 / 16), ("post", 1.0), ("auto", 1 / 4)])
def test_sums_in_fp8_begin_with_the_factor_of_their_kind(reduction: str, factor: float) -> None:
    """Of 16 replicas: gradients are divided before the sum, after it, or by 4 before and after."""
    whole = masters("tensors")
    storage = replace(whole.storage, reduction=reduction)  # type: ignore[arg-type]
    found = Masters(
        whole.params, storage, Partition("replicated", Axis("data", 16)), linears=whole.linears
    )
    assert found.factors.numel() > 2 and set(found.factors.tolist()) == {factor}


def test_parts_of_a_tensor_round_by_numbers_of_their_own() -> None:
    """Those of tensor-parallel ranks, which begin elsewhere in the tensor, and of ZeRO's ranks.

    Dither counts from the first element of a part, so that equal keys would be equal numbers.
    """
    storage = {"stochastic_rounding": True}
    optimizer = case("O2", storage=storage).build(single_rank()).optimizer
    masters, stored = optimizer.masters, optimizer.optimizers[0]
    assert isinstance(stored, StoredAdam)
    (first, *_) = (s for s in masters.segments if s.param in masters.linears)
    piece, elements = first.piece, first.param.numel()
    other = nn.Parameter(first.param.detach())
    other.pieces = (replace(piece, offset=(piece.global_shape[0] // 2, 0)),)  # type: ignore[attr-defined]
    parts = [
        Segment(param, begin, elements)
        for param in (first.param, other)
        for begin in (0, elements // 2, elements // 2 + 1)
    ]
    keys = {dither.key for part in parts for dither in stored._dithers(part, 3) if dither}
    assert len(keys) == 3 * len(parts)


def test_masters_keep_no_gradient_that_was_attached() -> None:
    """Autograd would add to it. At O1 norms and embeddings have states in FP32 alone."""
    state = case("O1", zero=True, parallel=ParallelSpec()).build(single_rank())
    adamw, found = state.optimizer.optimizers[1], state.masters
    assert isinstance(adamw, AdamW)
    step, with_grad = adamw._torch.step, []

    def noted() -> None:
        with_grad.extend(master for master in found.masters if master.grad is not None)
        step()

    adamw._torch.step = noted
    state.optimizer.step(1)
    assert 0 < len(with_grad) < len(found.masters)
    assert all(master.grad is None for master in found.masters)


def test_a_tied_weight_is_alone_in_its_group() -> None:
    """All stages that have it divide it alike, whichever place it has among the parameters."""
    found = masters("elements")
    for row, tied in enumerate(found.params):
        found.partition.tied = frozenset([tied])
        groups = found._divided(found.params, found.partition).kinds()
        assert [row] in groups and sum(map(len, groups)) == len(found.params)


@pytest.mark.parametrize("is_padded", [False, True])
def test_weights_lie_in_the_order_of_their_owners(is_padded: bool) -> None:
    """Three weights of 3, 5 and 2 numbers; rank 1 of two owns the first and the last."""
    params = [nn.Parameter(torch.ones(size)) for size in (3, 5, 2)]
    owners, unit = [1, 0, 1], ALIGNMENT
    places = whole_parts([3, 5, 2], owners, 2, kind="bfloat16", is_padded=is_padded)
    buffer = WeightBuffer.of(places, params)
    assert list(places.bounds) == ([0, 2 * unit, 4 * unit] if is_padded else [0, 5, 10])
    assert places.begins == ((2 * unit, 0, 3 * unit) if is_padded else (5, 0, 8))
    assert buffer.flat.numel() == places.elements and buffer.flat.dtype == torch.bfloat16
    for param, owner in zip(params, owners, strict=True):
        assert buffer.owned_by(owner, param) == slice(0, param.numel())
