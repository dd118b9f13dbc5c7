"""Predict what a job needs and how fast it is: memory, messages, time, and whether FP8 pays.

megafp8 plan model=gpt3_5b model.fp8=True trainer.devices=8 hardware=h200 [--search]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from megafp8.cli.commands import run_old_name
from megafp8.cli.epochs import with_epochs
from megafp8.cli.job import command_parser, gives_steps, parse_options, reports_errors
from megafp8.cli.plan_page import page
from megafp8.cli.plan_text import (
    USABLE,
    Plan,
    describe_plan,
    layout_notes,
    listed,
    on_terminal,
)
from megafp8.config.checks import check_values
from megafp8.config.keys import MAX_VOCABULARY
from megafp8.config.resolve import resolve
from megafp8.config.schema import all_keys
from megafp8.errors import ConfigError, ExitCode, UserError
from megafp8.observe.flops import gemm_flops_per_token
from megafp8.observe.units import format_bytes
from megafp8.plan.experts import expert_rows
from megafp8.plan.hardware import KNOWN, Hardware, hardware_of
from megafp8.plan.memory import all_ranks
from megafp8.plan.phases import largest_phase, phase_times
from megafp8.plan.search import LAYOUT_KEYS, STAGE_KEYS, Found, search
from megafp8.plan.time import (
    Achieved,
    model_flops_utilization,
    step_time,
    tokens_per_step,
    without_fp8,
)
from megafp8.plan.traffic import rank_traffic
from megafp8.plan.vocabulary import GPT2, asked_vocabulary
from megafp8.report.writer import require_page
from megafp8.secrets import say
from megafp8.specs import RunSpec
from megafp8.specs.backends import BACKENDS
from megafp8.specs.parameters import num_active_parameters, num_parameters
from megafp8.specs.te_versions import DEFAULT_VERSION, installed_version, why_not_on_cpu

ACCELERATOR, TE_VERSION = "trainer.accelerator", "model.te_version"
NODES, DEVICES = "trainer.num_nodes", "trainer.devices"
CONTEXT = "model.context_parallel_size"
DOES_NOT_FIT = 1
"""The exit code for a job that a run would take, but that does not fit into memory."""
SHOWN_LAYOUTS = 8
TOKEN_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the plan; return 0 if the job fits, 1 if it does not, 2 if it would be refused.

    With `--search` it returns 0 if any layout fits.
    """
    parser = command_parser(
        "plan",
        __doc__,
        epilog="Everything else is what pretrain_gpt.py takes. hardware= names one of "
        f"{', '.join(KNOWN)}; hardware.bf16_tflops=… and others replace single figures.",
        allow_abbrev=False,
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="the tokenizer's size")
    parser.add_argument(
        "--tokens",
        type=parse_tokens,
        metavar="N",
        help="tokens of the whole training: 3e11 or 300B",
    )
    parser.add_argument("--search", action="store_true", help="list the best layouts as well")
    parser.add_argument(
        "--layout",
        type=int,
        metavar="N",
        help="with --search: the layout whose settings to show (1)",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write an HTML page with pictures"
    )
    options, rest = parser.parse_known_args(argv)
    hardware = hardware_from([word for word in rest if is_hardware(word)])
    words = [word for word in rest if not is_hardware(word)]
    if options.page is not None:
        require_page(options.page, "Name another file with --page")
    instead, found = "", None
    try:
        asked = spec_of(words, options.vocab_size)
    except UserError as error:
        if not options.search:
            raise
        asked = spec_without_layout(words, options.vocab_size, error)
        found = best_layouts(asked.spec, hardware)
        if not found:
            raise
        asked, instead = asked._replace(spec=found[0].spec), f"Refused: {error}"
    if options.layout is not None and not options.search:
        reason = "has no effect without --search"
        raise ConfigError("--layout", options.layout, reason, "Add --search, or leave it out")
    plan = make_plan(asked.spec, hardware)
    if options.search and found is None:
        found = best_layouts(asked.spec, hardware)
        if found and not plan.fits:
            needed = format_bytes(plan.largest.total)
            instead = f"The layout that was asked for DOES NOT FIT: its largest rank needs {needed}"
            plan = make_plan(found[0].spec, hardware)
    chosen = 1 if options.layout is None else options.layout
    if found and not 1 <= chosen <= len(found):
        reason = f"there are {len(found)} layouts"
        raise ConfigError("--layout", chosen, reason, f"Give a number from 1 to {len(found)}")
    lines = [*describe_plan(plan, asked.vocabulary, options.tokens), *listed(found, chosen)]
    if instead:
        lines = [instead, "This is the plan of the best layout:", "", *lines]
    if options.page is not None:
        text = page(plan, asked.vocabulary, options.tokens, found or [], instead, argv)
        write_page(text, options.page)
    if options.json:
        print(json.dumps(as_json(plan, options.tokens, found or []), indent=2))
    else:
        say(*(on_terminal(lines) if sys.stdout.isatty() else lines))
    return ExitCode.FINISHED if plan.fits or found else DOES_NOT_FIT


