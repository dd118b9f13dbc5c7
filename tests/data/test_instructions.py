"""Questions and answers become packed, masked samples; bad ones are named by file and line."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.config.data_values import unescaped
from megafp8.data.examples import read_examples
from megafp8.data.instructions import PreparedInstructions, pack, prepare_instructions
from megafp8.data.loader import validation_batches
from megafp8.data.prompts import Tokenized, checked_fields, tokenized
from megafp8.data.tokenize import JsonTokenizer, byte_tokenizer, train_tokenizer
from megafp8.errors import DataError
from megafp8.specs import DataSpec, InstructionSpec
from megafp8.specs.data import IGNORE, template_fields
from tests.data.helpers import data_spec
from tests.documents import ids_of

SEQ = 48
GOOD = [{"input": f"What is {n}?", "output": "x" * (n % 7 + 1)} for n in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> JsonTokenizer:
    """Each byte is a token, so that lengths are those of texts."""
    return byte_tokenizer()


def instructions(*files: object, **changes: Any) -> InstructionSpec:
    return InstructionSpec(
        train_files=tuple(str(file) for file in files), model="nowhere", **changes
    )


def spec_of(*files: object, seq_length: int = SEQ, **changes: Any) -> DataSpec:
    return replace(
        data_spec(None),
        prefix=None,
        seq_length=seq_length,
        reset_position_ids=True,
        reset_attention_mask=True,
        instructions=instructions(*files, **changes),
    )


def write(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def prepared(spec: DataSpec, tokenizer: JsonTokenizer) -> PreparedInstructions:
    return prepare_instructions(spec, tokenizer, lambda line: None)


# --- bad data -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "place", "words"),
    [
        (["{", "]"], "line 1", ["JSON", "cannot be read", "line 2"]),
        (['["a"]'], "line 1", ["is of type list, not an object"]),
        ([GOOD[0], {"input": "a"}], "line 2", ["output: is missing", "fields: input"]),
        ([GOOD[0], {"input": "a", "output": None}], "line 2", ["output: is null"]),
        ([GOOD[0], "", {"input": "a", "output": 3}], "line 3", ["is of type int, not a text"]),
        ([GOOD[0], {"input": "a", "output": " "}], "line 2", ["the answer is empty"]),
        ([GOOD[0], {"input": "", "output": "a"}], "line 2", ["prompt: is empty"]),
        (
            [GOOD[0], r'{"input": "a \ud83d", "output": "b"}', {"input": "a", "output": "\udc00"}],
            "line 2",
            ["input: has half of a surrogate pair", "Write the whole character"],
        ),
        ([GOOD[0], {"input": "a", "output": "b\ude00"}], "line 2", ["output: has half"]),
        ([{"output": "a"}] * 8, "line 1", ["input: is missing", "line 2", "and 2 more"]),
        (
            [GOOD[0], {"input": "a" * 60, "output": "b"}],
            "line 2",
            ["is 63 tokens", "takes 49", "truncation_field=FIELD"],
        ),
    ],
)
def test_a_bad_example_is_named_by_file_and_line(
    tmp_path: Path, tokenizer: JsonTokenizer, lines: list[object], place: str, words: list[str]
) -> None:
    path = write(tmp_path / "mine.jsonl", *lines)
    with pytest.raises(DataError) as caught:
        prepared(spec_of(path), tokenizer)
    assert str(caught.value).startswith(f"{path}, {place}: ")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("empty.jsonl", "", ["examples: there is none"]),
        ("blank.jsonl", "\n \n", ["examples: there is none"]),
        ("one.jsonl", json.dumps(GOOD[0]), ["leave the validation split empty"]),
        ("list.json", "[]", ["examples: there is none"]),
        ("object.json", "{}", ["is of type dict, not a list"]),
        ("items.json", '[{"input": "a"}, 3]', ["items.json, item 2", "type int"]),
        ("broken.json", "[", ["JSON: cannot be read"]),
        ("mine.csv", "a,b", ["kind of file", ".jsonl"]),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, tokenizer: JsonTokenizer, name: str, text: str, words: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        prepared(spec_of(path), tokenizer)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_examples(str(tmp_path / "none.jsonl"))
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"input": "a"}\n\xff\xfe{\n')
    with pytest.raises(DataError, match="line 2: JSON"):
        read_examples(str(path))


def test_both_halves_of_a_pair_are_one_character(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", r'{"input": "\ud83d\ude00", "output": "b"}')
    fields = checked_fields(instructions(path), read_examples(str(path)))
    assert fields == [{"input": "\N{GRINNING FACE}", "output": "b"}]


def test_a_bad_line_among_many_is_found_before_the_tokenizer_works(
    tmp_path: Path, tokenizer: JsonTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is read once, and no text is cut into tokens: both would take time."""
    path = write(tmp_path / "many.jsonl", *GOOD * 500, {"input": "a"})
    read: list[str] = []
    loads = json.loads

    def counted(text: str) -> Any:
        read.append(text)
        return loads(text)

    def too_early(*args: object, **more: object) -> None:
        raise AssertionError("texts are cut into tokens before all of them are checked")

    monkeypatch.setattr(json, "loads", counted)
    monkeypatch.setattr(JsonTokenizer, "encode_batch", too_early)
    with pytest.raises(DataError, match="line 20001"):
        prepared(spec_of(path), tokenizer)
    assert len(read) == 20001


