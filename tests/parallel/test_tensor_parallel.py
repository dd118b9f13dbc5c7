"""Tensor- and data-parallel training on gloo ranks against one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, ParallelSpec
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.kit.tensors import assembled, errors
from tests.parallel import rank_work
from tests.parallel.rank_work import Outcome, run_case
from tests.ranks import run_ranks
from tests.spec.delayed import DelayedScalingModel, Recipe, reduce
from tests.tiny import SEQ, gpt_spec

FP8 = Fp8Recipe(amax_history_len=4)
DROPOUT = gpt_spec(hidden_dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1)
CASES = {
    "fp32": Case(),
    "bf16": Case("bf16"),
    "fp32 fp8": Case("fp32", FP8),
    "bf16 fp8": Case("bf16", FP8),
    "not reduced": Case("bf16", Fp8Recipe(amax_history_len=4, reduce_amax=False), steps=3),
    "fp32 dropout": Case("fp32", None, DROPOUT),
    "bf16 fp8 dropout": Case("bf16", FP8, DROPOUT),
    "hidden dropout": Case("fp32", None, gpt_spec(hidden_dropout=0.1), steps=5),
}
LLAMA = gpt_spec(
    normalization="rmsnorm",
    activation="swiglu",
    position_embedding_type="rope",
    bias=False,
    share_embeddings_and_output_weights=False,
    num_query_groups=2,
    kv_channels=16,
)
ALIBI = gpt_spec(
    activation="reglu", position_embedding_type="alibi", transformer_block_type="post_ln"
)
SHAPES = {
    "llama": Case("fp32", None, LLAMA, steps=5),
    "llama bf16 fp8": Case("bf16", FP8, LLAMA, steps=5),
    "alibi": Case("fp32", None, ALIBI, steps=5),
    "norms of heads": Case("fp32", None, replace(LLAMA, qk_layernorm=True), steps=5),
    "norms of heads bf16 fp8": Case("bf16", FP8, replace(LLAMA, qk_layernorm=True), steps=5),
    "biases of qkv": Case("fp32", None, replace(LLAMA, add_qkv_bias=True), steps=5),
}
Outcomes = list[Outcome]  # by rank
DP_CASES = {name: CASES[name] for name in ("fp32", "bf16 fp8", "hidden dropout")}
FOUR_RANK_CASES = {
    "fp32": Case(steps=5),
    "bf16 fp8": Case("bf16", FP8, DROPOUT, steps=5),
}


def with_tp(size: int, cases: dict[str, Case]) -> dict[str, Case]:
    return {name: replace(case, parallel=ParallelSpec(tp=size)) for name, case in cases.items()}


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Outcomes]:
    """tp=2."""
    return on_ranks(run_case, with_tp(2, CASES | SHAPES), 2)


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    """One process."""
    names = ("fp32", "bf16", "fp32 fp8", "bf16 fp8", "hidden dropout")
    cases = {name: CASES[name] for name in names} | SHAPES
    return {name: run_case(case, single_rank()) for name, case in cases.items()}


def gradient_errors(ranks: Outcomes, one: Outcome) -> dict[str, float]:
    """Relative to each logical tensor's largest element, as `errors` says."""
    theirs = assembled([one.first_gradients])
    assert all(expected.abs().max() > 0 for expected in theirs.values())
    return errors(assembled([rank.first_gradients for rank in ranks]), theirs)


def assert_gradients_close(ranks: Outcomes, one: Outcome, tolerance: float) -> None:
    for name, error in gradient_errors(ranks, one).items():
        assert error <= tolerance, f"{name}: {error}"


def assert_losses_close(ranks: Outcomes, one: Outcome, tolerance: float) -> None:
    for rank in ranks:
        expected = one.losses[: len(rank.losses)]
        assert rank.losses == pytest.approx(expected, rel=tolerance, abs=0)
    assert one.losses[-1] < one.losses[0], "there was something to learn"


def assert_same_tables(ranks: Outcomes) -> None:
    for rank in ranks[1:]:
        for direction, updates in ranks[0].updates.items():
            for left, right in zip(updates, rank.updates[direction], strict=True):
                for name in ("amax", "history", "quant_scale", "num_nonfinite"):
                    assert torch.equal(left[name], right[name]), f"{direction} {name}"


