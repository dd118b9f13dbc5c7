"""From a `DataSpec` to training and validation samples, built once and cached."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafp8.data.build import PREFIX, SIDECAR, build_dataset
from megafp8.data.corpus import BUILTIN, Corpus
from megafp8.data.indexed import IndexedDataset, bin_path, idx_path
from megafp8.data.samples import (
    Splits,
    TokenStream,
    TrainSamples,
    ValidationSamples,
    check_vocabulary,
    split_documents,
)
from megafp8.data.sidecar import (
    FORMAT_VERSION,
    Sidecar,
    end_of_document_beside,
    find_beside,
    load_sidecar,
    sampled_fingerprint,
    verify_files,
)
from megafp8.data.tokenize import Tokenizer, load_tokenizer
from megafp8.errors import DataError
from megafp8.specs import DataSpec
from megafp8.specs.data import BUILTIN_CORPUS

ATTEMPTS = 3  # when other processes replace the same folder meanwhile
COUNT_TOKENS = 1 << 20  # counted at once
STALE_SECONDS = 3600.0  # a build takes seconds: an older temporary folder is a killed one's


@dataclass(frozen=True)
class PreparedData:
    """Everything that training and evaluation need to know of the data.

    Attributes:
        train: The endless training stream.
        validation: Every validation token once.
        tokenizer: Text to tokens and back.
        vocab_size: Of the tokenizer, before padding.
        fingerprint: Of the dataset's content; a checkpoint records it, so that a changed dataset
            is refused. It depends on no path and no time.
        num_train_tokens: In the training documents, with their ends.
        num_validation_tokens: Likewise; each of them is predicted once.
    """

    train: TrainSamples
    validation: ValidationSamples
    tokenizer: Tokenizer
    vocab_size: int
    fingerprint: str
    num_train_tokens: int
    num_validation_tokens: int
    dataset: IndexedDataset
    splits: Splits

    def validation_tokens(self) -> NDArray[np.int64]:
        """What a pass over `validation` predicts, in order, ends of documents too."""
        return self.validation.tokens()

    def validation_text(self) -> bytes:
        """The validation documents' original bytes, one after another, without their ends."""
        return b"".join(self.document_text(int(document)) for document in self.splits.validation)

    def document_text(self, document: int) -> bytes:
        """Bytes of one document; exactly those it was tokenized from, for a byte-level BPE."""
        tokens = self.dataset.document(document)
        check_vocabulary(tokens, self.vocab_size, self.dataset)
        return self.tokenizer.decode(tokens[tokens != self.tokenizer.eod_id]).encode("utf-8")

    def train_token_counts(self) -> NDArray[np.int64]:
        """How often each token occurs in the training documents, [vocab_size]. Reads them all."""
        counts = np.zeros(self.vocab_size, np.int64)
        stream = TokenStream(
            self.dataset, self.splits.train, self.tokenizer.eod_id, self.vocab_size
        )
        for start in range(1, stream.num_tokens, COUNT_TOKENS):
            tokens = stream.read(start, min(start + COUNT_TOKENS, stream.num_tokens))
            counts += np.bincount(tokens, minlength=self.vocab_size)
        return counts


def prepare(
    spec: DataSpec, notify: Callable[[str], None], corpus: Corpus = BUILTIN
) -> PreparedData:
    """Opens the dataset that `spec` names, building the built-in one first if need be.

    Any number of processes may call it at once: each builds in a folder of its own, one of them
    is renamed into place, and the others throw theirs away and use that one.

    Args:
        spec: What to open, how to split and cut it.
        notify: Told, in a line, what takes time or was mended.
        corpus: What `builtin` means.

    Raises:
        DataError: Files are missing or damaged, or too small for the splits or one sample.
    """
    if spec.prefix != BUILTIN_CORPUS:
        return _open_prefix(spec, Path(spec.prefix).expanduser(), notify)
    key = _cache_key(corpus, spec.tokenizer.vocab_size)
    folder = cache_folder(spec.cache_dir) / f"{corpus.name}-{key[:16]}"
    for _ in range(ATTEMPTS):
        if not folder.exists():
            _build_into(folder, corpus, spec.tokenizer.vocab_size, notify)
        inode = _inode(folder)
        try:
            sidecar = load_sidecar(folder / SIDECAR)
            verify_files(folder, sidecar, whole=True)
            prefix = folder / PREFIX
            tokenizer = load_tokenizer(folder / sidecar.files[2].name, sidecar.end_of_document)
            dataset = IndexedDataset(prefix)
        except DataError as error:
            notify(f"data: the cached dataset is damaged and is built again: {error}")
            _move_away(folder, inode)
            continue
        return _assemble(spec, dataset, tokenizer, sidecar.fingerprint)
    raise DataError(
        folder,
        "cache",
        f"was damaged again after each of {ATTEMPTS} builds",
        "Delete it, or set model.data.index_mapping_dir to a folder on a sound disk",
    )


