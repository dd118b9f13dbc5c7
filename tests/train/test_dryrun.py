"""The dry run's numbers are compared with those of real ranks, counted by other means."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from fp8_numerics import cpu
from megafp8.parallel.mesh import single_rank
from megafp8.plan.dryrun import (
    RankShare,
    rank_share,
    shapes_of,
    simulated,
    whole_layout,
)
from megafp8.plan.dryrun_step import forward, stages_of
from megafp8.plan.memory import rank_memory
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec, PipelineSpec, RunSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.optim import StorageSpec
from megafp8.specs.te_versions import DEFAULT_VERSION
from megafp8.train.build import build
from tests.ranks import run_ranks
from tests.te_sources import need_sources
from tests.tiny import gpt_spec, moe_spec, optim_spec, run_spec
from tests.train import dryrun_work
from tests.train.dryrun_work import (
    Kept,
    Most,
    alone,
    fresh_bytes,
    is_start,
    most_in_tensors,
    storages,
)
from tests.train.runs import ROOT

# torch 2.13's new names for these two are not in 2.11
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.*deprecated:FutureWarning"),
]
FP8 = Fp8Recipe(amax_history_len=4)
LLAMA = {
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
    "num_query_groups": 4,
}
SHAPE = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 8}


def job(parallel: ParallelSpec, *, batch: int = 8, **choices: Any) -> RunSpec:
    shape = choices.pop("shape", {})
    packs = choices.pop("packs", False)
    spec = run_spec(parallel=parallel, model=gpt_spec(**(SHAPE | shape)), compute="bf16", **choices)
    data = replace(spec.data, reset_attention_mask=packs)
    return replace(spec, data=data, train=replace(spec.train, global_batch_size=batch))


def layout(**sizes: Any) -> ParallelSpec:
    ranks = math.prod(sizes.get(axis, 1) for axis in ("tp", "cp", "dp", "pp"))
    sizes.pop("dp", None)
    return ParallelSpec(devices_per_node=ranks, **sizes)


INTERLEAVED = PipelineSpec(schedule="Interleaved1F1B", stages_per_rank=2)
ZBV = PipelineSpec(schedule="ZBVZeroBubble", stages_per_rank=2)
LAYOUTS = {
    "one rank": layout(),
    "tp 2 x pp 2": layout(tp=2, pp=2),
    "tp 4, sequence": layout(tp=4, sequence_parallel=True),
    "pp 4": layout(pp=4),
    "tp 2 x cp 2": layout(tp=2, cp=2),
    "pp 2, interleaved x dp 2": layout(pp=2, dp=2, pipeline=INTERLEAVED),
    "pp 2, ZBV x tp 2 x dp 2": layout(pp=2, tp=2, dp=2, pipeline=ZBV),
}


@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["tied", "llama"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_shares_of_all_ranks_are_the_model(name: str, shape: dict[str, Any]) -> None:
    """Every element of every logical tensor is on each rank that holds its part, once."""
    spec = job(LAYOUTS[name], shape=shape, fp8=FP8)
    alone = build(replace(spec, parallel=ParallelSpec()), single_rank())
    elements = sum(param.numel() for param in alone.model.parameters())
    assert whole_layout(spec).num_params == elements

    held: dict[str, int] = defaultdict(int)
    whole: dict[str, int] = {}
    copies: dict[str, int] = defaultdict(int)
    total = 0
    for rank in range(spec.parallel.world_size):
        with simulated(spec, rank) as state:
            total += sum(param.numel() for param in state.model.parameters())
            shapes = list(shapes_of(state))
        for logical, shape_of_all, local, _ in shapes:
            held[logical] += math.prod(local)
            whole[logical] = math.prod(shape_of_all)
            copies[logical] += math.prod(local) == math.prod(shape_of_all)
    assert sum(whole.values()) == elements
    assert total == sum(held.values())
    for logical, size in whole.items():
        ranks = held[logical] / size  # how many whole copies there are
        assert ranks == (copies[logical] or ranks) and ranks % spec.parallel.dp == 0, logical


@pytest.mark.parametrize("microbatches", [4, 8])
def test_bubbles_of_interleaved_stages(microbatches: int) -> None:
    """The bubble is (p - 1) / (v m + p - 1), v stages on each rank (Narayanan et al. 2021, 2.2)."""
    spec = job(layout(pp=2, pipeline=INTERLEAVED), batch=2 * microbatches)
    times = whole_layout(spec).times
    assert times is not None and times.bubble == pytest.approx(1 / (2 * microbatches + 1))


def test_a_first_dry_run_counts_as_a_second_and_nothing_stays() -> None:
    """Nothing waits for Python's garbage collector, which is off, in a process that imports torch.

    The tensors of a function that imports Dynamo once did, and counted as copies of weights. Of a
    first run stays what is made once in a process: a number of 4 bytes.
    """
    program = """
