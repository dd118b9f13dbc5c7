"""Read texts, and records of files one by one with their places; convert no value.

The `datasets` library gives a whole column one type. So one number among texts would turn every
text into JSON source, and the numbers of a second file would become texts. Here each value keeps
the type that its file gives it, so that whoever reads it can refuse it by its place.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any, Literal

from megafp8.data.compressed import opened
from megafp8.errors import DataError

_ROWS_AT_ONCE = 512
_BYTES_AT_ONCE = 8 << 20  # of a column of a table, on average
_CHARACTERS_AT_ONCE = 10 << 20
_TEXT_TYPES = ("string", "large_string", "string_view")
_ARROW_FILE = b"ARROW1"
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"


def json_records(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each record of a JSON file.

    A file has one record in each line, which places count from 1 (`line 3`), or is one list of
    records (`item 3`), or one record over several lines (`item 1`). Empty lines count as lines.

    Args:
        name: A path, or a URL that fsspec opens; its ending may name a compression.

    Raises:
        DataError: A line or the file is not JSON in UTF-8, or the file is empty.
    """
    with _opened_text(name) as file:
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
    if (other := _marked(content)) is not None:
        return f"Make it UTF-8 with iconv -f {other} -t UTF-8 FILE > NEW"
    if b"\0" in content:
        return "It has NUL bytes, as programs and archives do: leave it out, or unpack it"
    return "It is not UTF-8: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW, if it is Western European"


def not_utf8(name: str, field: str, error: UnicodeDecodeError) -> DataError:
    """Return the error for a text that is in another encoding."""
    reason = f"cannot be read ({type(error).__name__}: {error})"
    return DataError(name, field, reason, encoding_hint(error.object))


def plain_texts(name: str, unit: Literal["file", "paragraph", "line"]) -> Iterator[str]:
    """Yield the documents of a plain text file, in which every kind of line end becomes a newline.

    A paragraph ends at an empty line, and an empty one is left out. A line has no line end.

    Raises:
        DataError: The file is not in UTF-8.
    """
    try:
        yield from _units_of(name, unit)
    except UnicodeDecodeError as error:
        raise not_utf8(name, "text", error) from error


def _units_of(name: str, unit: str) -> Iterator[str]:
    with _opened_text(name) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
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


