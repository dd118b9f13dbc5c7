"""Read the names that Megatron-core 0.20 and Megatron Bridge 0.6 have for what a key here does.

A name that has an effect here has a meaning: settings of the schema. The names without effect are
in nemo_inert.yaml. Bridge's named precisions are presets of conf/precision, but for those below.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from megafp8.specs.recipes import names_where

FP8, E4M3, HYBRID = "model.fp8", "model.fp8_e4m3", "model.fp8_hybrid"
FP4, FP4_RECIPE = "model.fp4", "model.fp4_recipe"
DOCUMENT_MASKING = "model.data.dataloader_inter_document_masking"
_FP4_PARAMS = ("model.fp4_param", "model.fp4_param_gather")
_RENAMED = {
    "model.fp8_param": "model.fp8_params",
    "model.fp8_param_gather": "model.fp8_params",
    "model.qkv_bias": "model.add_qkv_bias",  # NeMo's own name of Megatron's field
    "model.use_rope_scaling": "model.scale_positional_embedding",
    "model.optim.muon_nesterov": "model.optim.muon_use_nesterov",  # renamed in April 2026
}
NAMES = (FP4, FP4_RECIPE, *_FP4_PARAMS, DOCUMENT_MASKING, *_RENAMED)
"""The keys of Megatron and Bridge that the schema does not have and whose values have a meaning."""

DOCUMENTS_APART = {
    "model.data.reset_attention_mask": True,
    "model.data.reset_position_ids": True,
    "model.get_attention_mask_from_fusion": False,  # with it NeMo drops the first of the three
}
"""What Megatron does with `dataloader_inter_document_masking`, in NeMo's keys."""

_FORMATS = {
    "hybrid": {FP8: True, HYBRID: True, E4M3: False},
    "e4m3": {FP8: True, HYBRID: False, E4M3: True},
}
"""Megatron's `fp8` (`--fp8-format`), which is the format and the switch in one."""

_IN_BLOCKS = (
    "asks for output gradients in E5M2 with scales of blocks, and blockwise has E4M3 for all "
    "tensors here"
)


class Refusal(NamedTuple):
    """Say why a value is refused, and what to give instead."""

    reason: str
    hint: str


REFUSED_PRESETS = {
    "bf16_with_fp8_subchannel_scaling_mixed": Refusal(
        _IN_BLOCKS, "Use precision=fp8_blockwise for E4M3"
    ),
    "fp16_with_fp8_subchannel_scaling_mixed": Refusal(
        _IN_BLOCKS, "Use precision=fp8_blockwise with trainer.precision=16 for E4M3"
    ),
    "nanov2_bf16_with_fp8_current_scaling_mixed": Refusal(
        _IN_BLOCKS,
        "Use precision=fp8_blockwise model.fp8_params=True model.first_last_layers_bf16=True "
        "model.num_layers_at_start_in_bf16=2 model.num_layers_at_end_in_bf16=2 for E4M3",
    ),
}
"""Bridge's named precisions that are no presets here."""


def is_format(key: str, value: object) -> bool:
    """Whether a setting is Megatron's `fp8` with the name of a format, or null for none."""
    return key == FP8 and (value is None or (isinstance(value, str) and value in _FORMATS))


def why_refused(key: str, value: object) -> Refusal | None:
    """Return why a value of one of `NAMES` is refused, or None if it is not."""
    flags = (DOCUMENT_MASKING, *_RENAMED)
    if key in flags and not isinstance(value, bool | None):
        return Refusal("is not True or False", "Give True or False")
    if key == FP4 and value not in (None, "e2m1"):
        return Refusal("must be e2m1 or null", "Use e2m1")
    if key == FP4_RECIPE and value == "custom":
        hint = "A recipe of your own is model.fp8_recipe=FILE:Class (docs/guide/own_recipe.md)"
        return Refusal("names a factory of quantizers, which is code of Megatron's", hint)
    if key in _FP4_PARAMS and value:
        reason = "FP4 cannot be the only copy of a weight: most updates are smaller than its steps"
        return Refusal(reason, "Leave it out")
    return None


def meaning(key: str, value: Any) -> dict[str, Any] | None:
    """Return the settings that one of Megatron's stands for; None if it is not Megatron's."""
    if is_format(key, value):
        return {FP8: False} if value is None else dict(_FORMATS[value])
    if key not in NAMES:
        return None
    if key == DOCUMENT_MASKING:
        return dict(DOCUMENTS_APART) if value else {}
    if key in _RENAMED:
        return {} if value is None else {_RENAMED[key]: value}
    if key == FP4_RECIPE and value is not None:
        return {"model.fp8_recipe": value}
    if key != FP4 or value is None:
        return {}
    recipe, *_ = names_where(lambda traits: traits.numbers == value)
    return {FP8: True, "model.fp8_recipe": recipe}


class Contradiction(NamedTuple):
    """Name a setting of one layer that says something else than another one of that layer."""

    key: str
    value: Any
    reason: str
    hint: str


def contradictions(given: Iterable[tuple[str, Any]]) -> list[Contradiction]:
    """Return what contradicts Megatron's names among the settings of one layer.

    A stronger layer may say something else than a weaker one; within a layer nothing says which of
    two settings was meant.
    """
    values = dict(given)
    found = []
    chosen = values.get(FP8)
    formats = _FORMATS.get(chosen, {}) if isinstance(chosen, str) else {}
    for key in (E4M3, HYBRID):
        value = values.get(key)
        if formats and isinstance(value, bool) and value is not formats[key]:
            reason = f"contradicts {FP8}={chosen}"
            found.append(Contradiction(key, value, reason, f"Leave {key} or the format out"))
    for name, ours in _RENAMED.items():
        here, there = values.get(ours), values.get(name)
        if isinstance(here, bool) and isinstance(there, bool) and here is not there:
            found.append(Contradiction(name, there, f"contradicts {ours}={here}", "Keep one"))
    if values.get(FP4) == "e2m1" and (chosen is False or formats):
        reason = "asks for FP4, and another setting for another format"
        found.append(Contradiction(FP4, "e2m1", f"{reason}: {FP8}={chosen}", "Keep one"))
    return found