import gc, weakref
gc.disable()
from megafp8.specs import Fp8Recipe
from megafp8.plan import dryrun
from tests.tiny import run_spec

made, build = [], dryrun.build
def noted(*given):
    made.append(build(*given))
    return made[-1]
dryrun.build = noted
spec = run_spec(fp8=Fp8Recipe(), compute="bf16")
first, second = (dryrun.rank_share(spec, 0) for _ in range(2))
assert first.step.weight_copies == second.step.weight_copies
assert first.kept == second.kept and 0 <= first.step.peak - second.step.peak <= 4
left = [weakref.ref(state.model) for state in made]
made.clear()
assert not any(ref() for ref in left)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


CASES = {
    "bf16": {},
    "fp8": {"fp8": FP8},
    "fp8 alone": {"fp8": replace(FP8, params_in_fp8=True)},
    "fp8 rowwise, llama": {
        "fp8": replace(FP8, name="rowwise", backward_format="e4m3"),
        "shape": LLAMA,
    },
    "dropout": {"fp8": FP8, "shape": {"hidden_dropout": 0.1, "attention_dropout": 0.1}},
    "recomputed": {
        "fp8": FP8,
        "shape": {"recompute": RecomputeSpec(granularity="full", method="uniform", num_layers=1)},
    },
}
MOE = moe_spec(num_experts=8, layers=(True, False, True, True))
EXPERTS = {
    "experts": {"fp8": FP8, "shape": LLAMA | {"moe": MOE}},
    "experts, recomputed": {"shape": LLAMA | CASES["recomputed"]["shape"] | {"moe": MOE}},
}


AGREED = 1024
"""More than the names' digests that ranks have agreed by, which gloo's threads may hold a moment.

There are 33 bytes and a size of each rank for each axis and table.
"""


def check_held(share: RankShare, real: int, where: str, more: int = 0) -> None:
    """Weights kept in FP8 only have a scale each, which is not in the tables; `more` is known."""
    scales = 4 * len(share.shapes) if where.startswith("fp8 alone") else 0
    assert share.held.total <= real <= share.held.total + scales + more, where


@pytest.mark.parametrize("name", CASES)
def test_one_rank_holds_what_the_dry_run_says(name: str) -> None:
    """The 1 % is for a norm's statistics, which torch keeps in half precision on CPUs only.

    The profiler's peak also has the buffers that kernels make inside one operation. Where layers
    are recomputed these are a third of it, since few tensors exist at a time.
    """
    spec = job(layout(), **CASES[name])
    share, (held, kept, most) = rank_share(spec, 0), alone(spec)
    check_held(share, held, name)
    assert share.kept == {0: pytest.approx(kept, rel=0.01)}
    counted = share.step.microbatch + share.step.workspace
    in_tensors = most_in_tensors(spec)
    assert counted == pytest.approx(in_tensors, rel=0.01)
    assert in_tensors <= most
    if name != "recomputed":
        assert counted == pytest.approx(most, rel=0.25)


