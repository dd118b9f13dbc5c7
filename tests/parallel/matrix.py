"""Every layout against one process, in every precision: `python -m tests.parallel.matrix`.

Writes the table of docs/evidence/layouts.md and exits with 1 if a bound is exceeded. Compared with
one process whose microbatches hold what those of all replicas do, so that their numbers agree.

FP32: first gradients, 20 losses and gradient norms within 1e-5, relatively. BF16 and FP8: losses
within 3 times the spread of one process's losses over five runs whose embeddings differ by one
rounding step in a random half of their elements; and in FP8 the tables of all ranks of a stage are
the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import geometric_mean

import torch

from megafp8.parallel.mesh import single_rank
from megafp8.specs import (
    Fp8Recipe,
    FsdpSpec,
    GPTSpec,
    ParallelSpec,
    PipelineSpec,
    StorageSpec,
)
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.recipes import traits_of
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.kit.tensors import assembled
from tests.parallel.rank_work import Outcome, run_case
from tests.parallel.test_tensor_parallel import Outcomes, assert_same_tables, gradient_errors
from tests.ranks import ROOT
from tests.tiny import SEQ, gpt_spec, optim_spec

PAGE = ROOT / "docs" / "evidence" / "layouts.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"
MICROBATCHES = 8  # of 2 samples; a replica has its share of them
PERTURBATIONS = 5
NORMS_BOUND = 0.2
"""Of gradient norms, but in FP32. Adam divides a factor of all gradients out, so that losses hardly
tell of one: norms do."""
MODEL = gpt_spec(num_layers=4)
LLAMA = gpt_spec(
    num_layers=4,
    num_query_groups=2,
    bias=False,
    activation="swiglu",
    normalization="rmsnorm",
    position_embedding_type="rope",
    recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1),
)
ON_LLAMA = "Llama"
"""Layouts whose names end so train that model: rotary positions, grouped queries, recomputation."""
ZERO_BUBBLE = PipelineSpec(schedule="ZBVZeroBubble", stages_per_rank=2)
INTERLEAVED = PipelineSpec(schedule="Interleaved1F1B", stages_per_rank=2)

LAYOUTS: dict[str, tuple[int, ParallelSpec]] = {  # name: (ranks, spec)
    "tp 2": (2, ParallelSpec(tp=2)),
    "tp 4": (4, ParallelSpec(tp=4)),
    "cp 2": (2, ParallelSpec(cp=2)),
    "cp 4": (4, ParallelSpec(cp=4)),
    "pp 2": (2, ParallelSpec(pp=2)),
    "pp 4": (4, ParallelSpec(pp=4)),
    "pp 2, interleaved": (2, ParallelSpec(pp=2, pipeline=INTERLEAVED)),
    "pp 2, zero bubble V": (2, ParallelSpec(pp=2, pipeline=ZERO_BUBBLE)),
    "dp 2": (2, ParallelSpec()),
    "dp 4": (4, ParallelSpec()),
    "dp 2, ZeRO-1": (2, ParallelSpec()),
    "dp 4, ZeRO-1": (4, ParallelSpec()),
    "dp 2, FSDP full": (2, ParallelSpec(fsdp=FsdpSpec())),
    "dp 4, FSDP grad": (4, ParallelSpec(fsdp=FsdpSpec(strategy="grad"))),
    "tp 2 x pp 2": (4, ParallelSpec(tp=2, pp=2)),
    "tp 2 x dp 2": (4, ParallelSpec(tp=2)),
    "pp 2 x dp 2": (4, ParallelSpec(pp=2)),
    "tp 2 x cp 2": (4, ParallelSpec(tp=2, cp=2)),
    "cp 2 x dp 2": (4, ParallelSpec(cp=2)),
    "cp 2 x pp 2": (4, ParallelSpec(cp=2, pp=2)),
    "cp 2 x dp 2, ZeRO-1": (4, ParallelSpec(cp=2)),
    "cp 2 x dp 2, FSDP full": (4, ParallelSpec(cp=2, fsdp=FsdpSpec())),
    "tp 2 x cp 2, sp": (4, ParallelSpec(tp=2, cp=2, sequence_parallel=True)),
    "tp 2 x pp 2 x dp 2": (8, ParallelSpec(tp=2, pp=2)),
    "tp 2, sp": (2, ParallelSpec(tp=2, sequence_parallel=True)),
    "tp 4, sp": (4, ParallelSpec(tp=4, sequence_parallel=True)),
    "tp 2 x pp 2, sp": (4, ParallelSpec(tp=2, pp=2, sequence_parallel=True)),
    "tp 2 x dp 2, sp": (4, ParallelSpec(tp=2, sequence_parallel=True)),
    "tp 2 x pp 2 x dp 2, sp": (8, ParallelSpec(tp=2, pp=2, sequence_parallel=True)),
    "tp 2 x pp 2 x dp 2, ZeRO-1": (8, ParallelSpec(tp=2, pp=2)),
    "tp 2 x dp 2, FSDP full": (4, ParallelSpec(tp=2, fsdp=FsdpSpec())),
    "pp 2 x dp 2, FSDP full": (4, ParallelSpec(pp=2, fsdp=FsdpSpec())),
    "pp 2 x dp 2, interleaved, FSDP grad": (
        4,
        ParallelSpec(pp=2, pipeline=INTERLEAVED, fsdp=FsdpSpec(strategy="grad")),
    ),
    "tp 2 x pp 2 x dp 2, sp, FSDP full": (
        8,
        ParallelSpec(tp=2, pp=2, sequence_parallel=True, fsdp=FsdpSpec()),
    ),
    "tp 2 x pp 2 x dp 2, sp, Llama": (8, ParallelSpec(tp=2, pp=2, sequence_parallel=True)),
}
PACKED = "packed"
"""Layouts whose names end so train with documents of six tokens or so, kept apart."""
LAYOUTS |= {
    f"{name}, {PACKED}": LAYOUTS[name]
    for name in (
        "tp 2, sp",
        "cp 2",
        "cp 4",
        "pp 2, zero bubble V",
        "dp 2, FSDP full",
        "dp 2, ZeRO-1",
        "tp 2 x cp 2",
        "cp 2 x pp 2",
        "cp 2 x dp 2",
    )
}
ZERO = optim_spec(name="distributed_fused_adam")
PRECISIONS: dict[str, tuple[str, Fp8Recipe | None]] = {
    "FP32": ("fp32", None),
    "BF16": ("bf16", None),
    "FP8 delayed": ("bf16", Fp8Recipe(amax_history_len=16)),
    "FP8 tensorwise": ("bf16", Fp8Recipe(name="tensorwise")),
    "FP8 delayed, te": ("bf16", Fp8Recipe(amax_history_len=16)),
    **{
        f"FP8 {name}": ("bf16", Fp8Recipe(name=name, power_2_scale=True))
        for name in ("rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
    },
    "FP4 nvfp4": ("bf16", Fp8Recipe(name="nvfp4")),
    "FP4 nvfp4, te": ("bf16", Fp8Recipe(name="nvfp4", backward_format="e4m3")),
    "FP8 delayed, O2": ("bf16", Fp8Recipe(amax_history_len=16)),
    "FP8 tensorwise, O3": ("bf16", Fp8Recipe(name="tensorwise", params_in_fp8=True)),
}
STORED = StorageSpec(main_grads="fp8", main_params="fp16", exp_avg="fp8", exp_avg_sq="fp16")
LEVELS = {"FP8 delayed, O2": "O2", "FP8 tensorwise, O3": "O3"}
"""FP8-LM's levels, with FSDP and each document alone: other layouts are in `test_masters_ranks`."""
WIDE = {"hidden_size": 128, "ffn_hidden_size": 128}
"""The sizes of models in recipes of blocks, which are whole on each of four ranks."""
BATCHES = {"FP8 mxfp8": 8, "FP8 blockwise": 16, "FP4 nvfp4": 4, "FP4 nvfp4, te": 4}
"""The samples of a microbatch in recipes with blocks of tokens; two in the others."""


