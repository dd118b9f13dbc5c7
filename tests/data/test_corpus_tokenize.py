"""The corpus Python carries, and the tokenizer trained on it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megafp8.data import builtin
from megafp8.data.builtin import builtin_documents, builtin_key
from megafp8.data.named_tokenizers import load_tokenizer
from megafp8.data.tokenize import END_OF_DOCUMENT, Tokenizer, train_tokenizer
from megafp8.errors import ConfigError, DataError
from tests.data.helpers import tiny_documents


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A standard library in small."""
    files = {
        "b.py": b"b = 1\n",
        "a.py": b"a = 1\r\n",
        "pkg/c.py": "π = 3\n".encode(),
        "pkg/empty.py": b"",
        "pkg/latin.py": b"# \xe9\n",
        "pkg/notes.txt": b"no source",
        "pydoc_data/topics.py": b"topics = {}\n",
        "site-packages/x.py": b"x",
        "dist-packages/x.py": b"x",
        "test/x.py": b"x",
        "pkg/tests/x.py": b"x",
        "__pycache__/x.py": b"x",
        "config-3.11-x86/x.py": b"x",
        "_sysconfigdata__linux.py": b"x",
        "sitecustomize.py": b"x",
    }
    for name, content in files.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "lib" / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    return tmp_path / "lib"


def test_which_files_are_documents(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "_topics", lambda: {"with": "W", "assert": "A", "none": ""})
    got = [(d.name, d.text) for d in builtin_documents(library)]
    assert got == [
        ("topics/assert", "A"),
        ("topics/with", "W"),
        ("stdlib/a.py", "a = 1\r\n"),
        ("stdlib/b.py", "b = 1\n"),
        ("stdlib/pkg/c.py", "π = 3\n"),
    ]


def test_works_without_pydoc_data(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert [d.name for d in builtin_documents(library)][0] == "stdlib/a.py"


def test_no_corpus_at_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "_topics", dict)
    with pytest.raises(DataError, match="corpus"):
        list(builtin_documents(tmp_path))


def test_the_key_follows_names_sizes_and_times(library: Path) -> None:
    keys = [builtin_key(library), builtin_key(library)]
    assert keys[0] == keys[1]
    os.utime(library / "a.py", ns=(1, 1))
    keys.append(builtin_key(library))
    (library / "new.py").write_text("n")
    keys.append(builtin_key(library))
    (library / "test" / "ignored.py").write_text("n")
    assert builtin_key(library) == keys[-1]
    assert len(set(keys)) == 3


TEXTS = [
    "",
    " ",
    "plain ascii",
    "π — 漢字 🐍 e\u0301 \u200d\ufeff",
    "a\r\nb\r\tc\x00\x01\x7f",
    f"before {END_OF_DOCUMENT} after",
    "".join(map(chr, range(0x0, 0x800))),
    "".join(map(chr, [0xD7FF, 0xE000, 0xFFFE, 0xFFFF, 0x10000, 0x10FFFF])),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer((d.text for d in tiny_documents()), 320)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.decode(np.asarray(ids, np.int64)) == text
    assert tokenizer.eod_id not in ids, "a text cannot end its document"
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.encode_batch([text, "x"]) == [ids, tokenizer.encode("x")]


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert (again.vocab_size, again.eod_id) == (tokenizer.vocab_size, tokenizer.eod_id)
    assert [again.encode(t) for t in TEXTS] == [tokenizer.encode(t) for t in TEXTS]
    with pytest.raises(DataError, match="</s>"):
        load_tokenizer(tmp_path / "tokenizer.json", "</s>")


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff", b"[1]", b'{"model": 3}'])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="tokenizer.json"):
        load_tokenizer(path)


def test_vocabulary_size(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 320
    assert train_tokenizer(["ab"], 5000).vocab_size < 5000, "nothing left to merge"
    assert train_tokenizer(["ab"], 257).vocab_size == 257
    with pytest.raises(ConfigError, match="vocab_size=256"):
        train_tokenizer(["ab"], 256)


def test_training_is_the_same_in_every_process(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """With and without threads, under another hash seed: the same JSON."""
    program = (
        "import sys; from pathlib import Path\n"
        "from megafp8.data.tokenize import train_tokenizer\n"
        "from tests.data.helpers import tiny_documents\n"
        "train_tokenizer((d.text for d in tiny_documents()), 320).save(Path(sys.argv[1]))\n"
    )
    tokenizer.save(tmp_path / "0")
    for number, threads in ((1, "false"), (2, "true")):
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": threads, "PYTHONHASHSEED": "9"}
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / str(number))],
            check=True,
            env=environment,
        )
    digests = {hashlib.sha256((tmp_path / n).read_bytes()).hexdigest() for n in "012"}
    assert len(digests) == 1
