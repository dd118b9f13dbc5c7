"""Say in lines of text what a plan predicts: its tables, its verdict and what it rests on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from megafp8.cli.help import wrapped
from megafp8.observe.units import format_bytes, format_count, in_columns, plural
from megafp8.plan.experts import ExpertRows
from megafp8.plan.hardware import Hardware
from megafp8.plan.memory import RankMemory
from megafp8.plan.phases import PhaseTime
from megafp8.plan.published import about_pairs
from megafp8.plan.search import Found
from megafp8.plan.time import (
    Achieved,
    StepTime,
    model_flops_utilization,
    tokens_per_step,
    why_fp8_pays_little,
)
from megafp8.plan.traffic import Message
from megafp8.specs import GPTSpec, RunSpec
from megafp8.specs.backends import BACKENDS
from megafp8.specs.gpus import ways
from megafp8.specs.parameters import num_active_parameters, num_parameters
from megafp8.specs.precision import GEMMS
from megafp8.specs.recipe import Recipe
from megafp8.specs.recipes import HIGH_PRECISION, find_recipe, label_of
from megafp8.specs.te_versions import DEFAULT_VERSION

USABLE = 0.9
"""The fraction of a device's memory that a job may fill; the rest is the CUDA context's, the
allocator's and the communication library's."""
UNCERTAINTY = 1.23
"""The largest factor by which a predicted ratio of FP8's speed to BF16's and a published one
differ: `python -m benchmarks.plan_published` compares six pairs of runs
(docs/evidence/published.md). Within it of 1 the plan does not say which is faster."""
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
    phases: tuple[PhaseTime, ...] = ()  # of a job that changes its precision
    experts: ExpertRows | None = None  # of a model that has some

    @property
    def tokens_of_job(self) -> float:
        """Return the number of tokens of all steps."""
        return float(self.spec.train.max_steps) * tokens_per_step(self.spec)

    def seconds_of(self, tokens: float) -> float:
        """Return the time of so many tokens, of which each phase of the job has its share."""
        seconds = self.time.total
        if self.phases:
            of_job = sum(phase.num_steps * phase.step_seconds for phase in self.phases)
            seconds = of_job / self.spec.train.max_steps
        return tokens / (tokens_per_step(self.spec) / seconds)

    @property
    def largest(self) -> RankMemory:
        """Return the rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def fits(self) -> bool:
        """Whether the largest rank needs at most the usable part of the memory."""
        return self.largest.total <= USABLE * self.hardware.memory_bytes

    @property
    def fp8_over_bf16(self) -> float | None:
        """Return the predicted speed in FP8 over that in BF16.

        It is None for a run in BF16, under FP8-LM, whose own passes have no predicted time, and for
        a recipe or a model that is `unpredicted`.
        """
        if self.bf16 is None or not self.spec.optim.storage.is_plain or self.unpredicted:
            return None
        return self.bf16.total / self.time.total

    @property
    def unpredicted(self) -> tuple[str, str] | None:
        """Return a recipe's label and why its time is not predicted, if that is so.

        It is so for some recipes, and for all in a model with experts.
        """
        recipe = self.spec.precision.fp8
        if self.experts is not None and recipe is not None:
            return label_of(recipe.name), "the times of experts are lower bounds"
        names = () if recipe is None else {recipe.name, *(r.precision for r in recipe.modules)}
        some = sorted(name for name in names if name != HIGH_PRECISION)
        reasons = ((name, _why_unpredicted(find_recipe(name), self.hardware)) for name in some)
        return next(((label_of(name), reason) for name, reason in reasons if reason), None)

    @property
    def verdict(self) -> str | None:
        """Return `pays`, `undecided` or `does not pay`; None where no ratio is predicted.

        It is None too for a job that does not fit, and so has no time.
        """
        ratio = self.fp8_over_bf16
        if ratio is None or not self.fits:
            return None
        if 1 / UNCERTAINTY < ratio < UNCERTAINTY:
            return "undecided"
        return "pays" if ratio > 1 else "does not pay"


