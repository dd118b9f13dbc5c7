"""Save and find a run's tokenizer, in a file of its kind. transformers reads one of the kinds."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megafp8.data.library_tokenizers import load_sentencepiece, load_tiktoken
from megafp8.data.named_tokenizers import huggingface_tokenizer, load_tokenizer
from megafp8.data.tokenize import JSON_FILE, SENTENCEPIECE_FILE, TIKTOKEN_FILE, Tokenizer, load_json
from megafp8.errors import DataError
from megafp8.files import (
    draft_of,
    expanded,
    move_away,
    put,
    read_json_object,
    run_errors_reported,
    whole_folder,
    write_json_atomically,
)
from megafp8.foreign import ForeignFileError, member, read_object
from megafp8.secrets import hide_values, is_secret_name

TOKENIZER_CONFIG = "tokenizer_config.json"
EXPORTED_SENTENCEPIECE = "sentencepiece.model"
"""The name of a SentencePiece model in an exported folder. transformers (5.23) would convert a file
named `tokenizer.model` by guessing its kind, which gave other tokens."""

OF_TRANSFORMERS = "PreTrainedTokenizerFast"
OWN_CLASSES = {
    SENTENCEPIECE_FILE: "megafp8.SentencePieceTokenizer",
    TIKTOKEN_FILE: "megafp8.TiktokenTokenizer",
}
"""The class in `tokenizer_config.json` for kinds that transformers does not read. It makes
transformers refuse the folder."""

GENERATION_CONFIG = "generation_config.json"

FILES = (
    JSON_FILE,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    SENTENCEPIECE_FILE,
    EXPORTED_SENTENCEPIECE,
    TIKTOKEN_FILE,
    "chat_template.jinja",
)
"""The files of a tokenizer that a model's folder may have."""

KEPT = "tokenizer"
"""The folder of a run, and the end of the name of one beside data, that has the files of the model
whose tokenizer the data was prepared with."""

_TIKTOKEN_TREE = re.compile(rb'\s*\{\s*"version":\s*\d+,\s*"name":')


