"""Prepare training and validation samples from a `DataSpec`; what takes long is cached."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafp8.data.blend import BlendedSamples, JoinedSamples
from megafp8.data.builtin import BUILTIN, Corpus, open_builtin, prepared_folder
from megafp8.data.dataset import OpenedDataset, open_prefix
from megafp8.data.index_maps import IndexCache
from megafp8.data.indexed import dataset_path, idx_path
from megafp8.data.loader import DocumentRules
from megafp8.data.named_tokenizers import configured_tokenizer
from megafp8.data.samples import (
    FiniteSource,
    SampleOrder,
    SampleSource,
    TokenStream,
    TrainSamples,
    ValidationSamples,
    check_vocabulary,
    split_documents,
)
from megafp8.data.tokenize import Tokenizer
from megafp8.errors import DataError
from megafp8.specs import DataSpec
from megafp8.specs.data import BUILTIN_CORPUS, SeparateSplits, Weighted

VALIDATION_TOKENS = 1 << 22  # limit of a run's last validation, about 16 MB of text
COUNTED_TOKENS = 1 << 26  # limit of the tokens that the unigram model counts

COUNT_TOKENS = 1 << 20  # tokens that are counted at once
Notify = Callable[[str], None]


def excerpt(lengths: NDArray[np.integer], num_tokens: int, limit: int) -> NDArray[np.int64]:
    """Return the places of evenly spread documents with about `limit` of `num_tokens` tokens.

    All documents are returned if they have no more than `limit` tokens. At least one document is
    returned, so a single huge document may exceed `limit`.

    Args:
        lengths: The number of tokens of each document.
        num_tokens: The tokens of all datasets together; this dataset gets its share of `limit`.
        limit: The number of tokens for all datasets together.
    """
    if num_tokens <= limit:
        return np.arange(len(lengths))
    chosen = np.arange(0, len(lengths), -(-num_tokens // limit))
    share = int(lengths.sum(dtype=np.int64)) * limit // num_tokens
    fits = int(np.searchsorted(lengths[chosen].cumsum(dtype=np.int64), share, side="right"))
    return chosen[: max(1, fits)]


@dataclass(frozen=True)
class DataPart:
    """Hold the documents of one dataset that a split takes, in the order in which they were
    drawn.
    """

    name: str  # as the settings name the dataset
    opened: OpenedDataset
    documents: NDArray[np.int64]
    weight: str

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the documents."""
        return int(self.opened.dataset.tokens_per_document()[self.documents].sum())


