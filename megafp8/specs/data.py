"""Where the text comes from and how it becomes samples."""

from __future__ import annotations

from dataclasses import dataclass

BUILTIN_CORPUS = "builtin"


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """A byte-level BPE trained on the corpus itself (`library="builtin"`)."""

    library: str
    vocab_size: int  # of the tokenizer, before padding


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """`prefix` is `builtin` or the path of an indexed dataset without `.bin`/`.idx`."""

    prefix: str
    cache_dir: str | None  # None: the user's cache directory
    splits: tuple[float, ...]  # relative sizes of train, validation, test
    seq_length: int  # tokens per sample
    tokenizer: TokenizerSpec
    seed: int
