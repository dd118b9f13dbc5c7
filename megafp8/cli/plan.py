"""Predict what a job needs and how fast it is: memory, messages, time, and whether FP8 pays.

python -m megafp8.cli.plan model=gpt3_5b model.fp8=True trainer.devices=8 hardware=h200 [--search]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megafp8.cli.job import parse_options, report_error
from megafp8.cli.plan_page import page
from megafp8.config.checks import check_values
from megafp8.config.load import load_all
from megafp8.config.resolve import resolve
from megafp8.config.schema import all_keys
from megafp8.errors import ConfigError, ExitCode, UserError
from megafp8.observe.units import format_bytes, format_count
from megafp8.plan.flops import gemm_flops_per_token
from megafp8.plan.hardware import KNOWN, Hardware, hardware_of
from megafp8.plan.memory import RankMemory, all_ranks
from megafp8.plan.search import Found, search
from megafp8.plan.shape import rank_shape
from megafp8.plan.time import (
    Achieved,
    StepTime,
    model_flops_utilization,
    step_time,
    tokens_per_step,
    why_fp8_pays_little,
    without_fp8,
)
from megafp8.plan.traffic import Message, rank_traffic
from megafp8.specs import RunSpec
from megafp8.specs.model import padded_vocab_size

PROG = "python -m megafp8.cli.plan"
ACCELERATOR = "trainer.accelerator"
GPT2_VOCABULARY = 50257
DOES_NOT_FIT = 1
"""The exit code for a job that a run would take, but that does not fit into memory."""
SHOWN_LAYOUTS = 8
USABLE = 0.9
"""The fraction of a device's memory that a job may fill; the rest is the CUDA context's, the
allocator's and the communication library's."""
PARTS = {
    "linears": "products of linears",
    "head": "output head",
    "attention": "attention",
    "passes": "casts, norms, activations",
    "weights": "weight casts, gradient sums",
    "tensor_parallel": "messages within a layer",
    "stages": "messages between stages",
    "optimizer": "optimizer",
    "gradients": "messages of replicas not hidden",
    "bubble": "waiting in the pipeline",
    "host": "waiting for the host",
}


@dataclass(frozen=True)
class Plan:
    """Hold all that is predicted for a job."""

    spec: RunSpec
    hardware: Hardware
    ranks: list[RankMemory]  # one of each pipeline rank
    messages: list[list[Message]]
    time: StepTime
    bf16: StepTime | None  # the same job in BF16, where the job asks for FP8
    bf16_bytes: int | None

    @property
    def largest(self) -> RankMemory:
        """Return the rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def fits(self) -> bool:
        """Whether the largest rank needs at most the usable part of the memory."""
        return self.largest.total <= USABLE * self.hardware.memory_bytes


