"""Open the data of a run: text for pretraining, or questions and answers for fine-tuning."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megafp8.config.errors import SettingError
from megafp8.data.instructions import PreparedInstructions, prepare_instructions
from megafp8.data.loader import DocumentRules
from megafp8.data.named_tokenizers import configured_tokenizer
from megafp8.data.prepare import prepare
from megafp8.data.samples import FiniteSource, SampleSource
from megafp8.data.tokenize import Tokenizer
from megafp8.errors import DataError, RunError, UserError
from megafp8.parallel.agreement import on_all, raise_on_all
from megafp8.parallel.mesh import Mesh
from megafp8.runs.find import CHECKPOINTS_DIR
from megafp8.runs.tokenizer import find_tokenizer
from megafp8.specs import DataSpec
from megafp8.specs.data import SeparateSplits


class RunData(Protocol):
    """Describes what a run reads of its data; `megafp8.data.prepare.PreparedData` explains it."""

    @property
    def train(self) -> SampleSource:
        """Return the endless training stream."""
        ...

    @property
    def validation(self) -> FiniteSource:
        """Return the samples of a run's last validation."""
        ...

    @property
    def periodic_validation(self) -> FiniteSource:
        """Return the samples that validation during training draws from."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of all the data."""
        ...

    @property
    def vocab_size(self) -> int:
        """Return the tokenizer's vocabulary size, before padding."""
        ...

    @property
    def fingerprint(self) -> str:
        """Return a hash of the data's content, without paths and times."""
        ...

    @property
    def rules(self) -> DocumentRules | None:
        """Return the rules for the ends of documents; None applies none."""
        ...

    @property
    def num_train_tokens(self) -> int:
        """Return the tokens that an epoch of training predicts."""
        ...

    @property
    def num_validation_tokens(self) -> int:
        """Return the tokens of the validation split."""
        ...

    @property
    def num_final_tokens(self) -> int:
        """Return the tokens that a run's last validation predicts."""
        ...

    def validation_tokens(self) -> NDArray[np.int64]:
        """Return the tokens that the last validation predicts, in order."""
        ...

    def validation_text(self) -> bytes:
        """Return the text of these tokens, without the ends of documents."""
        ...

    def validation_prompt(self, num_tokens: int) -> list[int]:
        """Return at most `num_tokens` tokens that a sample of the model's text continues."""
        ...

    def train_token_counts(self) -> NDArray[np.int64]:
        """Return how often each token is predicted in training, [vocab_size]."""
        ...


def open_data(spec: DataSpec, notify: Callable[[str], None]) -> RunData:
    """Open what `spec` names.

    Args:
        spec: What to open, how to split it and how to cut it into samples.
        notify: Receives a line about each thing that takes time, or that the user should know.

    Raises:
        DataError: Files are missing or damaged, or too small.
        ConfigError: A tokenizer lacks a setting.
    """
    if spec.instructions is None:
        return prepare(spec, notify)
    files = (*spec.instructions.train_files, *spec.instructions.validation_files)
    prepared, lines = _instructions(spec, tuple(map(_state_of, files)))
    for line in lines:
        notify(line)
    return prepared


def open_on_all(spec: DataSpec, mesh: Mesh, notify: Callable[[str], None]) -> RunData:
    """Open what `spec` names on every rank, and check that all ranks have the same data.

    Replicas on other hosts may read copies of their own, of which one may be older. All ranks call
    it together; arguments are those of `open_data`.

    Raises:
        UserError: What `open_data` raised on the lowest rank that failed, on every rank.
        SettingError: Ranks have different data; on every rank.
    """
    opened: list[RunData] = []

    def open_here() -> tuple[str, str]:
        here = socket.gethostname()
        try:
            opened.append(open_data(spec, notify))
        except UserError as error:
            if mesh.is_main:
                raise  # the main rank prints its own error, and others may have the same
            raise RunError(f"rank {mesh.world.rank} on {here}: {error}") from error
        return here, opened[0].fingerprint

    found = on_all(mesh, open_here)
    if len({fingerprint for _, fingerprint in found}) > 1:
        key, value = _named_by(spec)
        raise_on_all(
            SettingError(
                key,
                value,
                f"ranks have different data under this name: {describe_fingerprints(found)}",
                "Give every host the same files, or one copy that all hosts read",
            )
        )
    return opened[0]


def describe_fingerprints(found: Sequence[tuple[str, str]]) -> str:
    """Return which ranks have which data, for messages.

    Args:
        found: The host and the fingerprint of every rank, by rank.
    """
    ranks_of: dict[str, dict[str, list[int]]] = {}
    for rank, (host, fingerprint) in enumerate(found):
        ranks_of.setdefault(fingerprint, {}).setdefault(host, []).append(rank)
    parts = []
    for fingerprint, hosts in ranks_of.items():
        named = [f"{_ranks(ranks)} on {host}" for host, ranks in hosts.items()]
        more = f" and {len(named) - _HOSTS_SHOWN} more hosts" if named[_HOSTS_SHOWN:] else ""
        listed = ", ".join(named[:_HOSTS_SHOWN])
        parts.append(f"fingerprint {fingerprint[:_CHARACTERS_SHOWN]} has {listed}{more}")
    return "; ".join(parts)


_HOSTS_SHOWN = 4
_CHARACTERS_SHOWN = 20  # some fingerprints begin with `sampled:`


def _ranks(ranks: Sequence[int]) -> str:
    """Return the ranks of a host in words; a launcher gives a host consecutive ones."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    is_range = ranks[-1] - ranks[0] == len(ranks) - 1
    listed = f"{ranks[0]} to {ranks[-1]}" if is_range else ", ".join(map(str, ranks))
    return f"ranks {listed}"


def _named_by(spec: DataSpec) -> tuple[str, str]:
    """Return the key that names the data, and its value in words."""
    if spec.instructions is not None:
        return "model.data.train_ds.file_names", ", ".join(spec.instructions.train_files)
    blend = spec.prefix
    if isinstance(blend, SeparateSplits):
        blend = (*blend.train, *blend.validation, *blend.test)
    names = (blend,) if isinstance(blend, str) else [part.prefix for part in blend or ()]
    return "model.data.data_prefix", ", ".join(names)


def _state_of(file: str) -> tuple[int, int] | None:
    """Return the time of a file's last change and its size; None if there is no such file."""
    try:
        found = Path(file).expanduser().stat()
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
    tokenizer = configured_tokenizer(spec.tokenizer) or _of_model(Path(spec.instructions.model))
    lines: list[str] = []
    return prepare_instructions(spec, tokenizer, lines.append), tuple(lines)


def _of_model(path: Path) -> Tokenizer:
    """Return the tokenizer of a run, of one of its checkpoints, or of an imported model."""
    path = path.expanduser().absolute()
    home = path.parents[1] if path.parent.name == CHECKPOINTS_DIR else path
    for folder in dict.fromkeys((path, home)):
        if folder.is_dir() and (found := find_tokenizer(folder)) is not None:
            return found
    raise DataError(
        path,
        "tokenizer",
        "is missing",
        "Copy the model's tokenizer.json and tokenizer_config.json there, or name it by "
        "model.tokenizer",
    )