def _why_unpredicted(recipe: Recipe, hardware: Hardware) -> str | None:
    traits, capability, counted = recipe.traits, hardware.capability, "the figures above are those"
    if not recipe.has_kernels():
        return f"its rule is in torch operations, and {counted} of FP8 kernels with such scales"
    if traits.numbers != "fp8":
        return f"{counted} of FP8 products, and none of FP4 are known here"
    if capability is not None and not ways(traits, capability):
        return f"its products are emulated on {hardware.name}, and {counted} of FP8 tensor cores"
    return None


@dataclass(frozen=True)
class Table:
    """Hold a table: what its rows are, the titles of its columns, and each row's name and cells."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]

    def lines(self) -> list[str]:
        """Return the table as lines with columns of equal width."""
        rows = [(name, *cells) for name, cells in [(self.title, self.columns), *self.rows]]
        return in_columns(rows, range(1, len(rows[0])), gap=3)


def describe_plan(plan: Plan, vocabulary: str, tokens: float | None) -> Iterator[str]:
    """Return the lines of the plan; `vocabulary` says whose it is, if it was not given."""
    yield from about_job(plan, vocabulary)
    yield ""
    yield from memory_table(plan).lines()
    yield whether_it_fits(plan)
    yield ""
    traffic = traffic_table(plan)
    yield from ["messages: none, there is one rank"] if traffic is None else traffic.lines()
    yield ""
    if plan.fits:
        yield from time_table(plan).lines()
        yield from about_speed(plan, tokens)
    else:
        yield "No time is predicted for a job that does not fit."
    if plan.bf16 is not None:
        yield ""
        yield from verdict(plan, plan.bf16)
    yield ""
    yield from assumptions(plan)


def about_job(plan: Plan, vocabulary: str) -> Iterator[str]:
    """Return lines about the model, its layout, and what is unusual in it."""
    spec, hardware = plan.spec, plan.hardware
    model, parallel, train = spec.model, spec.parallel, spec.train
    active = ""
    if plan.experts is not None:
        active = f" of which a token visits {format_count(num_active_parameters(model))}"
    yield (
        f"model: {plural(model.num_layers, 'layer')} x {model.hidden_size}, "
        f"{format_count(num_parameters(model))} parameters{active}, vocabulary {model.vocab_size}"
        + (f" ({vocabulary}; --vocab-size gives another)" if vocabulary else "")
    )
    if plan.experts is not None:
        yield from about_experts(plan.experts, model)
    yield (
        f"layout: {parallel.world_size} x {hardware.name} = tensor {parallel.tp} x context "
        f"{parallel.cp} x data {parallel.dp} x pipeline {parallel.pp}{stages_text(spec)}; "
        f"{train.global_batch_size} x "
        f"{spec.data.seq_length} tokens a step, "
        f"{train.num_microbatches(parallel.dp)} microbatch(es) of {train.micro_batch_size}"
    )
    yield from (f"note: {note}" for note in layout_notes(plan))
    if plan.phases:
        yield (
            "note: the tables are those of the phase of model.precision_schedule that needs the "
            f"most memory: {phase_name(plan.spec)}"
        )


def about_experts(experts: ExpertRows, model: GPTSpec) -> Iterator[str]:
    """Return lines about the experts of a model: their rows, and what unequal rows cost."""
    assert model.moe is not None
    of_fp8 = f"; FP8 products have a multiple of {experts.multiple} rows"
    yield (
        f"experts: {model.moe.num_experts} of width {model.moe.ffn_hidden_size} in "
        f"{sum(model.moe.layers)} of {plural(model.num_layers, 'layer')}, {model.moe.top_k} of "
        f"them for a token; an expert has {experts.mean:.4g} rows of a microbatch in the mean"
        + (of_fp8 if experts.multiple > 1 else "")
    )
    if experts.mean < experts.multiple:
        yield "note: experts with fewer rows than that compute as many, of which the rest are zero"
    if experts.load == 1:
        yield "Each rank has all experts: however a router chooses, it has as many rows."
    else:
        yield (
            f"The figures are those of equally many rows. With {experts.load:g} times the mean of "
            f"ranks the largest rank needs {format_bytes(experts.bytes_at_load)}"
        )


def phase_name(spec: RunSpec) -> str:
    """Return a name for a phase that is planned as a run by itself: its recipe, or its dtype."""
    recipe = spec.precision.fp8
    if recipe is None or recipe.is_unused:
        return spec.precision.compute.upper()
    high = ", ".join(gemm for gemm in GEMMS if gemm in recipe.high_precision_gemms)
    some = "" if not recipe.modules else ", with others for some linears"
    return label_of(recipe.name) + (f" without {high}" if high else "") + some


def layout_notes(plan: Plan) -> list[str]:
    """Return what is unusual in how the ranks are laid out over the nodes."""
    parallel, hardware, notes = plan.spec.parallel, plan.hardware, []
    nodes, devices, tp = parallel.num_nodes, parallel.devices_per_node, parallel.tp
    most = hardware.node_devices
    if most is not None and devices > most:
        fitting = f"trainer.num_nodes={nodes * -(-devices // most)} trainer.devices={most}"
        notes.append(
            f"trainer.devices={devices} are taken to be joined by links of {hardware.node_gb_s:g} "
            f"GB/s within one node, but a node of {hardware.name} has {most}: {fitting} plans "
            "with nodes of that size"
        )
    if nodes > 1 and devices % tp:
        notes.append(
            f"tensor parallelism of {tp} crosses nodes of {devices}: its messages take the network "
            f"of {hardware.network_gb_s:g} GB/s for each device and not the links of "
            f"{hardware.node_gb_s:g} GB/s, and messages within layers are "
            f"{plan.time.tensor_parallel / plan.time.total:.0%} of a step; a "
            f"model.tensor_model_parallel_size that divides {devices} avoids that"
        )
    return notes


def passing_gradients(spec: RunSpec) -> str:
    """Return what gradients are called that a rank holds no longer than a step."""
    in_fp32 = spec.optim.storage.sums_in_fp32
    return "FP32 sums of gradients" if in_fp32 else "gradients of other ranks"


def memory_rows(plan: Plan) -> list[tuple[str, list[int]]]:
    """Return the rows of the memory table, one figure for each pipeline rank that is shown."""
    ranks = shown_ranks(plan)
    kind = "FP32 " if plan.spec.optim.storage.is_plain else ""
    rows = [
        ("weights", [r.held.weights for r in ranks]),
        (f"{kind}master weights", [r.held.masters for r in ranks]),
        ("optimizer's moments", [r.held.moments for r in ranks]),
        (f"{kind}gradients", [r.held.gradients for r in ranks]),
        ("scales, histories", [r.held.scaling for r in ranks]),
        ("quantized copies of weights", [r.step.weight_copies for r in ranks]),
        ("weights gathered by FSDP", [r.step.gathered for r in ranks]),
        ("gradients not there yet", [-r.step.late for r in ranks]),
        (passing_gradients(plan.spec), [r.step.gradients for r in ranks]),
        ("gradients that arrive", [r.step.arriving for r in ranks]),
        ("activations in flight", [r.step.in_flight for r in ranks]),
        ("working memory", [r.step.workspace for r in ranks]),
        ("memory of CUDA graphs", [r.step.graphs for r in ranks]),
    ]
    return [(name, values) for name, values in rows if any(values)]


def shown_ranks(plan: Plan) -> list[RankMemory]:
    """Return the first, the middle and the last pipeline rank."""
    last = len(plan.ranks) - 1
    return [plan.ranks[place] for place in sorted({0, last // 2, last})]


def memory_table(plan: Plan) -> Table:
    """Return the table of the bytes of a rank."""
    ranks = shown_ranks(plan)
    rows = [(name, [format_bytes(value) for value in values]) for name, values in memory_rows(plan)]
    rows.append(("in all", [format_bytes(rank.in_step) for rank in ranks]))
    if any(rank.start for rank in ranks):
        rows.append(("at the start", [format_bytes(rank.start) for rank in ranks]))
    titles = [f"stage rank {rank.pipeline_rank}" for rank in ranks]
    if len(ranks) == 1:
        titles = ["each rank"]
    return Table("memory of one rank", titles, rows)


def whether_it_fits(plan: Plan) -> str:
    """Return a sentence about the largest rank and the device's memory."""
    memory = plan.hardware.memory_bytes
    word = "fits" if plan.fits else "DOES NOT FIT"
    return (
        f"{word}: the largest rank needs {format_bytes(plan.largest.total)}, "
        f"{plan.largest.total / memory:.0%} of {format_bytes(memory)}; up to {USABLE:.0%} is usable"
        + ("" if plan.fits else "; --search lists layouts that fit")
    )


