"""Read texts, and records of JSON and Parquet files one by one with their places; convert no value.

The `datasets` library gives a whole column one type. So one number among texts would turn every
text into JSON source, and the numbers of a second file would become texts. Here each value keeps
the type that its file gives it, so that whoever reads it can refuse it by its place.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
from collections.abc import Iterator
from typing import IO, Any, Literal

from megafp8.errors import DataError

_ROWS_AT_ONCE = 512
_CHARACTERS_AT_ONCE = 10 << 20
_TEXT_TYPES = ("string", "large_string", "string_view")


def json_records(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each record of a JSON file.

    A file has one record in each line, which places count from 1 (`line 3`), or is one list of
    records (`item 3`), or one record over several lines (`item 1`). Empty lines count as lines.

    Args:
        name: A path, or a URL that fsspec opens; its ending may name a compression.

    Raises:
        DataError: A line or the file is not JSON in UTF-8, or the file is empty.
    """
    with _opened(name) as file:
        lines = _numbered_lines(file)
        number, line = next(lines, (0, b""))
        if not number:
            raise DataError(name, "file", "is empty", "Leave it out")
        if line.startswith(b"[") or (".json" in _endings(name) and not _is_json(line)):
            whole = _parsed(name, "file", line + b"\n" + file.read())
            items = whole if isinstance(whole, list) else [whole]
            yield from ((f"item {place}", item) for place, item in enumerate(items, start=1))
            return
        yield f"line {number}", _parsed(name, f"line {number}", line)
        for number, line in lines:
            yield f"line {number}", _parsed(name, f"line {number}", line)


def encoding_hint(content: bytes) -> str:
    """Return what to do with a text that is not UTF-8; `content` is its beginning."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "It is UTF-16: make it UTF-8 with iconv -f UTF-16 -t UTF-8 FILE > NEW"
    if b"\0" in content:
        return "It has NUL bytes, as programs and archives do: leave it out, or unpack it"
    return "It is not UTF-8: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW, if it is Western European"


def plain_texts(name: str, unit: Literal["file", "paragraph", "line"]) -> Iterator[str]:
    """Yield the documents of a plain text file, in which every kind of line end becomes a newline.

    A paragraph ends at an empty line, and an empty one is left out. A line has no line end.

    Raises:
        DataError: The file is not in UTF-8.
    """
    try:
        yield from _units_of(name, unit)
    except UnicodeDecodeError as error:
        reason = f"cannot be read ({type(error).__name__}: {error})"
        raise DataError(name, "text", reason, encoding_hint(error.object)) from error


def _units_of(name: str, unit: str) -> Iterator[str]:
    with _opened(name) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
        if unit == "file":
            yield text.read()
        elif unit == "line":
            yield from (line.removesuffix("\n") for line in text)
        else:
            rest = ""
            while part := text.read(_CHARACTERS_AT_ONCE):
                *whole, rest = (rest + part + text.readline()).split("\n\n")
                yield from filter(None, whole)
            if rest:
                yield rest


def parquet_texts(name: str, column: str) -> Iterator[str | None]:
    """Yield the texts of one column of a Parquet file; a null is None.

    Raises:
        DataError: The column is missing, or its type is not text.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with _opened(name) as file, parquet.ParquetFile(file) as table:
        schema = table.schema_arrow
        if column not in schema.names:
            raise missing_column(name, f"column {column!r}", schema.names)
        kind = schema.field(column).type
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        if str(plain) not in (*_TEXT_TYPES, "null"):
            raise not_text(name, f"column {column!r}", str(kind))
        for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[column]):
            yield from batch.column(0).to_pylist()


def missing_column(name: object, field: str, columns: list[str]) -> DataError:
    """Return the error for a file or a record without the column that shall hold the text."""
    there = f"there are {', '.join(columns)}" if columns else "there is none"
    hint = "Name the one that holds the text: --text-key NAME"
    return DataError(name, field, f"is not there; {there}", hint)


def not_text(name: object, field: str, kind: str) -> DataError:
    """Return the error for a value or a column that is no text."""
    hint = "Name the column that holds the text (--text-key NAME), or mend what is named here"
    return DataError(name, field, f"holds {kind}, not text", hint)


def not_an_object(name: object, place: str, record: object) -> DataError:
    """Return the error for a record that has no named fields."""
    reason = f"is of type {type(record).__name__}, not an object"
    return DataError(name, place, reason, 'Write a record as {"text": "..."}')


@contextlib.contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    """Open a file to read its bytes, decompressed if its ending names a compression."""
    import fsspec
    from fsspec.utils import infer_compression

    if "://" in name:
        with fsspec.open(name, "rb", compression="infer") as file:
            yield file
        return
    compression = infer_compression(name)
    if compression is None and name.lower().endswith(".zst"):
        raise DataError(name, "file", "needs the zstandard package", "pip install zstandard")
    with fsspec.filesystem("file").open(name, "rb", compression=compression) as file:
        yield file


def _endings(name: str) -> list[str]:
    """Return the last two endings of a file's name, such as `.json` and `.gz`."""
    return [f".{part}" for part in name.lower().split(".")[-2:]]


def _numbered_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not empty with its number, without the mark of UTF-8 at the start."""
    for number, line in enumerate(file, start=1):
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if text := text.strip():
            yield number, text


def _parsed(name: str, place: str, content: bytes) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        hint = "Mend it, or leave it out"
        raise DataError(name, place, f"is not JSON ({error})", hint) from error


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content.decode())
    except (ValueError, RecursionError):
        return False
    return True