def parse_tokens(text: str) -> float:
    """Return a number of tokens, which may end with k, M, B, G or T.

    Raises:
        ConfigError: The text is no positive number.
    """
    factor = TOKEN_SUFFIXES.get(text[-1:].lower())
    try:
        tokens = float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        tokens = 0.0
    if not 0 < tokens < float("inf"):
        raise ConfigError("--tokens", text, "is no number of tokens", "Give 3e11 or 300B")
    return tokens


def best_layouts(spec: RunSpec, hardware: Hardware) -> list[Found]:
    """Return the fastest layouts that fit and that a run would take.

    Of layouts that differ in the number of stages a rank alone, the fastest one is returned.
    """
    accepted: list[Found] = []
    values, seen = resolved_settings(spec), []
    for layout in search(spec, hardware, usable=USABLE):
        settings = layout.settings()
        ranks = {key: value for key, value in settings.items() if key not in STAGE_KEYS}
        if ranks not in seen and not check_values(values | settings):
            seen.append(ranks)
            accepted.append(layout)
            if len(accepted) == SHOWN_LAYOUTS:
                break
    return accepted


def resolved_settings(spec: RunSpec) -> dict[str, Any]:
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
    return key_of_word(word).partition(".")[0] == "hardware"


def key_of_word(word: str) -> str:
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


class Asked(NamedTuple):
    """Hold the run that is planned, with a known vocabulary, and whose vocabulary that is."""

    spec: RunSpec
    vocabulary: str


def spec_of(words: Sequence[str], vocab_size: int | None) -> Asked:
    """Return the run that these overrides ask for, on GPUs.

    Its vocabulary is the given one, or that of the settings or of the preset, or else GPT-2's.

    Raises:
        UserError: The run would be refused, or is to run on a CPU.
    """
    for word in words:
        if key_of_word(word) == ACCELERATOR and word.endswith("=cpu"):
            raise ConfigError(ACCELERATOR, "cpu", "a plan is for GPUs", "Leave it out")
    others = [word for word in words if key_of_word(word) not in (ACCELERATOR, TE_VERSION)]
    given = parse_options(others)
    if vocab_size is not None and not 1 <= vocab_size <= MAX_VOCABULARY:
        reason = f"is not a size from 1 to {MAX_VOCABULARY}"
        raise ConfigError("--vocab-size", vocab_size, reason, "Give the tokenizer's")
    overrides = (*given.overrides, f"{ACCELERATOR}=gpu")
    loaded = given.load(overrides, trains=False)
    settled, _ = with_epochs(loaded, gives_steps(loaded))
    spec = _for_version(resolve(settled.values, lambda: True), words)
    data, whose = spec.data, ""
    if vocab_size is None:
        known = asked_vocabulary(loaded.origins, data.prefix, data.tokenizer.vocab_size)
        vocab_size, whose = known or GPT2
    return Asked(spec.with_vocabulary(vocab_size), whose)