def main(argv: Sequence[str]) -> int:
    """Print the plan; return 0 if the job fits, 1 if it does not, 2 if it would be refused."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Everything else is what pretrain_gpt.py takes. hardware= names one of "
        f"{', '.join(KNOWN)}; hardware.bf16_tflops=… and others replace single figures.",
        allow_abbrev=False,
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="the tokenizer's size")
    parser.add_argument("--tokens", type=float, metavar="N", help="tokens of the whole training")
    parser.add_argument("--search", action="store_true", help="list the best layouts as well")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write an HTML page with pictures"
    )
    options, rest = parser.parse_known_args(argv)
    try:
        hardware = hardware_from([word for word in rest if is_hardware(word)])
        words = [word for word in rest if not is_hardware(word)]
        spec = spec_of(words, options.vocab_size)
        if options.tokens is not None and not 0 < options.tokens < float("inf"):
            raise ConfigError("--tokens", options.tokens, "is no number of tokens", "Give 3e11")
        plan = make_plan(spec, hardware)
        found = best_layouts(spec, hardware) if options.search else None
        lines = [*describe(plan, options.vocab_size, options.tokens), *listed(found)]
        if options.page is not None:
            write_page(plan, lines, options.page)
        if options.json:
            print(json.dumps(as_json(plan, options.tokens, found or []), indent=2))
        else:
            print(*lines, sep="\n")
    except UserError as error:
        return report_error(error)
    return ExitCode.FINISHED if plan.fits else DOES_NOT_FIT


def best_layouts(spec: RunSpec, hardware: Hardware) -> list[Found]:
    """Return the fastest layouts that fit and that a run would take."""
    accepted: list[Found] = []
    values = settings_of(spec)
    for layout in search(spec, hardware, usable=USABLE):
        if not check_values(values | layout.settings()):
            accepted.append(layout)
            if len(accepted) == SHOWN_LAYOUTS:
                break
    return accepted


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """Return the resolved settings of a run by their dotted names."""
    values: dict[str, Any] = {}
    for path in all_keys():
        node: Any = spec.resolved
        for name in path.split("."):
            node = node[name]
        values[path] = node
    return values


def is_hardware(word: str) -> bool:
    """Whether a word of the command line is about the hardware."""
    return key_of(word).partition(".")[0] == "hardware"


def key_of(word: str) -> str:
    """Return the key that a word of the command line sets."""
    return word.partition("=")[0].lstrip("+")


def hardware_from(words: Sequence[str]) -> Hardware:
    """Return the hardware that `hardware=NAME hardware.FIGURE=NUMBER` describe; an H100 without.

    Raises:
        ConfigError: A word has no value, or a figure is not a number; and as `hardware_of`.
    """
    name, numbers = "h100", {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not value:
            raise ConfigError(key, value, "has no value", "Write hardware=h200, for example")
        if key == "hardware":
            name = value
            continue
        try:
            numbers[key.removeprefix("hardware.")] = float(value)
        except ValueError:
            raise ConfigError(key, value, "is not a number", "Give the data sheet's") from None
    return hardware_of(name, numbers)


def spec_of(words: Sequence[str], vocab_size: int | None) -> RunSpec:
    """Return the run that these overrides ask for, on GPUs, with a known vocabulary.

    Raises:
        UserError: The run would be refused, or is to run on a CPU.
    """
    for word in words:
        if key_of(word) == ACCELERATOR and word.endswith("=cpu"):
            raise ConfigError(ACCELERATOR, "cpu", "a plan is for GPUs", "Leave it out")
    others = [word for word in words if key_of(word) != ACCELERATOR]
    given = parse_options([*others, f"{ACCELERATOR}=gpu"])
    if vocab_size is not None and vocab_size < 1:
        raise ConfigError("--vocab-size", vocab_size, "is not a size", "Give the tokenizer's")
    loaded = load_all(given.overrides, given.config_dir, given.config_name)
    spec = resolve(loaded.cfg, lambda: True)
    padded = padded_vocab_size(vocab_size or GPT2_VOCABULARY, spec.vocab_divisible_by)
    return replace(spec, model=replace(spec.model, vocab_size=padded))


def make_plan(spec: RunSpec, hardware: Hardware) -> Plan:
    """Return all that is predicted for a job."""
    plain = None if spec.precision.fp8 is None else without_fp8(spec)
    return Plan(
        spec=spec,
        hardware=hardware,
        ranks=all_ranks(spec),
        messages=[rank_traffic(spec, rank) for rank in range(spec.parallel.pp)],
        time=step_time(spec, hardware),
        bf16=None if plain is None else step_time(plain, hardware),
        bf16_bytes=None if plain is None else max(rank.total for rank in all_ranks(plain)),
    )


def describe(plan: Plan, vocab_size: int | None, tokens: float | None) -> Iterator[str]:
    """Return the lines of the plan."""
    spec, hardware = plan.spec, plan.hardware
    model, parallel, train = spec.model, spec.parallel, spec.train
    yield (
        f"model: {model.num_layers} layers x {model.hidden_size}, "
        f"{format_count(num_params(plan))} parameters, vocabulary {model.vocab_size}"
        + ("" if vocab_size is not None else " (of GPT-2; --vocab-size gives another)")
    )
    yield (
        f"layout: {parallel.world_size} x {hardware.name} = tensor {parallel.tp} x context "
        f"{parallel.cp} x data {parallel.dp} x pipeline {parallel.pp}; {train.global_batch_size} x "
        f"{spec.data.seq_length} tokens a step, "
        f"{train.num_microbatches(parallel.dp)} microbatch(es) of {train.micro_batch_size}"
    )
    yield ""
    yield from memory_table(plan)
    yield ""
    yield from traffic_table(plan)
    yield ""
    yield from time_table(plan, tokens)
    if plan.bf16 is not None:
        yield ""
        yield from verdict(plan, plan.bf16)
    yield ""
    yield from assumptions(plan)


def num_params(plan: Plan) -> int:
    """Return the parameters of the whole model, each once."""
    spec = plan.spec
    shapes = [rank_shape(spec, rank) for rank in range(spec.parallel.pp)]
    total = sum(
        param.elements * (spec.parallel.tp if param.is_sharded else 1)
        for shape in shapes
        for param in shape.params
    )
    is_tied = spec.model.share_embeddings_and_output_weights
    is_copied = is_tied and not any(shape.has_first and shape.has_last for shape in shapes)
    return total - is_copied * spec.model.vocab_size * spec.model.hidden_size


def memory_rows(plan: Plan) -> list[tuple[str, list[int]]]:
    """Return the rows of the memory table, one figure for each pipeline rank that is shown."""
    ranks = shown(plan)
    rows = [
        ("weights", [r.held.weights for r in ranks]),
        ("FP32 master weights", [r.held.masters for r in ranks]),
        ("optimizer's moments", [r.held.moments for r in ranks]),
        ("FP32 gradients", [r.held.gradients for r in ranks]),
        ("FP8 scales, histories", [r.held.scaling for r in ranks]),
        ("FP8 copies of weights", [r.step.weight_copies for r in ranks]),
        ("weights gathered by FSDP", [r.step.gathered for r in ranks]),
        ("activations in flight", [r.step.in_flight for r in ranks]),
        ("working memory", [r.step.workspace for r in ranks]),
    ]
    return [(name, values) for name, values in rows if any(values)]


def shown(plan: Plan) -> list[RankMemory]:
    """Return the first, the middle and the last pipeline rank."""
    last = len(plan.ranks) - 1
    return [plan.ranks[place] for place in sorted({0, last // 2, last})]


def memory_table(plan: Plan) -> Iterator[str]:
    """Return the table of bytes, and whether they fit."""
    ranks = shown(plan)
    rows = [(name, [format_bytes(value) for value in values]) for name, values in memory_rows(plan)]
    rows.append(("in all", [format_bytes(rank.total) for rank in ranks]))
    titles = [f"stage rank {rank.pipeline_rank}" for rank in ranks]
    yield from _table("memory of one rank", titles, rows)
    memory = plan.hardware.memory_bytes
    word = "fits" if plan.fits else "DOES NOT FIT"
    yield (
        f"{word}: the largest rank needs {format_bytes(plan.largest.total)}, "
        f"{plan.largest.total / memory:.0%} of {format_bytes(memory)}; up to {USABLE:.0%} is usable"
    )


def traffic_table(plan: Plan) -> Iterator[str]:
    """Return the table of messages of the pipeline rank that sends most."""
    messages = max(plan.messages, key=lambda found: sum(m.on_wire for m in found))
    if not messages:
        yield "messages: none, there is one rank"
        return
    sums: dict[tuple[str, str, str], float] = defaultdict(float)
    for m in messages:
        sums[m.axis, m.operation, m.what] += m.on_wire
    rows = [
        (f"{axis}: {operation.replace('_', '-')} of {what}", [format_bytes(value)])
        for (axis, operation, what), value in sums.items()
    ]
    yield from _table("sent by one rank in a step", ["bytes"], rows)


def time_table(plan: Plan, tokens: float | None) -> Iterator[str]:
    """Return the table of a step's predicted time, with utilization and days."""
    columns = {("FP8" if plan.bf16 else "time"): plan.time} | (
        {"BF16": plan.bf16} if plan.bf16 else {}
    )
    rows = []
    for field, name in PARTS.items():
        values = [getattr(time, field) for time in columns.values()]
        if any(value > 0 for value in values):
            rows.append((name, [f"{1e3 * value:.1f} ms" for value in values]))
    rows.append(("step", [f"{1e3 * time.total:.1f} ms" for time in columns.values()]))
    yield from _table("predicted time of a step", list(columns), rows)
    seconds, spec = plan.time.total, plan.spec
    speed = tokens_per_step(spec) / seconds
    mfu = model_flops_utilization(spec, seconds, plan.hardware)
    yield (
        f"{format_count(speed)} tokens/s, "
        f"{format_count(speed / spec.parallel.world_size)} per device; "
        f"MFU {mfu:.1%} of the BF16 peak (causal attention)"
    )
    total = tokens or float(spec.train.max_steps) * tokens_per_step(spec)
    what = "--tokens" if tokens else f"trainer.max_steps={spec.train.max_steps}"
    yield f"{format_count(total)} tokens ({what}) take {total / speed / 86400:.2f} days"


