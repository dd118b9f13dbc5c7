"""Say how many rows the experts of a model have, and what unequally many cost in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megafp8.plan.memory import all_ranks
from megafp8.plan.shape import layer_shapes, microbatch_tokens
from megafp8.specs import RunSpec

UNEVEN = 2
"""The rows of the fullest rank over the mean for which a plan shows the memory besides."""


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """Hold the rows of one expert in a microbatch, and the memory of ranks with unequal rows.

    The rank with the most rows has at most `most_load` times the mean: a token visits an expert
    once at most.
    """

    mean: float
    multiple: int  # of rows that FP8 products of experts have; 1 without FP8
    most_load: float
    load: float  # `UNEVEN` times the mean, or `most_load` if that is less
    bytes_at_load: int  # of the largest rank, with so many rows


def expert_rows(spec: RunSpec) -> ExpertRows | None:
    """Return what a plan says of experts; None for a model without any."""
    moe, ranks = spec.model.moe, spec.parallel.ep
    linears = [x for shape in layer_shapes(spec) for x in shape.experts.linears]
    if moe is None or not linears:
        return None
    most = ranks * min(moe.top_k, moe.num_experts // ranks)
    chosen = min(UNEVEN * moe.top_k, most)  # as many rows as so many experts of a token would make
    uneven = replace(spec, model=replace(spec.model, moe=replace(moe, top_k=chosen)))
    rows = linears[0].whole.per_token(microbatch_tokens(spec)) / linears[0].whole.experts
    return ExpertRows(
        mean=rows,
        multiple=max(1 if x.traits is None else x.traits.multiple for x in linears),
        most_load=most / moe.top_k,
        load=chosen / moe.top_k,
        bytes_at_load=max(rank.total for rank in all_ranks(uneven)),
    )
