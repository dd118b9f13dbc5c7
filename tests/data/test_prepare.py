"""Preparing: once, safely, and with what is there found again exactly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.data import dataset as dataset_module
from megafp8.data import prepare as prepare_module
from megafp8.data.builtin import Corpus, Document, builtin_documents, builtin_key, prepared_folder
from megafp8.data.dataset import record_file
from megafp8.data.prepare import PreparedData, excerpt, prepare
from megafp8.errors import DataError
from megafp8.specs import TokenizerSpec
from tests.data.helpers import data_spec, tiny_corpus, tiny_documents, write_dataset
from tests.train.runs import ROOT, Driver


class Notices:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    @property
    def builds(self) -> int:
        return sum("training the tokenizer" in line for line in self.lines)


def _prepare(cache: Path) -> PreparedData:
    return prepare(data_spec(cache), Notices(), tiny_corpus())


def test_the_second_time_uses_the_cache(tmp_path: Path) -> None:
    notices = Notices()
    first = prepare(data_spec(tmp_path), notices, tiny_corpus())
    assert notices.builds == 1
    # Neither another split, another length nor another seed makes other tokens.
    again = prepare(data_spec(tmp_path, seed=8, seq_length=5), notices, tiny_corpus())
    assert notices.builds == 1
    assert again.fingerprint == first.fingerprint
    other = TokenizerSpec(library="builtin", vocab_size=280)
    assert (
        prepare(data_spec(tmp_path, tokenizer=other), notices, tiny_corpus()).fingerprint
        != first.fingerprint
    )
    assert notices.builds == 2


def test_what_was_prepared(tmp_path: Path) -> None:
    data = _prepare(tmp_path)
    texts = [d.text for d in tiny_documents()]
    assert data.vocab_size == data.tokenizer.vocab_size == 300
    tokens = {d: data.tokenizer.encode(texts[d]) + [data.tokenizer.eod_id] for d in range(40)}
    assert all(
        data.train_parts[0].opened.dataset.document(d).tolist() == tokens[d] for d in range(40)
    )
    validation = data.validation_parts[0].documents.tolist()
    assert data.validation_text() == "".join(texts[d] for d in validation).encode()
    predicted = [t for d in validation for t in tokens[d]]
    assert data.validation_tokens().tolist() == predicted
    assert data.num_validation_tokens == len(predicted)
    counts = np.zeros(300, np.int64)
    for document in data.train_parts[0].documents.tolist():
        np.add.at(counts, tokens[document], 1)
    assert np.array_equal(data.train_token_counts(), counts)
    assert data.num_train_tokens == counts.sum()
    assert data.train.num_samples_per_epoch == data.num_train_tokens // 16
    assert not set(validation) & set(data.train_parts[0].documents.tolist())


def test_the_fingerprint_depends_on_no_path_and_no_time(tmp_path: Path) -> None:
    first = _prepare(tmp_path / "a")
    (folder,) = (tmp_path / "a").iterdir()
    shutil.copytree(folder, tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").iterdir():
        os.utime(path, (1, 1))
    copied = prepare(data_spec(None, str(tmp_path / "elsewhere" / "dataset")), Notices())
    rebuilt = _prepare(tmp_path / "b")
    assert copied.fingerprint == rebuilt.fingerprint == first.fingerprint


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("name", ["dataset.bin", "dataset.idx", "dataset.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, name: str, damage: str) -> None:
    first = _prepare(tmp_path)
    (folder,) = tmp_path.iterdir()
    path = folder / name
    if damage == "flip":
        # Inside JSON a flipped bit may be harmless; a lost brace is not.
        _flip(path) if name != "dataset.json" else path.write_text(path.read_text()[1:])
    elif damage == "truncate":
        os.truncate(path, path.stat().st_size - 2)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    notices = Notices()
    again = prepare(data_spec(tmp_path), notices, tiny_corpus())
    assert notices.builds == 1 and "damaged" in notices.lines[0]
    assert again.fingerprint == first.fingerprint
    assert [p.name for p in tmp_path.iterdir()] == [folder.name], "nothing is left lying around"


PROGRAM = """
import sys
from pathlib import Path
from megafp8.data.prepare import prepare
from tests.data.helpers import data_spec, tiny_corpus
lines = []
data = prepare(data_spec(Path(sys.argv[1])), lines.append, tiny_corpus())
print(data.fingerprint, data.train[123].sum(), len(data.validation_text()))
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_several_processes_at_once(
    driver: Driver, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, damaged: bool
) -> None:
    if damaged:
        _prepare(tmp_path)
        (folder,) = tmp_path.iterdir()
        _flip(folder / "dataset.bin")
    words, folder = ("-c", PROGRAM, str(tmp_path)), tmp_path_factory.mktemp("output")
    running = [driver.start_python(*words, cwd=ROOT, folder=folder) for _ in range(4)]
    outputs = [process.wait() for process in running]
    assert [done.returncode for done in outputs] == [0] * 4, outputs
    assert len({done.stdout for done in outputs}) == 1
    assert len(list(tmp_path.iterdir())) == 1, "losers throw their own away"


