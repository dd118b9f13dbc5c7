"""List what a checkpoint has of FP8 scales and histories, and load them in any layout of ranks.

Ranks that reduce their amaxes together have the same scales. If these are all ranks of a pipeline
stage, a checkpoint has each scale once. Otherwise it has the scales of every rank of the stage, as
`NAME/shards` with one row for each rank, and the manifest's meta says which ranks these were:

    "scaling_layout": {"tp": 2, "cp": 1, "dp": 4, "amax": 2}

These are the sizes of the axes that make up a stage, and the number of ranks that had the same
scales. Pipeline stages are not among them: they divide the layers, and each layer's rows are of the
same ranks with any number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megafp8.checkpoint.manifest import Placement
from megafp8.checkpoint.reader import Reader
from megafp8.config.resume import flat
from megafp8.config.schema import all_keys
from megafp8.config.values import SIZES, model_ranks, world_size
from megafp8.errors import CheckpointError
from megafp8.fp8.scaling import ScalingState
from megafp8.specs.layer import model_linears
from megafp8.specs.recipes import DEFAULT_RECIPE
from megafp8.specs.traits import ROLES
from megafp8.train.state import TrainState

SCALING_LAYOUT = "scaling_layout"
"""The key of the manifest's meta; None there, or no such key, in a run without FP8."""

RECIPE_OF_SCALING = "scaling_recipe"
"""The key of the manifest's meta of an import: the settings below `model` of its scales' recipe."""

_SHARDS = "/shards"


def scaling_layout(state: TrainState) -> dict[str, int] | None:
    """Return the ranks of a stage and how many of them have the same scales; None without FP8."""
    if not isinstance(state.scaling, ScalingState):
        return None
    mesh = state.mesh
    amax = mesh.amax.size if state.scaling.recipe.reduce_amax else 1
    return {"tp": mesh.tp.size, "cp": mesh.cp.size, "dp": mesh.dp.size, "amax": amax}


