"""Read what a checkpoint recorded of its run's FP8 and data, for an export in FP8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megafp8.checkpoint.reader import Reader
from megafp8.checkpoint.serving import E4M3_MAX, scale_of, single_linears
from megafp8.config.errors import raise_if_any
from megafp8.config.keys import Values
from megafp8.config.merged import default_tree
from megafp8.config.precision_changes import SCHEDULE, parse_schedule
from megafp8.config.precision_spec import module_rules
from megafp8.config.resolve import data_spec
from megafp8.config.resume import flat
from megafp8.config.schema import all_keys
from megafp8.config.settings import read_values
from megafp8.config.values import PRECISIONS
from megafp8.data.loader import Microbatch, validation_batches
from megafp8.errors import CheckpointError
from megafp8.runs.run_data import open_data
from megafp8.specs import Fp8Recipe, GPTSpec
from megafp8.specs.backends import BACKENDS
from megafp8.specs.layer import layer_spec, model_linears
from megafp8.specs.recipes import HIGH_PRECISION, WITHOUT, find_recipe, names_code

_HISTORIES = "scaling/forward/history/"
_OTHER_INPUTS = "Give --fp8-inputs dynamic, with which servers compute the scales themselves"


class RecordedInputs(NamedTuple):
    """Hold the scales of linears' inputs that follow from a checkpoint's amax histories.

    A scale is the largest amax of the histories times 2**margin over 448, rounded up as the scales
    of weights are.
    """

    by_linear: dict[str, float]
    step: int
    margin: int
    num_updates: int  # the fewest microbatches whose amaxes a linear's history has


def recorded_values(reader: Reader) -> dict[str, Any]:
    """Return the settings of a checkpoint's run by their dotted paths; missing ones by default."""
    config = reader.meta.get("config")
    recorded = flat(config) if isinstance(config, Mapping) else {}
    return {path: recorded.get(path, key.default) for path, key in all_keys().items()}


def linears_in_bf16(spec: GPTSpec, values: Mapping[str, Any]) -> frozenset[str]:
    """Return the linears that an FP8 run computed in high precision; none of a run without FP8.

    With one of a layer's experts all of them are returned: servers have one format for a layer's
    experts. The recipe itself may be code that is not imported: only the rules for single linears
    count.
    """
    if not values["model.fp8"]:
        return frozenset()
    named = Fp8Recipe(modules=module_rules(values))
    backend = values["model.fp8_backend"]
    traits = BACKENDS["native" if backend == "auto" else backend]
    names = (linear.name for linear in single_linears(spec))
    high = {
        name
        for name in names
        if traits.precision_of(named, name, spec.num_layers) == HIGH_PRECISION
    }
    for layer in range(spec.num_layers):
        experts = {n for x in layer_spec(spec, layer).experts or () for n in x.names}
        high |= experts if experts & high else set()
    return frozenset(high)


def has_histories(reader: Reader, values: Mapping[str, Any]) -> bool:
    """Whether the run keeps histories of amaxes by Transformer Engine's rule.

    Its own recipe says so, or one that `model.precision_schedule` names and whose histories the
    checkpoint has.
    """
    if not values["model.fp8"]:
        return False
    if _keeps_history(values["model.fp8_recipe"]):
        return True
    changes = parse_schedule(values[SCHEDULE])
    return any(_keeps_history(change.precision) for change in changes) and any(
        name.startswith(_HISTORIES) for name in reader.names()
    )


class OwnCasts(NamedTuple):
    """Say how a run casts its weights by the recipe of an export.

    Attributes:
        square: Whether blocks are squares.
        source: The dtype of the weights that it casts; FP32 for those of another recipe.
        tensor_ranks: How many tensor-parallel ranks divide a weight.
        others: The recipes that it also trained in, or trained in instead.
    """

    square: bool
    source: torch.dtype
    tensor_ranks: int
    others: list[str]


def own_casts(values: Mapping[str, Any], recipe: str) -> OwnCasts:
    """Return how a run casts its weights by a recipe, or would if it had been trained in it."""
    named = recorded_recipes(values)
    others = [name for name in named if name.partition(WITHOUT)[0] != recipe]
    if len(others) == len(named):
        return OwnCasts(True, torch.float32, 1, others)
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    options = {option for name in named if name not in others for option in name.split(WITHOUT)}
    return OwnCasts(
        "2d" not in options and not values["model.fp4_disable_2d_quantization"],
        compute[PRECISIONS[values["trainer.precision"]]],
        values["model.tensor_model_parallel_size"],
        others,
    )


