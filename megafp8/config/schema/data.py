"""Define the keys below `model.tokenizer` and `model.data`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from omegaconf import MISSING

from megafp8.config.data_values import (
    PREFIX_TEXT,
    data_prefix_problem,
    file_list,
    plain_data_prefix,
    prefixes_in,
    spell_files,
)
from megafp8.config.keys import (
    MAX_VOCABULARY,
    PATH,
    Need,
    Valid,
    at_least,
    between,
    both_needs,
    key,
    needs,
    one_of,
    or_null,
)
from megafp8.config.values import are_shares, parse_splits, spell_splits, spell_tokenizer_type
from megafp8.specs.data import BUILTIN_CORPUS, MOCK_DATA

_DATA = "model.data.data_prefix"
_OF_BUILTIN = both_needs(
    Need(
        _DATA,
        f"{_DATA}={MOCK_DATA} or {BUILTIN_CORPUS}",
        lambda v: not {BUILTIN_CORPUS, MOCK_DATA}.isdisjoint(prefixes_in(v[_DATA])),
        "Leave it out: your own data have a tokenizer already, and its vocabulary",
    ),
    needs("model.tokenizer.library", "builtin"),
)

FILES = "model.data.train_ds.file_names"
_READ = Need(_DATA, f"{_DATA} other than {MOCK_DATA}", lambda v: v[_DATA] != MOCK_DATA)
_OF_TEXT = needs(FILES, None, hint="Leave it out: it is about text, and not about examples")
OF_EXAMPLES = Need(FILES, f"{FILES}=FILE.jsonl", lambda v: v[FILES] is not None)

# Makers of the keys of a group, with what most of these keys have in common.
data_key = partial(key, group="data", spec="data.*")
tokenizer_key = partial(data_key, spec="data.tokenizer.*")
finetuning_key = partial(key, group="finetuning", needs=OF_EXAMPLES, spec="data.instructions.*")

_NOT_CHAT = Need(
    "model.data.chat",
    "model.data.chat=null or False",
    lambda v: v["model.data.chat"] is not True,
)
_FILES = Valid(
    "a path, or a list of paths, of .jsonl, .ndjson, .json or .parquet, or of a folder that "
    "datasets saved; hf:NAME is a dataset of the Hub",
    lambda value: value is None or file_list(value) is not None,
)


_PREFIX = Valid(
    PREFIX_TEXT, lambda value: data_prefix_problem(value) is None, why=data_prefix_problem
)


def _is_splits(value: object) -> bool:
    splits = parse_splits(value)
    return splits is not None and splits[0] > 0 and min(splits) >= 0


@dataclass
class TokenizerKeys:
    """Define the keys below `model.tokenizer`: how text becomes tokens."""

    library: str = tokenizer_key(
        "builtin",
        "Which tokenizer is used. `builtin`: the one recorded with the data, or a byte-level BPE "
        "for the built-in corpus. The others name the data's tokenizer: `huggingface` by `type`, "
        "`sentencepiece` and `tiktoken` by `model`, `megatron` by `vocab_file` and `merge_file`.",
        nemo="megatron",
        valid=one_of(
            "builtin",
            "huggingface",
            "megatron",
            "sentencepiece",
            "tiktoken",
            later=("bpe", "bytes"),
            suggestion="Leave it out: data of megafp8 preprocess --tokenizer bpe or bytes bring "
            "their tokenizer along",
        ),
    )
    type: str | None = tokenizer_key(
        None,
        "With `library=huggingface`: a tokenizer's name on the Hub, or its folder. With "
        "`library=megatron`: `GPT2BPETokenizer`.",
        nemo="GPT2BPETokenizer",
        needs=needs("model.tokenizer.library", "huggingface", "megatron"),
        spelling=spell_tokenizer_type,
    )
    model: str | None = tokenizer_key(
        None,
        "With `library=sentencepiece`: the `.model` file. With `library=tiktoken`: a file of "
        "ranks, or the name of an encoding.",
        nemo=None,
        valid=or_null(PATH),
        needs=needs("model.tokenizer.library", "sentencepiece", "tiktoken"),
    )
    vocab_file: str | None = tokenizer_key(
        None,
        "With `library=megatron`: the path of GPT-2's `vocab.json`.",
        nemo=None,
        valid=or_null(PATH),
        needs=needs("model.tokenizer.library", "megatron"),
    )
    merge_file: str | None = tokenizer_key(
        None,
        "With `library=megatron`: the path of GPT-2's `merges.txt`.",
        nemo=None,
        valid=or_null(PATH),
        needs=needs("model.tokenizer.library", "megatron"),
    )
    vocab_size: int = tokenizer_key(
        4096,
        "Number of tokens of the built-in corpus's tokenizer, before padding. 256 of them are the "
        "bytes, and one ends a document.",
        valid=at_least(257, MAX_VOCABULARY),
        needs=_OF_BUILTIN,
    )


@dataclass
class TrainDs:
    """Define the keys below `model.data.train_ds`: questions and answers to fine-tune on."""

    file_names: Any = key(
        None,
        "Questions and answers to fine-tune on: a JSONL file, a JSON list, a Parquet file, or a "
        "list of such files; `hf:NAME:SPLIT` is a dataset of the Hugging Face Hub. `null`: the run "
        "pretrains on `model.data.data_prefix`.",
        group="finetuning",
        valid=or_null(_FILES),
        spelling=spell_files,
    )
    concat_sampling_probabilities: list[float] | None = finetuning_key(
        None,
        "Share of the samples that each file gives. `null`: the files are read as one.",
        valid=Valid("numbers above 0, or null", lambda v: v is None or are_shares(v)),
        spec=None,
    )
    shuffle: bool = finetuning_key(
        True,
        "Shuffle examples before they are packed, and samples in each epoch.",
    )
    label_key: str = finetuning_key(
        "output",
        "Field of an example that holds the answer.",
    )
    prompt_template: str = finetuning_key(
        "{input} {output}",
        "How an example becomes text. `{name}` stands for the example's field of that name, and "
        "the answer's field is at the end. `{{` and `}}` stand for braces, `\\n` for a new "
        "line and `\\t` for a tab.",
        needs=both_needs(OF_EXAMPLES, _NOT_CHAT),
        spec=None,
    )
    add_bos: bool | None = finetuning_key(
        None,
        "Begin each example with the token that begins a text. `null`: as the model's tokenizer "
        "does with a text. An example that begins with the token already gets no second one.",
    )
    add_eos: bool | None = finetuning_key(
        None,
        "End each example with the token that ends a document, which is learned with the answer. "
        "`null` and True: yes, unless the answer ends with it already.",
    )
    truncation_field: str | None = finetuning_key(
        None,
        "Field that is cut if an example is longer than a sequence; `messages` for conversations, "
        "whose ends are cut. `null`: such an example is an error.",
    )
    truncation_method: str = finetuning_key(
        "right",
        "The end of the field that is cut off.",
        valid=one_of("left", "right"),
        needs=Need(
            "model.data.train_ds.truncation_field",
            "model.data.train_ds.truncation_field",
            lambda v: v["model.data.train_ds.truncation_field"] is not None,
        ),
    )
    packed_sequence: bool = finetuning_key(
        True,
        "Put several examples into one sequence, which do not attend to each other. False: each "
        "example has a sequence of its own, padded to the full length.",
        spec="data.instructions.packed",
    )


@dataclass
class ValidationDs:
    """Define the keys below `model.data.validation_ds`: questions and answers to validate on."""

    file_names: Any = finetuning_key(
        None,
        "Questions and answers to validate on, as `model.data.train_ds.file_names`. `null`: "
        "`model.data.splits_string` divides the training files.",
        valid=or_null(_FILES),
        spelling=spell_files,
        spec=None,
    )


@dataclass
class Data:
    """Define the keys below `model.data`: where the text comes from and how it becomes samples."""

    data_prefix: Any = data_key(
        MISSING,
        "The data. `builtin`: the corpus that is included. `mock`: random tokens of the "
        "tokenizer's vocabulary, to measure time and memory. A path: an indexed dataset, without "
        "`.bin` or `.idx`. `[0.3, path, 0.7, path]`: a blend, whose weights hold within one sample "
        "at every point of training; so does the text `0.3 path 0.7 path`, as Megatron writes it. "
        "`{train: [...], validation: [...], test: [...]}`: data for "
        "each split; `splits_string` is then not used. `null`: the run fine-tunes on "
        "`train_ds.file_names`.",
        nemo=MISSING,
        valid=or_null(_PREFIX),
        spelling=plain_data_prefix,
        spec=None,
    )
    index_mapping_dir: str | None = data_key(
        None,
        "Directory of index maps and of the built-in dataset. `null`: the user's cache directory.",
        nemo=None,
        kind="layout",
        spec="data.cache_dir",
        valid=or_null(PATH),
        needs=_OF_TEXT,
    )
    splits_string: Any = data_key(
        "900,50,50",
        "Relative sizes of the training, validation and test splits; those that are left out are "
        "0. Without validation (`100,0,0`) the run needs `trainer.limit_val_batches=0`. Quote the "
        "value on the command line: `'model.data.splits_string=\"900,50,50\"'`.",
        nemo="900,50,50",
        valid=Valid(
            'one to three numbers from 0, the first above 0, as "900,50,50", "99,1" or [900,50,50]',
            _is_splits,
        ),
        needs=_READ,
        spelling=spell_splits,
        spec=None,
    )
    seq_length: int = data_key(
        "${model.encoder_seq_length}",
        "Tokens of one sample, at most `model.encoder_seq_length`. With fewer, the run has "
        "sequences of that length, and the model keeps its number of positions.",
        nemo="${model.encoder_seq_length}",
        valid=at_least(1),
    )
    num_workers: int = data_key(
        2,
        "Number of threads that read samples in advance. 0: samples are read when a step needs "
        "them.",
        nemo=2,
        kind="layout",
        valid=between(0, 64),
    )
    dataloader_type: str = data_key(
        "single",
        "What later epochs read. `single`: each epoch shuffles the documents and cuts them into "
        "new samples. `cyclic`: every epoch has the first one's samples, in another order.",
        nemo="single",
        valid=one_of("single", "cyclic"),
        needs=both_needs(_OF_TEXT, _READ),
    )
    reset_position_ids: bool = data_key(
        False,
        "Start positions at 0 again after the end of a document.",
        nemo=False,
        needs=needs("model.position_embedding_type", "learned_absolute", "rope"),
    )
    reset_attention_mask: bool = data_key(
        False,
        "Restrict attention to tokens of the same document.",
        nemo=False,
    )
    eod_mask_loss: bool = data_key(
        False,
        "Leave predictions from the token that ends a document out of the loss.",
        nemo=False,
        needs=_OF_TEXT,
    )
    validation_drop_last: bool = data_key(
        True,
        "Leave out incomplete samples and global batches in validations during training. The "
        "validation at the end of a run always takes every token.",
        nemo=True,
        kind="logging",
    )
    shuffle_documents: bool = data_key(
        True,
        "Shuffle documents before they are cut into samples. The order of samples is always "
        "shuffled.",
        nemo=True,
        needs=both_needs(_OF_TEXT, _READ),
    )
    chat: bool | None = finetuning_key(
        None,
        "Whether examples are conversations, which the chat template of the model's tokenizer "
        "renders: `messages`, `conversations` as ShareGPT has them, or instruction, input and "
        "answer. The loss counts the assistant's turns. `null`: those examples that have "
        "`messages` or `conversations` and not the fields of `train_ds.prompt_template`.",
    )
    train_ds: TrainDs = field(default_factory=TrainDs)
    validation_ds: ValidationDs = field(default_factory=ValidationDs)