def cache_folder(cache_dir: str | None) -> Path:
    """Where prepared datasets are kept (XDG Base Directory Specification)."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the specification says to ignore any other
        return Path(base, "megafp8")
    try:
        return Path.home() / ".cache" / "megafp8"
    except RuntimeError as error:
        raise DataError(
            "~",
            "cache folder",
            "this user has no home folder",
            "Set model.data.index_mapping_dir to a folder that you may write",
        ) from error


def _cache_key(corpus: Corpus, vocab_size: int) -> str:
    """Names the folder: whatever may change its content changes the name."""
    parts = f"{corpus.key()}\n{vocab_size}\n{FORMAT_VERSION}"
    return hashlib.sha256(parts.encode()).hexdigest()


def _open_prefix(spec: DataSpec, prefix: Path, notify: Callable[[str], None]) -> PreparedData:
    """A dataset that someone prepared; the tokenizer has to be beside it."""
    dataset = IndexedDataset(prefix)
    words = find_beside(prefix, "tokenizer.json")
    if words is None:
        raise DataError(
            prefix.with_name(f"{prefix.name}.tokenizer.json"),
            "tokenizer",
            f"is missing, and so is {prefix.with_name('tokenizer.json')}",
            "Put the tokenizer.json that the dataset was tokenized with beside it",
        )
    tokenizer = load_tokenizer(words, end_of_document_beside(prefix))
    sidecar = _sidecar_of(prefix, words, notify)
    if sidecar is None:
        fingerprint = sampled_fingerprint(prefix, words)
    else:
        verify_files(prefix.parent, sidecar, whole=False)
        fingerprint = sidecar.fingerprint
    return _assemble(spec, dataset, tokenizer, fingerprint)


def _sidecar_of(prefix: Path, words: Path, notify: Callable[[str], None]) -> Sidecar | None:
    """The sidecar, if there is one and it is about exactly these files."""
    path = find_beside(prefix, "dataset.json")
    if path is None:
        return None
    try:
        sidecar = load_sidecar(path)
    except DataError as error:  # a foreign one may name the end of a document and nothing else
        notify(f"data: parts of the dataset are hashed instead of all of it: {error}")
        return None
    names = [record.name for record in sidecar.files]
    mine = [bin_path(prefix).name, idx_path(prefix).name, words.name]
    return sidecar if names == mine else None


def _assemble(
    spec: DataSpec, dataset: IndexedDataset, tokenizer: Tokenizer, fingerprint: str
) -> PreparedData:
    splits = split_documents(
        dataset.tokens_per_document(), spec.splits, spec.seed, idx_path(dataset.prefix)
    )
    eod_id, vocab_size, seq_length = tokenizer.eod_id, tokenizer.vocab_size, spec.seq_length
    train = TrainSamples(
        dataset,
        splits.train,
        seq_length=seq_length,
        seed=spec.seed,
        eod_id=eod_id,
        vocab_size=vocab_size,
    )
    validation = ValidationSamples(
        dataset, splits.validation, seq_length=seq_length, eod_id=eod_id, vocab_size=vocab_size
    )
    return PreparedData(
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        fingerprint=fingerprint,
        num_train_tokens=train.num_tokens,
        num_validation_tokens=validation.num_tokens,
        dataset=dataset,
        splits=splits,
    )


def _build_into(
    folder: Path, corpus: Corpus, vocab_size: int, notify: Callable[[str], None]
) -> None:
    """Builds beside `folder` and renames: it is whole or not there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        build = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    try:
        notify(f"data: training the tokenizer and tokenizing the {corpus.name} corpus (once)")
        started = time.monotonic()
        sidecar = build_dataset(corpus, vocab_size, build)
        build.chmod(0o755)  # mkdtemp's is private, and a cache may be shared
        try:
            os.rename(build, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return  # another process was faster; its folder has the same content
        notify(
            f"data: {sidecar.num_documents} documents, {sidecar.num_bytes / 1e6:.1f} MB of text, "
            f"{sidecar.num_tokens} tokens of a vocabulary of {sidecar.vocab_size}, "
            f"built in {time.monotonic() - started:.1f} s: {folder}"
        )
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    finally:
        shutil.rmtree(build, ignore_errors=True)


def _inode(folder: Path) -> int | None:
    """Which folder goes by this name now; None: there is none."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _move_away(folder: Path, inode: int | None) -> None:
    """Takes a damaged folder out of the way in one step, then deletes it.

    It stays if it is not the one that was looked at: another process has mended it meanwhile.
    """
    if _inode(folder) != inode:
        return
    away = folder.with_name(f"{folder.name}.tmp-damaged-{os.getpid()}-{time.time_ns()}")
    try:
        os.rename(folder, away)
    except FileNotFoundError:  # another process did
        return
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    shutil.rmtree(away, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Deletes what killed builds of the same dataset left."""
    for path in folder.parent.glob(f"{folder.name}.tmp-*"):
        try:
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # gone meanwhile
            continue


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        folder,
        "cache folder",
        f"cannot be written ({error.strerror or error})",
        "Set model.data.index_mapping_dir to a folder that you may write",
    )
