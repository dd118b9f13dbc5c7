"""Choose some documents where all are too many to read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

VALIDATION_TOKENS = 1 << 22  # limit of a run's last validation, about 16 MB of text
COUNTED_TOKENS = 1 << 26  # limit of the tokens that the unigram model counts


def excerpt(lengths: NDArray[np.integer], num_tokens: int, limit: int) -> NDArray[np.int64]:
    """Return the places of evenly spread documents with about `limit` of `num_tokens` tokens.

    All documents are returned if they have no more than `limit` tokens. At least one document is
    returned, so a single huge document may exceed `limit`.

    Args:
        lengths: The number of tokens of each document.
        num_tokens: The tokens of all datasets together; this dataset gets its share of `limit`.
        limit: The number of tokens for all datasets together.
    """
    if num_tokens <= limit:
        return np.arange(len(lengths))
    chosen = np.arange(0, len(lengths), -(-num_tokens // limit))
    share = int(lengths.sum(dtype=np.int64)) * limit // num_tokens
    fits = int(np.searchsorted(lengths[chosen].cumsum(dtype=np.int64), share, side="right"))
    return chosen[: max(1, fits)]
