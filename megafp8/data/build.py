"""Build a dataset folder from a corpus: tokenizer, indexed dataset and sidecar."""

from __future__ import annotations

import os
from pathlib import Path

from megafp8.data.corpus import Corpus
from megafp8.data.indexed import IndexedWriter, bin_path, idx_path, token_dtype
from megafp8.data.sidecar import Sidecar, record_file
from megafp8.data.tokenize import END_OF_DOCUMENT, train_tokenizer

PREFIX = "dataset"
TOKENIZER = "tokenizer.json"
SIDECAR = "dataset.json"
DOCUMENTS_PER_BATCH = 256  # encoded at once, on all cores


def build_dataset(corpus: Corpus, vocab_size: int, folder: Path) -> Sidecar:
    """Train the tokenizer on the corpus and write the whole dataset into an existing folder.

    Every document ends with the end-of-document token. The sidecar is written last, so a folder
    that has a sidecar is complete.
    """
    texts = [document.text for document in corpus.documents()]
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.save(folder / TOKENIZER)
    prefix = folder / PREFIX
    num_tokens = 0
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for first in range(0, len(texts), DOCUMENTS_PER_BATCH):
            for ids in tokenizer.encode_batch(texts[first : first + DOCUMENTS_PER_BATCH]):
                writer.add_document([*ids, tokenizer.eod_id])
                num_tokens += len(ids) + 1
    paths = (bin_path(prefix), idx_path(prefix), folder / TOKENIZER)
    sidecar = Sidecar(
        corpus=corpus.name,
        end_of_document=END_OF_DOCUMENT,
        vocab_size=tokenizer.vocab_size,
        num_documents=len(texts),
        num_tokens=num_tokens,
        num_bytes=sum(len(text.encode("utf-8")) for text in texts),
        files=tuple(record_file(path) for path in paths),
    )
    sidecar.save(folder / SIDECAR)
    for path in (folder / TOKENIZER, folder / SIDECAR):
        _sync(path)
    return sidecar


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
