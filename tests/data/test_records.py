"""Values of JSON and Parquet files keep their types: what is no text is refused."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import json
import lzma
import shutil
import sys
import tempfile
from collections.abc import Callable
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

    Each file is a split of its own, since the library takes long to begin and not to read. It takes
    the mark of UTF-8 at the start of a file for text, so that it gets the files without.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(records, "_CHARACTERS_AT_ONCE", at_once),
    ):
        paths = {f"f{n}": str(Path(folder, f"{n}.txt")) for n in range(len(files))}
        for path, pieces in zip(paths.values(), files, strict=True):
            text = "".join(pieces)
            Path(f"{path}.marked").write_bytes(text.encode())
            Path(path).write_bytes(text.removeprefix("\ufeff").encode())
        for unit, name in (("file", "document"), ("paragraph", "paragraph"), ("line", "line")):
            streams = datasets.load_dataset(
                "text", data_files=paths, streaming=True, sample_by=name, chunksize=at_once
            )
            for split, path in paths.items():
                want = [record["text"] for record in streams[split]]
                assert list(plain_texts(f"{path}.marked", unit)) == want, unit


def test_files_are_read_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` is needed for datasets by name alone, and pyarrow for Parquet."""
    (tmp_path / "a.txt").write_text("one\n")
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("two\n")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n')
    (tmp_path / "d.txt").write_bytes("vier".encode("utf-16"))
    for name in ("datasets", "pyarrow", "zstandard", "backports"):
        monkeypatch.setitem(sys.modules, name, None)
    files = tuple(tmp_path / name for name in ("a.txt", "b.txt.gz", "c.jsonl"))
    assert list(TextSource(files=files).texts()) == ["one\n", "two\n", "three"]
    for source, said in (
        (TextSource(dataset="somebody/texts"), "needs the datasets package"),
        (TextSource(files=(tmp_path / "e.parquet",)), "needs the pyarrow package"),
        (TextSource(files=(tmp_path / "f.txt.zst",)), "needs the zstandard package"),
        (TextSource(files=(tmp_path / "d.txt",)), "d.txt: text: is in UTF-16. Make it UTF-8"),
    ):
        for path in source.files:
            if path.suffix in (".parquet", ".zst"):
                path.write_bytes(b"x")
        with pytest.raises(DataError, match=said):
            list(source.texts())
        for path in source.files:
            if path.is_file():
                path.unlink()


# ---- the mark of UTF-8, and those of other encodings

MARK = codecs.BOM_UTF8


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_the_mark_of_utf_8_is_no_text(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    ending = {gzip.compress: ".gz", bz2.compress: ".bz2", lzma.compress: ".xz"}.get(pack, "")
    for name, content, want in (
        ("a.txt", "one\ntwo \ufeff", ["one\ntwo \ufeff"]),
        ("a.md", "", [""]),
        ("a.jsonl", '{"text": "one"}', ["one"]),
        ("a.json", '[{"text":\n"one"}]', ["one"]),
        ("a.csv", "text,n\none,1", ["one"]),
        ("a.tsv", "text\tn\none\t1", ["one"]),
    ):
        path = tmp_path / f"{name}{ending}"
        path.write_bytes(pack(MARK + content.encode()))
        assert list(TextSource(files=(path,)).texts()) == want, name
    path = tmp_path / f"b.txt{ending}"
    path.write_bytes(pack(MARK + b"one\n\ntwo"))
    for unit, want in (("line", ["one", "", "two"]), ("paragraph", ["one", "two"])):
        assert list(plain_texts(str(path), unit)) == want  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.txt.gz", "a.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-16-BE", "UTF-32"])
def test_other_marks_are_refused_by_name(tmp_path: Path, name: str, encoding: str) -> None:
    mark = "\ufeff" if encoding.endswith("BE") else ""
    content = f'{mark}{{"text": "one"}}\n'.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    said = rf"{name}: text: is in {encoding[:6]}\. Make it UTF-8 with iconv -f {encoding[:6]} "
    with pytest.raises(DataError, match=said):
        list(TextSource(files=(tmp_path / name,)).texts())


# ---- what a folder holds


def described(folder: Path) -> list[str]:
    source = TextSource(files=(folder,))
    assert list(source.texts()) == ["one", "two"]
    return [note.removeprefix(str(folder)) for note in source.notes()]


def test_what_a_folder_leaves_out_is_said(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.jsonl").write_text(lines(["one"]))
    (tmp_path / "b" / "c.JSONL").write_text(lines(["two"]))
    assert described(tmp_path) == []
    for name in (".hidden.jsonl", ".git/x.jsonl", "b/.x/deep.jsonl", "a.zip", "x/b.zip", "Makefile",
                 "a.jsonl.lz4", "x/c.png", "b/notes.docx"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(lines(["not meant"]))
    (tmp_path / "linked").symlink_to(tmp_path / "x")
    assert described(tmp_path) == [
        ": reads 2 .jsonl; leaves out 3 hidden, 2 .zip, 1 .docx, 1 .lz4, 1 .png, "
        "1 linked folder(s), 1 without an ending"
    ]
    (tmp_path / "b" / "c.JSONL").unlink()
    pq.write_table(pa.table({"text": ["two"]}), tmp_path / "b" / "c.parquet")
    assert "reads 1 .jsonl, 1 .parquet; leaves out" in described(tmp_path)[0]
    hidden = tmp_path / ".git"
    assert list(TextSource(files=(hidden, hidden / "x.jsonl")).texts()) == ["not meant"] * 2
    with pytest.raises(DataError, match="has no text.* file; it has 1 .png, 1 .zip"):
        list(TextSource(files=(tmp_path / "x",)).texts())


@pytest.mark.parametrize("records", ["train.jsonl", "a.csv", "train.parquet", "saved"])
@pytest.mark.parametrize("plain", ["README.md", "LICENSE.txt", "x/notes.txt.gz"])
def test_plain_text_beside_records_is_refused(tmp_path: Path, records: str, plain: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / plain).parent.mkdir(exist_ok=True)
    (tmp_path / plain).write_text("read me")
    path = tmp_path / "data" / records
    if records == "saved":
        datasets.Dataset.from_dict({"text": ["one"]}).save_to_disk(str(path))
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"text": ["one"]}), path)
    else:
        path.write_text(lines(["one"]) if path.suffix == ".jsonl" else "text\none\n")
    ending = ".arrow" if records == "saved" else path.suffix
    said = rf"has plain text \({Path(plain).name}\) beside records.* such as .*/\*{ending}"
    with pytest.raises(DataError, match=said):
        list(TextSource(files=(tmp_path,)).texts())
    (tmp_path / plain).unlink()
    assert list(TextSource(files=(tmp_path,)).texts()) == ["one"]