# --- tokens and masks -----------------------------------------------------------------------------


def texts_of(found: Tokenized, tokenizer: JsonTokenizer) -> list[tuple[str, str]]:
    """Return what is not counted, and what is, of each example, without its end."""
    examples = [found.example(number) for number in range(found.num_examples)]
    assert all(tokens[-1] == tokenizer.eod_id for tokens, _ in examples)
    assert all((np.diff(counted.astype(int)) >= 0).all() for _, counted in examples)
    return [(tokenizer.decode(t[~c]), tokenizer.decode(t[c][:-1])) for t, c in examples]


def test_the_answer_and_its_end_are_counted(tmp_path: Path, tokenizer: JsonTokenizer) -> None:
    examples = read_examples(str(write(tmp_path / "a.jsonl", {"input": "ab", "output": "cd"})))
    found = tokenized(instructions(), examples, tokenizer, SEQ)
    assert texts_of(found, tokenizer) == [("ab", " cd")]  # a space is read with its word
    both = tokenized(instructions(answer_only_loss=False), examples, tokenizer, SEQ)
    assert texts_of(both, tokenizer) == [("a", "b cd")]  # nothing predicts the first token


def test_a_template_names_the_fields(tmp_path: Path, tokenizer: JsonTokenizer) -> None:
    line = {"q": "why", "hint": "{x}", "a": "so", "more": 3}
    examples = read_examples(str(write(tmp_path / "a.jsonl", line)))
    spec = instructions(label_key="a", prompt_template="Q: {q} ({{{hint}}})\nA: {a}")
    assert texts_of(tokenized(spec, examples, tokenizer, SEQ), tokenizer) == [
        ("Q: why ({{x}})\nA:", " so")
    ]


def test_escaped_characters_of_a_template() -> None:
    """A shell and Hydra hand over a backslash and an n; NeMo reads them as a new line too."""
    assert unescaped(r"Q: {q}\n\tA: {a}") == "Q: {q}\n\tA: {a}"
    assert unescaped(r"\\n \x é" + "\n") == r"\n \x é" + "\n"


@pytest.mark.parametrize(
    ("template", "fields"),
    [
        ("{input} {output}", ["input", "output"]),
        ("{{{a}}}", ["a"]),
        ("{a", None),
        ("{}", None),
        ("{a!r}", None),
        ("{a:3}", None),
        ("{a.b}", None),
        ("plain", []),
    ],
)
def test_fields_of_a_template(template: str, fields: list[str] | None) -> None:
    assert template_fields(template) == fields


