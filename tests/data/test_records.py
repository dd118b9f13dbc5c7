"""Values of JSON and Parquet files keep their types: what is no text is refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
import tempfile
from pathlib import Path
from unittest import mock

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.cli.preprocess import main
from megafp8.data import records
from megafp8.data.examples import read_examples
from megafp8.data.prompts import checked_fields
from megafp8.data.records import json_records, plain_texts
from megafp8.data.text_sources import TextSource
from megafp8.errors import DataError
from megafp8.specs.data import InstructionSpec

GOOD = [f'Line one of {n}.\nHe said "hi", café.' for n in range(40)]
NO_TEXTS = {
    "number": (5, "int"),
    "fraction": (0.5, "float"),
    "truth": (True, "bool"),
    "list": (["a"], "list"),
    "object": ({"a": "b"}, "dict"),
}


def lines(texts: list[object], key: str = "text") -> str:
    return "".join(json.dumps({key: text}) + "\n" for text in texts)


@pytest.mark.parametrize("kind", NO_TEXTS)
@pytest.mark.parametrize("place", [0, 20, 39])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.ndjson.xz", "a.jsonl.bz2"])
def test_one_value_that_is_no_text_is_refused_by_its_line(
    tmp_path: Path, kind: str, place: int, name: str
) -> None:
    value, of_type = NO_TEXTS[kind]
    content = lines([*GOOD[:place], value, *GOOD[place + 1 :]]).encode()
    packed = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
    path = tmp_path / name
    path.write_bytes(packed.get(path.suffix, bytes)(content))
    said = rf"{name}: line {place + 1}: column 'text': holds {of_type}, not text"
    with pytest.raises(DataError, match=said):
        list(TextSource(files=(path,)).texts())


def test_the_command_writes_nothing_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines([*GOOD, 5]))
    words = [path, "--output", tmp_path / "o", "--tokenizer", "bytes", "--workers", 0]
    assert main([str(word) for word in words]) == 2
    assert "line 41: column 'text': holds int, not text" in capsys.readouterr().err
    assert not (tmp_path / "o.bin").exists()


def test_numbers_of_a_second_file_do_not_become_texts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(list(GOOD)))
    (tmp_path / "b.jsonl").write_text(lines([1, 2, 3]))
    with pytest.raises(DataError, match=r"b\.jsonl: line 1: column 'text': holds int"):
        list(TextSource(files=(tmp_path,)).texts())


def test_numbers_of_a_second_table_do_not_become_texts(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": GOOD}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "b.parquet")
    for source in (TextSource(files=(tmp_path,)), TextSource(dataset=str(tmp_path))):
        with pytest.raises(DataError, match=r"b\.parquet: column 'text': holds int64, not text"):
            list(source.texts())


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2]),
        pa.array([["a"], ["b"]]),
        pa.array([{"a": 1}]),
        pa.array([b"raw"]),
        pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', '"text"'])),
    ],
    ids=lambda column: str(column.type),
)
def test_tables_without_texts_are_refused_by_their_type(tmp_path: Path, column: pa.Array) -> None:
    """The last column is the one that the `datasets` library writes for values of mixed types."""
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: column 'text': holds .*, not text"):
        list(TextSource(files=(tmp_path,)).texts())


def test_tables_with_texts_of_any_encoding_are_read(tmp_path: Path) -> None:
    encodings = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
    for number, kind in enumerate(encodings):
        texts = pa.array([*GOOD, None]).cast(kind)
        pq.write_table(pa.table({"n": range(41), "text": texts}), tmp_path / f"{number}.parquet")
    source = TextSource(files=(tmp_path,))
    assert list(source.texts()) == [*GOOD, ""] * 3
    assert list(source.texts(45)) == ([*GOOD, ""] * 3)[45:]


def test_texts_that_look_like_dates_stay_as_they_are(tmp_path: Path) -> None:
    """A library that guesses types would write midnight behind the date."""
    dates = ["2020-01-01", "2020-01-02"]
    (tmp_path / "a.jsonl").write_text(lines(list(GOOD)))
    (tmp_path / "b.jsonl").write_text(lines(list(dates)))
    assert list(TextSource(files=(tmp_path,)).texts()) == [*GOOD, *dates]


@pytest.mark.parametrize(
    ("name", "content", "want"),
    [
        ("a.json", json.dumps([{"text": "a"}, {"text": "b"}], indent=1), ["item 1", "item 2"]),
        ("a.jsonl", json.dumps([{"text": "a"}]), ["item 1"]),
        ("a.json", json.dumps({"text": "a"}, indent=1), ["item 1"]),
        ("a.json", '{"text": "a"}\n\n{"text": "b"}', ["line 1", "line 3"]),
        ("a.jsonl", '\ufeff\n{"text": "a"}\r\n\r\n{"text": "b"}\r\n', ["line 2", "line 4"]),
    ],
)
def test_forms_of_json_files(tmp_path: Path, name: str, content: str, want: list[str]) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8", newline="")
    found = list(json_records(str(path)))
    assert [place for place, _ in found] == want
    assert [record["text"] for _, record in found] == ["a", "b"][: len(want)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}\n["b"]\n', "line 2: is of type list, not an object"),
        ('{"text": "a"}\n5\n', "line 2: is of type int, not an object"),
        ('{"text": "a"}\n{"body": "b"}\n', "line 2: column 'text': is not there; there are body"),
        ('{"text": "a"}\n{}\n', "line 2: column 'text': is not there; there is none"),
        ("[1, 2", "file: is not JSON"),
        ("[" * 100_000, "file: is not JSON"),
    ],
)
def test_records_that_are_no_objects_or_lack_the_text(
    tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=said):
        list(TextSource(files=(tmp_path,)).texts())


def test_empty_texts_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(["a", None, "", "b"]))
    words = [path, "--output", tmp_path / "o", "--tokenizer", "bytes", "--workers", 0]
    assert main([str(word) for word in words]) == 0
    said = capsys.readouterr().out
    assert "2 of 4 texts are empty and left out" in said and "2 documents" in said


# ---- fine-tuning


def spec() -> InstructionSpec:
    return InstructionSpec(train_files=("a",), model="m")


@pytest.mark.parametrize("kind", NO_TEXTS)
@pytest.mark.parametrize("form", ["jsonl", "json", "hf"])
def test_a_field_that_is_no_text_is_refused_by_its_line(
    tmp_path: Path, kind: str, form: str
) -> None:
    value, of_type = NO_TEXTS[kind]
    records = [{"input": text, "output": text} for text in GOOD]
    records.append({"input": value, "output": "x"})
    path = tmp_path / ("a.json" if form == "json" else "a.jsonl")
    content = json.dumps(records) if form == "json" else "\n".join(map(json.dumps, records))
    path.write_text(content)
    examples = read_examples(f"hf:{tmp_path}" if form == "hf" else str(path))
    assert [example.fields["input"] for example in examples[:-1]] == GOOD
    place = "item" if form == "json" else "line"
    with pytest.raises(DataError, match=rf"{place} 41: input: is of type {of_type}, not a text"):
        checked_fields(spec(), examples)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_numbers_of_a_second_file_of_a_named_dataset_stay_numbers(
    tmp_path: Path, kind: str
) -> None:
    for name, values in (("a", GOOD), ("b", [1, 2])):
        records = [{"input": value, "output": "x"} for value in values]
        if kind == "jsonl":
            (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
        else:
            pq.write_table(pa.Table.from_pylist(records), tmp_path / f"{name}.parquet")
    examples = read_examples(f"hf:{tmp_path}:train")
    assert [example.fields["input"] for example in examples] == [*GOOD, 1, 2]
    part = read_examples(f"hf:{tmp_path}:train[10:12]")
    assert [example.fields["input"] for example in part] == GOOD[10:12]
    with pytest.raises(DataError, match=r"b\.\w+, \w+ 1: input: is of type int, not a text"):
        checked_fields(spec(), examples)


PIECES = st.sampled_from(
    ["\n", "\n\n", "\r\n", "\r", "a", "bc", "ü", "\ufeff", " ", "\x0b", "\u2028"]
)


FILES_AT_ONCE = 12


@settings(max_examples=6)
@given(
    st.lists(st.lists(PIECES, max_size=40), min_size=FILES_AT_ONCE, max_size=FILES_AT_ONCE),
    st.integers(1, 9),
)
def test_plain_texts_are_those_of_the_library(files: list[list[str]], at_once: int) -> None:
    """`datasets` reads ten million characters at once; here a few, so that texts are parted.

    Each file is a split of its own, since the library takes long to begin and not to read.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(records, "_CHARACTERS_AT_ONCE", at_once),
    ):
        paths = {f"f{n}": str(Path(folder, f"{n}.txt")) for n in range(len(files))}
        for path, pieces in zip(paths.values(), files, strict=True):
            Path(path).write_bytes("".join(pieces).encode())
        for unit, name in (("file", "document"), ("paragraph", "paragraph"), ("line", "line")):
            streams = datasets.load_dataset(
                "text", data_files=paths, streaming=True, sample_by=name, chunksize=at_once
            )
            for split, path in paths.items():
                want = [record["text"] for record in streams[split]]
                assert list(plain_texts(path, unit)) == want, unit


def test_files_are_read_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` is needed for datasets by name alone, and pyarrow for Parquet."""
    (tmp_path / "a.txt").write_text("one\n")
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("two\n")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n')
    (tmp_path / "d.txt").write_bytes("vier".encode("utf-16"))
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    files = tuple(tmp_path / name for name in ("a.txt", "b.txt.gz", "c.jsonl"))
    assert list(TextSource(files=files).texts()) == ["one\n", "two\n", "three"]
    for source, said in (
        (TextSource(dataset="somebody/texts"), "needs the datasets package"),
        (TextSource(files=(tmp_path / "e.parquet",)), "needs the pyarrow package"),
        (TextSource(files=(tmp_path / "f.txt.zst",)), "needs the zstandard package"),
        (TextSource(files=(tmp_path,)), "d.txt: text: cannot be read"),
    ):
        for path in source.files:
            if path.suffix in (".parquet", ".zst"):
                path.write_bytes(b"x")
        with pytest.raises(DataError, match=said):
            list(source.texts())
        for path in source.files:
            if path.is_file():
                path.unlink()
