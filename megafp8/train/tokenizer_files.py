"""A run's tokenizer beside its checkpoints, in the files that transformers reads too."""

from __future__ import annotations

import shutil
from pathlib import Path

from megafp8.checkpoint.jsonfiles import read_json, write_json_atomically
from megafp8.data.tokenize import Tokenizer, load_tokenizer
from megafp8.errors import RunError

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""What a model's folder may have of a tokenizer."""


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and its configuration: the end of a document, the longest text."""
    end = tokenizer.decode([tokenizer.eod_id])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
    }
    try:
        tokenizer.save(folder / TOKENIZER)
    except OSError as error:
        raise RunError(f"{folder / TOKENIZER}: cannot be written ({error})") from error
    write_json_atomically(folder / TOKENIZER_CONFIG, config)


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a run's or a model's folder; None if it has no `tokenizer.json`."""
    if not (folder / TOKENIZER).is_file():
        return None
    end: object = None
    if (folder / TOKENIZER_CONFIG).is_file():
        end = read_json(folder / TOKENIZER_CONFIG).get("eos_token")
    if isinstance(end, dict):
        end = end.get("content")
    return (
        load_tokenizer(folder / TOKENIZER, end)
        if isinstance(end, str)
        else load_tokenizer(folder / TOKENIZER)
    )


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy whatever tokenizer files there are; returns their names."""
    copied = [name for name in FILES if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, target / name)
    return copied
