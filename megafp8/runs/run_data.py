"""Open the data of a run: text for pretraining, or questions and answers for fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

from megafp8.data.blend import BlendedSamples
from megafp8.data.dataset import record_file
from megafp8.data.indexed import dataset_path, require_files
from megafp8.data.instructions import PreparedInstructions, prepare_instructions
from megafp8.data.mock import MockData, open_mock
from megafp8.data.named_tokenizers import configured_tokenizer
from megafp8.data.prepare import PreparedData, prepare
from megafp8.data.samples import FiniteSource, SampleSource
from megafp8.data.tokenize import Tokenizer
from megafp8.errors import DataError
from megafp8.files import expanded
from megafp8.runs.tokenizer import chat_of, find_tokenizer, home_of_model
from megafp8.specs import DataSpec
from megafp8.specs.data import BUILTIN_CORPUS, MOCK_DATA, SeparateSplits

_DATASETS_SHOWN = 6


RunData = PreparedData | PreparedInstructions | MockData
"""What a run reads of its data; `megafp8.data.prepare.PreparedData` explains it."""


def warnings_of(spec: DataSpec, data: RunData) -> list[str]:
    """Return lines about documents that are read in a way that is seldom meant.

    Copies are noticed by their content, whatever their names are.
    """
    lines: list[str] = []
    shared: Sequence[str] = ()
    if spec.instructions is not None:
        trained = {_content_of(file) for file in spec.instructions.train_files}
        validated = spec.instructions.validation_files
        shared = [file for file in validated if _content_of(file) in trained]
    elif isinstance(data, PreparedData):
        shared = data.validated_in_training
        for one, other in data.repeated:
            same = f"data: {one} and {other} have the same tokens"
            lines.append(f"{same}: each of their samples comes twice")
    if shared:
        names = ", ".join(shared)
        lines.append(f"data: {names}: the validation loss is of documents that are trained on")
    return lines


def _content_of(file: str) -> str:
    """Return a hash of a file of examples; of what is no file, its name."""
    path = expanded(file)
    return record_file(path).sha256 if path.is_file() else file


def epochs_of(data: RunData, num_samples: int) -> str | None:
    """Return in words how often `num_samples` samples read each dataset; None if it has no such."""
    read = data.epochs(num_samples) if isinstance(data, PreparedData) else []
    shown = [f"{name} {epochs:.3g}" for name, epochs in read[:_DATASETS_SHOWN]]
    if rest := read[_DATASETS_SHOWN:]:
        shown.append(f"{len(rest)} others {rest[-1][1]:.3g} to {rest[0][1]:.3g}")
    return ", ".join(shown) or None


def check_data(spec: DataSpec) -> None:
    """Raise the errors of data that are found soon, before torch is imported and ranks start.

    Files of questions and answers are read; of a dataset's files only the existence is checked.

    Raises:
        UserError: A file or one of its examples cannot be used.
    """
    if spec.instructions is not None:
        open_data(spec, lambda line: None)
        return
    for prefix in prefixes_of(spec):
        if prefix not in (BUILTIN_CORPUS, MOCK_DATA):
            require_files(dataset_path(prefix))


def prefixes_of(spec: DataSpec) -> list[str]:
    """Return the prefixes of all datasets that the specification names."""
    blend = spec.prefix
    if isinstance(blend, SeparateSplits):
        blend = (*blend.train, *blend.validation, *blend.test)
    return [blend] if isinstance(blend, str) else [part.prefix for part in blend or ()]


def open_data(spec: DataSpec, notify: Callable[[str], None]) -> RunData:
    """Open what `spec` names.

    Args:
        spec: What to open, how to split it and how to cut it into samples.
        notify: Receives a line about each thing that takes time, or that the user should know.

    Raises:
        DataError: Files are missing or damaged, or too small.
        ConfigError: A tokenizer lacks a setting.
    """
    if spec.prefix == MOCK_DATA:
        return open_mock(spec, notify)
    if spec.instructions is None:
        return prepare(spec, notify)
    files = (*spec.instructions.train_files, *spec.instructions.validation_files)
    prepared, lines = _instructions(spec, tuple(map(_state_of, files)))
    for line in lines:
        notify(line)
    return prepared


def refuse_tokens_beyond(data: RunData, rows: int) -> None:
    """Raise if a text has a token that the model has no row for.

    Every sample is read, where the tokenizer has more tokens than there are rows.

    Raises:
        DataError: Some text has such a token.
    """
    if data.vocab_size <= rows:
        return
    trained = data.train.sources if isinstance(data.train, BlendedSamples) else [data.train]
    parts: list[tuple[SampleSource | FiniteSource, int]] = [
        *((source, source.num_samples_per_epoch) for source in trained),
        (data.validation, data.validation.num_samples),
    ]
    for source, count in parts:
        for index in range(count):
            token = int(source[index].max())
            if token >= rows:
                raise DataError(
                    "the data",
                    f"token {token}",
                    f"{data.tokenizer.decode([token])!r} stands in a text, and the model has "
                    f"{rows} rows, the last of them for token {rows - 1}",
                    "Leave it out of the texts, or prepare them with a tokenizer without it",
                )


def _state_of(file: str) -> tuple[int, int] | None:
    """Return the time of a file's last change and its size; None if there is no such file."""
    try:
        found = expanded(file).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=1)
def _instructions(
    spec: DataSpec, files: tuple[tuple[int, int] | None, ...]
) -> tuple[PreparedInstructions, tuple[str, ...]]:
    """Return prepared questions and answers, and lines about them.

    They are kept, since the command checks them before the run opens them; `files` says when their
    files were last changed, so that changed files are read again.
    """
    assert spec.instructions is not None
    model = home_of_model(spec.instructions.model)
    tokenizer = configured_tokenizer(spec.tokenizer) or _of_model(model)
    named = spec.tokenizer.type if spec.tokenizer.library == "huggingface" else None
    home = Path(named) if named is not None and Path(named).is_dir() else model
    chat = None if spec.instructions.chat is False else lru_cache(partial(chat_of, home, tokenizer))
    lines: list[str] = []
    return prepare_instructions(spec, tokenizer, lines.append, chat), tuple(lines)


def _of_model(home: Path) -> Tokenizer:
    """Return the tokenizer of a run or of an imported model."""
    found = find_tokenizer(home) if home.is_dir() else None
    if found is not None:
        return found
    raise DataError(
        home,
        "tokenizer",
        "is missing",
        "Copy the model's tokenizer.json and tokenizer_config.json there, or name it by "
        "model.tokenizer",
    )
