"""Take the shape of a model from the checkpoint that fine-tuning starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megafp8.config.architecture import function_keys
from megafp8.config.errors import COMMAND_LINE, DEFAULT, Origin, SettingError
from megafp8.config.layers import Layer
from megafp8.config.resume import flat
from megafp8.config.settings import Setting
from megafp8.config.values import DEFAULT_EXP_DIR
from megafp8.files import expanded
from megafp8.foreign import read_json

FILES = "model.data.train_ds.file_names"
STARTS = (
    "restore_from_path",
    "model.resume_from_checkpoint",
    "exp_manager.resume_from_checkpoint",
)
"""The keys that name the model which fine-tuning starts from; the first that is given counts."""

EXP_DIR, NAME = "exp_manager.exp_dir", "exp_manager.name"
LOG_DIR = "exp_manager.explicit_log_dir"
_LENGTHS = ("encoder_seq_length", "make_vocab_size_divisible_by", "override_vocab_size")
"""What fine-tuning takes from a model beside the function of its weights."""


def with_base(layers: Sequence[Layer], resolved: Callable[[str], Any]) -> list[Layer]:
    """Return the layers, and for a fine-tuning job one more: the shape of the model it starts from.

    That layer is stronger than the default job, and weaker than every file and option of the user.

    Args:
        layers: The layers, from the weakest to the strongest.
        resolved: Returns the value of a key whose setting is an interpolation; None if it has none.

    Raises:
        SettingError: The path has no checkpoint.
    """
    base = _base_layer(layers, resolved)
    if base is None:
        return list(layers)
    after = next((n for n, layer in enumerate(layers, start=1) if layer.origin == DEFAULT), 0)
    return [*layers[:after], base, *layers[after:]]


def with_moved_folder(layers: Sequence[Layer], folder: Path) -> tuple[list[Layer], list[str]]:
    """Return the layers, and notes, where a file names the place from which its folder was moved.

    `megafp8 import` writes its own folder's path into the YAML there. If nothing is at that path
    any more, the folder of the YAML stands for it.

    Args:
        layers: The layers, from the weakest to the strongest.
        folder: The folder of the YAML that the command names.
    """
    notes, found = list[str](), list[Layer]()
    for layer in layers:
        settings = list(layer.settings)
        for at, setting in enumerate(settings):
            path = setting.value
            if setting.key != STARTS[0] or not _is_path(path) or layer.origin == COMMAND_LINE:
                continue
            if Path(path).is_absolute() and not Path(path).exists() and _is_imported(folder):
                settings[at] = Setting(setting.key, str(folder), setting.origin)
                notes.append(f"moved: {setting.key}={path} ({layer.origin}) is now {folder}")
        found.append(Layer(layer.origin, tuple(settings)))
    return found, notes


def folder_of_model(values: Mapping[str, Any]) -> str | None:
    """Return the folder with the shape and the tokenizer of the model that a job starts from.

    It is the path that the settings name. If there is no model any more, it is the job's own run,
    which continues from its own checkpoint; for an unnamed job that is the newest unnamed run that
    started from the same path.

    Args:
        values: The settings by their dotted paths; those about other things may be missing.

    Returns:
        The folder; None if the settings name no path, or neither place has a checkpoint.
    """
    start = next((values[key] for key in STARTS if values.get(key)), None)
    if not isinstance(start, str) or not _is_path(start):
        return None
    if _recorded(expanded(start)) is not None:
        return start
    own = values.get(LOG_DIR)
    parent = values.get(EXP_DIR) or DEFAULT_EXP_DIR
    if own is None and values.get(NAME) and _is_path(parent):
        own = str(Path(parent) / str(values[NAME]))
    if own is not None:
        return own if _is_path(own) and _recorded(expanded(own)) is not None else None
    runs = sorted(expanded(parent).glob("*"), reverse=True) if _is_path(parent) else []
    return next((str(run) for run in runs if _is_unnamed_from(start, run)), None)


def _base_layer(layers: Sequence[Layer], resolved: Callable[[str], Any]) -> Layer | None:
    """Return the settings of the model that a fine-tuning job names; None for another job."""
    given = {setting.key: setting.value for layer in layers for setting in layer.settings}
    if given.get(FILES) is None:
        return None
    for path in (*STARTS, EXP_DIR, NAME, LOG_DIR):
        if isinstance(given.get(path), str) and "${" in given[path]:
            given[path] = resolved(path)
    key = next((key for key in STARTS if given.get(key)), None)
    if key is None or not _is_path(given[key]):
        return None
    folder = folder_of_model(given)
    if folder is None:
        reason, hint = why_no_checkpoint(given[key])
        raise SettingError(key, given[key], reason, hint)
    config = _recorded(expanded(folder))
    model = config["model"] if config is not None else {}
    # What the model makes useless in a file is named and not refused, whoever wrote the file.
    origin = Origin(f"the model in {folder}", COMMAND_LINE.strength - 1)
    taken = {
        f"model.{name}": model[name] for name in (*function_keys(), *_LENGTHS) if name in model
    }
    return Layer(origin, tuple(Setting(key, value, origin) for key, value in taken.items()))


def why_no_checkpoint(folder: str | Path) -> tuple[str, str]:
    """Return what a folder without a checkpoint that describes its model is, and a hint."""
    hint = f"Import it, and give the new folder: megafp8 import {folder} imported"
    if (expanded(folder) / "config.json").is_file():
        return "is a model of transformers that has not been imported", hint
    if is_megatrons(expanded(folder)):
        return "is a checkpoint of Megatron or NeMo that has not been imported", hint
    hint = "Give a run's directory, a checkpoint, or a folder that `megafp8 import` wrote"
    run = Path(DEFAULT_EXP_DIR) / folder
    if _recorded(run) is not None:
        hint = f"Give the run's directory: {run}"
    return "has no checkpoint that describes its model", hint


def is_megatrons(path: Path) -> bool:
    """Whether a path is a checkpoint of Megatron or NeMo, a folder of such, or an archive."""
    places = ("", "weights", "model_weights")  # of Megatron, NeMo 2 and NeMo 1
    names = ("latest_checkpointed_iteration.txt", ".metadata", "metadata.json")
    if path.is_dir() and not (path / "config.json").exists():  # which is transformers'
        return any((path / place / name).is_file() for place in places for name in names)
    return path.suffix == ".nemo" and path.is_file()


def _is_path(value: object) -> bool:
    """Whether a value that a file or an option gives is a path, and not an interpolation."""
    return isinstance(value, str) and "${" not in value


def _recorded(path: Path) -> dict[str, Any] | None:
    """Return the settings that a checkpoint, or a run's checkpoint, records in its manifest.

    They have a section `model`. None if there is no such checkpoint. Whether the checkpoint is
    undamaged is checked when it is loaded.
    """
    meta = _meta(path)
    return None if meta is None else dict(meta["config"])


def _is_imported(folder: Path) -> bool:
    """Whether `megafp8 import` wrote a folder."""
    return "imported_from" in (_meta(folder) or {})


def _meta(path: Path) -> dict[str, Any] | None:
    """Return what the manifest of a checkpoint, or of a run's, says of the model's settings."""
    for manifest in (
        path / "manifest.json",
        *sorted(path.glob("checkpoints/step_*/manifest.json")),
    ):
        try:
            meta = read_json(manifest)["meta"]
            described = isinstance(meta["config"]["model"], dict)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if described:
            return dict(meta)
    return None


def _is_unnamed_from(start: str, run: Path) -> bool:
    """Whether a folder is a run without a name, with a checkpoint, that started from a path."""
    values = flat(_recorded(run) or {})
    return values.get(NAME, "") is None and start in [values.get(key) for key in STARTS]
