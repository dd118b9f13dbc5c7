"""Make prompts and answers of examples by the settings' templates, and tokenize them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megafp8.data.examples import Example, Faults
from megafp8.data.tokenize import Tokenizer
from megafp8.specs.data import InstructionSpec, template_fields

_BATCH = 1024  # texts that are tokenized at once


@dataclass(frozen=True)
class Tokenized:
    """Holds examples as tokens, one after another; each ends with the token that ends a document.

    Attributes:
        tokens_T: The tokens of all examples, int32 [T].
        starts_N: Where each example begins, and T at the end, int64 [N + 1].
        counted_N: The place in each example from which on tokens are counted in the loss, int64
            [N].
        num_cut: The number of examples of which a field was cut.
    """

    tokens_T: NDArray[np.int32]  # noqa: N815 (shape suffix)
    starts_N: NDArray[np.int64]  # noqa: N815 (shape suffix)
    counted_N: NDArray[np.int64]  # noqa: N815 (shape suffix)
    num_cut: int

    @property
    def lengths_N(self) -> NDArray[np.int64]:  # noqa: N802 (shape suffix)
        """Return the number of tokens of each example, [N]."""
        return np.diff(self.starts_N)

    def example(self, number: int) -> tuple[NDArray[np.int32], int]:
        """Return an example's tokens, and the place from which on they are counted in the loss."""
        begin, end = self.starts_N[number], self.starts_N[number + 1]
        return self.tokens_T[begin:end], int(self.counted_N[number])


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
            if isinstance(value, str) and _is_text(value):
                texts[name] = value
            elif isinstance(value, str):
                reason = "has half of a surrogate pair, which is no character"
                faults.add(f"text {name}", example, name, reason, "Write the whole character")
            elif value is None:
                has = ", ".join(str(key) for key in example.fields) or "none"
                key = "label_key and prompt_template" if what == "the answer" else "prompt_template"
                faults.add(
                    f"missing {name}",
                    example,
                    name,
                    f"is {'null' if name in example.fields else 'missing'}; it is {what}, and the "
                    f"example has the fields: {has}",
                    f"Add it, or name other fields by model.data.train_ds.{key}",
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


def _is_text(value: str) -> bool:
    """Whether all of a string are characters: JSON's escapes may give half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def tokenized(
    spec: InstructionSpec, examples: Sequence[Example], tokenizer: Tokenizer, longest: int
) -> Tokenized:
    """Return the tokens of examples, each at most `longest` tokens with the end of a document.

    A text is tokenized whole, so that its tokens are those of a text in training. Where a token
    reaches over the boundary, the prompt and the answer are tokenized separately instead. So the
    tokens always begin with those of the prompt alone, which generation starts from.

    Raises:
        DataError: A field is missing, or an example is too long.
    """
    fields = checked_fields(spec, examples)
    tokens: list[list[int]] = []
    counted: list[int] = []
    for begin in range(0, len(fields), _BATCH):
        pairs = [prompt_and_answer(spec, texts) for texts in fields[begin : begin + _BATCH]]
        prompts = tokenizer.encode_batch([prompt for prompt, _ in pairs])
        wholes = tokenizer.encode_batch([prompt + answer for prompt, answer in pairs])
        for prompt, whole, (_, answer) in zip(prompts, wholes, pairs, strict=True):
            tokens.append(_joined(tokenizer, prompt, whole, answer))
            counted.append(max(1, len(prompt)))
    num_cut, faults = 0, Faults()
    for number, ids in enumerate(tokens):
        if len(ids) <= longest:
            continue
        excess = len(ids) - longest
        cut = _cut(spec, fields[number], tokenizer, longest, excess)
        if cut is not None:
            tokens[number], counted[number] = cut
            num_cut += 1
            continue
        field = "length"
        reason = (
            f"is {len(ids)} tokens with the end of the answer, and a sequence of "
            f"model.encoder_seq_length={longest - 1} takes {longest}"
        )
        hint = "Raise model.encoder_seq_length, or leave the example out"
        if spec.truncation_field is None:
            hint += "; model.data.train_ds.truncation_field=FIELD cuts the field named FIELD"
        else:
            reason += f", even without the field {spec.truncation_field!r}"
        faults.add("length", examples[number], field, reason, hint)
    faults.raise_first()
    if not spec.answer_only_loss:
        counted = [1] * len(tokens)  # nothing predicts an example's first token
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in tokens])])
    flat = np.fromiter((token for ids in tokens for token in ids), np.int32, int(starts[-1]))
    return Tokenized(flat, starts.astype(np.int64), np.array(counted, np.int64), num_cut)


def _cut(
    spec: InstructionSpec,
    fields: Mapping[str, str],
    tokenizer: Tokenizer,
    longest: int,
    excess: int,
) -> tuple[list[int], int] | None:
    """Return an example with one field cut to fit, and its counted place; None if none fits.

    `excess` is the number of tokens beyond `longest` that the whole example has.
    """
    name = spec.truncation_field
    if name is None:
        return None
    ids = tokenizer.encode(fields[name])
    while ids and excess > 0:
        ids = ids[excess:] if spec.truncation_method == "left" else ids[:-excess]
        text = tokenizer.decode(ids).strip("\ufffd")  # a cut may be inside a character
        prompt, answer = prompt_and_answer(spec, {**fields, name: text})
        if not prompt or not answer.strip():
            return None
        prompt_ids = tokenizer.encode(prompt)
        whole = _joined(tokenizer, prompt_ids, tokenizer.encode(prompt + answer), answer)
        excess = len(whole) - longest
        if excess <= 0:
            return whole, max(1, len(prompt_ids))
    return None


def _joined(tokenizer: Tokenizer, prompt: list[int], whole: list[int], answer: str) -> list[int]:
    """Return the tokens of an example with its end; they begin with those of the prompt."""
    if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        whole = prompt + tokenizer.encode(answer)
    return [*whole, tokenizer.eod_id]
