"""Find the blocks of scores that attention computes within documents, and within windows.

A microbatch has whole rows of documents, one after the other. Of the scores of a row, only the
triangles of the documents are seen by any query. A block is a document's triangle. Short documents
that follow each other share a block with a mask, since a call of a kernel costs more than the
scores that it leaves out. If scores need a tensor of their own (biases, dropout), a document is cut
into rows of queries, so that no tensor grows with the square of its length.

In a window a query sees so many tokens before its own, and no earlier ones. What is left of a
document's triangle is a triangle at its start and then a band, which is cut into rows of queries,
each with the keys that any of them sees. All rows of a band have one mask, and the last row a part
of it. Without documents a row of the microbatch is one document.
"""

# B batch  S sequence  N documents of the microbatch  Q queries of a block  K its keys  W window

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megafp8.specs.model import BLOCK_QUERIES, twice_seen

SHORT = 64
"""Consecutive documents share a block up to so many tokens: a kernel's call then costs about as
much per token as with fewer, and more scores than these would be computed for nothing."""


@dataclass(frozen=True)
class Area:
    """Describe one block: some queries and keys of the row `row`.

    If `is_causal`, queries and keys are the same tokens of one document, so that the i-th query
    sees the first i + 1 keys. Otherwise `Documents.seen` says which key is seen. If `in_band`, the
    keys begin a whole window before the queries, in the same document.
    """

    row: int
    first_key: int
    first_query: int
    stop: int
    is_causal: bool
    in_band: bool = False

    @property
    def queries(self) -> slice:
        """Return which tokens of the row are the queries."""
        return slice(self.first_query, self.stop)

    @property
    def keys(self) -> slice:
        """Return which tokens of the row are the keys; the last one is the last query too."""
        return slice(self.first_key, self.stop)


