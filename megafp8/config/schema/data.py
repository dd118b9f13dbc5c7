"""`model.tokenizer` and `model.data`: how text becomes samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from megafp8.config.keys import PATH, Valid, at_least, between, key, needs, one_of, or_null
from megafp8.config.values import (
    PREFIX_TEXT,
    parse_data_prefix,
    parse_splits,
    plain_data_prefix,
    spell_splits,
    spell_tokenizer_type,
)


def _is_splits(value: object) -> bool:
    splits = parse_splits(value)
    return splits is not None and len(splits) == 3 and min(splits[:2]) > 0 and splits[2] >= 0


@dataclass
class Tokenizer:
    """How text becomes tokens."""

    library: str = key(
        "builtin",
        "`builtin`: the one recorded with the data; a byte-level BPE for the built-in corpus. The "
        "others name one, which must be that of the data: `huggingface` by `type`, "
        "`sentencepiece` and `tiktoken` by `model`, `megatron` by `vocab_file` and `merge_file`.",
        nemo="megatron",
        kind="data",
        valid=one_of("builtin", "huggingface", "megatron", "sentencepiece", "tiktoken"),
    )
    type: str | None = key(
        None,
        "With `huggingface`: a name on the Hub or a folder. With `megatron`: GPT2BPETokenizer.",
        nemo="GPT2BPETokenizer",
        kind="data",
        needs=needs("model.tokenizer.library", "huggingface", "megatron"),
        spelling=spell_tokenizer_type,
    )
    model: str | None = key(
        None,
        "With `sentencepiece`: the `.model` file. With `tiktoken`: a file of ranks, or the name of "
        "one of its encodings.",
        nemo=None,
        kind="data",
        valid=or_null(PATH),
        needs=needs("model.tokenizer.library", "sentencepiece", "tiktoken"),
    )
    vocab_file: str | None = key(
        None,
        "With `megatron`: GPT-2's `vocab.json`.",
        nemo=None,
        kind="data",
        valid=or_null(PATH),
        needs=needs("model.tokenizer.library", "megatron"),
    )
    merge_file: str | None = key(
        None,
        "With `megatron`: GPT-2's `merges.txt`.",
        nemo=None,
        kind="data",
        valid=or_null(PATH),
        needs=needs("model.tokenizer.library", "megatron"),
    )
    vocab_size: int = key(
        4096,
        "Tokens of the built-in corpus's tokenizer, before padding; 256 of them are the bytes, one "
        "ends a document.",
        kind="data",
        valid=at_least(257),
    )


@dataclass
class Data:
    """Where the text comes from and how it becomes samples."""

    data_prefix: Any = key(
        MISSING,
        "`builtin` for the corpus that comes along; or an indexed dataset's path without "
        "`.bin`/`.idx`; or a blend `[0.3, path, 0.7, path]`, whose weights hold in training to "
        "within one sample at every point; or `{train: [...], validation: [...], test: [...]}`, "
        "which leaves `splits_string` unused.",
        nemo=MISSING,
        kind="data",
        valid=Valid(PREFIX_TEXT, lambda value: parse_data_prefix(value) is not None),
        spelling=plain_data_prefix,
    )
    index_mapping_dir: str | None = key(
        None,
        "Where index maps and the built-in dataset are kept; null: the user's cache.",
        nemo=None,
        kind="layout",
        valid=or_null(PATH),
    )
    splits_string: Any = key(
        "900,50,50",
        "Relative sizes of train, validation and test data. Quote it on the command line: "
        "`'model.data.splits_string=\"900,50,50\"'`.",
        nemo="900,50,50",
        kind="data",
        valid=Valid(
            "three numbers, the first two above 0 and the third at least 0, as "
            '"900,50,50" or [900,50,50]',
            _is_splits,
        ),
        spelling=spell_splits,
    )
    seq_length: int = key(
        "${model.encoder_seq_length}",
        "Tokens of one sample; the same as `model.encoder_seq_length`.",
        nemo="${model.encoder_seq_length}",
        kind="data",
        valid=at_least(1),
    )
    num_workers: int = key(
        2,
        "Threads that read samples ahead; 0 reads them where they are needed.",
        nemo=2,
        kind="layout",
        valid=between(0, 64),
    )
    dataloader_type: str = key(
        "single",
        "`single`: each epoch cuts its own samples out of its own order of documents. `cyclic`: "
        "those of the first epoch come again, in another order each epoch.",
        nemo="single",
        kind="data",
        valid=one_of("single", "cyclic"),
    )
    reset_position_ids: bool = key(
        False, "Positions start anew after the end of a document.", nemo=False, kind="data"
    )
    reset_attention_mask: bool = key(
        False, "No attention from one document of a sample to another.", nemo=False, kind="data"
    )
    eod_mask_loss: bool = key(
        False, "Nothing is predicted from the end of a document.", nemo=False, kind="data"
    )
    validation_drop_last: bool = key(
        True,
        "Validation during training takes whole samples and whole global batches only; that at a "
        "run's end takes every token.",
        nemo=True,
        kind="logging",
    )
    shuffle_documents: bool = key(
        True,
        "Shuffle documents before samples are cut from them; the order of samples is shuffled "
        "either way.",
        nemo=True,
        kind="data",
    )
