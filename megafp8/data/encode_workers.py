"""Processes that turn lists of texts into token bytes, in order."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from megafp8.data.tokenize import Tokenizer, load_tokenizer
from megafp8.errors import DataError

THREADS_VARIABLE = "RAYON_NUM_THREADS"  # of the Rust libraries; ours heed it too
AHEAD = 2  # lists waiting for each worker


@dataclass(frozen=True)
class Encoded:
    """Tokens of some texts, each with its end of document, as they lie in a `.bin`."""

    tokens: bytes
    lengths: bytes  # int32, of each text that is not empty
    num_texts: int
    num_bytes: int  # of the texts in UTF-8


def encode(tokenizer: Tokenizer, texts: list[str], dtype: str) -> Encoded:
    """Empty texts are left out: they would be documents without anything to learn."""
    some = [text for text in texts if text]
    ids = tokenizer.encode_batch(some)
    lengths = np.fromiter((len(i) + 1 for i in ids), np.dtype("<i4"), len(ids))
    total = int(lengths.sum(dtype=np.int64))
    end = (tokenizer.eod_id,)
    flat = chain.from_iterable(chain(i, end) for i in ids)
    tokens = np.fromiter(flat, np.dtype(dtype), total)
    num_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in some)
    return Encoded(tokens.tobytes(), lengths.tobytes(), len(texts), num_bytes)


def encode_in_order(
    lists: Iterator[list[str]], tokenizer: Path, end_of_document: str, dtype: str, workers: int
) -> Iterator[Encoded]:
    """Each list encoded, in the order in which they come.

    Args:
        lists: Of texts; read no further ahead than keeps every worker busy.
        tokenizer: Its file, which each worker loads.
        end_of_document: As for `load_tokenizer`.
        dtype: Of the tokens.
        workers: Processes; 0: this one, with the library's own threads.
    """
    if workers == 0:
        loaded = load_tokenizer(tokenizer, end_of_document)
        for texts in lists:
            yield encode(loaded, texts, dtype)
        return
    # Not forked: the Rust and Arrow libraries have threads by now.
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(tokenizer, end_of_document, dtype),
    )
    pending: deque[Future[Encoded]] = deque()
    for _ in range(workers):  # each starts one, while the first text is still being opened
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
    """What one process keeps between lists: a pool hands functions nothing of its own."""

    tokenizer: Tokenizer
    dtype: str


def _start(tokenizer: Path, end_of_document: str, dtype: str) -> None:
    os.environ[THREADS_VARIABLE] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.tokenizer = load_tokenizer(tokenizer, end_of_document)
    _Worker.dtype = dtype


def _end_with_parent() -> None:
    """A pool's processes outlive a parent that is killed, waiting forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ready() -> None:
    """A worker that runs this has its tokenizer."""


def _encode(texts: list[str]) -> Encoded:
    return encode(_Worker.tokenizer, texts, _Worker.dtype)
