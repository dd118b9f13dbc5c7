"""Gradients summed over replicas bucket by bucket, alone and together with the other axes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

from megafp8.fp8.grad_sink import MainGradSink
from megafp8.fp8.scaling import Pending
from megafp8.parallel.collectives import Axis
from megafp8.parallel.grad_reduce import Bucket, GradReducer, NotingSink, buckets_of
from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, ParallelSpec, PipelineSpec
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.kit.tensors import assembled
from tests.parallel.rank_work import Outcome, run_case
from tests.parallel.test_sequence_pipeline import EXACT, assert_same_bits, staged
from tests.parallel.test_tensor_parallel import (
    Outcomes,
    assert_gradients_close,
    assert_losses_close,
    assert_same_tables,
)
from tests.tiny import gpt_spec

FP8 = Fp8Recipe(amax_history_len=4)


@dataclass(frozen=True)
class Doubling(Axis):
    """A replica with the same gradients; notes what is reduced when."""

    size: int = 2
    events: list[str] = field(default_factory=list)

    def start_all_reduce_sum(self, tensor: torch.Tensor) -> Pending:
        self.events.append(f"reduce {tensor.numel()} {tensor.dtype}".removesuffix("torch.float32"))
        return Pending(tensor.mul_(2))

    def start_reduce_scatter_in_place(self, tensor: torch.Tensor) -> Pending:
        self.events.append(f"scatter {tensor.numel()} {tensor.dtype}")
        return Pending(self.own_part(tensor).mul_(2))


class Three:
    """Three weights in two buckets, [a, b] and [c]; `a` gets two gradients a microbatch."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.axis = Doubling("dp")
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(n)) for n in (3, 2, 4))
        self.params = [self.a, self.b, self.c]
        self.flat = torch.full((9,), torch.nan)
        self.sink = MainGradSink()
        self.reducer = GradReducer(dtype=dtype)
        self.noting = NotingSink(self.sink, self.reducer)
        views = self.flat.split([3, 2, 4])
        self.sink.attach(zip(self.params, views, strict=True))
        self.reducer.attach(buckets_of(self.flat, self.params, bucket_bytes=20), self.axis)

    def step(self, microbatches: int = 1, *, names: str = "acab", extra: bool = False) -> list[str]:
        self.axis.events.clear()
        self.sink.begin_step()
        self.reducer.begin_step(microbatches)
        for _ in range(microbatches):
            for name in names:
                weight = getattr(self, name)
                self.axis.events.append(name)
                self.noting.add(weight, lambda _, weight=weight: torch.ones_like(weight))
        if extra:
            self.noting.add(self.c, lambda _: torch.ones(4))
        self.sink.end_step()
        self.axis.events.append("end")
        self.reducer.finish()
        return list(self.axis.events)


def test_a_bucket_is_reduced_as_soon_as_its_last_gradient_is_in() -> None:
    three = Three()
    assert three.step() == ["a", "c", "a", "b", "end", "reduce 5 ", "reduce 4 "], "it learns"
    assert three.flat.tolist() == [4, 4, 4, 2, 2, 2, 2, 2, 2]
    three.flat.fill_(torch.nan)
    assert three.step() == ["a", "c", "reduce 4 ", "a", "b", "reduce 5 ", "end"]
    assert three.flat.tolist() == [4, 4, 4, 2, 2, 2, 2, 2, 2]


def test_only_the_last_microbatch_starts_a_reduction() -> None:
    three = Three()
    three.step(2)
    events = three.step(2)
    assert events == ["a", "c", "a", "b", "a", "c", "reduce 4 ", "a", "b", "reduce 5 ", "end"]
    assert three.flat.tolist() == [8, 8, 8, 4, 4, 4, 4, 4, 4]
    assert three.step(1)[-1] == "reduce 4 ", "another number of microbatches is learned anew"
    assert three.step(1)[2] == "reduce 4 "


def test_a_bucket_waits_for_those_before_it_and_starts_with_the_last_of_them() -> None:
    """All ranks reduce in the order of the first step, also where gradients come in another one."""
    three = Three()
    three.step()
    assert three.step(names="aabc") == ["a", "a", "b", "c", "reduce 4 ", "reduce 5 ", "end"]
    assert three.flat.tolist() == [4, 4, 4, 2, 2, 2, 2, 2, 2]


def test_a_rank_keeps_its_range_of_a_sum_that_was_sent_in_bf16() -> None:
    """With ZeRO-1 rank 1 of two owns the second half of the bucket, and the first one stays."""
    bucket = Bucket(torch.arange(8.0), frozenset(), is_scattered=True)
    axis = Doubling("dp", rank=1)
    bucket.start(axis, torch.bfloat16)
    bucket.finish(axis)
    assert bucket.gradient.tolist() == [0, 1, 2, 3, 8, 10, 12, 14]
    assert axis.events == ["scatter 8 torch.bfloat16"]


def test_a_weight_without_gradient_is_zero_and_reduced_at_the_end() -> None:
    three = Three()
    for _ in range(2):
        events = three.step(names="aca")
        assert three.flat.tolist() == [4, 4, 4, 0, 0, 2, 2, 2, 2]
    assert events == ["a", "c", "reduce 4 ", "a", "end", "reduce 5 "]


def test_a_gradient_after_its_reduction_is_a_bug_that_shows() -> None:
    three = Three()
    three.step()
    with pytest.raises(AssertionError, match="after its bucket was reduced"):
        three.step(extra=True)


