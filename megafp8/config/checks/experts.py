"""Check that the numbers of experts fit each other, the layers and the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megafp8.config.keys import Values
from megafp8.config.rules import Finding, Rules, counted
from megafp8.config.schema.experts import NUM_EXPERTS, SCORES
from megafp8.config.values import (
    MOST_EXPERTS,
    SIZES,
    WORLD,
    layers_with_experts,
    model_ranks,
    world_size,
)

rule = Rules()

EP = "model.expert_model_parallel_size"
TOP_K, FREQUENCY = "model.moe_router_topk", "model.moe_layer_freq"
PRE_SOFTMAX = "model.moe_router_pre_softmax"


@rule(NUM_EXPERTS, TOP_K, SCORES, PRE_SOFTMAX)
def _top_k_of_the_experts(v: Values) -> Iterator[Finding]:
    experts, top_k = v[NUM_EXPERTS], v[TOP_K] or 2
    if experts is None:
        return
    if top_k > experts:
        yield Finding(TOP_K, f"is more than {NUM_EXPERTS}={experts}", f"Give from 1 to {experts}")
    elif top_k == 1 and v[SCORES] == "softmax" and not v[PRE_SOFTMAX]:
        yield Finding(
            TOP_K,
            "gives the router no gradient: the softmax over one chosen expert is always 1",
            f"Set {PRE_SOFTMAX}=True or {SCORES}=sigmoid, or choose 2 experts or more",
        )


@rule(NUM_EXPERTS, FREQUENCY, "model.num_layers")
def _some_layers_have_experts(v: Values) -> Iterator[Finding]:
    if v[NUM_EXPERTS] is None:
        return
    layers, has = v["model.num_layers"], layers_with_experts(v[FREQUENCY], v["model.num_layers"])
    if len(has) != layers:
        hint = f"Give {layers} numbers, or the number N of which each N-th layer has experts"
        yield Finding(FREQUENCY, f"has {len(has)} numbers for model.num_layers={layers}", hint)
    elif not any(has):
        hint = f"Give 1 for some layers, or leave {NUM_EXPERTS} out"
        yield Finding(FREQUENCY, "says that no layer has experts", hint)
    elif (count := v[NUM_EXPERTS] * sum(has)) > MOST_EXPERTS:
        reason = f"gives the model {count} experts in {counted(sum(has), 'layer')}"
        yield Finding(NUM_EXPERTS, reason, f"Give at most {MOST_EXPERTS // sum(has)}")


@rule(NUM_EXPERTS, EP, *SIZES, *WORLD)
def _ranks_divide_the_experts(v: Values) -> Iterator[Finding]:
    experts, ep, ranks = v[NUM_EXPERTS], v[EP], world_size(v)
    if experts is None or ep == 1 or ranks % model_ranks(v):
        return  # another rule reports ranks that the other sizes do not divide
    stage = ranks // v["model.pipeline_model_parallel_size"]
    if stage % ep == 0 and experts % ep == 0:
        return
    fits = [
        size for size in range(1, min(stage, experts) + 1) if math.gcd(stage, experts) % size == 0
    ]
    reason = f"does not divide {NUM_EXPERTS}={experts}"
    if stage % ep:
        reason = f"does not divide the {counted(stage, 'rank')} of a pipeline stage"
    yield Finding(EP, reason, f"Sizes that fit: {', '.join(map(str, fits))}")
