"""Save and find a run's tokenizer, in a file of its kind. transformers reads one of the kinds."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp8_numerics.caches import put
from megafp8.data.conversations import Chat
from megafp8.data.library_tokenizers import load_sentencepiece, load_tiktoken
from megafp8.data.named_tokenizers import (
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    huggingface_tokenizer,
    load_folder,
    load_tokenizer,
    named_tokens,
)
from megafp8.data.tokenize import (
    JSON_FILE,
    SENTENCEPIECE_FILE,
    TIKTOKEN_FILE,
    TOKENIZER_FILES,
    Tokenizer,
    same_tokens,
    token_text,
)
from megafp8.errors import ConfigError, DataError
from megafp8.files import (
    draft_of,
    expanded,
    run_errors_reported,
    whole_folder,
    write_json_atomically,
)
from megafp8.foreign import ForeignFileError, member, read_object
from megafp8.runs.find import CHECKPOINTS_DIR
from megafp8.secrets import hide_values, is_secret_name

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

MODEL_CONFIG = "config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
"""The folder in a model's folder with the chat templates that have names."""

FILES = (
    JSON_FILE,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    SENTENCEPIECE_FILE,
    EXPORTED_SENTENCEPIECE,
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    TIKTOKEN_FILE,
    CHAT_TEMPLATE,
    "chat_template.json",
)
"""The files of a tokenizer that a model's folder may have, beside those in `TEMPLATES`."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SAVED = {"tokenizer_class", "model_max_length", "eos_token", "bos_token", "pad_token",
          "clean_up_tokenization_spaces"}  # fmt: skip

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
        bos = end if tokenizer.bos_id is None else tokenizer.tokens()[tokenizer.bos_id]
        config |= {"bos_token": bos, "pad_token": end, "clean_up_tokenization_spaces": False}
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
    config = named_tokens(folder)
    end = token_text(config.get("eos_token"))
    path = folder / JSON_FILE
    match _kind_of(path):
        case "tokenizer.json":
            return load_folder(path)
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


def home_of_model(path: str | Path) -> Path:
    """Return the folder of a run or a model, given that folder or one of its checkpoints."""
    path = expanded(path).absolute()
    return path.parents[1] if path.parent.name == CHECKPOINTS_DIR else path


def with_all_files(home: Path, *models: object) -> Path:
    """Return the folder with the files of a run's tokenizer: all that its model came with.

    They may be more than the tokenizer: a chat template, special tokens, a configuration of
    generation. A run keeps them in its folder `tokenizer/`. For a run of an earlier version, which
    has none, they are those of the first of `models` that has the run's tokenizer. Without any, the
    result is the run's own directory, which has the tokenizer alone.

    Args:
        home: The directory of a run or of an imported model.
        models: Paths of models that the run may have started from; others than texts are ignored.
    """
    own = find_tokenizer(home)
    homes = [home_of_model(path) for path in models if isinstance(path, str | Path) and path]
    places = [home / KEPT, *(place for folder in homes for place in (folder / KEPT, folder))]
    for place in places if own is not None else ():
        found = find_tokenizer(place) if place.is_dir() else None
        if own is not None and found is not None and same_tokens(own, found):
            return place
    return home


def keep_files(model: Path, target: Path, tokenizer: Tokenizer) -> list[str]:
    """Copy a model's files of the tokenizer and of generation to a new folder; return their names.

    If the model's folder has none of these files, nothing is made. If it has no `tokenizer.json`,
    since transformers made `tokenizer` of other files, the new folder gets that one.

    Raises:
        DataError: A file holds a secret, or is a link that leaves the folder, a FIFO or a device.
        RunError: A file cannot be copied, or the new folder is there and not empty.
    """
    names = files_in(model)
    if not names:
        return []
    refuse_secrets_in_files(model)
    generation = read_generation(model)
    with whole_folder(target, last=TOKENIZER_CONFIG) as build:
        copy_files([name for name in names if name != GENERATION_CONFIG], model, build)
        if JSON_FILE not in names and tokenizer.file_name == JSON_FILE:
            with run_errors_reported(target / JSON_FILE, "writing the tokenizer"):
                tokenizer.save(build / JSON_FILE)
            names = [JSON_FILE, *names]
        if generation:
            write_json_atomically(build / GENERATION_CONFIG, generation)
    return names


def beside_data(prefix: Path) -> Path:
    """Return the folder beside a dataset that has the files of its tokenizer's model."""
    return prefix.with_name(f"{prefix.name}.{KEPT}")


def keep_files_of_model(tokenizer: Tokenizer, models: Sequence[str | Path], run: Path) -> None:
    """Copy the files of a tokenizer's model into a run's folder, unless the run has them.

    Args:
        tokenizer: The run's tokenizer.
        models: Paths of models and of their checkpoints, and of folders beside data, of which the
            first one counts that has the tokenizer.
        run: The run's directory.

    Raises:
        DataError: A file cannot be kept; see `keep_files`.
        RunError: A file cannot be copied.
    """
    if (run / KEPT).is_dir():
        return
    homes = [home_of_model(path) for path in models]
    for place in (place for home in homes for place in (home / KEPT, home)):
        if not place.is_dir() or _has_tokenizer_alone(place):
            continue
        found = find_tokenizer(place)
        if found is None and "vocab.json" in files_in(place):
            with suppress(DataError):  # transformers is not installed, or cannot load it
                found = huggingface_tokenizer(str(place))
        if found is not None and same_tokens(tokenizer, found):
            keep_files(place, run / KEPT, tokenizer)
            return


