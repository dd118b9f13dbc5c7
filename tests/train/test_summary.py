"""Baselines against plain arithmetic and against the `xz` program."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megafp8.data.indexed import IndexedDataset
from megafp8.data.prepare import prepare
from megafp8.jobs.job import Job, result_of
from megafp8.observe.units import format_count
from megafp8.report.page import typical_speed
from megafp8.report.record import read_run, typical
from megafp8.train.report.summary import unigram_bits_per_byte, xz_bits_per_byte
from tests.config.helpers import run_spec
from tests.data.helpers import write_dataset
from tests.train.runs import Finetuning, Place


@pytest.mark.parametrize("seed", range(4))
def test_unigram_equals_its_plain_specification(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 40))
    train = rng.integers(0, max(vocab - 3, 1), 200)  # the last tokens are never seen
    validation = rng.integers(0, vocab, 100)
    bits = 0.0
    for token in validation.tolist():
        seen = sum(1 for other in train.tolist() if other == token)
        bits -= math.log2((seen + 1) / (len(train) + vocab))
    got = unigram_bits_per_byte(np.bincount(train, minlength=vocab), validation, 333, vocab)
    assert got == pytest.approx(bits / 333, rel=1e-12)


def test_unigram_of_equal_counts_is_the_size_of_the_alphabet() -> None:
    counts = np.full(256, 10)
    assert unigram_bits_per_byte(counts, np.arange(256), 256, 256) == pytest.approx(8.0)


def test_xz_equals_the_program() -> None:
    text = "".join(f"line {i * i} of some text\n" for i in range(5000)).encode()
    got = xz_bits_per_byte(text)
    if got is None:
        pytest.skip("this Python has no lzma")
    assert 0 < got < 8
    if shutil.which("xz") is None:
        pytest.skip("no xz program to compare with")
    out = subprocess.run(["xz", "-9", "-c"], input=text, capture_output=True, check=True).stdout
    # Newer programs compress in threads by default, which adds a few bytes of block headers.
    assert abs(got * len(text) / 8 - len(out)) <= 32


def test_a_run_has_the_unigram_of_the_batches_that_it_validated(place: Place) -> None:
    """Two batches of 4 samples of 32 tokens, evenly spread over the whole samples of the text."""
    words = ("trainer.max_steps=3", "trainer.limit_val_batches=2")
    assert place.run(*words).code == 0
    summary = place.summary()
    opened = prepare(run_spec(*place.argv(*words)).data, print)
    tokens = opened.validation_tokens().tolist()  # the token before the first is not in the list
    num_samples = len(tokens) // 32
    begins = [32 * (n * num_samples // 8) for n in range(8)]
    targets = [token for begin in begins for token in tokens[begin : begin + 32]]
    counts, vocab = opened.train_token_counts(), opened.vocab_size
    seen = float(counts.sum())
    bits = -sum(math.log2((int(counts[token]) + 1) / (seen + vocab)) for token in targets)
    expected = bits / len(targets) / summary["bytes_per_token"]
    assert summary["unigram_bits_per_byte"] == pytest.approx(expected, rel=1e-9)
    assert summary["val_bits_per_byte"] > expected, "three steps learn nothing"


def test_the_speed_of_a_run_is_one_figure_wherever_it_is_shown(place: Place) -> None:
    """The summary, from which tables of sweeps are made, has the page's median of logged steps."""
    done = place.run("trainer.max_steps=6", "trainer.limit_val_batches=0")
    assert done.code == 0
    run, summary = read_run(place.dir()), place.summary()
    lines = [line["tokens_per_second"] for line in run.metrics]
    assert summary["tokens_per_second"] == statistics.median(lines[1:]) == typical_speed(run)
    assert f"{format_count(summary['tokens_per_second'])} tokens/s" in done.output
    for key in ("mfu_causal", "tflops_full"):
        assert summary[key] == typical(run.metrics, key)
    job = Job(num=0, overrides=(), directory=place.dir())
    assert result_of(job, 0).tokens_per_second == typical_speed(run)


def test_a_run_says_what_it_reads_and_how_often(place: Place, dataset: Path) -> None:
    """In its header, its summary and its page, also when it continues."""
    small = place.cwd / "small"
    first = IndexedDataset(dataset)
    write_dataset(small, [first.document(number).tolist() for number in range(8)])
    shutil.copy(f"{dataset}.tokenizer.json", f"{small}.tokenizer.json")
    windows = IndexedDataset(small).num_tokens // 32
    prefix = f"model.data.data_prefix={{train:[0.5,{dataset},0.5,{small}],validation:[{dataset}]}}"
    said = f"data: {dataset}: the validation loss is of documents that are trained on"
    for steps in (4, 8):
        done = place.run(prefix, f"trainer.max_steps={steps}")
        assert done.code == 0, done.output
        line = f"{small} {steps * 4 / 2 / windows:.3g}, {dataset} "
        assert f"epochs until step {steps}: {line}" in done.output
        assert f"warning: {said}" in done.output and done.output.count(said) >= 2
        summary = place.summary()
        assert summary["epochs"].startswith(line) and summary["data_warnings"] == said
        page = (place.dir() / "report.html").read_text()
        assert f"epochs of the training data: {line}" in page
        assert f"<p class=lead>{said}</p>" in page


def test_a_run_without_validation_documents(place: Place) -> None:
    """Every document trains, as in NeMo with 100,0,0 and no validation batches."""
    words = ("model.data.splits_string='100,0,0'", "trainer.max_steps=4")
    refused = place.run(*words)
    assert refused.code == 2 and "leaves no document to validate on" in refused.output
    done = place.run(*words, "trainer.limit_val_batches=0")
    assert done.code == 0, done.output
    tokens = IndexedDataset(place.data).num_tokens
    assert f"data: {tokens} training tokens, 0 validation tokens" in done.output
    summary = place.summary()
    assert summary["val_loss"] is None and summary["step"] == 4
    (samples,) = (place.dir() / "samples.jsonl").read_text().splitlines()[-1:]
    assert json.loads(samples)["prompt"]
    done = place.run(*words, "trainer.limit_val_batches=0", "trainer.max_steps=6")
    assert done.code == 0 and place.summary()["step"] == 6, done.output


def test_examples_that_are_trained_and_validated_on_are_said(tuning: Finetuning) -> None:
    copied = tuning.cwd / "copied.jsonl"
    shutil.copy(tuning.cwd / "mine.jsonl", copied)
    done = tuning.run(
        f"restore_from_path={tuning.data}", f"model.data.validation_ds.file_names={copied}",
        "trainer.max_steps=2", "trainer.val_check_interval=2",
    )  # fmt: skip
    assert done.code == 0, done.output
    said = f"data: {copied}: the validation loss is of documents that are trained on"
    assert f"warning: {said}" in done.output and tuning.summary()["data_warnings"] == said
