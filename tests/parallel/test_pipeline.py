"""Stages on gloo ranks against one process: losses, gradients, FP8 state, bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, LossScaleSpec, ParallelSpec, PipelineSpec
from megafp8.specs.model import RecomputeSpec
from tests.kit.cases import Case
from tests.kit.runs import alone, on_ranks
from tests.kit.tensors import assembled
from tests.parallel.rank_work import Outcome, run_case
from tests.parallel.test_tensor_parallel import (
    Outcomes,
    assert_gradients_close,
    assert_losses_close,
)
from tests.tiny import SEQ, gpt_spec, optim_spec

FP8 = Fp8Recipe(amax_history_len=4)
MODEL = gpt_spec(num_layers=4, hidden_dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1)
UNTIED = replace(MODEL, share_embeddings_and_output_weights=False)
WHOLE_LAYERS = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
ONE = {
    "fp32": Case("fp32", None, MODEL, steps=3, num_microbatches=4),
    "fp8": Case("fp32", FP8, MODEL, steps=3, num_microbatches=4),
    "bf16 fp8 untied": Case(
        "bf16", FP8, UNTIED, steps=8, num_microbatches=4, optim=optim_spec(clip_grad_norm=None)
    ),
    "uneven": Case("fp32", FP8, MODEL, steps=2, num_microbatches=4),
}
SHORT = replace(ONE["bf16 fp8 untied"], steps=3)
OPTIONS = {  # what a run may have besides, on stages
    "recomputed": replace(SHORT, model=replace(UNTIED, recompute=WHOLE_LAYERS)),
    "fp16": replace(
        SHORT, compute="fp16", loss_scale=LossScaleSpec(init_scale=2.0**24, hysteresis=1)
    ),
    "weights in fp8": replace(SHORT, fp8=replace(FP8, params_in_fp8=True)),
    "documents": replace(SHORT, documents=True),
    "post-norm in fp32": replace(
        SHORT,
        model=replace(UNTIED, transformer_block_type="post_ln", fp32_residual_connection=True),
    ),
}
SCHEDULES = {
    "GPipe": PipelineSpec(schedule="GPipe"),
    "1F1B": PipelineSpec(),
    "Interleaved1F1B": PipelineSpec(schedule="Interleaved1F1B", stages_per_rank=2),
    "InterleavedZeroBubble": PipelineSpec(schedule="InterleavedZeroBubble", stages_per_rank=2),
    "ZBVZeroBubble": PipelineSpec(schedule="ZBVZeroBubble", stages_per_rank=2),
}
CASES = {
    f"{name} {kind}": replace(case, parallel=ParallelSpec(pp=2, pipeline=pipeline))
    for kind, case in ONE.items()
    if kind != "uneven"
    for name, pipeline in SCHEDULES.items()
}
CASES["uneven"] = replace(
    ONE["uneven"], parallel=ParallelSpec(pp=2, pipeline=PipelineSpec(layout=(1, 3)))
)
CASES |= {
    f"{schedule} {option}": replace(case, parallel=ParallelSpec(pp=2, pipeline=SCHEDULES[schedule]))
    for option, case in OPTIONS.items()
    for schedule in ("1F1B", "ZBVZeroBubble")
}
for schedule in ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble"):  # as the others, shorter
    name = f"{schedule} bf16 fp8 untied"
    CASES[name] = replace(CASES[name], steps=5)
Runs = dict[str, Outcomes]


@pytest.fixture(scope="module")
def ranks() -> Runs:
    return on_ranks(run_case, CASES, 2)


@pytest.fixture(scope="module")
def one() -> dict[str, Outcome]:
    """With as many threads as a rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    outcomes = {name: run_case(case, single_rank()) for name, case in (ONE | OPTIONS).items()}
    torch.set_num_threads(threads)
    return outcomes


def by_name(outcomes: Outcomes, direction: str, field: str, update: int) -> dict[str, torch.Tensor]:
    """The rows of one table, by tensor, after the last of `update` updates of it."""
    rows = {}
    for outcome in outcomes:
        for row, name in enumerate(outcome.names[direction]):
            assert name not in rows, f"{name} is on two stages"
            rows[name] = outcome.updates[direction][update][field][row]
    return rows


