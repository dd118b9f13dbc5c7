"""A long text has the same tokens in parts, whatever cuts it; what cannot be cut stays whole."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import islice

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from megafp8.data import long_texts
from megafp8.data.builtin import builtin_documents
from megafp8.data.tokenize import JsonTokenizer, byte_tokenizer, train_tokenizer

# The rules of published tokenizers, in words of our own: numbers by three, one mark before a word.
BY_THREE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDINGS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LINES = r"[^\n]*\n|[^\n]+"


def split(rule: str) -> pre_tokenizers.PreTokenizer:
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(rule), "isolated"), by_bytes])


CUTTERS = {
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "bytes with a space before": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "numbers by three": split(BY_THREE),
    "endings": split(ENDINGS),
    "lines": split(LINES),
    "words": pre_tokenizers.Whitespace(),
    "words of BERT": pre_tokenizers.BertPreTokenizer(),
    "metaspace": pre_tokenizers.Metaspace(),
    "metaspace whole": pre_tokenizers.Metaspace(split=False),
    "scripts": pre_tokenizers.Sequence([pre_tokenizers.UnicodeScripts(), CUT := split(BY_THREE)]),
    "none": None,
}
ODD = [
    *(
        "don't",
        "it's ",
        "漢字、漢字。かな",
        "e\u0301 ",
        "x\u0301",
        "  \n\n  y",
        "<tool>",
        "a<tool>b",
    ),
    *("foo bar", "12345 678", "\t", "\r\n", "—a", "🐍 b", "ﬁ", "a" * 40, "(x)", "A1.b"),
]
LINES_TO_TRAIN_ON = [
    line[:100]
    for document in islice(builtin_documents(), 0, 400, 80)
    for line in document.text.splitlines()[:150]
]


def make(cutter: object, normalizer: object = None) -> JsonTokenizer:
    rust = tokenizers.Tokenizer(models.BPE(unk_token=None))
    if cutter is not None:
        rust.pre_tokenizer = cutter
    if normalizer is not None:
        rust.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=["<end>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    rust.train_from_iterator([*LINES_TO_TRAIN_ON, *ODD * 5], trainer)
    rust.add_tokens(["<tool>", "foo bar"])
    return JsonTokenizer(rust, rust.token_to_id("<end>"))


def text_of(seed: int, length: int = 6000) -> str:
    draw = random.Random(seed)
    words = [*ODD, *"if we re-read the file, it's as it was .".split(" ")]
    pieces = [
        draw.choice(words) + draw.choice([" ", " ", "", "\n", ", ", "  "]) for _ in range(length)
    ]
    return "".join(pieces)[:length]


@pytest.mark.parametrize(
    "form", [None, normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase()]
)
@pytest.mark.parametrize("name", CUTTERS)
def test_parts_have_the_tokens_of_the_whole(
    name: str, form: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make(CUTTERS[name], form)
    monkeypatch.setattr(long_texts, "LONG", 40)
    asked: list[int] = []
    encode = tokenizer.encode_batch
    monkeypatch.setattr(
        tokenizer, "encode_batch", lambda texts: asked.extend(map(len, texts)) or encode(texts)
    )
    for seed in range(4):
        texts = ["short", text_of(seed), "", text_of(-seed, 41)]
        want = encode(texts)
        assert [list(ids) for ids in long_texts.encode_batch(tokenizer, texts)] == want, seed
    cut = name not in ("none", "metaspace whole", "lines") and type(form).__name__ in (
        "NoneType",
        "NFC",
    )
    assert (max(asked) < 600) == cut, f"the longest part has {max(asked)} of 6000 characters"


def test_training_learns_the_same_from_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(document.text for document in islice(builtin_documents(), 0, 60, 3))
    monkeypatch.setattr(long_texts, "LONG", 500)
    parts = list(long_texts.parts_to_train_on(text))
    assert "".join(parts) == text and len(parts) > len(text) // 2000
    assert train_tokenizer(parts, 500).digest == train_tokenizer([text], 500).digest


def test_a_long_text_that_cannot_be_cut_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "_NOTED", 30)
    monkeypatch.setattr(long_texts, "LONG", 8)
    words, one_word = [["x" * 9], ["a b " * 31, ""], ["c d" * 50]], [["\0" * 31]]
    for tokenizer, lists, count in (
        (make(None), words, 1), (make(None), [["x" * 30]], 0),
        (byte_tokenizer(), words, 0), (byte_tokenizer(), one_word, 1),
    ):  # fmt: skip
        said: list[str] = []
        assert list(long_texts.noted(lists, tokenizer, said.append)) == lists
        assert len(said) == count and all("tokenized at once" in line for line in said)


PROGRAM = """
import json, resource, sys
from megafp8.cli.preprocess import main
words = ["--tokenizer", sys.argv[2], "--workers", "0"]
code = main([sys.argv[1], "--output", sys.argv[1] + ".o", *words])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_memory_for_a_long_line_is_a_small_multiple_of_it(tmp_path, tokenizer: str) -> None:  # type: ignore[no-untyped-def]
    """Without parts it is 200 times the line with single bytes, and 100 times with a BPE."""
    import json

    base = "".join(document.text for document in islice(builtin_documents(), 0, 400, 5))
    peaks = []
    for size in (1_000, 24_000_000):
        text = (base * (size // len(base) + 1))[:size]
        path = tmp_path / f"{size}.jsonl"
        path.write_text(json.dumps({"text": text}) + "\n")
        done = subprocess.run([sys.executable, "-c", PROGRAM, str(path), tokenizer],
                              capture_output=True, text=True)  # fmt: skip
        peak, code = done.stdout.split()[-2:]
        assert code == "0", done.stderr
        peaks.append(int(peak))
    assert peaks[1] - peaks[0] < 40 * 24_000_000, f"{(peaks[1] - peaks[0]) / 24e6:.0f} times"
