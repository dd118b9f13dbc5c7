"""Test the preprocessing command: all kinds of text and tokenizers, kills, and use by a job."""

from __future__ import annotations

import base64
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8_numerics.caches import locked
from megafp8.cli.preprocess import main
from megafp8.data import preprocess as preprocess_module
from megafp8.data.dataset import open_prefix
from megafp8.data.indexed import IndexedDataset, bin_path, idx_path
from megafp8.data.named_tokenizers import load_tokenizer
from megafp8.data.text_sources import TextSource
from megafp8.data.tokenize import byte_tokenizer, train_tokenizer
from tests.data.helpers import tiny_documents

TEXTS = [document.text for document in tiny_documents(60)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    with open(folder / "a.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"body": text, "n": 1}) + "\n" for text in TEXTS[:30])
    pq.write_table(pa.table({"body": TEXTS[30:50]}), folder / "b.parquet")
    with gzip.open(folder / "c.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"body": text}) + "\n" for text in TEXTS[50:])
    (folder / "notes.unknown").write_text("not a text file")
    return folder


def texts_of(prefix: Path) -> list[str]:
    opened = open_prefix(prefix, lambda line: None)
    eod, dataset = opened.tokenizer.eod_id, opened.dataset
    documents = [dataset.document(number) for number in range(dataset.num_documents)]
    assert all(document[-1] == eod and (document[:-1] != eod).all() for document in documents)
    return [opened.tokenizer.decode(document[:-1]) for document in documents]


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def wrong(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run(*arguments) == 2
    return capsys.readouterr().err


def test_a_folder_of_all_kinds_by_workers_and_without(corpus: Path, tmp_path: Path) -> None:
    words = ("--tokenizer", "bpe", "--vocab-size", 300, "--text-key", "body")
    assert run(corpus, "--output", tmp_path / "x" / "one", "--workers", 0, *words) == 0
    assert run(corpus, "--output", tmp_path / "two", "--workers", 2, *words) == 0
    assert texts_of(tmp_path / "x" / "one") == TEXTS
    for end in (".bin", ".idx", ".tokenizer.json"):
        one, two = tmp_path / "x" / f"one{end}", tmp_path / f"two{end}"
        assert one.read_bytes() == two.read_bytes(), "the same by any number of workers"
    described = json.loads((tmp_path / "two.dataset.json").read_text())
    assert described["vocab_size"] == 300 and described["num_documents"] == len(TEXTS)
    assert described["num_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} == {
        "two.bin", "two.idx", "two.tokenizer.json", "two.dataset.json"
    }  # fmt: skip


def test_the_tokens_are_those_of_the_library(corpus: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 290)
    tokenizer.save(tmp_path / "words.json")
    run(corpus / "a.jsonl", "--output", tmp_path / "d", "--tokenizer", tmp_path / "words.json",
        "--text-key", "body", "--workers", 0)  # fmt: skip
    data = IndexedDataset(tmp_path / "d")
    for number, text in enumerate(TEXTS[:30]):
        assert data.document(number).tolist() == [*tokenizer.encode(text), tokenizer.eod_id]


@pytest.mark.parametrize(
    ("unit", "want"),
    [
        ("file", ["one\ntwo\n\nthree ü\n"]),
        ("paragraph", ["one\ntwo", "three ü"]),
        ("line", ["one", "two", "three ü"]),
    ],
)
def test_plain_text(tmp_path: Path, unit: str, want: list[str]) -> None:
    (tmp_path / "t.txt").write_text("one\ntwo\n\nthree ü\n", encoding="utf-8")
    done = run(tmp_path / "t.txt", "--output", tmp_path / "d", "--tokenizer", "bytes",
               "--document", unit, "--workers", 0)  # fmt: skip
    assert done == 0
    assert [text.strip("\n") for text in texts_of(tmp_path / "d")] == [w.strip("\n") for w in want]


def test_a_dataset_by_name_is_loaded_by_datasets(corpus: Path, tmp_path: Path) -> None:
    """The name is that of a local folder here, since the Hub needs a network."""
    folder = tmp_path / "named"
    folder.mkdir()
    pq.write_table(pa.table({"text": TEXTS[:9]}), folder / "train-0.parquet")
    pq.write_table(pa.table({"text": TEXTS[9:12]}), folder / "test-0.parquet")
    for split, want in (("train", TEXTS[:9]), ("test", TEXTS[9:12])):
        done = run("--dataset", folder, "--split", split, "--output", tmp_path / split,
                   "--tokenizer", "bytes", "--workers", 0)  # fmt: skip
        assert done == 0 and texts_of(tmp_path / split) == want


# ---- tokenizers


def huggingface(folder: Path) -> str:
    from transformers import PreTrainedTokenizerFast

    train_tokenizer(TEXTS, 280).save(folder / "raw.json")
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "raw.json"), eos_token="<|endoftext|>"
    )
    fast.save_pretrained(folder / "hf")
    return f"hf:{folder / 'hf'}"


def sentencepiece(folder: Path) -> str:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(folder / "sp"),
        vocab_size=400,
        byte_fallback=True,
        character_coverage=1.0,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return str(folder / "sp.model")


def tiktoken(folder: Path) -> str:
    ranks = [bytes([number]) for number in range(256)] + [b"re", b"tu", b"rn", b"retu", b"return"]
    lines = (f"{base64.b64encode(r).decode()} {n}\n" for n, r in enumerate(ranks))
    (folder / "mine.tiktoken").write_text("".join(lines))
    return f"tiktoken:{folder / 'mine.tiktoken'}"


@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")
@pytest.mark.parametrize("make", [huggingface, sentencepiece, tiktoken])
def test_tokenizers_are_recorded_with_the_data(tmp_path: Path, make, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    name = make(tmp_path)
    for workers in (0, 1):
        done = run(tmp_path / "t.jsonl", "--output", tmp_path / f"d{workers}", "--tokenizer", name,
                   "--workers", workers)  # fmt: skip
        assert done == 0
    opened = open_prefix(tmp_path / "d0", lambda line: None)
    want = [[*opened.tokenizer.encode(text), opened.tokenizer.eod_id] for text in TEXTS]
    got = [opened.dataset.document(n).tolist() for n in range(len(TEXTS))]
    assert got == want
    assert opened.dataset.num_tokens < sum(len(t.encode()) for t in TEXTS), "it merges"
    assert bin_path(tmp_path / "d0").read_bytes() == bin_path(tmp_path / "d1").read_bytes()
    if make is not sentencepiece:  # whose pieces leave out a few control characters
        assert texts_of(tmp_path / "d0") == TEXTS
    words = tmp_path / f"d0.{opened.tokenizer.file_name}"
    assert load_tokenizer(words).digest == opened.tokenizer.digest
    record = json.loads((tmp_path / "d0.dataset.json").read_text())
    record["vocab_size"] += 1
    (tmp_path / "d0.dataset.json").write_text(json.dumps(record))
    with pytest.raises(Exception, match="vocab_size: the dataset was made with a vocabulary"):
        open_prefix(tmp_path / "d0", lambda line: None)


def test_a_slow_or_nameless_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "t.txt").write_text("x")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.model").write_bytes(b"\xff\x00")
    (tmp_path / "bad.tiktoken").write_text("no base64\n")
    for name in ("nonsense", "bad.json", "bad.model", "bad.tiktoken", "hf:/no/such/folder"):
        path = name if ":" in name or "." not in name else tmp_path / name
        text = wrong(capsys, tmp_path / "t.txt", "--output", tmp_path / "d", "--tokenizer", path)
        assert "tokenizer" in text and name.removeprefix("hf:") in text


@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")
def test_what_a_tokenizer_lacks_is_said_with_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sentencepiece

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "t.txt").write_text("some text")
    command = (tmp_path / "t.txt", "--output", tmp_path / "d", "--tokenizer")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "gpt2" / "merges.txt").write_text("#version: 0.2\na b\n")
    text = wrong(capsys, *command, f"hf:{tmp_path / 'gpt2'}")
    assert "with vocab.json, merges.txt and a tokenizer_config.json that names their class" in text
    assert "one of: ." not in text, "the library's list is not cut off"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / "sp"), vocab_size=400, eos_id=-1,
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    text = wrong(capsys, *command, tmp_path / "sp.model")
    assert "has no end of a sentence. Name the piece that is to end" in text
    assert "--end-of-document PIECE" in text


