"""FP8-LM over ranks: sums of gradients in FP8, ZeRO by whole tensors, layouts and checkpoints.

Bounds follow from rounding. A value x of a tensor with the amax A, stored in E4M3 with the largest
power of two as scale, is off by at most 2^-4 |x| where its number is normal. Below, it is off by
half of the smallest step, 2^-10 / scale; the scale is above 224 / A, so by at most 2^-10 A / 224.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.fp8.scaled import ScaledTensor
from megafp8.optim.masters import Masters
from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, ParallelSpec, PipelineSpec
from megafp8.specs.parallel import owners_of
from megafp8.train import state_dict
from megafp8.train.step import forward_backward
from tests.kit.cases import Case
from tests.kit.runs import alone, on_mesh
from tests.kit.tensors import assembled, assert_same, assert_same_pieces, pieces
from tests.optim.masters_work import (
    FP8,
    SHAPES,
    Summed,
    Sums,
    Trained,
    going_on,
    gradients,
    saving,
    sum_gradients,
    sums,
    train,
    train_case,
)
from tests.optim.test_masters import LEVELS
from tests.ranks import run_ranks
from tests.spec import formats
from tests.tiny import gpt_spec, optim_spec

FACTORS = {"auto": lambda n: n**-0.5, "pre": lambda n: 1 / n, "post": lambda n: 1.0}
JOBS = {
    **{how: Summed(how) for how in ("fp32", *FACTORS)},
    **{f"{how}, whole": Summed(how, whole=True) for how in ("fp32", "auto")},
    "not finite, fp32": Summed("fp32", bad=math.nan),
    "not finite, auto": Summed("auto", bad=math.inf),
    "equal, post": Summed("post", equal=True),
    "equal, pre": Summed("pre", equal=True),
    "equal, auto": Summed("auto", equal=True, steps=4),
    "scales are not sent": Summed("fp32", bug="scales are not sent"),
    "a scale is not shared, fp32": Summed("fp32", bug="a scale is not shared"),
    "a scale is not shared": Summed("auto", bug="a scale is not shared"),
    "nothing is quantized again": Summed("auto", bug="nothing is quantized again"),
    "the sum is not quantized again": Summed("fp32", bug="the sum is not quantized again"),
}
Ranks = list[dict[str, Sums]]


def rounding(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return the most that storing values with a scale moves each, while none saturates."""
    return torch.maximum(x.abs() * 2.0**-4, torch.as_tensor(2.0**-10 / scale))


def rounding_by_amax(x: torch.Tensor, amax: float | None = None) -> torch.Tensor:
    return rounding(x, 224 / max(x.abs().max().item() if amax is None else amax, 1e-30))


def decoded(found: Sums, index: int) -> torch.Tensor:
    return found.codes[index].view(FP8.dtype).float() * found.scales[index]


def assert_sums_are_right(ranks: Ranks, name: str) -> None:
    """All ranks have the same bytes, within the bounds of the way they were summed."""
    job, size = JOBS[name], len(ranks)
    inputs = [gradients(job, rank) for rank in range(size)]
    for index in range(len(SHAPES)):
        owner = next(r for r, rank in enumerate(ranks) if index in rank[name].owned)
        for rank in ranks:
            if not job.whole:
                assert torch.equal(rank[name].codes[index], ranks[0][name].codes[index])
                assert torch.equal(rank[name].scales, ranks[0][name].scales)
        values = [each[index] for each in inputs]
        exact = torch.stack(values).double().sum(0).float()
        bound = sum((rounding_by_amax(x) for x in values), torch.zeros(()))
        found = ranks[owner][name]
        if job.how == "fp32":
            bound = bound + rounding_by_amax(exact.abs() + bound)
        else:  # each rank rounds to the shared scale, and each sum rounds
            quant_scale = 1 / found.scales[index]
            reach = torch.zeros_like(exact)
            for x in values:
                reach = reach + x.abs() * (1 + 2.0**-3) ** 2
                bound = bound + rounding(x.abs() * (1 + 2.0**-4), quant_scale)
                bound = bound + rounding(reach, quant_scale)
        error = (decoded(found, index) - exact).abs()
        assert (error <= bound * (1 + 1e-5)).all(), f"{name}, gradient {index}"