@dataclass(frozen=True)
class PreparedData:
    """Hold everything that training and evaluation need to know about the data.

    Attributes:
        train: The endless training stream.
        validation: Every token of `final_parts` once.
        periodic_validation: The samples that validation during training draws from: all validation
            tokens or, with `validation_drop_last`, those that fill whole samples.
        tokenizer: The tokenizer of all datasets.
        vocab_size: The tokenizer's vocabulary size, before padding.
        fingerprint: A hash of the datasets' content; a checkpoint records it, so that a changed
            dataset is refused. It does not depend on paths or times.
        rules: The rules for document ends: positions, attention and loss; None applies none.
        train_parts: The datasets of the training stream.
        validation_parts: The datasets of the validation.
        final_parts: What the run's last validation reads: all validation documents, or evenly
            spread ones of about `VALIDATION_TOKENS` tokens. Without validation documents it is
            training documents, from which only a sample's prompt and the bytes per token come.
        num_train_tokens: The tokens of the training documents, including their ends.
        num_validation_tokens: The tokens of the validation documents, including their ends.
        num_final_tokens: The tokens of `final_parts`, each of which is predicted once.
        validated_in_training: The validation datasets whose documents are trained on.
        repeated: Pairs of training datasets that have the same tokens, the earlier one first.
    """

    train: SampleSource
    validation: FiniteSource
    periodic_validation: FiniteSource
    tokenizer: Tokenizer
    vocab_size: int
    fingerprint: str
    rules: DocumentRules | None
    train_parts: tuple[DataPart, ...]
    validation_parts: tuple[DataPart, ...]
    final_parts: tuple[DataPart, ...]
    num_train_tokens: int
    num_validation_tokens: int
    num_final_tokens: int
    validated_in_training: tuple[str, ...] = ()
    repeated: tuple[tuple[str, str], ...] = ()

    def epochs(self, num_samples: int) -> list[tuple[str, float]]:
        """Return how often `num_samples` samples read each training dataset, the most often first.

        The weights of a blend hold to within one sample.
        """
        weights = [float(part.weight) for part in self.train_parts]
        sources = self.train.sources if isinstance(self.train, BlendedSamples) else [self.train]
        read = [
            (part.name, num_samples * weight / sum(weights) / source.num_samples_per_epoch)
            for part, source, weight in zip(self.train_parts, sources, weights, strict=True)
        ]
        return sorted(read, key=lambda pair: -pair[1])

    def validation_tokens(self) -> NDArray[np.int64]:
        """Return the tokens that a pass over `validation` predicts, in order, with ends of
        documents.
        """
        streams = (self._stream(part) for part in self.final_parts)
        return np.concatenate([stream.read(1, stream.num_tokens) for stream in streams])

    def validation_text(self) -> bytes:
        """Return the original bytes of `final_parts`, one document after another, without their
        ends.
        """
        return b"".join(
            self.document_text(part.opened, int(document))
            for part in self.final_parts
            for document in part.documents
        )

    def validation_prompt(self, num_tokens: int) -> list[int]:
        """Return the first tokens of the first validation document that is not empty.

        Without such a document, it is the token that ends a document.
        """
        for part in self.final_parts:
            for document in part.documents:
                tokens = part.opened.dataset.document(int(document))[:num_tokens]
                prompt = [int(token) for token in tokens if token != self.tokenizer.eod_id]
                if prompt and max(prompt) < self.vocab_size:
                    return prompt
        return [self.tokenizer.eod_id]

    def document_text(self, opened: OpenedDataset, document: int) -> bytes:
        """Return the bytes of one document; for a byte-level BPE exactly those it was tokenized
        from.
        """
        tokens = opened.dataset.document(document)
        check_vocabulary(tokens, self.vocab_size, opened.dataset)
        if opened.begin and tuple(tokens[: len(opened.begin)].tolist()) == opened.begin:
            tokens = tokens[len(opened.begin) :]
        return self.tokenizer.decode(tokens[tokens != self.tokenizer.eod_id]).encode("utf-8")

    def train_token_counts(self) -> NDArray[np.int64]:
        """Return how often each token occurs in the training documents, [vocab_size].

        If they have more than about `COUNTED_TOKENS` tokens, evenly spread documents are counted.
        """
        counts = np.zeros(self.vocab_size, np.int64)
        counted = _excerpt(self.train_parts, self.num_train_tokens, COUNTED_TOKENS)
        for stream in (self._stream(part) for part in counted):
            for start in range(1, stream.num_tokens, COUNT_TOKENS):
                tokens = stream.read(start, min(start + COUNT_TOKENS, stream.num_tokens))
                counts += np.bincount(tokens, minlength=self.vocab_size)
        return counts

    def _stream(self, part: DataPart) -> TokenStream:
        return TokenStream(
            part.opened.dataset, part.documents, self.tokenizer.eod_id, self.vocab_size
        )


def prepare(
    spec: DataSpec,
    notify: Notify,
    corpus: Corpus = BUILTIN,
    index_cache: IndexCache | None = None,
) -> PreparedData:
    """Open the datasets that `spec` names; build the built-in one first if needed.

    Any number of processes may call this at once, on any number of hosts.

    Args:
        spec: What to open, how to split it and how to cut it into samples.
        notify: Receives a line about each thing that takes time or was repaired.
        corpus: The corpus that `builtin` means.
        index_cache: Where index maps are kept; None means the cache folder, for large maps.

    Raises:
        DataError: Files are missing or damaged, or too small for the splits or for one sample.
        ConfigError: A tokenizer lacks a setting.
    """
    cache = index_cache or IndexCache(_index_folder(spec), notify)
    opener = _Opener(spec, notify, corpus, cache)
    if isinstance(spec.prefix, SeparateSplits):
        notify("data: model.data.splits_string is not used: data_prefix names each split's data")
        train = [opener.whole(weighted, "train") for weighted in spec.prefix.train]
        validation = [opener.whole(weighted, "validation") for weighted in spec.prefix.validation]
        for weighted in spec.prefix.test:  # no code reads the test split, but it must be valid
            opener.whole(weighted, "test")
    else:
        prefix = spec.prefix
        assert prefix is not None, "validated"
        blend = (Weighted("1", prefix),) if isinstance(prefix, str) else prefix
        both = [opener.split(weighted) for weighted in blend]
        train, validation = [pair[0] for pair in both], [pair[1] for pair in both]
    return _assemble(spec, opener, train, validation, cache)


