"""The planned bytes against a dry run's, which counts them on a model built without numbers.

A dry run is itself held against real ranks (tests/train/test_dryrun.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megafp8.parallel.mesh import simulated_rank
from megafp8.plan import fsdp, layer
from megafp8.plan.dryrun import RankShare, held_bytes, rank_share, simulated
from megafp8.plan.layer import layer_bytes
from megafp8.plan.memory import rank_memory
from megafp8.plan.pipeline import most_held
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec, PipelineSpec, RunSpec, rank_shape
from megafp8.specs import held as held_module
from megafp8.specs.held import HeldBytes
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.moe import MoESpec
from megafp8.specs.optim import OptimSpec, StorageSpec
from megafp8.specs.precision import ModuleRule, RecipeName
from megafp8.specs.rank_shape import Parameter
from megafp8.specs.traits import GemmName
from megafp8.train.build import build
from megafp8.train.live_bytes import LiveBytes
from tests.parallel.matrix import LAYOUTS, kind_of
from tests.tiny import gpt_spec, optim_spec, run_spec

# torch 2.13's new names for these two are not in 2.11
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.*deprecated:FutureWarning"),
]
SLOW = pytest.mark.slow
SEQUENCE = 256
SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 8,
    "max_position_embeddings": SEQUENCE,
    "vocab_size": 1024,
}
LLAMA: dict[str, Any] = {
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
    "num_query_groups": 4,
}
FIELDS = ("tp", "cp", "pp", "ep", "pipeline", "sequence_parallel")
WINDOW: dict[str, Any] = {"window_size": (SEQUENCE // 4, 0)}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "ffn_dropout": 0.1}
DELAYED = Fp8Recipe(amax_history_len=16)
IN_FP8_ALONE = replace(DELAYED, params_in_fp8=True)
SKIPPING = replace(DELAYED, modules=(ModuleRule("layers.0.*", "high_precision"),))
ZERO = optim_spec(name="distributed_fused_adam")


O1 = StorageSpec(main_grads="fp8", main_params="fp16")
O3 = replace(O1, exp_avg="fp8", exp_avg_sq="fp16")


def recompute(granularity: str, method: str = "uniform", num_layers: int = 1) -> dict[str, Any]:
    spec = RecomputeSpec(granularity=granularity, method=method, num_layers=num_layers)  # type: ignore[arg-type]
    return {"recompute": spec}


def job(*, ranks: int = 1, shape: dict[str, Any] | None = None, **choices: Any) -> RunSpec:
    """Return a job on GPUs; choices that are no field of `ParallelSpec` are `run_spec`'s."""
    layout = {key: choices.pop(key) for key in FIELDS if key in choices}
    parallel = ParallelSpec(devices_per_node=ranks, accelerator="gpu", **layout)
    spec = run_spec(
        parallel=parallel,
        model=gpt_spec(**(SHAPE | (shape or {}))),
        **({"compute": "bf16"} | choices),
    )
    return replace(
        spec,
        train=replace(spec.train, global_batch_size=8),
        data=replace(spec.data, seq_length=SEQUENCE),
    )


def pipeline(schedule: str, stages: int = 1) -> PipelineSpec:
    return PipelineSpec(schedule=schedule, stages_per_rank=stages)  # type: ignore[arg-type]


def wide_head(**choices: Any) -> RunSpec:
    """Return a job in which the head's logits take most of the working memory."""
    narrow = {"hidden_size": 64, "ffn_hidden_size": 256, "num_layers": 1, "vocab_size": 8192}
    spec = job(shape=narrow, **choices)
    return replace(spec, train=replace(spec.train, micro_batch_size=4))


def with_documents(shape: dict[str, Any], **choices: Any) -> RunSpec:
    spec = job(shape=shape, **choices)
    return replace(spec, data=replace(spec.data, reset_attention_mask=True))


def experts(**changes: Any) -> dict[str, Any]:
    """Return the shape of a model with experts in three of its four layers."""
    sizes: dict[str, Any] = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 512}
    sizes["layers"] = (True, False, True, True)
    return LLAMA | {"moe": MoESpec(**(sizes | changes))}


