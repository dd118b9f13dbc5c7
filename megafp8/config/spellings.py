"""Translate settings that NeMo's files write in their own way into the schema's spelling.

Each translation has the same meaning in NeMo. The start of a run names each translated value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megafp8.config import megatron_names
from megafp8.config.errors import DEFAULT, Origin, SettingError
from megafp8.config.settings import Setting, read_value
from megafp8.specs.data import MOCK_DATA

SAMPLES = "model.data.seq_length"
SEQUENCE = "model.encoder_seq_length"
VALIDATES, VALIDATES_ON = "trainer.val_check_interval", "trainer.limit_val_batches"
POSITIONS = "model.max_position_embeddings"
IMPL, PREFIX = "model.data.data_impl", "model.data.data_prefix"
DISTRIBUTED = "mcore_distributed_optim"
_VALUES: dict[str, dict[Any, Any]] = {
    "model.optim.name": {DISTRIBUTED: "distributed_fused_adam"},
    "model.position_embedding_type": {"ALiBi": "alibi", "RoPE": "rope"},
    "model.fsdp_grad_reduce_dtype": {"fp32": 32, "fp16": 16},
}
"""NeMo's values by key. Both optimizers are Adam with decoupled weight decay whose states are
sharded over replicas; NeMo compares the names of positions without their case."""

_OWN_NAME = re.compile(r"\$\{training\.")


@dataclass(frozen=True)
class Translated:
    """Hold a setting as it was written, and the value that stands for it."""

    setting: Setting
    value: Any


def translate_spellings(settings: Iterable[Setting]) -> tuple[list[Setting], list[Translated]]:
    """Return one layer's settings in the schema's spelling, and those that were translated.

    `${training.model.seed}` is `${model.seed}`: NeMo's launcher puts a file below `training`. A
    file that validates on no batches may leave the steps between two validations open.
    """
    given = [Setting(s.key, _without_root(s.value), s.origin) for s in settings]
    by_megatron = any(s.key == "model.optim.name" and s.value == DISTRIBUTED for s in given)
    never_validates = any(s.key == VALIDATES_ON and s.value == 0 for s in given)
    result: list[Setting] = []
    translated: list[Translated] = []
    for setting in given:
        value = setting.value
        meaning = megatron_names.meaning(setting.key, value)
        if meaning is not None:
            ours = [Setting(key, item, setting.origin) for key, item in meaning.items()]
            result += ours
            translated += [Translated(setting, f"{s.key}={s.value}") for s in ours]
            continue
        if (setting.key, value) == ("model.normalization", "layernorm1p"):
            value = "layernorm"
            result.append(Setting("model.layernorm_zero_centered_gamma", True, setting.origin))
        if isinstance(value, str):
            value = _VALUES.get(setting.key, {}).get(value, value)
        if setting.key == "model.optim.dtype" and by_megatron:
            value = "fp32"  # Megatron's optimizer ignores this key and has FP32 states
        if (setting.key, value) == (VALIDATES, None) and never_validates:
            value = 1
        if value is not setting.value and value != setting.value:
            translated.append(Translated(setting, value))
            setting = Setting(setting.key, value, setting.origin)
        result.append(setting)
    return result, translated


def contradictions(settings: Iterable[Setting]) -> list[SettingError]:
    """Return which settings of one layer contradict Megatron's names in it."""
    given = list(settings)
    origins = {s.key: s.origin for s in given}
    found = megatron_names.contradictions((s.key, s.value) for s in given)
    return [SettingError(*one, origin=origins[one.key]) for one in found]


def take_length_of_samples(tree: DictConfig, origins: dict[str, Origin]) -> list[str]:
    """Give sequences the length of samples where a file states a shorter one for these.

    NeMo cuts samples by `model.data.seq_length`, and makes a model of `model.encoder_seq_length`
    positions. So the model keeps that number of positions here. A longer length is left as it is,
    which a rule reports.

    Args:
        tree: The merged tree of settings, which is changed.
        origins: The layers that set its keys, which are changed with it.

    Returns:
        A line about the translation, or none.
    """
    samples, sequence, positions = (_read(tree, k) for k in (SAMPLES, SEQUENCE, POSITIONS))
    whole = all(type(length) is int for length in (samples, sequence, positions))
    if not whole or not 0 < samples < sequence:
        return []
    OmegaConf.update(tree, SEQUENCE, samples)
    OmegaConf.update(tree, POSITIONS, positions)
    origin = origins.get(SAMPLES, DEFAULT)
    origins[SEQUENCE] = origin
    return [
        f"translated: {SAMPLES}={samples} ({origin}): {SEQUENCE}={samples} instead of {sequence}, "
        f"and {POSITIONS}={positions}"
    ]


def take_mock_data(tree: DictConfig, origins: dict[str, Origin]) -> list[str]:
    """Let `model.data.data_prefix` say `mock` where NeMo's `data_impl` does.

    NeMo then reads none of the data that the prefix names.

    Args:
        tree: The merged tree of settings, which is changed.
        origins: The layers that set its keys, which are changed with it.

    Returns:
        A line about the translation, or none.

    Raises:
        SettingError: A stronger layer names data, which would not be read.
    """
    origin, names_data = origins.get(IMPL, DEFAULT), origins.get(PREFIX, DEFAULT)
    if origin == DEFAULT or _read(tree, IMPL) != MOCK_DATA:
        return []
    given = _read(tree, PREFIX)
    del origins[IMPL]
    if names_data.strength > origin.strength and given != MOCK_DATA:
        reason = f"is not read with {IMPL}={MOCK_DATA} ({origin})"
        hint = f"Give {IMPL}=mmap too, or leave it out"
        raise SettingError(PREFIX, given, reason, hint, origin=names_data)
    OmegaConf.update(tree, PREFIX, MOCK_DATA, merge=False)
    origins[PREFIX] = origin
    return [f"translated: {IMPL}={MOCK_DATA} ({origin}): {PREFIX}={MOCK_DATA}; no data are read"]


def _read(tree: DictConfig, path: str) -> Any:
    """Return a value, or None if it cannot be read, which `read_values` reports."""
    try:
        return read_value(tree, path)
    except (OmegaConfBaseException, ValueError, OverflowError, RecursionError):
        return None


def _without_root(value: Any) -> Any:
    if isinstance(value, str):
        return _OWN_NAME.sub("${", value)
    if isinstance(value, list):
        return [_without_root(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_root(item) for key, item in value.items()}
    return value