def _saved_layout(meta: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the layout in which a checkpoint was saved; None if its manifest does not say it.

    Older versions recorded only the settings of the run, from which the layout follows.
    """
    if SCALING_LAYOUT in meta:
        recorded: dict[str, int] | None = meta[SCALING_LAYOUT]
        return recorded
    config = meta.get("config")
    if not isinstance(config, Mapping) or not config:
        return None
    values = {path: key.default for path, key in all_keys().items()} | flat(config)
    tp, cp = (values[size] for size in SIZES[:2])
    dp = world_size(values) // model_ranks(values)
    amax = tp * cp * (1 if values["model.tp_only_amax_red"] else dp)
    return {"tp": tp, "cp": cp, "dp": dp, "amax": amax if values["model.reduce_amax"] else 1}


def scaling_placements(state: TrainState) -> Iterator[Placement]:
    """Yield the placements of FP8 scales and histories.

    They are the same on all ranks if amaxes are reduced; otherwise each rank has a shard. But a
    weight's amax that is staged for the next update is known where the weight is: the first rank
    that has an expert saves the rows of its tensors.
    """
    assert isinstance(state.scaling, ScalingState)
    stage, is_synchronized = state.mesh.stage, _is_synchronized(state)
    of_experts = _tensors_of_experts(state) if state.mesh.ep.size > 1 else frozenset()
    for name, row in _scaling_rows(state.scaling):
        if is_synchronized:
            is_saved, tensor = stage.rank == 0, name.rpartition("/")[2]
            if tensor in of_experts:
                is_here = not any(tensor in t.elsewhere for t in state.scaling.tables.values())
                is_saved = state.mesh.edp.rank == 0 and is_here
            yield Placement(name, tuple(row.shape), (0,) * row.dim(), row, int(not is_saved))
        else:
            shape, offset = (stage.size, *row.shape), (stage.rank, *(0,) * row.dim())
            yield Placement(f"{name}{_SHARDS}", shape, offset, row[None])


def _scaling_rows(scaling: ScalingState) -> Iterator[tuple[str, torch.Tensor]]:
    for direction, table in scaling.tables.items():
        for field, tensor in table.tensors().items():
            for name, row in zip(table.names, tensor.unbind(0), strict=True):
                yield f"scaling/{direction}/{field}/{name}", row


def _tensors_of_experts(state: TrainState) -> frozenset[str]:
    """Return the names of the tensors of all experts' linears."""
    linears = (linear for linear in model_linears(state.model.spec) if linear.is_expert)
    return frozenset(f"{name}.{role}" for x in linears for name in x.names for role in ROLES)


def _is_synchronized(state: TrainState) -> bool:
    assert isinstance(state.scaling, ScalingState)
    mesh = state.mesh
    is_over_all = state.scaling.recipe.reduce_amax and mesh.amax.size == mesh.stage.size
    return is_over_all or mesh.stage.size == 1


def load_scaling(reader: Reader, state: TrainState, notify: Callable[[str], None]) -> None:
    """Load FP8 scales and histories.

    Shards that were saved in another layout are merged by the rule of a reduction: the larger amax
    and the smaller scale are taken, of ranks that have cast the tensor. So all ranks that share
    their scales have the same ones, also where the number of ranks is that of the checkpoint and
    the groups are others.

    Raises:
        CheckpointError: The checkpoint lacks the scales of a tensor.
    """
    assert isinstance(state.scaling, ScalingState)
    stored = set(reader.names())
    placements = list(scaling_placements(state))
    if placements and not any(name.startswith("scaling/") for name in stored):
        notify("the checkpoint was made without FP8: scales and amax histories have initial values")
        state.scaling.forget_staged()  # amaxes of the weights from before the checkpoint was read
        return
    is_same_layout = _saved_layout(reader.meta) == scaling_layout(state)
    same = [
        p
        for p in placements
        if p.name in stored
        and reader.global_shape(p.name) == p.global_shape
        and (is_same_layout or not p.name.endswith(_SHARDS))
    ]
    reader.load_into(same)
    loaded = {p.name for p in same}
    others = []
    for placement in placements:
        if placement.name in loaded:
            continue
        base = placement.name.removesuffix(_SHARDS)
        source = base if base in stored else f"{base}{_SHARDS}"
        if source not in stored:
            raise CheckpointError(
                reader.path, f"lacks {base}", "Continue with the FP8 settings of the checkpoint"
            )
        others.append((placement, source))
    merged, values = 0, reader.read_all({source for _, source in others})
    for placement, source in others:
        value = values[source]
        if source.endswith(_SHARDS):
            if "/quant_scale/" in source:  # one that was never updated is no scale of the tensor
                is_known = values[source.replace("/quant_scale/", "/num_updates/")] > 0
                value = value.where(is_known, torch.inf) if is_known.any() else value
                value = value.amin(0)
            else:
                value = value.amax(0)
            merged += 1
        placement.tensor.copy_(value.view_as(placement.tensor))
    if merged:
        notify(
            f"{merged} FP8 scaling entries differed between the ranks that saved them "
            "(model.reduce_amax=False or model.tp_only_amax_red=True): the larger amax and the "
            "smaller scale of each are used"
        )


def load_imported_scaling(reader: Reader, state: TrainState) -> str | None:
    """Load the scales and histories that an import has brought, and say what became of them.

    Tensors of which it has none keep their initial values, as all do under another recipe: a scale
    for another format would saturate. Return None if it has none at all, as weights of a run.
    """
    recipe: Mapping[str, Any] = reader.meta.get(RECIPE_OF_SCALING) or {}
    if not recipe:
        return None
    said = ", ".join(f"model.{name}={value}" for name, value in recipe.items())
    own = state.scaling.recipe if isinstance(state.scaling, ScalingState) else None
    if (
        own is None
        or own.name != DEFAULT_RECIPE
        or recipe
        != {
            ("fp8_hybrid" if own.backward_format == "e5m2" else "fp8_e4m3"): True,
            "fp8_margin": own.margin,
            "fp8_amax_history_len": own.amax_history_len,
            "fp8_amax_compute_algo": own.amax_compute_algo,
        }
    ):
        return f"the scales and histories of {reader.path} are for {said}, and are left"
    stored = set(reader.names())
    placements = [
        (placement, name)
        for placement in scaling_placements(state)
        if (name := placement.name.removesuffix(_SHARDS)) in stored
    ]
    values = reader.read_all({name for _, name in placements})
    for placement, name in placements:
        placement.tensor.copy_(values[name].view_as(placement.tensor))
    tensors = {name.rpartition("/")[2] for _, name in placements}
    return f"loaded FP8's scales and histories of {len(tensors)} tensors"