LOSSES: dict[str, Any] = {
    "router_loss": "aux_loss", "router_loss_coeff": 0.1, "z_loss_coeff": 0.1
}  # fmt: skip
MANY = experts(num_experts=64, top_k=8, ffn_hidden_size=64)
EXPERTS: dict[str, RunSpec] = {
    "experts": job(fp8=DELAYED, shape=experts(**LOSSES)),
    "experts, bf16": job(shape=experts()),
    "experts, mxfp8": job(fp8=Fp8Recipe(name="mxfp8"), shape=experts(ffn_hidden_size=2048)),
    "many narrow experts": job(shape=MANY),
    "experts by sigmoid": job(shape=experts(score_function="sigmoid", **LOSSES)),
    "experts, a shared one, tp 2": job(
        ranks=2, tp=2, sequence_parallel=True, shape=experts(shared_ffn_hidden_size=256)
    ),
    "experts, tp 2 x dp 2, zero": job(
        ranks=4, tp=2, sequence_parallel=True, fp8=IN_FP8_ALONE, optim=ZERO, shape=experts()
    ),
    "experts, cp 2": job(ranks=2, cp=2, shape=experts()),
    "experts, pp 2": job(ranks=2, pp=2, fp8=DELAYED, shape=experts(layers=(False, True) * 2)),
    "experts, ep 2": job(ranks=2, ep=2, fp8=DELAYED, shape=experts(**LOSSES)),
    "experts, ep 2, bf16": job(ranks=2, ep=2, shape=experts()),
    "many narrow experts, ep 4, zero": job(ranks=4, ep=4, optim=ZERO, shape=MANY),
    "many narrow experts, ep 2, edp 2, zero": job(
        ranks=4, ep=2, fp8=IN_FP8_ALONE, optim=ZERO, shape=MANY
    ),
    "experts, a shared one, tp 2, ep 2": job(
        ranks=2, tp=2, ep=2, sequence_parallel=True, fp8=DELAYED,
        shape=experts(shared_ffn_hidden_size=256),
    ),
    "experts, cp 2, ep 2": job(ranks=2, cp=2, ep=2, shape=experts()),
    "experts, ep 2 x pp 2": job(
        ranks=4, pp=2, ep=2, fp8=Fp8Recipe(name="mxfp8"), shape=experts(layers=(False, True) * 2)
    ),
}  # fmt: skip
JOBS: dict[str, RunSpec] = EXPERTS | {
    "bf16": job(),
    "fp32": job(compute="fp32"),
    "fp8": job(fp8=DELAYED),
    "fp8 alone": job(fp8=IN_FP8_ALONE),
    "rowwise": job(fp8=Fp8Recipe(name="rowwise")),
    "rowwise_with_gw_hp": job(fp8=Fp8Recipe(name="rowwise_with_gw_hp")),
    "blockwise": job(fp8=Fp8Recipe(name="blockwise")),
    "a layer in high precision": job(fp8=SKIPPING),
    "llama": job(fp8=DELAYED, shape=LLAMA),
    "norms of heads": job(fp8=DELAYED, shape=LLAMA | {"qk_layernorm": True}),
    "norms of heads, recomputed": job(
        fp8=DELAYED, shape=LLAMA | {"qk_layernorm": True} | recompute("selective")
    ),
    "layernorms of heads, no positions": job(
        shape={"qk_layernorm": True, "position_embedding_type": "none"}
    ),
    "biases of qkv, tp 2": job(ranks=2, tp=2, shape=LLAMA | {"add_qkv_bias": True}),
    "dropout": job(fp8=DELAYED, shape=DROPOUT),
    "alibi": job(shape={"position_embedding_type": "alibi"}),
    "alibi, documents": with_documents({"position_embedding_type": "alibi"}),
    "documents": with_documents({}),
    "a window": job(shape=WINDOW),
    "a window in some layers, documents": with_documents(
        LLAMA | WINDOW | {"window_attn_skip_freq": 2}
    ),
    "a window, alibi": job(shape=WINDOW | {"position_embedding_type": "alibi"}),
    "a window, tp 2 x cp 2": job(ranks=4, tp=2, cp=2, shape=LLAMA | WINDOW),
    "documents, tp 2 x cp 2": with_documents({}, ranks=4, tp=2, cp=2),
    "post-norm": job(shape={"transformer_block_type": "post_ln"}),
    "post-norm, FP32 residual": job(
        shape={"transformer_block_type": "post_ln", "fp32_residual_connection": True}
    ),
    "tp 2": job(ranks=2, tp=2, fp8=DELAYED),
    "tp 2, sequence": job(ranks=2, tp=2, sequence_parallel=True, fp8=DELAYED),
    "tp 2, sequence, bf16": job(ranks=2, tp=2, sequence_parallel=True),
    "tp 2 x cp 2, llama": job(ranks=4, tp=2, cp=2, shape=LLAMA),
    "zero": job(ranks=4, fp8=IN_FP8_ALONE, optim=ZERO),
    "FP8-LM, O1": job(fp8=DELAYED, optim=optim_spec(storage=O1)),
    "FP8-LM, O3": job(fp8=IN_FP8_ALONE, optim=optim_spec(storage=O3)),
    "tensorwise": job(fp8=Fp8Recipe(name="tensorwise")),
    "a wide head": wide_head(),
    "a wide head, tp 2": wide_head(ranks=2, tp=2),
    "selective, first layers": job(fp8=DELAYED, shape=recompute("selective", "block", 1)),
    "pp 2, uneven, block": job(
        ranks=2,
        pp=2,
        pipeline=PipelineSpec(layout=(1, 3)),
        fp8=DELAYED,
        shape=recompute("full", "block", 2),
    ),
    "selective": job(fp8=DELAYED, shape=recompute("selective")),
    "full": job(fp8=DELAYED, shape=recompute("full", num_layers=2)),
    "block": job(fp8=DELAYED, shape=recompute("full", "block", 2)),
    "pp 4": job(ranks=4, pp=4, fp8=DELAYED),
    "pp 2, GPipe": job(ranks=2, pp=2, pipeline=pipeline("GPipe")),
    "pp 2, interleaved": job(ranks=2, pp=2, pipeline=pipeline("Interleaved1F1B", 2)),
    "pp 2, zero bubble": job(ranks=2, pp=2, pipeline=pipeline("InterleavedZeroBubble", 2)),
    "pp 4, V": job(ranks=4, pp=4, pipeline=pipeline("ZBVZeroBubble", 2), shape={"num_layers": 8}),
}
OF_MATRIX = {
    f"{name}, of the matrix": job(
        ranks=ranks,
        fp8=DELAYED,
        optim=ZERO if name.endswith("ZeRO-1") else optim_spec(),
        **{key: getattr(layout, key) for key in FIELDS},
    )
    for name, (ranks, layout) in LAYOUTS.items()
    if layout.fsdp is None and kind_of(name) == ""
}
JOBS |= OF_MATRIX
QUICK = (
    "FP8-LM, O3",
    "fp8",
    "llama",
    "tp 2, sequence",
    "tp 2, sequence, bf16",
    "zero",
    "full",
    "pp 4, V",
    "selective, first layers",
    "a wide head",
    "a window",
    "experts",
    "many narrow experts",
    "experts, a shared one, tp 2",
    "experts, tp 2 x dp 2, zero",
    "experts, ep 2",
    "many narrow experts, ep 4, zero",
)


