"""Show the layout and the memory of a job on its ranks, without starting them.

Every setting is checked as at the start of a run.

megafp8 dryrun model=gpt3_175b trainer.num_nodes=128 trainer.devices=8 … [--rank N]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megafp8.cli.commands import run_old_name
from megafp8.cli.epochs import with_epochs
from megafp8.cli.job import (
    command_parser,
    gives_steps,
    parse_options,
    reports_errors,
    resolved_table,
)
from megafp8.cli.plan import hardware_from, is_hardware
from megafp8.cli.plan_text import USABLE, passing_gradients, phase_name
from megafp8.config.keys import MAX_VOCABULARY
from megafp8.config.resolve import resolve
from megafp8.errors import ConfigError, DataError, ExitCode
from megafp8.observe.units import format_bytes, in_columns, plural
from megafp8.plan.experts import with_uneven_rows
from megafp8.plan.hardware import KNOWN, Hardware
from megafp8.plan.phases import largest_phase
from megafp8.plan.vocabulary import SIZE_KEY, asked_vocabulary
from megafp8.runs.run_data import open_data
from megafp8.specs import RunSpec
from megafp8.specs.data import BUILTIN_CORPUS
from megafp8.specs.recipes import find_recipe

if TYPE_CHECKING:  # the arguments are checked before torch, which takes seconds, is imported
    from megafp8.plan.dryrun import Layout, RankShare

MAX_SIMULATED = 2**16


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print layout and memory; return 0, or 2 after printing why the run would be refused."""
    parser = command_parser(
        "dryrun",
        __doc__,
        epilog="All other arguments are those of pretrain_gpt.py. trainer.accelerator=gpu needs no "
        f"GPU here. hardware=NAME ({', '.join(KNOWN)}) counts a GPU's memory and says whether the "
        "job fits there.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rank",
        type=int,
        help="the rank to show (default: one of the first, the middle and the last stage)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="the tokenizer's vocabulary (default: the preset's of model=; else that of the data, "
        "which must then exist here)",
    )
    parser.add_argument("--shapes", action="store_true", help="show every parameter's shape too")
    options, rest = parser.parse_known_args(argv)
    figures = [word for word in rest if is_hardware(word)]
    hardware = hardware_from(figures) if figures else None
    given = parse_options([word for word in rest if not is_hardware(word)])
    has_gpu = _sees_gpu if hardware is None else lambda: True  # auto means the one that is named
    loaded = given.load(given.overrides, has_gpu, trains=False)
    asked, num_nodes = (loaded.values[f"trainer.{name}"] for name in ("accelerator", "num_nodes"))
    settled, _ = with_epochs(loaded, gives_steps(loaded))
    spec = resolve(settled.values, lambda: asked == "gpu" or has_gpu())
    from megafp8.plan import dryrun
    from megafp8.runs import directory
    from megafp8.train.build import check_on_cpu

    directory.check_directory(spec)
    check_can_be_simulated(spec, hardware, asked, num_nodes)
    check_on_cpu(spec)
    spec, whose = with_known_vocabulary(spec, options.vocab_size, loaded.origins)
    ranks = chosen_ranks(spec, options.rank)
    has_phases = bool(spec.precision.schedule)
    if has_phases:
        spec = largest_phase(spec)
        print(f"phase of model.precision_schedule that needs the most memory: {phase_name(spec)}")
    layout = dryrun.whole_layout(spec)
    lines = job_lines(spec, layout, whose, needs_fp8=not has_phases)
    print("\n".join([*lines, device_line(spec, asked, hardware)]))
    shares = [dryrun.rank_share(spec, rank) for rank in ranks]
    print("\n".join(["", *memory_table(spec, shares)]))
    if spec.parallel.ep > 1:
        load, uneven = with_uneven_rows(spec)
        print(about_balance([dryrun.rank_share(uneven, rank) for rank in ranks], load))
    if hardware is not None:
        print(fits(shares, hardware))
    if options.shapes:
        for share in shares:
            print(
                "\n".join(["", f"rank {share.rank}: logical shape -> this rank's", *shapes(share)])
            )
    settings = [*resolved_table(loaded), *loaded.inert_lines()]
    print(
        "\n".join(["", "settings that are not the default job's:", *settings] if settings else [])
    )
    return ExitCode.FINISHED


def check_can_be_simulated(
    spec: RunSpec, hardware: Hardware | None, asked: str, num_nodes: int
) -> None:
    """Raise an error that names the setting for which a dry run cannot count the job's memory.

    `asked` is `trainer.accelerator` and `num_nodes` is `trainer.num_nodes`, as they were given.

    Raises:
        ConfigError: `hardware` is compared with ranks on CPUs, or the layout has too many ranks.
    """
    if hardware is not None and not _on_gpu(spec):
        raise ConfigError(
            "hardware",
            hardware.name,
            f"the ranks would be on CPUs (trainer.accelerator={asked})",
            "Add trainer.accelerator=gpu, which needs no GPU here, or leave hardware out",
        )
    if (world := spec.parallel.world_size) > MAX_SIMULATED:
        raise ConfigError(
            "trainer.num_nodes",
            num_nodes,
            f"makes {world} ranks, and a layout of at most {MAX_SIMULATED} is simulated",
            "Simulate fewer replicas of the model; megafp8 plan counts them all",
        )


