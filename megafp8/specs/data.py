"""Describe where the text comes from and how it becomes samples."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Literal

BUILTIN_CORPUS = "builtin"
MOCK_DATA = "mock"
CONVERSATIONS = ("messages", "conversations")  # the fields of an example that is a conversation
IGNORE = -100  # a target with this value is not counted; the default of torch's cross entropy


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Name the tokenizer with which the data was tokenized.

    `builtin` is the tokenizer that was trained on the built-in corpus and comes with it. The other
    libraries name one by `type` (`huggingface`), by `model` (`sentencepiece`, `tiktoken`), or by
    `vocab_file` and `merge_file` (`megatron`).
    """

    library: str
    vocab_size: int  # tokens of the built-in tokenizer, before padding
    type: str | None = None
    model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None


@dataclass(frozen=True)
class Weighted:
    """Describe one dataset of a blend and its weight.

    The weight is an exact decimal; only the proportions between weights matter.
    """

    weight: str
    prefix: str


@dataclass(frozen=True, kw_only=True)
class SeparateSplits:
    """List the datasets of each split, which are then not split further."""

    train: tuple[Weighted, ...]
    validation: tuple[Weighted, ...]
    test: tuple[Weighted, ...] = ()


def template_fields(template: str) -> list[str] | None:
    """Return the names of the fields in a template, in order; None if it cannot be used.

    A field is `{name}`; `{{` and `}}` stand for braces.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:
        return None
    if any(spec or conversion for _, _, spec, conversion in parts):
        return None
    names = [name for _, name, _, _ in parts if name is not None]
    return names if all(name.isidentifier() for name in names) else None


@dataclass(frozen=True, kw_only=True)
class InstructionSpec:
    """Describe questions and answers to fine-tune on.

    The fields of an example fill the template's `{name}`. The template ends with the answer's
    field; what is before it is the prompt.
    """

    train_files: tuple[str, ...]
    validation_files: tuple[str, ...] = ()  # without any, `DataSpec.splits` divides the others
    model: str  # the path of the model, which has the tokenizer
    chat: bool | None = None  # by the chat template; None: the examples that are conversations
    label_key: str = "output"  # the field that holds the answer
    prompt_template: str = "{input} {output}"
    add_bos: bool | None = None  # begin an example as a text; None: as the tokenizer does
    add_eos: bool | None = None  # end an example with the token that ends a document; None: yes
    truncation_field: str | None = None  # the field that is cut if an example is too long
    truncation_method: Literal["left", "right"] = "right"  # the end that is cut off
    answer_only_loss: bool = True  # False counts the tokens of prompts too
    packed: bool = True  # whether several examples share a sample
    shuffle: bool = True
    probabilities: tuple[str, ...] | None = None  # of each file's samples; None joins the files


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Describe the data of a run.

    `prefix` is `builtin`, `mock` for random tokens, the path of an indexed dataset without
    `.bin`/`.idx`, or several datasets; it is None if `instructions` are given.
    """

    prefix: str | tuple[Weighted, ...] | SeparateSplits | None
    cache_dir: str | None  # None means the user's cache directory
    splits: tuple[float, ...]  # relative sizes of train, validation, test
    seq_length: int  # tokens per sample
    tokenizer: TokenizerSpec
    seed: int
    validates: bool = True  # whether a validation is asked for; only then must there be data for it
    shuffle_documents: bool = True
    dataloader_type: Literal["single", "cyclic"] = "single"
    num_workers: int = 1  # threads that read ahead; with 0, samples are read when they are needed
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    validation_drop_last: bool = True
    instructions: InstructionSpec | None = None  # questions and answers instead of text