IN_TE = {"FP8 delayed, te": "FP8 delayed", "FP4 nvfp4, te": "FP4 nvfp4"}
"""The layers of Transformer Engine, its own Python over emulated kernels; and the same in ours."""
NOT_IN_TE = {
    name
    for name, (_, spec) in LAYOUTS.items()
    if spec.cp > 1 or "zero bubble" in name or (name.endswith(PACKED) and spec.sequence_parallel)
}
"""Layouts that have no row with Transformer Engine, since settings refuse them. Documents with
sequence parallelism are refused for microbatches of several samples, as here."""


def precisions_of(layout: str) -> list[str]:
    """The precisions in which a layout runs."""
    runs = [name for name in PRECISIONS if name not in IN_TE or runs_in_te(name, layout)]
    if LAYOUTS[layout][1].fsdp is None or kind_of(layout):
        runs = [name for name in runs if name not in LEVELS]
    return [name for name in runs if has_whole_tokens(name, layout)]


def runs_in_te(precision: str, layout: str) -> bool:
    """Whether a layout has a row with Transformer Engine.

    Four tensor-parallel ranks have 8 columns each of the small model, where Transformer Engine
    multiplies multiples of 16.
    """
    is_wide = precision in BATCHES or LAYOUTS[layout][1].tp <= 2
    return layout not in NOT_IN_TE and is_wide


