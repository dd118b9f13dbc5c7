"""Compressed and other files are read whole or refused: a file that ends early is no corpus."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megafp8.cli.preprocess import main
from megafp8.data.compressed import opened
from megafp8.data.text_sources import TextSource
from megafp8.errors import DataError

TEXTS = [f"Line one of {n}.\n\nHe said “hi”, {n * 7919}." for n in range(40)]


def zst(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="needs the package zstandard")
    packed: bytes = zstandard.ZstdCompressor().compress(content)
    return packed


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zst,
}


def as_json_lines() -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def as_json_list() -> bytes:
    return json.dumps([{"text": text} for text in TEXTS], indent=1).encode()


def as_parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": TEXTS}), file, row_group_size=16)
    return file.getvalue()


def as_stream() -> bytes:
    file, table = io.BytesIO(), pa.table({"text": TEXTS})
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=16)
    return file.getvalue()


def as_arrow_file() -> bytes:
    file, table = io.BytesIO(), pa.table({"text": TEXTS})
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=16)
    return file.getvalue()


def as_csv() -> bytes:
    quoted = (text.replace('"', '""') for text in TEXTS)
    return ("text\n" + "".join(f'"{text}"\n' for text in quoted)).encode()


FORMS = {
    "a.jsonl": as_json_lines,
    "a.json": as_json_list,
    "a.parquet": as_parquet,
    "a.arrow": as_stream,
    "b.arrow": as_arrow_file,
    "a.csv": as_csv,
}


def texts(path: Path) -> list[str]:
    return list(TextSource(files=(path,)).texts())


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("name", FORMS)
def test_all_forms_are_read_and_refused_when_they_end_early(
    tmp_path: Path, name: str, ending: str
) -> None:
    content = PACK[ending](FORMS[name]())
    path = tmp_path / f"{name}{ending}"
    path.write_bytes(content)
    assert texts(path) == TEXTS
    for end in {*range(40), *range(0, len(content), len(content) // 40), *range(-40, 0)}:
        cut = content[:end]
        by_lines = name in ("a.jsonl", "a.csv") and not ending
        if by_lines and (cut in (b"text", b"text\n") or (cut + b"\n").endswith((b'"\n', b"}\n"))):
            continue  # whole records, which nobody can tell from a shorter file
        if by_lines and cut.endswith((b'"\n', b"}\n")):
            continue
        path.write_bytes(cut)
        with pytest.raises(DataError, match=name):
            texts(path)


@pytest.mark.parametrize("ending", [ending for ending in PACK if ending])
@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
def test_plain_text_is_whole_or_refused(tmp_path: Path, unit: str, ending: str) -> None:
    whole = "\n".join(TEXTS)
    content = PACK[ending](whole.encode())
    path = tmp_path / f"a.txt{ending}"
    for end in [*range(0, len(content), 7), *range(len(content) - 12, len(content))]:
        path.write_bytes(content[:end])
        with pytest.raises(DataError, match=r"a\.txt.*ends in the middle|a\.txt.*decompressed"):
            list(TextSource(files=(path,), document=unit).texts())  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", [ending for ending in PACK if ending])
def test_several_frames(tmp_path: Path, ending: str) -> None:
    """Python's readers take a damaged second frame for the end of the file."""
    first, second = (PACK[ending](part) for part in (b"one\n", b"two\n" * 5000))
    path = tmp_path / f"a.txt{ending}"
    for between, after in ((b"", b""), (b"\0" * 8, b"\0" * 512)):
        path.write_bytes(first + between + second + after)
        assert texts(path) == ["one\n" + "two\n" * 5000]
    for end in range(len(first) + 1, len(first + second)):
        path.write_bytes((first + second)[:end])
        with pytest.raises(DataError, match="ends in the middle"):
            texts(path)
    damaged = bytearray(first + second)
    damaged[len(first)] ^= 0xFF
    path.write_bytes(bytes(damaged))
    with pytest.raises(DataError, match="cannot be decompressed"):
        texts(path)


