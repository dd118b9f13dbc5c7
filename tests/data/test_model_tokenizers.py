"""Texts, templates and prompts become the tokens that transformers makes of them.

The oracle is `AutoTokenizer` over the same folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megafp8.cli import preprocess
from megafp8.cli.generate import prompt_ids
from megafp8.data import preprocess as preprocess_module
from megafp8.data.examples import Example
from megafp8.data.indexed import IndexedDataset
from megafp8.data.prepare import prepare
from megafp8.data.prompts import tokenized
from megafp8.data.tokenize import Tokenizer, frame_of
from megafp8.errors import DataError
from megafp8.runs.tokenizer import find_tokenizer
from megafp8.specs import InstructionSpec
from tests.data.helpers import data_spec
from tests.data.model_tokenizers import HARD, KINDS, TEXTS, write_tokenizer

pytestmark = pytest.mark.filterwarnings(
    "ignore:builtin type .* has no __module__:DeprecationWarning"
)
pytest.importorskip("transformers")


class Both(NamedTuple):
    """Holds a tokenizer of ours and of transformers, of one folder."""

    folder: Path
    ours: Tokenizer
    theirs: Any


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_tokenizer(folder, request.param)
    ours = find_tokenizer(folder)
    assert ours is not None
    return Both(folder, ours, theirs)


def test_a_prompt_is_what_transformers_makes_of_it(both: Both) -> None:
    asked = argparse.Namespace(add_bos=None, add_eos=None, chat=False)
    for text in [*TEXTS[:3], *HARD]:
        expected = both.theirs(text)["input_ids"]
        assert prompt_ids(asked, both.ours, [text]) == [expected or [both.ours.eod_id]], text
        plain = both.theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert both.ours.encode(text) == plain, text


def test_a_text_that_begins_and_ends_by_itself_gets_nothing_more(both: Both) -> None:
    """A conversation that a chat template has rendered is such a text."""
    tokens = both.ours.tokens()
    begin, end = ("".join(tokens[n] for n in ids) for ids in (both.ours.begin, both.ours.end))
    frame = frame_of(both.ours, None, both.ours.end, "--add-bos")
    (ids,) = both.ours.encode_marked([f"{begin}def f{end}"])
    assert (
        frame.around(ids)
        == ids
        == both.theirs(f"{begin}def f{end}", add_special_tokens=False)["input_ids"]
    )


def test_a_rendered_conversation_gets_nothing_more(both: Both) -> None:
    asked = argparse.Namespace(add_bos=None, add_eos=None, chat=True)
    expected = both.theirs("def f", add_special_tokens=False)["input_ids"]
    assert prompt_ids(asked, both.ours, ["def f"]) == [expected]


def test_a_document_is_a_text_with_its_end(both: Both, tmp_path: Path) -> None:
    texts = [*TEXTS[:3], *HARD]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    end = both.theirs.eos_token_id
    for name, flags in (("own", ()), ("none", ("--no-add-bos", "--no-add-eos"))):
        words = ["--tokenizer", f"hf:{both.folder}", "--workers", "0", *flags]
        output = ["--output", str(tmp_path / name)]
        assert preprocess.main([str(tmp_path / "t.jsonl"), *output, *words]) == 0
        data = IndexedDataset(tmp_path / name)
        for number, text in enumerate(text for text in texts if text):
            expected = both.theirs(
                text, split_special_tokens=True, add_special_tokens=name == "own"
            )["input_ids"]
            if name == "own" and expected[-1] != end:
                expected = [*expected, end]
            assert data.document(number).tolist() == expected, text
        record = json.loads((tmp_path / f"{name}.dataset.json").read_text())
        assert record["add_bos"] == (name == "own" and both.ours.begin != ())
        assert record["add_eos"] == (name == "own")


def test_an_example_is_what_transformers_makes_of_its_text(both: Both) -> None:
    """Special tokens of the template and of the fields count, and turns may end in the middle."""
    turn = "<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n{output}"
    for template in (turn, "[INST] {input} [/INST] {output}", "{input}\n{output}"):
        spec = InstructionSpec(train_files=(), model="", prompt_template=template)
        fields = [{"input": text, "output": "x = 1"} for text in HARD if text]
        examples = [Example(f, "f", "line 1") for f in fields]
        found = tokenized(spec, examples, both.ours, 1000)
        bare = tokenized(
            InstructionSpec(
                train_files=(), model="", prompt_template=template, add_bos=False, add_eos=False
            ), examples, both.ours, 1000,
        )  # fmt: skip
        for number, one in enumerate(fields):
            whole = template.format(**one)
            expected = both.theirs(whole, add_special_tokens=False)["input_ids"]
            ids, counted = found.example(number)
            prompt = both.theirs(template.format(**one | {"output": ""}).rstrip(" "),
                                 add_special_tokens=False)["input_ids"]  # fmt: skip
            if expected[: len(prompt)] != prompt:
                continue  # a token reaches over the boundary: the two are tokenized by themselves
            assert bare.example(number)[0].tolist() == expected, whole
            assert ids.tolist() == [*both.ours.begin, *expected, both.theirs.eos_token_id], whole
            assert counted.argmax() == len(both.ours.begin) + len(prompt)
            assert counted[counted.argmax() :].all()


# --- what a dataset records, and what a run says of it --------------------------------------------


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama3")
    write_tokenizer(folder, "llama3")
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return folder


def prepare_with(folder: Path, output: Path, *flags: str) -> list[str]:
    words = ["--output", str(output), "--tokenizer", f"hf:{folder}", "--workers", "0", *flags]
    return [str(folder / "t.jsonl"), *words]


def opened(output: Path, **changes: Any) -> tuple[Any, str]:
    """Return what a run reads of a dataset, and what it says."""
    said: list[str] = []
    spec = data_spec(None, str(output), **changes)
    return prepare(spec, said.append), "\n".join(said)


def test_a_run_says_that_documents_do_not_begin_as_texts_do(llama3: Path, tmp_path: Path) -> None:
    for flag, note in (("--add-bos", False), ("--no-add-bos", True)):
        assert preprocess.main(prepare_with(llama3, tmp_path / flag, flag)) == 0
        data, said = opened(tmp_path / flag)
        assert ("begin with no such token, and the tokenizer begins a text" in said) is note
        assert ("<|begin_of_text|>" in said) is note
        part = data.train_parts[0]
        texts = [data.document_text(part.opened, n).decode() for n in range(len(TEXTS))]
        assert texts == TEXTS and data.validation_text().decode() != ""
        assert (part.opened.dataset.document(0)[0] == 400) is not note
    record = json.loads((tmp_path / "--add-bos.dataset.json").read_text())
    assert (record["add_bos"], record["begin"]) == (True, [400])


def test_documents_without_ends_cannot_be_kept_apart(llama3: Path, tmp_path: Path) -> None:
    assert preprocess.main(prepare_with(llama3, tmp_path / "d", "--no-add-eos")) == 0
    opened(tmp_path / "d")
    for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        with pytest.raises(DataError, match="was left out .--no-add-eos."):
            opened(tmp_path / "d", **{key: True})


def test_a_preparation_continues_with_the_same_beginnings_alone(
    llama3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that an earlier version began has none, and goes on so."""

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(preprocess_module, "_finish", full)
        assert preprocess.main(prepare_with(llama3, tmp_path / "d")) == 2
    assert preprocess.main(prepare_with(llama3, tmp_path / "d", "--no-add-bos")) == 2
    record = tmp_path / "d.partial" / "progress.json"
    progress = json.loads(record.read_text())
    assert (progress["begin"], progress["end"]) == ([400], [402])
    del progress["begin"], progress["end"]
    progress["counts"] = dict.fromkeys(progress["counts"], 0)
    record.write_text(json.dumps(progress))
    assert preprocess.main(prepare_with(llama3, tmp_path / "d")) == 0
    assert json.loads((tmp_path / "d.dataset.json").read_text())["add_bos"] is False
    again = opened(tmp_path / "d")[0]
    assert again.document_text(again.train_parts[0].opened, 0).decode() == TEXTS[0]
