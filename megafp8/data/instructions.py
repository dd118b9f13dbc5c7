"""Pack questions and answers into samples of one length, for fine-tuning.

A sample is [3, seq_length + 1]: tokens, the same tokens with IGNORE where none is predicted, and 1
where an example begins. By the last row the rules for documents
(`megafp8.data.loader.DocumentRules`) keep the examples of a sample apart; the token that ends a
document may be inside of an example, as at the ends of a conversation's turns.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megafp8.data.blend import BlendedSamples, JoinedSamples
from megafp8.data.conversations import Chat
from megafp8.data.examples import Example, read_examples
from megafp8.data.index_maps import shuffled
from megafp8.data.loader import BEGINS, DocumentRules
from megafp8.data.prompts import Tokenized, is_of_chat, joined, tokenized
from megafp8.data.samples import FiniteSource, SampleSource, split_documents
from megafp8.data.tokenize import Tokenizer
from megafp8.errors import DataError
from megafp8.specs import DataSpec
from megafp8.specs.data import IGNORE, InstructionSpec

# Purposes keep the orders drawn from one seed apart from each other and from those of pretraining.
_PACKING, _EPOCH = 11, 12
Notify = Callable[[str], None]
MakeChat = Callable[[], Chat]

PROMPT_TOKENS = 64  # the longest prompt that a sample of the model continues


def pack(lengths_N: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Return the examples of each sample, such that their lengths add up to at most `capacity`.

    Examples are taken in the given order, and each goes to the fullest sample that it fits into
    (best fit). The examples of a sample are in that order too.
    """
    samples: list[list[int]] = []
    free: list[tuple[int, int]] = []  # the tokens that each sample can still take, sorted
    for number, length in enumerate(lengths_N.tolist()):
        assert length <= capacity, f"example {number} of {length} tokens in {capacity}"
        at = bisect_left(free, (length, -1))
        if at == len(free):
            samples.append([])
            left, sample = capacity, len(samples) - 1
        else:
            left, sample = free.pop(at)
        samples[sample].append(number)
        if left - length > 1:  # an example has two tokens or more
            insort(free, (left - length, sample))
    return samples