def csv_texts(name: str, column: str, separator: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of one column of a CSV file whose first row has the names.

    Raises:
        DataError: The column is missing or there twice, or a row has another number of fields.
    """
    csv.field_size_limit(sys.maxsize)  # the library's own is 131,072 characters
    with (
        _opened_text(name) as file,
        io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text,
    ):
        rows = csv.reader(text, delimiter=separator, strict=True)
        place = "line 1"
        try:
            names = next(rows, [])
            if names.count(column) != 1:
                field = f"{place}: column {column!r}"
                if column in names:
                    raise DataError(name, field, "is there twice", "Give each column its own name")
                raise missing_column(name, field, names)
            which = names.index(column)
            while (place := f"line {rows.line_num + 1}") and (row := next(rows, None)) is not None:
                if len(row) not in (0, len(names)):  # 0: an empty line
                    reason = f"has {len(row)} fields, and the first line has {len(names)}"
                    raise DataError(name, place, reason, "Quote a field that has separators in it")
                if row:
                    yield place, row[which]
        except csv.Error as error:
            hint = 'Quote fields with ", and write "" for a quote inside of one'
            raise DataError(name, place, f"is not CSV ({error})", hint) from error
        except UnicodeDecodeError as error:
            raise not_utf8(name, place, error) from error


def parquet_texts(name: str, column: str) -> Iterator[str | None]:
    """Yield the texts of one column of a Parquet file; a null is None.

    Raises:
        DataError: The column is missing, or its type is not text.
    """
    import pyarrow.parquet as parquet

    with _seekable(name) as file, parquet.ParquetFile(file) as table:
        path = _path_in(name, column, table.schema_arrow)
        rows = _rows_at_once(table.metadata, ".".join(path))
        for batch in table.iter_batches(batch_size=rows, columns=[".".join(path)]):
            yield from _texts_in(batch, path)


def _rows_at_once(metadata: Any, path: str) -> int:
    """Return the rows of a Parquet file whose texts have about `_BYTES_AT_ONCE`."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = (group.column(number) for group in groups for number in range(group.num_columns))
    size: int = sum(each.total_uncompressed_size for each in columns if each.path_in_schema == path)
    return max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * int(metadata.num_rows) // max(size, 1)))


def arrow_texts(name: str, column: str) -> Iterator[str | None]:
    """Yield the texts of one column of a file of Arrow batches; a null is None.

    Raises:
        DataError: The column is missing, its type is not text, or the end of the file is missing.
    """
    import pyarrow as pa

    with _seekable(name) as file:
        if file.read(len(_ARROW_FILE)) == _ARROW_FILE:  # its list of batches is at its end
            table = pa.ipc.open_file(file)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
        else:
            check_arrow_end(file, name)
            table = batches = pa.ipc.open_stream(file)
        path = _path_in(name, column, table.schema)
        for batch in batches:
            yield from _texts_in(batch, path)


def check_arrow_end(file: IO[bytes], name: str) -> None:
    """Check that a stream of Arrow batches is whole: its readers take a cut one for a shorter one.

    Afterwards `file` is at its beginning.

    Raises:
        DataError: The mark of its end is missing.
    """
    file.seek(-min(len(_ARROW_END), file.seek(0, io.SEEK_END)), io.SEEK_END)
    if file.read() != _ARROW_END:
        reason = "ends without the mark that ends a stream of Arrow batches"
        raise DataError(name, "file", reason, "Copy or save it again")
    file.seek(0)


def _path_in(name: str, column: str, schema: Any) -> list[str]:
    """Return the column of a table and the fields in it that `column` names; the last has texts."""
    import pyarrow as pa

    def fields_of(kind: Any) -> dict[str, Any]:
        listed = kind if isinstance(kind, pa.Schema) or pa.types.is_struct(kind) else ()
        return {field.name: field.type for field in listed}

    def found(kind: Any, wanted: str) -> tuple[list[str], Any] | None:
        for first, rest in splits_of(wanted):
            inner = fields_of(kind).get(first)
            if inner is not None and rest is None:
                return [first], inner
            if inner is not None and (below := found(inner, str(rest))) is not None:
                return [first, *below[0]], below[1]
        return None

    at = found(schema, column)
    if at is None:
        raise missing_column(name, f"column {column!r}", _nested_names(schema, fields_of))
    path, kind = at
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if str(plain) not in (*_TEXT_TYPES, "null"):
        raise not_text(name, f"column {column!r}", str(kind))
    return path


def _texts_in(batch: Any, path: Sequence[str]) -> Iterator[str | None]:
    import pyarrow.compute as compute

    values = batch.column(path[0])
    if path[1:]:
        values = compute.struct_field(values, list(path[1:]))
    yield from (value.as_py() for value in values)


def splits_of(key: str) -> Iterator[tuple[str, str | None]]:
    """Yield a key whole, and then each way to part it at a dot into a key and one inside of it."""
    yield key, None
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:count]), ".".join(parts[count:])


def value_in(record: dict[str, Any], key: str) -> tuple[bool, Any]:
    """Return whether a record has a key, and its value; `a.b` is also the key b of what a holds."""
    for first, rest in splits_of(key):
        if first not in record:
            continue
        if rest is None:
            return True, record[first]
        if isinstance(record[first], dict) and (found := value_in(record[first], rest))[0]:
            return found
    return False, None


def names_in(record: dict[str, Any]) -> list[str]:
    """Return the keys of a record, for messages; those inside of another as `a.b`."""
    return _nested_names(record, lambda value: value if isinstance(value, dict) else {})


def _nested_names(tree: Any, fields_of: Any) -> list[str]:
    names = []
    for key, value in fields_of(tree).items():
        inner = _nested_names(value, fields_of)
        names += [f"{key}.{name}" for name in inner] or [str(key)]
    return names


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
def _opened_text(name: str) -> Iterator[io.BufferedReader]:
    """Open a file of text; the mark of another encoding than UTF-8 at its start is an error."""
    with opened(name) as file:
        if (other := _marked(file.peek(4))) is not None:
            raise DataError(name, "text", f"is in {other}", encoding_hint(file.peek(4)))
        yield file


def _marked(content: bytes) -> str | None:
    """Return which encoding the first bytes of a text name, unless it is UTF-8 or none."""
    marks = {  # the first of UTF-32 begins with one of UTF-16
        "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
        "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
    }
    return next((kind for kind, marks_of in marks.items() if content.startswith(marks_of)), None)


@contextlib.contextmanager
def _seekable(name: str) -> Iterator[IO[bytes]]:
    """Open a file whose index is at its end; one that is compressed is unpacked."""
    with opened(name) as file:
        if file.seekable():
            yield file
            return
        with tempfile.TemporaryFile() as whole:
            shutil.copyfileobj(file, whole)
            whole.seek(0)
            yield whole


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
