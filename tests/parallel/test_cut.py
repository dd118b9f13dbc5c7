"""Documents are cut over context-parallel ranks as Megatron and Transformer Engine cut them."""

from __future__ import annotations

from itertools import pairwise, product

import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.models.documents import band
from megafp8.parallel.collectives import Axis
from megafp8.parallel.context import own_positions, own_tokens
from megafp8.parallel.cut import own_pieces, pieces, places_of, shares, window_pieces
from megafp8.specs.model import BLOCK_QUERIES


def axis(size: int, rank: int) -> Axis:
    return Axis("cp", size=size, rank=rank)


def borders_of(rows: list[list[int]]) -> tuple[int, ...]:
    flat = [0, *(length for row in rows for length in row)]
    return tuple(torch.tensor(flat).cumsum(0).tolist())


def test_whole_chunks_are_megatrons() -> None:
    """By `thd_get_partitioned_indices`: a document of 2n c tokens gives rank r two runs of c."""
    lengths = [[8, 24, 16], [40, 8]]
    size, seq = 4, 48
    for rank in range(size):
        expected = []
        for row in lengths:
            places = []
            for start, stop in pairwise(borders_of([row])):
                chunk = (stop - start) // (2 * size)
                for index in (rank, 2 * size - 1 - rank):
                    places += range(start + index * chunk, start + (index + 1) * chunk)
            expected.append(places)
        assert places_of(borders_of(lengths), seq, axis(size, rank)).tolist() == expected


def test_a_document_of_a_whole_row_is_cut_as_the_row() -> None:
    for rank in range(3):
        cp = axis(3, rank)
        whole = own_positions((2, 24), cp, torch.device("cpu"))
        assert torch.equal(whole, own_positions((2, 24), cp, torch.device("cpu"),
                                                borders=(0, 24, 48)))  # fmt: skip


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=20), min_size=1, max_size=3),
       st.integers(2, 5))  # fmt: skip
def test_every_token_and_score_has_its_rank(rows: list[list[int]], size: int) -> None:
    """All ranks have as many tokens, chunks of a document differ by one token at most, and each
    score within a document is computed exactly once."""
    seq = max(map(sum, rows))
    seq += -seq % (2 * size)
    rows = [[*row, seq - sum(row)] if sum(row) < seq else row for row in rows]
    borders = borders_of(rows)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(n for row in rows for n in row)])
    ids_BS = ids.view(len(rows), seq)
    places = [places_of(borders, seq, axis(size, rank)) for rank in range(size)]
    assert all(each.shape == (len(rows), seq // size) for each in places)
    everything = torch.cat(places, dim=1).sort(dim=1).values
    assert torch.equal(everything, torch.arange(seq).expand(len(rows), seq))
    counts = torch.zeros(len(rows), seq, seq, dtype=torch.int8)
    cut = shares(borders, seq, size)
    for of_ranks in zip(*cut, strict=True):  # of one document, whose chunks are as equal as can be
        chunks = {len(part) for share in of_ranks for part in (share.first, share.second)}
        assert max(chunks) - min(chunks) <= 1
    for rank in range(size):
        for turn in range(size):
            other = (rank - turn) % size
            found = own_pieces(cut[rank])
            if turn:
                found = pieces(cut[rank], cut[other], from_before=turn <= rank)
            for piece in found:
                row = piece.rows.start
                queries = places[rank][row, piece.queries]
                keys = places[other][row, piece.keys]
                block = torch.ones(len(queries), len(keys), dtype=torch.int8)
                block = block.tril() if piece.is_causal else block
                counts[row, queries[:, None], keys] += block
    seen = (ids_BS[:, :, None] == ids_BS[:, None, :]).tril()
    assert torch.equal(counts, seen.to(torch.int8))


@given(st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=4), min_size=1, max_size=2),
       st.integers(2, 4), st.integers(0, 250))  # fmt: skip
def test_every_score_in_a_window_has_its_rank(
    rows: list[list[int]], size: int, window: int
) -> None:
    """Each score that is seen is in one piece; each query of a piece sees a key there."""
    seq = max(map(sum, rows))
    seq += -seq % (2 * size)
    rows = [[*row, seq - sum(row)] if sum(row) < seq else row for row in rows]
    borders = borders_of(rows)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(n for row in rows for n in row)])
    ids_BS, all_places = ids.view(len(rows), seq), torch.arange(seq)
    places = [places_of(borders, seq, axis(size, rank)) for rank in range(size)]
    counts = torch.zeros(len(rows), seq, seq, dtype=torch.int8)
    cut = shares(borders, seq, size)
    for rank, other in product(range(size), repeat=2):
        alone = torch.zeros(len(rows), seq // size, dtype=torch.int8)
        for piece in window_pieces(cut[rank], cut[other], window):
            row = piece.rows.start
            queries, keys = places[rank][row, piece.queries], places[other][row, piece.keys]
            block = torch.ones(len(queries), len(keys), dtype=torch.bool)
            if piece.in_band:
                whole = band(BLOCK_QUERIES, window + BLOCK_QUERIES, window, torch.device("cpu"))
                block = whole[: len(queries), : len(keys)]
                assert queries[0] - keys[0] == window and len(queries) <= BLOCK_QUERIES
            block = block.tril() if piece.is_causal else block
            assert block.any(1).all() and (not piece.adds or rank == other)
            counts[row, queries[:, None], keys] += block.to(torch.int8)
            alone[row, piece.queries] += not piece.adds
            assert alone[row, piece.queries].all(), "a piece that adds comes later"
        assert rank != other or (alone == 1).all()
    seen = (ids_BS[:, :, None] == ids_BS[:, None, :]).tril()
    assert torch.equal(counts, (seen & (all_places[:, None] - all_places <= window)).to(torch.int8))


def test_own_tokens_follow_the_borders() -> None:
    x_BS = torch.arange(32).view(2, 16) * 10
    for rank in range(2):
        cp, borders = axis(2, rank), (0, 5, 16, 17, 32)
        places = places_of(borders, 16, cp)
        assert torch.equal(own_tokens(x_BS, cp, borders=borders), x_BS.gather(1, places))