COUNTED: dict[str, RankShare] = {}


def dry_run(spec: RunSpec, rank: int) -> RankShare:
    """Count a rank's bytes once for all tests: what they plant is in the plan."""
    name = f"{rank} {spec}"
    if name not in COUNTED:
        COUNTED[name] = rank_share(spec, rank)
    return COUNTED[name]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in JOBS]
)
def test_a_plan_has_the_bytes_of_a_dry_run(name: str) -> None:
    """What is held to the byte, what is kept within 0.2 %; the whole within 1.5 %."""
    spec = JOBS[name]
    each = spec.parallel.world_size // spec.parallel.pp
    for rank in range(spec.parallel.pp):
        plan, real = rank_memory(spec, rank), dry_run(spec, rank * each)
        assert plan.num_layers == len(real.layers)
        assert plan.num_params == real.num_params
        assert plan.held == real.held
        assert plan.step.microbatch == pytest.approx(real.step.microbatch, rel=2e-3)
        assert plan.step.in_flight == pytest.approx(real.step.in_flight, rel=0.05)
        copies = 0 if spec.precision.fp8 is None else real.step.weight_copies
        assert plan.step.weight_copies == copies
        assert plan.total == pytest.approx(total(real, copies), rel=0.015)
        if name in EXPERTS:
            assert plan.step.workspace == pytest.approx(real.step.workspace, rel=0.03)


@pytest.mark.parametrize("fp8", [DELAYED, IN_FP8_ALONE], ids=["O2", "O3"])
def test_a_level_has_an_fp32_gradient_of_one_weight_at_a_time(fp8: Fp8Recipe) -> None:
    """Kernels add it to the sum in low precision in place. The most is the backward pass of `fc2`.

    There are then its output's gradient, in BF16 and in two orientations in FP8, the bias's in FP32
    and BF16, the input's in BF16, and the weight's in FP32.
    """
    spec = job(ranks=2, pp=2, fp8=fp8, optim=optim_spec(storage=O3))
    plan, real = rank_memory(spec, 0).step, rank_share(spec, 0).step
    tokens = 2 * SEQUENCE
    own = tokens * (4 * 256 + 2 * 1024) + 6 * 256
    assert plan.workspace == own + 4 * 256 * 1024
    assert plan.workspace == pytest.approx(real.workspace, abs=1024)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(
    "precision",
    [
        {},
        {"compute": "fp32"},
        {"fp8": DELAYED},
        {"fp8": Fp8Recipe(name="blockwise")},
        {"fp8": replace(DELAYED, high_precision_gemms=frozenset({"grad_weight"}))},
    ],
    ids=["bf16", "fp32", "delayed", "blockwise", "gradients of weights in bf16"],
)
def test_only_the_first_product_of_a_step_writes_into_the_sum(
    precision: dict[str, Any], activation: str
) -> None:
    """A later one makes an FP32 gradient of its weight, the largest tensor of this wide model."""
    wide = {"hidden_size": 1024, "ffn_hidden_size": 4096, "num_layers": 1, "activation": activation}
    spec = job(shape=wide | {"bias": False}, **precision)
    plans, reals = [], []
    for count in (1, 2, 4):
        size = count * spec.train.micro_batch_size
        each = replace(spec, train=replace(spec.train, global_batch_size=size))
        plans.append(rank_memory(each, 0).step.workspace)
        reals.append(rank_share(each, 0).step.workspace)
    assert plans == pytest.approx(reals, abs=64)
    assert plans[1] == plans[2]
    largest = 4 * 1024 * 4096 * (2 if activation == "swiglu" else 1)
    assert 0 < plans[1] - plans[0] <= largest


@pytest.mark.parametrize(
    ("name", "high", "bits"),
    [
        ("delayed", ("output",), 8),
        ("tensorwise", ("grad_input", "grad_weight"), 8),
        ("delayed", ("output", "grad_input"), 0),
        ("rowwise_with_gw_hp", ("output",), 8),
        ("blockwise", ("grad_weight",), 16),
        ("mxfp8", (), 16.5),
        ("mxfp8", ("output",), 8.25),
        ("nvfp4", (), 9),
    ],
)
def test_a_weight_has_a_copy_for_each_product_that_reads_it_in_fp8(
    name: RecipeName, high: tuple[GemmName, ...], bits: float
) -> None:
    """The Triton kernel writes the orientations that products need, and no other.

    `bits` are those of a weight, with the scales that lie in tiles for tensor cores.
    """
    recipe = Fp8Recipe(name=name, amax_history_len=16, high_precision_gemms=frozenset(high))
    spec = job(fp8=recipe, shape={"num_layers": 1})
    plan, real = rank_memory(spec, 0), dry_run(spec, 0)
    factors = 4 * 2 * 4 if name == "nvfp4" else 0  # of two copies of each of four weights, in FP32
    expected = bits / 8 * 12 * 256**2 + factors
    assert plan.step.weight_copies == real.step.weight_copies == expected
    assert plan.step.microbatch == pytest.approx(real.step.microbatch, rel=2e-3)