def assert_tables_follow_specification(ranks: Outcomes, recipe: Fp8Recipe) -> None:
    """Fed with the largest of all ranks' staged amaxes, after every update of every tensor."""
    names = [name for table in ranks[0].names.values() for name in table]
    kinds = {name: name.rpartition(".")[2] for name in names}
    models = [
        DelayedScalingModel(kinds, Recipe(amax_history_len=recipe.amax_history_len))  # type: ignore
        for _ in ranks
    ]
    for direction, updates in ranks[0].updates.items():
        assert updates, "something was updated"
        for number in range(len(updates)):
            for rank, model in zip(ranks, models, strict=True):
                staged = rank.updates[direction][number]["staged"].numpy()
                for row, name in enumerate(rank.names[direction]):
                    model.states[name].history[0] = staged[row]
            reduced = reduce(models, direction)  # type: ignore[arg-type]
            for rank, model in zip(ranks, models, strict=True):
                getattr(model, f"end_{direction}")(reduced)
                table = rank.updates[direction][number]
                for row, name in enumerate(rank.names[direction]):
                    state = model.states[name]
                    assert table["quant_scale"][row].item() == state.scale, name
                    np.testing.assert_array_equal(table["history"][row], state.history[1:], name)


def replicated(outcome: Outcome) -> dict[str, torch.Tensor]:
    return {p.name: p.tensor for p in outcome.weights if tuple(p.tensor.shape) == p.global_shape}


# Two tensor-parallel ranks


def test_each_rank_holds_half_of_the_linears(
    two_ranks: dict[str, Outcomes], alone: dict[str, Outcome]
) -> None:
    linears = ("qkv.weight", "projection.weight", "fc1.weight", "fc2.weight")
    for case in ("fp32", "bf16 fp8"):
        whole = alone[case].sizes
        for rank in two_ranks[case]:
            for linear in linears:
                names = [name for name in whole if name.endswith(linear)]
                assert len(names) == 2, "one in each layer"
                assert all(2 * rank.sizes[name] == whole[name] for name in names)
            assert 2 * rank.sizes["embedding.word"] == whole["embedding.word"]
            sharded = (*linears, "qkv.bias", "fc1.bias", "embedding.word")
            rest = [name for name in whole if not name.endswith(sharded)]
            assert len(rest) == 1 + 2 * 4 + 2 * 2 + 2
            assert all(rank.sizes[name] == whole[name] for name in rest), "the rest is whole"


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [("fp32", 1e-5), ("bf16", 1e-2), ("fp32 fp8", 1e-2), ("bf16 fp8", 1e-2)],
)
def test_losses_equal_one_process(
    two_ranks: dict[str, Outcomes], alone: dict[str, Outcome], case: str, tolerance: float
) -> None:
    assert len(alone[case].losses) == 10
    assert_losses_close(two_ranks[case], alone[case], tolerance)
    assert two_ranks[case][0].losses == two_ranks[case][1].losses


def test_first_gradients_equal_one_process(
    two_ranks: dict[str, Outcomes], alone: dict[str, Outcome]
) -> None:
    assert_gradients_close(two_ranks["fp32"], alone["fp32"], 1e-5)
    ranks, one = two_ranks["fp32"], alone["fp32"]
    assert ranks[0].norms == ranks[1].norms
    assert ranks[0].norms[0] == pytest.approx(one.norms[0], rel=1e-5)


@pytest.mark.parametrize("case", SHAPES)
def test_other_shapes_equal_one_process(
    two_ranks: dict[str, Outcomes], alone: dict[str, Outcome], case: str
) -> None:
    """Grouped heads, gates and slopes are shared out with the heads that they belong to."""
    ranks, one = two_ranks[case], alone[case]
    assert_losses_close(ranks, one, 1e-2 if "fp8" in case else 1e-5)
    if "fp8" in case:
        assert_same_tables(ranks)
    else:
        assert_gradients_close(ranks, one, 1e-5)
    first, second = (replicated(outcome) for outcome in ranks)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_hidden_dropout_is_the_same_at_every_size(
    two_ranks: dict[str, Outcomes], alone: dict[str, Outcome]
) -> None:
    assert_losses_close(two_ranks["hidden dropout"], alone["hidden dropout"], 1e-5)
    assert_gradients_close(two_ranks["hidden dropout"], alone["hidden dropout"], 1e-5)


