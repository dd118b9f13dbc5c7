"""Which layouts of ranks there are, and what a model and its batches must be for them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megafp8.config.rules import Finding, Rules, Values
from megafp8.config.sizes import nearest_divisors, nearest_multiples
from megafp8.config.values import parse_layout
from megafp8.specs.parallel import (
    ONE_STAGE_SCHEDULES,
    ROUND_SCHEDULES,
    ZERO_BUBBLE_SCHEDULES,
    ScheduleName,
)

rule = Rules()

SIZES = (
    "model.tensor_model_parallel_size",
    "model.context_parallel_size",
    "model.pipeline_model_parallel_size",
)
WORLD = ("trainer.devices", "trainer.num_nodes")
PIPELINE = ("model.pipeline_model_parallel_size", "model.virtual_pipeline_model_parallel_size")
PIPELINE_DETAILS = (
    "model.virtual_pipeline_model_parallel_size",
    "model.pipeline_schedule",
    "model.pipeline_model_parallel_layout",
)
"""What means nothing without a pipeline."""


def schedule_of(v: Values) -> ScheduleName:
    """What `model.pipeline_schedule=null` stands for."""
    asked: ScheduleName | None = v["model.pipeline_schedule"]
    stages = v["model.virtual_pipeline_model_parallel_size"] or 1
    return asked or ("1F1B" if stages == 1 else "Interleaved1F1B")


def model_ranks(v: Values) -> int:
    """Ranks that work on the same samples: all axes but the replicas."""
    return math.prod(v[key] for key in SIZES)


def world_size(v: Values) -> int:
    """All ranks, on all nodes."""
    ranks: int = v["trainer.devices"] * v["trainer.num_nodes"]
    return ranks


def _sizes_text(v: Values) -> str:
    """The sizes above 1, as they were given."""
    given = [f"{key}={v[key]}" for key in SIZES if v[key] > 1]
    return " times ".join(given)


@rule(*SIZES, *WORLD)
def _sizes_divide_the_world(v: Values) -> Iterator[Finding]:
    ranks, nodes, size = world_size(v), v["trainer.num_nodes"], model_ranks(v)
    if ranks % size:
        key = next(key for key in SIZES if v[key] > 1)
        others = size // v[key]
        near = nearest_divisors(ranks // others, v[key]) if ranks % others == 0 else "1"
        more = "" if others == 1 else f", all together {_sizes_text(v)}"
        have = f"trainer.devices={v['trainer.devices']}"
        have += f" times trainer.num_nodes={nodes}" if nodes > 1 else ""
        step = size // math.gcd(size, nodes)
        yield Finding(
            key,
            f"{have} is not a multiple of it{more}",
            f"Nearest sizes: {near}; or trainer.devices: "
            f"{nearest_multiples(v['trainer.devices'], step)}",
        )


@rule("model.global_batch_size", "model.micro_batch_size", *WORLD, *SIZES)
def _batches_fit(v: Values) -> Iterator[Finding]:
    ranks, size = world_size(v), model_ranks(v)
    if ranks % size:
        return  # said already
    batch, micro, dp = v["model.global_batch_size"], v["model.micro_batch_size"], ranks // size
    if batch % (micro * dp):
        fits = nearest_divisors(batch // dp, micro) if batch % dp == 0 else ""
        yield Finding(
            "model.global_batch_size",
            f"is not a multiple of model.micro_batch_size={micro} times {dp} data-parallel ranks",
            f"Nearest global batch sizes: {nearest_multiples(batch, micro * dp)}"
            + (f"; or model.micro_batch_size: {fits}" if fits else ""),
        )


@rule("model.pipeline_model_parallel_size", *PIPELINE_DETAILS)
def _no_pipeline_no_details(v: Values) -> Iterator[Finding]:
    if v["model.pipeline_model_parallel_size"] == 1:
        for key in PIPELINE_DETAILS:
            if v[key] is not None:
                yield Finding(
                    key,
                    "means nothing without a pipeline",
                    "Set model.pipeline_model_parallel_size above 1, or leave it out",
                )


@rule(*PIPELINE, "model.pipeline_schedule")
def _schedule_has_its_stages(v: Values) -> Iterator[Finding]:
    asked, stages = v["model.pipeline_schedule"], v["model.virtual_pipeline_model_parallel_size"]
    if v["model.pipeline_model_parallel_size"] == 1 or asked is None:
        return
    key = "model.virtual_pipeline_model_parallel_size"
    if asked in ONE_STAGE_SCHEDULES and (stages or 1) > 1:
        yield Finding(
            key,
            f"model.pipeline_schedule={asked} runs one stage on each rank",
            "Leave it out, or use model.pipeline_schedule=Interleaved1F1B",
        )
    elif asked == "ZBVZeroBubble" and stages != 2:
        yield Finding(
            key,
            "model.pipeline_schedule=ZBVZeroBubble goes through the ranks there and back: two "
            "stages on each",
            f"Set {key}=2",
        )
    elif asked == "Interleaved1F1B" and (stages or 1) == 1:
        yield Finding(
            key,
            "model.pipeline_schedule=Interleaved1F1B has several stages on each rank",
            f"Set {key} to 2 or more, or use model.pipeline_schedule=1F1B",
        )


@rule(*PIPELINE, "model.pipeline_model_parallel_layout", "model.num_layers")
def _stages_share_layers(v: Values) -> Iterator[Finding]:
    pp, layers = v["model.pipeline_model_parallel_size"], v["model.num_layers"]
    stages = pp * (v["model.virtual_pipeline_model_parallel_size"] or 1)
    text = v["model.pipeline_model_parallel_layout"]
    if pp == 1:
        return
    if text is None:
        if layers % stages:
            yield Finding(
                "model.num_layers",
                f"does not divide into {stages} pipeline stages",
                f"Nearest numbers of layers: {nearest_multiples(layers, stages)}; or give "
                "model.pipeline_model_parallel_layout, the layers of each stage",
            )
        return
    layout = parse_layout(text) or ()
    if len(layout) != stages or sum(layout) != layers:
        yield Finding(
            "model.pipeline_model_parallel_layout",
            f"has {len(layout)} stages and {sum(layout)} layers; there are {stages} stages and "
            f"model.num_layers={layers}",
            f"Give {stages} numbers that add up to {layers}",
        )


@rule(
    "model.global_batch_size",
    "model.rampup_batch_size",
    "model.micro_batch_size",
    *WORLD,
    "model.tensor_model_parallel_size",
    "model.context_parallel_size",
    *PIPELINE,
    "model.pipeline_schedule",
)
def _pipeline_has_its_microbatches(v: Values) -> Iterator[Finding]:
    pp, schedule = v["model.pipeline_model_parallel_size"], schedule_of(v)
    dp, rest = divmod(world_size(v), model_ranks(v))
    if pp == 1 or rest or schedule == "GPipe":
        return
    samples = v["model.micro_batch_size"] * dp
    for key, batch in _batches(v):
        count = batch // samples
        if batch % samples:
            return  # said already
        if count < pp:
            yield Finding(
                key,
                f"{batch} samples make {count} microbatches; a pipeline of {pp} ranks needs as "
                f"many in {schedule}",
                f"Give at least {pp * samples}, or use model.pipeline_schedule=GPipe",
            )
            return
        if schedule in ROUND_SCHEDULES and count % (count // pp):
            yield Finding(
                key,
                f"{batch} samples make {count} microbatches; {schedule} runs them in "
                f"{count // pp} equal rounds",
                f"Nearest global batch sizes: {nearest_multiples(batch, pp * samples)}",
            )
            return


def _batches(v: Values) -> Iterator[tuple[str, int]]:
    """The global batch sizes of a run, with the keys that make them."""
    last, ramp = v["model.global_batch_size"], v["model.rampup_batch_size"]
    yield "model.global_batch_size", last
    if ramp is not None:
        for batch in range(ramp[0], last, ramp[1]):
            yield "model.rampup_batch_size", batch


@rule(
    "model.fp8",
    "model.reduce_amax",
    "model.tp_only_amax_red",
    "model.fp8_params",
    *SIZES,
    *WORLD,
)
def _reduction_is_one(v: Values) -> Iterator[Finding]:
    key = "model.tp_only_amax_red"
    if not (v["model.fp8"] and v[key]):
        return
    if not v["model.reduce_amax"]:
        yield Finding(
            key,
            "model.reduce_amax=False reduces nothing",
            "Leave it out, or leave model.reduce_amax out (True)",
        )
    elif v["model.fp8_params"] and world_size(v) > model_ranks(v):
        yield Finding(
            key,
            "with model.fp8_params=True replicas would keep weights of their own",
            "Leave it out, or leave model.fp8_params out",
        )


@rule("model.fp8_backend", "model.pipeline_model_parallel_size", *PIPELINE_DETAILS)
def _backend_runs_in_stages(v: Values) -> Iterator[Finding]:
    backend, key = v["model.fp8_backend"], "model.fp8_backend"
    if v["model.pipeline_model_parallel_size"] == 1:
        return
    if backend == "te":
        yield Finding(
            key,
            "Transformer Engine's FP8 state has not been shown to be right on pipeline stages",
            "Use model.fp8_backend=native, or model.pipeline_model_parallel_size=1",
        )
    elif backend == "torchao" and schedule_of(v) in ZERO_BUBBLE_SCHEDULES:
        yield Finding(
            key,
            f"torchao's linear computes both gradients at once, which {schedule_of(v)} does not",
            "Use model.fp8_backend=native, or model.pipeline_schedule=1F1B",
        )
