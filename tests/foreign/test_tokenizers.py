"""Test tokenizers and descriptions of datasets that are damaged or absurd."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.data.dataset import (
    end_of_document_beside,
    load_sidecar,
    recorded_vocab_size,
)
from megafp8.data.library_tokenizers import load_tiktoken
from megafp8.data.named_tokenizers import gpt2_tokenizer, huggingface_tokenizer
from megafp8.data.text_sources import TextSource
from megafp8.data.tokenize import MAX_TOKENIZER_BYTES, byte_tokenizer, load_json
from megafp8.errors import DataError
from tests.foreign.made import into_cache, make_model

BYTES = [(base64.b64encode(bytes([n])).decode(), str(n)) for n in range(256)]


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    byte_tokenizer().save(folder / "tokenizer.json")
    tree = json.loads((folder / "tokenizer.json").read_text())
    change(tree)
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder / "tokenizer.json"


def panics(tree: dict[str, Any]) -> None:
    tree["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


@pytest.mark.parametrize(
    "change",
    [
        panics,
        lambda tree: tree["model"]["vocab"].update({"far": 2_000_000_000}),
        lambda tree: tree["added_tokens"].append({**tree["added_tokens"][0], "id": 2**31}),
        lambda tree: tree["model"].update(vocab=[]),
        lambda tree: tree.pop("model"),
        lambda tree: tree.update(version=5),
    ],
)
def test_a_tokenizer_json_that_is_damaged_is_refused(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_json(changed(tmp_path, change))


def test_a_large_or_special_tokenizer_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.touch()
    os.truncate(path, MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(DataError, match="at most 67108864 are read"):
        load_json(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="it is a FIFO"):
        load_json(path)


def test_a_text_that_looks_like_a_number_of_a_token_is_read(tmp_path: Path) -> None:
    def add(tree: dict[str, Any]) -> None:
        token = dict(tree["added_tokens"][0], id=257, content='a": 9999999999, "b')
        tree["added_tokens"].append(token)

    assert load_json(changed(tmp_path, add)).vocab_size == 258


def lines(*more: tuple[str, str]) -> str:
    return "".join(f"{token} {rank}\n" for token, rank in [*BYTES, *more])


@pytest.mark.parametrize(
    "text",
    [
        lines(("YWI=", "-1")),
        lines(("YWI=", "99999999999")),
        lines(("YWI=", "4294967296")),
        lines(("YWI=", "5")),
        lines(("AA==", "300")),
        lines(("???", "300")),
        lines(("YWI=", "1e999")),
        "YWI= 0\n",
        "",
        "YWI=\n",
        "YWI= 1 2\n",
    ],
)
def test_a_tiktoken_file_that_is_damaged_is_refused(text: str, tmp_path: Path) -> None:
    pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    (tmp_path / "x.tiktoken").write_text(text)
    with pytest.raises(DataError, match="cannot be read"):
        load_tiktoken(tmp_path / "x.tiktoken")


def test_a_tiktoken_file_of_bytes_is_read(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    (tmp_path / "x.tiktoken").write_text(lines(("YWI=", "256")))
    found = load_tiktoken(tmp_path / "x.tiktoken")
    assert found.vocab_size == 258
    assert found.encode("ab") == [256]


@pytest.mark.parametrize("text", ["[", '{"a": 2000000000}', "\xff", "[" * 3000])
def test_gpt2s_files_that_are_damaged_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(DataError, match="cannot be read"):
        gpt2_tokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")


def test_a_folder_for_transformers_has_no_links_that_leave_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "secret.txt").write_text("secret")
    model = make_model(tmp_path / "model")
    snapshot = into_cache(make_model(tmp_path / "theirs"), tmp_path / "hub")
    assert huggingface_tokenizer(str(snapshot)).vocab_size == 257
    (model / "vocab.json").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(DataError, match=r"vocab\.json is a link to .* outside of the folder"):
        huggingface_tokenizer(str(model))


SIDECAR: dict[str, Any] = {
    "version": 1,
    "corpus": "c",
    "end_of_document": "<|endoftext|>",
    "vocab_size": 257,
    "num_documents": 1,
    "num_tokens": 2,
    "num_bytes": 3,
    "files": [{"name": n, "size": 1, "sha256": "0"} for n in ("d.bin", "d.idx", "tokenizer.json")],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", float("inf")),
        ("vocab_size", 10**39),
        ("vocab_size", "257"),
        ("num_tokens", -1),
        ("num_bytes", 2.5),
        ("corpus", None),
        ("end_of_document", 5),
        ("version", 2),
        ("version", [1]),
        ("files", None),
        ("files", [1, 2, 3]),
        ("files", [{"name": "../x", "size": 1, "sha256": "0"}] * 3),
        ("files", [{"name": "x", "size": float("inf"), "sha256": "0"}] * 3),
    ],
)
def test_a_description_that_is_absurd_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps(SIDECAR | {key: value}))
    with pytest.raises(DataError, match=r"dataset\.json"):
        load_sidecar(tmp_path / "dataset.json")


@pytest.mark.parametrize("text", ["1e999", "[" * 3000 + "]" * 3000, '"x"', "null", "-1", "true"])
def test_single_values_of_a_description_are_checked(text: str, tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(f'{{"vocab_size": {text}, "end_of_document": 5}}')
    assert recorded_vocab_size(tmp_path / "d") is None
    assert end_of_document_beside(tmp_path / "d") is None


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("one two".encode("utf-16"), r"is in UTF-16\. .*iconv -f UTF-16"),
        ("café".encode("latin-1"), "It is not UTF-8: iconv"),
        (b"PK\x03\x04\x00\x00\xff\xfe", "It has NUL bytes"),
    ],
)
def test_a_text_that_is_not_utf8_gets_a_hint_that_works(
    content: bytes, hint: str, tmp_path: Path
) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    (tmp_path / "a.txt").write_bytes(content * 3)
    with pytest.raises(DataError, match=hint):
        list(TextSource(files=(tmp_path / "a.txt",)).texts())