@pytest.fixture(scope="module")
def two() -> Ranks:
    return on_mesh(sums, 2, jobs=JOBS)


@pytest.mark.parametrize("name", ["fp32", "auto", "pre", "fp32, whole", "auto, whole"])
def test_two_ranks_sum_as_one_process(two: Ranks, name: str) -> None:
    assert_sums_are_right(two, name)


def test_four_ranks_sum_as_one_process() -> None:
    names = ("fp32", "auto", "pre", "fp32, whole", "auto, whole", "a scale is not shared")
    jobs = {name: JOBS[name] for name in names}
    ranks = on_mesh(sums, 4, jobs=jobs)
    for name in names[:-1]:
        assert_sums_are_right(ranks, name)
    with pytest.raises(AssertionError):
        assert_sums_are_right(ranks, names[-1])


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.bug])
def test_the_bounds_tell_planted_mistakes(two: Ranks, name: str) -> None:
    with pytest.raises(AssertionError):
        assert_sums_are_right(two, name)


def assert_the_sum_is_rounded_once(two: Ranks, name: str) -> None:
    """From the ranks' own scales, in the order of the ranks."""
    parts = [
        [ScaledTensor.of(x, FP8).values() for x in gradients(JOBS["fp32"], rank)]
        for rank in range(2)
    ]
    for index, (first, second) in enumerate(zip(*parts, strict=True)):
        expected = ScaledTensor.of(first + second, FP8)
        for found in (rank[name] for rank in two if index in rank[name].owned):
            assert torch.equal(found.codes[index].view(FP8.dtype).float(), expected.payload.float())
            assert found.scales[index] == expected.dequant_scale


def test_the_sum_in_fp32_is_rounded_once(two: Ranks) -> None:
    for name in ("fp32", "fp32, whole"):
        assert_the_sum_is_rounded_once(two, name)


def assert_the_sum_follows_its_rule(two: Ranks, name: str, how: str) -> None:
    """The largest dequant_scale divided by the factor, and codes rounded after each rank's."""
    factor = np.float32(FACTORS[how](2))
    parts = [[ScaledTensor.of(x, FP8) for x in gradients(JOBS[how], rank)] for rank in range(2)]
    for index, pair in enumerate(zip(*parts, strict=True)):
        used = [x.dequant_scale.item() for x in pair if x.values().any()]
        shared = np.float32(max(used, default=1.0))
        total = np.zeros(pair[0].values().shape, np.float32)
        for x in pair:
            codes = formats.quantize(x.values().numpy(), factor / shared, formats.E4M3)
            sums = total + formats.dequantize(codes, formats.E4M3).astype(np.float32)
            total_codes = formats.quantize(sums, np.float32(1), formats.E4M3)
            total = formats.dequantize(total_codes, formats.E4M3).astype(np.float32)
        for rank in two:
            assert rank[name].scales[index].item() == shared / factor
            found = rank[name].codes[index].view(FP8.dtype).float().numpy()
            np.testing.assert_array_equal(found, total)


@pytest.mark.parametrize("name", FACTORS)
def test_the_sum_in_fp8_follows_its_rule_bit_for_bit(two: Ranks, name: str) -> None:
    assert_the_sum_follows_its_rule(two, name, name)


@pytest.mark.parametrize("name", ["not finite, fp32", "not finite, auto"])
def test_a_gradient_that_is_not_finite_reaches_all_ranks(two: Ranks, name: str) -> None:
    for rank in two:
        assert not decoded(rank[name], 4).isfinite().any()
        assert all(decoded(rank[name], index).isfinite().all() for index in range(4))


def test_the_bytes_on_the_wire(two: Ranks) -> None:
    """A byte for each element there and back; under ZeRO there alone; scalars beside."""
    elements = sum(math.prod(shape) for shape in SHAPES)
    sent = two[0]["fp32"].sent
    padded = elements + elements % 2
    assert sent["all_to_all uint8"] == padded and sent["all_gather uint8"] == padded // 2
    assert sent["all_gather float32"] == sent["all_reduce_max float32"] == 4 * len(SHAPES)
    whole = {key: count for key, count in two[0]["fp32, whole"].sent.items() if count}
    assert whole == {"all_to_all uint8": elements, "all_gather float32": 4 * len(SHAPES)}


