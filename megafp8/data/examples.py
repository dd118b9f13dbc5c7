"""Read questions and answers from files, and turn them into tokens with a mask of the answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafp8.data.records import json_records, not_an_object
from megafp8.data.text_sources import files_of_dataset, load_datasets, reading_errors_reported
from megafp8.data.tokenize import Tokenizer
from megafp8.errors import DataError
from megafp8.specs.data import InstructionSpec, template_fields

OF_DATASETS = "hf:"
"""Begins the name of a dataset that the `datasets` library loads: `hf:NAME` or `hf:NAME:SPLIT`."""

LINE_KINDS = (".jsonl", ".ndjson")
SHOWN_PLACES = 5  # further lines with a fault that a message names
_BATCH = 1024  # texts that are tokenized at once


@dataclass(frozen=True)
class Example:
    """Holds the fields of one example, and the file and line that it came from."""

    fields: Mapping[str, object]
    file: str
    place: str  # `line 3` of a JSONL file, `row 3` of a table

    @property
    def where(self) -> str:
        """Return the file and the line, as messages name them."""
        return f"{self.file}, {self.place}"


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


class _Faults:
    """Collects examples with the same kind of fault, so that one message names all of them."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[Example, str, str, str]]] = {}

    def add(self, kind: str, example: Example, field: str, reason: str, hint: str) -> None:
        self._found.setdefault(kind, []).append((example, field, reason, hint))

    def raise_first(self) -> None:
        """Raise DataError for the first fault of the first kind, if there is any."""
        for found in self._found.values():
            (example, field, reason, hint), *others = found
            if others:
                shown = [other for other, *_ in others[:SHOWN_PLACES]]
                places = [o.place if o.file == example.file else o.where for o in shown]
                more = len(others) - len(places)
                reason += f". The same holds for {', '.join(places)}"
                reason += f" and {more} more" if more else ""
            raise DataError(example.where, field, reason, hint)


# --- reading --------------------------------------------------------------------------------------


def read_examples(name: str) -> list[Example]:
    """Return the examples of one file: JSONL, a JSON list, Parquet, or a dataset by name.

    Raises:
        DataError: The file cannot be read, is empty, or a line of it is not a JSON object.
    """
    if name.startswith(OF_DATASETS):
        examples = list(_rows_of_dataset(name))
    else:
        path = Path(name).expanduser()
        if path.is_dir() or path.suffix == ".parquet":
            examples = list(_rows_of_table(path))
        elif path.suffix == ".json":
            examples = list(_items_of_list(path))
        elif path.suffix in LINE_KINDS:
            examples = list(_lines(path))
        else:
            raise DataError(
                path,
                "kind of file",
                "its name does not tell what it is",
                f"Known are {', '.join(LINE_KINDS)}, .json, .parquet, a folder that the datasets "
                f"library saved, and {OF_DATASETS}NAME",
            )
    if not examples:
        raise DataError(name, "examples", "there is none", "Give a file with one example or more")
    return examples


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            path,
            "file",
            f"cannot be read ({error.strerror or error})",
            "Give the path of a file with one JSON object in each line",
        ) from error


def _lines(path: Path) -> Iterator[Example]:
    faults = _Faults()
    examples = []
    for number, line in enumerate(_bytes_of(path).split(b"\n"), start=1):
        text = line.strip()
        if not text:
            continue
        example = Example({}, str(path), f"line {number}")
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            hint = "Write one JSON object in each line"
            if number == 1 and text in (b"[", b"{"):
                hint += "; a file with one list of objects is named .json"
            faults.add("json", example, "JSON", f"cannot be read ({error})", hint)
            continue
        if not isinstance(fields, dict):
            faults.add(
                "object",
                example,
                "JSON",
                f"is of type {type(fields).__name__}, not an object",
                'Write a line as {"input": "...", "output": "..."}',
            )
            continue
        examples.append(Example(fields, example.file, example.place))
    faults.raise_first()
    yield from examples


def _items_of_list(path: Path) -> Iterator[Example]:
    try:
        items = json.loads(_bytes_of(path))
    except (ValueError, RecursionError) as error:
        hint = "Write a JSON list of objects; a file with one object in each line is named .jsonl"
        raise DataError(path, "JSON", f"cannot be read ({error})", hint) from error
    if not isinstance(items, list):
        hint = "Write a JSON list of objects"
        raise DataError(path, "JSON", f"is of type {type(items).__name__}, not a list", hint)
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            reason = f"is of type {type(item).__name__}, not an object"
            raise DataError(f"{path}, item {number}", "JSON", reason, "Write a list of objects")
        yield Example(item, str(path), f"item {number}")


def _rows_of_table(path: Path) -> Iterator[Example]:
    with reading_errors_reported(str(path)):
        datasets = load_datasets()
        if path.is_dir():
            table = datasets.load_from_disk(str(path))
            if isinstance(table, datasets.DatasetDict):
                raise DataError(
                    path,
                    "folder",
                    f"has the splits {', '.join(table)}",
                    f"Give one of them: {path / next(iter(table), 'train')}",
                )
        else:
            yield from _rows_of_file("parquet", str(path))
            return
        yield from _rows(table, str(path))


def _rows_of_dataset(name: str) -> Iterator[Example]:
    wanted, _, splits = name.removeprefix(OF_DATASETS).partition(":")
    with reading_errors_reported(name):
        for split in (splits or "train").split("+"):
            whole, is_part, _ = split.partition("[")
            found = files_of_dataset(wanted, None, whole)
            if found is None:
                table = load_datasets().load_dataset(wanted, split=split)
                yield from _rows(table, name)
                continue
            kind, files = found
            examples = [example for file in files for example in _rows_of_file(kind, file)]
            if is_part:  # such as train[:10%]
                part = load_datasets().ReadInstruction.from_spec(split)
                (bounds,) = part.to_absolute({whole: len(examples)})
                examples = examples[bounds.from_ : bounds.to]
            yield from examples


def _rows_of_file(kind: str, file: str) -> Iterator[Example]:
    """Yield the examples of one file of a dataset, with values of the types that they have there.

    Files are read one by one, because `datasets` would give all of them the types of the first.
    """
    if kind == "parquet":
        table = load_datasets().load_dataset(
            "parquet", data_files={"train": [file]}, split="train", streaming=True
        )
        yield from _rows(table, file)
        return
    for place, record in json_records(file):
        if not isinstance(record, dict):
            raise not_an_object(file, place, record)
        yield Example(record, file, place)


def _rows(table: Iterable[Mapping[str, object]], name: str) -> Iterator[Example]:
    for number, row in enumerate(table, start=1):
        yield Example(row, name, f"row {number}")


# --- prompts and answers --------------------------------------------------------------------------


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
    faults, found = _Faults(), []
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
        found.append(texts)
    faults.raise_first()
    return found


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
    num_cut, faults = 0, _Faults()
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
