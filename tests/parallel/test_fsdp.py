"""FSDP2 against whole parameters on the same ranks, its bytes, and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafp8.config.checks import check_values
from megafp8.config.load import load as load_config
from megafp8.parallel import fsdp as fsdp_module
from megafp8.specs import Fp8Recipe, FsdpSpec, LossScaleSpec, ParallelSpec, PipelineSpec
from megafp8.specs.layer import first_and_last_linear
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.precision import RecipeName
from tests.kit.cases import Case
from tests.kit.runs import alone, on_ranks
from tests.kit.tensors import assembled
from tests.optim.sharded_work import Loaded, Run, continued, run
from tests.tiny import gpt_spec, optim_spec

FREE = optim_spec(clip_grad_norm=None)
DELAYED = Fp8Recipe(amax_history_len=4)
IN_FP8 = replace(DELAYED, params_in_fp8=True)
ODD = gpt_spec(hidden_size=28, ffn_hidden_size=52)  # shards that are no multiple of a cache line
RECOMPUTED = gpt_spec(recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1))
TENSORWISE: RecipeName = "tensorwise"
IN_FP8_BOUND = 1e-3
"""Of losses once weights differ by a rounding, so that codes at a tie become others."""


def fsdp(strategy: str = "full", **changes: object) -> ParallelSpec:
    return ParallelSpec(fsdp=FsdpSpec(strategy=strategy), **changes)  # type: ignore[arg-type]


def job(compute: str, fp8: Fp8Recipe | None = None, **changes: object) -> Case:
    """One microbatch a rank unless more are asked for: then sums have the same two addends."""
    return Case(compute, fp8, **({"steps": 3, "optim": FREE} | changes))  # type: ignore[arg-type]


def sharded(whole: Case, spec: ParallelSpec) -> Case:
    return replace(whole, parallel=spec)


WHOLE = {
    "FP32": job("fp32", model=ODD, num_microbatches=4, grows=True),
    "FP8": job("fp32", DELAYED, model=ODD),
    "FP8 weights": job("fp32", IN_FP8, model=ODD),
    "FP8 tensorwise weights": job("fp32", Fp8Recipe(name=TENSORWISE, params_in_fp8=True)),
    "BF16, one NaN": job("bf16", spoiled=1),
    "BF16, FP8": job("bf16", DELAYED, num_microbatches=4),
    "BF16, FP8 weights": job("bf16", IN_FP8, num_microbatches=4),
    "FP16": job("fp16", steps=10, loss_scale=LossScaleSpec(init_scale=2.0**24, hysteresis=1)),
    "torchao": job("bf16", Fp8Recipe(name=TENSORWISE), backend="torchao"),
}
SLOW = pytest.mark.slow
DEFAULT = ("FP32", "FP8 weights", "BF16, FP8")
"""The others are slow: `pytest -m slow` runs them."""
JOBS = {f"{name}/whole": whole for name, whole in WHOLE.items()}
JOBS |= {f"{name}/full": sharded(whole, fsdp()) for name, whole in WHOLE.items()}
JOBS |= {f"{name}/grad": sharded(WHOLE[name], fsdp("grad")) for name in ("FP32", "BF16, FP8")}
JOBS["BF16, FP8/recomputed"] = replace(WHOLE["BF16, FP8"], model=RECOMPUTED, parallel=fsdp())
JOBS["FP32/bf16 sums"] = sharded(
    WHOLE["FP32"], ParallelSpec(fsdp=FsdpSpec(grad_reduce_dtype="bf16"))
)
JOBS["torchao/in FP8"] = sharded(WHOLE["torchao"], ParallelSpec(fsdp=FsdpSpec(torchao_in_fp8=True)))
SAVED = WHOLE["FP8 weights"]
SHARDED = replace(SAVED, parallel=fsdp())


Runs = dict[str, list[Run]]


def marked(*names: str) -> list[Any]:
    return [n if n in DEFAULT else pytest.param(n, marks=SLOW) for n in names]


@dataclass(frozen=True)
class Two:
    """What two ranks did: runs by name and rank; states saved and loaded, likewise."""

    root: Path
    runs: Runs
    before: dict[str, list[Loaded]]
    after: dict[str, list[Loaded]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    root = tmp_path_factory.mktemp("checkpoints")
    one = alone(continued, {"alone": replace(SAVED, saves=root / "alone")})
    saves = {"whole": SAVED, "sharded": SHARDED}
    cases = {name: replace(case, saves=root / name) for name, case in saves.items()}
    before = on_ranks(continued, cases, 2) | {"alone": [one["alone"]]}
    zero = replace(SAVED, optim=replace(SAVED.optim, name="distributed_fused_adam"))
    loads = {
        "whole to sharded": loading(SHARDED, root, "whole"),
        "sharded to whole": loading(SAVED, root, "sharded"),
        "sharded to sharded": loading(SHARDED, root, "sharded"),
        "sharded to ZeRO-1": loading(zero, root, "sharded"),
        "alone to sharded": loading(SHARDED, root, "alone"),
    }
    jobs = {name: job for name, job in JOBS.items() if name.split("/")[0] in DEFAULT}
    return Two(root, on_ranks(run, jobs, 2), before, on_ranks(continued, loads, 2))


@pytest.fixture(scope="module")
def more() -> Runs:
    """The slow ones."""
    jobs = {name: job for name, job in JOBS.items() if name.split("/")[0] not in DEFAULT}
    return on_ranks(run, jobs, 2)


def runs_of(name: str, request: pytest.FixtureRequest) -> Runs:
    if name in DEFAULT:
        runs: Runs = request.getfixturevalue("two").runs
        return runs
    found: Runs = request.getfixturevalue("more")
    return found


def loading(case: Case, root: Path, name: str) -> Case:
    return replace(case, begins=root / name / "step_00000003", steps=0)


def assert_same_on_all(ranks: list[Run]) -> None:
    for rank in ranks[1:]:
        assert [r.grad_norm for r in rank.results] == [r.grad_norm for r in ranks[0].results]
        assert rank.losses == ranks[0].losses and rank.validation == ranks[0].validation
        assert_same_tables(rank, ranks[0], pending="amax")


def assert_same_tables(one: Run | Loaded, other: Run | Loaded, pending: str = "") -> None:
    """`pending`: the field that ranks have yet to agree on, at the next update."""
    for direction, fields in other.tables.items():
        for name, tensor in fields.items():
            if name == pending:
                continue  # parts of a weight on tensor-parallel ranks have amaxes of their own
            assert torch.equal(one.tables[direction][name], tensor), (direction, name)


def assert_close(ours: list[Run], theirs: list[Run], bound: float) -> None:
    """Masters and moments, relative to each tensor's largest element."""
    found, expected = (assembled([rank.saved for rank in ranks]) for ranks in (ours, theirs))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.endswith(".key.bias"):  # its gradient is 0 but for rounding
            assert (found[name] - tensor).abs().max() <= bound * tensor.abs().max() + 1e-12, name