def verdict(plan: Plan, bf16: StepTime) -> Iterator[str]:
    """Return whether FP8 pays, and why it does not pay more."""
    ratio = bf16.total / plan.time.total
    assert plan.bf16_bytes is not None
    more = plan.largest.total - plan.bf16_bytes
    word = "pays" if ratio >= 1.1 else "pays little" if ratio > 1 else "does not pay"
    yield (
        f"FP8 {word} here: {ratio:.2f} times BF16's speed (a prediction), "
        f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'} memory on the largest rank"
    )
    for reason in why_fp8_pays_little(plan.spec, bf16, plan.time):
        yield f"  what stays: {reason}"


def assumptions(plan: Plan) -> Iterator[str]:
    """Return on what the prediction rests."""
    rates = ", ".join(f"{f.name} {getattr(Achieved(), f.name):g}" for f in fields(Achieved))
    yield f"Peaks: {plan.hardware.source}. Assumed fractions of them: {rates}."
    yield backend_note(plan.spec)
    yield (
        "Bytes are those of tensors, without what the allocator and libraries take. No time here "
        "has been measured on a GPU."
    )


def backend_note(spec: RunSpec) -> str:
    """Return for which backend's layers the figures hold."""
    precision = spec.precision
    if precision.backend == "torchao":
        return (
            "Backend torchao: its linears keep their inputs in the compute dtype and no FP8 copies "
            "of weights, as counted here; their time is taken to be that of our own linears."
        )
    if precision.backend == "te":
        return (
            "Backend te: Transformer Engine's FP8 copies of weights, in two orientations, are "
            "counted; its activations, workspace and time are taken to be those of our own layers."
        )
    if precision.auto is not None and precision.auto.why_not_te is None:
        return (
            "Figures are those of our own layers (model.fp8_backend=native). Where Transformer "
            "Engine is installed, auto runs its layers, whose own buffers are not counted."
        )
    return "Figures are those of our own layers (native)."