@pytest.mark.parametrize("kept", ["grad_input", "grad_weight"])
def test_the_worst_layer_counts_wherever_it_is(kept: GemmName) -> None:
    """Layers of one recipe differ where a rule keeps some products of one in high precision."""
    plans = []
    for pattern in ("layers.0.*", "layers.3.*"):
        rule = ModuleRule(pattern, "blockwise", kept_high=frozenset({kept}))
        recipe = Fp8Recipe(name="blockwise", modules=(rule,))
        plans.append(rank_memory(job(fp8=recipe, shape=LLAMA, optim=optim_spec(storage=O1)), 0))
    assert plans[0] == plans[1]


def test_documents_take_no_square_of_the_length() -> None:
    """ALiBi's bias of all scores is gone; four times the length has four times what is kept."""
    alibi = {"position_embedding_type": "alibi"}

    def kept(spec: RunSpec, times: int) -> int:
        length = times * SEQUENCE
        return rank_memory(
            replace(spec, data=replace(spec.data, seq_length=length)), 0
        ).step.microbatch

    documents, plain = with_documents(alibi), job(shape=alibi)
    head = kept(documents, 2) - 2 * kept(documents, 1)  # a constant: the head's weight gradient
    assert head < 0 and kept(documents, 4) - 4 * kept(documents, 1) == 3 * head
    assert (
        kept(plain, 4) - kept(documents, 4)
        == plain.model.num_attention_heads * (4 * SEQUENCE) ** 2 * 2
    )


def total(real: RankShare, copies: int) -> int:
    return real.held.total + real.step.peak - real.step.weight_copies + copies


STORED = {
    "plain": {},
    "O1": {"storage": O1},
    "O3": {"storage": O3},
    "masters in FP8": {"storage": replace(O1, main_params="fp8")},
}
SHARED = STORED | {
    "O3, elements": {"storage": O3, "shard_by": "elements"},
    "O3, auto": {"storage": O3, "shard_by": "auto"},
    "O3, ZeRO-2": {"storage": O3, "shards_grads": True},
    "O3, elements, ZeRO-2": {"storage": O3, "shard_by": "elements", "shards_grads": True},
}
NAMES = [name for name, (_, layout) in LAYOUTS.items() if layout.fsdp is None and not kind_of(name)]


def stored_job(layout: str, optim: OptimSpec, fp8: Fp8Recipe | None) -> RunSpec:
    """Return a job of a layout of the matrix; the sizes of its tensors leave much to be padded."""
    ranks, of = LAYOUTS[layout]
    sizes = {"hidden_size": 64, "ffn_hidden_size": 1000}
    fields = {key: getattr(of, key) for key in FIELDS}
    return job(ranks=ranks, fp8=fp8, optim=optim, shape=sizes, **fields)


def jobs_of(layout: str) -> Iterator[RunSpec]:
    """Return a layout's jobs: every storage, as replicas and in every way of sharding."""
    for fp8 in (DELAYED, IN_FP8_ALONE, None):
        for choices in STORED.values():
            yield stored_job(layout, optim_spec(**choices), fp8)
        for choices in SHARED.values():
            yield stored_job(layout, optim_spec(name=ZERO.name, **choices), fp8)
        yield stored_job(layout, optim_spec(name="muon"), fp8)
        if fp8 is not IN_FP8_ALONE:
            yield stored_job(layout, optim_spec(name="dist_muon"), fp8)


def live(spec: RunSpec, rank: int) -> tuple[HeldBytes, int, int]:
    """Build a rank's part; return what it holds, the bytes of its live tensors, and its masters."""
    with simulated_rank(spec.parallel, rank) as mesh, LiveBytes("meta") as alive:
        state = build(spec, mesh)
        held = held_bytes(state)
        state.backend.forget()
        return held, alive.bytes(), len(state.masters.masters)


def assert_planned(spec: RunSpec) -> None:
    """The plan of the first and the last replica of each stage is what a build has, to the byte.

    Live tensors are a few more: single FP32 numbers, for each parameter at most four (the scales of
    a weight in both directions, and those of a master and of a gradient), for each master Adam's
    count of steps, and two of the optimizer.
    """
    parallel = spec.parallel
    each, replicas = parallel.world_size // parallel.pp, parallel.dp * parallel.cp
    for stage in range(parallel.pp):
        num_params = len(rank_shape.rank_shape(spec, stage).params)
        for replica in {0, replicas - 1}:
            planned = rank_memory(spec, stage, replica).held
            held, alive, masters = live(spec, stage * each + replica * parallel.tp)
            assert planned == held
            assert 0 <= alive - planned.total <= 4 * (4 * num_params + masters + 2)


@pytest.mark.parametrize("layout", NAMES)
def test_a_plan_holds_what_a_build_of_each_layout_allocates(layout: str) -> None:
    """One storage and recipe a layout, in turn; the slow test has all of them."""
    jobs = list(jobs_of(layout))
    assert_planned(jobs[7 * NAMES.index(layout) % len(jobs)])


@pytest.mark.slow
@pytest.mark.parametrize("layout", NAMES)
def test_a_plan_holds_what_a_build_allocates_in_every_storage(layout: str) -> None:
    for spec in jobs_of(layout):
        assert_planned(spec)


def too_wide(spec: RunSpec, param: Parameter) -> str:
    return "fp32"


def without_biases(*choices: Any) -> rank_shape.RankShape:
    shape = real_shape(*choices)
    return replace(shape, params=tuple(param for param in shape.params if param.columns > 1))


