"""Turn text into an indexed dataset with its tokenizer, in pieces, so that a killed run continues.

Until all is done, `<prefix>.partial/` lies beside the output. It holds tokens and lengths as they
come, and `progress.json`, which says how much of them is valid. `progress.json` is replaced in one
step after both files are on the disk. So the same command continues from there whenever it was
killed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shlex
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from fp8_numerics.caches import locked, move_away, put
from megafp8.data.dataset import SIDECAR_SUFFIX, Sidecar, record_file
from megafp8.data.indexed import bin_path, idx_path, token_dtype, write_index
from megafp8.data.long_texts import encode_batch, noted
from megafp8.data.named_tokenizers import load_tokenizer
from megafp8.data.text_sources import TextSource, units
from megafp8.data.tokenize import TOKENIZER_FILES, Frame, Tokenizer, document_end, frame_of
from megafp8.errors import DataError
from megafp8.files import draft_of, write_atomically
from megafp8.foreign import read_json
from megafp8.secrets import hide_values, redacted

THREADS_VARIABLE = "RAYON_NUM_THREADS"  # sets the threads of the Rust libraries and of our code
AHEAD = 2  # lists that wait for each worker

LOCK, RECORD, SIDECAR_DRAFT = "lock", "progress.json", "sidecar"  # in `<prefix>.partial`
LENGTH = np.dtype("<i4")  # of a text, in tokens
UNIT_CHARACTERS = 1 << 21  # characters that are encoded at once
SECONDS_BETWEEN_RECORDS = 2.0


@dataclass(frozen=True)
class Encoded:
    """Hold the tokens of some texts, each with its end of document, as a `.bin` file stores
    them.
    """

    tokens: bytes
    lengths: bytes  # int32, of the texts that are not empty
    num_texts: int
    num_bytes: int  # bytes of the texts in UTF-8


def encode(tokenizer: Tokenizer, texts: list[str], dtype: str, frame: Frame) -> Encoded:
    """Return the tokens of all texts that are not empty, each with its frame.

    An empty text would be a document without anything to learn.
    """
    some = [text for text in texts if text]
    ids = encode_batch(tokenizer, some)
    more = len(frame.begin) + len(frame.end)
    lengths = np.fromiter((len(i) + more for i in ids), LENGTH, len(ids))
    total = int(lengths.sum(dtype=np.int64))
    flat = chain.from_iterable(chain(frame.begin, i, frame.end) for i in ids)
    tokens = np.fromiter(flat, np.dtype(dtype), total)
    num_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in some)
    return Encoded(tokens.tobytes(), lengths.tobytes(), len(texts), num_bytes)


def encode_in_order(
    lists: Iterator[list[str]],
    tokenizer: Path,
    end_of_document: str,
    dtype: str,
    workers: int,
    frame: Frame,
) -> Iterator[Encoded]:
    """Yield each list encoded, in the order of the lists.

    Args:
        lists: Lists of texts, read only as far ahead as keeps every worker busy.
        tokenizer: The tokenizer's file, which each worker loads.
        end_of_document: The token that ends a document, as for `load_tokenizer`.
        dtype: The dtype of the tokens.
        workers: The number of processes; 0 means this process, with the library's own threads.
        frame: The tokens that begin and end each document.

    Raises:
        DataError: A worker died, for example because memory ran out.
    """
    if workers == 0:
        loaded = load_tokenizer(tokenizer, end_of_document)
        for texts in lists:
            yield encode(loaded, texts, dtype, frame)
        return
    # Workers are not forked, because the Rust and Arrow libraries already run threads.
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(tokenizer, end_of_document, dtype, frame),
    )
    pending: deque[Future[Encoded]] = deque()
    for _ in range(workers):  # workers start while the first text is still being opened
        pool.submit(_ready)
    try:
        for texts in lists:
            pending.append(pool.submit(_encode, texts))
            if len(pending) >= workers * (1 + AHEAD):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            tokenizer,
            "workers",
            "one of them died, as when memory runs out",
            "Run the same command again, with fewer --workers; it continues",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """Hold what one worker process keeps between lists; a pool passes no state to its
    functions.
    """

    tokenizer: Tokenizer
    dtype: str
    frame: Frame


def _start(tokenizer: Path, end_of_document: str, dtype: str, frame: Frame) -> None:
    os.environ[THREADS_VARIABLE] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.tokenizer = load_tokenizer(tokenizer, end_of_document)
    _Worker.dtype, _Worker.frame = dtype, frame


def _end_with_parent() -> None:
    """End this worker when its parent ends: workers of a killed parent would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ready() -> None:
    """Do nothing: a worker that runs this has loaded its tokenizer."""