def test_what_killed_builds_left_is_removed(tmp_path: Path) -> None:
    _prepare(tmp_path)
    (folder,) = tmp_path.iterdir()
    shutil.rmtree(folder)
    old, young = (tmp_path / f"{folder.name}.tmp-{name}" for name in ("old", "young"))
    old.mkdir()
    young.mkdir()
    os.utime(old, (time.time() - 25 * 3600,) * 2)
    _prepare(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {folder.name, young.name}


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def documents():  # type: ignore[no-untyped-def]
        yield from tiny_documents(3)
        raise DataError("x", "y", "z", "w")

    with pytest.raises(DataError, match="x: y"):
        prepare(data_spec(tmp_path), Notices(), tiny_corpus(documents))
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="index_mapping_dir"):
        _prepare(tmp_path / "file" / "cache")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/big/cache")
    assert prepared_folder(None) == Path("/big/cache/megafp8")
    for unset in ("", "relative/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert prepared_folder(None) == Path("/home/someone/.cache/megafp8")
    assert prepared_folder("~/mine") == Path("/home/someone/mine")


class TestPrefix:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        _prepare(tmp_path / "cache")
        (built,) = (tmp_path / "cache").iterdir()
        shutil.copytree(built, tmp_path / "mine")
        return tmp_path / "mine"

    def _open(self, folder: Path, notices: Notices | None = None) -> PreparedData:
        return prepare(data_spec(None, str(folder / "dataset")), notices or Notices())

    def test_without_a_sidecar_parts_are_hashed(self, folder: Path) -> None:
        (folder / "dataset.json").unlink()
        before = self._open(folder).fingerprint
        assert before == self._open(folder).fingerprint
        _flip(folder / "dataset.bin")  # small enough to be hashed whole
        assert self._open(folder).fingerprint != before

    def test_a_tokenizer_of_its_own_name_comes_first(self, folder: Path) -> None:
        (folder / "tokenizer.json").rename(folder / "dataset.tokenizer.json")
        (folder / "tokenizer.json").write_text("some other file")
        assert self._open(folder).vocab_size == 300

    def test_a_missing_tokenizer_is_named(self, folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        with pytest.raises(DataError, match=r"dataset\.tokenizer\.json: tokenizer: is missing"):
            self._open(folder)

    @pytest.mark.parametrize("name", ["dataset.bin", "dataset.idx"])
    def test_missing_data_is_named(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        with pytest.raises(DataError, match=name):
            self._open(folder)

    def test_a_changed_index_is_refused(self, folder: Path) -> None:
        description = json.loads((folder / "dataset.json").read_text())
        description["files"][1]["sha256"] = "0" * 64
        (folder / "dataset.json").write_text(json.dumps(description))
        with pytest.raises(DataError, match=r"dataset\.idx.*SHA-256"):
            self._open(folder)

    def _rename(self, folder: Path, name: str) -> None:
        """Give all four files another name; the description stays as it is."""
        for end in ("bin", "idx", "tokenizer.json", "dataset.json"):
            here = folder / (f"dataset.{end}" if end in ("bin", "idx") else end.split("set.")[-1])
            here = folder / "dataset.json" if end == "dataset.json" else here
            here.rename(folder / f"{name}.{end}")

    def test_tokens_changed_in_place_are_refused(self, folder: Path) -> None:
        assert self._open(folder).fingerprint
        tokens = np.fromfile(folder / "dataset.bin", "<u2")
        tokens[100:400] = tokens[100:400][::-1].copy()
        tokens.tofile(folder / "dataset.bin")
        os.utime(folder / "dataset.bin", (1, 1))
        with pytest.raises(DataError, match=r"dataset\.bin: content: differs .*SHA-256"):
            self._open(folder)

    @pytest.mark.parametrize("what", ["tokens", "index", "tokenizer", "nothing"])
    def test_a_renamed_dataset_is_compared_with_its_description(
        self, folder: Path, what: str
    ) -> None:
        self._rename(folder, "other")
        if what == "tokens":
            _flip(folder / "other.bin")
        elif what == "index":
            write_dataset(folder / "small", [[1] * 40] * 40)
            (folder / "small.idx").rename(folder / "other.idx")
            (folder / "small.bin").rename(folder / "other.bin")
        elif what == "tokenizer":
            words = (folder / "other.tokenizer.json").read_text()
            swapped = words.replace('"!"', '"\0"').replace('"#"', '"!"').replace('"\0"', '"#"')
            assert swapped != words
            (folder / "other.tokenizer.json").write_text(swapped)
        spec = data_spec(None, str(folder / "other"))
        if what == "nothing":
            prepare(spec, Notices())
            return
        with pytest.raises(DataError, match="content: (differs from|has .* bytes where)"):
            prepare(spec, Notices())

    def test_a_description_of_another_dataset_in_the_folder_is_said(self, folder: Path) -> None:
        write_dataset(folder / "mine", [[1, 2, 0]] * 40)
        notices = Notices()
        prepare(data_spec(None, str(folder / "mine")), notices)
        assert any(
            "dataset.json describes dataset.bin, and not mine.bin" in n for n in notices.lines
        )
        for end in ("bin", "idx"):  # the described files under another name, beside it
            shutil.copy(folder / f"dataset.{end}", folder / f"copy.{end}")
        _flip(folder / "copy.bin")
        with pytest.raises(DataError, match=r"copy\.bin: content: differs"):
            prepare(data_spec(None, str(folder / "copy")), Notices())

    def test_large_tokens_are_compared_in_places(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A change that no place shows is noticed while the file is not too large, or said."""
        description, tokens = folder / "dataset.json", folder / "dataset.bin"
        monkeypatch.setattr(dataset_module, "BLOCK_BYTES", 4)
        record = record_file(tokens, sampled=True)
        tree = json.loads(description.read_text())
        tree["files"][0]["sampled"] = record.sampled
        description.write_text(json.dumps(tree))
        monkeypatch.setattr(dataset_module, "WHOLE_BYTES", 10)
        raw = bytearray(tokens.read_bytes())
        last = len(raw) - 4
        seen = {last * n // 63 + k for n in range(64) for k in range(4)}
        raw[next(n for n in range(len(raw)) if n not in seen)] ^= 1
        tokens.write_bytes(raw)
        with pytest.raises(DataError, match="differs"):  # it is younger than its description
            self._open(folder)
        monkeypatch.setattr(dataset_module, "YOUNGER_WHOLE_BYTES", 10)
        notices = Notices()
        self._open(folder, notices)
        assert "of its content 64 places can be compared, besides its size" in notices.lines[0]
        os.utime(tokens, (1, 1))
        notices = Notices()
        self._open(folder, notices)
        assert notices.lines == []
        raw[last] ^= 1
        tokens.write_bytes(raw)
        with pytest.raises(DataError, match="differs"):
            self._open(folder)
        del tree["files"][0]["sampled"]  # as older versions wrote it
        description.write_text(json.dumps(tree))
        tokens.write_bytes(raw)
        notices = Notices()
        self._open(folder, notices)
        assert "of its content nothing can be compared" in notices.lines[0]

    def test_a_foreign_sidecar_names_the_end_of_a_document(self, folder: Path) -> None:
        words = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(words.replace("<|endoftext|>", "</s>"))
        (folder / "dataset.json").unlink()
        with pytest.raises(DataError, match="end_of_document"):
            self._open(folder)
        (folder / "dataset.json").write_text('{"end_of_document": "</s>"}')
        notices = Notices()
        assert self._open(folder, notices).fingerprint.startswith("sampled:")
        assert len(notices.lines) == 1

    @pytest.mark.parametrize("content", ["[]", "3", '{"version": 1}', '{"version": 1, "files": 3}'])
    def test_an_odd_sidecar_is_no_crash(self, folder: Path, content: str) -> None:
        (folder / "dataset.json").write_text(content)
        assert self._open(folder).fingerprint.startswith("sampled:")

    def test_tokens_of_another_vocabulary_are_refused(self, folder: Path) -> None:
        prefix = folder / "dataset"
        write_dataset(prefix, [[300] * 40] * 5)  # one past the last token
        (folder / "dataset.json").unlink()
        data = self._open(folder)
        for read in (
            data.validation_text,
            data.validation_tokens,
            data.train_token_counts,
            lambda: data.train[0],
            lambda: data.validation[0],
        ):
            with pytest.raises(DataError, match="vocabulary of 300"):
                read()


def test_importing_loads_neither_torch_nor_tokenizers() -> None:
    program = (
        "import sys, megafp8.data.prepare, megafp8.data.loader\n"
        "assert not {'torch', 'tokenizers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_real_corpus(tmp_path: Path) -> None:
    """A third of the default job's own text: built once, opened at once, and exact."""

    def third() -> Iterator[Document]:
        return islice(builtin_documents(), 0, None, 3)

    notices = Notices()
    corpus = Corpus("builtin", builtin_key, third)
    spec = data_spec(
        tmp_path,
        splits=(900.0, 50.0, 50.0),
        seq_length=256,
        tokenizer=TokenizerSpec(library="builtin", vocab_size=1024),
    )
    prepare(spec, notices, corpus)

    def unread() -> Iterator[Document]:
        raise AssertionError("a cached dataset opens without reading the library")

    data = prepare(spec, notices, Corpus("builtin", builtin_key, unread))
    assert notices.builds == 1
    assert data.vocab_size == 1024
    texts = [document.text.encode() for document in third()]
    assert sum(map(len, texts)) > 300_000
    assert [
        data.document_text(data.train_parts[0].opened, number) for number in range(len(texts))
    ] == texts
    assert len(data.validation_text()) == sum(
        len(texts[d]) for d in data.validation_parts[0].documents
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 3000))
def test_even_and_no_more_than_asked_for(lengths: list[int], limit: int) -> None:
    tokens = np.array(lengths)
    total = sum(lengths)
    chosen = excerpt(tokens, total, limit)
    if total <= limit:
        assert chosen.tolist() == list(range(len(lengths)))
        return
    assert len(chosen) == 1 or tokens[chosen].sum() <= limit
    assert chosen[0] == 0 and len(set(np.diff(chosen).tolist())) <= 1
    assert chosen[-1] < len(lengths)


def test_equal_documents_fill_the_limit() -> None:
    tokens = np.full(10_000, 10)
    assert tokens[excerpt(tokens, 100_000, 7_000)].sum() == pytest.approx(7_000, rel=0.05)
    # Two datasets share it by their sizes.
    assert tokens[excerpt(tokens, 400_000, 28_000)].sum() == pytest.approx(7_000, rel=0.05)


def test_a_long_text_is_validated_and_counted_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = data_spec(tmp_path)
    whole = prepare(spec, lambda line: None, tiny_corpus())
    assert whole.num_final_tokens == whole.num_validation_tokens
    monkeypatch.setattr(prepare_module, "VALIDATION_TOKENS", whole.num_validation_tokens // 2)
    monkeypatch.setattr(prepare_module, "COUNTED_TOKENS", 1000)
    data = prepare(spec, lambda line: None, tiny_corpus())
    (part,), (every,) = data.final_parts, data.validation_parts
    assert 0 < data.num_final_tokens <= data.num_validation_tokens // 2
    assert set(part.documents.tolist()) < set(every.documents.tolist())
    # The loss, the bytes and the predictors beside it are all of these documents.
    assert len(data.validation_tokens()) == data.num_final_tokens == part.num_tokens
    predicted = [n for i in range(data.validation.num_samples) for n in data.validation[i][1:]]
    assert [n for n in predicted if n >= 0] == data.validation_tokens().tolist()
    texts = [data.document_text(part.opened, int(d)) for d in part.documents]
    assert data.validation_text() == b"".join(texts)
    assert 0 < data.train_token_counts().sum() <= 1000 < data.num_train_tokens
    # Validation during training draws from everything still.
    assert data.periodic_validation.num_samples == whole.periodic_validation.num_samples
    assert data.fingerprint == whole.fingerprint


# ---- what is read, and how often


def test_without_validation_all_documents_train(tmp_path: Path) -> None:
    spec = data_spec(tmp_path, splits=(100.0, 0.0, 0.0))
    with pytest.raises(DataError, match="leave the validation split empty"):
        prepare(spec, Notices(), tiny_corpus())
    data = prepare(replace(spec, validates=False), Notices(), tiny_corpus())
    assert sorted(data.train_parts[0].documents) == list(range(40))
    assert data.num_validation_tokens == 0 and data.periodic_validation.num_samples > 0
    assert data.num_final_tokens == data.num_train_tokens and data.validation_prompt(3)
    assert data.fingerprint == prepare(data_spec(tmp_path), Notices(), tiny_corpus()).fingerprint
    with pytest.raises(DataError, match="leave the train split empty"):
        prepare(replace(spec, validates=False, splits=(0.0, 0.0, 1.0)), Notices(), tiny_corpus())


def test_one_document_trains_where_no_validation_is_asked_for(tmp_path: Path) -> None:
    corpus = tiny_corpus(lambda: islice(tiny_documents(), 6, 7))
    with pytest.raises(DataError, match="empty: 1 documents"):
        prepare(data_spec(tmp_path), Notices(), corpus)
    data = prepare(data_spec(tmp_path, validates=False), Notices(), corpus)
    assert data.train[0].size == 17 and data.num_validation_tokens == 0
