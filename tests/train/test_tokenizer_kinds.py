"""Runs with SentencePiece's and tiktoken's tokenizers train, continue, generate and export."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from megafp8.cli import export, generate, import_hf, preprocess
from megafp8.data.named_tokenizers import load_tokenizer
from megafp8.data.tokenize import continuation
from megafp8.runs.tokenizer import copy_tokenizer, find_tokenizer, save_tokenizer
from tests.train.runs import Place

TEXTS = [
    f"def function_{n}(x):\n    return x * {n * 7} + {n % 13}\n" * (n % 5 + 1) for n in range(90)
]
SHORT = ["trainer.precision=32"]
END = "<stop>"  # end of a document: for SentencePiece, another piece than its end of a sentence


def sentencepiece_model(folder: Path) -> list[str]:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(folder / "sp"),
        vocab_size=300,
        byte_fallback=True,
        user_defined_symbols=[END],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return [str(folder / "sp.model"), "--end-of-document", END]


def tiktoken_ranks(folder: Path) -> list[str]:
    ranks = [bytes([number]) for number in range(256)] + [b"re", b"tu", b"rn", b"retu", b"return"]
    lines = (f"{base64.b64encode(r).decode()} {n}\n" for n, r in enumerate(ranks))
    (folder / "mine.tiktoken").write_text("".join(lines))
    return [f"tiktoken:{folder / 'mine.tiktoken'}"]


KINDS: dict[str, Any] = {
    "tokenizer.model": sentencepiece_model,
    "tokenizer.tiktoken.json": tiktoken_ranks,
}


def dataset(folder: Path, kind: str) -> Path:
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    words = ["--tokenizer", *KINDS[kind](folder), "--workers", "0"]
    assert preprocess.main([str(folder / "t.jsonl"), "--output", str(folder / "d"), *words]) == 0
    return folder / "d"


@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_trained_continued_generated_exported_and_back(
    kind: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = dataset(tmp_path, kind)
    place = dataclasses.replace(place, data=data)
    assert place.run(*SHORT, "trainer.max_steps=2").code == 0
    run = place.dir()
    recorded = load_tokenizer(
        data.with_name(f"d.{kind}"), END if kind == "tokenizer.model" else None
    )
    found = find_tokenizer(run)
    assert found is not None and found.digest == recorded.digest
    assert (run / kind).is_file() and not (run / "tokenizer.json").exists()

    # Earlier versions used this name: the file is read, and renamed when the run continues.
    (run / kind).rename(run / "tokenizer.json")
    old = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": found.end_of_document}
    (run / "tokenizer_config.json").write_text(json.dumps(old))
    found = find_tokenizer(run)
    assert found is not None and found.digest == recorded.digest
    done = place.run(*SHORT, "trainer.max_steps=3")
    assert done.code == 0 and "continuing after step 2 of 3" in done.output, done.output
    assert (run / kind).is_file() and not (run / "tokenizer.json").exists()

    capsys.readouterr()
    assert generate.main([str(run), "--prompt", "def function_", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("def function_")

    theirs = tmp_path / "theirs"
    assert export.main([str(run), str(theirs)]) == 0
    assert "transformers cannot load this kind of tokenizer" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(theirs)
    assert model.generation_config.eos_token_id == recorded.eod_id
    with pytest.raises(
        ValueError, match="tokenizer"
    ):  # a tokenizer that gives other tokens would be wrong
        transformers.AutoTokenizer.from_pretrained(theirs)
    assert import_hf.main([str(theirs), str(tmp_path / "ours")]) == 0
    back = find_tokenizer(tmp_path / "ours")
    assert back is not None and back.digest == recorded.digest
    capsys.readouterr()
    assert generate.main([str(tmp_path / "ours"), "--prompt", "def ", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_a_sentencepiece_model_of_others_counts_as_none(tmp_path: Path) -> None:
    sentencepiece_model(tmp_path)
    (tmp_path / "sp.model").rename(tmp_path / "tokenizer.model")
    assert find_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assert find_tokenizer(tmp_path) is None


@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_keeps_its_spaces(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path)
    suffixes = {"tokenizer.model": "sp.model", "tokenizer.tiktoken.json": "mine.tiktoken"}
    source = tmp_path / suffixes[kind]
    if kind == "tokenizer.model":
        source = source.rename(tmp_path / kind)
        tokenizer = load_tokenizer(source)
    else:
        from megafp8.data.library_tokenizers import load_tiktoken

        tokenizer = load_tiktoken(source)
    whole = tokenizer.encode("def function_1(x): return x")
    text = tokenizer.decode(whole)
    for cut in range(1, len(whole)):
        prompt = whole[:cut]
        assert tokenizer.decode(prompt) + continuation(tokenizer, prompt, whole[cut:]) == text
    (tmp_path / "run").mkdir()
    save_tokenizer(tokenizer, tmp_path / "run", 64)
    config = json.loads((tmp_path / "run" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == tokenizer.end_of_document and config["eos_token"]
    assert config["tokenizer_class"].startswith("megafp8.")
    (tmp_path / "out").mkdir()
    exported = kind if kind != "tokenizer.model" else "sentencepiece.model"
    assert set(copy_tokenizer(tmp_path / "run", tmp_path / "out")) == {
        exported, "tokenizer_config.json"
    }  # fmt: skip
    (tmp_path / "old").mkdir()
    tokenizer.save(tmp_path / "old" / "tokenizer.json")  # as earlier versions named it
    for folder in ("run", "out", "old"):
        found = find_tokenizer(tmp_path / folder)
        assert found is not None and found.digest == tokenizer.digest