def with_known_vocabulary(
    spec: RunSpec, vocab_size: int | None, origins: Mapping[str, str]
) -> tuple[RunSpec, str]:
    """Return the run with the vocabulary's padded size, and words that say whose vocabulary it is.

    `vocab_size` is the tokenizer's. None: it is the preset's of `model=`, unless the settings name
    data or a size; otherwise the data are opened as in a run, and theirs is used. `origins` names
    the layer that set each key.

    Raises:
        ConfigError: `vocab_size` is no size of a vocabulary.
        DataError: The data cannot be opened.
    """
    whose, known, data = "", None, spec.data
    if vocab_size is None:
        known = asked_vocabulary(origins, data.prefix, data.tokenizer.vocab_size)
    if known is not None:
        vocab_size, whose = known
        if SIZE_KEY not in origins:
            whose += (
                f"; the built-in corpus has {data.tokenizer.vocab_size}, for which give "
                f"--vocab-size {data.tokenizer.vocab_size}"
            )
    elif vocab_size is None:
        try:
            vocab_size = open_data(data, print).vocab_size
        except DataError as error:
            hint = f"{error.hint}, or --vocab-size N, with which no data are opened"
            raise DataError(error.file, error.field, error.reason, hint) from error
        whose = "of the built-in corpus" if data.prefix == BUILTIN_CORPUS else "of the data"
        whose += "; --vocab-size gives another"
    elif not 1 <= vocab_size <= MAX_VOCABULARY:
        hint = "Give the size of the tokenizer's vocabulary"
        raise ConfigError("--vocab-size", vocab_size, f"must be from 1 to {MAX_VOCABULARY}", hint)
    return spec.with_vocabulary(vocab_size), whose


def chosen_ranks(spec: RunSpec, rank: int | None) -> list[int]:
    """Return the ranks to show: `rank`, or one of the first, the middle and the last stage.

    Raises:
        ConfigError: The run has no such rank.
    """
    size = spec.parallel.world_size
    if rank is None:
        from megafp8.plan.dryrun import ranks_to_show

        return ranks_to_show(spec)
    if not 0 <= rank < size:
        raise ConfigError("--rank", rank, f"the ranks are 0 to {size - 1}", "Give one of them")
    return [rank]


def job_lines(spec: RunSpec, layout: Layout, whose: str, *, needs_fp8: bool) -> Iterator[str]:
    """Yield lines about the whole job: model, layout, batch, pipeline and FP8.

    `whose` says whose vocabulary it is. Only without `needs_fp8` a job in FP8 may have no product
    in it.

    Raises:
        ConfigError: FP8 is asked for, and no linear would run in FP8.
    """
    model, parallel, train = spec.model, spec.parallel, spec.train
    pipeline = parallel.pipeline
    stages = pipeline.stages_per_rank
    yield (
        f"model: {plural(model.num_layers, 'layer')} x {model.hidden_size}, "
        f"{layout.num_params:,} parameters, "
        f"vocabulary {model.vocab_size}" + (f" ({whose})" if whose else "")
    )
    schedule = f" ({pipeline.schedule}" + (f", {stages} stages a rank)" if stages > 1 else ")")
    yield (
        f"layout: {plural(parallel.world_size, 'rank')} ({plural(parallel.num_nodes, 'node')} x "
        f"{parallel.devices_per_node}) = tensor {parallel.tp} x context {parallel.cp} x data "
        f"{parallel.dp} x pipeline {parallel.pp}"
        + (schedule if parallel.pp > 1 else "")
        + (f"; {parallel.ep} ranks divide the experts of a layer" if parallel.ep > 1 else "")
    )
    yield (
        f"batch: {train.global_batch_size} x {spec.data.seq_length} tokens: "
        f"{plural(layout.num_microbatches, 'microbatch', 'microbatches')} of "
        f"{train.micro_batch_size} on each of {plural(parallel.dp, 'replica')}"
    )
    if layout.times is not None:
        worst = max(layout.times.idle)
        yield (
            f"pipeline: ranks wait {layout.times.bubble:.1%} of the time (the worst rank: "
            f"{worst:.1%}), if a backward pass takes twice as long as a forward pass"
        )
    if spec.precision.fp8 is not None:
        from megafp8.train.report.fp8 import require_fp8, share_of_ranks

        parts = [part for part in layout.stages for _ in range(parallel.tp)]
        share = share_of_ranks(parts, model, num_replicas=1)
        if needs_fp8:
            require_fp8(share)
        kind = find_recipe(spec.precision.fp8.name).traits.kind  # as the header of a run says
        yield (
            f"{kind}: {share.share:.1%} of the GEMM FLOPs of a step without attention; in higher "
            f"precision: {'; '.join(share.higher)}"
        )


