"""Check that the layout of ranks fits the machine, the model and its batches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megafp8.config.checks.model import TP, tp_divides
from megafp8.config.keys import Values
from megafp8.config.rules import (
    SEARCH_LIMIT,
    Finding,
    Rules,
    counted,
    nearest_divisors,
    nearest_multiples,
)
from megafp8.config.values import (
    MAX_RAMP_SIZES,
    SIZES,
    WORLD,
    model_ranks,
    parse_layout,
    schedule_of,
    size_multiple,
    world_size,
)
from megafp8.specs.parallel import ROUND_SCHEDULES

rule = Rules()

CP = "model.context_parallel_size"
SP = "model.sequence_parallel"
FSDP = "model.fsdp"
STRATEGY = "model.fsdp_sharding_strategy"
LENGTH = "model.encoder_seq_length"
PIPELINE = ("model.pipeline_model_parallel_size", "model.virtual_pipeline_model_parallel_size")
_LEAVE = f"or leave {FSDP} out"


# --- ranks, batches, pipelines --------------------------------------------------------------------


@rule(*SIZES, *WORLD)
def _sizes_divide_the_world(v: Values) -> Iterator[Finding]:
    ranks, nodes, size = world_size(v), v["trainer.num_nodes"], model_ranks(v)
    if ranks % size:
        near = {key: text for key in SIZES if (text := _near_sizes(v, key))}
        key = next(iter(near), None) or next(key for key in SIZES if v[key] > 1)
        sizes = " times ".join(f"{each}={v[each]}" for each in SIZES if v[each] > 1)
        product = "it" if size == v[key] else sizes
        have = f"trainer.devices={v['trainer.devices']}"
        have += f" times trainer.num_nodes={nodes}" if nodes > 1 else ""
        others = [f"{other}: {text}" for other, text in (near | _near_worlds(v)).items()]
        hint = "; or ".join(others).removeprefix(f"{key}: ")
        yield Finding(
            key,
            f"{have} is not a multiple of {product}",
            f"Nearest {'sizes: ' if key in near else ''}{hint}",
        )


def _near_sizes(v: Values, key: str) -> str:
    """Return the values of one parallel size with which all sizes divide the ranks, as a text.

    They are from half to twice the present value, and divide the heads or the layers, too. The text
    is empty if there is none, or if the size is 1.
    """
    now, ranks, others = v[key], world_size(v), model_ranks(v) // v[key]
    if now == 1 or ranks % others:
        return ""
    whole = v.get({TP: "model.num_attention_heads", PIPELINE[0]: "model.num_layers"}.get(key, ""))
    most = ranks // others
    down = range(min(now, most), max((now + 1) // 2 - 1, now - SEARCH_LIMIT), -1)
    up = range(now + 1, min(2 * now, most, now + SEARCH_LIMIT) + 1)
    near = [
        next((n for n in side if most % n == 0 and (whole is None or whole % n == 0)), None)
        for side in (down, up)
    ]
    return " or ".join(str(n) for n in near if n is not None)


def _near_worlds(v: Values) -> dict[str, str]:
    """Return the numbers of nodes or devices that all parallel sizes divide, by their keys.

    The devices of one of several nodes stay. Those of a single node may grow, or the nodes.
    """
    size, nodes, devices = model_ranks(v), v["trainer.num_nodes"], v["trainer.devices"]
    in_nodes = nearest_multiples(nodes, size // math.gcd(size, devices))
    if nodes > 1:
        return {"trainer.num_nodes": in_nodes}
    nearest = {"trainer.devices": nearest_multiples(devices, size)}
    if devices > 1 and size % devices == 0:
        nearest["trainer.num_nodes"] = in_nodes
    return nearest


@rule("model.global_batch_size", "model.micro_batch_size", *WORLD, *SIZES)
def _batches_fit(v: Values) -> Iterator[Finding]:
    ranks, size = world_size(v), model_ranks(v)
    if ranks % size:
        return  # another rule reports it
    batch, micro, dp = v["model.global_batch_size"], v["model.micro_batch_size"], ranks // size
    if batch % (micro * dp):
        fits = nearest_divisors(batch // dp, micro) if batch % dp == 0 else ""
        yield Finding(
            "model.global_batch_size",
            f"is not a multiple of model.micro_batch_size={micro} times "
            f"{counted(dp, 'data-parallel rank')}",
            f"Nearest global batch sizes: {nearest_multiples(batch, micro * dp)}"
            + (f"; or model.micro_batch_size: {fits}" if fits else ""),
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
                f"is not a multiple of {stages} pipeline stages",
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
            return  # another rule reports it
        if count < pp:
            yield Finding(
                key,
                f"{batch} samples are {counted(count, 'microbatch', 'microbatches')}; {schedule} "
                f"needs at least {pp}, one for each pipeline rank",
                f"Give at least {pp * samples}, or use model.pipeline_schedule=GPipe",
            )
            return
        if schedule in ROUND_SCHEDULES and count % (count // pp):
            yield Finding(
                key,
                f"{batch} samples are {count} microbatches, which {schedule} would run in "
                f"{count // pp} rounds of different sizes",
                f"Nearest global batch sizes: {nearest_multiples(batch, pp * samples)}",
            )
            return


def _batches(v: Values) -> Iterator[tuple[str, int]]:
    """Yield the global batch sizes of a run, with the keys that set them."""
    last, ramp = v["model.global_batch_size"], v["model.rampup_batch_size"]
    yield "model.global_batch_size", last
    if ramp is not None:
        for batch in range(ramp[0], last, ramp[1])[:MAX_RAMP_SIZES]:
            yield "model.rampup_batch_size", batch


# --- tensor, sequence and context parallelism -----------------------------------------------------


@rule("model.make_vocab_size_divisible_by", "model.override_vocab_size", TP)
def _tp_divides_vocab(v: Values) -> Iterator[Finding]:
    key = "model.override_vocab_size"
    yield from tp_divides(v, "model.make_vocab_size_divisible_by" if v[key] is None else key)


@rule(SP, TP, "model.encoder_seq_length", "model.micro_batch_size", "model.fp8", "model.fp8_recipe")
def _sequence_parts_suit_fp8(v: Values) -> Iterator[Finding]:
    length, micro, tp = v["model.encoder_seq_length"], v["model.micro_batch_size"], v[TP]
    if not (v[SP] and v["model.fp8"]) or length % tp:
        return
    tokens = micro * length // tp
    if tokens % size_multiple(v):
        yield Finding(
            SP,
            f"gives each rank {tokens} tokens of a microbatch; FP8 products need a multiple of "
            f"{size_multiple(v)}",
            f"Use another model.micro_batch_size than {micro}, or another model.encoder_seq_length "
            f"than {length}",
        )


@rule(CP, TP, SP, LENGTH)
def _cp_divides_sequence(v: Values) -> Iterator[Finding]:
    cp, length = v[CP], v[LENGTH]
    if cp == 1:
        return
    if length % (2 * cp):
        yield Finding(
            LENGTH,
            f"is not a multiple of {2 * cp}: with {CP}={cp} each rank has two chunks of a sequence",
            f"Nearest values: {nearest_multiples(length, _length_step(v))}",
        )
    elif v[SP] and length % _length_step(v):
        yield Finding(
            LENGTH,
            f"with {CP}={cp} a rank has {length // cp} tokens, which is not a multiple of "
            f"{TP}={v[TP]}, as {SP}=True needs",
            f"Nearest values: {nearest_multiples(length, _length_step(v))}",
        )


def _length_step(v: Values) -> int:
    """Return the number that a sequence's length must be a multiple of."""
    return math.lcm(2 * v[CP], v[CP] * v[TP] if v[SP] else 1)