def test_a_microbatch_leaves_the_fp32_sums_that_the_dry_run_counts() -> None:
    """Python's garbage collector finds 4 bytes for each element of a linear's weight."""
    left, counted = [], []
    for sums in (False, True):
        storage = StorageSpec(main_grads="fp8", main_params="fp16", sums_in_fp32=sums)
        spec = job(layout(), shape={"num_layers": 1}, fp8=FP8, optim=optim_spec(storage=storage))
        counted.append(rank_share(spec, 0).step.gradients)
        state = build(spec, single_rank())
        state.sink.begin_step()
        state.scaling.begin_microbatch(0)
        before = storages()
        forward(stages_of(state)[0], spec, state).backward()
        left.append(fresh_bytes(before))
    linears = 4 * 64**2 + 2 * 64 * 128
    assert counted == [0, 4 * linears]
    assert left[1] - left[0] == 4 * linears


def compare(parallel: ParallelSpec, names: list[str]) -> None:
    ranks = range(parallel.world_size)
    cases = {name: job(parallel, **(CASES | EXPERTS)[name]) for name in names}
    shares = {name: [rank_share(spec, rank) for rank in ranks] for name, spec in cases.items()}
    arguments = {"cases": cases, "planned": kept_by(shares)}
    measured = run_ranks(dryrun_work.measure, parallel.world_size, arguments)
    for name in cases:
        for rank in ranks:
            share, real = shares[name][rank], measured[rank][name]
            where = f"{name}, rank {rank}"
            assert share.num_params == real["params"], where
            moe = cases[name].model.moe
            counts = 0 if moe is None else 8 * moe.num_experts * sum(moe.layers)  # of routers
            check_held(share, real["held"], where, more=counts + AGREED)
            expected = {stage: pytest.approx(n, rel=0.01) for stage, n in real["kept"].items()}
            assert share.kept == expected, where


def kept_by(shares: dict[str, list[RankShare]]) -> Kept:
    return {name: [share.kept for share in of_ranks] for name, of_ranks in shares.items()}


def test_a_new_tensor_at_a_freed_address_is_counted() -> None:
    """A row of two FP32 numbers once was not: Transformer Engine's ranks held 8 bytes too few."""
    freed = [torch.empty(2) for _ in range(64)]
    before = storages()
    freed.clear()
    made = [torch.empty(2) for _ in range(64)]
    assert fresh_bytes(before) == 8 * len(made)


def test_tensors_that_a_compilation_leaves_have_no_memory() -> None:
    """Asking for their address is an error, by which tests after one that compiles failed."""
    before = storages()
    with FunctionalTensorMode():
        wrapper = torch.empty(2)
    left = [wrapper, torch._to_functional_tensor(torch.empty(2, device="meta"))]
    inside = torch._from_functional_tensor(wrapper.elem)
    assert fresh_bytes(before) == inside.nbytes and len(left) == 2


def test_a_tensor_that_wraps_others_has_no_memory_of_its_own() -> None:
    """DTensors and sparse tensors that another test left in the process failed those after it."""
    sparse = torch.eye(2).to_sparse()
    before = storages()
    wrapper = TwoTensor(torch.empty(2), torch.empty(2))
    assert sparse.layout != torch.strided
    assert fresh_bytes(before) == wrapper.a.nbytes + wrapper.b.nbytes


def test_ranks_that_divide_experts_hold_what_the_dry_run_says() -> None:
    """A simulated rank has as many rows of each rank and expert, and these have so many."""
    compare(layout(dp=2, ep=2), list(EXPERTS))


def test_nothing_of_rows_stays_until_a_layer_is_recomputed() -> None:
    """Such a layer keeps its input, whether its rows go to other ranks or not."""
    again = EXPERTS["experts, recomputed"]
    whole, divided = (rank_share(job(layout(dp=2, ep=ep), **again), 0).kept for ep in (1, 2))
    assert whole == divided


