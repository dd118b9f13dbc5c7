"""Make an indexed dataset and its tokenizer from text.

megafp8 preprocess FILE... --output PREFIX --tokenizer TOKENIZER
megafp8 preprocess --dataset NAME --output PREFIX --tokenizer TOKENIZER
megafp8 preprocess index KEY=VALUE...   (build the index maps of a job in advance)
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.cli.commands import run_old_name
from megafp8.data.dataset import Sidecar, end_of_document_beside, record_file
from megafp8.data.library_tokenizers import load_sentencepiece
from megafp8.data.long_texts import parts_to_train_on
from megafp8.data.named_tokenizers import (
    TOKENIZER_CONFIG,
    huggingface_tokenizer,
    load_folder,
    load_tokenizer,
    tiktoken_tokenizer,
)
from megafp8.data.preprocess import Counts, preprocess
from megafp8.data.text_sources import TextSource, first_texts, paths_of
from megafp8.data.tokenize import (
    END_OF_DOCUMENT,
    JSON_FILE,
    MAX_VOCABULARY,
    Tokenizer,
    byte_tokenizer,
    train_tokenizer,
)
from megafp8.errors import DataError, ExitCode
from megafp8.files import expanded
from megafp8.runs.tokenizer import (
    KEPT,
    beside_data,
    keep_files,
    refuse_secrets_in_files,
)
from megafp8.secrets import say

if TYPE_CHECKING:  # every worker imports this module, so it must not import these slow ones
    from megafp8.cli.job import AppInfo
    from megafp8.config.load import Loaded

SECONDS_BETWEEN_LINES = 10.0
_RANGES = (("workers", 0, 1024), ("vocab_size", 257, MAX_VOCABULARY), ("train_megabytes", 1, 10**6))
CHOICES = (
    "bpe (trained on the text itself), bytes, a tokenizer.json, hf:NAME_OR_FOLDER, "
    "sentencepiece:FILE, tiktoken:NAME_OR_FILE"
)


def main(argv: Sequence[str]) -> int:
    """Prepare text, or with `index` a job's index maps; return the exit code."""
    if argv and argv[0] == "index":
        from megafp8.cli.main import run_app

        return run_app(argv[1:], _index, prog="megafp8 preprocess index")
    from megafp8.cli.job import reports_errors

    return reports_errors(_main)(argv)


def _main(argv: Sequence[str]) -> int:
    try:
        options = _parser().parse_args(argv)
        sidecar = _preprocess(options)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return int(ExitCode.SAVED_ON_SIGNAL)
    _print_result(sidecar, options.output)
    return ExitCode.FINISHED


def _parser() -> argparse.ArgumentParser:
    from megafp8.cli.job import command_parser, new_file

    parser = command_parser("preprocess", __doc__)
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE",
        help="a text, JSONL, CSV, Parquet or Arrow file, or a folder of such files")  # fmt: skip
    add("--dataset", metavar="NAME",
        help="instead of files: a dataset of the Hugging Face Hub, or its folder")  # fmt: skip
    add("--config", metavar="NAME", help="configuration of --dataset, if it has several")
    add("--split", help="split of --dataset, or of a DatasetDict that was saved (train)")
    add("--text-key", metavar="NAME",
        help="the column that holds the text (text); a.b is the field b of a")  # fmt: skip
    add("--document", choices=("file", "paragraph", "line"),
        help="which part of a plain text file is a document (file)")  # fmt: skip
    add("--output", type=new_file, required=True, metavar="PREFIX",
        help="path of the dataset, without .bin and .idx")  # fmt: skip
    add("--tokenizer", required=True, help=CHOICES)
    add("--vocab-size", type=int, metavar="N", help="vocabulary of bpe (32768)")
    add("--train-megabytes", type=int, metavar="N",
        help="megabytes from the beginning of the text that train bpe (256)")  # fmt: skip
    add("--end-of-document", metavar="TOKEN", help="the token that ends a document")
    for name, what in (
        ("bos", "begin each document with the token that begins a text (as the tokenizer does)"),
        ("eos", "end each with the token that ends one (yes)"),
    ):
        add(f"--add-{name}", action=argparse.BooleanOptionalAction, help=what)
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N",
        help="processes that encode; 0: threads of this process (%(default)s)")  # fmt: skip
    return parser


