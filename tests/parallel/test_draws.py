"""Every layout of ranks draws the random bytes of one process, and rounds equal numbers alike."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec, PipelineSpec
from megafp8.specs.model import RecomputeSpec
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.parallel.draws_work import (
    Cast,
    Place,
    Watched,
    features_at,
    tokens_at,
    watch_case,
)
from tests.tiny import gpt_spec

BATCH, MICROBATCHES = 4, 4
MODEL = gpt_spec(num_layers=4, hidden_size=64, ffn_hidden_size=64, bias=False, activation="swiglu")
LAYOUTS: dict[str, tuple[int, ParallelSpec]] = {
    "tp 2": (2, ParallelSpec(tp=2)),
    "tp 2, sp": (2, ParallelSpec(tp=2, sequence_parallel=True)),
    "cp 2": (2, ParallelSpec(cp=2)),
    "cp 2, documents": (2, ParallelSpec(cp=2)),
    "dp 2": (2, ParallelSpec()),
    "FSDP": (2, ParallelSpec(fsdp=FsdpSpec())),
    "pp 2": (2, ParallelSpec(pp=2)),
    "pp 2, interleaved": (
        2,
        ParallelSpec(pp=2, pipeline=PipelineSpec(schedule="Interleaved1F1B", stages_per_rank=2)),
    ),
    "pp 2, zero bubble V": (
        2,
        ParallelSpec(pp=2, pipeline=PipelineSpec(schedule="ZBVZeroBubble", stages_per_rank=2)),
    ),
    "tp 4, sp": (4, ParallelSpec(tp=4, sequence_parallel=True)),
    "tp 2 x cp 2, sp, documents": (4, ParallelSpec(tp=2, cp=2, sequence_parallel=True)),
    "tp 2 x cp 2, sp": (4, ParallelSpec(tp=2, cp=2, sequence_parallel=True)),
    "tp 2 x pp 2": (4, ParallelSpec(tp=2, pp=2)),
    "cp 2 x dp 2": (4, ParallelSpec(cp=2)),
    "pp 2 x dp 2, recomputed": (4, ParallelSpec(pp=2)),
}
LAST = ("layers.3.mlp", "layers.3.attention.projection")
SAME_NUMBERS = ("dp 2", "FSDP", "pp 2", "pp 2, interleaved", "pp 2, zero bubble V")
"""Layouts in which each gradient of the first step is that of one process, bit for bit."""


def case_of(name: str) -> Case:
    model = MODEL
    if name.endswith("recomputed"):
        again = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
        model = replace(MODEL, recompute=again)
    return Case(
        "fp32",
        Fp8Recipe(name="nvfp4"),
        model,
        num_microbatches=MICROBATCHES,
        batch=BATCH,
        documents=name.endswith("documents"),
        parallel=LAYOUTS[name][1] if name in LAYOUTS else ParallelSpec(),
    )


@cache
def one(name: str = "one") -> Watched:
    return watch_case(case_of(name), single_rank())


@cache
def watched(size: int) -> dict[str, list[Watched]]:
    cases = {name: case_of(name) for name, (ranks, _) in LAYOUTS.items() if ranks == size}
    return on_ranks(watch_case, cases, size)


def by_place(casts: list[Cast]) -> dict[tuple[int, tuple[int, ...], str], Cast]:
    found = {(cast.step, cast.samples, cast.linear): cast for cast in casts}
    assert len(found) == len(casts), "each gradient is cast once"
    return found


def where(
    place: Place, cast: Cast, whole: Cast, *, documents: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    features = whole.grad.shape[1]
    columns = features_at(place, cast.linear, features, is_gated=True)
    borders = None
    if documents:  # of the samples that the step had
        batches = case_of("one, documents").microbatches(cast.step - 1, single_rank())
        borders_N1 = batches[cast.samples[0] // BATCH].cu_seqlens_N1
        borders = tuple(borders_N1.tolist())
    return tokens_at(place, cast.linear, BATCH, borders), columns


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_draw_what_one_process_draws(name: str) -> None:
    documents = name.endswith("documents")
    expected = by_place(one("one, documents" if documents else "one").casts)
    seen = set()
    for rank in watched(LAYOUTS[name][0])[name]:
        for key, cast in by_place(rank.casts).items():
            whole = expected[key]
            rows, columns = where(rank.place, cast, whole, documents=documents)
            for along, found in cast.bytes.items():
                assert torch.equal(found, whole.bytes[along][rows][:, columns]), (key, along)
            # Little has been rounded so far. Documents that begin alike have rows that are alike.
            if key[0] == 1 and cast.linear.startswith(LAST) and not documents:
                assert_same_tokens(cast, whole, rows, columns)
            if key[0] == 1 and name in SAME_NUMBERS:
                assert torch.equal(cast.grad, whole.grad)
                assert all(torch.equal(cast.codes[a], whole.codes[a]) for a in cast.codes)
            seen.add(key)
    assert seen == expected.keys()


def assert_same_tokens(cast: Cast, whole: Cast, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Each row is nearer to the row that it is said to be than to any other of the microbatch.

    The rows of tokens without a target are left out where they are zeros.
    """
    mode = "donot_use_mm_for_euclid_dist"
    distances = torch.cdist(cast.grad, whole.grad[:, columns], compute_mode=mode)
    counted = whole.grad[rows].abs().amax(1) > 0
    assert int(counted.sum()) > len(rows) // 4
    nearest = distances.argmin(1)
    assert torch.equal(nearest[counted], rows[counted]), (cast.linear, cast.samples)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "FSDP"])
def test_equal_numbers_get_equal_codes(name: str) -> None:
    for rank in watched(LAYOUTS[name][0])[name]:
        for linear, cast in rank.given.items():
            whole = one().given[linear]
            rows, columns = where(rank.place, cast, whole)
            # Where ranks divide sequences, the blocks along tokens are of other tokens.
            spec = rank.place.parallel
            divided = spec.cp > 1 or spec.sequence_parallel
            for along in ("last",) if divided else ("last", "first"):
                assert torch.equal(cast.codes[along], whole.codes[along][rows][:, columns])


def test_another_division_into_microbatches_draws_the_same() -> None:
    merged = watch_case(replace(case_of("one"), merged=2), single_rank())
    expected, found = by_place(one().casts), by_place(merged.casts)
    assert len(found) == len(expected) // 2
    for (step, samples, linear), cast in found.items():
        halves = [expected[step, part, linear] for part in (samples[:BATCH], samples[BATCH:])]
        for along, drawn in cast.bytes.items():
            assert torch.equal(drawn, torch.cat([half.bytes[along] for half in halves]))


def test_every_cast_draws_bytes_of_its_own() -> None:
    drawn = [bytes(b[:16, :16].flatten().tolist()) for c in one().casts for b in c.bytes.values()]
    assert len(set(drawn)) == len(drawn)