@pytest.mark.slow
def test_two_ranks_hold_what_the_dry_run_says() -> None:
    compare(layout(tp=2), list(CASES))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tp 2 x pp 2", "tp 4, sequence", "pp 4", "pp 2, interleaved x dp 2", "tp 2 x cp 2"]
)
def test_four_ranks_hold_what_the_dry_run_says(name: str) -> None:
    compare(LAYOUTS[name], ["bf16", "fp8", "fp8 alone", "dropout"])


TE_CASES = {
    name: {**case, "shape": {"activation": "gelu-tanh", **case.get("shape", {})}}
    for name, case in CASES.items()
    if name != "fp8 rowwise, llama"
} | {
    "fp8 alone, tensorwise": {
        "fp8": Fp8Recipe(name="tensorwise", params_in_fp8=True),
        "shape": {"activation": "gelu-tanh"},
    },
    "fp8, llama": {"fp8": FP8, "shape": LLAMA},
    "fp8, llama, documents": {"fp8": FP8, "shape": LLAMA, "packs": True},
    "nvfp4, llama": {"fp8": Fp8Recipe(name="nvfp4", backward_format="e4m3"), "shape": LLAMA},
}


def compare_te(parallel: ParallelSpec, names: Iterable[str]) -> None:
    """As `compare`, over Transformer Engine's own Python, in processes of its own."""
    need_sources(DEFAULT_VERSION)
    cases = {name: with_te(job(parallel, **TE_CASES[name])) for name in names}
    (shares,) = run_ranks(dryrun_work.shares_of_te, 1, {"cases": cases})
    arguments = {"cases": cases, "planned": kept_by(shares)}
    measured = run_ranks(dryrun_work.measure_te, parallel.world_size, arguments)
    for name in cases:
        for rank, share in enumerate(shares[name]):
            real, where = measured[rank][name], f"{name}, rank {rank}"
            assert share.num_params == real["params"], where
            # The state of its dropout's random numbers is a position of two INT64.
            check_held(share, real["held"], where, more=AGREED)
            expected = {stage: pytest.approx(n, rel=0.01) for stage, n in real["kept"].items()}
            assert share.kept == expected, where


def with_te(spec: RunSpec) -> RunSpec:
    return replace(spec, precision=replace(spec.precision, backend="te"))


FAST = ("fp8 alone", "fp8, llama", "fp8, llama, documents", "recomputed", "nvfp4, llama")


def test_one_rank_of_transformer_engine_holds_what_the_dry_run_says() -> None:
    compare_te(layout(), FAST)


def test_transformer_engine_casts_each_weight_once_in_two_orientations() -> None:
    """Its casts last a step: a byte for each element in each orientation, and a linear's scale.

    The scales and amaxes of all tensors that are cast are not among these bytes, but a few numbers
    are that the first run of a process makes.
    """
    need_sources(DEFAULT_VERSION)
    recipes = {"delayed": FP8, "tensorwise": Fp8Recipe(name="tensorwise")}
    on_gpu, shape = layout(accelerator="gpu"), TE_CASES["fp8"]["shape"]
    cases = {name: with_te(job(on_gpu, fp8=fp8, shape=shape)) for name, fp8 in recipes.items()}
    (shares,) = run_ranks(dryrun_work.shares_of_te, 1, {"cases": cases})
    elements, linears = 4 * (4 * 64**2 + 2 * 64 * 128), 4 * 4
    for name, (share,) in shares.items():
        assert 0 <= share.step.weight_copies - (2 * elements + 4 * linears) < 64, name


@pytest.mark.slow
def test_one_rank_of_transformer_engine_in_other_cases() -> None:
    compare_te(layout(), [name for name in TE_CASES if name not in FAST])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp 2 x pp 2", "tp 4, sequence", "pp 2, interleaved x dp 2"])
def test_four_ranks_of_transformer_engine_hold_what_the_dry_run_says(name: str) -> None:
    compare_te(LAYOUTS[name], ["bf16", "fp8", "fp8 alone", "fp8, llama"])


