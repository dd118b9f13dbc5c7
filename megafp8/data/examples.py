"""Read questions and answers from files, datasets and the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megafp8.data.records import check_arrow_end, json_records, not_an_object
from megafp8.data.text_sources import files_of_dataset, load_datasets, reading_errors_reported
from megafp8.errors import DataError
from megafp8.files import expanded

OF_DATASETS = "hf:"
"""Begins the name of a dataset that the `datasets` library loads: `hf:NAME` or `hf:NAME:SPLIT`."""

LINE_KINDS = (".jsonl", ".ndjson")
SHOWN_PLACES = 5  # further lines with a fault that a message names


@dataclass(frozen=True)
class Example:
    """Hold the fields of one example, and the file and line that it came from."""

    fields: Mapping[str, object]
    file: str
    place: str  # `line 3` of a JSONL file, `row 3` of a table

    @property
    def where(self) -> str:
        """Return the file and the line, as messages name them."""
        return f"{self.file}, {self.place}"


class Faults:
    """Collect examples with the same kind of fault, so that one message names all of them."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[Example, str, str, str]]] = {}

    def add(self, kind: str, example: Example, field: str, reason: str, hint: str) -> None:
        self._found.setdefault(kind, []).append((example, field, reason, hint))

    def raise_first(self) -> None:
        """Raise DataError for the first fault of the first kind, if there is any."""
        for faults in self._found.values():
            (example, field, reason, hint), *others = faults
            if others:
                shown = [other for other, *_ in others[:SHOWN_PLACES]]
                places = [o.place if o.file == example.file else o.where for o in shown]
                more = len(others) - len(places)
                reason += f". The same holds for {', '.join(places)}"
                reason += f" and {more} more" if more else ""
            raise DataError(example.where, field, reason, hint)


def is_text(value: str) -> bool:
    """Whether all of a string are characters: JSON's escapes may give half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_examples(name: str) -> list[Example]:
    """Return the examples of one file: JSONL, a JSON list, Parquet, or a dataset by name.

    Raises:
        DataError: The file cannot be read, is empty, or a line of it is not a JSON object.
    """
    if name.startswith(OF_DATASETS):
        examples = list(_rows_of_dataset(name))
    else:
        path = expanded(name)
        if path.is_dir() or path.suffix == ".parquet":
            examples = list(_rows_of_table(path))
        elif path.suffix == ".json":
            examples = list(_items_of_list(path))
        elif path.suffix in LINE_KINDS:
            examples = list(_lines(path))
        else:
            raise DataError(
                path,
                "kind of file",
                "its name does not tell what it is",
                f"Known are {', '.join(LINE_KINDS)}, .json, .parquet, a folder that the datasets "
                f"library saved, and {OF_DATASETS}NAME",
            )
    if not examples:
        raise DataError(name, "examples", "there is none", "Give a file with one example or more")
    return examples


def read_prompts(name: str) -> list[Example]:
    """Return the examples of a file of prompts; a line of a plain text is the field `prompt`.

    Lines without text are left out there.

    Raises:
        DataError: The file cannot be read, or has no prompt.
    """
    path = expanded(name)
    if path.suffix in (*LINE_KINDS, ".json", ".parquet") or path.is_dir():
        return read_examples(name)
    try:
        text = _bytes_of(path).decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise DataError(path, "text", f"is not UTF-8 ({error})", "Write it in UTF-8") from error
    lines = [
        Example({"prompt": line.removesuffix("\r")}, str(path), f"line {number}")
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise DataError(path, "prompts", "there is none", "Write one in each line")
    return lines


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            path,
            "file",
            f"cannot be read ({error.strerror or error})",
            "Give the path of a file with one JSON object in each line",
        ) from error


def _lines(path: Path) -> Iterator[Example]:
    """Yield the examples of a file with a JSON object in each line, once all lines are right."""
    faults = Faults()
    examples = []
    for number, line in enumerate(_bytes_of(path).split(b"\n"), start=1):
        text = line.strip()
        if not text:
            continue
        example = Example({}, str(path), f"line {number}")
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            hint = "Write one JSON object in each line"
            if number == 1 and text in (b"[", b"{"):
                hint += "; a file with one list of objects is named .json"
            faults.add("json", example, "JSON", f"cannot be read ({error})", hint)
            continue
        if not isinstance(fields, dict):
            faults.add(
                "object",
                example,
                "JSON",
                f"is of type {type(fields).__name__}, not an object",
                'Write a line as {"input": "...", "output": "..."}',
            )
            continue
        examples.append(Example(fields, example.file, example.place))
    faults.raise_first()
    yield from examples


def _items_of_list(path: Path) -> Iterator[Example]:
    try:
        items = json.loads(_bytes_of(path))
    except (ValueError, RecursionError) as error:
        hint = "Write a JSON list of objects; a file with one object in each line is named .jsonl"
        raise DataError(path, "JSON", f"cannot be read ({error})", hint) from error
    if not isinstance(items, list):
        hint = "Write a JSON list of objects"
        raise DataError(path, "JSON", f"is of type {type(items).__name__}, not a list", hint)
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            reason = f"is of type {type(item).__name__}, not an object"
            raise DataError(f"{path}, item {number}", "JSON", reason, "Write a list of objects")
        yield Example(item, str(path), f"item {number}")


def _rows_of_table(path: Path) -> Iterator[Example]:
    with reading_errors_reported(str(path)):
        datasets = load_datasets()
        if path.is_dir():
            table = datasets.load_from_disk(str(path))
            if isinstance(table, datasets.DatasetDict):
                raise DataError(
                    path,
                    "folder",
                    f"has the splits {', '.join(table)}",
                    f"Give one of them: {path / next(iter(table), 'train')}",
                )
            for each in table.cache_files:
                with open(each["filename"], "rb") as file:
                    check_arrow_end(file, each["filename"])
        else:
            yield from _rows_of_file("parquet", str(path))
            return
        yield from _rows(table, str(path))


def _rows_of_dataset(name: str) -> Iterator[Example]:
    wanted, _, splits = name.removeprefix(OF_DATASETS).partition(":")
    with reading_errors_reported(name):
        for split in (splits or "train").split("+"):
            whole, is_part, _ = split.partition("[")
            found = files_of_dataset(wanted, None, whole)
            if found is None:
                table = load_datasets().load_dataset(wanted, split=split)
                yield from _rows(table, name)
                continue
            kind, files = found
            examples = [example for file in files for example in _rows_of_file(kind, file)]
            if is_part:  # such as train[:10%]
                part = load_datasets().ReadInstruction.from_spec(split)
                (bounds,) = part.to_absolute({whole: len(examples)})
                examples = examples[bounds.from_ : bounds.to]
            yield from examples


def _rows_of_file(kind: str, file: str) -> Iterator[Example]:
    """Yield the examples of one file of a dataset, with values of the types that they have there.

    Files are read one by one, because `datasets` would give all of them the types of the first.
    """
    if kind == "parquet":
        table = load_datasets().load_dataset(
            "parquet", data_files={"train": [file]}, split="train", streaming=True
        )
        yield from _rows(table, file)
        return
    for place, record in json_records(file):
        if not isinstance(record, dict):
            raise not_an_object(file, place, record)
        yield Example(record, file, place)


def _rows(table: Iterable[Mapping[str, object]], name: str) -> Iterator[Example]:
    for number, row in enumerate(table, start=1):
        yield Example(row, name, f"row {number}")
