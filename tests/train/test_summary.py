"""Baselines against plain arithmetic and against the `xz` program."""

from __future__ import annotations

import math
import shutil
import subprocess

import numpy as np
import pytest

from megafp8.train.report.summary import unigram_bits_per_byte, xz_bits_per_byte


@pytest.mark.parametrize("seed", range(4))
def test_unigram_equals_its_plain_specification(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 40))
    train = rng.integers(0, max(vocab - 3, 1), 200)  # the last tokens are never seen
    validation = rng.integers(0, vocab, 100)
    bits = 0.0
    for token in validation.tolist():
        seen = sum(1 for other in train.tolist() if other == token)
        bits -= math.log2((seen + 1) / (len(train) + vocab))
    got = unigram_bits_per_byte(np.bincount(train, minlength=vocab), validation, 333, vocab)
    assert got == pytest.approx(bits / 333, rel=1e-12)


def test_unigram_of_equal_counts_is_the_size_of_the_alphabet() -> None:
    counts = np.full(256, 10)
    assert unigram_bits_per_byte(counts, np.arange(256), 256, 256) == pytest.approx(8.0)


def test_xz_equals_the_program() -> None:
    text = "".join(f"line {i * i} of some text\n" for i in range(5000)).encode()
    got = xz_bits_per_byte(text)
    if got is None:
        pytest.skip("this Python has no lzma")
    assert 0 < got < 8
    if shutil.which("xz") is None:
        pytest.skip("no xz program to compare with")
    out = subprocess.run(["xz", "-9", "-c"], input=text, capture_output=True, check=True).stdout
    # Newer programs compress in threads by default, which adds a few bytes of block headers.
    assert abs(got * len(text) / 8 - len(out)) <= 32
