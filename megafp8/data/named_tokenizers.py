"""Load tokenizers by the names that users give them."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from megafp8.data.library_tokenizers import (
    load_sentencepiece,
    load_tiktoken,
    named_tiktoken,
    needed,
)
from megafp8.data.tokenize import (
    END_OF_DOCUMENT,
    JSON_FILE,
    MAX_TOKENIZER_BYTES,
    SENTENCEPIECE_FILE,
    TIKTOKEN_FILE,
    JsonTokenizer,
    Tokenizer,
    check_numbers,
    load_json,
    rust_call,
    token_text,
)
from megafp8.errors import ConfigError, DataError
from megafp8.foreign import ForeignFileError, check_members, member, read_bytes, read_object
from megafp8.specs import TokenizerSpec

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"


def configured_tokenizer(spec: TokenizerSpec) -> Tokenizer | None:
    """Return the tokenizer that a configuration names; None means the one recorded with the data.

    Raises:
        ConfigError: The library needs a setting that is not given.
        DataError: The tokenizer cannot be read.
    """
    match spec.library:
        case "builtin":
            return None
        case "huggingface":
            return huggingface_tokenizer(_given(spec, "type", spec.type))
        case "sentencepiece":
            return load_sentencepiece(Path(_given(spec, "model", spec.model)), None)
        case "tiktoken":
            return tiktoken_tokenizer(_given(spec, "model", spec.model))
        case _:
            return gpt2_tokenizer(
                Path(_given(spec, "vocab_file", spec.vocab_file)),
                Path(_given(spec, "merge_file", spec.merge_file)),
            )


def tiktoken_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a file of ranks, or one of tiktoken's own encodings by name."""
    path = Path(name)
    return load_tiktoken(path) if path.suffix or path.exists() else named_tiktoken(name)


def huggingface_tokenizer(name: str, end_of_document: str | None = None) -> JsonTokenizer:
    """Return a tokenizer of `transformers` by its name on the Hub or its folder.

    Args:
        name: A name on the Hub, a folder, or the path of a `tokenizer.json`.
        end_of_document: The token that ends a document; None means the tokenizer's `eos_token`, or
            `<|endoftext|>` for a `tokenizer.json` without a configuration beside it.

    Raises:
        DataError: It cannot be loaded, has no Rust form, or has no token that ends a document.
    """
    if name.endswith(".json"):
        return load_folder(Path(name), end_of_document)
    loaded = transformers_tokenizer(name)
    rust = getattr(loaded, "backend_tokenizer", None)
    if rust is None:
        raise DataError(
            name,
            "tokenizer",
            "has no fast form (tokenizer.json)",
            "Use a tokenizer that has one; SentencePiece models are taken as they are",
        )
    token = end_of_document or loaded.eos_token
    eod_id = None if token is None else rust.token_to_id(str(token))
    if eod_id is None:
        raise DataError(
            name,
            "vocabulary",
            f"has no {token!r}" if token else "names no eos_token",
            "Name the token that is to end a document: --end-of-document TOKEN",
        )
    return JsonTokenizer(_copy(rust), eod_id, token_text(loaded.bos_token))


def transformers_tokenizer(name: str) -> Any:
    """Return a tokenizer as transformers has it, by its name on the Hub or its folder.

    Raises:
        DataError: It cannot be loaded, or the package is missing.
    """
    transformers = needed("transformers", name)
    try:
        is_here = Path(name).is_dir()
        if is_here:
            check_members(Path(name))
        only_files = is_here or not hub_answers()
        # Without the last argument transformers asks on the terminal whether the folder's own code
        # may run, and runs it after a "y" on the standard input.
        loaded = transformers.AutoTokenizer.from_pretrained(
            name, local_files_only=only_files, trust_remote_code=False
        )
    except Exception as error:  # files, JSON and the network raise different classes
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise DataError(
            name,
            "tokenizer",
            f"transformers cannot load it ({reason})",
            "Give a folder with tokenizer.json, or with vocab.json, merges.txt and a "
            "tokenizer_config.json that names their class, or a name on the Hub where there is a "
            "network",
        ) from error
    return loaded


