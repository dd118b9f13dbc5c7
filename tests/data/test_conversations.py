"""Conversations become the tokens that transformers makes of them; the loss counts the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.config.errors import ConfigError
from megafp8.config.load import load
from megafp8.data.conversations import Chat, conversation_of
from megafp8.data.examples import read_examples
from megafp8.data.instructions import prepare_instructions
from megafp8.data.prompts import Tokenized, tokenized
from megafp8.errors import DataError
from megafp8.runs.tokenizer import chat_of, find_tokenizer
from tests.data.model_tokenizers import CHATML, write_tokenizer
from tests.data.test_instructions import instructions, spec_of, write

pytest.importorskip("transformers")

TALK = [
    {"role": "system", "content": "Answer shortly."},
    {"role": "user", "content": "def f?"},
    {"role": "assistant", "content": "return x * 3"},
    {"role": "user", "content": "naïve <|im_end|> 日本?"},
    {"role": "assistant", "content": "no\n\nreturn"},
]
GENERATION = CHATML.replace(
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
)
THINKS = CHATML.replace(
    "{{ m.content }}",
    "{% if loop.last and m.role == 'assistant' %}(a thought) {% endif %}{{ m.content }}",
)
TALKING = ("qwen2", "llama3", "chatml_bos", "llama2", "mistral", "phi3")


def made(folder: Path, kind: str, template: str | None = None) -> tuple[Chat, Any]:
    """Return what renders conversations by a folder's files, and the tokenizer of transformers."""
    theirs = write_tokenizer(folder, kind)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
        theirs.chat_template = template
    ours = find_tokenizer(folder)
    assert ours is not None
    return chat_of(folder, ours), theirs


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> tuple[Chat, Any]:
    return made(tmp_path_factory.mktemp("chatml"), "chatml_bos")


def read(path: Path, renders: Chat, longest: int = 1000, **changes: Any) -> Tokenized:
    examples = read_examples(str(path))
    return tokenized(instructions(path, **changes), examples, renders.tokenizer, longest, renders)


def only(path: Path, chat: Chat, **changes: Any) -> tuple[list[int], list[bool]]:
    ids, counted = read(path, chat, **changes).example(0)
    return ids.tolist(), counted.tolist()


@pytest.mark.parametrize("kind", TALKING)
def test_a_conversation_is_what_transformers_makes_of_it(kind: str, tmp_path: Path) -> None:
    chat, theirs = made(tmp_path, kind)
    talk = TALK if kind in ("qwen2", "chatml_bos", "llama3") else TALK[1:]
    path = write(tmp_path / "t.jsonl", {"messages": talk}, {"messages": talk[:-2]})
    found = read(path, chat)
    for number, messages in enumerate((talk, talk[:-2])):
        ids, counted = found.example(number)
        assert ids.tolist() == theirs.apply_chat_template(messages)["input_ids"]
        # A prompt that ends before an answer has the tokens up to the answer's first counted one.
        asked = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        assert ids[: len(asked)].tolist() == asked
        assert counted[len(asked) :].all() and not counted[len(asked) - 1]


