"""Read texts in order from files or a named dataset, streamed by the `datasets` library."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from megafp8.errors import DataError

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
_JSON_LINES = (".jsonl", ".ndjson")
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_UNITS = {"file": "document", "paragraph": "paragraph", "line": "line"}
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
        with reading_errors_reported(self.name, self._raise_for_a_bad_line):
            for stream, column, where in self._streams():
                for table in stream.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
                    if column not in table.column_names:
                        raise DataError(
                            where,
                            f"column {column!r}",
                            f"is not there; there are {', '.join(table.column_names)}",
                            "Name the one that holds the text: --text-key NAME",
                        )
                    if skip >= table.num_rows:
                        skip -= table.num_rows
                        continue
                    for text in table.column(column).slice(skip).to_pylist():
                        yield _checked(text, where, column)
                    skip = 0

    def _streams(self) -> Iterator[tuple[Any, str, object]]:
        """Yield streaming datasets in order, each with its text column and its name in errors."""
        datasets = load_datasets()
        if self.dataset is not None:
            stream = datasets.load_dataset(
                self.dataset, self.config, split=self.split, streaming=True
            )
            yield stream, self.text_key, self.dataset
            return
        for kind, paths in self._groups():
            more: dict[str, object] = {}
            if kind == "text":
                more = {"sample_by": _UNITS[self.document]}
            elif (
                kind == "parquet"
            ):  # the default is the size of the first row group, which may be empty
                more = {"batch_size": _ROWS_AT_ONCE}
            stream = datasets.load_dataset(
                kind,
                data_files={"train": [str(path) for path in paths]},
                split="train",
                streaming=True,
                **more,
            )
            column = "text" if kind == "text" else self.text_key
            yield stream, column, paths[0] if len(paths) == 1 else self.name

    def _raise_for_a_bad_line(self) -> None:
        """Raise a DataError for the first line of a plain JSONL file that is not JSON, if any."""
        for path in [path for _, paths in self._groups() for path in paths]:
            if path.suffix.lower() not in _JSON_LINES:
                continue
            if not path.stat().st_size:
                raise DataError(path, "file", "is empty", "Leave it out")
            with open(path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if reason := _json_fault(line.strip()):
                        raise DataError(
                            path,
                            f"line {number}",
                            f"is not JSON ({reason})",
                            "Mend it, or leave it out",
                        )

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
        found = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p) is not None)
        if not found:
            raise DataError(path, "folder", "has no text, JSONL or Parquet file", "Give another")
        return found
    try:
        with open(path, "rb"):
            return [path]
    except OSError as error:
        raise DataError(
            path,
            "file",
            f"cannot be read ({error.strerror or error})",
            "Give a text, JSONL or Parquet file, a folder of such, or --dataset NAME",
        ) from error


def _json_fault(line: bytes) -> str:
    """Return why a line is not JSON text in UTF-8, or an empty string."""
    if not line:
        return ""
    try:
        # half a surrogate pair is JSON, but no text
        json.dumps(json.loads(line.decode()), ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return str(error)
    return ""


def _kind(path: Path) -> str | None:
    name = path.with_suffix("") if path.suffix in _COMPRESSED else path
    return _BUILDERS.get(name.suffix.lower())


def _checked(text: object, where: object, column: str) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            where,
            f"column {column!r}",
            f"holds {type(text).__name__}, not text",
            "Name the one that holds the text: --text-key NAME",
        )
    return text


@contextlib.contextmanager
def reading_errors_reported(
    name: str, find_cause: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Turn errors of `datasets` and of file readers into DataError.

    `find_cause` is called after an error, and may raise a DataError that names the cause better.
    """
    try:
        datasets = load_datasets()
    except ImportError as error:
        raise DataError(
            name, "text", "needs the datasets package", "pip install -e '.[data]'"
        ) from error
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # the DataError says it
    try:
        yield
    except (DataError, GeneratorExit, KeyboardInterrupt):
        raise
    # Readers of JSON, Parquet and the network raise errors without a common base class.
    except Exception as error:
        with contextlib.suppress(OSError):  # the error itself then says what cannot be read
            find_cause()
        cause = error.__cause__ or error
        lines = str(cause).strip().splitlines()
        reason = f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
        raise DataError(
            name, "text", f"cannot be read ({reason})", "Mend or leave out what it names"
        ) from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if shown:
            datasets.enable_progress_bars()


def load_datasets() -> ModuleType:
    """Import the library without torch, whose import takes longer than reading a few megabytes."""
    before = os.environ.get(TORCH_VARIABLE)
    os.environ[TORCH_VARIABLE] = "0"
    try:
        import datasets
    finally:
        if before is None:
            del os.environ[TORCH_VARIABLE]
        else:
            os.environ[TORCH_VARIABLE] = before
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
    return tuple(Path(name).expanduser() for name in names)
