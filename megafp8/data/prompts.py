"""Make prompts and answers of examples by the settings' templates, and tokenize them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megafp8.data.conversations import Chat, is_conversation, tokenized_conversations
from megafp8.data.examples import Example, Faults, is_text
from megafp8.data.tokenize import Frame, Tokenizer, frame_of
from megafp8.specs.data import CONVERSATIONS, InstructionSpec, template_fields

_BATCH = 1024  # texts that are tokenized at once


@dataclass(frozen=True)
class Tokenized:
    """Hold examples as tokens, one after another.

    Attributes:
        tokens_T: The tokens of all examples, int32 [T].
        starts_N: Where each example begins, and T at the end, int64 [N + 1].
        counted_T: Which tokens are counted in the loss; the first of an example never is, bool [T].
        num_cut: The number of examples that were cut to fit.
    """

    tokens_T: NDArray[np.int32]  # noqa: N815 (shape suffix)
    starts_N: NDArray[np.int64]  # noqa: N815 (shape suffix)
    counted_T: NDArray[np.bool_]  # noqa: N815 (shape suffix)
    num_cut: int

    @property
    def num_examples(self) -> int:
        """Return the number of examples."""
        return len(self.starts_N) - 1

    @property
    def lengths_N(self) -> NDArray[np.int64]:  # noqa: N802 (shape suffix)
        """Return the number of tokens of each example, [N]."""
        return np.diff(self.starts_N)

    @property
    def firsts_N(self) -> NDArray[np.int64]:  # noqa: N802 (shape suffix)
        """Return the place in each example of its first counted token, [N]."""
        places = np.flatnonzero(self.counted_T)
        firsts: NDArray[np.int64] = places[np.searchsorted(places, self.starts_N[:-1])]
        return firsts - self.starts_N[:-1]

    @property
    def counted_tokens(self) -> NDArray[np.int64]:
        """Return the counted tokens of all examples, one after another."""
        return self.tokens_T[self.counted_T].astype(np.int64)

    def example(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return an example's tokens, and which of them are counted in the loss."""
        begin, end = self.starts_N[number], self.starts_N[number + 1]
        return self.tokens_T[begin:end], self.counted_T[begin:end]

    def chosen(self, numbers: NDArray[np.int64]) -> Tokenized:
        """Return some of the examples, in the order of `numbers`."""
        return joined([self.example(int(number)) for number in numbers], self.num_cut)