@pytest.mark.parametrize("case", [name for name in CASES if name != "not reduced"])
def test_replicated_parameters_stay_bitwise_equal(
    two_ranks: dict[str, Outcomes], case: str
) -> None:
    first, second = (replicated(outcome) for outcome in two_ranks[case])
    assert first.keys() == second.keys() and len(first) >= 10
    assert {"layers.1.mlp.fc2.bias", "final_norm.weight"} <= first.keys()
    different = [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    assert not different


@pytest.mark.parametrize("case", ["fp32 fp8", "bf16 fp8", "bf16 fp8 dropout"])
def test_tables_are_the_same_on_both_ranks(two_ranks: dict[str, Outcomes], case: str) -> None:
    assert_same_tables(two_ranks[case])


def test_tables_differ_without_reduction(two_ranks: dict[str, Outcomes]) -> None:
    """Every weight's amax, as each rank has another half, and most other sharded tensors'."""
    ranks = two_ranks["not reduced"]
    first, second = (rank.updates["forward"][-1]["history"] for rank in ranks)
    names = ranks[0].names["forward"]
    same = {n for n, a, b in zip(names, first, second, strict=True) if torch.equal(a, b)}
    assert not [name for name in same if name.endswith(".weight")]
    assert len(same) < len(names) / 2


@pytest.mark.parametrize("case", ["fp32 fp8", "bf16 fp8", "bf16 fp8 dropout"])
def test_tables_follow_the_specification_of_the_largest_amax(
    two_ranks: dict[str, Outcomes], case: str
) -> None:
    assert_tables_follow_specification(two_ranks[case], FP8)
    staged = [rank.updates["forward"][0]["staged"] for rank in two_ranks[case]]
    assert not torch.equal(*staged), "the ranks did see different amaxes"


def test_first_weight_amaxes_are_those_of_the_whole_weights(
    two_ranks: dict[str, Outcomes], alone: dict[str, Outcome]
) -> None:
    for case in ("fp32 fp8", "bf16 fp8"):
        one, rank = alone[case], two_ranks[case][0]
        rows = [row for row, n in enumerate(one.names["forward"]) if n.endswith(".weight")]
        assert one.names == rank.names and len(rows) == 8
        history, expected = (o.updates["forward"][0]["history"][rows] for o in (rank, one))
        assert torch.equal(history, expected)


@pytest.mark.parametrize("case", ["fp32", "bf16", "bf16 fp8"])
def test_bytes_on_the_wire(two_ranks: dict[str, Outcomes], case: str) -> None:
    """A step: per microbatch and layer two sums forward and two backward of [B, S, D]; amaxes of
    12 tensors a layer; three numbers a token for the loss, one for the norm."""
    run = CASES[case]
    dtype, size = {"fp32": ("float32", 4), "bf16": ("bfloat16", 2)}[run.compute]
    layers, width = run.model.num_layers, run.model.hidden_size
    tokens = run.num_microbatches * run.batch * SEQ
    # Layers; the embedding's rows and the head's input gradient.
    expected = {("tp", "all_reduce_sum", dtype): (4 * layers + 2) * tokens * width * size}
    expected["tp", "all_reduce_sum", "float64"] = 8
    expected["tp", "all_reduce_max", "float32"] = tokens * 4  # largest logits
    exponentials = expected.get(("tp", "all_reduce_sum", "float32"), 0) + 2 * tokens * 4
    expected["tp", "all_reduce_sum", "float32"] = exponentials
    if run.fp8:
        expected["amax", "all_reduce_max", "float32"] = run.num_microbatches * layers * 12 * 4
    assert all(rank.traffic == expected for rank in two_ranks[case])


# Data parallelism, and both


def test_two_data_parallel_ranks_equal_one_process(alone: dict[str, Outcome]) -> None:
    """Ranks count unequal numbers of tokens; hidden dropout is keyed by the global microbatch.
    FP8: the same tables on both ranks, by the specification."""
    ranks = on_ranks(run_case, DP_CASES, 2)
    assert_losses_close(ranks["fp32"], alone["fp32"], 1e-5)
    assert_losses_close(ranks["hidden dropout"], alone["hidden dropout"], 1e-5)
    assert_losses_close(ranks["bf16 fp8"], alone["bf16 fp8"], 1e-2)
    for outcomes in ranks.values():
        assembled([outcome.weights for outcome in outcomes])
    assert_same_tables(ranks["bf16 fp8"])
    assert_tables_follow_specification(ranks["bf16 fp8"], FP8)
    num_parameters = sum(alone["fp32"].sizes.values()) // 4
    for rank in ranks["fp32"]:
        assert rank.norms == pytest.approx(alone["fp32"].norms, rel=1e-4)
        assert rank.traffic == {
            ("dp", "all_reduce_sum", "float32"): 4 * num_parameters,
            ("dp", "all_reduce_sum", "float64"): 16,
        }


def test_both_together_equal_one_process(alone: dict[str, Outcome]) -> None:
    """tp=2 with dp=2, 5 steps."""
    ranks = on_ranks(run_case, with_tp(2, FOUR_RANK_CASES), 4)
    assert_losses_close(ranks["fp32"], alone["fp32"], 1e-5)
    for outcomes in ranks.values():
        assembled([outcome.weights for outcome in outcomes])  # replicas agree
    assert_same_tables(ranks["bf16 fp8"])
    assert_tables_follow_specification(ranks["bf16 fp8"], FP8)


def test_a_failing_rank_ends_the_others_and_is_named() -> None:
    """Of the helper itself: no hang, the error is there."""
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*the number is 42"):
        run_ranks(rank_work.fail_on_rank_1, 2)
