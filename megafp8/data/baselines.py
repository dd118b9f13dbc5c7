"""Compute what a model's bits per byte are compared with, on the same validation text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def unigram_bits_per_byte(
    train_counts_V: NDArray[np.int64],
    validation_tokens: NDArray[np.int64],
    num_bytes: int,
    vocab: int,
) -> float:
    """Return the bits per byte of a model that knows only how often each token occurs.

    A token has probability (count + 1) / (all counts + vocab). This is add-one smoothing: a token
    that training never saw costs many bits, not infinitely many.

    Args:
        train_counts_V: How often each token occurs in the training text, [vocab].
        validation_tokens: The tokens to predict, including ends of documents, as for the model.
        num_bytes: The bytes of the validation text.
        vocab: The number of tokens of the vocabulary, before padding.
    """
    assert train_counts_V.shape == (vocab,), f"{train_counts_V.shape} counts of {vocab} tokens"
    bits_V = np.log2(float(train_counts_V.sum()) + vocab) - np.log2(train_counts_V + 1.0)
    used_V = np.bincount(validation_tokens, minlength=vocab)
    return float(bits_V @ used_V) / num_bytes


def xz_bits_per_byte(validation_text: bytes) -> float | None:
    """Return the bits per byte of `xz -9` on the text alone; xz has not seen the training text.

    The result is None if this Python was built without liblzma.
    """
    try:
        import lzma
    except ImportError:
        return None
    compressed = lzma.compress(validation_text, format=lzma.FORMAT_XZ, preset=9)
    return 8 * len(compressed) / len(validation_text)