class _Opener:
    """Open each dataset once and check that all datasets share one vocabulary."""

    def __init__(self, spec: DataSpec, notify: Notify, corpus: Corpus, cache: IndexCache) -> None:
        self._spec, self._notify, self._corpus, self._cache = spec, notify, corpus, cache
        self._given = configured_tokenizer(spec.tokenizer)
        self._opened: dict[str, OpenedDataset] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        return next(iter(self._opened.values())).tokenizer

    def open(self, prefix: str) -> OpenedDataset:
        known = self._opened.get(prefix)
        if known is not None:
            return known
        spec = self._spec
        if prefix == BUILTIN_CORPUS:
            vocab_size, cache = spec.tokenizer.vocab_size, prepared_folder(spec.cache_dir)
            opened = open_builtin(self._corpus, vocab_size, cache, self._notify)
        else:
            opened = open_prefix(dataset_path(prefix), self._notify, self._given)
        if self._opened and opened.tokenizer.digest != self.tokenizer.digest:
            raise DataError(
                opened.dataset.prefix,
                "vocabulary",
                f"its tokenizer ({opened.tokenizer.vocab_size} tokens) is not that of "
                f"{next(iter(self._opened))} ({self.tokenizer.vocab_size} tokens)",
                "Prepare all datasets of a blend with the same tokenizer",
            )
        self._opened[prefix] = opened
        if opened.begin is not None and opened.begin != opened.tokenizer.begin:
            self._notify(_begins_otherwise(prefix, opened))
        if not opened.add_eos and document_rules(spec, 0) is not None:
            raise DataError(
                opened.dataset.prefix,
                "end of a document",
                "was left out (--no-add-eos), and model.data.reset_position_ids, "
                "reset_attention_mask and eod_mask_loss find documents by it",
                "Prepare the data with it, or set these keys to False",
            )
        return opened

    def split(self, weighted: Weighted) -> tuple[DataPart, DataPart]:
        """Return the training and validation parts of one dataset."""
        opened, spec = self.open(weighted.prefix), self._spec

        def build() -> dict[str, NDArray[np.integer]]:
            tokens = opened.dataset.tokens_per_document()
            source = idx_path(opened.dataset.prefix)
            splits = split_documents(tokens, spec.splits, spec.seed, source, spec.validates)
            return {"train": splits.train, "validation": splits.validation}

        key = {"data": opened.fingerprint, "splits": spec.splits, "seed": spec.seed}
        splits = self._cache.get("splits", key, opened.dataset.num_documents, build)
        train = splits["train"].astype(np.int64, copy=False)
        validation = splits["validation"].astype(np.int64, copy=False)
        if not spec.shuffle_documents:
            train, validation = np.sort(train), np.sort(validation)
        return (
            DataPart(weighted.prefix, opened, train, weighted.weight),
            DataPart(weighted.prefix, opened, validation, weighted.weight),
        )

    def whole(self, weighted: Weighted, split: str) -> DataPart:
        """Return all documents of one dataset, for one split."""
        opened = self.open(weighted.prefix)
        if opened.dataset.num_tokens == 0:
            raise DataError(
                idx_path(opened.dataset.prefix),
                "documents",
                f"there is no token for the {split} split",
                "Prepare the dataset again from a corpus that has text",
            )
        documents = np.arange(opened.dataset.num_documents, dtype=np.int64)
        return DataPart(weighted.prefix, opened, documents, weighted.weight)


def _begins_otherwise(prefix: str, opened: OpenedDataset) -> str:
    """Return a note about documents that do not begin as the tokenizer begins a text."""
    tokens = opened.tokenizer.tokens()
    data, own = (
        "".join(tokens.get(number, "?") for number in ids) or "no such token"
        for ids in (opened.begin or (), opened.tokenizer.begin)
    )
    return (
        f"note: data: the documents of {prefix} begin with {data}, and the tokenizer begins a text "
        f"with {own}, as generate and transformers do (preprocess --add-bos, --no-add-bos)"
    )


