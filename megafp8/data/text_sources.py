"""Read texts in order from files, or from a named dataset by the `datasets` library."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from megafp8.data.records import (
    json_records,
    missing_column,
    not_an_object,
    not_text,
    parquet_texts,
    plain_texts,
)
from megafp8.errors import DataError
from megafp8.files import expanded

DocumentUnit = Literal["file", "paragraph", "line"]

_BUILDERS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_ROWS_AT_ONCE = 512
TORCH_VARIABLE = "USE_TORCH"  # read by `datasets` when it is imported


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Describes where texts come from: files, or a dataset by name.

    Attributes:
        files: Files and folders, which are searched, in this order.
        dataset: A dataset of the Hub, or a folder that `datasets` can load; used without `files`.
        config: The dataset's configuration, if it has several.
        split: The dataset's split.
        text_key: The column that holds the text.
        document: What one document of a plain text file is.
    """

    files: tuple[Path, ...] = ()
    dataset: str | None = None
    config: str | None = None
    split: str = "train"
    text_key: str = "text"
    document: DocumentUnit = "file"

    @property
    def name(self) -> str:
        """Return the name of the source in messages."""
        return self.dataset or ", ".join(str(path) for path in self.files)

    def describe(self) -> dict[str, object]:
        """Return everything that would change the texts if it changed, as JSON values; read no
        text.
        """
        found = [path for _, paths in self._groups() for path in paths]
        stats = [(path, path.stat()) for path in found]
        return {
            "files": [[str(path), status.st_size, status.st_mtime_ns] for path, status in stats],
            "dataset": self.dataset,
            "config": self.config,
            "split": self.split if self.dataset else None,
            "text_key": self.text_key,
            "document": self.document,
        }

    def kinds(self) -> set[str]:
        """Return the kinds of the files: `text`, `json` and `parquet`; none for a dataset."""
        return {kind for kind, _ in self._groups()}

    def num_bytes(self) -> int | None:
        """Return the bytes of the files, about those of the texts; None if files are compressed."""
        paths = [path for _, paths in self._groups() for path in paths]
        plain = all(_kind(path) != "parquet" and path.suffix not in _COMPRESSED for path in paths)
        return sum(path.stat().st_size for path in paths) if plain and paths else None

    def texts(self, skip: int = 0) -> Iterator[str]:
        """Yield the texts after the first `skip`, one after another.

        Raises:
            DataError: A file or the dataset cannot be read, or has no such column.
        """
        with reading_errors_reported(self.name):
            for name, place, value in itertools.islice(self._values(), skip, None):
                yield _checked(value, name, f"{place}column {self.text_key!r}")

    def _values(self) -> Iterator[tuple[str, str, object]]:
        """Yield a file, a place in it and the value of the column there, of all records in order.

        A place is empty or ends in `: `.
        """
        if self.dataset is not None:
            yield from self._values_of_dataset(self.dataset)
            return
        for kind, paths in self._groups():
            yield from self._values_of_files(kind, [str(path) for path in paths])

    def _values_of_files(
        self, kind: str, names: Sequence[str]
    ) -> Iterator[tuple[str, str, object]]:
        """Yield the documents of plain text files, or the values of JSON or Parquet files."""
        for name in names:
            if kind == "text":
                yield from ((name, "", text) for text in plain_texts(name, self.document))
                continue
            if kind == "parquet":
                yield from ((name, "", text) for text in parquet_texts(name, self.text_key))
                continue
            for place, record in json_records(name):
                if not isinstance(record, dict):
                    raise not_an_object(name, place, record)
                if self.text_key not in record:
                    field = f"{place}: column {self.text_key!r}"
                    raise missing_column(name, field, [str(key) for key in record])
                yield name, f"{place}: ", record[self.text_key]

    def _values_of_dataset(self, dataset: str) -> Iterator[tuple[str, str, object]]:
        """Yield the values of a dataset by name, from its files where these are JSON or Parquet."""
        kind_and_files = files_of_dataset(dataset, self.config, self.split)
        if kind_and_files is not None:
            yield from self._values_of_files(*kind_and_files)
            return
        stream = load_datasets().load_dataset(
            dataset, self.config, split=self.split, streaming=True
        )
        yield from _values_of_stream(stream, self.text_key, dataset)

    def _groups(self) -> list[tuple[str, list[Path]]]:
        """Return runs of consecutive files of one kind, in order."""
        groups: list[tuple[str, list[Path]]] = []
        for given in self.files:
            for path in _files_of(given):
                kind = _kind(path)
                if kind is None:
                    raise DataError(
                        path,
                        "kind of file",
                        "its name does not tell what it is",
                        f"Known are {', '.join(_BUILDERS)}, also with {', '.join(_COMPRESSED)}",
                    )
                if groups and groups[-1][0] == kind:
                    groups[-1][1].append(path)
                else:
                    groups.append((kind, [path]))
        return groups


