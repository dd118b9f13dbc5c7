"""Make random tokens instead of reading data, for jobs that measure time or memory.

NeMo has this under `model.data.data_impl: mock`. A token of a sample is drawn from the whole
vocabulary of the tokenizer, each with the same probability, and depends on the seed, the split, the
sample's number and its place alone. Nothing can be learned from such data but the vocabulary's
size: the loss approaches its logarithm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megafp8.data.builtin import BUILTIN, open_builtin, prepared_folder
from megafp8.data.index_maps import random_words
from megafp8.data.loader import DocumentRules
from megafp8.data.named_tokenizers import configured_tokenizer
from megafp8.data.prepare import document_rules
from megafp8.data.tokenize import Tokenizer
from megafp8.specs import DataSpec

EPOCH_SAMPLES = 1 << 40  # no run reads a sample twice
VALIDATION_SAMPLES = 1 << 16
FINAL_SAMPLES = 64  # samples of a run's last validation
_TRAIN, _VALIDATION = 1, 2


@dataclass(frozen=True)
class MockSamples:
    """Draw samples of random tokens; it is a `SampleSource` and a `FiniteSource`."""

    num_samples: int
    seq_length: int
    vocab_size: int
    seed: int
    split: int

    @property
    def num_samples_per_epoch(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        words = random_words(self.seq_length + 1, self.seed, self.split, index)
        return (words % np.uint64(self.vocab_size)).astype(np.int64)


@dataclass(frozen=True)
class MockData:
    """Hold what training and evaluation need to know about random tokens.

    It has the attributes of `megafp8.data.prepare.PreparedData` that a run reads.
    """

    train: MockSamples
    validation: MockSamples
    periodic_validation: MockSamples
    tokenizer: Tokenizer
    fingerprint: str
    rules: DocumentRules | None

    @property
    def vocab_size(self) -> int:
        """Return the tokenizer's vocabulary size, before padding."""
        return self.tokenizer.vocab_size

    @property
    def num_train_tokens(self) -> int:
        """Return the tokens that an epoch of training predicts."""
        return self.train.num_samples * self.train.seq_length

    @property
    def num_validation_tokens(self) -> int:
        """Return the tokens of the validation split."""
        return self.periodic_validation.num_samples * self.train.seq_length

    @property
    def num_final_tokens(self) -> int:
        """Return the tokens that a run's last validation predicts."""
        return self.validation.num_samples * self.train.seq_length

    def validation_tokens(self) -> NDArray[np.int64]:
        """Return the tokens that the last validation predicts, in order."""
        return np.concatenate([self.validation[n][1:] for n in range(self.validation.num_samples)])

    def validation_text(self) -> bytes:
        """Return the bytes of these tokens' numbers, since random tokens are no text."""
        return self.validation_tokens().astype("<u4").tobytes()

    def validation_prompt(self, num_tokens: int) -> list[int]:
        """Return the first tokens of the first validation sample."""
        return [int(token) for token in self.validation[0][:num_tokens]]

    def train_token_counts(self) -> NDArray[np.int64]:
        """Return equal counts for all tokens, [vocab_size], as they are drawn."""
        return np.ones(self.vocab_size, np.int64)


def open_mock(spec: DataSpec, notify: Callable[[str], None]) -> MockData:
    """Return random tokens of the vocabulary that the settings name.

    Args:
        spec: The tokenizer, the seed and the length of samples.
        notify: Receives a line about each thing that takes time, or that the user should know.

    Raises:
        DataError: The tokenizer cannot be read.
        ConfigError: The tokenizer lacks a setting.
    """
    tokenizer = configured_tokenizer(spec.tokenizer)
    if tokenizer is None:
        cache = prepared_folder(spec.cache_dir)
        tokenizer = open_builtin(BUILTIN, spec.tokenizer.vocab_size, cache, notify).tokenizer
    vocab_size = tokenizer.vocab_size
    notify(f"data: mock: random tokens of a vocabulary of {vocab_size}; no data are read")

    def samples(count: int, split: int) -> MockSamples:
        return MockSamples(count, spec.seq_length, vocab_size, spec.seed, split)

    words = f"mock {tokenizer.digest} {spec.seed} {spec.seq_length}"
    return MockData(
        train=samples(EPOCH_SAMPLES, _TRAIN),
        validation=samples(FINAL_SAMPLES, _VALIDATION),
        periodic_validation=samples(VALIDATION_SAMPLES, _VALIDATION),
        tokenizer=tokenizer,
        fingerprint=hashlib.sha256(words.encode()).hexdigest(),
        rules=document_rules(spec, tokenizer.eod_id),
    )