def twice_the_moments(*choices: Any) -> tuple[int, int]:
    masters, moments = real_itemsizes(*choices)
    return masters, 2 * moments


real_shape, real_itemsizes = rank_shape._rank_shape, held_module._owned_itemsizes


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (rank_shape, "stored_as", too_wide),
        (rank_shape, "_rank_shape", without_biases),
        (held_module, "_owned_itemsizes", twice_the_moments),
        (held_module, "SCALE_TABLE_BYTES", 16),
    ],
    ids=["the size of a weight", "a parameter", "the size of moments", "a column of scales"],
)
def test_a_wrong_size_is_found(
    module: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = stored_job("dp 4", optim_spec(name=ZERO.name, storage=O3), DELAYED)
    right = rank_memory(spec, 0).held
    monkeypatch.setattr(module, name, wrong)
    assert rank_memory(spec, 0).held != right
    with pytest.raises(AssertionError):
        assert_planned(spec)


@pytest.mark.parametrize(
    "layout",
    [{}, {"ranks": 4}, {"ranks": 2, "optim": ZERO}, {"ranks": 2, "pp": 2, "shape": SHAPE}],
    ids=["one rank", "dp 4", "zero", "pp 2"],
)
def test_fp32_sums_are_beside_gradients_in_low_precision(layout: dict[str, Any]) -> None:
    """A step adds up in FP32, and quantizes once: 4 bytes an element beside the one that stays.

    With one microbatch they grow while its activations are freed.
    """
    optim = layout.get("optim", optim_spec())
    stored = {"storage": replace(O3, sums_in_fp32=True)}, {"storage": O3}
    spec, few = (
        job(fp8=DELAYED, **({"shape": {"num_layers": 2}} | layout | {"optim": each}))
        for each in (replace(optim, **fields) for fields in stored)
    )
    size = spec.train.micro_batch_size * spec.parallel.dp
    spec, few, once = (
        replace(each, train=replace(each.train, global_batch_size=count * size))
        for each, count in ((spec, 4), (few, 4), (spec, 1))
    )
    elements = sum(p.elements for p in rank_shape.rank_shape(spec, 0).params if p.is_linear)
    plan, first = rank_memory(spec, 0), rank_memory(once, 0)
    real, real_first = dry_run(spec, 0), dry_run(once, 0)
    assert_planned(spec)
    assert plan.held == rank_memory(few, 0).held
    assert plan.step.gradients == 4 * elements and rank_memory(few, 0).step.gradients == 0
    assert real.step.gradients == 4 * elements
    assert first.step.gradients < plan.step.gradients
    for planned, share in ((plan, real), (first, real_first)):
        assert planned.total == pytest.approx(total(share, share.step.weight_copies), rel=0.05)


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_cuda_graphs_have_the_memory_of_a_step_a_second_time(name: str) -> None:
    """A pool has activations, FP8 copies of weights and working memory; steps without one, too."""
    without = JOBS[name]
    spec = replace(without, train=replace(without.train, cuda_graph=True))
    plan, real = rank_memory(spec, 0), dry_run(spec, 0)
    once = rank_memory(without, 0).step
    assert plan.step.graphs == once.peak and plan.step.peak == 2 * once.peak
    assert once.graphs == 0 and dry_run(without, 0).step.graphs == 0
    assert real.step.graphs == dry_run(without, 0).step.peak == real.step.peak / 2
    copies = real.step.weight_copies if spec.precision.fp8 is not None else 0
    assert plan.total == pytest.approx(total(real, copies), rel=0.05)


NARROW = {"num_layers": 6, "vocab_size": 128, "max_position_embeddings": 32}


def of_fsdp(
    *, batch: int = 8, fsdp: FsdpSpec | None = None, nodes: int = 1, **choices: Any
) -> RunSpec:
    """Return a job whose weights need more than its activations."""
    spec = job(**({"ranks": 2, "shape": NARROW} | choices))
    return replace(
        spec,
        parallel=replace(spec.parallel, fsdp=fsdp or FsdpSpec(), num_nodes=nodes),
        data=replace(spec.data, seq_length=32),
        train=replace(spec.train, micro_batch_size=1, global_batch_size=batch),
    )


def active(*, batch: int = 16, **choices: Any) -> RunSpec:
    """Return a job of FSDP whose activations need more than its weights."""
    choices["shape"] = NARROW | {"max_position_embeddings": SEQUENCE} | choices.get("shape", {})
    spec = of_fsdp(batch=batch, **choices)
    return replace(
        spec,
        data=replace(spec.data, seq_length=SEQUENCE),
        # One sequence of a microbatch is not copied before and after attention.
        train=replace(spec.train, micro_batch_size=1 if spec.parallel.sequence_parallel else 2),
    )


OF_FSDP = {
    "full": of_fsdp(),
    "fp32": of_fsdp(compute="fp32"),
    "kept": of_fsdp(fsdp=FsdpSpec(strategy="grad")),
    "sums in bf16": of_fsdp(fsdp=FsdpSpec(grad_reduce_dtype="bf16")),
    "one microbatch": of_fsdp(batch=2),
    "one layer": of_fsdp(shape=NARROW | {"num_layers": 1}),
    "uneven rows": of_fsdp(ranks=3, batch=6, shape=NARROW | {"ffn_hidden_size": 1000}),
    "tp 2": of_fsdp(ranks=4, tp=2, sequence_parallel=True),
    "hybrid": of_fsdp(nodes=2, fsdp=FsdpSpec(strategy="hybrid")),
    "pp 2": of_fsdp(ranks=4, pp=2),
    "pp 2, GPipe": of_fsdp(ranks=4, pp=2, pipeline=pipeline("GPipe")),
    "pp 2, interleaved": of_fsdp(ranks=4, pp=2, pipeline=pipeline("Interleaved1F1B", 3)),
}


E4M3 = {"backward_format": "e4m3"}
RECIPES = {
    "delayed": DELAYED,
    "fp8 alone": IN_FP8_ALONE,
    "tensorwise": Fp8Recipe(name="tensorwise"),
    "rowwise": Fp8Recipe(name="rowwise"),
    "rowwise_with_gw_hp": Fp8Recipe(name="rowwise_with_gw_hp"),
    "blockwise": Fp8Recipe(name="blockwise"),
    "mxfp8": Fp8Recipe(name="mxfp8", **E4M3),
    "nvfp4": Fp8Recipe(name="nvfp4", **E4M3),
}
HYBRID = FsdpSpec(strategy="hybrid")
INTERLEAVED = {"ranks": 4, "pp": 2, "pipeline": pipeline("Interleaved1F1B", 3)}
VARIED: dict[str, dict[str, Any]] = {
    "": {},
    "fp32": {"compute": "fp32"},
    "llama": {"shape": LLAMA},
    "kept": {"fsdp": FsdpSpec(strategy="grad")},
    "one microbatch": {"batch": 4},
    "full": {"shape": recompute("full")},
    "full, groups of 2": {"shape": recompute("full", num_layers=2)},
    "full, groups of 3, delayed": {"shape": recompute("full", num_layers=3), "fp8": DELAYED},
    "full, the first": {"shape": recompute("full", "block", 2)},
    "selective": {"shape": recompute("selective")},
    "dropout": {"shape": DROPOUT},
    "tp 2": {"ranks": 4, "tp": 2, "sequence_parallel": True},
    "tp 2, delayed": {"ranks": 4, "tp": 2, "sequence_parallel": True, "fp8": DELAYED},
    "cp 2": {"ranks": 4, "cp": 2},
    "hybrid": {"nodes": 2, "fsdp": HYBRID},
    "hybrid, pp 2": {"ranks": 4, "pp": 2, "nodes": 2, "fsdp": HYBRID},
    "pp 2": {"ranks": 4, "pp": 2},
    "pp 2, GPipe": {"ranks": 4, "pp": 2, "pipeline": pipeline("GPipe")},
    "pp 2, interleaved": INTERLEAVED,
    "pp 2, interleaved, fp8 alone": INTERLEAVED | {"fp8": IN_FP8_ALONE},
    "O1": {"optim": optim_spec(storage=O1)},
    "O3": {"optim": optim_spec(storage=O3)},
    "O3, fp8 alone": {"optim": optim_spec(storage=O3), "fp8": IN_FP8_ALONE},
    "llama, delayed": {"shape": LLAMA, "fp8": DELAYED},
} | {name: {"fp8": fp8} for name, fp8 in RECIPES.items()}
ACTIVE = {name: active(**choices) for name, choices in VARIED.items()}
OF_FSDP |= {name: of_fsdp(fp8=fp8) for name, fp8 in RECIPES.items()}
QUICK_OF_FSDP = (
    "",
    "llama, delayed",
    "kept",
    "full, groups of 3, delayed",
    "selective",
    "tp 2, delayed",
    "pp 2, interleaved, fp8 alone",
    "hybrid, pp 2",
    "blockwise",
)


def assert_fsdp_planned(spec: RunSpec, within: float = 0.01) -> None:
    """The plan has the bytes of a dry run: what is held to the byte, the most within 1 %.

    What crosses from forward to backward differs by a few single numbers for each layer.
    """
    each = spec.parallel.world_size // spec.parallel.pp
    for rank in range(spec.parallel.pp):
        plan, real = rank_memory(spec, rank), dry_run(spec, rank * each)
        assert plan.held == real.held
        assert plan.start == pytest.approx(real.start, rel=0.01)
        assert plan.in_step == pytest.approx(real.in_step, rel=within)
        assert plan.step.gathered == real.step.gathered
        assert plan.step.weight_copies == 0 <= real.step.weight_copies < 1024
        assert plan.step.microbatch == pytest.approx(real.step.microbatch, rel=0.002, abs=512)


@pytest.mark.parametrize(
    "name", [name if name not in RECIPES else pytest.param(name, marks=SLOW) for name in OF_FSDP]
)
def test_a_plan_has_the_bytes_of_a_dry_run_of_fsdp(name: str) -> None:
    assert_fsdp_planned(OF_FSDP[name])


@pytest.mark.parametrize(
    "name", [name if name in QUICK_OF_FSDP else pytest.param(name, marks=SLOW) for name in ACTIVE]
)
def test_a_plan_of_fsdp_has_the_activations_of_a_dry_run(name: str) -> None:
    """Where activations need most: each moment of a layer's backward pass is that of the plan."""
    assert_fsdp_planned(ACTIVE[name])


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("_gathered", lambda spec, param: 2 * param.elements),
        ("_received", lambda spec, param: 0),
        ("_shards", lambda spec, params: 2 * sum(param.elements for param in params)),
        ("_backward", lambda *given: (0, real_backward(*given)[1])),
        ("_summed_in_fp32", lambda *given: iter(())),
    ],
)
def test_a_wrong_size_of_fsdp_is_found(
    function: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, function, wrong)
    with pytest.raises(AssertionError):
        for name in ("fp32", "one microbatch", "uneven rows"):
            assert_fsdp_planned(OF_FSDP[name])