def _encode(texts: list[str]) -> Encoded:
    return encode(_Worker.tokenizer, texts, _Worker.dtype, _Worker.frame)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Count the texts that were read, the documents (texts that are not empty) and their
    tokens.
    """

    num_texts: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_bytes: int = 0

    def plus(self, more: Encoded, itemsize: int) -> Counts:
        """Return the counts after one more encoded piece."""
        return Counts(
            num_texts=self.num_texts + more.num_texts,
            num_documents=self.num_documents + len(more.lengths) // LENGTH.itemsize,
            num_tokens=self.num_tokens + len(more.tokens) // itemsize,
            num_bytes=self.num_bytes + more.num_bytes,
        )


@dataclass(frozen=True)
class Progress:
    """Hold the content of `progress.json`."""

    source: dict[str, object]
    tokenizer: str  # the --tokenizer option that it was made by
    file_name: str  # the tokenizer's file name
    end_of_document: str
    counts: Counts
    begin: Sequence[int] = ()  # the tokens that begin each document
    end: Sequence[int] | None = None  # those that end it; None: the token that ends a document

    def frame(self, tokenizer: Tokenizer) -> Frame:
        """Return the tokens that begin and end each document."""
        end = (tokenizer.eod_id,) if self.end is None else tuple(self.end)
        return Frame(tuple(self.begin), end)


def preprocess(
    source: TextSource,
    prefix: Path,
    *,
    tokenizer_name: str,
    make_tokenizer: Callable[[], Tokenizer],
    workers: int,
    on_progress: Callable[[Counts], None],
    notify: Callable[[str], None],
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    unit_characters: int = UNIT_CHARACTERS,
) -> Sidecar:
    """Write `<prefix>.bin`, `.idx`, the tokenizer and `<prefix>.dataset.json`.

    The result is the same for any number of workers and interruptions.

    Args:
        source: The texts.
        prefix: The path of the output without suffix; no file of the output may exist.
        tokenizer_name: What `make_tokenizer` makes; a continued run must have the same name.
        make_tokenizer: Makes the tokenizer; a continued run reads the one that was made first.
        workers: The number of processes, as for `encode_in_order`.
        on_progress: Receives the counts after each piece.
        notify: Receives a line if an earlier run is continued, or if texts are empty.
        add_bos: Whether a document begins with the token that begins a text; None: as the tokenizer
            does with a text.
        add_eos: Whether a document ends with the token that ends a document; None: yes.
        unit_characters: The number of characters of one piece.

    Raises:
        DataError: The source cannot be read or has no text, the output exists already, another
            process writes it, or it was begun with other settings.
    """
    partial = prefix.with_name(prefix.name + ".partial")
    _refuse_existing(prefix, partial)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with locked(partial / LOCK, lambda: _refuse_second(partial)):
            with _kept_if_begun(partial):
                progress = _begin(
                    source, partial, tokenizer_name, make_tokenizer, notify, add_bos, add_eos
                )
                tokenizer = load_tokenizer(partial / progress.file_name, progress.end_of_document)
                dtype = token_dtype(tokenizer.vocab_size)
                frame = progress.frame(tokenizer)
                texts = source.texts(skip=progress.counts.num_texts)
                lists = noted(units(texts, unit_characters), tokenizer, notify)
                counts = _encode_all(lists, partial, progress, dtype, workers, on_progress, frame)
                if counts.num_tokens == 0:
                    shutil.rmtree(partial)
                    raise DataError(
                        source.name, "text", "there is none: every document is empty",
                        "Give another",
                    )  # fmt: skip
            if num_empty := counts.num_texts - counts.num_documents:
                notify(f"{num_empty} of {counts.num_texts} texts are empty and left out")
            sidecar = _finish(source, prefix, partial, tokenizer, dtype, counts, frame)
            move_away(partial)  # a process that is killed here leaves no half of it
            return sidecar
    except OSError as error:
        raise DataError(
            prefix,
            "output",
            f"cannot be written ({error.strerror or error})",
            "Give a writable --output on a disk with free space; the same command continues",
        ) from error


def _refuse_existing(prefix: Path, partial: Path) -> None:
    """Refuse an output that is there, but for that of a run which was killed in `_finish`."""
    words = (prefix.with_name(f"{prefix.name}.{name}") for name in TOKENIZER_FILES)
    sidecar = prefix.with_name(prefix.name + SIDECAR_SUFFIX)
    for path in (sidecar, bin_path(prefix), idx_path(prefix), *words):
        if os.path.lexists(path) and not (partial / SIDECAR_DRAFT).exists():
            raise DataError(
                path, "output", "is there already", "Give another --output, or delete it"
            )
    _refuse_files_of_others(partial)


@contextmanager
def _kept_if_begun(partial: Path) -> Iterator[None]:
    """Delete the folder `partial` after an error before which no text was tokenized.

    After a kill the same command continues with the tokenizer that was made.
    """
    try:
        yield
    except BaseException as error:
        record = partial / RECORD
        if not record.exists() or (
            isinstance(error, DataError) and _load(record).counts.num_texts == 0
        ):
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _begin(
    source: TextSource,
    partial: Path,
    tokenizer_name: str,
    make_tokenizer: Callable[[], Tokenizer],
    notify: Callable[[str], None],
    add_bos: bool | None,
    add_eos: bool | None,
) -> Progress:
    """Return the progress of an earlier run with the same settings, or begin a new one.

    One that has recorded no text never blocks other settings.
    """
    record = partial / RECORD
    described = json.loads(json.dumps(redacted(source.describe())))
    tokenizer_name = hide_values(tokenizer_name)
    if record.exists():
        progress = _load(record)
        counts = progress.counts
        others = _differences(progress.source, described)
        if progress.tokenizer != tokenizer_name:
            others.append(("tokenizer", f"{progress.tokenizer}, now {tokenizer_name}"))
        if others and counts.num_texts:
            what, details = others[0]
            raise DataError(
                record,
                what,
                f"is not what this output was begun with ({details}), and {counts.num_texts} texts "
                "are tokenized already",
                f"Give the same {what}, or begin again after: rm -r {shlex.quote(str(partial))}",
            )
        if not others:
            notify(f"continues after {counts.num_texts} texts, {counts.num_bytes / 1e6:.1f} MB")
            return progress
    tokenizer = make_tokenizer()
    frame = frame_of(tokenizer, add_bos, document_end(tokenizer, add_eos), "--add-bos")
    tokenizer.save(partial / tokenizer.file_name)
    progress = Progress(
        described,
        tokenizer_name,
        tokenizer.file_name,
        tokenizer.end_of_document,
        Counts(),
        frame.begin,
        frame.end,
    )
    _save(record, progress)
    return progress


def _differences(old: dict[str, object], new: dict[str, object]) -> list[tuple[str, str]]:
    """Return what two descriptions of a source differ in: `text` or an option, and how."""
    found = []
    for key in old.keys() | new.keys():
        before, now = old.get(key), new.get(key)
        if before == now:
            continue
        details = f"{before}, now {now}"
        if isinstance(before, list) and isinstance(now, list):
            known = {name: state for name, *state in before}
            there = {name: state for name, *state in now}
            words = [f"{name} is new" for name in there if name not in known]
            words += [f"{name} is missing" for name in known if name not in there]
            words += [
                f"{name} has changed"
                for name in known
                if there.get(name, known[name]) != known[name]
            ]
            details = words[0] if words else "the order of the files is another"
        found.append(("text" if key == "files" else f"--{key.replace('_', '-')}", details))
    return sorted(found, key=lambda pair: pair[0] != "text")


def _refuse_files_of_others(partial: Path) -> None:
    """Raise `DataError` if what has this name is no folder that a preparation has made."""
    if not os.path.lexists(partial):
        return
    is_folder = partial.is_dir() and not partial.is_symlink()
    names = os.listdir(partial) if is_folder else [partial.name]
    known = {LOCK, RECORD, "tokens", "lengths", "index", SIDECAR_DRAFT, *TOKENIZER_FILES}
    others = [n for n in names if n not in known and not n.startswith(f".{RECORD}.")]
    lock = partial / LOCK
    has_lock = LOCK in names and lock.is_file() and lock.stat().st_size == 0
    if others or (names and not has_lock):
        reason = f"is not of a preparation: it has {', '.join(sorted(others or names)[:3])}"
        raise DataError(partial, "folder", reason, "Give another --output, or move the folder")


def _encode_all(
    lists: Iterator[list[str]],
    partial: Path,
    progress: Progress,
    dtype: np.dtype[np.generic],
    workers: int,
    on_progress: Callable[[Counts], None],
    frame: Frame,
) -> Counts:
    """Append the tokens and lengths of the texts, and record from time to time what is on disk."""
    counts = progress.counts
    with (
        _opened_at(partial / "tokens", counts.num_tokens * dtype.itemsize) as tokens,
        _opened_at(partial / "lengths", counts.num_documents * LENGTH.itemsize) as lengths,
    ):
        words = partial / progress.file_name
        recorded = time.monotonic()
        pieces = encode_in_order(lists, words, progress.end_of_document, dtype.str, workers, frame)
        with contextlib.closing(pieces):  # type: ignore[type-var]  # a generator
            for piece in pieces:
                tokens.write(piece.tokens)
                lengths.write(piece.lengths)
                counts = counts.plus(piece, dtype.itemsize)
                on_progress(counts)
                if time.monotonic() - recorded >= SECONDS_BETWEEN_RECORDS:
                    _record(partial, progress, counts, tokens, lengths)
                    recorded = time.monotonic()
        _record(partial, progress, counts, tokens, lengths)
    return counts


def _record(partial: Path, progress: Progress, counts: Counts, *files: IO[bytes]) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    _save(
        partial / RECORD,
        replace(progress, counts=counts),
    )


def _finish(
    source: TextSource,
    prefix: Path,
    partial: Path,
    tokenizer: Tokenizer,
    dtype: np.dtype[np.generic],
    counts: Counts,
    frame: Frame,
) -> Sidecar:
    """Complete every file under `partial`, then move each into place, the sidecar last."""
    lengths = np.fromfile(partial / "lengths", LENGTH)
    documents = np.arange(len(lengths) + 1)
    write_index(partial / "index", dtype, lengths, documents)
    words = prefix.with_name(f"{prefix.name}.{tokenizer.file_name}")
    places = {
        partial / "tokens": bin_path(prefix),
        partial / "index": idx_path(prefix),
        partial / tokenizer.file_name: words,
    }
    records = [
        replace(record_file(path, sampled=to == bin_path(prefix)), name=to.name)
        for path, to in places.items()
    ]
    sidecar = Sidecar(
        corpus=source.name,
        end_of_document=tokenizer.end_of_document,
        vocab_size=tokenizer.vocab_size,
        num_documents=counts.num_documents,
        num_tokens=counts.num_tokens,
        num_bytes=counts.num_bytes,
        files=tuple(records),
        add_bos=bool(frame.begin),
        add_eos=bool(frame.end),
        begin=frame.begin,
    )
    sidecar.save(partial / SIDECAR_DRAFT)
    # What a killed `_finish` needs again is copied, not renamed; the tokens are linked.
    for path, to in places.items():
        _put(path, to)
    _put(partial / SIDECAR_DRAFT, prefix.with_name(prefix.name + SIDECAR_SUFFIX))
    return sidecar


def _put(path: Path, to: Path) -> None:
    """Make `to` another name of `path`, in one step."""
    draft = draft_of(to)
    try:
        try:
            os.link(path, draft)
        except OSError:  # a file system without links
            shutil.copyfile(path, draft)
        put(draft, to)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened_at(path: Path, size: int) -> Iterator[IO[bytes]]:
    """Open the file to append to, after cutting it to its valid size."""
    with open(path, "ab") as file:
        if path.stat().st_size < size:
            raise DataError(
                path,
                "size",
                f"has {path.stat().st_size} bytes where progress.json recorded {size}",
                f"Delete {path.parent} to begin again",
            )
        file.truncate(size)
        file.seek(size)
        yield file


def _refuse_second(partial: Path) -> None:
    raise DataError(
        partial,
        "lock",
        "another process writes this output",
        "Wait for it, or give another --output",
    )


def _save(path: Path, progress: Progress) -> None:
    write_atomically(path, json.dumps(asdict(progress), indent=2) + "\n")


def _load(path: Path) -> Progress:
    try:
        tree = read_json(path)
        counts = Counts(**{name: int(value) for name, value in tree.pop("counts").items()})
        return Progress(**tree, counts=counts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            path,
            "progress",
            f"cannot be read ({type(error).__name__}: {error})",
            f"Delete {path.parent} to begin again",
        ) from error