def kept_on_a_gpu(**shape: Any) -> tuple[int, int]:
    """Return the bytes that a microbatch keeps on a GPU, and its number of tokens."""
    spec = job(layout(accelerator="gpu"), shape=shape)
    tokens = spec.train.micro_batch_size * spec.data.seq_length
    return rank_share(spec, 0).step.microbatch, tokens


def test_dropout_on_a_gpu_keeps_one_byte_for_each_element() -> None:
    plain, tokens = kept_on_a_gpu()
    hidden, _ = kept_on_a_gpu(hidden_dropout=0.1)
    ffn, _ = kept_on_a_gpu(ffn_dropout=0.1)
    layers, width = SHAPE["num_layers"], SHAPE["hidden_size"]
    assert hidden - plain == tokens * width * (2 * layers + 1)
    assert ffn - plain == tokens * SHAPE["ffn_hidden_size"] * layers


def test_rmsnorm_on_a_gpu_keeps_one_statistic_fewer_than_layernorm() -> None:
    both, tokens = kept_on_a_gpu()
    root, _ = kept_on_a_gpu(normalization="rmsnorm")
    assert both - root == 4 * tokens * (2 * SHAPE["num_layers"] + 1)


# ---- FSDP

SMALL = {"hidden_size": 128, "ffn_hidden_size": 512, "max_position_embeddings": 16}
ALONE = replace(FP8, params_in_fp8=True)
O1 = StorageSpec(main_grads="fp8", main_params="fp16")
O2 = replace(O1, exp_avg="fp8", exp_avg_sq="fp16")
SHARDED: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"compute": "fp32"},
    "one microbatch": {"batch": 4},
    "delayed": {"fp8": FP8},
    "fp8 alone": {"fp8": ALONE},
    "kept, sums in bf16": {"fsdp": FsdpSpec(strategy="grad", grad_reduce_dtype="bf16")},
    "blockwise, llama": {"fp8": Fp8Recipe(name="blockwise"), "shape": LLAMA},
    "rowwise_with_gw_hp": {"fp8": Fp8Recipe(name="rowwise_with_gw_hp")},
    "mxfp8": {"fp8": Fp8Recipe(name="mxfp8", backward_format="e4m3")},
    "nvfp4": {"fp8": Fp8Recipe(name="nvfp4", backward_format="e4m3")},
    "recomputed": {"fp8": FP8, "shape": CASES["recomputed"]["shape"]},
    "torchao": {"fp8": Fp8Recipe(name="tensorwise"), "backend": "torchao"},
    "torchao, FP8 gathers": {
        "fp8": Fp8Recipe(name="tensorwise"),
        "backend": "torchao",
        "fsdp": FsdpSpec(torchao_in_fp8=True),
    },
    "O1": {"optim": optim_spec(storage=O1)},
    "O2": {"optim": optim_spec(storage=O2)},
    "O2, delayed": {"optim": optim_spec(storage=O2), "fp8": FP8},
    "O3": {"optim": optim_spec(storage=O2), "fp8": ALONE},
}
AT_A_LEVEL = ("O1", "O2", "O2, delayed", "O3")
OF_TWO = ("bf16", "one microbatch", "delayed", "fp8 alone", "nvfp4", *AT_A_LEVEL)


def sharded(name: str, parallel: ParallelSpec) -> RunSpec:
    case = dict(SHARDED[name])
    fsdp, backend = case.pop("fsdp", FsdpSpec()), case.pop("backend", "native")
    if parallel.num_nodes > 1:
        fsdp = replace(fsdp, strategy="hybrid")
    layers = {"num_layers": 3} if parallel.pp == 1 else {}  # one is gathered beside another's pass
    case["shape"] = SMALL | layers | case.get("shape", {})
    spec = run_spec_of(replace(parallel, fsdp=fsdp), **case)
    return replace(spec, precision=replace(spec.precision, backend=backend))


