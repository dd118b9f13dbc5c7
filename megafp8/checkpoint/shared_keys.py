"""Read and write keys of `config.json` that several families of transformers have alike.

These are rotary positions, in the forms of transformers 4 and 5, and keys whose value changes
nothing. In this file `theirs` marks names of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megafp8.config.keys import MAX_POSITIONS
from megafp8.errors import CheckpointError
from megafp8.foreign import Fields, shown_value
from megafp8.specs import GPTSpec

_LLAMA3 = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
_YARN = {
    "factor": "yarn_rotary_scaling_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attention_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
_SCALINGS = {
    "default": {},
    "linear": {"factor": "seq_len_interpolation_factor"},
    "llama3": _LLAMA3,
    "yarn": _YARN,
}
"""By `rope_type`, our fields by transformers' names."""
THETA = 10000.0  # the base of rotary positions in a family that has no other default
_MAY_LACK = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None}

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "activation": ("swiglu",),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "is_llama_config": (True,),
    "n_special": (0,),
    "num_experts": (0,),
    "output_router_logits": (False, True),
    "partial_rotary_factor": (1.0,),
    "pruned_heads": ({},),
    "qkv_bias": (False,),
    "rope_interleaved": (False,),
    "router_jitter_noise": (0,),
    "shared_expert_intermediate_size": (0,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
}
"""Keys of published files, with the values that change nothing; transformers reads few of them."""


def same(one: object, other: object) -> bool:
    """Whether two values of JSON are equal, in which true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def changes_nothing(key: str, value: object) -> bool:
    """Whether a key of this value is known to say nothing about a model's function."""
    return any(same(value, neutral) for neutral in _NEUTRAL.get(key, ()))


def only(file: Path, config: Fields, key: str, fits: bool) -> None:
    """Raise `CheckpointError` for the value of a key, unless it `fits` a model of ours."""
    if not fits:
        hint = "megafp8 has no such model; import one without this setting"
        raise CheckpointError(file, f"{key} is {shown_value(config.tree.get(key))}", hint)


def rope_scaling(spec: GPTSpec) -> dict[str, Any] | None:
    """Return `rope_scaling`; early versions of transformers 4 have another key for its kind."""
    if spec.seq_len_interpolation_factor is not None:
        kind = {"type": "linear"}
    elif spec.scale_positional_embedding:
        kind = {"rope_type": "llama3"}
    elif spec.yarn_rotary_scaling_factor is not None:
        kind = {"rope_type": "yarn"}
    else:
        return None
    (name,) = kind.values()
    values = {theirs: getattr(spec, ours) for theirs, ours in _SCALINGS[name].items()}
    set_values = {key: value for key, value in values.items() if value is not None}
    return {**kind, **set_values, "factor": float(set_values["factor"])}


def rope_type(section: Mapping[str, Any]) -> object:
    """Return the kind of rotary positions by its name of today or of earlier."""
    return section.get("rope_type", section.get("type", "default"))


def _rope_section(c: Fields, file: Path, base: float) -> tuple[str, Fields]:
    """Return the section of rotary positions that transformers reads, with its name and the base.

    transformers 5 takes `rope_scaling` as a whole if it says anything, and else `rope_parameters`,
    with the `rope_theta` in it or else beside it. transformers 4 takes `rope_scaling` alone, with
    the `rope_theta` beside it. A base or a kind that they would read differently is refused.
    Where no base is given it is `base`.
    """
    sections = {key: c.section(key) for key in ("rope_scaling", "rope_parameters")}
    name = "rope_scaling" if sections["rope_scaling"].tree else "rope_parameters"
    rope = sections[name]
    given = {"rope_theta": c.tree.get("rope_theta", base), **rope.tree}
    theta = Fields(given).number("rope_theta", above=1, at_most=1e15)
    hint = "Write the one with which the model was trained to both places, or to one alone"
    for place, tree in (("config.json", c.tree), *((k, v.tree) for k, v in sections.items())):
        other = tree.get("rope_theta", theta)
        if other not in (theta, None):
            reason = f"rope_theta is {shown_value(other)} in {place}, and {theta:g} is read"
            raise CheckpointError(file, reason, hint)
    kinds = [rope.tree[key] for key in ("rope_type", "type") if key in rope.tree]
    if kinds and any(kind != kinds[0] for kind in kinds):
        reason = f"rope_type is {shown_value(kinds[0])}, and type is {shown_value(kinds[1])}"
        raise CheckpointError(file, reason, hint)
    return name, Fields({**rope.tree, "rope_theta": theta})


def rope_fields(c: Fields, file: Path, base: float) -> dict[str, Any]:
    """Return the fields of rotary positions, of a `config.json` of transformers 4 or 5."""
    section, rope = _rope_section(c, file, base)
    kind = rope_type(rope.tree)
    if not isinstance(kind, str) or kind not in _SCALINGS:
        hint = f"Models with rope_type {', '.join(_SCALINGS)} can be imported"
        raise CheckpointError(file, f"rope_type is {shown_value(kind)}", hint)
    names = _SCALINGS[kind]
    fields: dict[str, Any] = {"rotary_base": rope.tree["rope_theta"]}
    for theirs, ours in names.items():
        if theirs == "original_max_position_embeddings":
            length = c.whole("max_position_embeddings", 1, MAX_POSITIONS)
            default = (length,) if kind == "yarn" else ()
            fields[ours] = rope.whole(theirs, 1, MAX_POSITIONS, *default)
        else:
            default = (_MAY_LACK[theirs],) if theirs in _MAY_LACK else ()
            bound = {"at_least": 1.0} if theirs == "factor" else {"above": 0.0}
            fields[ours] = rope.number(theirs, *default, **bound, at_most=MAX_POSITIONS)
    if kind == "llama3":
        fields["scale_positional_embedding"] = True
    read = {"rope_type", "type", "rope_theta", *names}
    if kind == "yarn":
        read |= {"truncate", "mscale", "mscale_all_dim"}
        only(file, rope, "truncate", rope.flag("truncate", True))
        if fields["yarn_attention_factor"] is None:
            fields["yarn_attention_factor"] = _attention_factor(rope)
    unknown = [
        f"{key} is {shown_value(value)}"
        for key, value in sorted(rope.tree.items())
        if not (key in read or value is None or changes_nothing(key, value))
    ]
    if unknown:
        reason = f"{'; '.join(unknown)} in {section}, whose rope_type is {kind}"
        hint = "megafp8 has no such model. Correct rope_type, or import a model without these keys"
        raise CheckpointError(file, reason, hint)
    return fields


def _attention_factor(rope: Fields) -> float | None:
    """Return YaRN's factor by `mscale` and `mscale_all_dim`; None where one of them is missing."""
    factor = rope.number("factor")
    scales = [rope.number(key, 0.0, at_least=0) for key in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return None
    above, below = (1.0 if factor <= 1 else 0.1 * x * math.log(factor) + 1 for x in scales)
    return float(above / below)
