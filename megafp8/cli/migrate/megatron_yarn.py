"""Translate YaRN's settings: Megatron's position_embedding_type=yarn is RoPE with a factor here."""

from __future__ import annotations

import math

from megafp8.cli.migrate.megatron_settings import MegatronSettings
from megafp8.cli.migrate.report import Migration

_KEYS = {
    "rotary_scaling_factor": ("model.yarn_rotary_scaling_factor", 1.0),
    "yarn_original_max_position_embeddings": ("model.original_max_position_embeddings", 4096),
    "yarn_beta_fast": ("model.yarn_beta_fast", 32.0),
    "yarn_beta_slow": ("model.yarn_beta_slow", 1.0),
}
"""Our keys of settings that YaRN alone reads, with the defaults of Megatron's parser."""
_SCALES = {"mscale": 1.0, "mscale_all_dim": 0.0}
_ROUNDS = "yarn_correction_range_round_to_int"


def yarn(s: MegatronSettings, m: Migration) -> None:
    """Translate positions by YaRN, and the settings that say how."""
    kind = {"model.position_embedding_type": "rope"}
    m.change(s.label("position_embedding_type"), "yarn", kind)
    values = {}
    for name, (key, default) in _KEYS.items():
        values[name] = s.number(name, m, default)
        if name in s.given:
            m.change(s.label(name), values[name], {key: values[name]})
        elif s.source and name not in s.unknown:
            m.assume(key, default, s.source)
    scales = [s.number(name, m, default if s.source else None) for name, default in _SCALES.items()]
    names = [name for name in _SCALES if name in s.given]
    if names and not s.unknown.keys() & {"rotary_scaling_factor", *_SCALES}:
        size = _size(values["rotary_scaling_factor"], *scales)
        m.change(s.label(*names), scales, {"model.yarn_attention_factor": size})
    if s.get(_ROUNDS) is False:
        m.decide(s.label(_ROUNDS), True, "the ends of YaRN's range are whole numbers here",
                 "Leave it out; the model is then another one")  # fmt: skip


def drop_yarn(s: MegatronSettings, m: Migration) -> None:
    """Drop YaRN's settings where positions are others."""
    for name in (*_KEYS, *_SCALES, _ROUNDS):
        if s.get(name) is not None:
            m.drop(s.label(name), s.given[name].said, "positions are not those of YaRN")


def _size(factor: float, scale: float | None, of_all: float | None) -> float | None:
    """Return Megatron's factor of rotated queries and keys; None for that of the paper."""
    if None in (scale, of_all) or (scale, of_all) == (1.0, 0.0):
        return None
    turns = 0.1 * math.log(max(factor, 1.0))
    return (turns * (scale or 0.0) + 1.0) / (turns * (of_all or 0.0) + 1.0)