def _assemble(
    spec: DataSpec,
    opener: _Opener,
    train_parts: Sequence[DataPart],
    validation_parts: Sequence[DataPart],
    cache: IndexCache,
) -> PreparedData:
    """Return the samples of the parts, with what a run says of them and validates on."""
    tokenizer, seq_length = opener.tokenizer, spec.seq_length
    eod_id, vocab_size = tokenizer.eod_id, tokenizer.vocab_size
    order = SampleOrder(
        seed=spec.seed,
        shuffle_documents=spec.shuffle_documents,
        recut=spec.dataloader_type == "single",
    )
    separate = isinstance(spec.prefix, SeparateSplits)
    trains = [
        TrainSamples(
            part.opened.dataset,
            part.documents,
            seq_length=seq_length,
            order=order,
            eod_id=eod_id,
            vocab_size=vocab_size,
            cache=cache,
            fingerprint=f"{part.opened.fingerprint} {'all' if separate else spec.splits}",
        )
        for part in train_parts
    ]

    num_train_tokens = sum(part.num_tokens for part in train_parts)
    num_validation_tokens = sum(part.num_tokens for part in validation_parts)
    shown, num_shown = validation_parts, num_validation_tokens
    if not num_validation_tokens:  # then none is asked for
        shown, num_shown = train_parts, num_train_tokens
    final_parts = _excerpt(shown, num_shown, VALIDATION_TOKENS)

    def validation(parts: Sequence[DataPart], drop_last: bool = False) -> FiniteSource:
        sources = [
            ValidationSamples(
                part.opened.dataset,
                part.documents,
                seq_length=seq_length,
                eod_id=eod_id,
                vocab_size=vocab_size,
                drop_last=drop_last,
            )
            for part in parts
        ]
        return sources[0] if len(sources) == 1 else JoinedSamples(sources)

    repeated = []
    if len(train_parts) > 1:
        digests = [part.opened.tokens_digest for part in train_parts]
        firsts = [(digests.index(digest), place) for place, digest in enumerate(digests)]
        names = [part.name for part in train_parts]
        repeated = [(names[first], names[place]) for first, place in firsts if first < place]
    trained = {part.opened.tokens_digest for part in train_parts if separate}
    in_training = (part for part in validation_parts if separate)
    final, whole = validation(final_parts), validation(shown)
    periodic = validation(shown, drop_last=True) if spec.validation_drop_last else whole
    weights = [part.weight for part in train_parts]
    return PreparedData(
        train=trains[0] if len(trains) == 1 else BlendedSamples(trains, weights),
        validation=final,
        periodic_validation=periodic if periodic.num_samples else whole,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        fingerprint=_fingerprint([*train_parts, *validation_parts]),
        rules=document_rules(spec, eod_id),
        train_parts=tuple(train_parts),
        validation_parts=tuple(validation_parts),
        final_parts=final_parts,
        num_train_tokens=num_train_tokens,
        num_validation_tokens=num_validation_tokens,
        num_final_tokens=sum(part.num_tokens for part in final_parts),
        validated_in_training=tuple(
            part.name for part in in_training if part.opened.tokens_digest in trained
        ),
        repeated=tuple(repeated),
    )


def _excerpt(parts: Sequence[DataPart], num_tokens: int, limit: int) -> tuple[DataPart, ...]:
    """Return documents of each part with about `limit` of their `num_tokens` tokens together."""

    def some(part: DataPart) -> DataPart:
        lengths = part.opened.dataset.tokens_per_document()[part.documents]
        return replace(part, documents=part.documents[excerpt(lengths, num_tokens, limit)])

    return tuple(some(part) for part in parts)


def document_rules(spec: DataSpec, eod_id: int) -> DocumentRules | None:
    """Return the rules for the ends of documents that a specification asks for, or None."""
    if not (spec.reset_position_ids or spec.reset_attention_mask or spec.eod_mask_loss):
        return None
    return DocumentRules(
        eod_id=eod_id,
        reset_position_ids=spec.reset_position_ids,
        reset_attention_mask=spec.reset_attention_mask,
        eod_mask_loss=spec.eod_mask_loss,
    )


def _fingerprint(parts: Sequence[DataPart]) -> str:
    """Return the fingerprint of the only dataset, or a hash of all fingerprints in order."""
    fingerprints = [part.opened.fingerprint for part in parts]
    if len(set(fingerprints)) == 1:
        return fingerprints[0]
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()


def _index_folder(spec: DataSpec) -> Path | None:
    try:
        return prepared_folder(spec.cache_dir)
    except DataError:  # without a home folder nothing is kept, which is allowed
        return None


def build_index_maps(data: PreparedData, num_samples: int) -> int:
    """Compute every index map of the first `num_samples` samples; return the number of epochs.

    The maps are kept in the index cache, where the job finds them.
    """
    source = data.train
    if isinstance(source, BlendedSamples):
        counts = source.schedule.counts(num_samples)
        pairs = zip(source.sources, counts, strict=True)
        return sum(_build(one, count) for one, count in pairs)
    return _build(source, num_samples)


def _build(source: SampleSource, num_samples: int) -> int:
    assert isinstance(source, TrainSamples), type(source)
    num_epochs = -(-num_samples // source.num_samples_per_epoch)
    for number in range(num_epochs):
        source.epoch(number)
    return num_epochs
