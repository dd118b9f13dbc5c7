"""Where the text comes from and how it becomes samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BUILTIN_CORPUS = "builtin"


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Which tokenizer. `builtin`: the one that comes with the data, trained on the built-in corpus.

    The others name one themselves: `huggingface` by `type`, `sentencepiece` and `tiktoken` by
    `model`, `megatron` by `vocab_file` and `merge_file`. It must be that of the data.
    """

    library: str
    vocab_size: int  # of the built-in tokenizer, before padding
    type: str | None = None
    model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None


@dataclass(frozen=True)
class Weighted:
    """One dataset of a blend. Only the proportions of weights count; they are exact decimals."""

    weight: str
    prefix: str


@dataclass(frozen=True, kw_only=True)
class SeparateSplits:
    """Datasets given apart for each split: nothing is split."""

    train: tuple[Weighted, ...]
    validation: tuple[Weighted, ...]
    test: tuple[Weighted, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """`prefix` is `builtin`, the path of an indexed dataset without `.bin`/`.idx`, or several."""

    prefix: str | tuple[Weighted, ...] | SeparateSplits
    cache_dir: str | None  # None: the user's cache directory
    splits: tuple[float, ...]  # relative sizes of train, validation, test
    seq_length: int  # tokens per sample
    tokenizer: TokenizerSpec
    seed: int
    shuffle_documents: bool = True
    dataloader_type: Literal["single", "cyclic"] = "single"
    num_workers: int = 1  # threads that read ahead; 0: samples are read where they are needed
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    validation_drop_last: bool = True