def has_whole_tokens(precision: str, layout: str) -> bool:
    """Whether the tokens of each rank are whole blocks; they are then not refused."""
    fp8, (_, spec) = PRECISIONS[precision][1], LAYOUTS[layout]
    traits = None if fp8 is None else traits_of(fp8.name)
    if traits is None or precision not in BATCHES:
        return True
    ranks = spec.cp * (spec.tp if spec.sequence_parallel else 1)
    return BATCHES[precision] * SEQ // ranks % traits.multiple == 0


def model_of(layout: str) -> GPTSpec:
    """The model that a layout trains."""
    return LLAMA if layout.endswith(ON_LLAMA) else MODEL


def kind_of(layout: str) -> str:
    """What sets rows of a layout apart from those of the other layouts: its model, or its data."""
    last = layout.rpartition(", ")[2]
    return last if last in (ON_LLAMA, PACKED) else ""


def case_of(
    precision: str,
    spec: ParallelSpec = ParallelSpec(),  # noqa: B008
    model: GPTSpec = MODEL,
    **changes: object,
) -> Case:
    compute, fp8 = PRECISIONS[precision]
    if precision in BATCHES:
        model = replace(model, **WIDE)
    case = Case(compute, fp8, model, steps=20, num_microbatches=MICROBATCHES, parallel=spec)
    case = replace(case, batch=BATCHES.get(precision, 2))
    if precision in LEVELS:
        case = replace(case, optim=optim_spec(storage=STORED))
    if precision in IN_TE:
        case = replace(case, backend="te")
        if not model.is_gated:  # its GELU is the tanh form
            case = replace(case, model=replace(model, activation="gelu-tanh"))
    return replace(case, **changes)  # type: ignore[arg-type]


def spread(case: Case, one: Outcome) -> float:
    """The largest relative distance of a perturbed run's loss from the undisturbed one's."""
    found = 0.0
    for seed in range(PERTURBATIONS):
        perturbed = run_case(replace(case, perturbed=seed), single_rank())
        found = max(found, distance(perturbed.losses, one.losses))
    return found