def load_folder(path: Path, end_of_document: str | None = None) -> JsonTokenizer:
    """Return the tokenizer of a `tokenizer.json` with what the files beside it say of its tokens.

    Args:
        path: The file.
        end_of_document: The token that ends a document; None means the `eos_token` of the
            configuration, or `<|endoftext|>` if there is none.

    Raises:
        DataError: A file cannot be read, or the vocabulary has no such token.
    """
    named = named_tokens(path.parent) if path.name == JSON_FILE else {}
    end = end_of_document or token_text(named.get("eos_token")) or END_OF_DOCUMENT
    return load_json(path, end, named)


def named_tokens(folder: Path) -> dict[str, Any]:
    """Return what `tokenizer_config.json` and `special_tokens_map.json` of a folder hold.

    The second counts where the first has no list of added tokens, as transformers has it.

    Raises:
        DataError: A file cannot be read, is no JSON object, or is a link that leaves the folder.
    """
    config = _object(folder, TOKENIZER_CONFIG)
    if "added_tokens_decoder" in config:
        return config
    return config | _object(folder, SPECIAL_TOKENS)


def _object(folder: Path, name: str) -> dict[str, Any]:
    try:
        path = member(folder, name)
        return {} if path is None else read_object(path, MAX_TOKENIZER_BYTES)
    except (OSError, ForeignFileError) as error:
        hint = "Repair it, or remove it from the folder"
        raise DataError(folder / name, "tokenizer", f"cannot be read: {error}", hint) from error


def hub_answers() -> bool:
    """Whether the Hub answers at all, within five seconds.

    transformers asks a Hub that does not answer for most of a minute.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=5):
            return True
    except HTTPError:
        return True
    except URLError as error:  # a certificate that only the Hub's own client may know
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False


def gpt2_tokenizer(vocab_file: Path, merge_file: Path) -> JsonTokenizer:
    """Return GPT-2's byte-level BPE from its `vocab.json` and `merges.txt`.

    Raises:
        DataError: A file cannot be read, or there is no `<|endoftext|>`.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    try:
        for file in (vocab_file, merge_file):
            check_numbers(read_bytes(file, MAX_TOKENIZER_BYTES).decode("utf-8"))
        rust = rust_call(
            lambda module: module.Tokenizer(models.BPE.from_file(str(vocab_file), str(merge_file)))
        )
    except Exception as error:  # the Rust library raises plain `Exception`
        raise DataError(
            vocab_file,
            "tokenizer",
            f"cannot be read together with {merge_file} ({error})",
            "Give GPT-2's vocab.json and merges.txt",
        ) from error
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    eod_id = rust.token_to_id(END_OF_DOCUMENT)
    if eod_id is None:
        raise DataError(
            vocab_file,
            "vocabulary",
            f"has no {END_OF_DOCUMENT!r}, the token that ends a document",
            "Give the vocabulary of a GPT-2 tokenizer",
        )
    rust.add_special_tokens([tokenizers.AddedToken(END_OF_DOCUMENT, special=True)])
    return JsonTokenizer(rust, eod_id)


def _copy(rust: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    import tokenizers

    return tokenizers.Tokenizer.from_str(rust.to_str())


def _given(spec: TokenizerSpec, name: str, value: str | None) -> str:
    if not value:
        raise ConfigError(
            f"model.tokenizer.{name}",
            "null",
            f"is needed with model.tokenizer.library={spec.library}",
            "Give it, or use model.tokenizer.library=builtin, which takes the data's own",
        )
    return value


def load_tokenizer(path: Path, end_of_document: str | None = None) -> Tokenizer:
    """Read a recorded tokenizer; the end of the file's name says which kind it is.

    Args:
        path: The file.
        end_of_document: The token that ends a document; it must be in the vocabulary. None: the
            kind's own, which is a SentencePiece model's end of a sentence, else `<|endoftext|>`.

    Raises:
        DataError: The file is missing, not a tokenizer, or has no such token.
    """
    if path.name.endswith(TIKTOKEN_FILE):
        return load_tiktoken(path)
    if path.name.endswith(SENTENCEPIECE_FILE):
        return load_sentencepiece(path, end_of_document)
    return load_json(path, end_of_document or END_OF_DOCUMENT)