def run_spec_of(parallel: ParallelSpec, **case: Any) -> RunSpec:
    compute = case.pop("compute", "bf16")
    spec = job(parallel, **case)
    return replace(spec, precision=replace(spec.precision, compute=compute))


def live_bytes_of(parallel: ParallelSpec, names: Iterable[str]) -> list[dict[str, Most]]:
    cases = {name: sharded(name, parallel) for name in names}
    found: list[dict[str, Most]] = run_ranks(
        dryrun_work.most_of_fsdp, parallel.world_size, {"cases": cases}
    )
    return found


def assert_counted(parallel: ParallelSpec, measured: list[dict[str, Most]]) -> None:
    """A dry run has the most bytes of a rank within 1 %, at the start and in a step."""
    last = parallel.world_size - 1
    for rank, some in ((0, measured[0]), (last, dict(list(measured[last].items())[:1]))):
        for name, real in some.items():
            share, where = rank_share(sharded(name, parallel), rank), f"{name}, rank {rank}"
            assert is_start(real.start, share, parallel), where
            assert share.in_step == pytest.approx(min(real.steps), rel=0.01), where


@pytest.fixture(scope="module")
def of_two_ranks() -> list[dict[str, Most]]:
    return live_bytes_of(layout(dp=2), OF_TWO)


def test_fsdps_ranks_hold_what_the_dry_run_says(of_two_ranks: list[dict[str, Most]]) -> None:
    assert_counted(layout(dp=2), of_two_ranks)


@pytest.mark.parametrize("name", AT_A_LEVEL)
def test_a_plan_of_fsdp_at_a_level_has_the_bytes_of_ranks(
    name: str, of_two_ranks: list[dict[str, Most]]
) -> None:
    """The start within 0.1 %, and a step within 2 %: the plan is for GPUs, these run on a CPU."""
    plan, real = rank_memory(sharded(name, layout(dp=2)), 0), of_two_ranks[0][name]
    assert plan.start == pytest.approx(real.start, rel=0.001)
    if not cpu.FAST_AT_BF16:
        pytest.skip("this CPU multiplies FP32 copies of BF16 numbers, which a GPU does not make")
    assert plan.in_step == pytest.approx(min(real.steps), rel=0.02)


def test_steps_of_fsdp_hold_one_set_of_gradients(of_two_ranks: list[dict[str, Most]]) -> None:
    """Those of the last step once stayed until the end of the next.

    Gloo's threads may free late in any one step, so that the least of the later steps is compared.
    """
    for real in of_two_ranks[0].values():
        assert min(real.steps[1:]) < 1.01 * real.steps[0]


def kept_whole(module: Any, reshard_after_forward: Any = None, **choices: Any) -> Any:
    return fully_shard(module, reshard_after_forward=False, **choices)


