"""Give the folder of an import the tokenizer by which transformers serves the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megafp8.data.named_tokenizers import huggingface_tokenizer
from megafp8.data.tokenize import JSON_FILE, Tokenizer
from megafp8.errors import DataError
from megafp8.files import run_errors_reported, write_json_atomically
from megafp8.runs.tokenizer import (
    GENERATION_CONFIG,
    MODEL_CONFIG,
    copy_files,
    copy_tokenizer,
    files_in,
    find_tokenizer,
    read_generation,
    refuse_secrets_in_files,
)

VOCABULARIES = frozenset({"vocab.json", "vocab.txt", "tokenizer.model", "spiece.model"})
"""Files from which transformers builds a tokenizer where there is no `tokenizer.json`."""
PROBES = (
    "Hello  world,\n\n\tit's 12345 tokens: def f(x):\n    return x\n",
    "naïve café e\u0301 日本語 🙂 ½",
    " leading and trailing ",
)
"""Texts by which an import compares two tokenizers."""


def import_files(model: Path, folder: Path) -> tuple[Tokenizer | None, list[str], list[str]]:
    """Copy a model's files of the tokenizer and of generation to the new folder of an import.

    If transformers is installed and builds another tokenizer from the files, as it does for some
    classes and for a folder without `tokenizer.json`, the folder gets that one.

    Returns:
        The tokenizer, the names of its files, and notes for the user.

    Raises:
        DataError: A file cannot be read, holds a secret, or is a link that leaves the folder.
        RunError: A file cannot be copied.
    """
    refuse_secrets_in_files(model)
    names = copy_tokenizer(model, folder)
    copy_files([name for name in files_in(model) if name == MODEL_CONFIG], model, folder)
    if generation := read_generation(model):
        write_json_atomically(folder / GENERATION_CONFIG, generation)
    own = find_tokenizer(folder)
    if own is None and VOCABULARIES.isdisjoint(names):
        return None, names, []  # transformers would build one of a few tokens from nothing
    if not names or (own is not None and own.file_name != JSON_FILE):
        return own, names, []
    try:
        theirs = huggingface_tokenizer(str(model), own.end_of_document if own else None)
    except DataError as error:
        return own, names, [] if own else [f"note: megafp8 cannot read this tokenizer. {error}"]
    text = None if own is None else next(_read_differently(own, theirs), None)
    if own is not None and text is None:
        return own, names, []
    if own is not None and text is not None and _loses(theirs, own, text):
        lost = "note: transformers builds a tokenizer from these files that loses text, as of"
        return own, names, [f"{lost} {text!r}; tokenizer.json is used as it is"]
    with run_errors_reported(folder / JSON_FILE, "writing the tokenizer"):
        theirs.save(folder / JSON_FILE)
    why = "there was none" if own is None else f"the file's own differs, as for {text!r}"
    notes = [f"note: tokenizer.json is the tokenizer that transformers builds; {why}"]
    return find_tokenizer(folder), list(dict.fromkeys([JSON_FILE, *names])), notes


def _read_differently(one: Tokenizer, other: Tokenizer) -> Iterator[str]:
    """Yield the texts of a sample of which two tokenizers make different tokens."""
    tokens = one.tokens()
    special = [tokens[number] for number in (one.eod_id, *one.begin)]
    for text in [*PROBES, *(f"a {token}b\n{token} c" for token in special)]:
        if _read(one, text) != _read(other, text):
            yield text


def _read(tokenizer: Tokenizer, text: str) -> tuple[object, ...] | None:
    """Return what a tokenizer makes of a text; None if it refuses it, as without a token for it."""
    try:
        marked = tokenizer.encode_marked([text])
        return tokenizer.encode(text), marked, tokenizer.begin, tokenizer.end
    except Exception:  # the Rust library raises nothing more special
        return None


def _loses(one: Tokenizer, other: Tokenizer, text: str) -> bool:
    """Whether a tokenizer does not give letters of a text back that another one does.

    Spaces do not count: some classes drop one at the beginning.
    """
    back = [
        "" if _read(t, text) is None else "".join(t.decode(t.encode(text)).split())
        for t in (one, other)
    ]
    return back[0] != back[1] == "".join(text.split())
