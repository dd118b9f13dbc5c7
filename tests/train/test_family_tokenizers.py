"""Tokenizers of today's families: from a model's folder into data, a run, and its export.

The vocabularies are trained here, in the form that the published ones have: Qwen's and Llama 3's
byte-level BPE, and the SentencePiece BPE with byte fallback of Llama 2 and Mistral.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.cli import export, generate, import_hf, preprocess
from megafp8.config.load import load, load_all
from megafp8.config.resolve import data_spec
from megafp8.data.indexed import IndexedDataset
from megafp8.data.named_tokenizers import load_tokenizer
from megafp8.data.tokenize import same_tokens
from megafp8.errors import DataError
from megafp8.runs.run_data import check_data, open_data
from megafp8.runs.tokenizer import (
    beside_data,
    check_tokenizer,
    find_tokenizer,
    keep_files,
    keep_files_of_model,
    save_tokenizer,
    with_all_files,
)
from tests.train.runs import Driver, Finetuning, Place

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    f"def function_{n}(x):\n    return x * {n * 7} + {n % 13}  # naïve\n" * (n % 5 + 1)
    for n in range(90)
]
HARD = [
    "Hello  world,\n\n\tit's 12345 tokens", "naïve café 日本語 🙂", " leading and trailing ",
    "<|im_start|>user\nhi<|im_end|>", "[INST] x [/INST]</s>", "a<|eot_id|>b<s>c", "",
]  # fmt: skip
CHAT = [{"role": "user", "content": "def f?"}, {"role": "assistant", "content": "x"}]
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(words: str, special: list[str]) -> Any:
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    rust = tokenizers.Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rust.train_from_iterator(TEXTS, trainer)
    rust.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in special])
    return rust


def qwen(folder: Path) -> dict[str, Any]:
    """No token begins a text, special tokens come after the words, and a turn ends a text."""
    from tokenizers import normalizers

    rust = byte_level(QWEN_WORDS, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    rust.normalizer = normalizers.NFC()
    rust.save(str(folder / "tokenizer.json"))
    return {
        "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "add_prefix_space": False, "model_max_length": 32,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": TEMPLATE.replace("{{ bos_token }}", ""),
    }  # fmt: skip


def llama3(folder: Path) -> dict[str, Any]:
    """A token begins each text, which its post-processor adds."""
    from tokenizers import processors

    rust = byte_level(LLAMA3_WORDS, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    first = "<|begin_of_text|>"
    rust.post_processor = processors.TemplateProcessing(
        single=f"{first} $A",
        pair=f"{first} $A {first} $B",
        special_tokens=[(first, rust.token_to_id(first))],
    )
    rust.save(str(folder / "tokenizer.json"))
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": first,
        "eos_token": "<|end_of_text|>", "model_max_length": 32, "chat_template": TEMPLATE,
    }  # fmt: skip


def sentencepiece(folder: Path) -> dict[str, Any]:
    """Both files, as published: SentencePiece's own and what transformers makes of it."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    trainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(folder / "tokenizer"), vocab_size=350,
        model_type="bpe", byte_fallback=True, split_digits=True, hard_vocab_limit=False,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        unk_id=0, bos_id=1, eos_id=2,
    )  # fmt: skip
    (folder / "tokenizer.vocab").unlink()
    config = {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False, "legacy": False,
        "model_max_length": 32, "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    loaded.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return config


KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "qwen": qwen, "llama3": llama3, "sentencepiece": sentencepiece,
}  # fmt: skip
GENERATION = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def published(folder: Path, kind: str) -> Any:
    """Write a model's folder with such a tokenizer; return the tokenizer of transformers."""
    folder.mkdir()
    config = KINDS[kind](folder)
    template = config.pop("chat_template")
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    rows = len(loaded) + 5  # more than there are tokens, as published models have
    shape = transformers.LlamaConfig(
        vocab_size=rows, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, eos_token_id=loaded.eos_token_id,
    )  # fmt: skip
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)
    ends = {"eos_token_id": [loaded.eos_token_id, 3], **GENERATION}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return loaded


