"""Write the documents of a microbatch in the two ways: a number for each token, and borders."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megafp8.data.loader import Microbatch


def borders_of(ids_BS: NDArray[np.integer]) -> NDArray[np.int32]:
    """Where documents begin among all tokens, then the number of tokens."""
    seq = ids_BS.shape[1]
    flat = ids_BS.flatten().tolist()
    begins = [i for i, at in enumerate(flat) if i % seq == 0 or at != flat[i - 1]]
    return np.array([*begins, len(flat)], np.int32)


def ids_of(batch: Microbatch) -> NDArray[np.int64]:
    """The number of each token's document in its sample, from 0 up: [B, S]."""
    assert batch.cu_seqlens_N1 is not None
    begins = np.zeros(batch.tokens_BS.size, int)
    begins[batch.cu_seqlens_N1[:-1]] = 1
    ids = begins.reshape(batch.tokens_BS.shape).cumsum(axis=1)
    return ids - 1