def gathered_in_fp32(module: Any, mp_policy: Any, **choices: Any) -> Any:
    wide = replace(mp_policy, param_dtype=None)
    return fully_shard(module, mp_policy=wide, **choices)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("torch.distributed.fsdp.fully_shard", kept_whole),
        ("torch.distributed.fsdp.fully_shard", gathered_in_fp32),
        ("megafp8.train.live_bytes.LiveBytes.watched", lambda self: 0),
        ("megafp8.optim.fsdp_masters.FsdpMasters.begin_step", lambda self: None),
        ("megafp8.optim.fsdp_masters._shape_of", lambda x: torch.empty(x.shape, device="meta")),
    ],
    ids=["kept whole", "gathered in FP32", "gathered weights", "gradients of a step", "shapes"],
)
def test_a_wrong_size_of_fsdp_is_found(
    place: str, wrong: Any, of_two_ranks: list[dict[str, Most]], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [
        {name: rank[name] for name in ("bf16", "one microbatch", "O2")} for rank in of_two_ranks
    ]
    monkeypatch.setattr(place, wrong)
    with pytest.raises(AssertionError):
        assert_counted(layout(dp=2), some)


@pytest.mark.slow
def test_two_ranks_of_fsdp_in_other_cases() -> None:
    names = [name for name in SHARDED if name not in OF_TWO]
    assert_counted(layout(dp=2), live_bytes_of(layout(dp=2), names))


@pytest.mark.parametrize(
    "name",
    [
        "pp 2",
        pytest.param("tp 2, sequence", marks=pytest.mark.slow),
        pytest.param("cp 2", marks=pytest.mark.slow),
        pytest.param("pp 2, GPipe", marks=pytest.mark.slow),
        pytest.param("pp 2, interleaved", marks=pytest.mark.slow),
        pytest.param("hybrid", marks=pytest.mark.slow),
    ],
)
def test_four_ranks_of_fsdp_hold_what_the_dry_run_says(name: str) -> None:
    parallel = {
        "pp 2": layout(dp=2, pp=2),
        "tp 2, sequence": layout(dp=2, tp=2, sequence_parallel=True),
        "cp 2": layout(dp=2, cp=2),
        "pp 2, GPipe": layout(dp=2, pp=2, pipeline=PipelineSpec(schedule="GPipe")),
        "pp 2, interleaved": layout(dp=2, pp=2, pipeline=INTERLEAVED),
        "hybrid": ParallelSpec(num_nodes=2, devices_per_node=2),
    }[name]
    assert_counted(parallel, live_bytes_of(parallel, ["bf16", "fp8 alone"]))


MANY = 32
SCHEDULES = {
    "1F1B": PipelineSpec(),
    "GPipe": PipelineSpec(schedule="GPipe"),
    "interleaved": INTERLEAVED,
    "zero bubble": PipelineSpec(schedule="InterleavedZeroBubble"),
    "zero bubble, 2 stages": PipelineSpec(schedule="InterleavedZeroBubble", stages_per_rank=2),
    "ZBV": ZBV,
}


def of_a_schedule(name: str) -> RunSpec:
    """Return a job of many microbatches in a step, whose weights are few."""
    parallel = layout(pp=2, pipeline=SCHEDULES[name])
    return job(parallel, batch=MANY * 2, shape=SMALL | {"ffn_hidden_size": 128})


def assert_counted_in(names: Iterable[str]) -> None:
    cases = {name: of_a_schedule(name) for name in names}
    found = run_ranks(dryrun_work.most_of_fsdp, 2, {"cases": cases})
    for name, spec in cases.items():
        assert spec.train.num_microbatches(1) == MANY
        for rank in range(2):
            real = min(found[rank][name].steps)
            assert rank_share(spec, rank).in_step == pytest.approx(real, rel=0.01), (name, rank)


def test_a_pipeline_of_many_microbatches_holds_few_messages() -> None:
    """A rank holds those that wait for their pass, and the last that it sent."""
    assert_counted_in(["interleaved"])


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "GPipe"])
def test_more_microbatches_take_no_more_memory(name: str) -> None:
    spec = of_a_schedule(name)
    train = replace(spec.train, global_batch_size=4 * spec.train.global_batch_size)
    for rank in range(2):
        assert rank_memory(replace(spec, train=train), rank) == rank_memory(spec, rank)


@pytest.mark.slow
def test_a_pipeline_of_many_microbatches_holds_few_messages_in_other_schedules() -> None:
    assert_counted_in(name for name in SCHEDULES if name != "interleaved")


def test_the_rows_of_all_shards_are_the_model() -> None:
    """The ranks' rows of each logical tensor are all of its rows, once, of unequal parts."""
    spec = sharded("bf16", layout(dp=3, tp=2))
    held: dict[str, int] = defaultdict(int)
    whole: dict[str, int] = {}
    for rank in range(spec.parallel.world_size):
        with simulated(spec, rank) as state:
            for logical, shape, local, _ in shapes_of(state):
                held[logical] += math.prod(local)
                whole[logical] = math.prod(shape)
    assert {name: held[name] / size for name, size in whole.items()} == {
        name: 1 if held[name] == size else 2 for name, size in whole.items()
    }
