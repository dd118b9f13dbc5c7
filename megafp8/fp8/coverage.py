"""Say which part of a model `fp8.convert` has turned into FP8 linears, and what stays as it was."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

OUTPUT_LAYERS = ("lm_head", "embed_out")
"""The names that models of transformers have for the layer that computes the logits."""
MOST_NAMES = 20


@dataclass(frozen=True)
class Coverage:
    """Hold the numbers of a model's parameters, by what became of them.

    `converted` has those of each converted weight, by the linear's name, `stacked` those of each
    parameter that may hold several matrices: with three or more dims of more than one element.
    """

    total: int
    converted: Mapping[str, int]
    linears_left: tuple[str, ...]
    stacked: Mapping[str, int]
    output_layers: tuple[str, ...]

    @property
    def left_out(self) -> str:
        """Return a clause that names the parameters of three dims, with their share; or nothing."""
        if not self.stacked:
            return ""
        plural = "s" if len(self.stacked) > 1 else ""
        return (
            f"{len(self.stacked)} parameter{plural} of three or more dimensions with "
            f"{self._share(self.stacked.values())} of the model's parameters: {names(self.stacked)}"
        )

    def lines(self, kinds: Iterable[str]) -> list[str]:
        """Return lines of text; `kinds` says of each converted linear what it is and was."""
        counts = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())
        share = self._share(self.converted.values())
        lines = [f"converted: {counts}; {share} of the model's {self.total:,} parameters"]
        if self.output_layers:
            lines.append(f"among them the output layer: {names(self.output_layers)}")
        if self.linears_left:
            lines.append(f"linears left as they were: {names(self.linears_left)}")
        if self.left_out:
            lines.append(f"left as they were: {self.left_out}")
        return lines

    def _share(self, counts: Iterable[int]) -> str:
        return f"{sum(counts) / max(1, self.total):.1%}"


def coverage_of(model: nn.Module, linears: Iterable[str], converted: Iterable[str]) -> Coverage:
    """Return the coverage of a model, given the names of its linears and of the converted ones."""
    sizes, stacked = {}, {}
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter):
            sizes[name] = parameter.numel()
            if sum(size > 1 for size in parameter.shape) > 2:
                stacked[name] = parameter.numel()
    modules = dict(model.named_modules())
    chosen = list(converted)
    weights = {name: modules.get(name, model).get_parameter("weight").numel() for name in chosen}
    left = tuple(name for name in linears if name not in weights)
    outputs = tuple(name for name in chosen if name.rpartition(".")[2] in OUTPUT_LAYERS)
    return Coverage(sum(sizes.values()), weights, left, stacked, outputs)


def names(of: Iterable[str]) -> str:
    """Return names for a message; those that differ in the number of a layer alone stand once."""
    patterns: dict[str, list[str]] = {}
    for name in of:
        pattern = re.sub(r"(?<![^.])\d+(?=\.)", "*", name)  # not the last part, as of a Sequential
        patterns.setdefault(pattern, []).append(name)
    alike = [found[0] if len(found) == 1 else key for key, found in patterns.items()]
    more = len(alike) - MOST_NAMES
    return ", ".join(alike[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