def _for_version(spec: RunSpec, words: Sequence[str]) -> RunSpec:
    """Return the run with the version of Transformer Engine for which it is planned.

    It is the one that the command line asks for, or else the installed one. The run itself has the
    installed one, and refuses the key on GPUs.

    Raises:
        ConfigError: The version that is asked for is too old, or not known, or has no effect.
    """
    asked = {key_of_word(word): word.partition("=")[2].strip("'\"") for word in words}
    version = asked.get(TE_VERSION, "null")
    reason = None if version == "null" else why_not_on_cpu(version)
    if reason is not None:
        raise ConfigError(TE_VERSION, version, reason, f"Give {DEFAULT_VERSION}, for example")
    if BACKENDS[spec.precision.backend].depends_on_version:
        planned = installed_version() if version == "null" else version
        return replace(spec, precision=replace(spec.precision, te_version=planned))
    if version != "null":
        backend = f"model.fp8_backend={spec.precision.backend}"
        reason = f"chooses the version of Transformer Engine, which {backend} does not use"
        raise ConfigError(TE_VERSION, version, reason, "Leave it out")
    return spec


def spec_without_layout(words: Sequence[str], vocab_size: int | None, refusal: UserError) -> Asked:
    """Return the run that these overrides ask for on as many devices, without their layout.

    Its replicas need not divide the batch: it is where a search begins.

    Raises:
        UserError: `refusal`, where more than the layout is refused.
    """
    keys = {key_of_word(word): word.partition("=")[2] for word in words}
    nodes, devices = keys.get(NODES, "1"), keys.get(DEVICES, "")
    if not (nodes.isdecimal() and devices.isdecimal()):
        raise refusal
    replaced = {*LAYOUT_KEYS, NODES, DEVICES}
    others = [word for word in words if key_of_word(word) not in replaced]
    try:
        asked = spec_of([*others, f"{DEVICES}={keys.get(CONTEXT, 1)}"], vocab_size)
    except UserError:
        raise refusal from None
    spec = asked.spec
    trainer = spec.resolved["trainer"]
    assert isinstance(trainer, dict)
    sizes = {"num_nodes": int(nodes), "devices": int(devices)}
    parallel = replace(spec.parallel, num_nodes=int(nodes), devices_per_node=int(devices))
    resolved = spec.resolved | {"trainer": trainer | sizes}
    return asked._replace(spec=replace(spec, parallel=parallel, resolved=resolved))


def make_plan(spec: RunSpec, hardware: Hardware) -> Plan:
    """Return all that is predicted for a job.

    Of a job that changes its precision, it is predicted for the phase that needs the most memory.
    """
    phases, spec = phase_times(spec, hardware), largest_phase(spec)
    recipe = spec.precision.fp8
    plain = None if recipe is None or recipe.is_unused else without_fp8(spec)
    return Plan(
        spec=spec,
        hardware=hardware,
        ranks=all_ranks(spec),
        messages=[rank_traffic(spec, rank) for rank in range(spec.parallel.pp)],
        time=step_time(spec, hardware),
        bf16=None if plain is None else step_time(plain, hardware),
        bf16_bytes=None if plain is None else max(rank.total for rank in all_ranks(plain)),
        phases=phases,
        experts=expert_rows(spec),
    )


def as_json(plan: Plan, tokens: float | None, found: Sequence[Found]) -> dict[str, object]:
    """Return the plan as plain values; bytes and seconds."""
    spec, seconds = plan.spec, plan.time.total
    speed = tokens_per_step(spec) / seconds
    flops = gemm_flops_per_token(spec.model, seq_length=spec.data.seq_length)
    return {
        "hardware": asdict(plan.hardware),
        "assumed": asdict(Achieved()),
        "num_params": num_parameters(plan.spec.model),
        "num_active_params": num_active_parameters(plan.spec.model),
        "experts": None if plan.experts is None else asdict(plan.experts),
        "notes": layout_notes(plan),
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
        "days": plan.seconds_of(tokens or plan.tokens_of_job) / 86400,
        "bf16_step_seconds": None if plan.bf16 is None else plan.bf16.total,
        "phases": [asdict(phase) for phase in plan.phases],
        "fp8_over_bf16": plan.fp8_over_bf16,
        "verdict": plan.verdict,
        "layouts": [
            {
                "overrides": layout.overrides(),
                "step_seconds": layout.step_seconds,
                "bytes": layout.num_bytes,
            }
            for layout in found
        ],
    }


def write_page(text: str, path: Path) -> None:
    """Write the page to a file.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--page", path, str(error.strerror), "Give a file to write") from None


if __name__ == "__main__":
    run_old_name("plan")