# ---- killed


COMMAND = [sys.executable, "-m", "megafp8", "preprocess"]
SLOW = """
import sys, time
from megafp8.data import preprocess
preprocess.SECONDS_BETWEEN_RECORDS = 0.0
preprocess.preprocess.__kwdefaults__["unit_characters"] = 2000
from megafp8.cli import preprocess as cli
class Slow(cli._Bar):
    def show(self, counts):
        print(counts.num_texts, flush=True)
        time.sleep(0.02)
cli._Bar = Slow
if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.kill
def test_kill_9_at_any_moment_and_the_same_command_continues(tmp_path: Path) -> None:
    many = [f"{number} {text}" for number in range(10) for text in TEXTS]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in many))
    (tmp_path / "slow.py").write_text(SLOW)
    words = ("--tokenizer", "bpe", "--vocab-size", "300", "--workers", "1")
    run(tmp_path / "t.jsonl", "--output", tmp_path / "straight", *words)
    argv = [sys.executable, str(tmp_path / "slow.py"), str(tmp_path / "t.jsonl"), "--output",
            str(tmp_path / "killed"), *words]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for lines in (1, 6):
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        seen = [line for _, line in zip(range(lines + 3), process.stdout, strict=False)]
        assert len(seen) == lines + 3, "it is not done yet"
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        alive = psutil.wait_procs(workers)[1]
        assert not alive, "no worker outlives a killed command"
        assert not bin_path(tmp_path / "killed").exists()
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "continues after" in done.stdout
    for end in (".bin", ".idx", ".tokenizer.json"):
        straight, killed = tmp_path / f"straight{end}", tmp_path / f"killed{end}"
        assert straight.read_bytes() == killed.read_bytes()
    assert not (tmp_path / "killed.partial").exists()


@pytest.mark.kill
def test_a_worker_that_dies_ends_the_command_which_then_continues(tmp_path: Path) -> None:
    many = [f"{number} {text}" for number in range(10) for text in TEXTS]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in many))
    (tmp_path / "slow.py").write_text(SLOW)
    argv = [sys.executable, str(tmp_path / "slow.py"), str(tmp_path / "t.jsonl"), "--tokenizer",
            "bytes", "--workers", "1", "--output", str(tmp_path / "o")]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    (worker,) = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    worker.kill()
    error = process.communicate()[1]
    assert process.returncode == 2 and "one of them died, as when memory runs out" in error
    assert run(tmp_path / "t.jsonl", "--output", tmp_path / "o", "--tokenizer", "bytes") == 0
    assert texts_of(tmp_path / "o") == many


def test_one_process_writes_an_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text("some text")
    command = (tmp_path / "t.txt", "--output", tmp_path / "o", "--tokenizer", "bytes")
    (tmp_path / "o.partial").mkdir()
    with locked(tmp_path / "o.partial" / "lock"):
        assert "another process writes this output" in wrong(capsys, *command)
    assert run(*command, "--workers", 0) == 0


@pytest.mark.parametrize("name", ["a b", "ü漢", "a,b", "[a]", "a*?", "a=b", "-a", "'a'", "a.b.c"])
def test_any_name_is_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / name).mkdir()
    (tmp_path / name / f"{name}.jsonl").write_text(text)
    for number, source in enumerate((f"./{name}", f"./{name}/{name}.jsonl")):
        output = f"./{name}/out {name}{number}"
        assert run(source, "--output", output, "--tokenizer", "bytes", "--workers", 0) == 0
        assert texts_of(Path(output)) == TEXTS
        shutil.move(f"{output}.dataset.json", tmp_path)  # which is JSON, too


def test_a_kill_while_what_is_left_is_deleted_leaves_a_whole_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text("one\n\ntwo\n")
    words = (tmp_path / "t.txt", "--output", tmp_path / "o", "--tokenizer", "bytes")

    def killed(folder: Path, **_: object) -> None:
        (folder / "tokens").unlink()
        raise SystemExit(137)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="137"):
        patch.setattr(shutil, "rmtree", killed)
        run(*words, "--workers", 0)
    assert len(texts_of(tmp_path / "o")) == 1 and not (tmp_path / "o.partial").exists()
    assert "is there already" in wrong(capsys, *words)


def test_what_was_begun_continues_with_the_same_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    output = ("--output", tmp_path / "d", "--workers", 0)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(preprocess_module, "_finish", full)
        text = wrong(capsys, tmp_path / "t.jsonl", *output, "--tokenizer", "bytes")
        assert "No space left" in text
    begin_again = "60 texts are tokenized already. Give the same {}, or begin again after: rm -r "
    begin_again += str(tmp_path / "d.partial")
    text = wrong(capsys, tmp_path / "t.jsonl", *output, "--tokenizer", "bpe")
    assert "tokenizer: is not what this output was begun with" in text
    assert begin_again.format("tokenizer") in text
    text = wrong(capsys, tmp_path / "t.jsonl", *output, "--tokenizer", "bytes", "--text-key", "x")
    assert "--text-key: is not what this output was begun with (text, now x)" in text
    (tmp_path / "u.jsonl").write_text("{}")
    more = (tmp_path / "t.jsonl", tmp_path / "u.jsonl", *output, "--tokenizer", "bytes")
    assert "(…/u.jsonl is new)".replace("…", str(tmp_path)) in wrong(capsys, *more)
    status = (tmp_path / "t.jsonl").stat()
    os.utime(tmp_path / "t.jsonl", ns=(0, status.st_mtime_ns + 10**9))
    text = wrong(capsys, tmp_path / "t.jsonl", *output, "--tokenizer", "bytes")
    assert "text: is not what this output was begun with" in text and "has changed" in text
    assert begin_again.format("text") in text
    os.utime(tmp_path / "t.jsonl", ns=(0, status.st_mtime_ns))
    assert run(tmp_path / "t.jsonl", *output, "--tokenizer", "bytes") == 0
    assert texts_of(tmp_path / "d") == TEXTS
    text = wrong(capsys, tmp_path / "t.jsonl", *output, "--tokenizer", "bytes")
    assert "is there already" in text


def test_a_tokenizer_that_changed_under_its_name_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.txt").write_text("some text")
    words = tmp_path / "own.json"
    command = (tmp_path / "t.txt", "--output", tmp_path / "d", "--workers", 0, "--tokenizer", words)
    byte_tokenizer().save(words)
    with monkeypatch.context() as patch:
        patch.setattr(preprocess_module, "_finish", mock.Mock(side_effect=OSError(28, "full")))
        assert "full" in wrong(capsys, *command)
    train_tokenizer(TEXTS, 300).save(words)
    assert "tokenizer: is not what this output was begun with" in wrong(capsys, *command)
    byte_tokenizer().save(words)
    assert run(*command) == 0


WRONG_FIRST = {
    "key": (["c.jsonl"], ["c.jsonl", "--text-key", "content"]),
    "file": (["broken.jsonl"], ["broken.jsonl"]),
    "other file": (["broken.jsonl"], ["good.jsonl"]),
    "kind": (["c.jsonl"], ["t.txt", "--document", "line"]),
    "tokenizer": (["c.jsonl", "--tokenizer", "bpe", "--vocab-size", "270"], ["good.jsonl"]),
    "folder": (["mixed"], ["mixed/good.jsonl"]),
    "empty": (["empty.jsonl"], ["good.jsonl"]),
}


@pytest.mark.parametrize("case", WRONG_FIRST)
def test_an_attempt_that_wrote_nothing_blocks_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    good = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    Path("mixed").mkdir()
    for name, content in (
        ("c.jsonl", '{"content": "a b c"}\n'), ("good.jsonl", good), ("t.txt", "one\ntwo\n"),
        ("broken.jsonl", good + '{"text": \n'), ("mixed/good.jsonl", good), ("mixed/a.md", "x"),
        ("empty.jsonl", '{"text": ""}\n'),
    ):  # fmt: skip
        Path(name).write_text(content)
    first, then = WRONG_FIRST[case]
    more = ("--output", "o", "--workers", 0)
    tokenizer = () if "--tokenizer" in first else ("--tokenizer", "bytes")
    wrong(capsys, *first, *more, *tokenizer)
    assert not Path("o.partial").exists()
    Path("broken.jsonl").write_text(good)
    assert run(*then, *more, "--tokenizer", "bytes") == 0
    assert len(texts_of(Path("o"))) == {"key": 1, "kind": 2}.get(case, len(TEXTS))


def test_a_preparation_that_was_killed_before_any_text_blocks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.txt").write_text("one\ntwo\n")
    command = (tmp_path / "t.txt", "--output", tmp_path / "o", "--workers", 0, "--tokenizer")
    with monkeypatch.context() as patch:
        patch.setattr(preprocess_module, "_encode_all", mock.Mock(side_effect=KeyboardInterrupt))
        assert run(*command, "bpe", "--vocab-size", 270) not in (0, 2)
    assert (tmp_path / "o.partial" / "progress.json").exists(), "the tokenizer is kept"
    assert run(*command, "bytes", "--document", "line") == 0
    assert texts_of(tmp_path / "o") == ["one", "two"]


@pytest.mark.parametrize("name", ["notes.txt", "tokens", ".progress.json.x/deep.txt"])
def test_a_folder_of_the_users_own_is_never_taken_for_a_preparation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "t.jsonl").write_text('{"content": "a b c"}\n')
    mine = tmp_path / "o.partial" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    for key in ("text", "content"):
        text = wrong(capsys, tmp_path / "t.jsonl", "--output", tmp_path / "o", "--tokenizer",
                     "bytes", "--text-key", key)  # fmt: skip
        assert "o.partial: folder: is not of a preparation: it has" in text
        assert mine.read_text() == "mine"


def test_an_output_that_is_there_is_not_replaced_after_a_failed_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.txt").write_text("one")
    command = (tmp_path / "t.txt", "--output", tmp_path / "o", "--tokenizer", "bytes")
    with monkeypatch.context() as patch:
        patch.setattr(preprocess_module, "_encode_all", mock.Mock(side_effect=KeyboardInterrupt))
        run(*command)
    (tmp_path / "o.bin").write_text("mine")
    assert "o.bin: output: is there already" in wrong(capsys, *command)
    assert (tmp_path / "o.bin").read_text() == "mine"


# ---- a user's mistakes


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--text-key", "nope"), "column 'nope': is not there; there are body, n"),
        (("--text-key", "n"), "column 'n': holds int"),
        (("--dataset", "x"), "must come either from files or from --dataset"),
        (("--split", "test"), "--split: has no effect: it is about datasets with splits"),
        (("--vocab-size", "300"), "--vocab-size: has no effect here"),
        (("--workers", "-1"), "--workers: is -1"),
    ],
)
def test_mistakes_are_named(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: Sequence[str], said: str
) -> None:
    text = wrong(capsys, corpus / "a.jsonl", "--output", tmp_path / "d", "--tokenizer", "bytes",
                 "--workers", 0, *more)  # fmt: skip
    assert said in text and "Traceback" not in text


def test_an_empty_name_is_not_this_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("not meant")
    assert "FILE: has an empty name" in wrong(capsys, "", "--output", "o", "--tokenizer", "bytes")


@pytest.mark.parametrize("name", ["bad.jsonl", "bad.parquet", "bad.txt", "none.txt", "odd.xyz"])
def test_files_that_are_not_what_they_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    if not name.startswith("none"):
        (tmp_path / name).write_bytes(b'{"text": "\xff\xfe" \x00 oops')
    text = wrong(capsys, tmp_path / name, "--output", tmp_path / "d", "--tokenizer", "bytes",
                 "--workers", 0)  # fmt: skip
    assert name in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b'{"text": "b', "a.jsonl: line 3: is not JSON (Unterminated string"),
        (b'{"text": "\xff"}', "a.jsonl: line 3: is not JSON ('utf-8' codec can't decode"),
        (rb'{"text": "\ud800"}', "a.jsonl: line 3: column 'text': holds half of a surrogate pair"),
        (None, "a.jsonl: file: is empty"),
    ],
)
def test_the_bad_line_of_a_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: bytes | None, said: str
) -> None:
    """Lines count from 1, and the libraries that read the file add nothing."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"" if bad is None else b'{"text": "a"}\n\n' + bad + b"\n")
    text = wrong(capsys, path, "--output", tmp_path / "d", "--tokenizer", "bytes", "--workers", 0)
    assert said in text
    assert "Failed to" not in text


