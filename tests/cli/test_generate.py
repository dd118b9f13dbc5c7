"""`megafp8 generate` reads prompts, draws and ends as transformers does with the same folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megafp8.cli import generate, import_hf
from megafp8.runs.tokenizer import find_tokenizer
from tests.data.model_tokenizers import HARD, KINDS, write_model

transformers = pytest.importorskip("transformers")

PROMPTS = ["def ", "x", "return x * 12 + naïve", "<|im_start|>user\nhi<|im_end|>\n"]
FAST_KINDS = ("gpt2", "chatml_bos", "llama2", "t5")


class Made(NamedTuple):
    """Holds a model's folder, its import, and what transformers has of it."""

    theirs: Path
    ours: Path
    tokenizer: Any
    model: Any

    def greedy(self, prompt: str, count: int = 12) -> list[int]:
        """Return the tokens of a prompt, and those that transformers' greedy search adds."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        out = self.model.generate(**inputs, max_new_tokens=count, do_sample=False)[0].tolist()
        return out[length:]

    def text(self, prompt: str, new: list[int]) -> str:
        """Return the text that tokens add to a prompt, without a last one that ends the text."""
        found = find_tokenizer(self.ours)
        assert found is not None
        ends = self.model.generation_config.eos_token_id
        if new and new[-1] in (ends if isinstance(ends, list) else [ends]):
            new = new[:-1]
        ids = self.tokenizer(prompt)["input_ids"]
        return found.decode([*ids, *new])[len(found.decode(ids)) :]


def make(folder: Path, kind: str, **more: Any) -> Made:
    tokenizer = write_model(folder / "theirs", kind, **more)
    assert import_hf.main([str(folder / "theirs"), str(folder / "ours")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "theirs")
    return Made(folder / "theirs", folder / "ours", tokenizer, model)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("chat"), "chatml_bos")


def run(made: Made | Path, *words: str) -> list[str]:
    return [str(made if isinstance(made, Path) else made.ours), "--temperature", "0", *words]


def asked(prompts: list[str]) -> list[str]:
    return [word for prompt in prompts for word in ("--prompt", prompt)]


@pytest.mark.parametrize(
    "kind", [k if k in FAST_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_greedy_text_is_that_of_transformers(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(tmp_path, kind)
    prompts = [*PROMPTS, *(text for text in HARD if text)]
    capsys.readouterr()
    words = asked(prompts)
    assert generate.main(run(made, *words, "--tokens", "12", "--json")) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    for answer in answers:
        new = made.greedy(answer["prompt"])
        assert answer["text"] == made.text(answer["prompt"], new), answer
        assert answer["end"] == ("length" if len(new) == 12 else "token")
    assert len({answer["text"] for answer in answers}) > 3, "the model says something"
    # One prompt is printed while it is generated, and several are those of each alone.
    assert generate.main(run(made, "--prompt", prompts[2], "--tokens", "12")) == 0
    assert capsys.readouterr().out == f"{prompts[2]}{answers[2]['text']}\n"


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 1, "num_hidden_layers": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                  "num_key_value_heads": 1, "num_hidden_layers": 3, "mlp_only_layers": [1],
                  "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_continue_a_text_as_those_of_transformers(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts in one batch and alone, and a second run of the same command."""
    made = make(tmp_path, "gpt2", family=family, **EXPERTS[family])
    capsys.readouterr()
    assert generate.main(run(made, *asked(PROMPTS), "--tokens", "12", "--json")) == 0
    answers = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert answers == [made.text(prompt, made.greedy(prompt)) for prompt in PROMPTS]
    assert len(set(answers)) == len(PROMPTS), "the model says something"
    assert generate.main(run(made, "--prompt", PROMPTS[2], "--tokens", "12")) == 0
    assert capsys.readouterr().out == f"{PROMPTS[2]}{answers[2]}\n"


