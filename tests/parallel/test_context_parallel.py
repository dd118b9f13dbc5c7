"""Context parallelism on gloo ranks against one process.

Four and eight ranks take minutes: `pytest -m slow tests/parallel/test_context_parallel.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, ParallelSpec, PipelineSpec
from megafp8.specs.model import RecomputeSpec
from tests.config.helpers import load_problems, run_spec
from tests.kit.cases import RESETS, Case
from tests.kit.runs import on_ranks
from tests.kit.tensors import assembled
from tests.parallel import rank_ring
from tests.parallel.rank_work import Outcome, run_case
from tests.parallel.test_tensor_parallel import (
    DROPOUT,
    LLAMA,
    Outcomes,
    assert_gradients_close,
    assert_losses_close,
    assert_same_tables,
    assert_tables_follow_specification,
)
from tests.ranks import run_ranks
from tests.tiny import SEQ, gpt_spec, optim_spec

DELAYED = Fp8Recipe(amax_history_len=4)
TENSORWISE = Fp8Recipe(name="tensorwise")
WINDOWS = replace(LLAMA, window_size=(5, 0), window_attn_skip_freq=2)
CASES = {
    "fp32": Case(),
    "llama": Case(steps=4, model=LLAMA),
    "documents": Case(steps=3, model=LLAMA, documents=True),
    "windows": Case(steps=3, model=WINDOWS),
    "windows, documents": Case(steps=3, model=WINDOWS, documents=True),
    "delayed": Case("bf16", DELAYED, steps=5),
    "tensorwise": Case("bf16", TENSORWISE, steps=5),
}
MORE = {
    "layer scaling": Case(steps=3, model=gpt_spec(apply_query_key_layer_scaling=True)),
    "fp8 params": Case("bf16", Fp8Recipe(amax_history_len=4, params_in_fp8=True), steps=3),
}
AGAIN = {
    name: Case(
        steps=3,
        model=gpt_spec(recompute=RecomputeSpec(granularity=name, method="uniform", num_layers=1)),
    )  # type: ignore
    for name in ("full", "selective")
}
DROPPED = {
    "dropout": Case(steps=3, model=DROPOUT),
    "dropout again": Case(steps=3, model=replace(DROPOUT, recompute=AGAIN["full"].model.recompute)),
}
APART = {
    f"{model}, {precision}, mask {mask}, positions {positions}": Case(
        "fp32",
        fp8,
        replace(spec, init_method_std=0.1),  # so that attention is not even
        steps=3,
        documents=True,
        rules=replace(RESETS, reset_attention_mask=mask, reset_position_ids=positions),
    )
    for model, spec in (("learned", gpt_spec()), ("rope", LLAMA), ("windows", WINDOWS))
    for precision, fp8 in (("fp32", None), ("delayed", DELAYED))
    for mask, positions in itertools.product((False, True), repeat=2)
    if precision == "fp32" or (mask and model != "windows")
}
"""Documents that are kept apart or not, whose positions begin anew or go on."""
TWO = ParallelSpec(devices_per_node=2, cp=2)
ZERO_BUBBLE = PipelineSpec(schedule="ZBVZeroBubble", stages_per_rank=2)
LAYOUTS = {
    "cp 4": (4, ParallelSpec(cp=4)),
    "tp 2 x cp 2": (4, ParallelSpec(tp=2, cp=2)),
    "tp 2 x cp 2, sequence": (4, ParallelSpec(tp=2, cp=2, sequence_parallel=True)),
    "cp 2 x dp 2": (4, ParallelSpec(cp=2)),
    "cp 2 x pp 2": (4, ParallelSpec(cp=2, pp=2)),
    "tp 2 x cp 2 x pp 2": (8, ParallelSpec(tp=2, cp=2, pp=2)),
}


def check(ranks: Outcomes, case: Case, one: Outcome) -> None:
    """FP32 within 1e-5: losses, first gradients, norms, evaluation; the rest within 1e-2."""
    exact = case.compute == "fp32" and case.fp8 is None
    assert_losses_close(ranks, one, 1e-5 if exact else 1e-2)
    assembled([rank.weights for rank in ranks])  # who holds the same agrees bit for bit
    if exact:
        assert_gradients_close(ranks, one, 1e-5)
    for rank in ranks:
        assert rank.losses == ranks[0].losses and rank.norms == ranks[0].norms
        assert rank.validation[0] == pytest.approx(one.validation[0], rel=1e-5 if exact else 1e-2)
        if exact:
            assert rank.norms == pytest.approx(one.norms, rel=1e-5)
            torch.testing.assert_close(rank.logits, one.logits, rtol=1e-3, atol=1e-4)


# ---- the ring alone


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    cases = CASES | MORE | AGAIN | DROPPED | APART
    on_two = {name: replace(case, parallel=TWO) for name, case in cases.items()}
    return run_ranks(rank_ring.run_all, 2, {"cases": on_two})


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def rings(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    if request.param == 2:
        found: list[dict[str, Any]] = request.getfixturevalue("two_ranks")
        return found
    return run_ranks(rank_ring.run_all, request.param, {"cases": {}})


def test_the_ring_is_attention_over_the_whole_sequence(rings: list[dict[str, Any]]) -> None:
    """Nothing ever holds more than one rank's keys and values, or any whole matrix of scores."""
    bounds = {torch.float64: 1e-12, torch.float32: 1e-5}
    bounds |= {torch.bfloat16: 2e-2, torch.float16: 3e-3}
    size = len(rings)
    share = rank_ring.BATCH * rank_ring.SEQ * rank_ring.WIDTH // size
    for rank in rings:
        for heads, groups in rank_ring.HEADS:
            for dtype, bound in bounds.items():
                errors, largest, num_bytes = rank["compared"][f"{heads} {groups} {dtype}"]
                assert max(errors.values()) <= bound, (heads, groups, dtype, errors)
                assert largest <= share * max(heads, 2 * groups)
                sums = max(4, dtype.itemsize)
                assert num_bytes == (size - 1) * 2 * share * groups * (2 * dtype.itemsize + sums)