# ---- CSV, and keys inside of others


def test_no_row_of_csv_is_lost_or_converted(tmp_path: Path) -> None:
    rows = ["NA", "null", "nan", "None", "007", "1.0", "2020-01-02", " a ", 'b, "c"\nd', "", "é"]
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        with open(tmp_path / name, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=separator)
            writer.writerows([["n", "text"], *([n, row] for n, row in enumerate(rows))])
        folder = tmp_path / Path(name).suffix[1:]
        folder.mkdir()
        shutil.copy(tmp_path / name, folder)
        for source in (TextSource(files=(tmp_path / name,)), TextSource(dataset=str(folder))):
            assert list(source.texts()) == rows
    (tmp_path / "csv" / "README.md").write_text(  # options that we do not read: the library does
        "---\nconfigs:\n- config_name: default\n  data_files: a.csv\n"
        "  skipinitialspace: true\n---\n"
    )
    read = list(TextSource(dataset=str(tmp_path / "csv")).texts())
    assert read == ["a " if row == " a " else row for row in rows]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "line 1: column 'text': is not there; there is none"),
        ("a,b\n1,2\n", "line 1: column 'text': is not there; there are a, b"),
        ("text,text\n1,2\n", "line 1: column 'text': is there twice"),
        ('text,n\n"x\ny",2\n1,2,3\n', "line 4: has 3 fields, and the first line has 2"),
        ('text,n\n"x",1\n"y', "line 3: is not CSV .unexpected end of data"),
        ('text,n\n"x"y,1\n', "line 2: is not CSV"),
    ],
)
def test_csv_that_cannot_be_read(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError, match=said):
        list(TextSource(files=(tmp_path / "a.csv",)).texts())


def test_fields_of_csv_have_any_length(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text\n{'x' * 200_000}\n")
    assert [len(text) for text in TextSource(files=(tmp_path,)).texts()] == [200_000]


NESTED = [
    ({"a": {"b": "inner"}}, "a.b", "inner"),
    ({"a": {"b": "inner"}, "a.b": "literal"}, "a.b", "literal"),
    ({"a.b": {"c": "one"}, "a": {"b.c": "two"}}, "a.b.c", "one"),
    ({"a": {"b": {"c": "deep"}, "n": "x"}}, "a.b.c", "deep"),
    ({"a": {"b.c": "two"}}, "a.b.c", "two"),
    ({"a": {"x": "y"}, "n": "z"}, "a.b", None),
    ({"a": "no object", "n": "z"}, "a.b", None),
]


@pytest.mark.parametrize(("record", "key", "want"), NESTED)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow"])
def test_a_key_inside_of_another(
    tmp_path: Path, name: str, record: dict[str, object], key: str, want: str | None
) -> None:
    path, table = tmp_path / name, pa.Table.from_pylist([record, record])
    if name.endswith(".parquet"):
        pq.write_table(table, path)
    elif name.endswith(".arrow"):
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text(json.dumps([record, record], indent=1) if name == "a.json"
                        else f"{json.dumps(record)}\n" * 2)  # fmt: skip
    source = TextSource(files=(path,), text_key=key)
    if want is not None:
        assert list(source.texts()) == [want] * 2
        return
    there = "a.x, n" if isinstance(record["a"], dict) else "a, n"
    with pytest.raises(DataError, match=f"column 'a.b': is not there; there are {there}"):
        list(source.texts())


def test_a_struct_that_is_missing_has_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [{"b": "x"}, None, {"b": None}]}), tmp_path / "a.parquet")
    assert list(TextSource(files=(tmp_path,), text_key="a.b").texts()) == ["x", "", ""]


def test_rows_of_a_table_are_read_by_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"text": [f"{n}" * 10_000 for n in range(10)]}), tmp_path / "a.parquet")
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    assert records._rows_at_once(metadata, "text") == 512
    monkeypatch.setattr(records, "_BYTES_AT_ONCE", 35_000)
    assert records._rows_at_once(metadata, "text") == 3
    monkeypatch.setattr(records, "_BYTES_AT_ONCE", 10)
    assert records._rows_at_once(metadata, "text") == 1
    assert len(list(TextSource(files=(tmp_path,)).texts())) == 10
