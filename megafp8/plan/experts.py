"""Say how many rows the experts of a model have, and what unequally many cost in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megafp8.plan.memory import all_ranks
from megafp8.specs import RunSpec
from megafp8.specs.rank_shape import layer_shapes, microbatch_tokens

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


def with_uneven_rows(spec: RunSpec) -> tuple[float, RunSpec]:
    """Return a load of the fullest rank, and a job in which all ranks have so many rows.

    The load is over the mean, 1 where each rank has all experts. The job is that of a model with
    experts in which a token visits more of them.
    """
    moe = spec.model.moe
    assert moe is not None
    chosen = min(UNEVEN * moe.top_k, _most_chosen(spec))
    uneven = replace(spec, model=replace(spec.model, moe=replace(moe, top_k=chosen)))
    return chosen / moe.top_k, uneven


def _most_chosen(spec: RunSpec) -> int:
    """Return how many experts of a token would make as many rows as a rank can get."""
    moe, ranks = spec.model.moe, spec.parallel.ep
    assert moe is not None
    return ranks * min(moe.top_k, moe.num_experts // ranks)


def expert_rows(spec: RunSpec) -> ExpertRows | None:
    """Return what a plan says of experts; None for a model without any."""
    moe, linears = spec.model.moe, [x for s in layer_shapes(spec) for x in s.experts.linears]
    if moe is None or not linears:
        return None
    load, uneven = with_uneven_rows(spec)
    rows = linears[0].whole.per_token(microbatch_tokens(spec)) / linears[0].whole.experts
    return ExpertRows(
        mean=rows,
        multiple=max(1 if x.traits is None else x.traits.multiple for x in linears),
        most_load=_most_chosen(spec) / moe.top_k,
        load=load,
        bytes_at_load=max(rank.total for rank in all_ranks(uneven)),
    )