real_backward, real_instants = fsdp._backward, layer.backward_instants


def without_the_activations_gradient(*given: Any, **choices: Any) -> Iterator[int]:
    """Leave out the fourth moment, in which a gated MLP needs most."""
    return (more for number, more in enumerate(real_instants(*given, **choices)) if number != 3)


@pytest.mark.parametrize(
    ("module", "function", "wrong", "name"),
    [
        (layer, "_gradient_bytes", lambda *given: 0, ""),
        (fsdp, "forward_work", lambda *given: 0, "pp 2, interleaved, fp8 alone"),
        (fsdp, "_first_recomputed_with", lambda spec, place: place, "full, groups of 3, delayed"),
        (fsdp, "backward_instants", without_the_activations_gradient, "llama"),
    ],
)
def test_a_wrong_size_of_a_layers_backward_pass_is_found(
    module: Any, function: str, wrong: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_fsdp_planned(ACTIVE[name], within=0.002)
    monkeypatch.setattr(module, function, wrong)
    with pytest.raises(AssertionError):
        assert_fsdp_planned(ACTIVE[name], within=0.002)


def test_a_layers_backward_pass_ends_with_gradients_that_fsdp_has_not_reduced() -> None:
    """All that the layer kept is free then. Without FSDP its gradients are in sums by that time."""
    weights = 12 * 256 * 256 + (9 + 4) * 256  # biases and norms are vectors
    for spec, gradients in (
        (job(), 0),
        (job(fp8=DELAYED), 0),
        (of_fsdp(), 2 * weights),
        (of_fsdp(compute="fp32"), 4 * weights),
    ):
        for held in (0, 1000):  # of the output's gradient, which stays beside the input's
            *_, end = layer.backward_instants(spec, 0, keeps_core=True, scores=0, held=held)
            assert end == gradients + held - layer_bytes(spec, 0)


def test_fsdp_divides_weights_gradients_and_moments() -> None:
    """A layer is gathered at a time, or with `grad` all but one at the worst moment."""
    elements = rank_memory(job(ranks=2, shape=NARROW), 0).num_params
    plan = rank_memory(of_fsdp(), 0)
    assert plan.held.total == pytest.approx(16 * elements / 2, rel=1e-3)
    layer = 12 * 256 * 256 + (9 + 4) * 256  # biases and norms are vectors
    outside = 2 * (128 + 32 + 2) * 256  # embedding, positions and final norm, kept in BF16
    assert plan.step.gathered == 2 * layer + outside
    kept = rank_memory(OF_FSDP["kept"], 0).step
    assert kept.gathered == 5 * 2 * layer + outside
    alone = rank_memory(of_fsdp(fp8=IN_FP8_ALONE), 0).step
    assert alone.gathered == plan.step.gathered + 12 * 256 * 256  # the bytes, beside BF16 tensors
    less = rank_memory(OF_FSDP["sums in bf16"], 0).step
    assert plan.step.workspace - less.workspace == 2 * layer


def test_fsdp_at_a_level_holds_the_tables_bytes_of_its_rows() -> None:
    """At O2 and O3 a rank has 6 bytes of its linears and 11 of the rest, where FP32 has 16.

    A step needs most while the last layer's gradients are sent: these and their sums in FP32, the
    message of one byte of a linear and 4 of the rest, the widest linear scaled in FP32 and FP8, and
    what FSDP has received of the layer before and of the head's weight gradient.
    """
    plain, spec = (of_fsdp(optim=optim_spec(storage=each)) for each in (StorageSpec(), O3))
    few, whole = rank_memory(spec, 0), rank_memory(plain, 0)
    weights, vectors, outside = 12 * 256 * 256, (9 + 4) * 256, 128 * 256
    scales = 4 * 6 * 4
    linears, elements = 6 * weights / 2, whole.held.total / 16
    assert few.held.total == 6 * linears + (4 + 4 + 3) * (elements - linears) + scales
    layer, message = weights + vectors, weights + 4 * vectors + 2 * 4 * 4
    sent = 4 * layer + 4 * layer // 2 + message + 5 * 256 * 1024 + 2 * layer + 2 * outside
    final_norm = 32 * 2 * 4  # its statistics; its input's gradient takes the place of the input
    freed = 32 * 256 * 2 + 4 * outside + final_norm + layer_bytes(spec, 5)
    assert few.step.workspace == sent - freed
    assert few.step.gathered == 2 * (outside + (32 + 2) * 256)


AT_A_LEVEL = {
    name: OF_FSDP[name]
    for name in ("full", "kept", "one microbatch", "one layer", "uneven rows", "hybrid", "pp 2")
}


@pytest.mark.parametrize("name", AT_A_LEVEL)
def test_a_plan_has_the_bytes_of_a_dry_run_of_fsdp_at_a_level(name: str) -> None:
    assert_fsdp_planned(replace(AT_A_LEVEL[name], optim=optim_spec(storage=O3)))


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("_sent_by_level", lambda spec, layer: 0),
        ("_summed_in_fp32", lambda spec, params: params),
    ],
)
def test_a_wrong_size_of_a_level_is_found(
    function: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, function, wrong)
    with pytest.raises(AssertionError):
        for name in ("full", "one microbatch"):
            assert_fsdp_planned(replace(AT_A_LEVEL[name], optim=optim_spec(storage=O3)))


