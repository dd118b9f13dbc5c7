"""Some documents for all, where all are too many to read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

VALIDATION_TOKENS = 1 << 22  # that a run's last validation reads at most, about 16 MB of text
COUNTED_TOKENS = 1 << 26  # of the training documents, for what a unigram model knows


def excerpt(lengths: NDArray[np.integer], num_tokens: int, limit: int) -> NDArray[np.int64]:
    """Places of documents, evenly spread, with about `limit` of `num_tokens` tokens.

    All of them where that is no more. Never none, so one huge document may be more than `limit`.

    Args:
        lengths: Tokens of each document.
        num_tokens: Of all datasets together; this one gets its share of `limit`.
        limit: For all datasets together.
    """
    if num_tokens <= limit:
        return np.arange(len(lengths))
    chosen = np.arange(0, len(lengths), -(-num_tokens // limit))
    share = int(lengths.sum(dtype=np.int64)) * limit // num_tokens
    fits = int(np.searchsorted(lengths[chosen].cumsum(dtype=np.int64), share, side="right"))
    return chosen[: max(1, fits)]
