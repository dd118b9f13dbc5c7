"""Find the scales and histories of delayed scaling in a distributed checkpoint of Megatron's.

Transformer Engine's linear layers keep them in their `_extra_state`: FP32 scales [3] and amaxes
[history, 3] of the input, the weight and an unused output, and the same of gradients. The first row
of a history has the amaxes of the pass under way; the rest are earlier ones, oldest first
(transformer_engine/pytorch/module/base.py, `get_extra_state`).

Those of gradients are left: Megatron divides the loss by its tokens and microbatches before the
backward pass, and here gradients are divided after it, so that a scale of Megatron's would saturate
the first step. The states of experts are left too: Megatron-core 0.12 to 0.16 take columns of
several experts for one (`_split_extra_state` of its grouped linear layer), so that what belongs to
which expert depends on the number of experts on a rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megafp8.errors import CheckpointError
from megafp8.foreign import ForeignFileError
from megafp8.specs import GPTSpec
from megafp8_migrate.plain_pickle import Record, fields_of
from megafp8_migrate.saved_tensors import Saved
from megafp8_migrate.torch_dist import DistCheckpoint

_STATE = re.compile(r"decoder\.layers\.(\d+\.)?(.+)\._extra_state/shard_(\d+)_(\d+)")
_LINEARS = {
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.projection",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
    "mlp.shared_experts.linear_fc1": "mlp.shared.fc1",
    "mlp.shared_experts.linear_fc2": "mlp.shared.fc2",
}
_ROLES = ("input", "weight")
_FORMATS: dict[tuple[Any, ...], str] = {(448, 57344): "hybrid", (448, 448): "e4m3"}
"""Transformer Engine's formats by the largest numbers of both directions."""
_MAX_MARGIN = 100


@dataclass
class FoundScaling:
    """Hold what was found.

    Attributes:
        rows: Scales and histories by their names in a checkpoint of ours.
        recipe: The settings under which they are of use, by our names; they are those of all rows.
        read: The names of the states that were read.
        why_not: Why a state could not be read, for the first one of which this is so.
    """

    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    why_not: str = ""


def find_scaling(spec: GPTSpec, checkpoint: DistCheckpoint, prefix: str) -> FoundScaling:
    """Return those of inputs and weights of the layers' linears, without experts.

    `prefix` stands before all names. What cannot be read is left, since a run builds it up.
    """
    found = FoundScaling()
    for name in checkpoint.objects:
        match = _STATE.fullmatch(name.removeprefix(prefix))
        if match is None or match[2] not in _LINEARS:
            continue
        layer = int(match[1][:-1] if match[1] is not None else match[3])
        try:
            state = checkpoint.read_state(name)
            if state is not None and layer < spec.num_layers:
                _add(found, f"layers.{layer}.{_LINEARS[match[2]]}", state)
                found.read.add(name)
        except (CheckpointError, ForeignFileError) as error:
            found.why_not = found.why_not or f"{name}: {error}"
        except (LookupError, TypeError):
            found.why_not = (
                found.why_not or f"{name}: it has another form than Transformer Engine's"
            )
    return found


def _add(found: FoundScaling, linear: str, state: Saved) -> None:
    """Add the rows of one linear.

    Raises:
        ForeignFileError: The state has another form, or is of another recipe than those before.
    """
    value = state.value
    if not isinstance(value, Mapping) or "scale_fwd" not in value:
        raise ForeignFileError("it has no scales: the recipe is not delayed scaling")
    scale = state.tensor(value["scale_fwd"])
    history = state.tensor(value["amax_history_fwd"])
    fits = scale.shape == history.shape[1:] == (len(_ROLES) + 1,) and len(history) > 0
    if not fits or {scale.dtype, history.dtype} != {torch.float32}:
        raise ForeignFileError("its scales are not those of one linear layer")
    if not (history.isfinite().all() and (history >= 0).all() and (scale > 0).all()):
        raise ForeignFileError("a scale or an amax is no positive number")
    rows: dict[str, torch.Tensor] = {}
    for column, role in enumerate(_ROLES):
        of_tensor = {
            "amax": history[0, column],
            "history": history[1:, column],
            "quant_scale": scale[column],
            "num_updates": (history[:, column] > 0).sum(),
            "num_nonfinite": torch.tensor(0),
        }
        for kind, row in of_tensor.items():
            rows[f"scaling/forward/{kind}/{linear}.{role}"] = row.clone()
    recipe = _settings(value.get("recipe"), len(history))
    if found.recipe not in ({}, recipe):
        raise ForeignFileError("it is of another recipe than the layers before")
    found.recipe = recipe
    found.rows |= rows


def _settings(recipe: Any, length: int) -> dict[str, Any]:
    """Return our settings for a recipe of Transformer Engine's."""
    if not isinstance(recipe, Record):
        raise ForeignFileError("it does not say its recipe, as Transformer Engine 2 does")
    fields = fields_of(recipe)
    margin, algo = fields.get("margin", 0), fields.get("amax_compute_algo", "max")
    fmt = _FORMATS.get(_largest(fields.get("fp8_format")))
    if fmt is None or type(margin) is not int or abs(margin) > _MAX_MARGIN:
        raise ForeignFileError("its FP8 format or its margin is none that is known here")
    if algo not in ("max", "most_recent") or fields.get("scaling_factor_compute_algo") is not None:
        raise ForeignFileError("its scales are computed by a function of its own")
    return {
        "fp8_hybrid" if fmt == "hybrid" else "fp8_e4m3": True,
        "fp8_margin": margin,
        "fp8_amax_history_len": length,
        "fp8_amax_compute_algo": algo,
    }


def _largest(fmt: Any) -> tuple[Any, ...]:
    """Return the largest numbers forward and backward of a format of Transformer Engine's."""
    of_both = fmt.arguments[:1] if isinstance(fmt, Record) else ()
    return of_both[0].arguments if of_both and isinstance(of_both[0], Record) else ()