def assert_same_fp8_state(outcomes: Outcomes, expected: Outcome, step: int) -> None:
    """Bit for bit, after `step`: each stage may have more updates than the model."""
    for direction in ("forward", "backward"):
        for field in ("history", "quant_scale", "num_updates"):
            per_step = [len(o.updates[direction]) // len(o.losses) for o in outcomes]
            ours = {}
            for outcome, count in zip(outcomes, per_step, strict=True):
                ours |= by_name([outcome], direction, field, (step + 1) * count - 1)
            count = len(expected.updates[direction]) // len(expected.losses)
            theirs = by_name([expected], direction, field, (step + 1) * count - 1)
            assert ours.keys() == theirs.keys() and len(ours) > 12
            for name, value in theirs.items():
                assert torch.equal(ours[name], value), f"{direction} {field} of {name}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fp32_equals_one_process(ranks: Runs, one: dict[str, Outcome], schedule: str) -> None:
    """Dropout included: its masks are keyed by the microbatch, wherever it is."""
    case, expected = ranks[f"{schedule} fp32"], one["fp32"]
    assert_losses_close(case, expected, 1e-5)
    assert_gradients_close(case, expected, 1e-5)
    for rank in case:
        assert rank.norms == pytest.approx(expected.norms, rel=1e-5)
        assert rank.validation[0] == pytest.approx(expected.validation[0], rel=1e-5)
        assert rank.validation[1] == expected.validation[1]
        torch.testing.assert_close(rank.logits, expected.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fp8_of_the_first_step_equals_one_process_bit_for_bit(
    ranks: Runs, one: dict[str, Outcome], schedule: str
) -> None:
    """Scales, histories, and each layer's gradients; the tied embedding's are summed in another
    order."""
    case, expected = ranks[f"{schedule} fp8"], one["fp8"]
    assert_same_fp8_state(case, expected, 0)
    assert case[0].losses[0] == expected.losses[0]
    ours = assembled([rank.first_gradients for rank in case])
    theirs = assembled([expected.first_gradients])
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert set(different) <= {"embedding.word.weight"}
    assert_losses_close(case, expected, 1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_in_fp8_equal_one_process_bit_for_bit(
    ranks: Runs, one: dict[str, Outcome], schedule: str
) -> None:
    """8 steps or 5, longer than the history: untied embeddings, no clipping (the norm is summed in
    another order)."""
    case, expected = ranks[f"{schedule} bf16 fp8 untied"], one["bf16 fp8 untied"]
    steps = len(case[0].losses)
    for rank in case:
        assert rank.losses == expected.losses[:steps]
    assert_same_fp8_state(case, expected, steps - 1)
    if steps < len(expected.losses):
        return
    ours = assembled([rank.weights for rank in case])
    theirs = assembled([expected.weights])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_options_on_stages_equal_one_process_bit_for_bit(
    ranks: Runs, one: dict[str, Outcome], schedule: str, option: str
) -> None:
    """Layers computed again while other microbatches are in flight, FP16 with a first overflow,
    weights kept in FP8, documents in a sample, a stream that norms write in FP32."""
    case, expected = ranks[f"{schedule} {option}"], one[option]
    plain = one["bf16 fp8 untied"].losses[: len(expected.losses)]
    if option in ("fp16", "documents", "post-norm in fp32"):
        assert expected.losses != plain, "the option does something"
    else:  # payloads are those that weights kept in BF16 would be cast to
        assert expected.losses == plain
    for rank in case:
        assert rank.losses == expected.losses
    assert_same_fp8_state(case, expected, len(expected.losses) - 1)
    ours = assembled([rank.weights for rank in case])
    theirs = assembled([expected.weights])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_eight_stages_on_four_ranks_equal_one_process_bit_for_bit() -> None:
    """Ranks in the middle send and receive in both directions, with several on their way."""
    case = replace(SHORT, model=replace(UNTIED, num_layers=8), num_microbatches=8, steps=2)
    cases = {
        name: replace(case, parallel=ParallelSpec(pp=4, pipeline=pipeline))
        for name, pipeline in SCHEDULES.items()
        if pipeline.stages_per_rank > 1
    }
    expected = alone(run_case, {"one": case})["one"]
    for name, ranks in on_ranks(run_case, cases, 4).items():
        assert all(rank.losses == expected.losses for rank in ranks), name


def test_each_rank_holds_its_layers(ranks: Runs) -> None:
    def layers(case: str) -> list[set[str]]:
        return [
            {piece.name.split(".")[1] for piece in r.weights if piece.name.startswith("layers.")}
            for r in ranks[case]
        ]

    assert layers("1F1B fp8") == [{"0", "1"}, {"2", "3"}]
    assert layers("Interleaved1F1B fp8") == [{"0", "2"}, {"1", "3"}]
    assert layers("ZBVZeroBubble fp8") == [{"0", "3"}, {"1", "2"}]
    assert layers("uneven") == [{"0"}, {"1", "2", "3"}]


def test_uneven_layers(ranks: Runs, one: dict[str, Outcome]) -> None:
    assert_same_fp8_state(ranks["uneven"], one["uneven"], 0)
    assert_losses_close(ranks["uneven"], one["uneven"], 1e-4)


def test_tied_copies_stay_bitwise_equal(ranks: Runs) -> None:
    for schedule in ("1F1B", "Interleaved1F1B"):
        copies = [
            piece.tensor
            for rank in ranks[f"{schedule} fp8"]
            for piece in rank.weights
            if piece.name == "embedding.word.weight"
        ]
        assert len(copies) == 2 and torch.equal(*copies)
    both_ends = ranks["ZBVZeroBubble fp8"]
    names = [[piece.name for piece in rank.weights] for rank in both_ends]
    assert [n.count("embedding.word.weight") for n in names] == [1, 0], "one rank, one weight"


def test_bytes_between_stages(ranks: Runs) -> None:
    """A step: each boundary passes [B, S, D] forward and back once a microbatch."""
    for schedule, crossings in (("1F1B", 1), ("Interleaved1F1B", 3), ("ZBVZeroBubble", 2)):
        outcomes = ranks[f"{schedule} fp8"]
        sent = sum(rank.traffic["pp", "send", "float32"] for rank in outcomes)
        assert sent == 2 * crossings * 4 * 2 * SEQ * MODEL.hidden_size * 4
        tied = 0 if schedule == "ZBVZeroBubble" else MODEL.vocab_size * MODEL.hidden_size * 4
        assert all(
            r.traffic.get(("ends", "all_reduce_sum", "float32"), 0) == tied for r in outcomes
        )
