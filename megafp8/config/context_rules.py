"""Rules across keys of context parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megafp8.config.fp8_rules import size_multiple
from megafp8.config.rules import Finding, Rules, Values
from megafp8.config.sizes import nearest_multiples

rule = Rules()

KEY = "model.context_parallel_size"
TP = "model.tensor_model_parallel_size"
SP = "model.sequence_parallel"
LENGTH = "model.encoder_seq_length"


@rule(KEY, TP, SP, LENGTH)
def _sequence_divides(v: Values) -> Iterator[Finding]:
    cp, length = v[KEY], v[LENGTH]
    if cp == 1:
        return
    if length % (2 * cp):
        yield Finding(
            LENGTH,
            f"{length} does not divide into 2 x {cp} chunks, two for each rank of {KEY}={cp}",
            f"Nearest values: {nearest_multiples(length, _step(v))}",
        )
    elif v[SP] and length % _step(v):
        yield Finding(
            LENGTH,
            f"{length} tokens over {KEY}={cp} leave {length // cp}, which do not divide over "
            f"{TP}={v[TP]} with {SP}=True",
            f"Nearest values: {nearest_multiples(length, _step(v))}",
        )


def _step(v: Values) -> int:
    """What a sequence's length must be a multiple of."""
    return math.lcm(2 * v[KEY], v[KEY] * v[TP] if v[SP] else 1)


@rule(KEY, TP, SP, LENGTH, "model.micro_batch_size", "model.fp8", "model.fp8_recipe")
def _parts_suit_fp8(v: Values) -> Iterator[Finding]:
    length, micro, multiple = v[LENGTH], v["model.micro_batch_size"], size_multiple(v)
    ranks = v[KEY] * (v[TP] if v[SP] else 1)
    if v[KEY] == 1 or not v["model.fp8"] or length % _step(v):
        return
    tokens = micro * length // ranks
    if tokens % multiple:
        micro_step = multiple // math.gcd(multiple, length // ranks)
        length_step = math.lcm(_step(v), ranks * multiple // math.gcd(multiple, micro))
        yield Finding(
            KEY,
            f"leaves each rank {tokens} tokens of a microbatch; FP8 products need a multiple of "
            f"{multiple}",
            f"Nearest values of model.micro_batch_size: {nearest_multiples(micro, micro_step)}; of "
            f"{LENGTH}: {nearest_multiples(length, length_step)}",
        )


@rule(KEY, "model.data.reset_attention_mask")
def _documents_are_not_told_apart(v: Values) -> Iterator[Finding]:
    if v[KEY] > 1 and v["model.data.reset_attention_mask"]:
        yield Finding(
            KEY,
            "keys and values go from rank to rank without their documents, and "
            "model.data.reset_attention_mask=True keeps documents apart",
            f"Use {KEY}=1, or leave model.data.reset_attention_mask out",
        )


@rule(KEY, "model.position_embedding_type")
def _scores_have_no_bias(v: Values) -> Iterator[Finding]:
    if v[KEY] > 1 and v["model.position_embedding_type"] == "alibi":
        yield Finding(
            KEY,
            "model.position_embedding_type=alibi adds to scores what depends on both places, and "
            "blocks of keys come without theirs",
            f"Use model.position_embedding_type=rope, or {KEY}=1",
        )


def _is_split(size: int) -> bool:
    return size > 1


rule.excludes(
    KEY,
    "model.fp8_backend",
    ("native", "auto"),
    "has not been wired to it",
    f"use {KEY}=1",
    _is_split,
)
rule.excludes(
    KEY,
    "model.compile",
    ("off",),
    "has not been shown to be right with messages inside attention",
    f"use {KEY}=1",
    _is_split,
)
