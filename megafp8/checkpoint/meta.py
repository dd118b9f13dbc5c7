"""Check the scalars that a checkpoint's manifest holds besides its tensors.

A right hash says that a manifest is as it was written, and not that this program wrote it. So each
known key is checked before it is used. Keys may be missing, as in weights without a state of
training, or in checkpoints of earlier versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megafp8.errors import CheckpointError
from megafp8.foreign import Fields

_MOST = 2**53
COUNTS = ("consumed_samples", "num_updates", "num_skipped")
_SECTIONS = (
    "config",
    "last_in_effect",
    "metrics",
    "versions",
    "scaling_layout",
    "loss_scale",
    "precision_steps",
)
STATE = ("config", "data_fingerprint", *COUNTS)


def check_meta(meta: Mapping[str, Any]) -> None:
    """Check the type and the range of each known key.

    Raises:
        ForeignFileError: A value is not what the key holds.
    """
    fields = Fields(meta)
    for key in COUNTS:
        fields.whole(key, 0, _MOST, None)
    fields.text("data_fingerprint", None)
    fields.whole("eod_id", 0, _MOST, None)
    sections = {key: fields.section(key) for key in _SECTIONS}
    for name in ("model", "trainer", "exp_manager"):
        sections["config"].section(name)
    for name in sections["metrics"].tree:
        sections["metrics"].number(name, None)
    for name in sections["scaling_layout"].tree:
        sections["scaling_layout"].whole(name, 1, _MOST)
    for name in sections["precision_steps"].tree:
        sections["precision_steps"].whole(name, 0, _MOST)
    if sections["loss_scale"].tree:
        sections["loss_scale"].number("scale", above=0)
        sections["loss_scale"].whole("num_finite", 0, _MOST)
        sections["loss_scale"].whole("num_overflows", 0, _MOST)


def check_state(meta: Mapping[str, Any], path: Path, required: tuple[str, ...] = STATE) -> None:
    """Check that a checkpoint has a state of training: the keys that are `required`.

    Raises:
        CheckpointError: It has none, as what `megafp8 import` writes, or only a part of one.
    """
    missing = [key for key in required if meta.get(key) is None]
    if not missing:
        return
    reason = "has weights, but no state of training"
    if len(missing) < len(required) - 1:  # the configuration is recorded with weights, too
        reason = f"lacks {missing[0]} in its manifest's meta"
    hint = "Use restore_from_path, which reads the weights only"
    raise CheckpointError(path, reason, hint)