_MEMBER = re.compile(r'"(?P<key>[\w.\-]+)"\s*:\s*"[^"]{8,}"')
_FOR_ACCESS = re.compile(r"(?:auth|access|api|hf|hub|session|bearer|refresh)[_-]?token", re.I)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the tokenizer's file and `tokenizer_config.json` to `folder`.

    The latter has the token at the end of a document, `max_length` in tokens, which is the model's
    longest text, and the class that reads the file.

    Raises:
        RunError: The files cannot be written.
    """
    end = tokenizer.end_of_document
    config: dict[str, Any] = {
        "tokenizer_class": OWN_CLASSES.get(tokenizer.file_name, OF_TRANSFORMERS),
        "model_max_length": max_length,
        "eos_token": end,
    }
    if tokenizer.file_name == JSON_FILE:
        config |= {"bos_token": end, "pad_token": end, "clean_up_tokenization_spaces": False}
    target = folder / tokenizer.file_name
    misnamed = folder / JSON_FILE
    draft = draft_of(target)
    try:
        with run_errors_reported(target, "writing the file"):
            tokenizer.save(draft)
            put(draft, target)  # a kill, or a rank that reads it meanwhile, finds a whole file
            if tokenizer.file_name != JSON_FILE and _kind_of(misnamed) == tokenizer.file_name:
                misnamed.unlink()  # earlier versions gave the same tokenizer this name
    finally:
        draft.unlink(missing_ok=True)
    write_json_atomically(folder / TOKENIZER_CONFIG, config)


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in a run's or a model's folder.

    The result is None if there is no tokenizer. A `tokenizer.model` that megafp8 did not write does
    not count, because tokens that were added to it are not in that file.

    Raises:
        DataError: The tokenizer cannot be read, the package for its kind is missing, or a file is
            a link that leaves the folder, a FIFO or a device.
    """
    for name in FILES:
        _member(folder, name)
    config = (
        read_json_object(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    )
    end: object = config.get("eos_token")
    if isinstance(end, dict):
        end = end.get("content")
    end = end if isinstance(end, str) else None
    path = folder / JSON_FILE
    match _kind_of(path):
        case "tokenizer.json":
            return load_json(path) if end is None else load_json(path, end)
        case "tokenizer.model":  # earlier versions used this name, with "" as the end
            return load_sentencepiece(path, end or None)
        case "tokenizer.tiktoken.json":
            return load_tiktoken(path)
    if not is_own(config):
        return None
    names = (SENTENCEPIECE_FILE, EXPORTED_SENTENCEPIECE, TIKTOKEN_FILE)
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is not None and found.name == EXPORTED_SENTENCEPIECE:
        return load_sentencepiece(found, end)
    return None if found is None else load_tokenizer(found, end)


def with_all_files(home: Path, started_from: object) -> Path:
    """Return the folder whose files of the tokenizer an export of a run takes.

    It is that of the model that the run started from, else of the model whose tokenizer the run's
    data was prepared with, if it has the run's tokenizer: it may also have a chat template, special
    tokens and a configuration of generation. Otherwise it is the run's own.

    Args:
        home: The run's directory.
        started_from: What the run's settings have as `restore_from_path`.
    """
    own = find_tokenizer(home)
    first = [Path(started_from)] if isinstance(started_from, str) and started_from else []
    for folder in [*first, home / KEPT]:
        if own is not None and folder.is_dir() and own.digest in _digests(folder):
            return folder
    return home


def _digests(folder: Path) -> Iterator[str]:
    """Yield the digest of a model's tokenizer, then as transformers builds it from the same files.

    For some classes it makes other special tokens than `tokenizer.json` has, and data that were
    prepared by `hf:FOLDER` have that tokenizer.
    """
    found = find_tokenizer(folder)
    if found is None:
        return
    yield found.digest
    if found.file_name == JSON_FILE:
        with suppress(DataError):  # transformers is not installed, or cannot load this one
            yield huggingface_tokenizer(str(folder)).digest


def keep_files(model: Path, target: Path) -> list[str]:
    """Copy a model's files of the tokenizer and of generation to a new folder; return their names.

    A folder that exists is replaced. If the model's folder has none of these files, nothing is
    made.

    Raises:
        DataError: A file holds a secret, or is a link that leaves the folder, a FIFO or a device.
        RunError: A file cannot be copied.
    """
    names = [name for name in (*FILES, GENERATION_CONFIG) if _member(model, name) is not None]
    if not names:
        return []
    refuse_secrets_in_files(model)
    generation = read_generation(model)
    with run_errors_reported(target, "replacing the folder"):
        if target.is_dir():
            move_away(target)
    with whole_folder(target, last=TOKENIZER_CONFIG) as build:
        for name in names:
            with run_errors_reported(target / name, "copying the tokenizer's file"):
                if name != GENERATION_CONFIG:
                    shutil.copyfile(model / name, build / name)
        if generation:
            write_json_atomically(build / GENERATION_CONFIG, generation)
    return names


def beside_data(prefix: Path) -> Path:
    """Return the folder beside a dataset that has the files of its tokenizer's model."""
    return prefix.with_name(f"{prefix.name}.{KEPT}")


def keep_files_of_data(prefixes: Sequence[str], run: Path) -> None:
    """Copy what lies beside the first of a run's datasets that has files, unless the run has them.

    Raises:
        DataError: A file cannot be kept; see `keep_files`.
        RunError: A file cannot be copied.
    """
    if (run / KEPT).is_dir():
        return
    folders = (beside_data(expanded(prefix)) for prefix in prefixes)
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is not None:
        keep_files(found, run / KEPT)


def read_generation(home: Path) -> dict[str, Any]:
    """Return the configuration of generation in a model's folder, empty if there is none.

    Raises:
        DataError: The file cannot be read as a JSON object, or is a link that leaves the folder.
    """
    path = _member(home, GENERATION_CONFIG)
    if path is None:
        return {}
    try:
        return read_object(path)
    except (OSError, ForeignFileError) as error:
        hint = "Repair it, or remove it from the folder"
        raise DataError(path, "generation", f"cannot be read: {error}", hint) from error


def is_own(config: dict[str, Any]) -> bool:
    """Whether a `tokenizer_config.json` is about a kind that transformers does not read."""
    return config.get("tokenizer_class") in OWN_CLASSES.values()


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer files of `source` to `target`; return their new names.

    A SentencePiece model that only megafp8 reads gets a name that transformers does not know.

    Raises:
        DataError: A file is a link that leaves the folder, a FIFO or a device.
        RunError: A file cannot be copied.
    """
    config = _member(source, TOKENIZER_CONFIG)
    renames = config is not None and is_own(read_json_object(config))
    copied = []
    for name in FILES:
        if _member(source, name) is None:
            continue
        new = EXPORTED_SENTENCEPIECE if renames and name == SENTENCEPIECE_FILE else name
        with run_errors_reported(target / new, "copying the tokenizer's file"):
            shutil.copyfile(source / name, target / new)
        copied.append(new)
    return copied


def refuse_secrets_in_files(folder: Path) -> None:
    """Raise if a tokenizer's files hold a secret, since they are copied as they are.

    Raises:
        DataError: A file holds the value of a secret variable, or a key for access such as
            `auth_token`. (`eos_token` and the like are a tokenizer's own words.)
    """
    for path in (folder / name for name in FILES):
        if not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", "replace")
        keys = [found["key"] for found in _MEMBER.finditer(text) if _gives_access(found["key"])]
        if keys or hide_values(text) != text:
            field = keys[0] if keys else "content"
            hint = (
                "Remove it from a copy of the folder; imported and exported folders are published"
            )
            raise DataError(path, field, "holds a secret, which would be copied", hint)


def _gives_access(key: str) -> bool:
    return bool(_FOR_ACCESS.search(key)) if "token" in key.lower() else is_secret_name(key)


def _member(folder: Path, name: str) -> Path | None:
    """Return the path of a file in a run's or a model's folder; None if there is no such file.

    Raises:
        DataError: It is a link that leaves the folder, a FIFO or a device.
    """
    try:
        return member(folder, name)
    except ForeignFileError as error:
        hint = "Put the file itself into the folder, or remove the name"
        raise DataError(folder / name, "tokenizer", str(error), hint) from error


def _kind_of(path: Path) -> str | None:
    """Return the usual file name of the kind of a `tokenizer.json`, or None if there is no file.

    Earlier versions gave all three kinds this name.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(256)
    except OSError:
        return None
    if head.startswith(b"\n"):  # a model's protocol buffer begins with the field of a piece
        return SENTENCEPIECE_FILE
    return TIKTOKEN_FILE if _TIKTOKEN_TREE.match(head) else JSON_FILE