def test_why_there_is_a_factor(two: Ranks) -> None:
    """Equal gradients saturate in a sum without a factor, and never with 1/ranks."""
    saturated = [(code & 0x7F == 0x7E).sum() for code in two[0]["equal, post"].codes]
    assert saturated[0] > 2 and saturated[2] > 2
    values = gradients(JOBS["equal, post"], 0)[0]
    assert decoded(two[0]["equal, post"], 0).abs().max() < 2 * values.abs().max() * 0.9
    assert_sums_are_right(two, "equal, pre")
    job = JOBS["equal, auto"]
    assert job.steps == 4 and two[0]["equal, auto"].factors[0] < 2**-0.5


def test_the_factors_rule() -> None:
    """Halved above 1e-5 of saturated values; else by 2 in 1,000 steps; from 1/4N to 1."""
    alone = run_one(Summed("auto", equal=True, steps=3)).factors
    assert alone[3] == 1 and alone.min() >= 0.25, "one rank begins with the most, 1"
    jobs = {str(n): Summed("auto", equal=True, steps=n) for n in (1, 2, 3, 40)}
    ranks = on_mesh(sums, 2, jobs=jobs)
    first, second = ranks[0]["1"].factors, ranks[0]["2"].factors
    zeros = 3  # nothing saturates in a gradient of zeros
    assert first[zeros] == pytest.approx(2**-0.5 * 2**0.001, rel=1e-6)
    assert second[zeros] == pytest.approx(2**-0.5 * 2**0.002, rel=1e-6)
    assert ranks[0]["40"].factors.min() >= 0.125 and ranks[0]["40"].factors.max() <= 1
    growth = 2**0.001
    for before, after in ((torch.full_like(first, 2**-0.5), first), (first, second)):
        halved, grown = torch.isclose(after, before / 2), torch.isclose(after, before * growth)
        assert (halved ^ grown | (before * growth > 1)).all()
    assert (ranks[0]["40"].factors < 2**-0.5).any(), "at least one was halved"
    assert all(
        torch.equal(a.factors, b.factors) for a, b in zip(*(r.values() for r in ranks), strict=True)
    )


def run_one(job: Summed) -> Sums:
    return sum_gradients(job, single_rank().data)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60), st.integers(1, 9))
def test_whole_tensors_are_assigned_by_size(sizes: list[int], ranks: int) -> None:
    """Greedily: nobody has more than the mean and the largest tensor; all ranks agree."""
    held = [0] * ranks
    owners = owners_of(sizes, held)
    assert owners == owners_of(sizes, [0] * ranks) and set(owners) <= set(range(ranks))
    for rank, count in enumerate(held):
        own = [size for size, owner in zip(sizes, owners, strict=True) if owner == rank]
        assert sum(own) == count
    assert max(held) <= sum(sizes) / ranks + max(sizes)
    assert owners[sizes.index(max(sizes))] == 0


def test_dealing_layers_of_the_papers_models() -> None:
    """The padding is none for 7B over 32 ranks, a ninth for 125M over 16 and a third over 32."""
    for width, layers, ranks, padding in (
        (4096, 32, 32, 0),
        (768, 12, 8, 0),
        (768, 12, 16, 1 / 9),
        (768, 12, 32, 1 / 3),
    ):
        sizes = [k * width**2 for _ in range(layers) for k in (3, 1, 4, 4)]
        owners_of(sizes, held := [0] * ranks)
        assert ranks * max(held) / sum(sizes) - 1 == pytest.approx(padding)


RECIPE = Fp8Recipe(amax_history_len=4)
SMALL = ParallelSpec(grad_bucket_bytes=4096)
DEEP = gpt_spec(num_layers=4)
PP = PipelineSpec(schedule="1F1B")