@dataclass(frozen=True)
class Documents:
    """Say where the documents of a microbatch begin.

    Attributes:
        cu_seqlens_N1: The place of each document's first token among the B * S tokens of the
            microbatch, then B * S: int32, on the CPU. Every row begins with a document.
        seq: The tokens S of a whole row, which ranks may share.
        device: Where attention runs.
        cuts_queries: Whether the scores of a block need a tensor of their own.
        window: The earlier tokens of its document that a query sees; None for all.
    """

    cu_seqlens_N1: torch.Tensor  # noqa: N815 (shape suffix)
    seq: int
    device: torch.device
    cuts_queries: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        assert self.cu_seqlens_N1.device.type == "cpu", "the blocks are planned on the host"
        starts = set(self.borders)
        batch, rest = divmod(self.borders[-1], self.seq)
        assert rest == 0 and starts.issuperset(range(0, batch * self.seq, self.seq)), (
            "each row begins with a document"
        )

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Return `cu_seqlens_N1` as numbers."""
        return tuple(self.cu_seqlens_N1.tolist())

    @cached_property
    def cu_seqlens_on_device(self) -> torch.Tensor:
        """Return `cu_seqlens_N1` on the device where attention runs.

        Those of whole rows are made there, since a CUDA graph records no copy from the host.
        """
        if self.are_whole_rows and self.device.type != "meta":
            tokens = self.borders[-1] + 1
            return torch.arange(0, tokens, self.seq, dtype=torch.int32, device=self.device)
        return self.cu_seqlens_N1.to(self.device, non_blocking=True)

    @cached_property
    def lengths(self) -> list[int]:
        """Return the tokens of each document."""
        return [end - start for start, end in zip(self.borders, self.borders[1:], strict=False)]

    @property
    def are_whole_rows(self) -> bool:
        """Whether each row is one document, so that plain causal attention is the same."""
        return len(self.lengths) * self.seq == self.borders[-1]

    @property
    def num_seen(self) -> int:
        """Return twice the scores that queries see, counting half of each on the diagonal."""
        return sum(twice_seen(length, self.window) for length in self.lengths)

    @property
    def hides_earlier(self) -> bool:
        """Whether the window hides a token of the same document from some query."""
        return self.window is not None and self.window < max(self.lengths) - 1

    @property
    def shares_keys(self) -> bool:
        """Whether several blocks may have the same keys."""
        return self.cuts_queries or self.hides_earlier

    @cached_property
    def areas(self) -> tuple[Area, ...]:
        """Return the blocks; every query is in exactly one."""
        return tuple(self._areas())

    @cached_property
    def firsts_BS(self) -> torch.Tensor:  # noqa: N802 (shape suffix)
        """Return the place in its row of the first token of each token's document, int64 [B, S].

        Those of whole rows are made on the device, as `cu_seqlens_on_device`.
        """
        if self.are_whole_rows:
            shape = len(self.lengths), self.seq
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        lengths = torch.tensor(self.lengths, device="cpu")  # not a dry run's default device
        firsts = self.cu_seqlens_N1[:-1].long() % self.seq
        firsts_BS = firsts.repeat_interleave(lengths).view(-1, self.seq)
        return firsts_BS.to(self.device, non_blocking=True)

    def seen(self, area: Area) -> torch.Tensor:
        """Return which keys of a block each of its queries sees: boolean [Q, K]."""
        if area.in_band:
            num_queries, num_keys = area.stop - area.first_query, area.stop - area.first_key
            return self.band_QK[:num_queries, :num_keys]
        if area in self._masks:
            return self._masks[area]
        queries, keys = self.places(area)
        firsts = self.firsts_BS[area.row, area.queries]
        if self.window is not None:
            firsts = torch.maximum(firsts, queries - self.window)
        seen = (keys <= queries[:, None]) & (keys >= firsts[:, None])
        if not self.cuts_queries:  # the masks are then small ones, of short documents alone
            self._masks[area] = seen
        return seen

    def places(self, area: Area) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of a block's queries [Q] and keys [K] in their row."""
        queries, keys = (
            torch.arange(part.start, part.stop, device=self.device)
            for part in (area.queries, area.keys)
        )
        return queries, keys

    @cached_property
    def band_QK(self) -> torch.Tensor:  # noqa: N802 (shape suffix)
        """Return which of W + Q keys each of the Q last tokens of these sees, for any row."""
        assert self.window is not None
        shape = (BLOCK_QUERIES, self.window + BLOCK_QUERIES)
        return band(*shape, self.window, self.device)

    @cached_property
    def _masks(self) -> dict[Area, torch.Tensor]:
        return {}

    def _areas(self) -> Iterator[Area]:
        """Yield the blocks in the order of their queries."""
        for first, last in _groups(self.borders, self.seq):
            row, start = divmod(self.borders[first], self.seq)
            stop = start + self.borders[last] - self.borders[first]
            is_one = last - first == 1
            if not is_one or not (self.cuts_queries or self._is_longer(stop - start)):
                is_seen = is_one and not self._is_longer(stop - start)
                yield Area(row, start, start, stop, is_causal=is_seen)
                continue
            yield from self._rows_of(row, start, stop)

    def _is_longer(self, length: int) -> bool:
        """Whether a document of this length has a token that a later one does not see."""
        return self.window is not None and length > self.window + 1

    def _rows_of(self, row: int, start: int, stop: int) -> Iterator[Area]:
        """Yield the blocks of one document that is cut into rows of queries."""
        query = start
        while query < stop:
            length = BLOCK_QUERIES
            if query == start and self.window is not None and not self.cuts_queries:
                length = self.window + 1  # the triangle that no window touches
            end = min(query + length, stop)
            is_causal = query == start and not self._is_longer(end - start)
            in_band = self.window is not None and not is_causal and query - self.window >= start
            first_key = query - (self.window or 0) if in_band else start
            yield Area(row, first_key, query, end, is_causal, in_band)
            query = end


def band(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return which of consecutive keys each query sees, of the last ones: boolean [Q, K].

    Args:
        num_queries: The number of queries Q, which are the last Q of the keys' tokens.
        num_keys: The number of keys K.
        window: The earlier tokens that a query sees; None for all.
        device: Where the mask is made.
    """
    keys = torch.arange(num_keys, device=device)
    queries = keys[num_keys - num_queries :, None]
    seen = keys <= queries
    return seen if window is None else seen & (keys >= queries - window)


def _groups(borders: Sequence[int], seq: int) -> Iterator[tuple[int, int]]:
    """Yield the documents (first, last + 1) of each block: one, or several short ones of a row."""
    first, count = 0, len(borders) - 1
    while first < count:
        row_end = borders[first] - borders[first] % seq + seq
        limit = min(borders[first] + SHORT, row_end)
        last = first + 1
        while last < count and borders[last + 1] <= limit:
            last += 1
        yield first, last
        first = last


def document_ids(cu_seqlens_N1: torch.Tensor, seq: int) -> torch.Tensor:
    """Return the number of each token's document in the microbatch, int32 [B, S], on the CPU."""
    numbers = torch.arange(len(cu_seqlens_N1) - 1, dtype=torch.int32)
    return numbers.repeat_interleave(cu_seqlens_N1.diff()).view(-1, seq)
