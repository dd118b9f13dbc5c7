"""Read texts in order from files, or from a named dataset by the `datasets` library."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from megafp8.data.compressed import COMPRESSED, make_fsspec_strict
from megafp8.data.records import (
    arrow_texts,
    csv_texts,
    json_records,
    missing_column,
    names_in,
    not_an_object,
    not_text,
    parquet_texts,
    plain_texts,
    value_in,
)
from megafp8.errors import DataError
from megafp8.files import expanded
from megafp8.foreign import member, read_object

DocumentUnit = Literal["file", "paragraph", "line"]
Kind = Literal["text", "json", "parquet", "csv", "arrow"]

_KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}
_SHOWN_KINDS = 8
_ROWS_AT_ONCE = 512
_OF_SAVED, _INFO_OF_SAVED, _OF_SAVED_SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""Files in a folder that `Dataset.save_to_disk` wrote, and in one that holds several splits."""
_NO_RULE = {
    *("name", "version", "data_dir", "data_files", "description", "features"),
    *("chunksize", "batch_size"),
}
"""Options of a dataset's configuration that do not change what its files hold."""
TORCH_VARIABLE = "USE_TORCH"  # read by `datasets` when it is imported


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Describe where texts come from: files, or a dataset by name.

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
        found = [path for _, paths in self._groups for path in paths]
        if self.dataset is not None and not found and Path(self.dataset).is_dir():
            found = sorted(path for path in Path(self.dataset).rglob("*") if path.is_file())
        stats = [(path, path.stat()) for path in found]
        return {
            "files": [[str(path), status.st_size, status.st_mtime_ns] for path, status in stats],
            "dataset": self.dataset,
            "config": self.config,
            "split": self.split if self.dataset or self.has_splits else None,
            "text_key": self.text_key,
            "document": self.document,
        }

    def kinds(self) -> set[str]:
        """Return the kinds of the files; none for a dataset by name."""
        return {kind for kind, _ in self._groups}

    def num_bytes(self) -> int | None:
        """Return the bytes of the files, about those of the texts; None if files are compressed."""
        paths = [path for _, paths in self._groups for path in paths]
        plain = all(_kind(path) != "parquet" and path.suffix not in COMPRESSED for path in paths)
        return sum(path.stat().st_size for path in paths) if plain and paths else None

    @property
    def has_splits(self) -> bool:
        """Return whether one of the folders is a `DatasetDict` that was saved."""
        return any(found.splits for found in self._found)

    def notes(self) -> list[str]:
        """Return a line for each folder that has more than files of one kind."""
        return [line for found in self._found for line in found.notes]

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
        groups: Sequence[tuple[Kind, Sequence[object]]] = self._groups
        unit = self.document
        if self.dataset is not None and not groups:
            found = files_of_dataset(self.dataset, self.config, self.split, get_args(Kind))
            if found is None:
                yield from self._values_of_dataset(self.dataset)
                return
            groups, unit = [found], "line"  # as `datasets` reads plain text
            if found[0] == "text" and self.text_key != "text":
                raise missing_column(self.dataset, f"column {self.text_key!r}", ["text"])
        for kind, files in groups:
            for name in map(str, files):
                with reading_errors_reported(name):
                    yield from self._values_of_file(kind, name, unit)

    def _values_of_file(
        self, kind: Kind, name: str, unit: DocumentUnit
    ) -> Iterator[tuple[str, str, object]]:
        """Yield the documents of a plain text file, or the values of a file of records."""
        if kind == "text":
            yield from ((name, "", text) for text in plain_texts(name, unit))
        elif kind == "csv":
            for place, text in csv_texts(name, self.text_key, _separator(name)):
                yield name, f"{place}: ", text
        elif kind != "json":
            read = parquet_texts if kind == "parquet" else arrow_texts
            yield from ((name, "", text) for text in read(name, self.text_key))
        else:
            for place, record in json_records(name):
                if not isinstance(record, dict):
                    raise not_an_object(name, place, record)
                is_there, value = value_in(record, self.text_key)
                if not is_there:
                    field = f"{place}: column {self.text_key!r}"
                    raise missing_column(name, field, names_in(record))
                yield name, f"{place}: ", value

    def _values_of_dataset(self, dataset: str) -> Iterator[tuple[str, str, object]]:
        """Yield the values of a dataset by name that `datasets` itself must read."""
        library = load_datasets()
        builder = library.load_dataset_builder(dataset, self.config)
        # Without it "NA", "null" and other words of CSV files would become missing texts.
        words = {"keep_default_na": False} if hasattr(builder.config, "keep_default_na") else {}
        stream = library.load_dataset(
            dataset, self.config, split=self.split, streaming=True, **words
        )
        yield from _values_of_stream(stream, self.text_key, dataset)

    @cached_property
    def _found(self) -> list[_Found]:
        if self.dataset is None:
            return [_find(path, self.split) for path in self.files]
        saved = _saved(Path(self.dataset), self.split) if Path(self.dataset).is_dir() else None
        return [saved] if saved is not None else []

    @property
    def _groups(self) -> list[tuple[Kind, list[Path]]]:
        """Return runs of consecutive files of one kind, in order."""
        paths = [path for found in self._found for path in found.files]
        runs = itertools.groupby(paths, _kind)
        return [(kind, list(files)) for kind, files in runs if kind is not None]


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Hold the files that a path stands for, and what is to be said about them."""

    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()  # of a saved `DatasetDict`


def _find(path: Path, split: str) -> _Found:
    """Return the file itself, or the files to read in a folder, in the order of their paths."""
    if path.is_dir():
        return _saved(path, split) or _in_folder(path, split)
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is no ordinary file")
        with open(path, "rb"):
            pass
    except OSError as error:
        raise DataError(
            path,
            "file",
            f"cannot be read ({error.strerror or error})",
            "Give a text, JSONL, CSV, Parquet or Arrow file, a folder of such, or --dataset NAME",
        ) from error
    if _kind(path) is None:
        raise DataError(
            path,
            "kind of file",
            "its name does not tell what it is",
            f"Known are {', '.join(_KINDS)}, also with {', '.join(COMPRESSED)}; "
            "an archive must be unpacked",
        )
    return _Found(files=(path,))


def _in_folder(folder: Path, split: str) -> _Found:
    """Return the files of a folder and of those in it; hidden ones are left out.

    Raises:
        DataError: There is none, or plain text lies beside records, of which one may not be meant.
    """
    files: list[Path] = []
    notes: list[str] = []
    splits: list[str] = []
    left = Counter[str]()
    read = Counter[str]()

    def unreadable(error: OSError) -> None:
        reason, hint = f"cannot be read ({error.strerror})", "Give permission to read it, or files"
        raise DataError(error.filename, "folder", reason, hint) from error

    for root, folders, names in os.walk(folder, onerror=unreadable):
        hidden = [name for name in (*folders, *names) if name.startswith(".")]
        links = [name for name in folders if os.path.islink(Path(root, name))]
        left.update({"hidden": len(hidden), "linked folder(s)": len({*links} - {*hidden})})
        folders[:] = [name for name in folders if name not in hidden]
        if root != str(folder) and (saved := _saved(Path(root), split)) is not None:
            folders.clear()
            files, notes = [*files, *saved.files], [*notes, *saved.notes]
            splits += saved.splits
            read["saved dataset"] += 1
            continue
        for path in (Path(root, name) for name in names if name not in hidden):
            if is_read := path.is_file() and _kind(path) is not None:
                files.append(path)
            ending = path.suffix.lower() or "without an ending"
            (read if is_read else left)[ending] += 1
    if not files:
        reason = f"has no text, JSONL, CSV, Parquet or Arrow file{_counted(left, '; it has ')}"
        raise DataError(folder, "folder", reason, "Give another")
    plain = [path for path in files if _kind(path) == "text"]
    others = [path for path in files if _kind(path) != "text"]
    if plain and others:
        named = f"{plain[0].name}{' and others' if plain[1:] else ''}"
        raise DataError(
            folder,
            "folder",
            f"has plain text ({named}) beside records{_counted(read, ': ')}",
            f"Give the files that are meant, such as {others[0].parent}/*{others[0].suffix}",
        )
    if len(+read) > 1 or +left:
        notes.insert(0, f"{folder}: reads{_counted(read, ' ')}{_counted(left, '; leaves out ')}")
    return _Found(files=tuple(sorted(files)), notes=tuple(notes), splits=tuple(splits))


def _counted(counts: Counter[str], before: str) -> str:
    """Return numbers of files by kind as words; nothing if there are none."""
    common = sorted((+counts).items(), key=lambda item: (-item[1], item[0]))
    words = [f"{count} {kind}" for kind, count in common[:_SHOWN_KINDS]]
    words += [f"{len(common) - _SHOWN_KINDS} further kinds"] if common[_SHOWN_KINDS:] else []
    return before + ", ".join(words) if words else ""


def _saved(folder: Path, split: str) -> _Found | None:
    """Return the files of a dataset that `datasets` saved to the disk; None if it is none.

    Raises:
        DataError: It has no such split, or what describes it is damaged.
    """
    notes: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    described = folder / _OF_SAVED_SPLITS
    try:
        if described.is_file():
            splits = tuple(map(str, read_object(described)["splits"]))
            if split not in splits:
                reason = f"has the splits {', '.join(splits)}, not {split}"
                raise DataError(folder, "split", reason, "Name one of them by --split")
            if others := [name for name in splits if name != split]:
                notes = (f"{folder}: reads the split {split}, not {', '.join(others)}",)
            folder /= Path(split).name
        described = folder / _OF_SAVED
        if not splits and not (described.is_file() and (folder / _INFO_OF_SAVED).is_file()):
            return None
        tree = read_object(described)
        names = [str(each["filename"]) for each in tree["_data_files"]]
        files = [path for name in names if (path := member(folder, name)) is not None]
        if len(files) < len(names) or any(path.suffix != ".arrow" for path in files):
            raise ValueError(f"one of its files is missing: {', '.join(names)}")
        if tree.get("_indices_data_files"):
            raise ValueError("it is of an old version of datasets")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"cannot be used ({type(error).__name__}: {error})"
        raise DataError(described, "saved dataset", reason, "Save it again") from error
    return _Found(files=tuple(files), notes=notes, splits=splits)


def _kind(path: Path) -> Kind | None:
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return _KINDS.get(name.suffix.lower())


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
    name: str, config: str | None, split: str, kinds: Sequence[Kind] = ("json", "parquet")
) -> tuple[Kind, list[str]] | None:
    """Return the kind and the files of a dataset that consists of files of one of these kinds.

    None means that `datasets` itself must read the dataset.
    """
    options = load_datasets().load_dataset_builder(name, config).config
    module = type(options).__module__.rpartition(".")[2]
    files = [str(file) for file in (options.data_files or {}).get(split, ())]
    kind = next((kind for kind in kinds if kind == module), None)
    if not files or kind is None or any(_kind(Path(file)) != kind for file in files):
        return None
    with_default = (f for f in dataclasses.fields(options) if f.default is not dataclasses.MISSING)
    changed = {f.name for f in with_default if getattr(options, f.name) != f.default} - _NO_RULE
    if kind == "csv" and all(options.sep == _separator(file) for file in files):
        changed -= {"sep", "delimiter"}
    return None if changed else (kind, files)


def _separator(name: str) -> str:
    """Return what separates the fields of a CSV file of this name."""
    return "\t" if ".tsv" in Path(name.lower()).suffixes[-2:] else ","


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
    make_fsspec_strict()
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
    """Return the paths that `names` name.

    Raises:
        DataError: A name is empty, as that of an unset variable, which would be this folder.
    """
    if not all(names):
        raise DataError("preprocess", "FILE", "has an empty name", "Leave it out, or give a path")
    return tuple(expanded(name) for name in names)