def test_either_package_of_zstandard_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("backports.zstd", reason="needs the package backports.zstd")
    zstandard = pytest.importorskip("zstandard", reason="needs the package zstandard")
    far = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    packed = zst(as_json_lines()) + zstandard.ZstdCompressor(compression_params=far).compress(
        as_json_lines()
    )
    path = tmp_path / "a.jsonl.zst"
    cuts = [len(packed) - 1, len(packed) - 3, len(packed) // 4, 1, 0]
    for hidden in ("backports", "zstandard"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, hidden, None)
            path.write_bytes(packed)
            assert texts(path) == TEXTS * 2, hidden
            for end in cuts:
                path.write_bytes(packed[:end])
                with pytest.raises(DataError, match="ends in the middle"):
                    texts(path)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "backports", None)
    with pytest.raises(DataError, match="needs the zstandard package. pip install zstandard"):
        texts(path)


@pytest.mark.parametrize("options", ["", "  keep_linebreaks: true\n"])
@pytest.mark.parametrize("hidden", ["backports", "zstandard"])
def test_a_named_dataset_is_whole_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, hidden: str
) -> None:
    """With options of its own `datasets` reads the file, by whichever package is there."""
    for name in ("backports.zstd", "zstandard"):
        pytest.importorskip(name, reason=f"needs the package {name}")
    card = f"---\nconfigs:\n- config_name: default\n  data_files: a.txt.zst\n{options}---\n"
    (tmp_path / "README.md").write_text(card)
    content = zst(b"a line\n" * 20_000)
    path = tmp_path / "a.txt.zst"
    source = TextSource(dataset=str(tmp_path))
    monkeypatch.setitem(sys.modules, hidden, None)
    path.write_bytes(content)
    assert len(list(source.texts())) == 20_000
    path.write_bytes(content[:-3])
    with pytest.raises(DataError, match="ends in the middle of its compressed content"):
        list(source.texts())


def test_urls_are_decompressed_too(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one"))
    with opened(f"file://{path}") as file:
        assert file.read() == b"one"


@pytest.mark.parametrize("form", ["Dataset", "DatasetDict"])
def test_a_saved_dataset_is_whole_or_refused(tmp_path: Path, form: str) -> None:
    saved = datasets.Dataset.from_dict({"text": TEXTS})
    if form == "DatasetDict":
        saved = datasets.DatasetDict(train=saved, test=saved.select([3]))
    saved.save_to_disk(str(tmp_path / "saved"), **({"num_shards": 3} if form == "Dataset" else {}))
    for source in (
        TextSource(files=(tmp_path / "saved",)),
        TextSource(dataset=str(tmp_path / "saved")),
    ):
        assert list(source.texts()) == TEXTS
    last = sorted((tmp_path / "saved").rglob("data-*.arrow"))[-1]
    if form == "DatasetDict":
        test = TextSource(files=(tmp_path / "saved",), split="test")
        assert list(test.texts()) == [TEXTS[3]] and "not train" in test.notes()[0]
    content = last.read_bytes()
    for end in range(0, len(content), 8):  # messages end at such places
        last.write_bytes(content[:end])
        with pytest.raises(DataError, match="ends without the mark|cannot be read"):
            list(source.texts())
    last.unlink()
    with pytest.raises(DataError, match="saved dataset: cannot be used"):
        list(TextSource(files=(tmp_path / "saved",)).texts())


def test_the_command_writes_nothing_of_a_file_that_ends_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = zst(("a line\n" * 20_000).encode())
    (tmp_path / "t.txt.zst").write_bytes(content[:-3])
    words = ["--document", "line", "--tokenizer", "bytes", "--workers", "0"]
    command = [str(tmp_path / "t.txt.zst"), "--output", str(tmp_path / "o"), *words]
    assert main(command) == 2
    assert "ends in the middle of its compressed content" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt.zst"]
    (tmp_path / "t.txt.zst").write_bytes(content)
    assert main(command) == 0 and "20000 documents" in capsys.readouterr().out