@rule(CP, TP, SP, LENGTH, "model.micro_batch_size", "model.fp8", "model.fp8_recipe")
def _context_parts_suit_fp8(v: Values) -> Iterator[Finding]:
    length, micro, multiple = v[LENGTH], v["model.micro_batch_size"], size_multiple(v)
    ranks = v[CP] * (v[TP] if v[SP] else 1)
    if v[CP] == 1 or not v["model.fp8"] or length % _length_step(v):
        return
    tokens = micro * length // ranks
    if tokens % multiple:
        micro_step = multiple // math.gcd(multiple, length // ranks)
        length_step = math.lcm(_length_step(v), ranks * multiple // math.gcd(multiple, micro))
        yield Finding(
            CP,
            f"gives each rank {tokens} tokens of a microbatch; FP8 products need a multiple of "
            f"{multiple}",
            f"Nearest values of model.micro_batch_size: {nearest_multiples(micro, micro_step)}; of "
            f"{LENGTH}: {nearest_multiples(length, length_step)}",
        )


# --- FSDP -----------------------------------------------------------------------------------------


@rule(FSDP, STRATEGY, "trainer.devices", "trainer.num_nodes", *SIZES)
def _replicas_share(v: Values) -> Iterator[Finding]:
    nodes, devices, size = v["trainer.num_nodes"], v["trainer.devices"], model_ranks(v)
    if not v[FSDP] or devices * nodes % size:
        return
    if devices * nodes * v[CP] == size:  # ranks that share sequences have the same weights
        yield Finding(
            FSDP,
            "the run has one replica, so there is no other to shard parameters with",
            f"Use more trainer.devices, {_LEAVE}",
        )
    elif v[STRATEGY] == "hybrid":
        yield from _nodes_share(v)


def _nodes_share(v: Values) -> Iterator[Finding]:
    """Yield why `hybrid` cannot shard over the ranks of a node that have the same stage."""
    devices, stages = v["trainer.devices"], v["model.pipeline_model_parallel_size"]
    nodes, rest = divmod(v["trainer.num_nodes"], stages)
    size, at = model_ranks(v) // stages, " for each pipeline stage" if stages > 1 else ""
    reason = None
    if rest:
        given = f"the run has {v['trainer.num_nodes']} node{'s' * (v['trainer.num_nodes'] > 1)}"
        reason = f"{given}, which are not equally many whole ones for each of {stages} stages"
    elif nodes == 1 or devices == size:
        only = "one node" if nodes == 1 else "one replica on each node"
        reason = f"the run has {only}{at}, where hybrid cannot differ from full"
    elif devices % size:
        reason = f"a node has {devices} ranks, which are not whole replicas of {size} ranks"
    if reason is not None:
        yield Finding(STRATEGY, reason, f"Use {STRATEGY}=full")
