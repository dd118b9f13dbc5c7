"""Cut the sequences of a microbatch over context-parallel ranks, whole or document by document.

A sequence is cut into 2n chunks for n ranks, and rank r has chunks r and 2n-1-r, in this order. If
documents do not see each other, each document is cut so, as Megatron-LM and Transformer Engine cut
packed sequences, so that all ranks compute the same amount of every document. They pad documents to
a multiple of 2n tokens. Here lengths stay as they are: the tokens that are left over make chunks
one token longer, of one rank after the other throughout a row, so that all ranks have the same
number of tokens in the end. A document whose length is a multiple of 2n is cut as theirs.

With a window, each chunk of queries has pieces of its own with each chunk of keys. The queries that
see all of the keys before them are one piece, and those further behind are cut into rows of
queries, each with the keys that any of them sees. What no query sees is in no piece.
"""

# B batch  S tokens of a whole row  N documents

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from megafp8.parallel.collectives import Axis
from megafp8.specs.model import BLOCK_QUERIES


class Share(NamedTuple):
    """Describe one rank's tokens of a document: two chunks of it, the earlier one first."""

    row: int
    local: int  # the place of the first token among the rank's tokens of the row
    first: range  # the places of the earlier chunk's tokens in the whole row
    second: range

    @property
    def middle(self) -> int:
        """Return where the second chunk begins among the rank's tokens of the row."""
        return self.local + len(self.first)

    @property
    def stop(self) -> int:
        """Return where the document ends among the rank's tokens of the row."""
        return self.middle + len(self.second)


class ScorePiece(NamedTuple):
    """Describe scores that a rank computes at a turn of the ring: which rows, queries and keys.

    If `in_band`, the keys begin a whole window before the queries. If it `adds`, an earlier piece
    of the same turn has the same queries.
    """

    rows: slice
    queries: slice
    keys: slice
    is_causal: bool = False
    in_band: bool = False
    adds: bool = False


@lru_cache(maxsize=8)
def shares(borders: tuple[int, ...], seq: int, size: int) -> tuple[tuple[Share, ...], ...]:
    """Return for each of `size` ranks its share of each document, some of them empty.

    `borders` are `Documents.borders`; `seq` is a multiple of 2 `size`.
    """
    assert seq % (2 * size) == 0, "the settings refuse other lengths"
    shares_of_rank: list[list[Share]] = [[] for _ in range(size)]
    local, turn = [0] * size, 0
    for start, stop in pairwise(borders):
        row, begin = divmod(start, seq)
        if begin == 0:
            local, turn = [0] * size, 0
        chunks = _chunks(begin, stop - start, size, turn)
        turn += (stop - start) % (2 * size)
        for rank in range(size):
            share = Share(row, local[rank], chunks[rank], chunks[-1 - rank])
            shares_of_rank[rank].append(share)
            local[rank] = share.stop
    return tuple(map(tuple, shares_of_rank))


def _chunks(begin: int, length: int, size: int, turn: int) -> list[range]:
    """Return the 2 `size` chunks of a document; left-over tokens go to rank `turn` and on."""
    equal_part, left_over = divmod(length, 2 * size)
    lengths = [equal_part] * (2 * size)
    for number in range(left_over):
        rank = (turn + number) % size
        lengths[rank if number < size else -1 - rank] += 1
    places = [begin]
    for chunk_length in lengths:
        places.append(places[-1] + chunk_length)
    return [range(first, last) for first, last in pairwise(places)]


def places_of(borders: tuple[int, ...], seq: int, cp: Axis) -> torch.Tensor:
    """Return the places in whole rows of this rank's tokens, int64 [B, S/cp], on the CPU."""
    of_rank = shares(borders, seq, cp.size)[cp.rank]
    places = [place for share in of_rank for part in (share.first, share.second) for place in part]
    return torch.tensor(places).view(-1, seq // cp.size)


def pieces(own: Sequence[Share], theirs: Sequence[Share], *, from_before: bool) -> list[ScorePiece]:
    """Return what a rank computes with the keys of another rank, which has shares `theirs`.

    The keys of an earlier rank (`from_before`) have a first chunk that all queries see. The second
    chunk of queries sees all keys of a later rank.
    """
    score_pieces = []
    for mine, other in zip(own, theirs, strict=True):
        queries = slice(mine.local if from_before else mine.middle, mine.stop)
        keys = slice(other.local, other.middle if from_before else other.stop)
        if queries.start < queries.stop and keys.start < keys.stop:
            score_pieces.append(ScorePiece(slice(mine.row, mine.row + 1), queries, keys))
    return score_pieces


def own_pieces(own: Sequence[Share]) -> list[ScorePiece]:
    """Return what a rank computes with its own keys: a triangle of each document."""
    return [
        ScorePiece(slice(s.row, s.row + 1), slice(s.local, s.stop), slice(s.local, s.stop), True)
        for s in own
        if s.local < s.stop
    ]


def window_pieces(own: Sequence[Share], theirs: Sequence[Share], window: int) -> list[ScorePiece]:
    """Return what a rank computes with the keys of a rank, maybe itself, which has shares `theirs`.

    A query sees `window` tokens before its own. Every piece has a key for each of its queries, and
    of a rank's pieces with its own keys, those that add come last.
    """
    score_pieces = []
    for mine, other in zip(own, theirs, strict=True):
        queries = ((mine.local, mine.first), (mine.middle, mine.second))
        keys = ((other.local, other.first), (other.middle, other.second))
        for q_local, q_places in queries:
            for k_local, k_places in keys:
                for piece in _between(q_places, k_places, window):
                    score_pieces.append(
                        piece._replace(
                            rows=slice(mine.row, mine.row + 1),
                            queries=_moved(piece.queries, q_local - q_places.start),
                            keys=_moved(piece.keys, k_local - k_places.start),
                            adds=mine is other and q_places != k_places,
                        )
                    )
    return sorted(score_pieces, key=lambda piece: piece.adds)


def _between(queries: range, keys: range, window: int) -> Iterator[ScorePiece]:
    """Yield the pieces of two chunks, by places in the whole row; both are the same or disjoint."""
    if not queries or not keys or keys.start > queries.start:
        return
    is_own = keys == queries
    stop = min(queries.stop, keys.stop + window)
    all_before = min(stop, keys.start + window + 1)  # queries up to here see the first key
    begin = queries.start
    while begin < stop:
        in_band = begin >= all_before
        end = min(begin + BLOCK_QUERIES, stop) if in_band else all_before
        seen = slice(begin - window if in_band else keys.start, min(keys.stop, end))
        yield ScorePiece(slice(0), slice(begin, end), seen, is_own and not in_band, in_band)
        begin = end


def _moved(places: slice, by: int) -> slice:
    return slice(places.start + by, places.stop + by)