@pytest.mark.parametrize("how", ["full", "grad"])
def test_fp32_with_accumulation(two: Two, how: str) -> None:
    """FSDP adds up ranks before microbatches."""
    ours, whole = two.runs[f"FP32/{how}"], two.runs["FP32/whole"]
    assert_same_on_all(ours)
    assert ours[0].losses == pytest.approx(whole[0].losses, rel=1e-6)
    norms = [result.grad_norm for result in whole[0].results]
    assert [result.grad_norm for result in ours[0].results] == pytest.approx(norms, rel=1e-6)
    assert_close(ours, whole, 2e-4)  # Adam makes whole steps of near-zero gradients' rounding
    assert ours[0].losses == two.runs["FP32/full"][0].losses, "ZeRO-2 gathers less, and no more"


@pytest.mark.parametrize("name", marked("FP8", "FP8 weights", "FP8 tensorwise weights"))
def test_fp8_has_the_scales_and_losses_of_whole_weights(
    name: str, request: pytest.FixtureRequest
) -> None:
    """The first step is the same bit for bit, also where weights cross as FP8 bytes: its loss, and
    its amaxes, which are the oldest of three in the histories.

    Later steps differ by roundings of the first update, each at most a unit in the last place: a
    tied embedding's gradient is (head + row) + row there and head + (row + row) here, and torch's
    fused AdamW rounds elements that fill no vector otherwise than those that do. Losses and amaxes
    then agree to about 1e-6, as long as no number lies at a tie between two of FP8. One that does
    moves a loss by up to 2e-5 and an amax by 5 %, and others follow.
    """
    runs = runs_of(name, request)
    ours, whole = runs[f"{name}/full"], runs[f"{name}/whole"]
    assert_same_on_all(ours)
    assert ours[0].losses[0] == whole[0].losses[0]
    assert ours[0].losses == pytest.approx(whole[0].losses, rel=IN_FP8_BOUND)
    assert ours[0].validation == pytest.approx(whole[0].validation, rel=IN_FP8_BOUND)
    for direction, fields in whole[0].tables.items():
        found = ours[0].tables[direction]
        for field, tensor in fields.items():
            torch.testing.assert_close(found[field], tensor, rtol=2.0**-2, atol=0, msg=field)
        if fields["history"].numel():
            assert torch.equal(found["history"][:, 0], fields["history"][:, 0])