def same_tokenizer(folder: Path, theirs: Any) -> None:
    """Raise unless transformers has the same tokens, special tokens and chats from a folder."""
    ours = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS[:3], *HARD]:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    assert ours.special_tokens_map == theirs.special_tokens_map
    for more in ({}, {"add_generation_prompt": True}):
        chats = [t.apply_chat_template(CHAT, tokenize=False, **more) for t in (ours, theirs)]
        assert chats[0] == chats[1] and "def f?" in chats[0]
    kept = json.loads((folder / "generation_config.json").read_text())
    assert kept.items() >= GENERATION.items()


def prepared(theirs: Path, output: Path) -> Path:
    """Prepare the texts with the tokenizer of a model's folder; return the data's prefix."""
    source = output.with_suffix(".jsonl")
    source.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS + HARD))
    words = ["--tokenizer", f"hf:{theirs}", "--workers", "0"]
    assert preprocess.main([str(source), "--output", str(output), *words]) == 0
    return output


@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_prepared_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Words that look like special tokens are text, and the end of a text is the tokenizer's."""
    loaded = published(tmp_path / "theirs", kind)
    prefix = prepared(tmp_path / "theirs", tmp_path / "data")
    data = IndexedDataset(prefix)
    texts = [text for text in TEXTS + HARD if text]
    for number, text in enumerate(texts):
        expected = loaded(text, split_special_tokens=True)["input_ids"]  # with what begins a text
        assert np.array_equal(data.document(number), [*expected, loaded.eos_token_id]), text
    assert data.num_documents == len(texts)


@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "starts"),
    [
        ("qwen", "from the model"),
        ("llama3", "from nothing"),
        pytest.param("qwen", "from nothing", marks=pytest.mark.slow),
        pytest.param("llama3", "from the model", marks=pytest.mark.slow),
        pytest.param("sentencepiece", "from the model", marks=pytest.mark.slow),
        pytest.param("sentencepiece", "from nothing", marks=pytest.mark.slow),
    ],
)
def test_files_of_a_tokenizer_come_through_a_run(
    kind: str, starts: str, place: Place, tmp_path: Path
) -> None:
    """Tokens, special tokens, chat template and the configuration of generation."""
    loaded = published(tmp_path / "theirs", kind)
    prefix = prepared(tmp_path / "theirs", tmp_path / "data")
    place = dataclasses.replace(place, data=prefix)
    shape = [
        "model.normalization=rmsnorm", "model.activation=fast-swiglu", "model.bias=False",
        "model.position_embedding_type=rope", "model.layernorm_epsilon=1e-6",
        "model.share_embeddings_and_output_weights=False", "model.max_position_embeddings=32",
        "model.make_vocab_size_divisible_by=1", "trainer.max_steps=1",
    ]  # fmt: skip
    if starts == "from the model":
        assert import_hf.main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
        same_tokenizer(tmp_path / "ours", loaded)
        assert find_tokenizer(tmp_path / "ours") is not None
        rows = len(loaded) + 5
        shape = [*shape[:-2], f"model.make_vocab_size_divisible_by={rows}", shape[-1],
                 f"restore_from_path={tmp_path / 'ours'}"]  # fmt: skip
    done = place.run(*shape)
    assert done.code == 0, done.output
    assert export.main([str(place.dir()), str(tmp_path / "out")]) == 0
    same_tokenizer(tmp_path / "out", loaded)


