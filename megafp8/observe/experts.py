"""Say how evenly a step's tokens are divided among the experts of each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megafp8.observe.units import format_percent, plural

LARGEST, EMPTY, UPDATES = "experts/load_max", "experts/empty", "experts/least_updates"
"""The keys in metrics.jsonl of the whole model; `of_layer` makes those of a layer."""

EXPERTS_FILE = "experts.jsonl"
"""The file of a run with the tokens of each expert at logged steps."""


@dataclass(frozen=True)
class ExpertLoad:
    """Hold the load of experts in one step.

    `largest` is the number of tokens of the fullest expert over the mean of all experts of its
    layer, and `empty` the fraction of experts without a token, which are no fault.
    """

    largest: float
    empty: float

    def text(self) -> str:
        """Return the load in a few words."""
        empty = f", {format_percent(self.empty)} empty" if self.empty else ""
        return f"fullest expert {self.largest:.2f} x the mean{empty}"


def loads_of(counts_LE: Sequence[Sequence[float]]) -> dict[int, ExpertLoad]:
    """Return the load of each layer with experts, given the tokens of each expert of all layers."""
    return {
        layer: ExpertLoad(max(counts) * len(counts) / sum(counts), counts.count(0) / len(counts))
        for layer, counts in enumerate(counts_LE)
        if sum(counts)
    }


def of_model(loads: Mapping[int, ExpertLoad]) -> ExpertLoad | None:
    """Return the largest load of any layer and the mean fraction without tokens, if any has one."""
    if not loads:
        return None
    empty = sum(load.empty for load in loads.values()) / len(loads)
    return ExpertLoad(max(load.largest for load in loads.values()), empty)


def of_layer(key: str, layer: int) -> str:
    """Return the key of one layer, such as `experts/layer_3/empty`."""
    group, _, name = key.partition("/")
    return f"{group}/layer_{layer}/{name}"


def layer_of(key: str) -> int | None:
    """Return the layer of a key that `of_layer` made, or None for another key."""
    match = re.fullmatch(r"experts/layer_(\d{1,6})/\w+", key)
    return int(match[1]) if match else None


def scalars(loads: Mapping[int, ExpertLoad]) -> dict[str, float]:
    """Return the loads of the model and of each layer as named numbers, for curves."""
    whole = of_model(loads)
    if whole is None:
        return {}
    values = {LARGEST: whole.largest, EMPTY: whole.empty}
    for layer, load in loads.items():
        values |= {of_layer(LARGEST, layer): load.largest, of_layer(EMPTY, layer): load.empty}
    return values


def tokens_of(counts_LE: Sequence[Sequence[float]]) -> dict[str, list[int]]:
    """Return the tokens of each expert by layer, as a line of `EXPERTS_FILE` has them.

    Layers without experts, which have no counts, are left out.
    """
    return {
        str(layer): [int(count) for count in counts]
        for layer, counts in enumerate(counts_LE)
        if sum(counts)
    }


def summary_of(load: ExpertLoad | None, least_updates: int | None) -> str | None:
    """Return the load of the last step that is known, and the history with the fewest updates."""
    if load is None:
        return None
    text = f"{load.text()} in the last logged step"
    if least_updates is not None:
        text += f"; rarest history of an input: {plural(least_updates, 'update')}"
    return f"{text}; MFU counts the parameters that a token visits"