def distance(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def norms_distance(precision: str, found: list[float], expected: list[float]) -> float:
    """The largest distance of a step's norm; with random rounding, that of the geometric means.

    One process in `nvfp4` has single norms that are 0.32 away when its embeddings differ by one
    rounding step, so that a single step shows nothing; the means of its 20 steps differ by 0.05.
    """
    fp8 = PRECISIONS[precision][1]
    traits = None if fp8 is None else traits_of(fp8.name)
    if traits is None or not traits.grad_output.is_random:
        return distance(found, expected)
    return distance([geometric_mean(found)], [geometric_mean(expected)])


def row(
    name: str, precision: str, ranks: Outcomes, one: Outcome, bound: float
) -> tuple[list[str], bool]:
    """A line of the table, and whether all bounds hold."""
    losses = max(distance(rank.losses, one.losses) for rank in ranks)
    norms = max(norms_distance(precision, rank.norms, one.norms) for rank in ranks)
    gradients = max(gradient_errors(ranks, one).values())
    good = (
        losses <= bound
        and norms <= NORMS_BOUND
        and len({tuple(rank.losses) for rank in ranks}) == 1
    )
    if precision == "FP32":
        good = good and gradients <= bound and norms <= bound
    assembled([rank.weights for rank in ranks])  # replicas agree bit for bit
    if ranks[0].names:  # Transformer Engine has tables of recipes with histories alone
        stages: dict[tuple[str, ...], Outcomes] = {}
        for rank in ranks:
            stages.setdefault(tuple(rank.names["forward"]), []).append(rank)
        for stage in stages.values():
            assert_same_tables(stage)
    numbers = [f"{value:.1e}" for value in (gradients, norms, losses, bound)]
    return [name, precision, *numbers, "yes" if good else "**no**"], good


Key = tuple[str, int, str]  # precision, number of replicas, `kind_of` the layout
Bounds = dict[Key, float]


@cache
def reference(precision: str, replicas: int, kind: str) -> Outcome:
    """What one process saw whose microbatches hold those of all replicas; it runs once."""
    return run_case(_merged(precision, replicas, kind), single_rank())


def _merged(precision: str, replicas: int, kind: str) -> Case:
    model = LLAMA if kind == ON_LLAMA else MODEL
    return case_of(precision, model=model, merged=replicas, documents=kind == PACKED)


def bound_of(key: Key, bounds: Bounds) -> float:
    """The bound of losses, which is put into `bounds` if it had to be measured."""
    precision, *rest = key
    if precision == "FP32":
        return 1e-5
    key = (IN_TE.get(precision, precision), *rest)  # that of our own engine
    if key not in bounds:
        bounds[key] = 3 * spread(_merged(*key), reference(*key))
    return bounds[key]


def run_pairs(
    pairs: dict[str, list[str]], bounds: Bounds, tell: Callable[[list[str]], None]
) -> bool:
    """Run each layout of `pairs` in its precisions; return whether all bounds hold.

    `bounds` are known already; `tell` receives each row of the table.
    """
    torch.set_num_threads(1)
    all_good = True
    for name, chosen in pairs.items():
        size, spec = LAYOUTS[name]
        changes: dict[str, object] = {"documents": kind_of(name) == PACKED}
        if "ZeRO-1" in name:
            changes["optim"] = ZERO
        cases = {
            precision: case_of(precision, spec, model_of(name), **changes) for precision in chosen
        }
        results = on_ranks(run_case, cases, size)
        for precision in chosen:
            key = (precision, replicas_of(name), kind_of(name))
            line, good = row(
                name, precision, results[precision], reference(*key), bound_of(key, bounds)
            )
            tell(line)
            all_good = all_good and good
    return all_good


def markdown(rows: list[list[str]]) -> str:
    head = ["layout", "precision", "first gradients", "norms", "losses", "bound", "holds"]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replicas_of(name: str) -> int:
    size, spec = LAYOUTS[name]
    return size // (spec.tp * spec.cp * spec.pp)


def rows_of(page: Path) -> list[list[str]]:
    """The rows of the page's table."""
    _, _, rest = page.read_text().partition(BEGIN)
    lines = rest.partition(END)[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def bounds_of(page: Path) -> Bounds:
    """The bounds that the page has."""
    return {
        (row[1], replicas_of(row[0]), kind_of(row[0])): float(row[5])
        for row in rows_of(page)
        if row[0] in LAYOUTS
    }


def missing(page: Path) -> dict[str, list[str]]:
    """The precisions that a layout can have, and for which the page has no row."""
    known = {(row[0], row[1]) for row in rows_of(page)}
    pairs = {name: [p for p in precisions_of(name) if (name, p) not in known] for name in LAYOUTS}
    return {name: chosen for name, chosen in pairs.items() if chosen}


def put(page: Path, row: list[str]) -> None:
    """Write one row into the page's table, in the place of the pair's older row."""
    rows = [old for old in rows_of(page) if old[:2] != row[:2]]
    layouts, precisions = list(LAYOUTS), list(PRECISIONS)
    rows = sorted([*rows, row], key=lambda r: (layouts.index(r[0]), precisions.index(r[1])))
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{markdown(rows)}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layouts", nargs="*", help=f"of {', '.join(LAYOUTS)}; none: all")
    parser.add_argument("--only", choices=list(PRECISIONS), help="this precision alone")
    parser.add_argument("--missing", action="store_true", help="pairs without a row alone")
    parser.add_argument("--bounds-of-page", action="store_true", help="not measured again")
    args = parser.parse_args()
    pairs = missing(PAGE) if args.missing else {name: precisions_of(name) for name in LAYOUTS}
    chosen = {
        name: [p for p in precisions if args.only in (None, p)]
        for name, precisions in pairs.items()
        if not args.layouts or name in args.layouts
    }

    def tell(row: list[str]) -> None:
        print(" | ".join(row), flush=True)
        put(PAGE, row)

    known = bounds_of(PAGE) if args.bounds_of_page else {}
    good = run_pairs({name: some for name, some in chosen.items() if some}, known, tell)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