def test_a_token_never_reaches_over_the_boundary(tmp_path: Path) -> None:
    """A tokenizer that joins the last letter of a prompt and the first of an answer is split."""
    joining = train_tokenizer(["xy" * 50], 300)
    assert len(joining.encode("xy")) == 1
    examples = read_examples(str(write(tmp_path / "a.jsonl", {"input": "x", "output": "y"})))
    found = tokenized(instructions(prompt_template="{input}{output}"), examples, joining, SEQ)
    assert texts_of(found, joining) == [("x", "y")]


@pytest.mark.parametrize(
    ("field", "method", "text"),
    [
        ("input", "right", ("Q" * 7, " answer")),
        ("input", "left", ("u" * 7, " answer")),
        ("output", "left", ("Q" * 7 + "u" * 7, "")),
        ("output", "right", ("Q" * 7 + "u" * 7, "")),
    ],
)
def test_a_field_is_cut_to_fit(
    tmp_path: Path, tokenizer: JsonTokenizer, field: str, method: str, text: tuple[str, str]
) -> None:
    line = {"input": "Q" * 7 + "u" * 7, "output": "answer"}
    examples = read_examples(str(write(tmp_path / "a.jsonl", line)))
    spec = instructions(truncation_field=field, truncation_method=method)
    if not text[1]:
        with pytest.raises(DataError, match="even without the field 'output'"):
            tokenized(spec, examples, tokenizer, 15)
        return
    found = tokenized(spec, examples, tokenizer, 15)
    assert texts_of(found, tokenizer) == [text]
    assert found.num_cut == 1 and len(found.tokens_T) == 15
    assert tokenized(spec, examples, tokenizer, 22).num_cut == 0


def test_an_answer_that_is_cut_at_its_end_teaches_no_end(
    tmp_path: Path, tokenizer: JsonTokenizer
) -> None:
    """The place of the end token is one more of the answer's."""
    lines = [{"input": "Q" * 7, "output": "answer"}, {"input": "q", "output": "a"}]
    examples = read_examples(str(write(tmp_path / "a.jsonl", *lines)))
    spec = instructions(truncation_field="output")
    found = tokenized(spec, examples, tokenizer, 12)
    texts = [tokenizer.decode(found.example(n)[0]) for n in range(2)]
    assert texts == ["QQQQQQQ answ", "q a<|endoftext|>"] and found.num_cut == 1
    left = tokenized(replace(spec, truncation_method="left"), examples, tokenizer, 12)
    assert tokenizer.decode(left.example(0)[0]) == "QQQQQQQ wer<|endoftext|>"


def test_an_end_that_is_written_out_is_learned_once(
    tmp_path: Path, tokenizer: JsonTokenizer
) -> None:
    lines = [{"input": "a", "output": "b<|endoftext|>"}, {"input": "a", "output": "b"}]
    examples = read_examples(str(write(tmp_path / "a.jsonl", *lines)))
    found = tokenized(instructions(), examples, tokenizer, SEQ)
    assert found.example(0)[0].tolist() == found.example(1)[0].tolist()
    none = tokenized(instructions(add_eos=False), examples, tokenizer, SEQ)
    assert [tokenizer.decode(none.example(n)[0]) for n in range(2)] == ["a b<|endoftext|>", "a b"]
    begun = tokenized(instructions(add_bos=True), examples, replace_bos(tokenizer, "a"), SEQ)
    assert tokenizer.decode(begun.example(1)[0]) == "a b<|endoftext|>", "it begins so already"
    begun = tokenized(instructions(add_bos=True), examples, replace_bos(tokenizer, "x"), SEQ)
    assert tokenizer.decode(begun.example(1)[0]) == "xa b<|endoftext|>"
    with pytest.raises(DataError, match="add_bos: has no effect: the tokenizer names no token"):
        tokenized(instructions(add_bos=True), examples, tokenizer, SEQ)