def _preprocess(options: argparse.Namespace) -> Sidecar:
    """Write the dataset that the options ask for, and keep its tokenizer's files for exports.

    Raises:
        UserError: An option has no effect or does not fit the texts, or a file cannot be read.
    """
    _check(options)
    source = TextSource(
        files=paths_of(options.files),
        dataset=options.dataset,
        config=options.config,
        split=options.split or "train",
        text_key=options.text_key or "text",
        document=options.document or "file",
    )
    _check_kinds(options, source.kinds(), source.has_splits)
    for line in source.notes():
        say(line)
    vocab_size = options.vocab_size or 32768
    megabytes = options.train_megabytes or 256
    make = choose_tokenizer(
        options.tokenizer,
        options.end_of_document,
        vocab_size=vocab_size,
        texts_to_train_on=lambda: _texts_to_train_on(source, megabytes),
    )
    name = f"{options.tokenizer} {options.end_of_document}{_state_of(options.tokenizer)}"
    if options.tokenizer == "bpe":  # which is trained on this text
        name += f" {vocab_size} {megabytes}"
    for option, given in (("bos", options.add_bos), ("eos", options.add_eos)):
        name += "" if given is None else f" add_{option}={given}"
    model, output = model_folder(options.tokenizer), expanded(options.output)
    if model is not None:
        refuse_secrets_in_files(model)
        if os.path.lexists(kept_in := beside_data(output)):
            hint = "Give another --output, or delete it"
            raise DataError(kept_in, "output", "is there already", hint)
    with _Bar(source.num_bytes()) as bar:
        sidecar = preprocess(
            source,
            output,
            tokenizer_name=name,
            make_tokenizer=make,
            workers=options.workers,
            on_progress=bar.show,
            notify=say,
            add_bos=options.add_bos,
            add_eos=options.add_eos,
        )
    if model is not None:
        words = output.with_name(sidecar.files[2].name)
        made = load_tokenizer(words, sidecar.end_of_document)
        kept = keep_files(model, beside_data(output), made)
        say(f"kept for exports, in {beside_data(output)}: {', '.join(kept)}")
    return sidecar


def model_folder(tokenizer: str) -> Path | None:
    """Return the folder of a model that `--tokenizer` names, whose other files runs keep.

    None: it names no folder on this machine.
    """
    kind, _, rest = tokenizer.partition(":")
    file = Path(tokenizer)
    folder = None
    if kind == "hf" and Path(rest).is_dir():
        folder = Path(rest)
    elif file.name == JSON_FILE and (file.parent / TOKENIZER_CONFIG).is_file():
        folder = file.parent
    elif file.name.endswith(f".{JSON_FILE}"):  # of a dataset, which may have kept the files
        kept = beside_data(file.with_name(file.name.removesuffix(f".{JSON_FILE}")))
        return kept if kept.is_dir() else None
    if folder is not None and (folder / KEPT).is_dir():  # a run, whose own file is the least of it
        return folder / KEPT
    return folder


def _state_of(tokenizer: str) -> str:
    """Return a hash of the files that `--tokenizer` names on this machine; nothing if it is none.

    So a preparation never continues with another tokenizer under the same name.
    """
    path = Path(tokenizer.partition(":")[2] or tokenizer)
    names = ("*token*", "vocab*", "merges.txt", "*.model")
    files = sorted({f for name in names for f in path.glob(name)}) if path.is_dir() else [path]
    records = [record_file(file).sha256 for file in files if file.is_file()]
    return f" {hashlib.sha256(' '.join(records).encode()).hexdigest()[:12]}" if records else ""


def _texts_to_train_on(source: TextSource, megabytes: int) -> Iterator[str]:
    say(f"the tokenizer is trained on at most {megabytes} MB of the text")
    texts = first_texts(source.texts(), megabytes * 1_000_000)
    return (part for text in texts for part in parts_to_train_on(text))


def _check(options: argparse.Namespace) -> None:
    """Raise `DataError` for options that contradict each other or have no effect."""
    if bool(options.files) == bool(options.dataset):
        raise DataError(
            "preprocess",
            "text",
            "must come either from files or from --dataset",
            "Give one of the two",
        )
    needs = {
        "config": bool(options.dataset),
        "document": bool(options.files),
        "vocab_size": options.tokenizer == "bpe",
        "train_megabytes": options.tokenizer == "bpe",
    }
    for name, has_meaning in needs.items():
        if getattr(options, name) is not None and not has_meaning:
            option = "--" + name.replace("_", "-")
            raise DataError("preprocess", option, "has no effect here", "Leave it out")
    for name, least, most in _RANGES:
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            option, hint = "--" + name.replace("_", "-"), f"Give from {least} to {most}"
            raise DataError("preprocess", option, f"is {value}", hint)