@dataclass(frozen=True)
class PackedExamples:
    """Hold samples of packed examples; a `FiniteSource`."""

    examples: Tokenized
    samples: Sequence[Sequence[int]]  # the examples of each sample
    seq_length: int

    @property
    def num_samples(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        """Return tokens, predicted tokens and beginnings of a sample, [3, seq_length + 1].

        Beyond the last example the first two are IGNORE. The first token of an example, and with
        `answer_only_loss` each token of its prompt, is not predicted.
        """
        window = np.full((3, self.seq_length + 1), IGNORE, np.int64)
        at = 0
        for number in self.samples[index]:
            tokens, counted = self.examples.example(number)
            window[0, at : at + len(tokens)] = tokens
            window[1, at : at + len(tokens)] = np.where(counted, tokens, IGNORE)
            window[2, at] = BEGINS
            at += len(tokens)
        window[2, at : at + 1] = BEGINS  # the padding is no part of the last example
        return window


@dataclass(frozen=True)
class ShuffledEpochs:
    """Repeat samples without end; each epoch has them in another order. It is a `SampleSource`."""

    source: PackedExamples
    seed: int
    shuffle: bool

    @property
    def num_samples_per_epoch(self) -> int:
        return self.source.num_samples

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        """Return sample `index` >= 0 of the endless stream, [3, seq_length + 1]."""
        epoch, place = divmod(index, self.source.num_samples)
        return self.source[int(self._order(epoch)[place]) if self.shuffle else place]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Return the samples in the order in which an epoch reads them; two epochs are kept."""
        known = self._orders.get(epoch)
        if known is None:
            known = shuffled(self.source.num_samples, self.seed, _EPOCH, epoch)
            if len(self._orders) > 1:  # batches can cross from one epoch into the next
                self._orders.pop(min(self._orders), None)
            self._orders[epoch] = known
        return known

    @cached_property
    def _orders(self) -> dict[int, NDArray[np.int64]]:
        return {}


@dataclass(frozen=True)
class PreparedInstructions:
    """Hold what training and evaluation need to know about questions and answers.

    It has the attributes of `megafp8.data.prepare.PreparedData` that a run reads. Tokens are those
    that are counted in the loss.
    """

    train: SampleSource
    validation: FiniteSource
    tokenizer: Tokenizer
    fingerprint: str
    rules: DocumentRules | None
    train_examples: tuple[Tokenized, ...]
    validation_examples: tuple[Tokenized, ...]  # those of training where no validation is asked for
    num_validation_tokens: int

    @property
    def periodic_validation(self) -> FiniteSource:
        """Return the samples that validation during training draws from: all of them."""
        return self.validation

    @property
    def vocab_size(self) -> int:
        """Return the tokenizer's vocabulary size, before padding."""
        return self.tokenizer.vocab_size

    @property
    def num_train_tokens(self) -> int:
        """Return the counted tokens of the training examples."""
        return _num_counted(self.train_examples)

    @property
    def num_final_tokens(self) -> int:
        """Return the counted tokens of a run's last validation, which takes all examples."""
        return _num_counted(self.validation_examples)

    def validation_tokens(self) -> NDArray[np.int64]:
        """Return the counted tokens of the validation examples, in order."""
        return np.concatenate([examples.counted_tokens for examples in self.validation_examples])

    def validation_text(self) -> bytes:
        """Return the text of the counted tokens, without the token that ends an example."""
        texts = []
        for examples in self.validation_examples:
            for tokens, counted in map(examples.example, range(examples.num_examples)):
                ids = tokens[counted]
                if len(ids) and ids[-1] == self.tokenizer.eod_id:
                    ids = ids[:-1]
                texts.append(self.tokenizer.decode(ids))
        return "".join(texts).encode()

    def validation_prompt(self, num_tokens: int) -> list[int]:
        """Return the first validation example's prompt, or the last tokens of a long one.

        With a loss over prompts too, it is the example's first token.
        """
        examples = self.validation_examples[0]
        prompt = examples.example(0)[0][: examples.firsts_N[0]]
        return [int(token) for token in prompt[-max(num_tokens, PROMPT_TOKENS) :]]

    def train_token_counts(self) -> NDArray[np.int64]:
        """Return how often each token is counted in the training examples, [vocab_size]."""
        return sum(
            (np.bincount(e.counted_tokens, minlength=self.vocab_size) for e in self.train_examples),
            np.zeros(self.vocab_size, np.int64),
        )


def prepare_instructions(
    spec: DataSpec, tokenizer: Tokenizer, notify: Notify, chat: MakeChat | None = None
) -> PreparedInstructions:
    """Read, tokenize and pack the files that `spec.instructions` names.

    Args:
        spec: What to read, and how to cut it into samples.
        tokenizer: The model's tokenizer.
        notify: Receives a line about each thing that the user should know.
        chat: Returns what renders conversations; None reads none.

    Raises:
        DataError: A file or one of its examples cannot be used.
    """
    given = spec.instructions
    assert given is not None
    longest = spec.seq_length + 1
    train_parts, validation_parts = (
        [_read(name, given, tokenizer, longest, notify, chat) for name in names]
        for names in (given.train_files, given.validation_files)
    )
    num_left_out = 0
    if not validation_parts:
        named = zip(train_parts, given.train_files, strict=True)
        pairs = [_split(part, spec, name) for part, name in named]
        num_left_out = sum(part.num_examples for part in train_parts)
        train_parts, validation_parts = [a for a, _ in pairs], [b for _, b in pairs]
        num_left_out -= sum(part.num_examples for pair in pairs for part in pair)
    num_validation_tokens = _num_counted(validation_parts)
    if given.probabilities is None:
        every = [part.example(n) for part in train_parts for n in range(part.num_examples)]
        train_parts = [joined(every, sum(part.num_cut for part in train_parts))]
    trains = [_packed(part, spec, shuffle=given.shuffle) for part in train_parts]
    if not num_validation_tokens:  # then none is asked for
        validation_parts = train_parts
    validations = [_packed(part, spec, shuffle=False) for part in validation_parts]
    _report(trains, validations if num_validation_tokens else (), num_left_out, notify)
    streams = [ShuffledEpochs(train, spec.seed, given.shuffle) for train in trains]
    digest = hashlib.sha256(tokenizer.digest.encode())
    for source in (*trains, *validations):
        examples = source.examples
        for array in (examples.tokens_T, examples.starts_N, examples.firsts_N):
            digest.update(array.tobytes())
        if not _counts_all_after_the_first(examples):
            digest.update(examples.counted_T.tobytes())
        digest.update(repr(source.samples).encode())
    return PreparedInstructions(
        train=streams[0]
        if len(streams) == 1
        else BlendedSamples(streams, given.probabilities or ()),
        validation=validations[0] if len(validations) == 1 else JoinedSamples(validations),
        tokenizer=tokenizer,
        fingerprint=digest.hexdigest(),
        rules=_rules(spec, tokenizer.eod_id),
        train_examples=tuple(train_parts),
        validation_examples=tuple(validation_parts),
        num_validation_tokens=num_validation_tokens,
    )


def _num_counted(parts: Iterable[Tokenized]) -> int:
    return sum(int(examples.counted_T.sum()) for examples in parts)


def _read(
    name: str,
    given: InstructionSpec,
    tokenizer: Tokenizer,
    longest: int,
    notify: Notify,
    chat: MakeChat | None,
) -> Tokenized:
    """Return the tokens of a file's examples, and notify of what was cut and of conversations."""
    examples: list[Example] = read_examples(name)
    num_talks = 0 if chat is None else sum(is_of_chat(given, example) for example in examples)
    maker = chat() if chat is not None and num_talks else None
    tokens = tokenized(given, examples, tokenizer, longest, maker)
    if tokens.num_cut:
        notify(
            f"data: {name}: {tokens.num_cut} of {len(examples)} examples were too long; their "
            f"field {given.truncation_field!r} was cut"
        )
    if maker is not None:
        notify(f"data: {name}: {num_talks} conversations, by the chat template of {maker.folder}")
        first = next(n for n, example in enumerate(examples) if is_of_chat(given, example))
        ids, counted = tokens.example(first)
        if given.answer_only_loss and not {*ids[counted].tolist()} & maker.ends:
            notify(
                "note: the chat template ends an answer with none of the model's end tokens "
                "(eos_token_id of generation_config.json), so that generation does not stop there"
            )
    return tokens


def _counts_all_after_the_first(examples: Tokenized) -> bool:
    """Whether each example's counted tokens are those from its first counted one on."""
    num_counted = int((examples.lengths_N - examples.firsts_N).sum())
    return num_counted == int(examples.counted_T.sum())


def _split(part: Tokenized, spec: DataSpec, name: str) -> tuple[Tokenized, Tokenized]:
    """Return training and validation examples of a file, by `model.data.splits_string`."""
    try:
        splits = split_documents(
            part.lengths_N, spec.splits, spec.seed, name, needs_validation=spec.validates
        )
    except DataError as error:
        hint = "Give a file of its own by model.data.validation_ds.file_names, or more examples"
        raise DataError(name, "examples", error.reason, hint) from error
    return part.chosen(np.sort(splits.train)), part.chosen(np.sort(splits.validation))


def _packed(part: Tokenized, spec: DataSpec, *, shuffle: bool) -> PackedExamples:
    given = spec.instructions
    assert given is not None
    if shuffle:
        part = part.chosen(shuffled(part.num_examples, spec.seed, _PACKING))
    samples: list[list[int]] = [[number] for number in range(part.num_examples)]
    if given.packed:
        samples = pack(part.lengths_N, spec.seq_length + 1)
    return PackedExamples(part, samples, spec.seq_length)


def _report(
    trains: Sequence[PackedExamples],
    validations: Sequence[PackedExamples],
    num_left_out: int,
    notify: Notify,
) -> None:
    examples = sum(source.examples.num_examples for source in trains)
    held_out = sum(source.examples.num_examples for source in validations)
    samples = sum(source.num_samples for source in trains)
    tokens = sum(len(source.examples.tokens_T) for source in trains)
    counted = sum(int(source.examples.counted_T.sum()) for source in trains)
    places = samples * (trains[0].seq_length + 1)
    notify(
        f"data: {examples} training examples in {samples} samples, which they fill to "
        f"{tokens / places:.0%}; {counted / tokens:.0%} of their tokens are counted in the loss; "
        f"{held_out} validation examples"
        + (f"; {num_left_out} are left out (model.data.splits_string)" if num_left_out else "")
    )


def _rules(spec: DataSpec, eod_id: int) -> DocumentRules | None:
    if not (spec.reset_position_ids or spec.reset_attention_mask):
        return None
    return DocumentRules(
        eod_id=eod_id,
        reset_position_ids=spec.reset_position_ids,
        reset_attention_mask=spec.reset_attention_mask,
    )