def recorded_recipes(values: Mapping[str, Any]) -> list[str]:
    """Return the recipes that a run was trained in by its settings, those of patterns too."""
    if not values["model.fp8"]:
        return []
    changes = (change.precision for change in parse_schedule(values[SCHEDULE]))
    of_patterns = (rule.precision for rule in module_rules(values))
    named = dict.fromkeys([values["model.fp8_recipe"], *changes, *of_patterns])
    return [name for name in named if name != HIGH_PRECISION]


def other_formats(values: Mapping[str, Any]) -> list[str]:
    """Return the run's recipes whose weights have other numbers or scales than E4M3 exports."""
    return [
        name
        for name in recorded_recipes(values)
        if names_code(name) or find_recipe(name).traits.packs is not None
    ]


def _keeps_history(recipe: str) -> bool:
    is_ours = recipe != HIGH_PRECISION and not names_code(recipe)
    return is_ours and find_recipe(recipe).traits.has_history


def recorded_inputs(
    reader: Reader, spec: GPTSpec, values: Mapping[str, Any], kept: frozenset[str]
) -> RecordedInputs:
    """Return the scales of the inputs of all linears that are not in `kept`.

    Raises:
        CheckpointError: A linear has no history, or nothing has been recorded in it yet.
    """
    margin, stored = int(values["model.fp8_margin"]), frozenset(reader.names())
    scales, updates = {}, []
    for linear in model_linears(spec):
        if linear.name in kept:
            continue
        rows = _Rows(reader, stored, linear.name)
        amaxes, count = rows.read("history"), int(rows.read("num_updates").min())
        if amaxes.shape[-1] == 0:  # the run kept none, and its scale follows from the last one
            amaxes = E4M3_MAX * 2.0**-margin / rows.read("quant_scale")[..., None]
        if count == 0:
            why = "no token has visited it" if reader.step > 0 else "its run has trained no step"
            reason = f"has no amaxes of the inputs of {linear.name}: {why}"
            raise CheckpointError(reader.path, reason, _OTHER_INPUTS)
        scales[linear.name] = float(scale_of(amaxes.amax() * 2.0**margin))
        updates.append(min(count, amaxes.shape[-1]))
    return RecordedInputs(scales, reader.step, margin, min(updates))


class _Rows(NamedTuple):
    """Read the row of a linear's input in the tables of scales."""

    reader: Reader
    stored: frozenset[str]
    linear: str

    def read(self, field: str) -> torch.Tensor:
        """Return a field of the row, with a first dimension of ranks where these differ."""
        name = f"scaling/forward/{field}/{self.linear}.input"
        known_as = next((n for n in (name, f"{name}/shards") if n in self.stored), None)
        if known_as is None:
            reason = f"has no history of the inputs of {self.linear}"
            raise CheckpointError(self.reader.path, reason, _OTHER_INPUTS)
        return self.reader.read(known_as)


def recorded_settings(reader: Reader, changed: Mapping[str, Any] | None = None) -> Values:
    """Return the settings of a checkpoint's run as they are read from files, with some `changed`.

    Raises:
        CheckpointError: They are not settings of this version.
    """
    tree = default_tree()
    try:
        for path, value in {**recorded_values(reader), **(changed or {})}.items():
            OmegaConf.update(tree, path, value)
        values, problems = read_values(tree)
        raise_if_any(problems)
    except (OmegaConfBaseException, ValueError, TypeError, KeyError) as error:
        reason = f"does not describe its run ({str(error).splitlines()[0]})"
        raise CheckpointError(reader.path, reason, "Export a checkpoint of this version") from error
    return values


class ValidationData(NamedTuple):
    """Hold samples of a run's validation data, in microbatches, and how many there are."""

    batches: list[Microbatch]
    num_samples: int


def validation_data(
    reader: Reader, num_samples: int, notify: Callable[[str], None]
) -> ValidationData:
    """Return samples of the validation data of a checkpoint's run, spread evenly over it.

    Raises:
        UserError: The data are not there, or are others than those of the run.
    """
    if "data_fingerprint" not in reader.meta:
        raise CheckpointError(reader.path, "names no data", "Export the checkpoint of a run")
    values = recorded_settings(reader)
    spec = data_spec(values)
    data = open_data(spec, notify)
    if data.fingerprint != reader.meta["data_fingerprint"]:
        reason = f"was trained on other data than {spec.prefix} has now"
        raise CheckpointError(reader.path, reason, "Put the data of the run back there")
    source, size = data.validation, int(values["model.micro_batch_size"])
    batches = list(validation_batches(source, size, 0, 1, num_samples, rules=data.rules))
    return ValidationData(batches, min(num_samples, source.num_samples))
