"""Take the shape of a model from the checkpoint that fine-tuning starts from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megafp8.config.architecture import SHAPE_KEYS
from megafp8.config.errors import COMMAND_LINE, Origin, SettingError
from megafp8.config.layers import Layer
from megafp8.config.settings import Setting

FILES = "model.data.train_ds.file_names"
RESTORE, RESUME = "restore_from_path", "model.resume_from_checkpoint"
_TAKEN = (
    *SHAPE_KEYS,
    "encoder_seq_length",
    "layernorm_zero_centered_gamma",
    "apply_query_key_layer_scaling",
    "make_vocab_size_divisible_by",
)


def base_layer(layers: Sequence[Layer]) -> Layer | None:
    """Return the settings of the model that a fine-tuning job names; None for another job.

    They are weaker than every file and option of the user.

    Raises:
        SettingError: The path has no checkpoint.
    """
    given = {setting.key: setting.value for layer in layers for setting in layer.settings}
    path = given.get(RESTORE) or given.get(RESUME)
    if given.get(FILES) is None or not isinstance(path, str) or "${" in path:
        return None
    model = _recorded_model(Path(path).expanduser())
    if model is None:
        key = RESTORE if given.get(RESTORE) else RESUME
        raise SettingError(
            key,
            path,
            "has no checkpoint that describes its model",
            "Give a run's directory, one of its checkpoints, or a directory that import_hf wrote",
        )
    # What the model makes useless in a file is named and not refused, whoever wrote the file.
    origin = Origin(f"the model in {path}", COMMAND_LINE.strength - 1)
    taken = {f"model.{name}": model[name] for name in _TAKEN if name in model}
    return Layer(origin, tuple(Setting(key, value, origin) for key, value in taken.items()))


def _recorded_model(path: Path) -> dict[str, Any] | None:
    """Return the `model` section of a checkpoint's settings, from its manifest alone.

    Whether the checkpoint is undamaged is checked when it is loaded.
    """
    for manifest in (
        path / "manifest.json",
        *sorted(path.glob("checkpoints/step_*/manifest.json")),
    ):
        try:
            tree = json.loads(manifest.read_text(encoding="utf-8"))
            model = tree["meta"]["config"]["model"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(model, dict):
            return model
    return None