def test_every_end_token_of_the_model_ends_a_text(
    chat: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are listed in generation_config.json, or in config.json."""
    new = chat.greedy(PROMPTS[0])
    third = next(n for n, token in enumerate(new) if n > 1 and token not in new[:n])
    for name in ("generation_config.json", "config.json"):
        theirs = Path(shutil.copytree(chat.theirs, tmp_path / name / "theirs"))
        (theirs / "generation_config.json").unlink(missing_ok=True)
        config = json.loads((chat.theirs / name).read_text())
        config["eos_token_id"] = [chat.tokenizer.eos_token_id, new[third]]
        (theirs / name).write_text(json.dumps(config))
        ours = tmp_path / name / "ours"
        assert import_hf.main([str(theirs), str(ours)]) == 0
        model = transformers.AutoModelForCausalLM.from_pretrained(theirs)
        made = Made(theirs, ours, chat.tokenizer, model)
        assert made.greedy(PROMPTS[0]) == new[: third + 1]
        capsys.readouterr()
        assert generate.main(run(made, "--prompt", PROMPTS[0], "--tokens", "12")) == 0
        assert capsys.readouterr().out == PROMPTS[0] + chat.text(PROMPTS[0], new[:third]) + "\n"


def test_a_text_ends_before_a_stop(chat: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be spread over several tokens, and a part of it alone is printed after all."""
    whole = chat.text(PROMPTS[0], chat.greedy(PROMPTS[0], 30))
    for begin, end in ((4, 9), (1, 2), (0, 3), (7, 30)):
        stop = whole[begin:end]
        capsys.readouterr()
        words = ["--prompt", PROMPTS[0], "--tokens", "30", "--stop", "not there", "--stop", stop]
        assert generate.main(run(chat, *words)) == 0
        assert capsys.readouterr().out == PROMPTS[0] + whole[: whole.index(stop)] + "\n"
    assert generate.main(run(chat, *words[:4], "--stop", whole[20:] + "more")) == 0
    assert capsys.readouterr().out == f"{PROMPTS[0]}{whole}\n"
    assert generate.main(run(chat, *words[:4], "--stop", "")) == 2
    assert "--stop" in capsys.readouterr().err


def test_beginnings_and_ends_of_a_prompt(chat: Made, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for flag in ("--add-bos", "--no-add-bos", "--add-eos", "--no-add-eos"):
        capsys.readouterr()
        assert generate.main(run(chat, "--prompt", "def ", "--tokens", "8", flag)) == 0
        texts[flag] = capsys.readouterr().out
    plain = chat.tokenizer("def ", add_special_tokens=False, return_tensors="pt")
    out = chat.model.generate(**plain, max_new_tokens=8, do_sample=False)[0].tolist()
    assert texts["--no-add-bos"] == chat.tokenizer.decode(out).split("<|endoftext|>")[0] + "\n"
    assert texts["--add-bos"] == texts["--no-add-eos"] != texts["--no-add-bos"]
    assert texts["--add-eos"] != texts["--no-add-eos"]


def test_prompts_of_a_file(chat: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More of them than are continued at once, of all lengths, after those of the command line."""
    prompts = [f"def f{'x' * (n % 7)}({n}):" for n in range(20)]
    (tmp_path / "p.txt").write_text("\n".join(prompts[:5]) + "\n\n" + "\n".join(prompts[5:]))
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    found = []
    for name in ("p.txt", "p.jsonl"):
        capsys.readouterr()
        words = ["--prompt", "first", "--prompts", str(tmp_path / name), "--tokens", "6", "--json"]
        assert generate.main(run(chat, *words)) == 0
        found.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
        assert [one["prompt"] for one in found[-1]] == ["first", *prompts]
    assert found[0] == found[1]
    for one in found[0][::5]:
        assert one["text"] == chat.text(one["prompt"], chat.greedy(one["prompt"], 6))
    drawn = ["--temperature", "1", "--tokens", "6", "--prompts", str(tmp_path / "p.txt")]
    assert generate.main([str(chat.ours), *drawn]) == 0
    together = capsys.readouterr().out
    alone = ["--temperature", "1", "--tokens", "6", "--prompt", prompts[3]]
    assert generate.main([str(chat.ours), *alone]) == 0
    assert capsys.readouterr().out in together, "each prompt has draws of its own"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--prompt: is missing"),
        (["--prompts", "none.txt"], "none.txt: file: cannot be read"),
        (["--prompts", "empty.txt"], "prompts: there is none"),
        (["--prompts", "bad.jsonl"], "bad.jsonl, line 2: prompt: is missing"),
        (["--prompts", "latin.txt"], "latin.txt: text: is not UTF-8"),
        (["--prompt", "na\udcefve"], "--prompt, number 1: prompt: has bytes or"),
        (["--chat", "--prompt", "na\udcefve"], "--prompt, number 1: prompt: has half"),
    ],
)
def test_prompts_that_cannot_be_read(
    words: list[str],
    said: str,
    chat: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n \n")
    Path("bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    Path("latin.txt").write_bytes(b"na\xefve")
    assert generate.main(run(chat, *words)) == 2
    output = capsys.readouterr()
    assert said in output.err and output.out == ""


def test_nothing_is_printed_before_a_refusal(
    chat: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt may be too long, or have a token that the model's embedding does not have."""
    shape = transformers.GPT2Config(
        vocab_size=len(chat.tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=16
    )
    model = Path(shutil.copytree(chat.theirs, tmp_path / "gpt2"))
    transformers.GPT2LMHeadModel(shape).save_pretrained(model)
    assert import_hf.main([str(model), str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    for prompts in (["a" * 40], ["ok", "a" * 40]):
        assert generate.main(run(tmp_path / "ours", *asked(prompts))) == 2
        output = capsys.readouterr()
        assert "the model has 16 positions" in output.err and output.out == ""
    tree = json.loads((tmp_path / "ours" / "tokenizer.json").read_text())
    more = dict(tree["added_tokens"][0], id=len(chat.tokenizer), content="<tool>")
    tree["added_tokens"].append(more)
    (tmp_path / "ours" / "tokenizer.json").write_text(json.dumps(tree))
    assert generate.main(run(tmp_path / "ours", "--prompt", "a<tool>", "--tokens", "1")) == 2
    output = capsys.readouterr()
    assert f"the prompt has token {more['id']}" in output.err and output.out == ""
    assert generate.main(run(tmp_path / "ours", "--prompt", "a", "--tokens", "1")) == 0


def test_settings_of_generation_that_are_not_applied_are_named(
    chat: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = Path(shutil.copytree(chat.ours, tmp_path / "ours"))
    config = {"repetition_penalty": 1.05, "no_repeat_ngram_size": 0, "suppress_tokens": [3]}
    (ours / "generation_config.json").write_text(json.dumps(config))
    assert generate.main(run(ours, "--prompt", "a", "--tokens", "1")) == 0
    line = "(generation_config.json): repetition_penalty=1.05, suppress_tokens=…"
    assert line in capsys.readouterr().err
    assert generate.main(run(chat, "--prompt", "a", "--tokens", "1")) == 0
    assert "not applied" not in capsys.readouterr().err


def test_rows_of_a_batch_are_those_of_each_alone(chat: Made) -> None:
    """Prompts of other lengths share the steps, and a row that is done gets no more tokens."""
    from megafp8.checkpoint.reader import Reader
    from megafp8.train.generate import Sampling, generate_batch
    from megafp8.train.generate import generate as alone
    from megafp8.train.load import find_checkpoint
    from megafp8.train.load_model import load_model

    reader = Reader(find_checkpoint(chat.ours, print))
    model = load_model(reader, torch.float64, torch.device("cpu"))
    prompts, counts = [[1], [2, 3, 4, 5], [6, 7], [8, 9, 10]], [5, 2, 0, 7]
    size, sampling, done = len(chat.tokenizer), Sampling(1.0, seed=3), {3}
    rows: list[list[int]] = [[], [], [], []]
    for step in generate_batch(model, prompts, counts, sampling, vocab_size=size, done=done):
        for row, token in zip(rows, step, strict=True):
            row += [] if token is None else [token]
    expected = [list(alone(model, p, n, sampling, vocab_size=size)) for p, n in
                zip(prompts, counts, strict=True)]  # fmt: skip
    assert rows == [*expected[:3], []]


# --- conversations --------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be short."}
TALK = [
    {"role": "user", "content": "def f?"},
    {"role": "assistant", "content": "return 3"},
    {"role": "user", "content": "naïve <|im_end|>?"},
]


def answer(made: Made, messages: list[dict[str, str]], count: int = 12) -> str:
    """Return transformers' greedy answer to a conversation, up to an end token."""
    inputs = made.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = inputs["input_ids"].shape[1]
    out = made.model.generate(**inputs, max_new_tokens=count, do_sample=False)[0].tolist()
    new = [token for token in out[length:] if token != made.tokenizer.eos_token_id]
    return made.tokenizer.decode(out[:length] + new)[len(made.tokenizer.decode(out[:length])) :]


def test_an_answer_in_a_conversation_is_that_of_transformers(
    chat: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user = [{"role": "user", "content": text} for text in ("def f?", "naïve")]
    words = ["--chat", "--tokens", "12", "--prompt", "def f?"]
    capsys.readouterr()
    assert generate.main(run(chat, *words)) == 0
    assert capsys.readouterr().out == answer(chat, user[:1]) + "\n"
    assert generate.main(run(chat, *words, "--prompt", "naïve", "--system", "Be short.")) == 0
    expected = [answer(chat, [SYSTEM, message]) for message in user]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
    lines = [{"messages": TALK}, {"prompt": "def f?"}, {"conversations": TALK, "tools": None}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (
        generate.main(run(chat, *words[:3], "--prompts", str(tmp_path / "p.jsonl"), "--json")) == 0
    )
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["text"] for one in found] == [
        answer(chat, TALK), answer(chat, user[:1]), answer(chat, TALK)
    ]  # fmt: skip
    assert found[0]["prompt"] == TALK[-1]["content"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "a", "--system", "b"], "--system=b: has no effect here"),
        (["--chat", "--prompts", "bad.jsonl"], "bad.jsonl, line 1: messages, turn 1: has no role"),
        (["--prompts", "bad.jsonl"], "line 1: prompt: is missing. Write the text to continue "
         "there, or add --chat for conversations"),
    ],
)  # fmt: skip
def test_conversations_that_cannot_be_asked(
    words: list[str],
    said: str,
    chat: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"messages": [{"content": "a"}]}\n')
    assert generate.main(run(chat, *words)) == 2
    output = capsys.readouterr()
    assert said in output.err and output.out == ""


def test_a_model_without_a_chat_template_is_named(
    chat: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = Path(shutil.copytree(chat.ours, tmp_path / "ours"))
    (ours / "chat_template.jinja").unlink()
    assert generate.main(run(ours, "--chat", "--prompt", "a")) == 2
    assert f"{ours}: chat template: is missing" in capsys.readouterr().err