def traffic_table(plan: Plan) -> Table | None:
    """Return the table of messages of the pipeline rank that sends most; None if none sends any."""
    messages = max(plan.messages, key=lambda found: sum(m.on_wire for m in found))
    if not messages:
        return None
    sums: dict[tuple[str, str, str], float] = defaultdict(float)
    for m in messages:
        sums[m.axis, m.operation, m.what] += m.on_wire
    rows = [
        (f"{axis}: {operation.replace('_', '-')} of {what}", [format_bytes(value)])
        for (axis, operation, what), value in sums.items()
    ]
    return Table("sent by one rank in a step", ["bytes"], rows)


def time_table(plan: Plan) -> Table:
    """Return the table of a step's predicted time."""
    columns = {"FP8": plan.time, "BF16": plan.bf16} if plan.bf16 else {"time": plan.time}
    rows = []
    in_seconds = max(time.total for time in columns.values()) >= 10

    def shown_time(value: float) -> str:
        return f"{value:.2f} s" if in_seconds else f"{1e3 * value:.1f} ms"

    for field, name in PARTS.items():
        values = [getattr(time, field) for time in columns.values()]
        if any(value > 0 for value in values):
            rows.append((name, [shown_time(value) for value in values]))
    rows.append(("step", [shown_time(time.total) for time in columns.values()]))
    return Table("predicted time of a step", list(columns), rows)