def replace_bos(tokenizer: JsonTokenizer, text: str) -> JsonTokenizer:
    """Return the tokenizer with another token that begins texts."""
    return JsonTokenizer(tokenizer._rust, tokenizer.eod_id, text)


# --- packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_packing_keeps_every_example_once_and_within_the_length(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(2, 30, 500)
    samples = pack(lengths, 64)
    assert sorted(number for sample in samples for number in sample) == list(range(500))
    assert all(lengths[sample].sum() <= 64 for sample in samples)
    assert all(a < b for sample in samples for a, b in pairwise(sample))
    # Best fit needs at most 1.7 times the fewest samples (Johnson and others, 1974).
    assert len(samples) <= 1.7 * lengths.sum() / 64 + 1


def test_an_example_may_fill_a_sample() -> None:
    assert pack(np.array([64, 63, 2, 62]), 64) == [[0], [1], [2, 3]]


def test_samples_are_the_examples_and_their_masks(tmp_path: Path, tokenizer: JsonTokenizer) -> None:
    """What the model reads is taken apart again and compared with the files."""
    path = write(tmp_path / "a.jsonl", *GOOD)
    data = prepared(spec_of(path, validation_files=(str(path),)), tokenizer)
    seen = []
    for batch in validation_batches(data.validation, 3, 0, 1, rules=data.rules):
        assert batch.position_ids_BS is not None and batch.cu_seqlens_N1 is not None
        for row in range(3):
            tokens, targets = batch.tokens_BS[row], batch.targets_BS[row]
            positions, documents = batch.position_ids_BS[row], ids_of(batch)[row]
            for number in range(documents.max() + 1):
                own = documents == number
                assert positions[own].tolist() == list(range(own.sum()))
                at = np.flatnonzero(own & (targets != IGNORE))
                if not at.size:
                    continue  # padding
                assert targets[at[-1]] == tokenizer.eod_id
                assert at.tolist() == list(range(at[0], at[-1] + 1))
                prompt = tokenizer.decode(tokens[own][: at[0] - np.argmax(own) + 1])
                seen.append({"input": prompt, "output": tokenizer.decode(targets[at[:-1]])[1:]})
    assert sorted(map(str, seen)) == sorted(map(str, GOOD))
    assert data.num_final_tokens == sum(len(line["output"]) + 2 for line in GOOD)
    assert data.validation_text().decode() == "".join(" " + line["output"] for line in GOOD)
    assert len(data.validation_tokens()) == data.num_final_tokens
    assert data.train_token_counts().sum() == data.num_train_tokens
    assert data.train_token_counts()[tokenizer.eod_id] == 40


def test_an_end_within_an_example_does_not_divide_it(
    tmp_path: Path, tokenizer: JsonTokenizer
) -> None:
    """A chat format may end each turn with the token that ends a document."""
    lines = [{"input": f"{n}<|endoftext|>b", "output": "c<|endoftext|>d"} for n in range(10)]
    path = write(tmp_path / "a.jsonl", *lines)
    data = prepared(spec_of(path, validation_files=(str(path),)), tokenizer)
    found = []
    for batch in validation_batches(data.validation, 1, 0, 1, rules=data.rules):
        assert batch.position_ids_BS is not None and batch.cu_seqlens_N1 is not None
        for begin, end in pairwise(batch.cu_seqlens_N1):
            assert batch.position_ids_BS[0, begin:end].tolist() == list(range(end - begin))
            found.append(tokenizer.decode(batch.tokens_BS[0, begin:end]))
    whole = [f"{n}<|endoftext|>b c<|endoftext|>d<|endoftext|>" for n in range(10)]
    assert sorted(t for t in found if t[0].isdigit()) == whole