def test_files_with_a_secret_are_not_kept_beside_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends before it has read a text."""
    (tmp_path / "theirs").mkdir()
    config = KINDS["llama3"](tmp_path / "theirs") | {"auth_token": "hf_abcdefgh12345"}
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "t.txt").write_text("def f")
    for name in (f"hf:{tmp_path / 'theirs'}", str(tmp_path / "theirs" / "tokenizer.json")):
        words = [str(tmp_path / "t.txt"), "--output", str(tmp_path / "d"), "--tokenizer", name]
        assert preprocess.main([*words, "--workers", "0"]) == 2
        assert "a secret, which would be copied" in capsys.readouterr().err
        assert not list(tmp_path.glob("d*"))


def test_files_of_another_tokenizer_are_not_exported(tmp_path: Path) -> None:
    """What an earlier preparation left beside the data has no effect."""
    for name in ("qwen", "llama3"):
        (tmp_path / name).mkdir()
        config = KINDS[name](tmp_path / name)
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(config))
    run = tmp_path / "run"
    run.mkdir()
    own = find_tokenizer(tmp_path / "qwen")
    assert own is not None
    save_tokenizer(own, run, 32)
    assert with_all_files(run, None) == run
    keep_files(tmp_path / "llama3", beside_data(tmp_path / "data"), own)
    keep_files_of_model(own, [tmp_path / "no", run, beside_data(tmp_path / "data")], run)
    assert not (run / "tokenizer").exists() and with_all_files(run, None) == run
    assert with_all_files(run, None, str(tmp_path / "qwen")) == tmp_path / "qwen"
    keep_files(tmp_path / "llama3", run / "tokenizer", own)  # as earlier versions did
    assert with_all_files(run, None) == run
    shutil.rmtree(run / "tokenizer")
    keep_files_of_model(own, [tmp_path / "llama3", tmp_path / "qwen"], run)
    assert with_all_files(run, str(tmp_path / "qwen")) == run / "tokenizer"
    assert with_all_files(run, str(tmp_path / "llama3")) == run / "tokenizer"


# --- chains of commands ---------------------------------------------------------------------------

NARROW = [
    "model.normalization=rmsnorm", "model.activation=fast-swiglu", "model.bias=False",
    "model.position_embedding_type=rope", "model.layernorm_epsilon=1e-6",
    "model.share_embeddings_and_output_weights=False", "model.max_position_embeddings=32",
]  # fmt: skip


class Chains:
    """Makes runs that follow from each other in one folder, each when it is first asked for.

    `pre` starts from the import, `sft` from `pre`, `again` from `sft`, `tuned` from the import;
    `new` starts from nothing with data of the model's tokenizer, `second` with data of the data's
    tokenizer, `of_new` from `new`. All of them name the others by relative paths.
    """

    def __init__(self, driver: Driver, home: Path) -> None:
        self.home = home
        rows = len(published(home / "theirs", "llama3")) + 5
        prepared(home / "theirs", home / "data")
        assert import_hf.main([str(home / "theirs"), str(home / "ours")]) == 0
        examples = [{"input": f"def f{n}", "output": f"{n % 3}."} for n in range(40)]
        (home / "mine.jsonl").write_text("".join(json.dumps(e) + "\n" for e in examples))
        self._shape = [*NARROW, f"model.make_vocab_size_divisible_by={rows}"]
        self._pretrain = Place(driver, home / "data", home)
        self._finetune = Finetuning(driver, home / "data", home)

    def make(self, name: str) -> Path:
        """Return the directory of a run, or the import's."""
        if name == "ours" or (self.home / "runs" / name).exists():
            return self.home / ("ours" if name == "ours" else f"runs/{name}")
        common = ["trainer.max_steps=1", "trainer.precision=32", f"exp_manager.name={name}"]
        starts = {"pre": "ours", "sft": "runs/pre", "again": "runs/sft", "of_new": "runs/new",
                  "tuned": "ours/checkpoints/step_00000000"}  # fmt: skip
        start = starts.get(name)
        if start is not None:
            common.append(f"restore_from_path={start}")
            if start.startswith("runs/"):
                self.make(start.removeprefix("runs/"))
        if name == "second":
            more = ["--output", str(self.home / "more"), "--workers", "0"]
            more += ["--tokenizer", str(self.home / "data.tokenizer.json")]
            assert preprocess.main([str(self.home / "data.jsonl"), *more]) == 0
            common.append(f"model.data.data_prefix={self.home / 'more'}")
        if name in ("pre", "new", "second"):
            self.pretrain(name, *common)
        else:
            done = self._finetune.run(*common)
            assert done.code == 0, done.output
        return self._finetune.dir(name)

    def pretrain(self, name: str, *more: str, code: int = 0) -> str:
        """Train a step with the import's shape; return the output."""
        common = ["trainer.max_steps=1", "trainer.precision=32", f"exp_manager.name={name}"]
        done = self._pretrain.run(*self._shape, *dict.fromkeys([*common, *more]))
        assert done.code == code, done.output
        return done.output

    @contextmanager
    def without_models(self) -> Iterator[None]:
        """Hide the import and what lies beside data."""
        gone = [self.home / "ours", *self.home.glob("*.tokenizer")]
        for path in gone:
            path.rename(path.with_suffix(".gone"))
        yield
        for path in gone:
            path.with_suffix(".gone").rename(path)