def _files_of(path: Path) -> list[Path]:
    """Return the file itself, or the readable files in a folder, in the order of their paths."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p) is not None)
        if not files:
            raise DataError(path, "folder", "has no text, JSONL or Parquet file", "Give another")
        return files
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is no ordinary file")
        with open(path, "rb"):
            return [path]
    except OSError as error:
        raise DataError(
            path,
            "file",
            f"cannot be read ({error.strerror or error})",
            "Give a text, JSONL or Parquet file, a folder of such, or --dataset NAME",
        ) from error


def _kind(path: Path) -> str | None:
    name = path.with_suffix("") if path.suffix in _COMPRESSED else path
    return _BUILDERS.get(name.suffix.lower())


def _checked(text: object, where: str, field: str) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        raise not_text(where, field, type(text).__name__)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = "holds half of a surrogate pair, which is no character"
        raise DataError(where, field, reason, "Write the whole character") from error
    return text


def _values_of_stream(stream: Any, column: str, where: str) -> Iterator[tuple[str, str, object]]:
    """Yield the values of a column that `datasets` streams, if it does not convert them to text."""
    feature = (stream.features or {}).get(column)  # None where `datasets` does not know it yet
    kind = getattr(feature, "dtype", type(feature).__name__)
    if feature is not None and kind not in ("string", "large_string"):
        raise not_text(where, f"column {column!r}", kind)
    for table in stream.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
        if column not in table.column_names:
            raise missing_column(where, f"column {column!r}", table.column_names)
        yield from ((where, "", value) for value in table.column(column).to_pylist())


def files_of_dataset(
    name: str, config: str | None, split: str
) -> tuple[Literal["json", "parquet"], list[str]] | None:
    """Return the kind and the files of a dataset that consists of JSON or Parquet files.

    None means that `datasets` itself must read the dataset.
    """
    builder = load_datasets().load_dataset_builder(name, config)
    files = (getattr(builder.config, "data_files", None) or {}).get(split)
    module = type(builder).__module__.rpartition(".")[2]
    as_is = getattr(builder.config, "field", None) is None
    if not files or not as_is or module not in ("json", "parquet"):
        return None
    return module, [str(file) for file in files]  # type: ignore[return-value]  # just compared


@contextlib.contextmanager
def reading_errors_reported(name: str) -> Iterator[None]:
    """Turn errors of `datasets` and of file readers into DataError."""
    try:
        yield
    except (DataError, GeneratorExit, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        reason, hint = f"needs the {error.name} package", f"pip install {error.name}"
        raise DataError(name, "text", reason, hint) from error
    # Readers of JSON, Parquet and the network raise errors without a common base class.
    except Exception as error:
        cause = error.__cause__ or error
        lines = str(cause).strip().splitlines()
        reason = f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
        hint = "Mend or leave out what it names"
        raise DataError(name, "text", f"cannot be read ({reason})", hint) from error


def load_datasets() -> ModuleType:
    """Import the library without torch, whose import takes longer than reading a few megabytes.

    It shows neither bars nor messages from then on: what is wrong is a DataError.
    """
    before = os.environ.get(TORCH_VARIABLE)
    os.environ[TORCH_VARIABLE] = "0"
    try:
        import datasets
    finally:
        if before is None:
            del os.environ[TORCH_VARIABLE]
        else:
            os.environ[TORCH_VARIABLE] = before
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    library: ModuleType = datasets
    return library


def units(texts: Iterator[str], characters: int) -> Iterator[list[str]]:
    """Yield lists of texts with about `characters` characters; equal texts give equal lists."""
    unit: list[str] = []
    size = 0
    for text in texts:
        unit.append(text)
        size += len(text)
        if size >= characters:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def first_texts(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Yield texts until `characters` characters are reached."""
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def paths_of(names: Sequence[str]) -> tuple[Path, ...]:
    """Return the paths that `names` name."""
    return tuple(expanded(name) for name in names)