def test_windows_in_the_ring(rings: list[dict[str, Any]]) -> None:
    """Windows of one token to all but one, of whole sequences and of documents."""
    for rank in rings:
        for name, errors in rank["windows"].items():
            assert max(errors.values()) <= 1e-12, (name, errors)


def test_documents_in_the_ring(rings: list[dict[str, Any]]) -> None:
    """Each document is cut over the ranks; also those shorter than the number of chunks."""
    for rank in rings:
        for name, errors in rank["documents"].items():
            assert max(errors.values()) <= (1e-5 if "32" in name else 1e-12), (name, errors)


def test_dropout_in_the_ring(rings: list[dict[str, Any]]) -> None:
    for rank in rings:
        assert max(rank["dropout"].values()) <= 1e-12


def test_dropout_draws_the_same_in_backward(rings: list[dict[str, Any]]) -> None:
    for rank in rings:
        found = rank["streams"]
        assert found["in order"] and found["again"] and not found["other"]


def test_each_rank_has_a_chunk_from_each_end(rings: list[dict[str, Any]]) -> None:
    chunks = torch.arange(rank_ring.SEQ).chunk(2 * len(rings))
    for index, rank in enumerate(rings):
        expected = torch.cat((chunks[index], chunks[2 * len(rings) - 1 - index]))
        assert rank["streams"]["places"] == expected.tolist()


# ---- training