def case(level: str, *, zero: bool = False, fp8: Fp8Recipe | None = RECIPE, **choices: Any) -> Case:
    storage = replace(LEVELS[level], **choices.pop("storage", {}))
    name = "distributed_fused_adam" if zero else "adamw"
    optim = optim_spec(storage=storage, name=name, clip_grad_norm=choices.pop("clip", None))
    if fp8 is not None:
        fp8 = replace(fp8, params_in_fp8=level == "O3")
    defaults: dict[str, Any] = {"steps": 3, "parallel": SMALL}
    compute = "fp32" if fp8 is None else "bf16"
    return Case(compute, fp8, optim=optim, **(defaults | choices))


SP = replace(SMALL, tp=2, sequence_parallel=True)
TWO = {
    **{f"{level}": case(level) for level in LEVELS},
    **{f"{level}, ZeRO": case(level, zero=True) for level in LEVELS},
    "O2, summed in FP8": case("O2", storage={"reduction": "auto"}),
    "O2, FP32 sums": case("O2", storage={"sums_in_fp32": True}),
    "O2, clipped": case("O2", clip=0.5),
    "O3, ZeRO, clipped": case("O3", zero=True, clip=0.5),
    "O2, spoiled": case("O2", spoiled=1),
    "O3, ZeRO, spoiled": case("O3", zero=True, spoiled=1),
    "exact": case("O2", fp8=None, steps=1, storage={"exp_avg": "fp32", "exp_avg_sq": "fp32"}),
    "exact, ZeRO": case("O1", fp8=None, steps=1, zero=True),
    "exact, tp": case("O2", fp8=None, steps=1, parallel=replace(SMALL, tp=2)),
    "exact, sp": case("O2", fp8=None, steps=1, parallel=SP),
    "exact, pp": case(
        "O2", fp8=None, steps=1, model=DEEP, parallel=replace(SMALL, pp=2, pipeline=PP)
    ),
    "tp": case("O2", parallel=replace(SMALL, tp=2)),
    "O3, sp": case("O3", parallel=SP),
    "cp": case("O2", parallel=replace(SMALL, cp=2)),
}
SAVED = ("O2", "O3, ZeRO", "tp", "O2, summed in FP8")