@pytest.mark.parametrize("template", [CHATML, GENERATION], ids=["prefixes", "generation"])
def test_all_turns_of_the_assistant_are_counted(template: str, tmp_path: Path) -> None:
    chat, theirs = made(tmp_path, "qwen2", template)
    ids, counted = only(write(tmp_path / "t.jsonl", {"messages": TALK}), chat)
    if template is GENERATION:
        out = theirs.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
        assert (ids, counted) == (out["input_ids"], [bool(n) for n in out["assistant_masks"]])
    # Walk over the tokens: an answer is what follows this header, up to the end of its line.
    header = theirs("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    end, line = theirs("<|im_end|>\n", add_special_tokens=False)["input_ids"]
    expected, is_answer = [False] * len(ids), False
    for at, token in enumerate(ids):
        expected[at] = is_answer and (token != line or ids[at - 1] != end or template is CHATML)
        is_answer = is_answer and not (token == line and ids[at - 1] == end)
        is_answer = is_answer or ids[at + 1 - len(header) : at + 1] == header
    assert counted == expected and counted.count(True) > 10
    texts = theirs.decode(np.array(ids)[counted]).split("<|im_end|>")
    assert [text.strip() for text in texts] == [TALK[2]["content"], TALK[4]["content"], ""]


def test_a_template_that_writes_earlier_turns_otherwise_is_refused(tmp_path: Path) -> None:
    """A conversation with one answer is right, and several where the template marks answers."""
    chat, theirs = made(tmp_path, "qwen2", THINKS)
    path = write(tmp_path / "t.jsonl", {"messages": TALK[:3]}, {"messages": TALK})
    with pytest.raises(DataError, match="line 2: turn 3: the chat template writes it otherwise"):
        read(path, chat)
    one = write(tmp_path / "one.jsonl", {"messages": TALK[:3]})
    assert "(a thought) return" in theirs.decode(only(one, chat)[0])


def test_all_forms_of_files_give_the_same_tokens(chatml: tuple[Chat, Any], tmp_path: Path) -> None:
    chat, theirs = chatml
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"from": names[m["role"]], "value": m["content"]} for m in TALK]
    nemo = {
        "system": TALK[0]["content"], "mask": "User", "type": "TEXT_TO_VALUE",
        "conversations": [
            {"from": m["role"].capitalize(), "value": m["content"]} for m in TALK[1:]
        ],
    }  # fmt: skip
    forms = [
        {"messages": TALK}, {"conversations": shared}, {"conversations": TALK}, nemo,
        {"system": TALK[0]["content"], "messages": TALK[1:], "input": "x"},
        {"messages": [{**m, "name": None} for m in TALK], "tools": None},
    ]  # fmt: skip
    found = read(write(tmp_path / "t.jsonl", *forms), chat)
    alpaca = {
        "instruction": TALK[3]["content"], "input": "", "output": TALK[4]["content"],
        "system": TALK[0]["content"], "history": [[TALK[1]["content"], TALK[2]["content"]]],
    }  # fmt: skip
    question = {**alpaca, "instruction": "", "input": TALK[3]["content"]}
    more = read(write(tmp_path / "a.jsonl", alpaca, question), chat, chat=True)
    examples = [found.example(n) for n in range(6)] + [more.example(n) for n in range(2)]
    for ids, counted in examples:
        assert ids.tolist() == theirs.apply_chat_template(TALK)["input_ids"]
        assert counted.tolist() == examples[0][1].tolist()
    both = conversation_of({"instruction": "Add", "input": "1, 2", "answer": "3"}, "answer")
    assert both.messages[0] == {"role": "user", "content": "Add\n1, 2"}


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({"messages": []}, ["messages: has no answer of the assistant"]),
        ({"messages": "hi"}, ["messages: is no list of objects"]),
        ({"messages": ["hi"]}, ["messages: is no list of objects", '"role": "user"']),
        ({"messages": TALK[:2]}, ["has no answer of the assistant"]),
        ({"messages": [{"content": "x"}]}, ["messages, turn 1: has no role"]),
        ({"messages": [{"role": "user"}]}, ["turn 1: its content is missing"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["of type list"]),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, ["half of a surrogate pair"]),
        ({"conversations": [{"from": "gpt", "value": 3}]}, ["conversations, turn 1", "type int"]),
        ({"instruction": "a"}, ["is no conversation: it has the fields instruction"]),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, ["history: is no list of"]),
        ({"messages": TALK, "tools": "x"}, ["tools: is no list"]),
        ({"messages": [{"role": "user", "content": "boom"}, TALK[2]]}, ["refuses", "no booms"]),
    ],
)
def test_a_bad_conversation_is_named_by_file_and_line(
    example: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    refuses = "{% if messages[0].content == 'boom' %}{{ raise_exception('no booms') }}{% endif %}"
    chat, _ = made(tmp_path, "chatml_bos", refuses + CHATML)
    path = write(tmp_path / "t.jsonl", {"messages": TALK}, example, {"messages": TALK})
    with pytest.raises(DataError) as caught:
        read(path, chat, chat=True)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    for word in words:
        assert word in str(caught.value)


def test_a_conversation_that_is_too_long(chatml: tuple[Chat, Any], tmp_path: Path) -> None:
    """Its end is cut on demand, and no end token is put where there was none."""
    chat, theirs = chatml
    path = write(tmp_path / "t.jsonl", {"messages": TALK}, {"messages": TALK[:3]})
    whole = theirs.apply_chat_template(TALK)["input_ids"]
    for changes in ({}, {"truncation_field": "input"}):
        with pytest.raises(DataError, match=f"line 1: length: is {len(whole)} tokens.*=messages"):
            read(path, chat, len(whole) - 1, **changes)
    found = read(path, chat, len(whole) - 5, truncation_field="messages")
    assert found.example(0)[0].tolist() == whole[:-5] and found.num_cut == 1
    assert found.example(1)[0].tolist() == theirs.apply_chat_template(TALK[:3])["input_ids"]
    with pytest.raises(DataError, match="line 1: length: has no answer within 10 tokens"):
        read(path, chat, 10, truncation_field="messages")


def test_what_else_is_counted_and_added(chatml: tuple[Chat, Any], tmp_path: Path) -> None:
    chat, theirs = chatml
    path = write(tmp_path / "t.jsonl", {"messages": TALK})
    ids, counted = only(path, chat)
    assert only(path, chat, answer_only_loss=False) == (ids, [False, *[True] * (len(ids) - 1)])
    ended = [*ids, theirs.eos_token_id], [*counted, True]
    assert only(path, chat, add_eos=True) == ended
    assert only(path, chat, add_bos=True) == (ids, counted), "the template begins it so already"


def test_the_template_reads_no_clock(tmp_path: Path) -> None:
    """Examples must be the same on every day. A template may have a date for that."""
    dated = (
        "{% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d') }}{% else %}26 Jul{% endif %}"
    )
    chat, theirs = made(tmp_path / "dated", "qwen2", dated + CHATML)
    ids, _ = only(write(tmp_path / "t.jsonl", {"messages": TALK}), chat)
    assert theirs.decode(ids).startswith("26 Jul<|im_start|>system")
    talk = conversation_of({"messages": TALK}, "output")
    assert chat.text(talk).startswith("20"), "in generation it does"
    chat, _ = made(tmp_path / "needs", "qwen2", "{{ strftime_now('%Y') }}" + CHATML)
    with pytest.raises(
        DataError, match="the chat template: refuses .*'strftime_now_in_training' is undefined"
    ):
        read(tmp_path / "t.jsonl", chat)


def test_which_examples_are_conversations(chatml: tuple[Chat, Any], tmp_path: Path) -> None:
    chat, theirs = chatml
    plain = {"input": "def f", "output": "return"}
    path = write(tmp_path / "t.jsonl", plain, {"messages": TALK}, {**plain, "messages": TALK})
    found = read(path, chat)
    whole = theirs("def f return")["input_ids"]
    texts = [found.example(n)[0].tolist() for n in range(3)]
    talk = theirs.apply_chat_template(TALK)["input_ids"]
    assert texts == [[*whole, theirs.eos_token_id], talk, [*whole, theirs.eos_token_id]]
    with pytest.raises(DataError, match="line 1: the example: is no conversation") as caught:
        read(write(tmp_path / "q.jsonl", {"q": "x"}), chat, chat=True)
    assert "Write messages, or instruction or input, and output" in str(caught.value)
    with pytest.raises(DataError, match="line 2: input: is missing.*model.data.chat=True reads"):
        read(path, chat, chat=False)


def test_a_run_says_by_which_template(chatml: tuple[Chat, Any], tmp_path: Path) -> None:
    chat, _ = chatml
    path = write(tmp_path / "t.jsonl", *[{"messages": TALK}] * 20)
    for ends, note in ((chat.ends, True), (chat.ends | {400}, False)):
        said: list[str] = []
        given = Chat(chat.folder, chat.tokenizer, ends)
        data = prepare_instructions(
            spec_of(path, seq_length=200), chat.tokenizer, said.append, lambda given=given: given
        )
        assert f"data: {path}: 20 conversations, by the chat template of {chat.folder}" in said
        assert any("none of the model's end tokens" in line for line in said) is note
    ids, counted = data.train_examples[0].example(0)
    assert data.num_train_tokens == int(counted.sum()) * data.train_examples[0].num_examples
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((chat.folder / name).read_bytes())
    with pytest.raises(DataError, match="bare: chat template: is missing.*chat_template.jinja"):
        read(path, Chat(bare, chat.tokenizer, chat.ends))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["model.data.chat=True", "model.data.train_ds.prompt_template='{a} {output}'"],
         ["prompt_template", "model.data.chat=null or False"]),
        (["model.data.train_ds.truncation_field=talk"], ["Give input or output or messages"]),
        (["model.data.chat=True", "model.data.train_ds.truncation_field=input"],
         ["Give messages or conversations"]),
        (["model.data.chat=False", "model.data.train_ds.truncation_field=messages"],
         ["Give input or output"]),
        (["model.data.train_ds.truncation_field=messages",
          "model.data.train_ds.truncation_method=left"], ["truncation_method=right"]),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(flags: list[str], words: list[str], tmp_path: Path) -> None:
    config = {"model": {"num_layers": 2}}
    (tmp_path / "manifest.json").write_text(json.dumps({"meta": {"config": config}}))
    argv = ["model.data.train_ds.file_names=x.jsonl", f"restore_from_path={tmp_path}"]
    with pytest.raises(ConfigError) as caught:
        load([*argv, *flags], config_name="finetune_gpt")
    for word in words:
        assert word in str(caught.value)
    load([*argv, "model.data.chat=True", "model.data.train_ds.label_key=answer",
          "model.data.train_ds.truncation_field=messages"], config_name="finetune_gpt")  # fmt: skip
