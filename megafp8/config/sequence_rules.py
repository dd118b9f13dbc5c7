"""Rules across keys of sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.fp8_rules import recipes_in, size_multiple
from megafp8.config.rules import Finding, Rules, Values

rule = Rules()

KEY = "model.sequence_parallel"
TP = "model.tensor_model_parallel_size"


@rule(KEY, TP)
def _sequence_has_ranks(v: Values) -> Iterator[Finding]:
    if v[KEY] and v[TP] == 1:
        yield Finding(
            KEY,
            f"{TP}=1 leaves nobody to share the sequence with",
            f"Leave it out, or set {TP} above 1",
        )


@rule(KEY, TP, "model.encoder_seq_length")
def _sequence_divides(v: Values) -> Iterator[Finding]:
    length = v["model.encoder_seq_length"]
    if v[KEY] and length % v[TP]:
        yield Finding(
            "model.encoder_seq_length",
            f"{length} does not divide over {TP}={v[TP]} with {KEY}=True",
            "Use a multiple of it",
        )


@rule(
    KEY, TP, "model.encoder_seq_length", "model.micro_batch_size", "model.fp8", "model.fp8_recipe"
)
def _parts_suit_fp8(v: Values) -> Iterator[Finding]:
    length, micro, tp = v["model.encoder_seq_length"], v["model.micro_batch_size"], v[TP]
    if not (v[KEY] and v["model.fp8"]) or length % tp:
        return
    tokens = micro * length // tp
    if tokens % size_multiple(v):
        yield Finding(
            KEY,
            f"leaves each rank {tokens} tokens of a microbatch; FP8 products need a multiple of "
            f"{size_multiple(v)}",
            f"Use another model.micro_batch_size ({micro}) or model.encoder_seq_length ({length})",
        )


@rule(KEY, "model.fp8", "model.fp8_recipe", "model.fp8_modules", "model.reduce_amax")
def _one_scale_serves_all_parts(v: Values) -> Iterator[Finding]:
    if not (v[KEY] and v["model.fp8"]):
        return
    if other := sorted(recipes_in(v) - {"delayed", "tensorwise"}):
        yield Finding(
            KEY,
            f"gathers tensors with one scale each, which {' and '.join(other)} does not have",
            f"Leave {KEY} out, or use model.fp8_recipe=delayed or tensorwise",
        )
    if "delayed" in recipes_in(v) and not v["model.reduce_amax"]:
        yield Finding(
            "model.reduce_amax",
            f"False leaves each rank its own scales, and {KEY}=True gathers with one",
            "Leave it out (True)",
        )


_LEAVE = f"leave {KEY} out"
rule.excludes(KEY, "model.fp8_backend", ("native", "te", "auto"), "is not tensor-parallel", _LEAVE)
rule.excludes(KEY, "model.compile", ("off",), "has not been shown to be right with it", _LEAVE)