@pytest.fixture(scope="module")
def two(two_ranks: list[dict[str, Any]]) -> dict[str, Outcomes]:
    return {
        name: [rank["outcomes"][name] for rank in two_ranks] for name in two_ranks[0]["outcomes"]
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    return {name: run_case(case, single_rank()) for name, case in (CASES | MORE).items()}


@pytest.mark.parametrize("case", CASES | MORE)
def test_equals_one_process(two: dict[str, Outcomes], alone: dict[str, Outcome], case: str) -> None:
    check(two[case], (CASES | MORE)[case], alone[case])


@pytest.mark.parametrize("name", APART)
def test_documents_have_the_positions_and_masks_of_one_process(
    two: dict[str, Outcomes], name: str
) -> None:
    """In FP8 a rounding may fall the other way, which moves a loss by some 1e-6. Positions or masks
    of other documents move the first loss by more than the bound of 3e-4, as the end shows."""
    case, ranks = APART[name], two[name]
    one = run_case(case, single_rank())
    if case.fp8 is None:
        assert_gradients_close(ranks, one, 1e-5)
    for rank in ranks:
        assert rank.losses[0] == pytest.approx(one.losses[0], rel=3e-4)
        if case.fp8 is None:
            assert rank.losses == pytest.approx(one.losses, rel=1e-5)
            assert rank.validation[0] == pytest.approx(one.validation[0], rel=1e-5)
    rules = case.rules
    other_mask = replace(rules, reset_attention_mask=not rules.reset_attention_mask)
    other_positions = replace(rules, reset_position_ids=not rules.reset_position_ids)
    others = [other_mask, other_positions]
    if rules.reset_attention_mask and case.model.position_embedding_type == "rope":
        others = [other_mask]  # documents that are apart see distances alone
    for other in others:
        changed = run_case(replace(case, rules=other, steps=1), single_rank())
        assert changed.losses[0] != pytest.approx(one.losses[0], rel=3e-4), other


def test_every_token_is_counted_once(two: dict[str, Outcomes], alone: dict[str, Outcome]) -> None:
    assert all(rank.validation[1] == alone["fp32"].validation[1] for rank in two["fp32"])


@pytest.mark.parametrize("case", AGAIN)
def test_recomputation_changes_no_number(two: dict[str, Outcomes], case: str) -> None:
    for rank, plain in zip(two[case], two["fp32"], strict=True):
        assert rank.losses == plain.losses[:3] and rank.norms == plain.norms[:3]
        assert (
            rank.traffic["cp", "send", "float32"] * 3 == plain.traffic["cp", "send", "float32"] * 4
        )


def test_dropout_trains(two: dict[str, Outcomes]) -> None:
    plain, again = two["dropout"], two["dropout again"]
    assert [rank.losses for rank in plain] == [rank.losses for rank in again]
    assert plain[0].losses == plain[1].losses != two["fp32"][0].losses[:3]
    assembled([rank.weights for rank in plain])


@pytest.mark.parametrize("case", ["delayed", "fp8 params"])
def test_scales_and_histories_are_the_same_on_all_ranks(
    two: dict[str, Outcomes], case: str
) -> None:
    assert_same_tables(two[case])
    assert_tables_follow_specification(two[case], DELAYED)
    staged = [rank.updates["forward"][0]["staged"] for rank in two[case]]
    assert not torch.equal(*staged), "the ranks did see different amaxes"


@pytest.mark.parametrize("case", ["fp32", "llama", "delayed", "tensorwise"])
def test_bytes_of_a_step(two: dict[str, Outcomes], alone: dict[str, Outcome], case: str) -> None:
    """Per layer and microbatch n - 1 times a rank's keys and values forward, and again backward;
    and backward n - 1 times their gradients in FP32."""
    run = CASES[case]
    dtype, size = ("float32", 4) if run.compute == "fp32" else ("bfloat16", 2)
    block = 2 * run.batch * SEQ // 2 * run.model.kv_size  # elements of keys and values
    passes = run.model.num_layers * run.num_microbatches * (2 - 1)
    expected = {("cp", "send", dtype): passes * 2 * block * size}
    expected["cp", "send", "float32"] = (
        expected.get(("cp", "send", "float32"), 0) + passes * block * 4
    )
    # Gradients in FP32; loss and counted tokens.
    num_params = sum(p.tensor.numel() for p in alone[case].weights)
    expected["data", "all_reduce_sum", "float32"] = 4 * num_params
    expected["data", "all_reduce_sum", "float64"] = 16
    if run.fp8 is DELAYED:
        tensors = sum(len(names) for names in two[case][0].names.values())
        expected["amax", "all_reduce_max", "float32"] = 4 * tensors * run.num_microbatches
    assert all(rank.traffic == expected for rank in two[case])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_other_axes(alone: dict[str, Outcome], layout: str) -> None:
    size, spec = LAYOUTS[layout]
    names = ("fp32", "llama", "delayed", "tensorwise")
    cases = {name: replace(CASES[name], parallel=spec) for name in names}
    found = on_ranks(run_case, cases, size)
    for name, ranks in found.items():
        if CASES[name].fp8 is DELAYED:
            half = size // spec.pp
            for stage in (ranks[at : at + half] for at in range(0, size, half)):
                assert_same_tables(stage)
        one = alone[name]
        if layout == "cp 2 x dp 2":  # replicas validate the same three microbatches each
            assert ranks[0].validation[1] == 2 * one.validation[1]
        check(ranks, CASES[name], one)


@pytest.mark.slow
def test_zero_bubble_is_bitwise_1f1b() -> None:
    """Without clipping, whose norm stages sum in another order, as they do tied embeddings."""
    model = gpt_spec(num_layers=4, share_embeddings_and_output_weights=False)
    free = optim_spec(clip_grad_norm=None)
    case = Case(steps=3, model=model, num_microbatches=4, optim=free)
    cases = {
        "1f1b": replace(case, parallel=ParallelSpec(cp=2, pp=2)),
        "zero bubble": replace(case, parallel=ParallelSpec(cp=2, pp=2, pipeline=ZERO_BUBBLE)),
    }
    found = on_ranks(run_case, cases, 4)
    assert found["1f1b"][0].losses == found["zero bubble"][0].losses
    check(found["zero bubble"], case, run_case(case, single_rank()))


@pytest.mark.slow
def test_tp_only_amax_red_spans_the_parts_of_a_sequence() -> None:
    """Replicas (ranks 0 1 and 2 3) keep scales of their own, ranks of one sequence share them."""
    spec = ParallelSpec(cp=2, tp_only_amax_red=True)
    case = replace(CASES["delayed"], steps=3, parallel=spec)
    ranks = on_ranks(run_case, {"own": case}, 4)["own"]
    assert_same_tables(ranks[:2])
    assert_same_tables(ranks[2:])
    with pytest.raises(AssertionError):
        assert_same_tables([ranks[0], ranks[2]])


# ---- the key

ON_TWO = ("trainer.devices=2", "model.context_parallel_size=2")


def test_the_key_reaches_the_layout() -> None:
    parallel = run_spec(*ON_TWO, "model.fp8=True").parallel
    assert (parallel.cp, parallel.dp) == (2, 1)
    with_others = ("trainer.devices=16", "model.tensor_model_parallel_size=2")
    pipeline = ("model.pipeline_model_parallel_size=2", "model.sequence_parallel=False")
    parallel = run_spec(*ON_TWO, *with_others, *pipeline, "model.global_batch_size=16").parallel
    assert (parallel.tp, parallel.cp, parallel.pp, parallel.dp) == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        (["trainer.devices=3"], "model.context_parallel_size", "trainer.devices: 2 or 4"),
        (["model.encoder_seq_length=62"], "model.encoder_seq_length", "60 or 64"),
        (
            ["model.encoder_seq_length=68", "trainer.devices=4", "model.sequence_parallel=True",
             "model.tensor_model_parallel_size=4", "trainer.devices=8"],
            "model.encoder_seq_length",
            "64 or 72",
        ),
        (
            ["model.fp8=True", "model.encoder_seq_length=24", "model.micro_batch_size=2"],
            "model.context_parallel_size",
            "model.micro_batch_size: 4",
        ),
        (["model.position_embedding_type=alibi"], "model.context_parallel_size", "rope"),
        (["model.compile=block"], "model.context_parallel_size", "compiles no such messages"),
        (["model.fp8=True", "model.fp8_backend=te"], "model.context_parallel_size", "native"),
        (["model.fp8=True", "model.fp8_backend=torchao"], "model.context_parallel_size", "native"),
    ],
)  # fmt: skip
def test_refusals(settings: list[str], key: str, message: str) -> None:
    found = load_problems(*ON_TWO, *settings)
    assert [p for p in found if p.key == key and message in str(p)], found