def about_speed(plan: Plan, tokens: float | None) -> Iterator[str]:
    """Return the predicted tokens per second, utilization and days."""
    seconds, spec = plan.time.total, plan.spec
    speed = tokens_per_step(spec) / seconds
    mfu = model_flops_utilization(spec, seconds, plan.hardware)
    yield (
        f"{format_count(speed)} tokens/s, "
        f"{format_count(speed / spec.parallel.world_size)} per device; "
        f"MFU {mfu:.1%} of the BF16 peak (causal attention)"
    )
    total = tokens or plan.tokens_of_job
    steps = f"trainer.max_steps={spec.train.max_steps}; --tokens gives another number"
    what = "--tokens" if tokens else steps
    yield from (
        f"{phase.num_steps} steps of {format_seconds(phase.step_seconds)} each: {phase.text}"
        for phase in plan.phases
    )
    yield f"{format_count(total)} tokens ({what}) take {plan.seconds_of(total) / 86400:.2f} days"


def verdict(plan: Plan, bf16: StepTime) -> Iterator[str]:
    """Return whether FP8 pays, as far as that can be known, and why it does not pay more."""
    assert plan.bf16_bytes is not None
    more = plan.largest.total - plan.bf16_bytes
    memory = (
        f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'} memory on the largest rank"
    )
    if not plan.fits:
        yield f"FP8: {memory}"
        return
    ratio = plan.fp8_over_bf16
    if plan.unpredicted is not None:
        label, reason = plan.unpredicted
        yield f"{label}: {memory}. Whether it is faster than BF16 is not predicted: {reason}"
        yield from published(plan)
        return
    if ratio is None:
        yield (
            f"FP8-LM: {memory}. Whether it is faster than BF16 is not predicted: the times leave "
            "out what it takes to store gradients, weights and moments in low precision"
        )
        return
    predicted = f"{ratio:.2f} times BF16's speed is predicted"
    if plan.verdict == "undecided":
        yield (
            f"Whether FP8 pays here is undecided: {predicted}, and published pairs of runs differ "
            f"from such predictions by up to {UNCERTAINTY:g} times; {memory}"
        )
    else:
        yield (
            f"FP8 {plan.verdict} here: {predicted} (published pairs of runs are within "
            f"{UNCERTAINTY:g} times of such predictions), {memory}"
        )
    for reason in why_fp8_pays_little(plan.spec, bf16, plan.time):
        yield f"  what stays: {reason}"
    yield from published(plan)


def published(plan: Plan) -> Iterator[str]:
    """Return the line about published pairs of the job's recipe and BF16, slower ones too."""
    recipe = plan.spec.precision.fp8
    if recipe is not None:
        for line in about_pairs(recipe.name, plan.hardware.capability):
            yield f"  {line}"


