"""Translate settings that NeMo's files write in their own way into the schema's spelling.

Each translation has the same meaning in NeMo. The start of a run names each translated value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megafp8.config.settings import Setting

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


def translate(settings: Iterable[Setting]) -> tuple[list[Setting], list[Translated]]:
    """Return one layer's settings in the schema's spelling, and those that were translated.

    `${training.model.seed}` is `${model.seed}`: NeMo's launcher puts a file below `training`.
    """
    given = [Setting(s.key, _without_root(s.value), s.origin) for s in settings]
    by_megatron = any(s.key == "model.optim.name" and s.value == DISTRIBUTED for s in given)
    result: list[Setting] = []
    translated: list[Translated] = []
    for setting in given:
        value = setting.value
        if (setting.key, value) == ("model.normalization", "layernorm1p"):
            value = "layernorm"
            result.append(Setting("model.layernorm_zero_centered_gamma", True, setting.origin))
        if isinstance(value, str):
            value = _VALUES.get(setting.key, {}).get(value, value)
        if setting.key == "model.optim.dtype" and by_megatron:
            value = "fp32"  # Megatron's optimizer ignores this key and has FP32 states
        if value is not setting.value and value != setting.value:
            translated.append(Translated(setting, value))
            setting = Setting(setting.key, value, setting.origin)
        result.append(setting)
    return result, translated


def _without_root(value: Any) -> Any:
    if isinstance(value, str):
        return _OWN_NAME.sub("${", value)
    if isinstance(value, list):
        return [_without_root(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_root(item) for key, item in value.items()}
    return value
