"""Translate Megatron's settings of experts: those that act, those that change nothing, the others.

Below `model` they have the same names here. What has no effect, or must have one value, is in the
table of NeMo's keys, which a file's own `model.moe_…` are checked with too.
"""

from __future__ import annotations

from typing import Any

from megafp8.config.api import (
    Inert,
    Origin,
    Setting,
    all_keys,
    layer_list,
    megatron_flags,
    nemo_keys,
    put_in,
    read_value,
    schema_tree,
    unmet_need,
)
from megafp8_migrate.megatron_settings import MegatronSettings
from megafp8_migrate.report import Migration

NUM_EXPERTS = "num_moe_experts"
_KEY = f"model.{NUM_EXPERTS}"


def experts(s: MegatronSettings, m: Migration) -> None:
    """Translate all settings of experts; without experts Megatron reads none of them."""
    given = {name: setting for name, setting in s.given.items() if is_of_experts(name)}
    s.taken |= given.keys()
    has_experts = NUM_EXPERTS in s.unknown or s.get(NUM_EXPERTS) not in (None, 0)
    if not has_experts:  # then no default of Megatron's is assumed either
        s.taken |= {name for name in megatron_flags().passed if is_of_experts(name)}
    ours = {
        name: _ours(setting.value)
        for name, setting in given.items()
        if name in megatron_flags().passed and setting.value is not None
    }
    values = _values_with(ours, s.get(NUM_EXPERTS))
    for name, setting in given.items():
        if not has_experts:
            m.drop(setting.shown, setting.said, "the model has no experts")
        elif name not in ours:
            _without_effect(name, setting.shown, setting.value, m)
        elif (need := unmet_need(_key(name), values)) is not None:
            m.drop(setting.shown, setting.said, f"it has no effect without {need.text}")
        else:
            m.change(setting.shown, setting.said, {_key(name): ours[name]})


def is_of_experts(name: str) -> bool:
    """Whether a setting is about experts alone."""
    row, group = megatron_flags().passed.get(name), megatron_flags().group(name)
    if row is not None:
        return all_keys()[row.key].group == "experts"
    return isinstance(group, Inert) and group.without == NUM_EXPERTS


def _key(name: str) -> str:
    return megatron_flags().passed[name].key


def _ours(value: Any) -> Any:
    """Return a value as our key has it: a list for its text, and the one item of a list."""
    if isinstance(value, str) and (read := layer_list(value)) is not None:
        return read
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _values_with(ours: dict[str, Any], count: Any) -> dict[str, Any]:
    """Return all keys of experts with the given values that their types allow, else defaults."""
    tree = schema_tree()
    for name, value in ours.items():
        # What is wrong is reported where it is written.
        put_in(tree, Setting(_key(name), value, Origin("")))
    keys = (path for path, key in all_keys().items() if key.group == "experts")
    return {path: read_value(tree, path) for path in keys} | {_KEY: count or 1}


def _without_effect(name: str, shown: str, value: Any, m: Migration) -> None:
    """Drop a setting that changes nothing here, or let the user decide about another one."""
    known = nemo_keys().get(f"model.{name}")
    if known is not None and known.passes(value, {_KEY: 1}):
        m.drop(shown, value, known.note)
    elif known is not None:
        m.decide(shown, value, known.why, known.hint)
    elif value is None or value is False:
        m.drop(shown, value, "it is off")
    else:
        reason = f"is not among the settings of {megatron_flags().version} that are known here"
        m.decide(shown, value, reason, "Look for a similar key in pretrain_gpt.py --help")