@pytest.fixture(scope="module")
def chains(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Chains:
    return Chains(driver, tmp_path_factory.mktemp("chains"))


@pytest.mark.parametrize(
    "name",
    ["ours", "pre", "again", pytest.param("sft", marks=pytest.mark.slow),
     *(pytest.param(n, marks=pytest.mark.slow) for n in ("new", "second", "tuned", "of_new"))],
)  # fmt: skip
def test_all_files_of_a_tokenizer_survive_a_chain(
    name: str, chains: Chains, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, chat template, special tokens, settings of generation, from any working directory."""
    source = chains.home / "theirs"
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    run = chains.make(name)
    monkeypatch.chdir(tmp_path)
    if name == "ours":
        run = Path(shutil.copytree(run, "moved"))
    with chains.without_models():
        assert export.main([str(run), "out"]) == 0
    assert import_hf.main(["out", "back"]) == 0
    assert export.main(["back", "out2"]) == 0
    for out in (Path("out"), Path("out2")):
        same_tokenizer(out, theirs)
        for file in ("config.json", "generation_config.json"):
            first, last = (json.loads((folder / file).read_text()) for folder in (source, out))
            for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                assert first.get(key) == last.get(key), (file, key)


def test_data_of_another_tokenizer_do_not_start_from_a_model(chains: Chains) -> None:
    """It has as many tokens as the model's, so that the rows of the embedding fit."""
    home = chains.home
    size = json.loads((home / "data.dataset.json").read_text())["vocab_size"]
    words = ["--tokenizer", "bpe", "--vocab-size", str(size), "--workers", "0"]
    assert preprocess.main([str(home / "data.jsonl"), "--output", str(home / "bpe"), *words]) == 0
    assert json.loads((home / "bpe.dataset.json").read_text())["vocab_size"] == size
    chains.pretrain("right", "restore_from_path=ours")
    data = f"model.data.data_prefix={home / 'bpe'}"
    refused = chains.pretrain("wrong", "restore_from_path=ours", data, code=2)
    assert "restore_from_path=ours: its tokenizer is not that of the data: token 0 is" in refused
    assert "--tokenizer" in refused and not (home / "runs" / "wrong").exists()
    (home / "ours" / "tokenizer.json").rename(home / "ours" / "gone.json")
    said = chains.pretrain("unknown", "restore_from_path=ours", data)
    (home / "ours" / "gone.json").rename(home / "ours" / "tokenizer.json")
    assert "ours has no tokenizer, with which that of the data could be compared" in said


def test_two_kinds_of_files_of_a_tokenizer_have_the_same_tokens(tmp_path: Path) -> None:
    """SentencePiece's own file, what transformers makes of it, and those of other tokenizers."""
    for name in KINDS:
        (tmp_path / name).mkdir()
        config = KINDS[name](tmp_path / name)
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(config))
    own = load_tokenizer(tmp_path / "sentencepiece" / "tokenizer.model")
    found = {name: find_tokenizer(tmp_path / name) for name in KINDS}
    for name, tokenizer in found.items():
        assert tokenizer is not None
        assert (
            same_tokens(own, tokenizer) == same_tokens(tokenizer, own) == (name == "sentencepiece")
        )
    assert not same_tokens(found["qwen"], found["llama3"])  # type: ignore[arg-type]
    note = "note: the model's tokenizer begins a text with <s>; that of the data does not"
    assert check_tokenizer(own, tmp_path / "sentencepiece") == note
    assert check_tokenizer(found["llama3"], tmp_path / "llama3") is None  # type: ignore[arg-type]


def test_a_moved_import_starts_runs_by_its_own_yaml(chains: Chains, tmp_path: Path) -> None:
    data, moved = f"model.data.data_prefix={chains.home / 'data'}", tmp_path / "moved"
    shutil.copytree(chains.home / "ours", moved)
    with chains.without_models():
        loaded = load_all([data], moved, "model")
        assert loaded.values["restore_from_path"] == str(moved)
        lines = loaded.inert_lines()
        gone = chains.home / "ours"
        assert f"moved: restore_from_path={gone} (model.yaml) is now {moved}" in lines
        loaded = load_all([data, f"restore_from_path={gone}"], moved, "model")
        assert loaded.values["restore_from_path"] == str(gone)  # of the command line: as it is


def without_json(folder: Path) -> None:
    """Leave GPT-2's older form: the vocabulary and the merges in two files."""
    tree = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(tree["model"]["vocab"]))
    merges = (" ".join(pair) for pair in tree["model"]["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer.json").unlink()


def prepended(folder: Path) -> None:
    """Write what the class LlamaTokenizer does by a pre-tokenizer as Llama 2's file has it."""
    tree = json.loads((folder / "tokenizer.json").read_text())
    steps = [{"type": "Prepend", "prepend": "▁"},
             {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]  # fmt: skip
    tree |= {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}
    (folder / "tokenizer.json").write_text(json.dumps(tree))


def of_another_class(folder: Path) -> None:
    """Name a class of SentencePiece's kind, which does not know this file's bytes."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "CodeLlamaTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "change", "note"),
    [
        ("qwen", without_json, "the tokenizer that transformers builds; there was none"),
        ("sentencepiece", prepended, "that transformers builds; the file's own differs, as for"),
        ("llama3", of_another_class, "transformers builds a tokenizer from these files that loses"),
    ],
)
def test_an_import_has_the_tokenizer_that_transformers_builds(
    kind: str,
    change: Callable[[Path], None],
    note: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = published(tmp_path / "theirs", kind)
    change(tmp_path / "theirs")
    assert import_hf.main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert note in capsys.readouterr().out
    found = find_tokenizer(tmp_path / "ours")
    is_lossy = change is of_another_class
    loaded = before if is_lossy else transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert found is not None
    for text in [*TEXTS[:3], *HARD]:
        expected = loaded(text, add_special_tokens=False)["input_ids"]
        assert found.encode_marked([text])[0] == expected, text
    assert export.main([str(tmp_path / "ours"), str(tmp_path / "out")]) == 0
    if not is_lossy:
        same_tokenizer(tmp_path / "out", loaded)
    words = [str(tmp_path / "ours"), "--prompt", "def ", "--tokens", "1"]
    assert generate.main(words) == 0


@pytest.mark.parametrize("named", [True, False])
def test_files_without_tokenizer_json_are_kept(named: bool, tmp_path: Path) -> None:
    """Of a folder that a job names itself, and of the one that its data was prepared with."""
    published(tmp_path / "theirs", "qwen")
    without_json(tmp_path / "theirs")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    prefix = prepared(tmp_path / "theirs", tmp_path / "data")
    run = tmp_path / "run"
    run.mkdir()
    own = load_tokenizer(tmp_path / "data.tokenizer.json", loaded.eos_token)
    save_tokenizer(own, run, 32)
    keep_files_of_model(own, [tmp_path / "theirs" if named else beside_data(prefix)], run)
    kept = with_all_files(run)
    assert kept == run / "tokenizer"
    same_tokenizer(kept, loaded)


def test_a_tokenizer_that_nothing_reads_is_named_at_the_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    published(tmp_path / "theirs", "qwen")
    without_json(tmp_path / "theirs")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert import_hf.main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert "note: megafp8 cannot read this tokenizer. " in said and "pip install transf" in said
    assert "megafp8 finetune" not in said


# --- what a folder's files do ---------------------------------------------------------------------

EVIL = "import pathlib\npathlib.Path({!r}).touch()\nclass T: pass\nclass C: pass\n"
OF_FOLDER = ("model.tokenizer.library=huggingface", "model.tokenizer.type={theirs}")
TUNE = ("restore_from_path={ours}", "model.data.train_ds.file_names={data}.jsonl")


def opened(words: tuple[str, ...], job: str, folders: dict[str, Path]) -> None:
    """Open the data of a job, as its command does before it starts."""
    cfg = load([word.format(**folders) for word in words], config_name=job)
    check_data(data_spec(cfg))
    open_data(data_spec(cfg), print)


DOORS: dict[str, Callable[[dict[str, Path]], object]] = {
    "preprocess": lambda f: prepared(f["theirs"], f["new"]),
    "finetune": lambda f: opened((*TUNE, *OF_FOLDER), "finetune_gpt", f),
    "pretrain": lambda f: opened(
        ("model.data.data_prefix={data}", *OF_FOLDER), "pretrain_gpt", f),
    "generate": lambda f: generate.main([str(f["ours"]), "--prompt", "def ", "--tokens", "1"]),
    "import": lambda f: import_hf.main([str(f["theirs"]), str(f["new"])]),
    "export": lambda f: export.main([str(f["ours"]), str(f["new"])]),
}  # fmt: skip


@pytest.fixture(scope="module")
def imported_chat(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a model's folder, its imported form, and data that were prepared with it."""
    home = tmp_path_factory.mktemp("chat")
    published(home / "theirs", "llama3")
    prepared(home / "theirs", home / "data")
    assert import_hf.main([str(home / "theirs"), str(home / "ours")]) == 0
    return {name: home / name for name in ("theirs", "data", "ours", "new")}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("has_config", [False, True])
def test_code_of_a_tokenizers_folder_never_runs(
    door: str,
    has_config: bool,
    imported_chat: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No door asks on the terminal either: a "y" waits on the standard input, and stays there."""
    folders = {**imported_chat, "new": tmp_path / "new"}
    marker = tmp_path / "it_ran"
    for name in ("theirs", "ours"):
        folders[name] = Path(shutil.copytree(imported_chat[name], tmp_path / name))
        config = json.loads((folders[name] / "tokenizer_config.json").read_text())
        config |= {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}, "tokenizer_class": "T"}
        (folders[name] / "tokenizer_config.json").write_text(json.dumps(config))
        (folders[name] / "evil.py").write_text(EVIL.format(str(marker)))
    file = folders["theirs"] / "config.json"
    of_model = json.loads(file.read_text()) | {"auto_map": {"AutoConfig": "evil.C"}}
    file.write_text(json.dumps(of_model))
    if not has_config and door != "import":
        file.unlink()
    answer = io.StringIO("y\n" * 9)
    monkeypatch.setattr(sys, "stdin", answer)
    with suppress(DataError, AssertionError):  # such a folder may be refused
        DOORS[door](folders)
    assert not marker.exists() and answer.tell() == 0
