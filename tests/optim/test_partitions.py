"""ZeRO-1 against the replicated optimizer on the same ranks, its bytes, and its checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.config.checks import check_values
from megafp8.config.load import load as load_config
from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, LossScaleSpec, ParallelSpec, PipelineSpec
from megafp8.specs.geometry import boxes_of_run
from tests.kit.cases import Case
from tests.kit.runs import alone, on_ranks
from tests.kit.tensors import assembled, assert_same
from tests.optim.sharded_work import Loaded, Run, continued, run
from tests.tiny import gpt_spec, optim_spec

SMALL = ParallelSpec(grad_bucket_bytes=4096)
DELAYED = Fp8Recipe(amax_history_len=4)
IN_FP8 = replace(DELAYED, params_in_fp8=True)
TENSORWISE = Fp8Recipe(name="tensorwise", params_in_fp8=True)
FREE = optim_spec(clip_grad_norm=None)
SCALE = LossScaleSpec(init_scale=2.0**24, hysteresis=1)  # overflows first
ODD = gpt_spec(hidden_size=28, ffn_hidden_size=52, vocab_size=96)  # nothing is a multiple of 64

TWO = {
    "FP32": Case("fp32", None, ODD, steps=4, parallel=SMALL, grows=True),
    "BF16, one NaN": Case("bf16", steps=3, spoiled=1),
    "BF16 sums": Case("bf16", steps=3, parallel=replace(SMALL, grad_reduce_dtype="bf16")),
    "FP16": Case("fp16", steps=6, loss_scale=SCALE),
    "FP8 delayed": Case("bf16", DELAYED, steps=3, parallel=SMALL),
    "FP8 delayed weights": Case("bf16", IN_FP8, ODD, steps=4, parallel=SMALL),
    "FP8 tensorwise weights": Case("bf16", TENSORWISE, steps=3, parallel=SMALL),
}
CLIPPED = "FP32, clipped"
SLOW = pytest.mark.slow
DEFAULT = ("FP32", CLIPPED, "BF16, one NaN", "FP8 delayed weights")  # the others are slow
TWO[CLIPPED] = TWO["FP32"]
PP = PipelineSpec(schedule="1F1B")
DEEP = gpt_spec(num_layers=4)
FOUR = {
    "tp x dp": Case("bf16", TENSORWISE, steps=3, parallel=replace(SMALL, tp=2)),
    "tp x dp, sequence": Case(
        "bf16", IN_FP8, steps=3, parallel=replace(SMALL, tp=2, sequence_parallel=True)
    ),
    "pp x dp, tied": Case(
        "bf16", IN_FP8, DEEP, steps=3, num_microbatches=4,
        parallel=replace(SMALL, pp=2, pipeline=PP)
    ),
    "pp x dp, zero bubble": Case(
        "bf16", DELAYED, DEEP, steps=3, num_microbatches=4,
        parallel=replace(SMALL, pp=2, pipeline=PipelineSpec(
            schedule="ZBVZeroBubble", stages_per_rank=2))
    ),
}  # fmt: skip
SAVED = Case("bf16", IN_FP8, ODD, steps=3, num_microbatches=4, parallel=SMALL, optim=FREE)
Pairs = dict[str, list[tuple[Run, Run]]]  # by job and rank: (replicated, sharded)


def zero(case: Case) -> Case:
    return replace(case, optim=replace(case.optim, name="distributed_fused_adam"))


def pairs(size: int, cases: dict[str, Case]) -> Pairs:
    free = {n: c if n == CLIPPED else replace(c, optim=FREE) for n, c in cases.items()}
    replicated = on_ranks(run, free, size)
    sharded = on_ranks(run, {name: zero(case) for name, case in free.items()}, size)
    return {name: list(zip(replicated[name], sharded[name], strict=True)) for name in cases}


@dataclass(frozen=True)
class Two:
    """What two ranks did: runs; states saved and loaded, by name and rank."""

    root: Path
    pairs: Pairs
    before: dict[str, list[Loaded]]
    after: dict[str, list[Loaded]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    root = tmp_path_factory.mktemp("checkpoints")
    saves = {"sharded": replace(zero(SAVED), saves=root / "sharded")}
    saves["replicated"] = replace(SAVED, saves=root / "replicated")
    one = alone(continued, {"alone": replace(zero(SAVED), saves=root / "alone")})
    before = on_ranks(continued, saves, 2) | {"alone": [one["alone"]]}
    loads = {
        "replicated to sharded": loading(zero(SAVED), root, "replicated"),
        "sharded to replicated": loading(SAVED, root, "sharded"),
        "sharded to sharded": loading(zero(SAVED), root, "sharded"),
        "alone to sharded": loading(zero(SAVED), root, "alone"),
    }
    found = pairs(2, {name: TWO[name] for name in DEFAULT})
    return Two(root, found, before, on_ranks(continued, loads, 2))


@pytest.fixture(scope="module")
def more() -> Pairs:
    return pairs(2, {name: job for name, job in TWO.items() if name not in DEFAULT})


def pairs_of(name: str, request: pytest.FixtureRequest) -> list[tuple[Run, Run]]:
    found: Pairs
    if name in DEFAULT:
        found = request.getfixturevalue("two").pairs
    else:
        found = request.getfixturevalue("more")
    return found[name]


def marked(*names: str) -> list[Any]:
    return [n if n in DEFAULT else pytest.param(n, marks=SLOW) for n in names]


def loading(case: Case, root: Path, name: str) -> Case:
    return replace(case, begins=root / name / "step_00000003", steps=0)


def assert_bitwise(ranks: list[tuple[Run, Run]]) -> None:
    for replicated, sharded in ranks:
        assert sharded.losses == replicated.losses
        assert sharded.validation == replicated.validation
        for one, other in zip(sharded.results, replicated.results, strict=True):
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6, nan_ok=True)
            assert replace(one, grad_norm=0.0) == replace(other, grad_norm=0.0)
        assert_same(sharded.weights, replicated.weights)
        for direction, fields in replicated.tables.items():
            assert_same(sharded.tables[direction], fields)
    ours = assembled([sharded.saved for _, sharded in ranks])
    assert_same(ours, assembled([replicated.saved for replicated, _ in ranks]))


@pytest.mark.parametrize(
    "job", marked(*(name for name in TWO if name not in ("BF16, one NaN", "FP16", CLIPPED)))
)
def test_two_ranks_are_the_replicated_optimizer_bit_for_bit(
    job: str, request: pytest.FixtureRequest
) -> None:
    """Weights, masters, moments, FP8 tables, losses; of two addends the order does not matter."""
    found = pairs_of(job, request)
    assert_bitwise(found)
    assert all(result.is_finite for result in found[0][1].results)


def test_a_step_that_is_not_finite_on_one_rank_is_none_on_all(two: Two) -> None:
    for replicated, sharded in two.pairs["BF16, one NaN"]:
        assert [result.is_finite for result in sharded.results] == [True, False, True]
        for named in (sharded.named, replicated.named):  # each rank looks at its own range
            assert named is not None and named.startswith("gradient of layers.0.mlp.fc2.")
        assert_same(sharded.weights, replicated.weights)


@SLOW
def test_fp16_overflows_are_agreed_on(more: Pairs) -> None:
    assert_bitwise(
        [
            (replace_results(replicated), replace_results(sharded))
            for replicated, sharded in more["FP16"]
        ]
    )
    finite = [result.is_finite for result in more["FP16"][0][1].results]
    assert finite[0] is False and finite[-1] is True
    scales = [result.loss_scale for result in more["FP16"][1][1].results]
    assert scales[0] == 2.0**24 and scales[-1] is not None and scales[-1] < 2.0**24


def replace_results(found: Run) -> Run:
    """NaN is not equal to itself; overflowed norms are NaN or infinite."""
    kept = [r if r.is_finite else replace(r, grad_norm=math.nan) for r in found.results]
    return replace(found, results=kept)


@pytest.mark.parametrize("job", marked(*TWO))
def test_bytes_of_a_rank(job: str, request: pytest.FixtureRequest) -> None:
    """Counted from the tensors: weights and gradients whole and padded; 12 bytes of masters and
    moments for each element of this rank's ranges, found one by one here."""
    for number, (replicated, sharded) in enumerate(pairs_of(job, request)):
        lengths = [length for length, _ in sharded.buckets]
        owned = elements = 0
        for length, sizes in sharded.buckets:
            assert length % (2 * 64) == 0
            begin = 0
            for size in sizes:
                assert begin % 64 == 0
                owned += sum(index * 2 // length == number for index in range(begin, begin + size))
                begin, elements = begin + -(-size // 64) * 64, elements + size
            assert begin <= length < begin + 2 * 64
        assert sharded.held.masters == 4 * owned and sharded.held.moments == 8 * owned
        assert sharded.held.gradients == 4 * sum(lengths)
        assert replicated.held.moments == 8 * elements
        padding = sum(lengths) - elements
        assert 0 <= sharded.held.weights - replicated.held.weights <= 4 * padding
        assert abs(owned - elements / 2) <= padding


@pytest.mark.parametrize("job", marked("FP32", "BF16 sums", "FP8 delayed weights"))
def test_bytes_on_the_wire(job: str, request: pytest.FixtureRequest) -> None:
    """Gradients reduce-scattered in place of all-reduced; this rank's half of the weights gathered,
    FP8 as bytes; one number a weight for the agreement on scales."""
    for replicated, sharded in pairs_of(job, request):
        sent = {key[1:]: n for key, n in sharded.traffic.items() if key[0] == "dp"}
        lengths = sum(length for length, _ in sharded.buckets)
        dtype = "bfloat16" if job == "BF16 sums" else "float32"
        width = 2 if job == "BF16 sums" else 4
        assert sent["reduce_scatter_sum", dtype] == width * lengths
        assert ("all_reduce_sum", dtype) not in sent and ("dp", "all_reduce_sum", dtype) in (
            replicated.traffic
        )
        gathered = sum(n for (operation, _), n in sent.items() if operation == "all_gather")
        assert gathered == sharded.held.weights // 2
        if job == "FP8 delayed weights":
            assert sent["all_gather", "uint8"] > 0
            assert sent["all_reduce_max", "float32"] == 4 * 8, "four linears in two layers"


def test_clipping_by_a_norm_whose_parts_were_rounded_apart(two: Two) -> None:
    """FP32 norms of a shard's parts are others than those of whole tensors: 1e-7 of the norm."""
    ranks = two.pairs[CLIPPED]
    norms = [result.grad_norm for result in ranks[0][1].results]
    assert max(norms) > 1.0, "it clips"
    for replicated, sharded in ranks:
        assert sharded.losses == pytest.approx(replicated.losses, rel=1e-6)
        assert [r.grad_norm for r in sharded.results] == norms
    ours = assembled([sharded.saved for _, sharded in ranks])
    theirs = assembled([replicated.saved for replicated, _ in ranks])
    for name, expected in theirs.items():
        if name.endswith(".key.bias"):
            continue  # its gradient is 0 but for rounding: Adam makes steps of the noise
        assert (ours[name] - expected).abs().max() <= 2e-6 * expected.abs().max() + 1e-9, name


def test_one_rank_owns_everything() -> None:
    mesh = single_rank()
    case = Case("bf16", IN_FP8, ODD, steps=3, optim=FREE)
    assert_bitwise([(run(case, mesh), run(zero(case), mesh))])


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_run_of_elements_is_at_most_three_rectangles(
    rows: int, columns: int, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, rows * columns))
    end = data.draw(st.integers(begin, rows * columns))
    found = boxes_of_run((rows, columns), begin, end)
    assert len(found) <= 3
    numbers = torch.arange(rows * columns).view(rows, columns)
    order = []
    for r in found:
        extent = [slice(o, o + s) for o, s in zip(r.offset, r.shape, strict=True)]
        order += numbers[tuple(extent)].flatten().tolist()
    assert order == list(range(begin, end))
    vector = boxes_of_run((rows * columns,), begin, end)
    assert [(r.offset, r.shape) for r in vector] == ([((begin,), (end - begin,))] * (end > begin))


# ---- checkpoints


def assert_loaded(ranks: list[Loaded], before: list[Loaded], *, same_losses: bool) -> None:
    ours = assembled([rank.saved for rank in ranks])
    assert_same(ours, assembled([rank.saved for rank in before]))
    for rank in ranks:
        assert_same(rank.weights, before[0].weights)
        for direction, fields in before[0].tables.items():
            assert_same(rank.tables[direction], fields)
        if same_losses:
            assert rank.next_losses == before[0].next_losses
        else:
            assert rank.next_losses == pytest.approx(before[0].next_losses, rel=1e-2)


@pytest.mark.parametrize(
    "how", ["replicated to sharded", "sharded to replicated", "sharded to sharded"]
)
def test_sharded_and_replicated_load_each_other(two: Two, how: str) -> None:
    """On the same two ranks, with the same next losses, all bit for bit."""
    assert_loaded(two.after[how], two.before["sharded"], same_losses=True)


def test_one_rank_loads_what_two_have_saved(two: Two) -> None:
    cases = {"replicated": SAVED, "sharded": zero(SAVED)}
    cases = {name: loading(case, two.root, "sharded") for name, case in cases.items()}
    for loaded in alone(continued, cases).values():
        assert_loaded([loaded], two.before["sharded"], same_losses=False)


def test_two_ranks_load_what_one_has_saved(two: Two) -> None:
    loaded, before = two.after["alone to sharded"], two.before["alone"]
    assert_loaded(loaded, before, same_losses=False)


# ---- four ranks


@pytest.mark.slow
def test_with_other_axes_bit_for_bit() -> None:
    """Two replicas; ranges are shared out alike on both ends of a pipeline."""
    for name, ranks in pairs(4, FOUR).items():
        try:
            assert_bitwise(ranks)
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.slow
def test_four_replicas() -> None:
    """gloo adds four addends in an order that depends on their place in the buffer."""
    cases = {"FP32": TWO["FP32"], "FP8": TWO["FP8 delayed weights"]}
    found = pairs(4, {name: replace(c, num_microbatches=4) for name, c in cases.items()})
    for replicated, sharded in found["FP32"]:
        assert sharded.losses == pytest.approx(replicated.losses, rel=1e-6)
    for replicated, sharded in found["FP8"]:
        assert sharded.losses == pytest.approx(replicated.losses, rel=1e-2)
    for name in cases:
        first = found[name][0][1]
        for _, sharded in found[name]:
            assert_same(sharded.weights, first.weights)
            assert sharded.losses == first.losses


@pytest.mark.slow
def test_four_ranks_load_what_two_have_saved(two: Two) -> None:
    cases = {"sharded": zero(SAVED), "replicated": SAVED}
    cases = {name: loading(case, two.root, "sharded") for name, case in cases.items()}
    for loaded in on_ranks(continued, cases, 4).values():
        assert_loaded(loaded, two.before["sharded"], same_losses=False)


def test_transformer_engine_s_fp8_weights_may_be_in_blocks() -> None:
    """It has a function for parts of blocks; ours agree on one scale for each weight."""
    values = load_config(["model.data.data_prefix=builtin", "model.fp8=True"])
    values |= {"model.optim.name": "distributed_fused_adam", "model.fp8_params": True}
    assert not check_values(values | {"model.fp8_backend": "te"})
    values["model.fp8_recipe"] = "blockwise"
    keys = [problem.key for problem in check_values(values | {"model.fp8_backend": "te"})]
    assert "model.fp8_params" not in keys
    keys = [problem.key for problem in check_values(values | {"model.fp8_backend": "native"})]
    assert "model.fp8_params" in keys