def device_line(spec: RunSpec, asked: str, hardware: Hardware | None) -> str:
    """Return for which device the memory is counted, and how to count it for the other one.

    `asked` is `trainer.accelerator` as it was given.
    """
    device, other = ("GPUs", "cpu") if _on_gpu(spec) else ("CPUs", "gpu")
    why = f"trainer.accelerator={asked}"
    if asked == "auto" and hardware is not None:
        why += f", hardware={hardware.name}"
    elif asked == "auto":
        why += " finds a GPU here" if _on_gpu(spec) else " finds no GPU here"
    count = "counts CPUs'" if other == "cpu" else "counts GPUs', and needs none"
    return f"memory: that of ranks on {device} ({why}; trainer.accelerator={other} {count})"


def memory_table(spec: RunSpec, shares: Sequence[RankShare]) -> Iterator[str]:
    """Yield the lines of a table of memory, with a column for each rank."""
    rows: list[tuple[str, list[str]]] = [
        ("", [f"rank {share.rank}" for share in shares]),
        ("position in layout", [_position(share) for share in shares]),
        ("layers", [_ranges(share.layers) for share in shares]),
        ("parameters", [f"{share.num_params:,}" for share in shares]),
    ]

    def add(name: str, values: Iterable[int]) -> None:
        rows.append((name, [format_bytes(value) for value in values]))

    kind = "FP32 " if spec.optim.storage.is_plain else ""
    if spec.parallel.fsdp is None:
        add("weights", (share.held.weights for share in shares))
    add(f"{kind}master weights", (share.held.masters for share in shares))
    add("optimizer moments", (share.held.moments for share in shares))
    add(f"{kind}gradients", (share.held.gradients for share in shares))
    if spec.precision.fp8 is not None:
        add("scales, histories", (share.held.scaling for share in shares))
        add("quantized copies of weights", (share.step.weight_copies for share in shares))
    add("activations of a microbatch", (share.step.microbatch for share in shares))
    if spec.parallel.pp > 1:
        add("  of all in flight", (share.step.in_flight for share in shares))
    add("  at their peak", (share.step.computing for share in shares))
    if spec.parallel.fsdp is not None:
        add("weights gathered by FSDP", (share.step.gathered for share in shares))
    if any(share.step.late for share in shares):
        add("gradients not there yet", (-share.step.late for share in shares))
    if any(share.step.gradients for share in shares):
        add(passing_gradients(spec), (share.step.gradients for share in shares))
    if spec.train.cuda_graph:
        add("memory of CUDA graphs", (share.step.graphs for share in shares))
    add("total at the peak", (share.in_step for share in shares))
    if spec.parallel.fsdp is not None:
        add("at the start", (share.start for share in shares))
    yield from in_columns([(name, *cells) for name, cells in rows], range(1, len(shares) + 1), 3)
    yield ""
    yield (
        "Not included: memory of the allocator, of libraries and of collectives."
        + (" The GPUs' features are checked at the start of the run." if _on_gpu(spec) else "")
    )


def about_balance(uneven: Sequence[RankShare], load: float) -> str:
    """Return that rows of experts are counted in balance, and what ranks need with more of them.

    `uneven` are the ranks that are shown, if they had `load` times as many rows.
    """
    peaks = (f"{format_bytes(share.in_step)} on rank {share.rank}" for share in uneven)
    text = "Rows of experts are counted in balance: each expert gets equally many of every rank."
    if load == 1:  # every token visits all experts
        return f"{text} No router can give a rank more."
    return f"{text} With {load:g} times as many, the total at the peak is {', '.join(peaks)}."


def fits(shares: Sequence[RankShare], hardware: Hardware) -> str:
    """Return in words whether the ranks that are shown fit into the memory of `hardware`."""
    largest = max(share.total for share in shares)
    usable = USABLE * hardware.memory_bytes
    part = f"{format_bytes(largest)} of {format_bytes(hardware.memory_bytes)}"
    if largest <= usable:
        return (
            f"fits on {hardware.name}: {part}; {1 - USABLE:.0%} are kept for what is not included"
        )
    return (
        f"does not fit on {hardware.name}: {part}, of which {USABLE:.0%} can be used. Use more "
        "tensor or pipeline parallelism, a smaller micro batch, or recompute activations "
        "(megafp8 plan --search finds layouts)"
    )


def shapes(share: RankShare) -> Iterator[str]:
    """Yield a line for each parameter's shapes; parameters that differ in the layer share one."""
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...], str], list[int]] = {}
    for name, whole, local, dtype in share.shapes:
        layer = re.match(r"layers\.(\d+)\.", name)
        general = re.sub(r"^layers\.\d+\.", "layers.*.", name)
        groups.setdefault((general, whole, local, dtype), []).append(int(layer[1]) if layer else -1)
    for (name, whole, local, dtype), layers in groups.items():
        times = f"  x {len(layers)}" if len(layers) > 1 else ""
        yield f"  {name} {list(whole)} -> {list(local)} {dtype}{times}"


def _position(share: RankShare) -> str:
    return " ".join(f"{axis}{index}" for axis, index in share.place.items())


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges: `0-3,8-11`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges)


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _on_gpu(spec: RunSpec) -> bool:
    return spec.parallel.accelerator == "gpu"


if __name__ == "__main__":
    run_old_name("dryrun")
