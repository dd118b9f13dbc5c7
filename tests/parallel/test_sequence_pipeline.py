"""Sequence parallelism with pipelines and replicas, on four and eight gloo ranks.

Ranks are Megatron's: tensor-parallel neighbours, then replicas, then stages.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megafp8.parallel.mesh import single_rank
from megafp8.parallel.pipeline import Boundary
from megafp8.specs import Fp8Recipe, ParallelSpec
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.kit.tensors import assembled
from tests.parallel.rank_work import Outcome, run_case
from tests.parallel.test_pipeline import SCHEDULES, assert_same_fp8_state
from tests.parallel.test_tensor_parallel import (
    Outcomes,
    assert_gradients_close,
    assert_losses_close,
    assert_same_tables,
    assert_tables_follow_specification,
)
from tests.tiny import SEQ, gpt_spec, optim_spec

FP8 = Fp8Recipe(amax_history_len=4)
SHARED = ParallelSpec(tp=2, sequence_parallel=True)
MODEL = gpt_spec(num_layers=4)
UNTIED = gpt_spec(
    num_layers=4,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    ffn_dropout=0.1,
    share_embeddings_and_output_weights=False,
)
PLAIN = Case("fp32", None, MODEL, steps=3, num_microbatches=4, parallel=SHARED)
TENSORWISE = replace(PLAIN, compute="bf16", fp8=Fp8Recipe(name="tensorwise"), steps=8)
EXACT = Case(
    "bf16",
    FP8,
    UNTIED,
    steps=3,
    num_microbatches=4,
    parallel=SHARED,
    optim=optim_spec(clip_grad_norm=None),  # the norm is summed in another order
)
Runs = dict[str, Outcomes]


def staged(case: Case, schedule: str) -> Case:
    return replace(case, parallel=replace(SHARED, pp=2, pipeline=SCHEDULES[schedule]))


def alone(case: Case, merged: int = 1) -> Outcome:
    return run_case(replace(case, parallel=ParallelSpec(), merged=merged), single_rank())


def assert_same_bits(stages: Outcomes, two: Outcomes) -> None:
    """Four ranks in two stages against two ranks in one: losses, FP8 state, weights."""
    for tp in range(2):
        assert stages[tp].losses == stages[2 + tp].losses == two[tp].losses
        assert_same_fp8_state([stages[tp], stages[2 + tp]], two[tp], len(two[tp].losses) - 1)
    ours, theirs = (assembled([rank.weights for rank in ranks]) for ranks in (stages, two))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def assert_equals_one_process(ranks: Outcomes, one: Outcome) -> None:
    """In FP32, within the matrix's bounds."""
    assert_losses_close(ranks, one, 1e-5)
    assert_gradients_close(ranks, one, 1e-5)
    for rank in ranks:
        assert rank.norms == pytest.approx(one.norms, rel=1e-5)
        assert rank.validation[0] == pytest.approx(one.validation[0], rel=1e-5)
        torch.testing.assert_close(rank.logits, one.logits, rtol=1e-3, atol=1e-4)


def test_a_stage_refuses_what_was_not_agreed_on() -> None:
    boundary = Boundary((2, SEQ), (2, SEQ // 2, 32), torch.float32)
    boundary.check(torch.zeros(2, SEQ // 2, 32))
    with pytest.raises(RuntimeError, match="between two stages"):
        boundary.check(torch.zeros(2, SEQ, 32))


@pytest.fixture(scope="module")
def four() -> Runs:
    cases = {"fp32": PLAIN, "exact": EXACT, "tensorwise": TENSORWISE}
    cases = {f"{s} {n}": staged(case, s) for s in SCHEDULES for n, case in cases.items()}
    return on_ranks(run_case, cases, 4)


@pytest.fixture(scope="module")
def references() -> tuple[Runs, dict[str, Outcome]]:
    """Of two ranks, and of one process."""
    return on_ranks(run_case, {"exact": EXACT}, 2), {
        "fp32": alone(PLAIN),
        "tensorwise": alone(TENSORWISE),
    }


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(
    four: Runs, references: tuple[Runs, dict[str, Outcome]], schedule: str
) -> None:
    two, one = references
    assert_equals_one_process(four[f"{schedule} fp32"], one["fp32"])
    assert_same_bits(four[f"{schedule} exact"], two["exact"])
    sent = sum(rank.traffic["pp", "send", "bfloat16"] for rank in four[f"{schedule} exact"])
    crossings = {"GPipe": 1, "1F1B": 1, "ZBVZeroBubble": 2}.get(schedule, 3)
    part = 2 * (SEQ // 2) * MODEL.hidden_size * 2  # of one rank's microbatch, in bytes
    assert sent == 2 * crossings * 2 * EXACT.num_microbatches * part, "both ways, from two ranks"
    assert_losses_close(four[f"{schedule} tensorwise"], one["tensorwise"], 1e-2)


@pytest.mark.slow
def test_tensor_sequence_pipeline_and_data_on_eight_ranks() -> None:
    """Also without stages, on four: the largest amax is taken over replicas too."""
    case = replace(PLAIN, num_microbatches=8)
    fp8 = replace(case, compute="bf16", fp8=FP8, steps=8)
    stages = {"fp32": staged(case, "1F1B"), "fp8": staged(fp8, "1F1B")}
    eight = on_ranks(run_case, stages, 8)
    four = on_ranks(run_case, {"fp32": case, "fp8": fp8}, 4)
    for ranks in (eight, four):
        assert_equals_one_process(ranks["fp32"], alone(case, merged=2))
        assert_losses_close(ranks["fp8"], alone(fp8, merged=2), 1e-2)
        assembled([rank.weights for rank in ranks["fp8"]])  # replicas agree bit for bit
    for stage in (eight["fp8"][:4], eight["fp8"][4:], four["fp8"]):
        assert_same_tables(stage)
        assert_tables_follow_specification(stage, FP8)
