"""Load tokenizers by the names that users give them."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING
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
    MAX_TOKENIZER_BYTES,
    SENTENCEPIECE_FILE,
    TIKTOKEN_FILE,
    JsonTokenizer,
    Tokenizer,
    check_numbers,
    load_json,
    rust_call,
)
from megafp8.errors import ConfigError, DataError
from megafp8.foreign import check_members, read_bytes
from megafp8.specs import TokenizerSpec

if TYPE_CHECKING:
    import tokenizers


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
            `<|endoftext|>` for a bare `tokenizer.json`.

    Raises:
        DataError: It cannot be loaded, has no Rust form, or has no token that ends a document.
    """
    if name.endswith(".json"):
        return load_json(Path(name), end_of_document or END_OF_DOCUMENT)
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
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            name,
            "tokenizer",
            f"transformers cannot load it ({reason})",
            "Give a folder with tokenizer.json, or a name on the Hub where there is a network",
        ) from error
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
            "Name the token that is to end a document",
        )
    return JsonTokenizer(_copy(rust), eod_id)


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