def assumptions(plan: Plan) -> Iterator[str]:
    """Return on what the prediction rests."""
    rates = ", ".join(f"{f.name} {getattr(Achieved(), f.name):g}" for f in fields(Achieved))
    yield f"Peaks: {plan.hardware.source}. Assumed fractions of them: {rates}."
    yield backend_note(plan.spec)
    if plan.experts is not None:
        yield (
            "Experts: each has as many rows as the others. Its products take as long as dense ones "
            "with as many operations or, if that is longer, as their operands take to be read, and "
            "the host starts those of each expert for themselves. That is a lower bound: no GPU "
            "has run experts here, and nothing published was compared with it."
        )
    if not plan.spec.optim.storage.is_plain:
        yield (
            "FP8-LM: the update, and the sums of gradients over microbatches, are counted as those "
            "of FP32 states; their own passes have no prediction yet."
        )
    yield (
        "Bytes are those of tensors, without what the allocator and libraries take. No time here "
        "has been measured on a GPU."
    )


def backend_note(spec: RunSpec) -> str:
    """Return for which backend's layers the figures hold."""
    precision = spec.precision
    if precision.auto is not None and precision.auto.why_not_te is None:
        return (
            "Figures are those of our own layers (model.fp8_backend=native). Where Transformer "
            "Engine is installed, auto runs its layers, whose own buffers are not counted."
        )
    traits, recipe = BACKENDS[precision.backend], precision.fp8
    casts = recipe is not None and not recipe.params_in_fp8
    if not casts or spec.parallel.fsdp is None or not traits.depends_on_version:
        return traits.note
    version = precision.te_version or DEFAULT_VERSION
    return (
        f"{traits.note} With FSDP, versions before {traits.casts_gathered_from} keep these copies "
        f"of all weights, and later ones none. This is planned for {version}; "
        "model.te_version=… plans another."
    )


def listed(found: Sequence[Found] | None, chosen: int = 1) -> Iterator[str]:
    """Return the best layouts of a search, and the overrides of the one of number `chosen`.

    Nothing is returned without a search.
    """
    if found is None:
        return
    yield ""
    if not found:
        yield "No layout of these ranks fits, with FSDP or without it: use more devices."
        return
    yield "layouts that fit, the fastest first (predicted):"
    for place, layout in enumerate(found, start=1):
        seconds, size = format_seconds(layout.step_seconds), format_bytes(layout.num_bytes)
        yield f"{place}. {seconds:>9}  {size:>9}  {layout_text(layout.spec)}"
    yield f"settings of layout {chosen}, for the command line (--layout N shows another's):"
    yield f"     {' '.join(found[chosen - 1].overrides())}"


def on_terminal(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines of which sentences are broken at 100 columns, and rows and settings are not."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        first = line.split(maxsplit=1)[:1]
        if len(line) > 100 and "  " not in line.strip() and "=" not in "".join(first):
            yield from wrapped(line.strip(), 100, indent, f"{indent}  ")
        else:
            yield line


def layout_text(spec: RunSpec) -> str:
    """Return a layout in words."""
    parallel = spec.parallel
    words = [
        f"tensor {parallel.tp}{' (sequence)' if parallel.sequence_parallel else ''} x context "
        f"{parallel.cp} x data {parallel.dp} x pipeline {parallel.pp}{stages_text(spec)}, "
        f"micro batch {spec.train.micro_batch_size}"
    ]
    words += ["FSDP"] * (parallel.fsdp is not None) + ["ZeRO-1"] * spec.optim.shards_states
    words += ["all layers recomputed"] * (spec.model.recompute is not None)
    return ", ".join(words)


def stages_text(spec: RunSpec) -> str:
    """Return how many pipeline stages each rank has, if there are several: ` (6 stages a rank)`."""
    stages = spec.parallel.pipeline.stages_per_rank
    return f" ({stages} stages a rank)" if spec.parallel.pp > 1 and stages > 1 else ""


def format_seconds(seconds: float) -> str:
    """Return a time in milliseconds, or in seconds from 10 s on."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1e3 * seconds:.1f} ms"