def test_samples_without_packing(tmp_path: Path, tokenizer: JsonTokenizer) -> None:
    path = write(tmp_path / "a.jsonl", *GOOD)
    data = prepared(spec_of(path, packed=False, shuffle=False), tokenizer)
    assert data.train.num_samples_per_epoch + data.validation.num_samples == len(GOOD)
    for number in range(data.train.num_samples_per_epoch):
        tokens, _, _ = data.train[number]
        assert (tokens == tokenizer.eod_id).sum() == 1


def test_epochs_have_the_same_samples_in_other_orders(
    tmp_path: Path, tokenizer: JsonTokenizer
) -> None:
    data = prepared(spec_of(write(tmp_path / "a.jsonl", *GOOD)), tokenizer)
    count = data.train.num_samples_per_epoch
    epochs = [[data.train[e * count + n].tobytes() for n in range(count)] for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] and len(set(map(tuple, map(sorted, epochs)))) == 1
    again = prepared(spec_of(tmp_path / "a.jsonl"), tokenizer)
    assert again.train[5 * count + 1].tobytes() == data.train[5 * count + 1].tobytes()
    in_order = prepared(spec_of(tmp_path / "a.jsonl", shuffle=False), tokenizer)
    count = in_order.train.num_samples_per_epoch
    assert in_order.train[0].tobytes() == in_order.train[count].tobytes()


def test_files_are_joined_or_blended(tmp_path: Path, tokenizer: JsonTokenizer) -> None:
    one = write(tmp_path / "a.jsonl", *GOOD)
    two = write(tmp_path / "b.jsonl", *({**line, "input": "B"} for line in GOOD))
    joined = prepared(spec_of(one, two), tokenizer)
    (examples,) = joined.train_examples
    assert joined.train_token_counts()[tokenizer.eod_id] == examples.num_examples
    blended = prepared(spec_of(one, two, probabilities=("1", "3"), packed=False), tokenizer)
    firsts = [tokenizer.decode(blended.train[n][0, :1]) for n in range(100)]
    assert firsts.count("B") == 75
    assert joined.fingerprint != blended.fingerprint


def test_the_fingerprint_changes_with_content_and_mask_alone(
    tmp_path: Path, tokenizer: JsonTokenizer
) -> None:
    first = prepared(spec_of(write(tmp_path / "a.jsonl", *GOOD)), tokenizer).fingerprint
    moved = write(tmp_path / "b.jsonl", *GOOD)
    assert prepared(spec_of(moved), tokenizer).fingerprint == first
    other = [
        prepared(spec_of(moved, answer_only_loss=False), tokenizer),
        prepared(spec_of(moved, packed=False), tokenizer),
        prepared(spec_of(write(moved, *GOOD[::-1])), tokenizer),
    ]
    assert len({first, *(data.fingerprint for data in other)}) == 4


# --- tables ---------------------------------------------------------------------------------------


def test_datasets_give_the_same_examples(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    lines = [
        dict(example.fields) for example in read_examples(str(write(tmp_path / "a.jsonl", *GOOD)))
    ]
    table = datasets.Dataset.from_list(lines)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(str(tmp_path / "folder"))
    (tmp_path / "a.json").write_text(json.dumps(lines))
    for name in ("a.parquet", "folder", "a.json"):
        found = read_examples(str(tmp_path / name))
        assert [dict(example.fields) for example in found] == lines
        assert found[3].where.endswith(("row 4", "item 4"))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="has the splits train"):
        read_examples(str(tmp_path / "splits"))
    (saved,) = (tmp_path / "folder").glob("data-*.arrow")
    content = saved.read_bytes()
    for end in range(8, len(content), 8):  # messages end at such places
        saved.write_bytes(content[:end])
        with pytest.raises(DataError, match="ends without the mark|cannot be read"):
            read_examples(str(tmp_path / "folder"))
    (tmp_path / "bad.parquet").write_bytes(b"no table")
    with pytest.raises(DataError, match=r"bad\.parquet"):
        read_examples(str(tmp_path / "bad.parquet"))