def check_tokenizer(tokenizer: Tokenizer, model: str | Path) -> str | None:
    """Check that data were prepared with the tokenizer of the model that a run starts from.

    Args:
        tokenizer: The tokenizer of the data.
        model: A run, one of its checkpoints, or an imported model.

    Returns:
        A note for the user where the model's folder has no tokenizer to compare with, or one that
        begins a text otherwise.

    Raises:
        ConfigError: The model has another tokenizer, so that its tokens mean other text.
    """
    home = home_of_model(model)
    found = find_tokenizer(home)
    if found is None:
        return f"note: {home} has no tokenizer, with which that of the data could be compared"
    if same_tokens(tokenizer, found):
        if tokenizer.begin == found.begin:
            return None
        words = found.tokens()
        begin = "".join(words[number] for number in found.begin) or "no token of its own"
        return f"note: the model's tokenizer begins a text with {begin}; that of the data does not"
    mine, theirs = tokenizer.tokens(), found.tokens()
    number = next((n for n in sorted(mine) if mine[n] != theirs.get(n)), 0)
    raise ConfigError(
        "restore_from_path",
        model,
        f"its tokenizer is not that of the data: token {number} is {theirs.get(number)!r} there, "
        f"and {mine.get(number)!r} in the data",
        f"Prepare the data with the model's own: --tokenizer {home / found.file_name}",
    )


def _has_tokenizer_alone(folder: Path) -> bool:
    """Whether a folder has no more of a tokenizer than what `save_tokenizer` writes."""
    others = {*files_in(folder)} - {*TOKENIZER_FILES, TOKENIZER_CONFIG}
    return not others and named_tokens(folder).keys() <= _SAVED


def files_in(folder: Path) -> list[str]:
    """Return the names of a model's files of the tokenizer and of generation, in its folder."""
    names = [*FILES, GENERATION_CONFIG, MODEL_CONFIG]
    names += [f"{TEMPLATES}/{path.name}" for path in sorted((folder / TEMPLATES).glob("*.jinja"))]
    return [name for name in names if _member(folder, name) is not None]


def copy_files(names: Sequence[str], source: Path, target: Path) -> None:
    """Copy files of a model's folder, by their names, to another folder.

    Raises:
        RunError: A file cannot be copied.
    """
    for name in names:
        with run_errors_reported(target / name, "copying the tokenizer's file"):
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


def read_generation(home: Path) -> dict[str, Any]:
    """Return the configuration of generation in a model's folder, empty if there is none.

    Raises:
        DataError: The file cannot be read as a JSON object, or is a link that leaves the folder.
    """
    return _object(home, GENERATION_CONFIG)


def _object(home: Path, name: str) -> dict[str, Any]:
    path = _member(home, name)
    if path is None:
        return {}
    try:
        return read_object(path)
    except (OSError, ForeignFileError) as error:
        hint = "Repair it, or remove it from the folder"
        raise DataError(path, "generation", f"cannot be read: {error}", hint) from error


def end_ids(home: Path, eod_id: int) -> set[int]:
    """Return the tokens that end a text: a model's own ones and the one that ends documents.

    Raises:
        DataError: A file cannot be read, or is a link that leaves the folder.
    """
    given = [_object(home, name).get("eos_token_id") for name in (GENERATION_CONFIG, MODEL_CONFIG)]
    listed = [n for ends in given for n in (ends if isinstance(ends, list) else [ends])]
    return {eod_id, *(n for n in listed if type(n) is int)}


def chat_of(home: Path, tokenizer: Tokenizer, *models: object) -> Chat:
    """Return what renders conversations for a model; `models` are those of `with_all_files`."""
    files = with_all_files(home, *models)
    return Chat(files, tokenizer, frozenset(end_ids(files, tokenizer.eod_id)))


def token_ids(home: Path, eod_id: int | None) -> dict[str, Any]:
    """Return the special tokens' numbers in the `config.json` that a model came with.

    They are those of `bos_token_id`, `eos_token_id` and `pad_token_id` that it has. The token that
    ends the run's documents is added to those that end a text.

    Raises:
        DataError: The file cannot be read, or is a link that leaves the folder.
    """
    config = _object(home, MODEL_CONFIG)
    ids = {key: config[key] for key in TOKEN_IDS if key in config}
    if "eos_token_id" in ids:
        ids["eos_token_id"] = _with_end(ids["eos_token_id"], eod_id)
    return ids


def generation_ends_with(generation: dict[str, Any], eod_id: int | None) -> dict[str, Any]:
    """Return a configuration of generation in which a token ends a text, beside its own ones."""
    if "eos_token_id" not in generation:
        return generation
    return generation | {"eos_token_id": _with_end(generation["eos_token_id"], eod_id)}


def _with_end(ends: object, eod_id: int | None) -> object:
    """Return the tokens that end a text, in the form in which they are given, with one more."""
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if eod_id is None or eod_id in listed:
        return ends
    return [*listed, eod_id] if listed else eod_id


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
    renames = is_own(named_tokens(source)) and (source / SENTENCEPIECE_FILE).is_file()
    names = [name for name in files_in(source) if name not in (GENERATION_CONFIG, MODEL_CONFIG)]
    copy_files(names, source, target)
    if renames:
        (target / SENTENCEPIECE_FILE).rename(target / EXPORTED_SENTENCEPIECE)
        names[names.index(SENTENCEPIECE_FILE)] = EXPORTED_SENTENCEPIECE
    return names


def refuse_secrets_in_files(folder: Path) -> None:
    """Raise if a tokenizer's files hold a secret, since they are copied as they are.

    Raises:
        DataError: A file holds the value of a secret variable, or a key for access such as
            `auth_token`. (`eos_token` and the like are a tokenizer's own words.)
    """
    for path in (folder / name for name in files_in(folder) if name != GENERATION_CONFIG):
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
