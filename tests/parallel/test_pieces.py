"""Which rank holds which rows and columns; what a collective costs, or a rank gathers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.formats import E4M3
from fp8_numerics.gemm import GemmCounter
from megafp8.fp8.grad_sink import AutogradSink
from megafp8.models.random import RandomStreams
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import join, single_rank
from megafp8.parallel.parts import NativeParts, PartsArgs
from megafp8.parallel.sequence import (
    SequenceColumnParallel,
    SequenceRowParallel,
    gather_tokens,
)
from megafp8.specs import ParallelSpec
from megafp8.specs.parameters import parameters_of
from tests.tiny import gpt_spec

MODEL = gpt_spec(
    num_layers=1, hidden_size=6, kv_channels=2, num_attention_heads=4, num_query_groups=2,
    ffn_hidden_size=12, vocab_size=12,
)  # fmt: skip
LISTED = parameters_of(MODEL)
QKV, FC2 = "layers.0.attention.qkv", "layers.0.mlp.fc2"


def test_fused_columns_by_hand() -> None:
    """Rank 1 of 2: the second half of query, of key and of value, one after the other."""
    weights, biases = (LISTED[f"{QKV}.{kind}"].pieces(2, 1) for kind in ("weight", "bias"))
    of_layer = "layers.0.attention"
    found = [(p.name, p.global_shape, p.offset, p.local[0]) for p in weights]
    assert found == [
        (f"{of_layer}.query.weight", (8, 6), (4, 0), slice(0, 4)),
        (f"{of_layer}.key.weight", (4, 6), (2, 0), slice(4, 6)),
        (f"{of_layer}.value.weight", (4, 6), (2, 0), slice(6, 8)),
    ]
    assert [(p.name, p.global_shape, p.offset, p.local) for p in biases] == [
        (f"{of_layer}.query.bias", (8,), (4,), (slice(0, 4),)),
        (f"{of_layer}.key.bias", (4,), (2,), (slice(4, 6),)),
        (f"{of_layer}.value.bias", (4,), (2,), (slice(6, 8),)),
    ]
    assert LISTED[f"{QKV}.weight"].local_shape(2) == (8, 6)
    assert all(piece.is_sharded for piece in (*weights, *biases))


def test_ranks_that_divide_a_sequence_drop_elements_of_their_own() -> None:
    """The residual stream is whole on every rank without sequence parallelism, and drops alike."""
    for divided in (False, True):
        masks = []
        for rank in range(2):
            parts = NativeParts(
                PartsArgs(
                    spec=gpt_spec(), dtype=torch.float32, seed=1, streams=RandomStreams(1, rank),
                    tp=Axis("tp", 2, rank), sink=AutogradSink(), counter=GemmCounter(),
                    sequence_parallel=divided,
                )
            )  # fmt: skip
            masks.append(parts.dropout(0.5, "site")(torch.ones(64)))
        assert torch.equal(*masks) != divided


def test_rows_by_hand() -> None:
    (weight,), (bias,) = (LISTED[f"{FC2}.{kind}"].pieces(3, 2) for kind in ("weight", "bias"))
    assert (weight.global_shape, weight.offset) == ((6, 12), (0, 8))
    assert weight.local == (slice(0, 6), slice(0, 4)) and weight.is_sharded
    assert (bias.global_shape, bias.offset) == ((6,), (0,)) and not bias.is_sharded


def test_rows_of_the_vocabulary_by_hand() -> None:
    (piece,) = LISTED["embedding.word.weight"].pieces(3, 2, replica=1)
    assert piece.offset == (8, 0) and piece.is_sharded and piece.replica == 1
    assert LISTED["embedding.word.weight"].local_shape(3) == (4, 6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_cover_every_element_once(size: int) -> None:
    counts: dict[str, torch.Tensor] = {}
    for rank in range(size):
        weights = (LISTED[f"{name}.weight"].pieces(size, rank) for name in (QKV, FC2))
        for piece in (piece for pieces in weights for piece in pieces):
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
        assert axis.start_reduce_scatter_sum(x).wait() is x and axis.gather_rows(x) is x
    assert x.tolist() == [1.0, -2.0]
    assert not mesh.traffic.num_bytes and not mesh.traffic.num_calls
    assert mesh.is_main


def test_joining_a_world_of_one_starts_no_process_group() -> None:
    mesh = join(ParallelSpec())
    assert mesh.world.size == mesh.tp.size == mesh.dp.size == 1
    assert not torch.distributed.is_initialized()


class _TwoRanks:
    """An axis of two ranks; the other rank's rows are this rank's, each byte plus one."""

    size = 2

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        return torch.cat([x, x + 1])


def test_bytes_that_lie_transposed_are_gathered_and_kept_so() -> None:
    """The tensor that tensor cores read is the same one, without a copy byte by byte."""
    rows = torch.arange(15, dtype=torch.uint8).view(5, 3)
    found = []
    for payload in (rows, rows.t().contiguous().t()):
        part = Fp8Tensor(payload.view(torch.float8_e4m3fn), torch.ones(()), E4M3)
        whole = gather_tokens(part, _TwoRanks())  # type: ignore[arg-type]
        assert isinstance(whole, Fp8Tensor)
        found.append(whole.payload.view(torch.uint8))
    assert torch.equal(found[0], torch.cat([rows, rows + 1])) and torch.equal(*found)
    assert found[0].is_contiguous() and found[1].t().is_contiguous()


def test_scales_of_columns_are_those_of_all_ranks_tokens() -> None:
    """The ranks have agreed on them, so that they are not gathered; the block grows."""
    payload = torch.arange(15, dtype=torch.uint8).view(5, 3)
    scale = torch.tensor([[1.0, 2.0, 4.0]])
    part = Fp8Tensor(payload.view(torch.float8_e4m3fn), scale, E4M3, block=(5, 1), layout="row")
    whole = gather_tokens(part, _TwoRanks())  # type: ignore[arg-type]
    assert isinstance(whole, Fp8Tensor) and whole.block == (10, 1)
    assert torch.equal(whole.dequant_scale, scale)
    numbers = torch.cat([payload, payload + 1]).view(torch.float8_e4m3fn).float()
    assert torch.equal(whole.dequantize(torch.float32), numbers * scale)


def test_a_block_may_not_end_in_another_rank() -> None:
    part = Fp8Tensor(
        torch.zeros(6, 4).to(torch.float8_e4m3fn), torch.ones(2, 4), E4M3, block=(4, 1)
    )
    with pytest.raises(AssertionError, match="another rank"):
        gather_tokens(part, _TwoRanks())  # type: ignore[arg-type]
    whole = gather_tokens(replace(part, block=(3, 1)), _TwoRanks())  # type: ignore[arg-type]
    assert isinstance(whole, Fp8Tensor) and list(whole.dequant_scale.shape) == [4, 4]


def test_amaxes_of_columns_are_agreed_on_by_those_who_divide_the_tokens() -> None:
    """The inputs of a column-parallel linear, and the output gradients of a row-parallel one."""
    tp: Any = single_rank().tp
    for comm, divided in (
        (SequenceColumnParallel(tp), "input"),
        (SequenceRowParallel(tp), "grad_output"),
    ):
        for role in ("input", "weight", "grad_output"):
            reduce = comm.reduce_columns(role)  # type: ignore[arg-type]
            assert reduce == (tp.all_reduce_max if role == divided else None)
            assert comm.reduce_max(role) == tp.all_reduce_max  # type: ignore[arg-type]