def test_a_file_that_cannot_be_opened_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "texts" / "a.jsonl"
    path.parent.mkdir()
    path.write_text('{"text": "a"}\n')

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(TextSource, "_values", refuse)
    text = wrong(capsys, path.parent, "--output", tmp_path / "d", "--tokenizer", "bytes",
                 "--workers", 0)  # fmt: skip
    assert "cannot be read (PermissionError" in text and str(path) in text


def test_text_without_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    text = wrong(capsys, tmp_path / "t.jsonl", "--output", tmp_path / "d", "--tokenizer", "bytes",
                 "--workers", 0)  # fmt: skip
    assert "every document is empty" in text


# ---- index maps ahead


def test_index_builds_what_a_job_will_read(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from megafp8.data import index_maps

    monkeypatch.setattr(index_maps.IndexCache.__init__, "__defaults__", (0,))
    run(corpus, "--output", tmp_path / "d", "--tokenizer", "bytes", "--text-key", "body",
        "--workers", 0)  # fmt: skip
    job = (
        f"model.data.data_prefix={tmp_path / 'd'}", "model.encoder_seq_length=16",
        f"model.data.index_mapping_dir={tmp_path / 'maps'}", "model.seed=5", "trainer.max_steps=40",
    )  # fmt: skip
    assert run("index", *job) == 0
    said = capsys.readouterr().out
    maps = [path for path in (tmp_path / "maps").iterdir() if path.is_dir()]
    epochs = [path for path in maps if path.name.startswith("epoch")]
    number = f"{len(epochs)} epoch" + "s" * (len(epochs) != 1)
    assert f"index maps are complete: {number} for 320 samples" in said and epochs
    assert run("index", *job) == 0
    assert "computed" not in capsys.readouterr().out
    assert run("index", f"model.data.data_prefix={tmp_path / 'nope'}") == 2
    assert "nope.idx" in capsys.readouterr().err


def test_sources_describe_themselves(corpus: Path) -> None:
    source = TextSource(files=(corpus,), text_key="body")
    assert len(source.describe()["files"]) == 3 and source.num_bytes() is None
    assert list(source.texts()) == TEXTS
    for skip in (0, 1, 29, 30, 31, 55, 60, 61):
        assert list(source.texts(skip)) == TEXTS[skip:]
    assert TextSource(files=(corpus / "a.jsonl",)).num_bytes() == (
        (corpus / "a.jsonl").stat().st_size
    )


def test_bytes_are_bytes() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab_size == 257
    assert len(tokenizer.encode("aü🐍")) == 1 + 2 + 4
    assert np.unique(tokenizer.encode("abc")).size == 3 and idx_path(Path("a")).name == "a.idx"


def test_it_starts_without_torch_and_the_configuration(corpus: Path) -> None:
    """Each worker imports the command, and importing torch takes seconds."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "import megafp8.cli.preprocess as command\n"
        "source = command.TextSource(files=(Path(sys.argv[1]),), text_key='body')\n"
        "assert len(list(source.texts())) == 30\n"
        "assert 'USE_TORCH' not in os.environ\n"
        "print(sorted({'torch', 'hydra', 'omegaconf'} & set(sys.modules)))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "USE_TORCH"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(corpus / "a.jsonl")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout == "[]\n", done.stderr


def test_another_end_of_a_document_is_named_or_recorded(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rust = json.loads(words_of_bytes(tmp_path).read_text())
    own = tmp_path / "own.json"
    own.write_text(json.dumps(rust).replace("<|endoftext|>", "</s>"))
    text = (corpus / "a.jsonl", "--text-key", "body", "--workers", 0)
    message = wrong(capsys, *text, "--output", tmp_path / "x", "--tokenizer", own)
    assert "its special tokens: </s>" in message and "--end-of-document" in message
    first, second = tmp_path / "first", tmp_path / "second"
    end = ("--end-of-document", "</s>")
    assert run(*text, "--output", first, "--tokenizer", own, *end) == 0
    # A second dataset with the first one's tokenizer ends its documents likewise.
    words = tmp_path / "first.tokenizer.json"
    assert run(*text, "--output", second, "--tokenizer", words) == 0
    assert bin_path(first).read_bytes() == bin_path(second).read_bytes()
    assert texts_of(second) == [text for text in TEXTS[:30] if text]


def words_of_bytes(folder: Path) -> Path:
    path = folder / "bytes.json"
    byte_tokenizer().save(path)
    return path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "are required: --tokenizer"),
        (["--tokenizer", "bytes", "--vocabsize", "3"], "Did you mean --vocab-size?"),
    ],
)
def test_options_that_cannot_be_read_are_one_line(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["a.txt", "--output", "o", *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: options (command line): ") and said in error
    assert error.count("\n") == 1