def joined(examples: Sequence[tuple[ArrayLike, ArrayLike]], num_cut: int) -> Tokenized:
    """Return examples, each given by its tokens and which of them are counted."""
    lengths = [np.size(tokens) for tokens, _ in examples]
    some: Sequence[tuple[ArrayLike, ArrayLike]] = examples or [([], [])]
    return Tokenized(
        np.concatenate([tokens for tokens, _ in some]).astype(np.int32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.concatenate([counted for _, counted in some]).astype(np.bool_),
        num_cut,
    )


def prompt_and_answer(spec: InstructionSpec, fields: Mapping[str, str]) -> tuple[str, str]:
    """Return the text before the answer, and the answer.

    Spaces directly before the answer belong to it, because tokenizers join a space with the word
    that follows it.
    """
    label = "{" + spec.label_key + "}"
    before = spec.prompt_template.removesuffix(label).format(**fields)
    prompt = before.rstrip(" ")
    return prompt, before[len(prompt) :] + fields[spec.label_key]


def checked_fields(spec: InstructionSpec, examples: Sequence[Example]) -> list[dict[str, str]]:
    """Return the fields of each example that the template reads, as texts.

    Raises:
        DataError: A field is missing, is not a text, or has half of a surrogate pair; or the prompt
            or the answer is empty.
    """
    names = template_fields(spec.prompt_template)
    assert names is not None, "validated"
    faults, fields = Faults(), []
    for example in examples:
        texts: dict[str, str] = {}
        for name in names:
            value = example.fields.get(name)
            what = "the answer" if name == spec.label_key else "a field of the prompt"
            if isinstance(value, str) and is_text(value):
                texts[name] = value
            elif isinstance(value, str):
                reason = "has half of a surrogate pair, which is no character"
                faults.add(f"text {name}", example, name, reason, "Write the whole character")
            elif value is None:
                has = ", ".join(str(key) for key in example.fields) or "none"
                key = "label_key and prompt_template" if what == "the answer" else "prompt_template"
                talks = any(key in example.fields for key in (*CONVERSATIONS, "instruction"))
                chat = ". model.data.chat=True reads examples as conversations" if talks else ""
                faults.add(
                    f"missing {name}",
                    example,
                    name,
                    f"is {'null' if name in example.fields else 'missing'}; it is {what}, and the "
                    f"example has the fields: {has}",
                    f"Add it, or name other fields by model.data.train_ds.{key}{chat}",
                )
            else:
                reason = f"is of type {type(value).__name__}, not a text"
                faults.add(f"type {name}", example, name, reason, "Write it in quotes")
        if len(texts) == len(set(names)):
            prompt, answer = prompt_and_answer(spec, texts)
            if not answer.strip():
                hint = "Leave the example out, or write an answer"
                faults.add("answer", example, spec.label_key, "the answer is empty", hint)
            elif not prompt:
                hint = "Leave the example out, or add text to model.data.train_ds.prompt_template"
                faults.add("prompt", example, "prompt", "is empty", hint)
        fields.append(texts)
    faults.raise_first()
    return fields


def tokenized(
    spec: InstructionSpec,
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    longest: int,
    chat: Chat | None = None,
) -> Tokenized:
    """Return the tokens of examples, each at most `longest` tokens with what begins and ends it.

    Conversations are rendered by the chat template of `chat`, the other examples by the template of
    `spec`.

    Raises:
        DataError: A field is missing, or an example is too long.
    """
    talks = [n for n, e in enumerate(examples) if is_of_chat(spec, e)] if chat else []
    plain = sorted({*range(len(examples))} - {*talks})
    found: dict[int, tuple[ArrayLike, ArrayLike]] = {}
    num_cut = 0
    if chat is not None and talks:
        some, num_cut = tokenized_conversations(spec, [examples[n] for n in talks], chat, longest)
        found |= zip(talks, some, strict=True)
    if plain:
        others, cut = _by_template(spec, [examples[n] for n in plain], tokenizer, longest)
        found |= zip(plain, others, strict=True)
        num_cut += cut
    return joined([found[number] for number in range(len(examples))], num_cut)


def is_of_chat(spec: InstructionSpec, example: Example) -> bool:
    """Whether an example is rendered by the chat template, and not by that of the settings."""
    if spec.chat is not None:
        return spec.chat
    names = template_fields(spec.prompt_template) or []
    return is_conversation(example) and not all(name in example.fields for name in names)


def _by_template(
    spec: InstructionSpec, examples: Sequence[Example], tokenizer: Tokenizer, longest: int
) -> tuple[list[tuple[list[int], NDArray[np.bool_]]], int]:
    """Return the tokens of examples with those that are counted, and how many were cut.

    A text is tokenized whole, so that its tokens are those of a text in training; special tokens
    that the template or a field writes out are special tokens. Where a token reaches over the
    boundary, the prompt and the answer are tokenized separately instead. So the tokens always begin
    with those of the prompt alone, which generation starts from.

    Raises:
        DataError: A field is missing, or an example is too long.
    """
    fields = checked_fields(spec, examples)
    end = () if spec.add_eos is False else (tokenizer.eod_id,)
    frame = frame_of(tokenizer, spec.add_bos, end, "model.data.train_ds.add_bos")
    found: list[tuple[list[int], int]] = []  # with the place from which on tokens are counted
    for begin in range(0, len(fields), _BATCH):
        pairs = [prompt_and_answer(spec, texts) for texts in fields[begin : begin + _BATCH]]
        prompts = tokenizer.encode_marked([prompt for prompt, _ in pairs])
        wholes = tokenizer.encode_marked([prompt + answer for prompt, answer in pairs])
        for prompt, whole, (_, answer) in zip(prompts, wholes, pairs, strict=True):
            found.append(_framed(tokenizer, frame, prompt, whole, answer))
    num_cut, faults = 0, Faults()
    for number, (ids, _) in enumerate(found):
        if len(ids) <= longest:
            continue
        cut = _cut(spec, fields[number], tokenizer, frame, longest, len(ids) - longest)
        if cut is not None:
            found[number] = cut
            num_cut += 1
            continue
        field = "length"
        reason = (
            f"is {len(ids)} tokens with the end of the answer, and a sequence of "
            f"model.encoder_seq_length={longest - 1} takes {longest}"
        )
        hint = "Raise model.encoder_seq_length, or leave the example out"
        if spec.truncation_field not in fields[number]:
            hint += "; model.data.train_ds.truncation_field=FIELD cuts the field named FIELD"
        else:
            reason += f", even without the field {spec.truncation_field!r}"
        faults.add("length", examples[number], field, reason, hint)
    faults.raise_first()
    firsts = [counted if spec.answer_only_loss else 1 for _, counted in found]
    pairs_of = zip(found, firsts, strict=True)
    return [(ids, np.arange(len(ids)) >= at) for (ids, _), at in pairs_of], num_cut


def _cut(
    spec: InstructionSpec,
    fields: Mapping[str, str],
    tokenizer: Tokenizer,
    frame: Frame,
    longest: int,
    excess: int,
) -> tuple[list[int], int] | None:
    """Return an example with one field cut to fit, and its counted place; None if none fits.

    `excess` is the number of tokens beyond `longest` that the whole example has. An answer that is
    cut at its end does not end there, so that no end is learned.
    """
    name = spec.truncation_field
    if name is None or name not in fields:  # `messages` is for conversations
        return None
    if name == spec.label_key and spec.truncation_method == "right":
        excess, frame = excess - len(frame.end), Frame(frame.begin, ())
    (ids,) = tokenizer.encode_marked([fields[name]])
    while ids and excess > 0:
        ids = ids[excess:] if spec.truncation_method == "left" else ids[:-excess]
        text = tokenizer.decode(ids).strip("\ufffd")  # a cut may be inside a character
        prompt, answer = prompt_and_answer(spec, {**fields, name: text})
        if not prompt or not answer.strip():
            return None
        prompt_ids, whole = tokenizer.encode_marked([prompt, prompt + answer])
        cut, counted = _framed(tokenizer, frame, prompt_ids, whole, answer)
        excess = len(cut) - longest
        if excess <= 0:
            return cut, counted
    return None


def _framed(
    tokenizer: Tokenizer, frame: Frame, prompt: list[int], whole: list[int], answer: str
) -> tuple[list[int], int]:
    """Return the tokens of an example with its frame, and the place of its first counted one.

    They begin with those of the prompt.
    """
    if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        whole = prompt + tokenizer.encode_marked([answer])[0]
    return frame.around(whole), max(1, len(frame.before(whole)) + len(prompt))