@pytest.mark.parametrize("name", marked("BF16, FP8", "BF16, FP8 weights"))
def test_bf16_within_a_rounding_of_gradients(name: str, request: pytest.FixtureRequest) -> None:
    """A block's gradients leave autograd in BF16; without FSDP sums of biases and rows do not."""
    runs = runs_of(name, request)
    ours, whole = runs[f"{name}/full"], runs[f"{name}/whole"]
    assert_same_on_all(ours)
    assert ours[0].losses[0] == whole[0].losses[0]
    assert ours[0].losses == pytest.approx(whole[0].losses, rel=1e-3)
    for direction, fields in whole[0].tables.items():
        updates = fields["num_updates"]
        assert torch.equal(ours[0].tables[direction]["num_updates"], updates), "once a step"


@pytest.mark.parametrize("other", ["grad", "recomputed"])
def test_weights_quantized_again_are_the_same(two: Two, other: str) -> None:
    """Two microbatches a rank: the second one's weights have the first one's scale, and leave no
    amax; so have those of a recomputed forward pass."""
    full, same = two.runs["BF16, FP8/full"][0], two.runs[f"BF16, FP8/{other}"][0]
    assert full.losses == same.losses
    assert_same_tables(full, same)


def test_gradients_summed_in_bf16(two: Two) -> None:
    exact, rounded = two.runs["FP32/full"][0], two.runs["FP32/bf16 sums"][0]
    assert exact.losses[0] == rounded.losses[0] and exact.losses[1:] != rounded.losses[1:]
    assert rounded.losses == pytest.approx(exact.losses, rel=1e-3)


@SLOW
def test_a_step_that_is_not_finite_on_one_rank_is_none_on_all(more: Runs) -> None:
    ours = more["BF16, one NaN/full"]
    for rank in (*ours, *more["BF16, one NaN/whole"]):
        assert [r.is_finite for r in rank.results] == [True, False, True]
    for rank in ours:
        assert rank.named is not None and rank.named.startswith("gradient of layers.0.")
    assert_same_on_all([replace(rank, results=rank.results[::2]) for rank in ours])


@SLOW
def test_fp16_overflows_are_agreed_on(more: Runs) -> None:
    """Gradients leave autograd in FP16, so that the scale has to fall further."""
    first, second = more["FP16/full"]
    finite = [result.is_finite for result in first.results]
    assert finite == [result.is_finite for result in second.results]
    assert not finite[0] and finite[-1]
    scales = [result.loss_scale for result in first.results]
    assert scales == [result.loss_scale for result in second.results]
    assert first.losses[0] == more["FP16/whole"][0].losses[0]