@pytest.mark.parametrize("storage", ["O2", "O3"])
def test_fp8_lms_zero_pads_the_linears_weights(storage: str) -> None:
    """12 weights of unequal sizes on 5 ranks; every rank's dry run has the plan's weights."""
    fp8, few = (IN_FP8_ALONE, O3) if storage == "O3" else (DELAYED, O3)
    optim = optim_spec(name=ZERO.name, storage=few)
    uneven = job(ranks=5, fp8=fp8, optim=optim, shape={"num_layers": 3, "ffn_hidden_size": 1000})
    spec = replace(uneven, train=replace(uneven.train, global_batch_size=10))
    plan = rank_memory(spec, 0).held
    counted = []
    for rank in range(5):
        with simulated(spec, rank) as state:
            counted.append(held_bytes(state))
    assert {held.weights for held in counted} == {plan.weights}
    elements = sum(p.elements for p in rank_shape.rank_shape(spec, 0).params if p.is_linear)
    assert plan.weights > 1.05 * elements * (1 if storage == "O3" else 2)
    most = max(counted, key=lambda held: held.masters + held.moments)
    assert (plan.masters, plan.moments) == (most.masters, most.moments)
    assert plan.gradients == pytest.approx(most.gradients, rel=0.001)


def test_zero_2_holds_its_own_gradients_and_some_of_others() -> None:
    """To the byte what a dry run counts. The others' gradients: those of a bucket or two with one
    microbatch, and all with several."""
    optim = optim_spec(name="distributed_fused_adam", storage=O3)
    small = replace(job().parallel, devices_per_node=4, grad_bucket_bytes=1 << 20)
    first = replace(job(fp8=IN_FP8_ALONE, optim=optim), parallel=small)
    second = replace(first, optim=replace(optim, shards_grads=True))
    whole, plan = (rank_memory(spec, 0) for spec in (first, second))
    assert plan.held == dry_run(second, 0).held
    assert plan.held.gradients < whole.held.gradients / 2 and whole.step.gradients == 0
    assert plan.held.gradients + plan.step.gradients < whole.held.gradients
    longer = replace(second, train=replace(second.train, global_batch_size=32))
    assert plan.step.gradients < rank_memory(longer, 0).step.gradients < whole.held.gradients