def listed(found: Sequence[Found] | None) -> Iterator[str]:
    """Return the best layouts of a search, with their overrides; nothing without a search."""
    if found is None:
        return
    yield ""
    if not found:
        yield "No layout of these ranks fits: use more devices or FSDP (model.fsdp=True)."
        return
    yield "layouts that fit, the fastest first (predicted):"
    for place, layout in enumerate(found, start=1):
        parallel = layout.spec.parallel
        yield (
            f"{place}. {1e3 * layout.time.total:9.1f} ms  {format_bytes(layout.num_bytes):>10}  "
            f"data {parallel.dp}  {' '.join(layout.overrides())}"
        )


def as_json(plan: Plan, tokens: float | None, found: Sequence[Found]) -> dict[str, object]:
    """Return the plan as plain values; bytes and seconds."""
    spec, seconds = plan.spec, plan.time.total
    speed = tokens_per_step(spec) / seconds
    flops = gemm_flops_per_token(spec.model, seq_length=spec.data.seq_length)
    return {
        "hardware": asdict(plan.hardware),
        "assumed": asdict(Achieved()),
        "num_params": num_params(plan),
        "fits": plan.fits,
        "usable_bytes": int(USABLE * plan.hardware.memory_bytes),
        "ranks": [asdict(rank) | {"total": rank.total} for rank in plan.ranks],
        "messages": [
            [asdict(m) | {"on_wire": m.on_wire} for m in messages] for messages in plan.messages
        ],
        "flops_per_token": asdict(flops) | {"total": flops.total},
        "step_seconds": asdict(plan.time) | {"total": seconds},
        "tokens_per_second": speed,
        "mfu_of_bf16_peak": model_flops_utilization(spec, seconds, plan.hardware),
        "days": (tokens or float(spec.train.max_steps) * tokens_per_step(spec)) / speed / 86400,
        "bf16_step_seconds": None if plan.bf16 is None else plan.bf16.total,
        "fp8_over_bf16": None if plan.bf16 is None else plan.bf16.total / seconds,
        "layouts": [
            {
                "overrides": layout.overrides(),
                "step_seconds": layout.time.total,
                "bytes": layout.num_bytes,
            }
            for layout in found
        ],
    }


def write_page(plan: Plan, lines: Sequence[str], path: Path) -> None:
    """Write the page with pictures of memory and time, and the lines that are printed.

    Raises:
        ConfigError: The file cannot be written.
    """
    times = {"FP8" if plan.bf16 else "step": plan.time}
    if plan.bf16 is not None:
        times["BF16"] = plan.bf16
    text = page(
        title=f"Plan: {plan.spec.model.num_layers} layers x {plan.spec.model.hidden_size} on "
        f"{plan.spec.parallel.world_size} x {plan.hardware.name}",
        lines=lines,
        memory={
            f"stage rank {rank.pipeline_rank}": {
                name: values[place] for name, values in memory_rows(plan)
            }
            for place, rank in enumerate(shown(plan))
        },
        limit=plan.hardware.memory_bytes,
        times={
            name: {label: getattr(time, field) for field, label in PARTS.items()}
            for name, time in times.items()
        },
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--page", path, str(error.strerror), "Give a file to write") from None


def _table(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, list[str]]]
) -> Iterator[str]:
    width = max(len(title), *(len(name) for name, _ in rows))
    sizes = [
        max(len(column), *(len(cells[place]) for _, cells in rows))
        for place, column in enumerate(columns)
    ]
    for name, cells in [(title, list(columns)), *rows]:
        line = "   ".join(f"{cell:>{size}}" for cell, size in zip(cells, sizes, strict=True))
        yield f"{name:<{width}}   {line}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