Found = list[dict[str, Trained]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    root = tmp_path_factory.mktemp("checkpoints")
    return root, run_ranks(train, 2, {"cases": saving(TWO, SAVED, root)})


def together(ranks: Found, name: str, field: str) -> dict[str, torch.Tensor]:
    """The whole logical tensors of the pieces that all ranks have."""
    return assembled([getattr(rank[name], field) for rank in ranks])


def exact_gradients(like: Case) -> dict[str, list[torch.Tensor]]:
    """The gradients of each microbatch in FP32, of one process whose weights are the same."""
    found: dict[str, list[torch.Tensor]] = {}
    storage = replace(like.optim.storage, main_grads="fp32")
    for index in range(like.num_microbatches):
        alone = replace(
            like, parallel=ParallelSpec(), optim=replace(like.optim, storage=storage, name="adamw")
        )
        state = alone.build(single_rank())
        batch = alone.microbatches(0, single_rank())[index]
        forward_backward(state, [batch])
        for piece in pieces(state, state.masters.stored_grads):
            found.setdefault(piece.name, []).append(piece.tensor)
    return found


def of_one_parameter(exact: dict[str, list[torch.Tensor]], name: str) -> list[torch.Tensor]:
    """The microbatches' gradients of all tensors that have a scale in common with a tensor."""
    kinds = ("query", "key", "value")
    kind = next((kind for kind in kinds if f".{kind}." in name), None)
    if kind is None:
        return exact[name]
    fused = [exact[name.replace(f".{kind}.", f".{other}.")] for other in kinds]
    return [torch.cat([part.flatten() for part in parts]) for parts in zip(*fused, strict=True)]


def assert_gradients_are_right(ranks: Found, name: str, like: Case) -> None:
    """Beside the rounding to FP8 there is only the order of FP32 sums. A rank's part of a tensor
    has an amax of its own, which is not above the whole tensor's."""
    found = together(ranks, name, "first_gradients")
    exact = exact_gradients(like)
    assert found.keys() == exact.keys()
    for tensor, parts in exact.items():
        whole = torch.stack(parts).sum(0)
        bound = 1e-5 * whole.abs().max() + torch.full_like(whole, 1e-7)
        if whole.dim() == 2 and tensor.startswith("layers."):
            running, amax = torch.zeros_like(whole), 0.0
            for part, peers in zip(parts, of_one_parameter(exact, tensor), strict=True):
                running, amax = running + part.abs(), amax + peers.abs().max().item()
                bound = bound + rounding_by_amax(part, amax)
                bound = bound + rounding_by_amax(running * 1.2, amax * 1.2)
        assert ((found[tensor] - whole).abs() <= bound).all(), tensor


@pytest.mark.parametrize("name", [name for name in TWO if name.startswith("exact")])
def test_gradients_of_two_ranks_are_one_process_s_within_rounding(
    trained: tuple[Path, Found], name: str
) -> None:
    assert_gradients_are_right(trained[1], name, TWO[name])


@pytest.mark.parametrize("level", LEVELS)
def test_zero_trains_as_replicas_do_bit_for_bit(trained: tuple[Path, Found], level: str) -> None:
    _, ranks = trained
    for rank in ranks:
        plain, sharded = rank[level], rank[f"{level}, ZeRO"]
        assert plain.losses == sharded.losses
        assert plain.norms == pytest.approx(sharded.norms, rel=1e-12)
        assert_same(plain.weights, sharded.weights)
    for field in ("masters", "moments"):
        own = together(ranks, f"{level}, ZeRO", field)
        assert_same(own, together(ranks[:1], level, field))
    owned = [rank[f"{level}, ZeRO"].num_owned for rank in ranks]
    assert sum(owned) == ranks[0][level].num_owned and min(owned) > 0


def test_all_ranks_have_the_same_weights_losses_and_norms(trained: tuple[Path, Found]) -> None:
    first, second = trained[1]
    for name, one in first.items():
        other = second[name]
        assert one.losses == other.losses, name
        assert one.norms == pytest.approx(other.norms, rel=0, nan_ok=True), name
        if TWO[name.removesuffix(", continued")].parallel == SMALL:
            assert_same(one.weights, other.weights)


def test_two_ranks_learn_as_one_process_does(trained: tuple[Path, Found]) -> None:
    for name in ("O1", "O2", "O3", "O2, summed in FP8", "O2, FP32 sums", "tp", "O3, sp", "cp"):
        ((one,),) = alone(train_case, {name: TWO[name]}).values()
        assert trained[1][0][name].losses == pytest.approx(one.losses, rel=2e-2), name


def test_a_skip_is_all_ranks_skip(trained: tuple[Path, Found]) -> None:
    for rank in trained[1]:
        for name in ("O2, spoiled", "O3, ZeRO, spoiled"):
            found = rank[name]
            assert math.isnan(found.norms[1]) and math.isfinite(found.norms[2])
            assert found.named is not None and found.named.startswith("gradient of layers.0.")


def test_bytes_of_states_and_weights(trained: tuple[Path, Found]) -> None:
    """Moments are 3/8 of FP32's, over the ranks together under ZeRO. A step sends a byte for each
    weight of a linear there (gradients) and at O3 one back (weights); the rest has 4 and 2."""
    _, ranks = trained
    params = sum(t.numel() for t in together(ranks[:1], "O2", "masters").values())
    assert ranks[0]["O2"].bytes_of_moments == 3 * params
    for level in ("O2", "O3"):
        assert sum(rank[f"{level}, ZeRO"].bytes_of_moments for rank in ranks) == 3 * params
    linears = sum(
        t.numel()
        for name, t in together(ranks[:1], "O2", "masters").items()
        if t.dim() == 2 and name.startswith("layers.")
    )
    sent = ranks[0]["O3, ZeRO"].traffic
    assert sent["dp", "all_to_all", "uint8"] == linears
    assert sent["dp", "all_to_all", "float32"] == 4 * (params - linears)
    gathered = 2 * sent["dp", "all_gather", "uint8"]
    assert gathered == linears, "eight weights on two ranks need no padding"
    assert sent["dp", "broadcast", "bfloat16"] == 2 * (params - linears)


def path_of(root: Path, name: str) -> Path:
    return next(path for path in (root / name).iterdir() if path.name.startswith("step"))


def test_factors_that_a_checkpoint_lacks_are_counted_by_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries, keys and values are three logical tensors of one parameter, with one factor."""
    monkeypatch.setattr(Masters, "factors_adapt", True)
    alone = case("O2", storage={"reduction": "auto"}, parallel=ParallelSpec())
    state = alone.build(single_rank())
    assert len(dict(state.masters.scaled_grads())) == 8
    reader: Any = SimpleNamespace(names=tuple, load_into=lambda placements: None)
    (line,) = state_dict._load_factors(reader, state)
    assert line == "8 gradients summed in FP8 begin with the factor 1/sqrt(ranks)"


def test_checkpoints_continue_in_any_layout(trained: tuple[Path, Found]) -> None:
    """Bit for bit in their own, and under ZeRO or without it; elsewhere the losses agree."""
    root, before = trained
    cases = {name: going_on(TWO[name], path_of(root, name)) for name in SAVED} | {
        "O2 to ZeRO": going_on(TWO["O2, ZeRO"], path_of(root, "O2")),
        "O3 from ZeRO": going_on(TWO["O3"], path_of(root, "O3, ZeRO")),
        "tp to replicas": going_on(TWO["O2"], path_of(root, "tp")),
        "replicas to tp": going_on(TWO["tp"], path_of(root, "O2")),
    }
    ranks = run_ranks(train, 2, {"cases": cases})
    kept = {name: name for name in SAVED} | {"O2 to ZeRO": "O2", "O3 from ZeRO": "O3, ZeRO"}
    for name, source in kept.items():
        for rank, was in zip(ranks, before, strict=True):
            assert rank[name].losses == was[f"{source}, continued"].losses, name
            if name == source:
                assert_same_pieces(rank[name].masters, was[f"{source}, continued"].masters)
                assert_same_pieces(rank[name].moments, was[f"{source}, continued"].moments)
    for name, source in (("tp to replicas", "tp"), ("replicas to tp", "O2")):
        expected = before[0][f"{source}, continued"].losses
        assert ranks[0][name].losses == pytest.approx(expected, rel=2e-2)
    ones = {name: cases[name] for name in ("O3, ZeRO", "tp")}
    for name, (found,) in alone(train_case, ones).items():
        expected = before[0][f"{name}, continued"].losses
        assert found.losses == pytest.approx(expected, rel=2e-2), name


FOUR = {
    "tp x dp": case("O2", num_microbatches=4, parallel=replace(SMALL, tp=2)),
    "tp x dp, ZeRO, sequence": case("O3", zero=True, num_microbatches=4, parallel=SP),
    "tp x dp, sequence": case("O3", num_microbatches=4, parallel=SP),
    "pp x dp, tied": case(
        "O2", model=DEEP, num_microbatches=4, parallel=replace(SMALL, pp=2, pipeline=PP)
    ),
    "pp x dp, ZeRO, tied": case(
        "O2", zero=True, model=DEEP, num_microbatches=4, parallel=replace(SMALL, pp=2, pipeline=PP)
    ),
    "O2": case("O2", num_microbatches=4),
    "O2, ZeRO": case("O2", zero=True, num_microbatches=4),
}


@pytest.mark.slow
def test_four_ranks_in_all_layouts() -> None:
    ranks = run_ranks(train, 4, {"cases": FOUR})
    for plain, sharded in itertools.pairwise(FOUR):
        if sharded.replace(", ZeRO", "") == plain or plain.replace(", ZeRO", "") == sharded:
            for rank in ranks:
                assert rank[plain].losses == rank[sharded].losses, plain
                assert_same(rank[plain].weights, rank[sharded].weights)
    for name, asked in FOUR.items():
        assert all(rank[name].losses == ranks[0][name].losses for rank in ranks)
        ((one,),) = alone(train_case, {name: asked}).values()
        assert ranks[0][name].losses == pytest.approx(one.losses, rel=2e-2), name