def test_bf16_rounds_what_is_sent() -> None:
    three = Three(torch.bfloat16)
    three.step()
    assert three.axis.events[-1] == "reduce 4 torch.bfloat16"
    assert three.flat.dtype == torch.float32 and three.flat.tolist() == [4, 4, 4, 2, 2, 2, 2, 2, 2]


# ---- on ranks

SMALL = ParallelSpec(grad_bucket_bytes=4096)
TWO = {
    "one bucket": Case("bf16", FP8, steps=5),
    "small buckets": Case("bf16", FP8, steps=5, parallel=SMALL),
    "bf16": Case("fp32", steps=5, parallel=replace(SMALL, grad_reduce_dtype="bf16")),
    "own scales": Case("fp32", FP8, steps=3, parallel=ParallelSpec(tp_only_amax_red=True)),
    "sp": EXACT,
}
MODEL = gpt_spec(num_layers=4, hidden_dropout=0.1)
STAGES = PipelineSpec(schedule="Interleaved1F1B", stages_per_rank=2)
FOUR = {
    "pp x dp": Case("fp32", None, MODEL, steps=3, num_microbatches=4,
                    parallel=ParallelSpec(pp=2, grad_bucket_bytes=4096)),
    "pp x dp fp8": Case("fp32", FP8, MODEL, steps=3, num_microbatches=4,
                        parallel=ParallelSpec(pp=2, pipeline=STAGES, grad_bucket_bytes=4096)),
    "pp x tp": Case("fp32", None, MODEL, steps=3, num_microbatches=4,
                    parallel=ParallelSpec(pp=2, tp=2)),
    "pp x tp fp8": Case("fp32", FP8, MODEL, steps=3, num_microbatches=4,
                        parallel=ParallelSpec(pp=2, tp=2)),
    "pp x sp": staged(EXACT, "1F1B"),
}  # fmt: skip
Runs = dict[str, Outcomes]


@pytest.fixture(scope="module")
def two() -> Runs:
    return on_ranks(run_case, TWO, 2)


@pytest.fixture(scope="module")
def four() -> Runs:
    return on_ranks(run_case, FOUR, 4)


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    cases = {"fp32": FOUR["pp x dp"], "fp8": FOUR["pp x dp fp8"], "two": TWO["bf16"]}
    return {
        name: run_case(replace(case, parallel=ParallelSpec()), single_rank())
        for name, case in cases.items()
    }


def test_early_reductions_give_the_same_bits(two: Runs) -> None:
    """Of two addends the order is the same, whatever the buckets."""
    late, early = (assembled([r.weights for r in two[name]]) for name in list(TWO)[:2])
    assert late.keys() == early.keys()
    assert all(torch.equal(late[name], early[name]) for name in late)
    assert two["one bucket"][0].losses == two["small buckets"][0].losses
    assert two["one bucket"][0].traffic == two["small buckets"][0].traffic, "no byte more"


def test_bf16_reduction_sends_half(two: Runs, alone: dict[str, Outcome]) -> None:
    num_bytes = sum(alone["two"].sizes.values())
    for rank in two["bf16"]:
        assert rank.traffic["dp", "all_reduce_sum", "bfloat16"] == num_bytes // 2
        assert ("dp", "all_reduce_sum", "float32") not in rank.traffic
    assert_losses_close(two["bf16"], alone["two"], 1e-3)
    assert two["bf16"][0].losses != alone["two"].losses


def test_tp_only_amax_red_leaves_replicas_their_own_scales(two: Runs) -> None:
    first, second = two["own scales"]
    assert ("amax", "all_reduce_max", "float32") not in first.traffic
    with pytest.raises(AssertionError):
        assert_same_tables([first, second])
    histories = [rank.updates["forward"][-1]["history"] for rank in (first, second)]
    rows = [row for row, name in enumerate(first.names["forward"]) if name.endswith(".weight")]
    assert torch.equal(histories[0][rows], histories[1][rows]), "replicas have the same weights"


@pytest.mark.parametrize("case", ["pp x dp", "pp x tp"])
def test_pipelines_with_another_axis_equal_one_process(
    four: Runs, alone: dict[str, Outcome], case: str
) -> None:
    assert_losses_close(four[case], alone["fp32"], 1e-5)
    assert_gradients_close(four[case], alone["fp32"], 1e-5)
    for rank in four[case]:
        assert rank.norms == pytest.approx(alone["fp32"].norms, rel=1e-5)
        assert rank.validation[0] == pytest.approx(alone["fp32"].validation[0], rel=1e-5)


@pytest.mark.parametrize("case", ["pp x dp fp8", "pp x tp fp8"])
def test_scales_agree_within_a_stage_and_not_across(
    four: Runs, alone: dict[str, Outcome], case: str
) -> None:
    """Ranks 0 and 1 are one stage, 2 and 3 the other (Megatron's order)."""
    ranks = four[case]
    for stage in (ranks[:2], ranks[2:]):
        assert_same_tables(stage)
        assert stage[0].names == stage[1].names
    assert not set(ranks[0].names["forward"]) & set(ranks[2].names["forward"])
    assembled([rank.weights for rank in ranks])  # replicas agree bit for bit
    assert_losses_close(ranks, alone["fp8"], 1e-2)


def test_stages_of_parts_of_the_sequence_are_bit_for_bit_one_stage(two: Runs, four: Runs) -> None:
    """Sequence parallelism in FP8 with dropout; test_sequence_pipeline.py has every schedule."""
    assert_same_bits(four["pp x sp"], two["sp"])
