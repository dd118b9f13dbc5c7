"""Encode lists of texts to token bytes in worker processes, in order."""

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

from megafp8.data.named_tokenizers import load_tokenizer
from megafp8.data.tokenize import Tokenizer
from megafp8.errors import DataError

THREADS_VARIABLE = "RAYON_NUM_THREADS"  # sets the threads of the Rust libraries and of our code
AHEAD = 2  # lists that wait for each worker


@dataclass(frozen=True)
class Encoded:
    """Holds the tokens of some texts, each with its end of document, as a `.bin` file stores
    them.
    """

    tokens: bytes
    lengths: bytes  # int32 lengths of the texts that are not empty
    num_texts: int
    num_bytes: int  # bytes of the texts in UTF-8


def encode(tokenizer: Tokenizer, texts: list[str], dtype: str) -> Encoded:
    """Return the tokens of all texts that are not empty.

    An empty text would be a document without anything to learn.
    """
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
    """Yield each list encoded, in the order of the lists.

    Args:
        lists: Lists of texts, read only as far ahead as keeps every worker busy.
        tokenizer: The tokenizer's file, which each worker loads.
        end_of_document: The token that ends a document, as for `load_tokenizer`.
        dtype: The dtype of the tokens.
        workers: The number of processes; 0 means this process, with the library's own threads.

    Raises:
        DataError: A worker died, for example because memory ran out.
    """
    if workers == 0:
        loaded = load_tokenizer(tokenizer, end_of_document)
        for texts in lists:
            yield encode(loaded, texts, dtype)
        return
    # Workers are not forked, because the Rust and Arrow libraries already run threads.
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(tokenizer, end_of_document, dtype),
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
    """Holds what one worker process keeps between lists; a pool passes no state to its
    functions.
    """

    tokenizer: Tokenizer
    dtype: str


def _start(tokenizer: Path, end_of_document: str, dtype: str) -> None:
    os.environ[THREADS_VARIABLE] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.tokenizer = load_tokenizer(tokenizer, end_of_document)
    _Worker.dtype = dtype


def _end_with_parent() -> None:
    """End this worker when its parent ends: workers of a killed parent would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ready() -> None:
    """Do nothing: a worker that runs this has loaded its tokenizer."""


def _encode(texts: list[str]) -> Encoded:
    return encode(_Worker.tokenizer, texts, _Worker.dtype)
