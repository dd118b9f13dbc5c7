"""Say for each script or YAML of Megatron's in folders what `megafp8 migrate` makes of it.

python -m scripts.foreign_files FOLDER [...]

A file loads as it is; or after decisions, about values that the file does not have (data, ranks,
arguments of the script) or settings that a run can do without; or it is refused, since it asks for
a model that megafp8 does not have. A file of Megatron Bridge's overrides needs its recipe, which is
code.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megafp8.config.errors import SettingError
from megafp8.config.load import load
from megafp8.config.megatron_flags import Refused, megatron_flags
from megafp8.errors import UserError
from megafp8_migrate import migrate

_OTHER_MODELS = tuple(
    about.reason
    for _, about in megatron_flags().groups
    if isinstance(about, Refused) and about.changes_model
)
"""Why a file's model cannot be trained here; all other lines are decisions."""

_STARTS = re.compile(r"(?m)^[^#\n]*pretrain_\w+\.py")
_SHOWN = 3
"""The number of refused flags that a row shows."""


class Row(NamedTuple):
    """Hold what became of one file."""

    file: str
    outcome: str
    decisions: int
    refused: tuple[str, ...]


def row_of(file: Path, name: str) -> Row:
    """Return what `megafp8 migrate` makes of a file."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        m = migrate(text, file.name, folder=file.parent)
    except UserError as error:
        return Row(
            name, "refused", 0, (error.reason if isinstance(error, SettingError) else str(error),)
        )
    refused = [line for line in m.undecided if any(part in line for part in _OTHER_MODELS)]
    missing = len(m.undecided) - len(refused)
    if not m.undecided:
        refused = list(_problems(m.text(file.name)))
    needs_recipe = any(line.startswith("recipe: ") for line in m.undecided)
    decided = "needs its recipe" if needs_recipe else "after decisions"
    outcome = "refused" if refused else decided if missing else "as it is"
    return Row(name, outcome, missing, tuple(refused))


def _problems(text: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "one.yaml").write_text(text, encoding="utf-8")
        try:
            load(config_dir=Path(folder), config_name="one")
        except UserError as error:
            yield str(error)


def files_in(folder: Path) -> Iterator[Path]:
    """Yield the scripts that start a pretraining, and the YAML files of configurations."""
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".sh" and _STARTS.search(file.read_text(errors="replace")):
            yield file
        elif file.suffix in (".yaml", ".yml") and file.parent.name == "conf":
            yield file


def main(folders: Sequence[str]) -> int:
    """Print a table of all files in the folders, and why files are refused."""
    for folder in map(Path, folders):
        for file in files_in(folder):
            row = row_of(file, str(file.relative_to(folder)))
            named = [f"`{text.partition(': ')[0]}`" for text in row.refused]
            why = ", ".join(named[:_SHOWN])
            why += f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
            print(f"| {row.file} | {row.outcome} | {row.decisions} | {why} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
