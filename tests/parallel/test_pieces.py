"""Which rank holds which rows and columns; what a collective of one rank costs."""

from __future__ import annotations

import pytest
import torch

from megafp8.parallel.mesh import join, single_rank
from megafp8.specs import ParallelSpec
from megafp8.specs.layer import LayerLinear, SubLinear

QKV = LayerLinear(
    "qkv", 6, (SubLinear("query", 8), SubLinear("key", 8), SubLinear("value", 4)), True
)
FC2 = LayerLinear("fc2", 12, (SubLinear("fc2", 5),), False)


def test_fused_columns_by_hand() -> None:
    """Rank 1 of 2: the second half of query, of key and of value, one after the other."""
    weights, biases = QKV.pieces(2, 1)
    found = [(p.name, p.global_shape, p.offset, p.local[0]) for p in weights]
    assert found == [
        ("query.weight", (8, 6), (4, 0), slice(0, 4)),
        ("key.weight", (8, 6), (4, 0), slice(4, 8)),
        ("value.weight", (4, 6), (2, 0), slice(8, 10)),
    ]
    assert [(p.name, p.global_shape, p.offset, p.local) for p in biases] == [
        ("query.bias", (8,), (4,), (slice(0, 4),)),
        ("key.bias", (8,), (4,), (slice(4, 8),)),
        ("value.bias", (4,), (2,), (slice(8, 10),)),
    ]
    assert all(piece.is_sharded for piece in (*weights, *biases))


def test_rows_by_hand() -> None:
    weights, biases = FC2.pieces(3, 2)
    (weight,), (bias,) = weights, biases
    assert (weight.global_shape, weight.offset) == ((5, 12), (0, 8))
    assert weight.local == (slice(0, 5), slice(0, 4)) and weight.is_sharded
    assert (bias.global_shape, bias.offset) == ((5,), (0,)) and not bias.is_sharded


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_cover_every_element_once(size: int) -> None:
    counts: dict[str, torch.Tensor] = {}
    for rank in range(size):
        for piece in (*QKV.pieces(size, rank)[0], *FC2.pieces(size, rank)[0]):
            count = counts.setdefault(piece.name, torch.zeros(piece.global_shape))
            extent = [
                slice(start, start + part.stop - part.start)
                for start, part in zip(piece.offset, piece.local, strict=True)
            ]
            count[tuple(extent)] += 1
            assert piece.is_sharded == (size > 1)
    assert len(counts) == 4
    assert all((count == 1).all() for count in counts.values())


def test_one_rank_reduces_nothing_and_counts_nothing() -> None:
    mesh = single_rank()
    x = torch.tensor([1.0, -2.0])
    for axis in (mesh.world, mesh.tp, mesh.dp):
        assert axis.all_reduce_sum(x) is x and axis.all_reduce_max(x) is x
        assert axis.start_all_reduce_sum(x).wait() is x
    assert x.tolist() == [1.0, -2.0]
    assert not mesh.traffic.num_bytes and not mesh.traffic.num_calls
    assert mesh.is_main


def test_joining_a_world_of_one_starts_no_process_group() -> None:
    mesh = join(ParallelSpec())
    assert mesh.world.size == mesh.tp.size == mesh.dp.size == 1
    assert not torch.distributed.is_initialized()