def test_zero_2_with_gradients_in_fp32() -> None:
    """Few bits may be the moments' alone: then a rank holds all gradients until they are sent."""
    optim = optim_spec(
        name="distributed_fused_adam", storage=StorageSpec(exp_avg="fp16"), shards_grads=True
    )
    spec = job(ranks=4, optim=optim)
    whole = 4 * sum(p.elements for p in rank_shape.rank_shape(spec, 0).params)
    plan = rank_memory(spec, 0)
    assert plan.held.gradients + plan.step.gradients == whole > 2 * plan.held.gradients


@pytest.mark.parametrize("bucket_bytes", [1 << 22, 125 << 20], ids=["1M", "one bucket"])
@pytest.mark.parametrize("shard_by", ["tensors", "elements"])
def test_the_total_counts_the_gradients_that_a_step_holds(shard_by: str, bucket_bytes: int) -> None:
    """8 ranks, ZeRO-2. With 4 microbatches a step holds all gradients until the last one, and needs
    as much as under ZeRO-1; with one it needs less."""
    optim = optim_spec(name="distributed_fused_adam", storage=O3, shard_by=shard_by)
    wide = {"num_layers": 6, "hidden_size": 512, "ffn_hidden_size": 2048}
    found = {}
    for count in (1, 4):
        for shards_grads in (False, True):
            sharded = replace(optim, shards_grads=shards_grads)
            spec = job(ranks=8, fp8=DELAYED, optim=sharded, shape=wide)
            small = replace(spec.parallel, grad_bucket_bytes=bucket_bytes)
            spec = replace(
                spec,
                parallel=small,
                train=replace(
                    spec.train, global_batch_size=8 * spec.train.micro_batch_size * count
                ),
            )
            assert spec.train.num_microbatches(8) == count
            plan, real = rank_memory(spec, 0, replica=0), dry_run(spec, 0)
            counted = total(real, real.step.weight_copies)
            # Where one microbatch's buckets are sent while the last layers run, the plan has the
            # most bytes of both at one moment.
            overlaps = shards_grads and count == 1 and bucket_bytes == 1 << 22
            most = 1.07 if overlaps else 1.03
            assert 0.99 * counted <= plan.total <= most * counted
            found[count, shards_grads] = counted
            whole = 6 * 12 * 512**2  # the linears' gradients, a byte each
            if count == 4 and shards_grads:
                assert real.held.gradients < 0.35 * whole < 0.5 * whole < real.step.gradients
                assert plan.step.gradients == pytest.approx(real.step.gradients, rel=0.1)
    assert found[4, True] == pytest.approx(found[4, False], rel=0.005)
    if bucket_bytes < whole:  # the only bucket is sent when all gradients are there
        assert found[1, True] < found[1, False] - 0.1 * whole


def test_a_plan_is_for_gpus_whatever_the_spec_says() -> None:
    """The head's chunks are a GPU's: 8192 tokens, or 2 GiB of FP32 logits."""
    spec = job()
    on_cpu = replace(spec, parallel=replace(spec.parallel, accelerator="cpu"))
    assert rank_memory(on_cpu, 0) == rank_memory(spec, 0)


def test_fewer_microbatches_than_ranks_keep_fewer_in_flight() -> None:
    spec = job(ranks=4, pp=4)
    few = replace(spec, train=replace(spec.train, global_batch_size=4))
    first = rank_memory(few, 0)
    assert first.step.in_flight == 2 * first.step.microbatch
    assert most_held([], {0: 5}) == 0
