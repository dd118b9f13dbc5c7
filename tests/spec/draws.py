"""Specify the random bytes of stochastic rounding, one element at a time, without torch.

The generator is Philox 4x32 in ten rounds (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011). Its key follows from all that is alike for the elements of one cast, its counter
from the place of the element.
"""

from __future__ import annotations

from hashlib import sha256

WORD = 2**32


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Return four words for four words of a counter."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q // WORD ^ b ^ k, q % WORD, p // WORD ^ d ^ m, p % WORD
        k, m = (k + 0x9E3779B9) % WORD, (m + 0xBB67AE85) % WORD
    return a, b, c, d


def key_of(
    seed: int, step: int, tensor: str, use: int | None = 1, call: int = 1
) -> tuple[int, int]:
    """Return the key of a cast.

    `tensor` is `linear.role.product`, where the product is named by the dim that it sums over:
    `last` or `first`. `use` counts the casts of the tensor in a microbatch from 1 on, and is None
    for a weight. `call` counts the draws of one cast.
    """
    words = [seed, step, tensor, call] if use is None else [seed, step, tensor, use, call]
    digest = sha256(" ".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def byte_of(key: tuple[int, int], sample: int, position: int, feature: int) -> int:
    """Return the byte of an element; of a weight the position is its row, and the sample 0."""
    counter = (feature // 16, position, sample % WORD, sample // WORD)
    word = philox(counter, key)[feature % 16 // 4]
    return word >> 8 * (feature % 4) & 255
