"""Make random bytes by a counter: Philox 4x32 in ten rounds (Salmon et al., SC 2011).

Every byte follows from a key and from the place of its element, so that whoever has a part of a
tensor makes the bytes of that part without the others.
"""

# T rows   N columns   W blocks of 16 columns

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from fp8_numerics.kernels.compile import library_for

WIDTH = 16
"""The columns that the 16 bytes of one counter belong to."""
ROUNDS = 10
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF

Key = tuple[int, int]
"""Two numbers of 32 bits."""


class Rows(NamedTuple):
    """Say where the rows of a matrix lie: each at a position of a sample, both int64 [T]."""

    samples: torch.Tensor
    positions: torch.Tensor

    def take(self, index_R: torch.Tensor) -> Rows:
        """Return the places of some of the rows, by their numbers (int64 [R]), in that order."""
        return Rows(self.samples[index_R], self.positions[index_R])


class Counters(NamedTuple):
    """Say which bytes a kernel is to make for a matrix whose columns are whole blocks of `WIDTH`.

    `blocks` are the numbers of the blocks of columns, int64 [W], on the device of `rows`.
    """

    key: Key
    rows: Rows
    blocks: torch.Tensor


def random_bytes(key: Key, rows: Rows, columns: Sequence[range]) -> torch.Tensor:
    """Return a random byte (uint8) for each element, [T, N], on the device of `rows`.

    `columns` are the numbers of the columns, without gaps in each range. A sample has up to 64
    bits, a position up to 32, and a column up to 36.
    """
    lib = library_for(rows.samples)
    if lib is not None:
        return _in_c(lib, key, rows, columns)
    parts = [_of_range(key, rows, each) for each in columns]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _in_c(lib: Any, key: Key, rows: Rows, columns: Sequence[range]) -> torch.Tensor:
    samples, positions = rows.samples.contiguous(), rows.positions.contiguous()
    ranges = (ctypes.c_int64 * (2 * len(columns)))(*chain(*((r.start, r.stop) for r in columns)))
    num_columns = sum(map(len, columns))
    out = samples.new_empty(len(samples), num_columns, dtype=torch.uint8)
    lib.megafp8_draw(
        samples.data_ptr(),
        positions.data_ptr(),
        len(samples),
        ranges,
        len(columns),
        num_columns,
        (ctypes.c_uint32 * 2)(*key),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _of_range(key: Key, rows: Rows, columns: range) -> torch.Tensor:
    """Return the bytes of columns that follow each other, in torch operations."""
    first, last = columns.start // WIDTH, -(-columns.stop // WIDTH)
    blocks_W = torch.arange(first, last, device=rows.samples.device)
    size = len(rows.samples), last - first
    words = [
        blocks_W.expand(size),
        rows.positions[:, None].expand(size),
        (rows.samples[:, None] & _WORD).expand(size),
        (rows.samples[:, None] >> 32 & _WORD).expand(size),
    ]
    words_TW4 = torch.stack(philox4x32(words, key), -1)
    shifts = torch.arange(0, 32, 8, device=words_TW4.device)  # a list's copy would be waited for
    bytes_TN = (words_TW4[..., None] >> shifts & 255).to(torch.uint8).flatten(1)
    begin = columns.start - first * WIDTH
    return bytes_TN[:, begin : begin + len(columns)].contiguous()


def philox4x32(words: Sequence[torch.Tensor], key: Key) -> list[torch.Tensor]:
    """Return four random words for each four words of a counter; all are int64 of 32 bits."""
    a, b, c, d = words
    k0, k1 = key
    for _ in range(ROUNDS):
        p, q = a * _FACTORS[0], c * _FACTORS[1]  # they wrap, which leaves their bits as they are
        a, b = (q >> 32 & _WORD) ^ b ^ k0, q & _WORD
        c, d = (p >> 32 & _WORD) ^ d ^ k1, p & _WORD
        k0, k1 = (k0 + _STEPS[0]) & _WORD, (k1 + _STEPS[1]) & _WORD
    return [a, b, c, d]