@SLOW
def test_torchaos_linears(more: Runs) -> None:
    ours, whole = more["torchao/full"], more["torchao/whole"]
    assert_same_on_all(ours)
    assert ours[0].losses[0] == whole[0].losses[0]
    assert ours[0].losses == pytest.approx(whole[0].losses, rel=1e-3)


@SLOW
def test_torchaos_weights_cross_in_fp8(more: Runs) -> None:
    """Its own cast finds their scale and their numbers again: the same losses, bit for bit."""
    ours, in_bf16 = more["torchao/in FP8"], more["torchao/full"]
    assert_same_on_all(ours)
    assert ours[0].losses == in_bf16[0].losses
    saved, before = (
        {key: n for key, n in runs[0].traffic.items() if key[1] == "all_gather"}
        for runs in (ours, in_bf16)
    )
    first, last = (f"model/{name}" for name in first_and_last_linear(ODD.num_layers))
    elements = sum(
        -(-p.global_shape[0] // 2) * p.global_shape[1]
        for p in more["torchao/whole"][0].saved
        if p.name.startswith("model/layers.") and len(p.global_shape) == 2
        # QKV is three logical tensors
        if not p.name.startswith((first.replace("qkv", ""), last)) or "projection" in p.name
    )
    # Forward and backward of a microbatch, 1 byte in place of 2.
    assert sum(before.values()) - sum(saved.values()) == 2 * elements > 0
    assert ours[0].traffic["dp", "all_reduce_max", "float32"] > 0


@pytest.mark.parametrize("name", marked("FP32", "FP8 weights", "BF16, FP8", "torchao"))
def test_bytes_of_a_rank(name: str, request: pytest.FixtureRequest) -> None:
    """Rows of each parameter over the ranks, the last ones padded: 4 bytes each of master and
    gradient, 8 of moments."""
    runs = runs_of(name, request)
    shapes = {p.name: p.global_shape for p in runs[f"{name}/whole"][0].saved if "model/" in p.name}
    for rank in runs[f"{name}/full"]:
        rows = sum(-(-shape[0] // 2) * torch.Size(shape[1:]).numel() for shape in shapes.values())
        assert rank.held.weights == rank.held.masters == 4 * rows
        assert rank.held.gradients == 4 * rows
        assert rank.held.moments == 8 * sum(
            p.tensor.numel() for p in rank.saved if p.name.startswith("model/")
        )


@pytest.mark.parametrize("name", ["FP32", "FP8 weights"])
def test_what_is_gathered(two: Two, name: str) -> None:
    """This rank's rows, each microbatch: of the blocks twice in `full`, once in `grad`, of the rest
    once. Linears' weights as 1 byte each where they are kept in FP8. Gradients always in FP32."""
    run = two.runs[f"{name}/full"][0]
    count = 4 if name == "FP32" else 1  # microbatches of the last step, here
    bytes_of = {True: 0, False: 0}  # in a block or not
    elements = 0
    for p in two.runs[f"{name}/whole"][0].saved:
        if p.name.startswith("model/"):
            rows = -(-p.global_shape[0] // 2) * torch.Size(p.global_shape[1:]).numel()
            is_block, is_matrix = ".layers." in f".{p.name[6:]}", len(p.global_shape) == 2
            in_fp8 = name == "FP8 weights" and is_block and is_matrix
            bytes_of[is_block] += rows * (1 if in_fp8 else 4)
            elements += rows
    gathered = {key: n for key, n in run.traffic.items() if key[1] == "all_gather"}
    assert sum(gathered.values()) == count * (bytes_of[False] + 2 * bytes_of[True])
    assert run.traffic["dp", "reduce_scatter_sum", "float32"] == count * 2 * 4 * elements
    if name == "FP32":
        once = two.runs["FP32/grad"][0].traffic["dp", "all_gather", "float32"]
        assert once == count * (bytes_of[False] + bytes_of[True])
    else:
        assert run.traffic["dp", "all_reduce_max", "float32"] == 4 * 4 * ODD.num_layers


# ---- checkpoints


@pytest.mark.parametrize(
    ("how", "saved"),
    [
        ("whole to sharded", "whole"),
        ("sharded to whole", "sharded"),
        ("sharded to sharded", "sharded"),
        ("sharded to ZeRO-1", "sharded"),
        ("alone to sharded", "alone"),
    ],
)
def test_checkpoints_load_in_any_layout(two: Two, how: str, saved: str) -> None:
    assert_loaded(two.after[how], two.before[saved])


def assert_loaded(after: list[Loaded], before: list[Loaded]) -> None:
    """Masters, moments and scales bit for bit; the next losses as parallel layouts agree."""
    ours, theirs = (assembled([rank.saved for rank in ranks]) for ranks in (after, before))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for rank in after:
        assert_same_tables(rank, before[0])
        assert rank.next_losses == pytest.approx(before[0].next_losses, rel=1e-3)


def test_one_rank_loads_what_two_have_sharded(two: Two) -> None:
    loaded = alone(continued, {"alone": loading(SAVED, two.root, "sharded")})
    assert_loaded([loaded["alone"]], two.before["sharded"])


# ---- four ranks


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("stage", [None, 0, 1])
def test_who_shards_and_who_replicates(
    rank: int, stage: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of two replicas, each of two tensor-parallel ranks: neighbours share a node.

    Without stages, and of two stages of eight ranks each.
    """
    first, ends = 8 * (stage or 0), (0,) if stage is None else (0, 8)
    asked = []

    def groups(rows: list[list[int]]) -> tuple[object, None]:
        asked.append(rows)
        return object(), None

    monkeypatch.setattr(fsdp_module.dist, "new_subgroups_by_enumeration", groups)
    monkeypatch.setattr(
        fsdp_module.DeviceMesh, "from_group", lambda groups, kind, mesh, mesh_dim_names: mesh
    )
    stand_in = SimpleNamespace(
        data=SimpleNamespace(group=object(), size=4, rank=rank),
        world=SimpleNamespace(rank=first + 2 * rank + 1),
        device=torch.device("cpu"),
        traffic=None,
    )
    spec = fsdp("hybrid", num_nodes=2 * len(ends), devices_per_node=4, tp=2, pp=len(ends))
    made, shards = fsdp_module._device_mesh(stand_in, spec)  # type: ignore[arg-type]
    assert (shards.size, shards.rank) == (2, rank % 2)
    assert made == [[first + 1, first + 3], [first + 5, first + 7]]
    inner, outer = [[0, 2], [4, 6], [1, 3], [5, 7]], [[0, 4], [2, 6], [1, 5], [3, 7]]
    shifted = [[[[r + by for r in row] for row in rows] for by in ends] for rows in (inner, outer)]
    assert [sorted(rows) for rows in asked] == [sorted(sum(rows, [])) for rows in shifted]


def compare(
    of: dict[str, tuple[Case, ParallelSpec, ParallelSpec, float]], num_ranks: int = 4
) -> dict[str, Any]:
    """Compare jobs with and without sharded weights; return the bytes of the latter's moments.

    The first loss, before any update, has the same bits.
    """
    jobs = {f"{name}/whole": sharded(w, spec) for name, (w, spec, _, _) in of.items()}
    jobs |= {f"{name}/full": sharded(w, spec) for name, (w, _, spec, _) in of.items()}
    ranks = on_ranks(run, jobs, num_ranks)
    for name, (_, _, spec, bound) in of.items():
        ours, whole = (ranks[f"{name}/{how}"] for how in ("full", "whole"))
        each = num_ranks // spec.pp
        for begin in range(0, num_ranks, each):
            assert_same_on_all(ours[begin : begin + each])
        assert ours[0].losses[0] == whole[0].losses[0], name
        assert ours[0].losses == pytest.approx(whole[0].losses, rel=bound), name
        norms = [result.grad_norm for result in whole[0].results]
        found = [result.grad_norm for result in ours[0].results]
        assert found == pytest.approx(norms, rel=5e-2 if bound == IN_FP8_BOUND else 1e-4), name
        assembled([rank.saved for rank in ours])  # every element is saved once
    return {name: ranks[f"{name}/full"][0].held.moments for name in of}


def test_ranks_that_share_sequences() -> None:
    """They have the same weights, so that one replica is enough."""
    values = {"trainer.devices": 2, "model.context_parallel_size": 2, "model.fsdp": True}
    words = ["model.data.data_prefix=builtin", "model.global_batch_size=64"]
    found = load_config(words)
    assert not list(check_values(found | values))
    of = {"FP32": job("fp32", num_microbatches=2), "FP8": job("fp32", IN_FP8, num_microbatches=2)}
    bounds = {"FP32": 1e-6, "FP8": IN_FP8_BOUND}
    compare({name: (j, ParallelSpec(cp=2), fsdp(cp=2), bounds[name]) for name, j in of.items()}, 2)


def test_stages_of_a_pipeline() -> None:
    """With one stage a rank, and with two whose gathered weights stay until they are read again."""
    whole, two_each = (
        ParallelSpec(pp=2),
        PipelineSpec(schedule="Interleaved1F1B", stages_per_rank=2),
    )
    deep = job("fp32", model=gpt_spec(num_layers=4), num_microbatches=8)
    in_fp8 = job("fp32", IN_FP8, model=gpt_spec(num_layers=4), num_microbatches=8)
    compare({
        "FP32": (deep, whole, fsdp(pp=2), 1e-6),
        "FP8": (
            in_fp8, replace(whole, pipeline=two_each),
            fsdp("grad", pp=2, pipeline=two_each), IN_FP8_BOUND,
        ),
    })  # fmt: skip


@pytest.mark.slow
def test_nodes_that_replicate_a_stage() -> None:
    """Two nodes of two ranks have each of two stages; a node's ranks shard it."""
    hybrid = fsdp("hybrid", num_nodes=4, devices_per_node=2, pp=2)
    of = {"FP32": job("fp32", num_microbatches=8), "FP8": job("fp32", IN_FP8, num_microbatches=8)}
    bounds = {"FP32": 1e-6, "FP8": IN_FP8_BOUND}
    compare({name: (j, ParallelSpec(pp=2), hybrid, bounds[name]) for name, j in of.items()}, 8)


@pytest.mark.slow
def test_four_ranks() -> None:
    """Alone, hybrid over two nodes of two, and with tensor and sequence parallelism."""
    deep = {"num_microbatches": 4}
    tp, hybrid = job("fp32", IN_FP8, **deep), fsdp("hybrid", num_nodes=2)
    of = {
        "FP32": (job("fp32", model=ODD, **deep), ParallelSpec(), fsdp(), 1e-6),
        "hybrid": (job("fp32", model=ODD, **deep), ParallelSpec(), hybrid, 1e-6),
        "hybrid FP8": (tp, ParallelSpec(), hybrid, IN_FP8_BOUND),
        "tp": (tp, ParallelSpec(tp=2), fsdp(tp=2), IN_FP8_BOUND),
        "tp, sequence": (
            tp, ParallelSpec(tp=2, sequence_parallel=True),
            fsdp("grad", tp=2, sequence_parallel=True), IN_FP8_BOUND,
        ),
        "tp, FP32": (job("fp32", **deep), ParallelSpec(tp=2), fsdp(tp=2), 1e-6),
    }  # fmt: skip
    held = compare(of)
    assert held["hybrid"] == pytest.approx(2 * held["FP32"], rel=0.05)


@pytest.mark.slow
def test_four_ranks_load_what_two_have_sharded(two: Two) -> None:
    case = replace(loading(SHARDED, two.root, "sharded"), num_microbatches=4)
    (ranks,) = on_ranks(continued, {"sharded": case}, 4).values()
    after = assembled([rank.saved for rank in ranks])
    before = assembled([rank.saved for rank in two.before["sharded"]])
    assert all(torch.equal(after[name], before[name]) for name in before)


# ---- refusals


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    words = ["model.data.data_prefix=builtin", "model.global_batch_size=64", "trainer.devices=4"]
    return load_config(words)


TP, CHUNK = "model.tensor_model_parallel_size", "model.grad_allreduce_chunk_size_mb"
HYBRID = {"model.fsdp_sharding_strategy": "hybrid"}
FP8_WEIGHTS = {"model.fp8": True, "model.fp8_params": True}


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        ({"trainer.devices": 1}, "model.fsdp", "one replica"),
        (
            {
                "model.pipeline_model_parallel_size": 2,
                "model.virtual_pipeline_model_parallel_size": 2,
                "model.pipeline_schedule": "ZBVZeroBubble",
            },
            "model.fsdp",
            "within the backward pass",
        ),
        (
            {**HYBRID, "trainer.num_nodes": 3, "model.pipeline_model_parallel_size": 2},
            "model.fsdp_sharding_strategy",
            "the run has 3 nodes, which are not equally many whole ones for each of 2 stages",
        ),
        (
            {**HYBRID, "trainer.num_nodes": 2, "model.pipeline_model_parallel_size": 2},
            "model.fsdp_sharding_strategy",
            "one node for each pipeline stage",
        ),
        (
            {**FP8_WEIGHTS, "model.fp8_recipe": "blockwise", "model.fp8_backend": "te"},
            "model.fp8_params",
            "one scale for each weight",
        ),
        ({"model.optim.name": "distributed_fused_adam"}, "model.optim.name", "already"),
        ({"model.optim.grad_sync_dtype": "bf16"}, "model.optim.grad_sync_dtype", "FSDP has"),
        ({"model.megatron_amp_O2": False}, "model.megatron_amp_O2", "one dtype"),
        (HYBRID, "model.fsdp_sharding_strategy", "one node"),
        (
            {**HYBRID, "trainer.devices": 1, "trainer.num_nodes": 2},
            "model.fsdp_sharding_strategy",
            "one replica on each node",
        ),
        (
            {**HYBRID, "trainer.num_nodes": 4, "trainer.devices": 4, TP: 8},
            "model.fsdp_sharding_strategy",
            "a node has 4 ranks, which are not whole replicas of 8 ranks",
        ),
        ({"trainer.num_nodes": 2, "trainer.devices": 4, TP: 8}, "model.fsdp", "one replica"),
        ({CHUNK: 25}, CHUNK, "has no effect with model.fsdp=True"),
        ({**FP8_WEIGHTS, "trainer.precision": 16}, "model.fp8_params", "FP16's range"),
        (
            {"model.fsdp": False, "model.fsdp_sharding_strategy": "grad"},
            "model.fsdp_sharding_strategy",
            "has no effect with model.fsdp=False",
        ),
        (
            {"model.fsdp": False, "model.fsdp_grad_reduce_dtype": "bf16"},
            "model.fsdp_grad_reduce_dtype",
            "has no effect with model.fsdp=False",
        ),
        ({"model.fsdp_grad_reduce_dtype": 8}, "model.fsdp_grad_reduce_dtype", "32, bf16 or 16"),
        ({"model.fsdp_grad_reduce_dtype": True}, "model.fsdp_grad_reduce_dtype", "32, bf16 or 16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    values: dict[str, Any], given: dict[str, Any], key: str, said: str
) -> None:
    assert not check_values(values | {"model.fsdp": True})
    problems = check_values(values | {"model.fsdp": True} | given)
    assert [p for p in problems if p.key == key and said in f"{p.reason} {p.hint}"], problems