def _check_kinds(options: argparse.Namespace, kinds: Collection[str], has_splits: bool) -> None:
    """Raise `DataError` for an option that none of the inputs reads.

    `kinds` are those of the given files, and `has_splits` says that one is a dataset with splits.
    """
    by_name = bool(options.dataset) and not kinds  # the library `datasets` loads it from its hub
    for name, reads, what in (("document", "text" in kinds, "plain text files"),
                              ("text_key", {*kinds} != {"text"}, "files of records"),
                              ("split", by_name or has_splits, "datasets with splits"),
                              ("config", by_name, "datasets that are not saved")):  # fmt: skip
        if getattr(options, name) is not None and not reads:
            option, reason = "--" + name.replace("_", "-"), f"has no effect: it is about {what}"
            raise DataError("preprocess", option, reason, "Leave it out")


def _print_result(sidecar: Sidecar, prefix: Path) -> None:
    say(
        f"{sidecar.num_documents} documents, {sidecar.num_bytes / 1e6:.1f} MB of text, "
        f"{sidecar.num_tokens} tokens, vocabulary {sidecar.vocab_size}: {prefix}"
    )
    if sidecar.num_documents == 1:
        say(
            "note: one document cannot be divided into training and validation data; "
            "--document paragraph or line divides a plain text into more"
        )
    say(f"train on it with: megafp8 pretrain model.data.data_prefix={prefix}")


class _Bar:
    """Show progress: a bar on a terminal, otherwise a line every `SECONDS_BETWEEN_LINES`."""

    def __init__(self, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._on_terminal = console.is_terminal
        self._task = self._progress.add_task("", total=total, rate="")
        self._first: tuple[float, int] | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, counts: Counts) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, counts.num_bytes)
        seconds, done = now - self._first[0], counts.num_bytes - self._first[1]
        rate = f"{done / 1e6 / seconds:.1f} MB/s" if seconds > 0 else ""
        text = f"{counts.num_documents} documents, {counts.num_tokens} tokens"
        if self._on_terminal:
            self._progress.update(
                self._task, completed=counts.num_bytes, description=text, rate=rate
            )
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"{text}, {counts.num_bytes / 1e6:.0f} MB, {rate}", file=sys.stderr, flush=True)


def _index(loaded: Loaded, info: AppInfo) -> int:
    """Build the index maps of the epochs that a job will read; return the exit code."""
    from megafp8.config.resolve import resolve
    from megafp8.data.prepare import build_index_maps, prepare

    spec = resolve(loaded.values, lambda: True)  # no device is used here
    data = prepare(spec.data, say)
    num_samples = spec.train.max_steps * spec.train.global_batch_size
    num_epochs = build_index_maps(data, num_samples)
    epochs = "1 epoch" if num_epochs == 1 else f"{num_epochs} epochs"
    say(f"index maps are complete: {epochs} for {num_samples} samples")
    return ExitCode.FINISHED


def choose_tokenizer(
    name: str,
    end_of_document: str | None,
    *,
    vocab_size: int,
    texts_to_train_on: Callable[[], Iterator[str]],
) -> Callable[[], Tokenizer]:
    """Return a function that makes the tokenizer that `name` names.

    Args:
        name: One of `CHOICES`.
        end_of_document: The token that ends a document; None means the tokenizer's own.
        vocab_size: The vocabulary size of a tokenizer that is trained.
        texts_to_train_on: Returns the texts; called only for a tokenizer that is trained.

    Raises:
        DataError: `name` is unknown, or the end of a document cannot be chosen for it.
    """
    kind, colon, rest = name.partition(":")
    if not colon and name.endswith(".json"):
        path = Path(name)
        return lambda: load_folder(path, end_of_document or _recorded_end(path))
    if not colon and name.endswith(".model"):
        kind, rest = "sentencepiece", name
    if not colon and name.endswith(".tiktoken"):
        kind, rest = "tiktoken", name
    if kind == "hf" and rest:
        return lambda: huggingface_tokenizer(rest, end_of_document)
    if kind == "sentencepiece" and rest:
        return lambda: load_sentencepiece(Path(rest), end_of_document)
    if end_of_document not in (None, END_OF_DOCUMENT):
        raise DataError(
            name,
            "end of a document",
            f"is {END_OF_DOCUMENT} with this tokenizer, not {end_of_document}",
            "Leave out --end-of-document",
        )
    if kind == "tiktoken" and rest:
        return lambda: tiktoken_tokenizer(rest)
    if name == "bytes":
        return byte_tokenizer
    if name == "bpe":
        return lambda: train_tokenizer(texts_to_train_on(), vocab_size)
    raise DataError(name, "tokenizer", "is not known", f"Give one of: {CHOICES}")


def _recorded_end(words: Path) -> str | None:
    """Return the end of a document that is recorded beside the tokenizer's file of a dataset."""
    if not words.name.endswith(JSON_FILE):
        return None
    return end_of_document_beside(words.with_name(words.name.removesuffix(f".{JSON_FILE}")))


if __name__ == "__main__":
    run_old_name("preprocess")
