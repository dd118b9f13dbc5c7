"""The planned messages against what ranks hand to collectives in a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from megafp8.parallel.mesh import Mesh
from megafp8.plan.dryrun import held_bytes
from megafp8.plan.memory import rank_memory
from megafp8.plan.traffic import Message, rank_traffic
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec, PipelineSpec, RunSpec, StorageSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.moe import MoESpec
from megafp8.specs.precision import ModuleRule
from tests.kit.cases import Case
from tests.kit.runs import Traffic, on_ranks, train
from tests.parallel.matrix import LAYOUTS, kind_of
from tests.tiny import gpt_spec, optim_spec, run_spec

DELAYED = Fp8Recipe(amax_history_len=16)
TENSORWISE = Fp8Recipe(name="tensorwise")
IN_FP8 = replace(DELAYED, params_in_fp8=True)
MIXED = replace(IN_FP8, modules=(ModuleRule("layers.0.*", "high_precision"),))
MODEL = gpt_spec(num_layers=4)
ODD = gpt_spec(num_layers=4, hidden_size=36, ffn_hidden_size=52)
"""A model whose sizes FSDP and ZeRO-1 pad."""
ZERO = optim_spec(name="distributed_fused_adam")
RECOMPUTED = gpt_spec(
    num_layers=4, recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1)
)
CORES_RECOMPUTED = gpt_spec(
    num_layers=4, recompute=RecomputeSpec(granularity="selective", method="block", num_layers=3)
)
FIRST_RECOMPUTED = gpt_spec(
    num_layers=4, recompute=RecomputeSpec(granularity="full", method="block", num_layers=2)
)
UNEVEN = PipelineSpec(layout=(1, 3))
INTERLEAVED = PipelineSpec(schedule="Interleaved1F1B", stages_per_rank=2)
LLAMA = gpt_spec(
    num_layers=4,
    normalization="rmsnorm",
    activation="swiglu",
    bias=False,
    position_embedding_type="rope",
    share_embeddings_and_output_weights=False,
    num_query_groups=2,
)


def fsdp(strategy: Any, **changes: Any) -> ParallelSpec:
    return ParallelSpec(fsdp=FsdpSpec(strategy=strategy), **changes)


def case(
    layout: ParallelSpec, ranks: int = 2, *, compute: str = "bf16", **choices: Any
) -> tuple[int, Case]:
    layout = replace(layout, devices_per_node=ranks // layout.num_nodes)
    number = 4 if ranks == 2 and layout.pp == 1 else 8  # stages and replicas take several each
    choices = {"model": MODEL, "num_microbatches": number} | choices
    return ranks, Case(compute=compute, parallel=layout, **choices)


def of_matrix(name: str, fp8: Fp8Recipe | None) -> tuple[int, Case]:
    ranks, layout = LAYOUTS[name]
    optim = ZERO if name.endswith("ZeRO-1") else optim_spec()
    return case(layout, ranks, fp8=fp8, optim=optim)


WIDE = gpt_spec(hidden_size=256, ffn_hidden_size=256)
OF_PARTS = ("rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4", "nvfp4-no_2d")
"""The recipes with several scales for a tensor."""
O2 = StorageSpec(main_grads="fp8", main_params="fp16", exp_avg="fp8", exp_avg_sq="fp16")
O1 = replace(O2, exp_avg="fp32", exp_avg_sq="fp32")
SUMMED = replace(O2, reduction="auto")
SEQUENCE = ParallelSpec(tp=2, sequence_parallel=True)
CASES: dict[str, tuple[int, Case]] = {
    "tp, FP32": case(ParallelSpec(tp=2), compute="fp32"),
    "tp, recomputed": case(ParallelSpec(tp=2), model=RECOMPUTED),
    "tp, Llama": case(ParallelSpec(tp=2), model=LLAMA),
    "tp, norms of heads": case(ParallelSpec(tp=2), model=replace(LLAMA, qk_layernorm=True)),
    "sequence, norms of heads": case(SEQUENCE, model=replace(LLAMA, qk_layernorm=True)),
    "sequence, recomputed": case(SEQUENCE, fp8=DELAYED, model=RECOMPUTED),
    "sequence, tensorwise": case(SEQUENCE, fp8=TENSORWISE),
    **{
        f"sequence, {name}": case(
            SEQUENCE, fp8=Fp8Recipe(name=name), model=WIDE, num_microbatches=2, batch=16
        )
        for name in OF_PARTS
    },
    "sequence, rowwise, recomputed": case(
        SEQUENCE, fp8=Fp8Recipe(name="rowwise"), model=RECOMPUTED
    ),
    "sequence, nvfp4, recomputed": case(SEQUENCE, fp8=Fp8Recipe(name="nvfp4"), model=RECOMPUTED),
    "sequence, tensorwise, weight gradients in BF16": case(
        SEQUENCE, fp8=replace(TENSORWISE, high_precision_gemms=frozenset({"grad_weight"}))
    ),
    "tp, nvfp4": case(ParallelSpec(tp=2), fp8=Fp8Recipe(name="nvfp4"), model=WIDE),
    "sequence, Llama": case(SEQUENCE, model=LLAMA),
    "sequence, zero": case(SEQUENCE, optim=ZERO),
    "tp x dp, sequence, zero": case(SEQUENCE, 4, model=ODD, optim=ZERO),
    "cp, Llama": case(ParallelSpec(cp=2), model=LLAMA),
    "cp, attention recomputed": case(ParallelSpec(cp=2), model=CORES_RECOMPUTED),
    "tp x pp, uneven, recomputed": case(
        ParallelSpec(tp=2, sequence_parallel=True, pp=2, pipeline=UNEVEN),
        4,
        fp8=DELAYED,
        model=FIRST_RECOMPUTED,
    ),
    "tp x pp, uneven, tensorwise": case(
        ParallelSpec(tp=2, pp=2, pipeline=UNEVEN), 4, fp8=TENSORWISE, model=FIRST_RECOMPUTED
    ),
    "dp, BF16 sums": case(ParallelSpec(grad_reduce_dtype="bf16")),
    "pp, Llama": case(ParallelSpec(pp=2), model=LLAMA),
    "zero, odd": case(ParallelSpec(), optim=ZERO, model=ODD),
    "zero, small buckets": case(ParallelSpec(grad_bucket_bytes=8192), optim=ZERO),
    "zero, FP8 weights": case(ParallelSpec(), optim=ZERO, fp8=IN_FP8),
    "zero x pp": case(ParallelSpec(pp=2), 4, optim=ZERO),
    "fsdp, FP32": case(fsdp("full"), compute="fp32"),
    "fsdp, odd": case(fsdp("full"), 4, model=ODD),
    "fsdp, FP8 weights": case(fsdp("full"), fp8=IN_FP8),
    "fsdp, BF16 sums": case(ParallelSpec(fsdp=FsdpSpec(grad_reduce_dtype="bf16"))),
    "fsdp, Llama": case(fsdp("full"), model=LLAMA),
    "fsdp, recomputed": case(fsdp("full"), model=RECOMPUTED),
    "fsdp, grad": case(fsdp("grad")),
    "fsdp x pp, FP8 weights": case(fsdp("full", pp=2), 4, fp8=IN_FP8),
    "fsdp, grad, x pp, interleaved": case(fsdp("grad", pp=2, pipeline=INTERLEAVED), 4),
    "fsdp x GPipe": case(fsdp("full", pp=2, pipeline=PipelineSpec(schedule="GPipe")), 4),
    "fsdp x pp 4": case(fsdp("full", pp=4), 8),
    "fsdp, hybrid x pp": case(fsdp("hybrid", num_nodes=4, pp=2), 8, fp8=DELAYED),
    "fsdp, hybrid": case(fsdp("hybrid", num_nodes=2), 4),
    "fsdp, O1": case(fsdp("full"), fp8=DELAYED, optim=optim_spec(storage=O1)),
    "fsdp, O2, odd": case(fsdp("full"), compute="fp32", model=ODD, optim=optim_spec(storage=O2)),
    "fsdp, O3, hybrid": case(
        fsdp("hybrid", num_nodes=2), 4, fp8=IN_FP8, optim=optim_spec(storage=O2)
    ),
    "fsdp, O2, x pp": case(fsdp("full", pp=2), 4, fp8=DELAYED, optim=optim_spec(storage=O2)),
    "fsdp, hybrid, FP8": case(fsdp("hybrid", num_nodes=2), 4, fp8=DELAYED),
    "O2": case(ParallelSpec(), fp8=DELAYED, optim=optim_spec(storage=O2)),
    "O2, summed in FP8": case(ParallelSpec(), fp8=DELAYED, optim=optim_spec(storage=SUMMED)),
    "O2, zero": case(ParallelSpec(), fp8=DELAYED, optim=replace(ZERO, storage=O2)),
    "O2, zero, odd": case(
        ParallelSpec(), 4, fp8=DELAYED, optim=replace(ZERO, storage=O2), model=ODD
    ),
    "O3, zero, mixed": case(
        ParallelSpec(), 4, fp8=MIXED, optim=replace(ZERO, storage=O2), model=ODD
    ),
    "O3, zero": case(ParallelSpec(), fp8=IN_FP8, optim=replace(ZERO, storage=O2)),
    "Muon, tp": case(SEQUENCE, 2, fp8=DELAYED, optim=optim_spec(name="muon")),
    "Muon, pp": case(ParallelSpec(pp=2), 2, optim=optim_spec(name="muon")),
    "Muon, zero": case(ParallelSpec(), 2, fp8=DELAYED, optim=optim_spec(name="dist_muon")),
    "Muon, fsdp": case(fsdp("full"), 2, fp8=DELAYED, optim=optim_spec(name="muon")),
    "O3, tp x pp": case(replace(SEQUENCE, pp=2), 4, fp8=IN_FP8, optim=optim_spec(storage=O2)),
}
MOE = MoESpec(
    num_experts=4, top_k=2, ffn_hidden_size=32, layers=(True, False, True, True),
    router_loss="aux_loss", router_loss_coeff=0.1, z_loss_coeff=0.1, shared_ffn_hidden_size=32,
)  # fmt: skip
EXPERTS = replace(LLAMA, moe=MOE)
BY_SEQUENCE = replace(EXPERTS, moe=replace(MOE, router_loss="seq_aux_loss"))
CASES |= {
    "experts, dp": case(ParallelSpec(), model=EXPERTS),
    "experts, dp, zero": case(ParallelSpec(), model=EXPERTS, fp8=DELAYED, optim=ZERO),
    "experts, sequence": case(SEQUENCE, model=EXPERTS),
    "experts, sequence, rowwise": case(SEQUENCE, model=EXPERTS, fp8=Fp8Recipe(name="rowwise")),
    "experts, sequence, zero": case(SEQUENCE, model=EXPERTS, fp8=TENSORWISE, optim=ZERO),
    "experts, sequence, FP8 weights": case(SEQUENCE, model=BY_SEQUENCE, fp8=IN_FP8, optim=ZERO),
    "experts, cp, recomputed": case(
        ParallelSpec(cp=2), model=replace(BY_SEQUENCE, recompute=RECOMPUTED.recompute), batch=16
    ),
    "experts, ep": case(ParallelSpec(ep=2), model=EXPERTS, fp8=DELAYED),
    "experts, ep, zero": case(ParallelSpec(ep=2), model=EXPERTS, optim=ZERO),
    "experts, ep, sequence, recomputed": case(
        replace(SEQUENCE, ep=2), model=replace(EXPERTS, recompute=RECOMPUTED.recompute)
    ),
    "experts, pp": case(ParallelSpec(pp=2), model=EXPERTS, fp8=DELAYED),
    "experts, tp x dp, zero": case(SEQUENCE, 4, model=EXPERTS, fp8=DELAYED, optim=ZERO),
}
OF_MATRIX = [name for name in LAYOUTS if kind_of(name) == ""]
CASES |= {f"{name}, BF16": of_matrix(name, None) for name in OF_MATRIX}
CASES |= {f"{name}, FP8": of_matrix(name, DELAYED) for name in OF_MATRIX}
OPERATION = {
    "all_reduce_sum": "all_reduce",
    "all_reduce_max": "all_reduce",
    "reduce_scatter_sum": "reduce_scatter",
}
ROWS = "all_to_all"
AXIS = {"dp": "data", "ends": "tied", "shard": "data"}


class Measured(NamedTuple):
    """What one rank did in the second step of a case."""

    sent: Traffic  # bytes
    held: int  # bytes of the state


def measure(case: Case, mesh: Mesh) -> Measured:
    state = case.build(mesh)
    return Measured(train(state, case, 2).traffic, held_bytes(state).total)


def planned(spec: RunSpec, pipeline_rank: int) -> Counter[tuple[str, str]]:
    """The messages that ranks count: all but those between nodes of hybrid sharding."""
    sums: Counter[tuple[str, str]] = Counter()
    for message in rank_traffic(spec, pipeline_rank):
        if message.axis != "nodes":
            sums[message.axis, message.operation] += message.handed
    return sums


def check(case: Case, ranks: list[Measured]) -> None:
    for rank in range(len(ranks)):
        check_rank(case, rank, ranks)


def check_rank(case: Case, rank: int, ranks: list[Measured]) -> None:
    """Compare a rank with the plan. Of FP8-LM's ZeRO the plan is that of the fullest rank."""
    measured, spec = ranks[rank], case.spec()
    pipeline_rank = rank // (spec.parallel.world_size // spec.parallel.pp)
    counted: Counter[tuple[str, str]] = Counter()
    for (axis, operation, dtype), num_bytes in measured.sent.items():
        if dtype != "float64":  # the sums of losses
            counted[AXIS.get(axis, axis), OPERATION.get(operation, operation)] += num_bytes
    if spec.parallel.ep > 1:  # the plan is that of equally many rows for each expert
        both = [num for rank in ranks for (_, how, _), num in rank.sent.items() if how == ROWS]
        counted["ep", ROWS] = sum(both) // len(ranks)
    assert dict(counted) == dict(planned(spec, pipeline_rank)), f"rank {rank}"
    held = rank_memory(spec, pipeline_rank).held.total
    own = measured.held
    if spec.optim.shards_states and (spec.optim.needs_whole or not spec.optim.storage.is_plain):
        own = max(other.held for other in ranks)
    assert held == pytest.approx(own, rel=0.05), f"rank {rank}"


def test_a_plan_counts_the_scales_that_cross_with_bytes() -> None:
    """Each recipe's tokens, scales and agreed amaxes under sequence parallelism, to the byte."""
    cases = {name: real for name, (_, real) in CASES.items() if name.startswith("sequence, ")}
    for name, ranks in on_ranks(measure, cases, 2).items():
        check(cases[name], ranks)


@pytest.mark.parametrize("kind", ["Muon", "fsdp, O", "experts"])
def test_a_plan_has_the_messages_and_states_of_two_ranks(kind: str) -> None:
    """Of Muon's updates, of FP8-LM's levels under FSDP, and of experts, whole on each rank."""
    named = {name: found for name, found in CASES.items() if name.startswith(kind)}
    cases = {name: real for name, (ranks, real) in named.items() if ranks == 2}
    assert len(cases) > 1
    for name, ranks in on_ranks(measure, cases, 2).items():
        check(cases[name], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_plan_has_the_bytes_that_ranks_send_and_hold(num_ranks: int) -> None:
    """What is sent to the byte, in every layout of the matrix; what is held within 5 %."""
    cases = {name: real for name, (ranks, real) in CASES.items() if ranks == num_ranks}
    for name, ranks in on_ranks(measure, cases, num_ranks).items():
        check(cases[name], ranks)


@pytest.mark.slow
def test_ranks_at_o3_hold_what_the_plan_says() -> None:
    """2 tensor-parallel ranks, 2 stages, 2 replicas; to the byte for each stage's fullest rank."""
    layout = replace(SEQUENCE, pp=2)
    _, real = case(layout, 8, fp8=IN_FP8, optim=replace(ZERO, storage=O2))
    (ranks,) = on_ranks(measure, {"O3": real}, 8).values()
    for stage in range(2):
        held = [found.held for found in ranks[4 * stage : 4 * stage + 4]]
        assert rank_memory(real.spec(), stage).held.total == max(held)


def sent_by(name: str, pipeline_rank: int, axis: str, what: str) -> int:
    found = rank_traffic(CASES[name][1].spec(), pipeline_rank)
    return sum(m.handed for m in found if (m.axis, m.what) == (axis, what))


def test_recomputed_attention_sends_keys_and_values_once_more() -> None:
    """Three of four layers do: 2 + 3/4 turns of the ring, of BF16, against one of FP32."""
    once = sent_by("cp, attention recomputed", 0, "cp", "their gradients") / 2
    again = sent_by("cp, attention recomputed", 0, "cp", "keys and values")
    assert again == (2 + 3 / 4) * once


@pytest.mark.parametrize(("pipeline_rank", "again"), [(0, 1), (1, 2)])
def test_a_rank_sends_again_what_its_own_layers_recompute(pipeline_rank: int, again: int) -> None:
    """Of stages of one and of three layers, the first two at most are recomputed."""
    name, layers = "tp x pp, uneven, recomputed", 1 + 2 * pipeline_rank
    backward = sent_by(name, pipeline_rank, "tp", "gradients of activations") / layers
    assert sent_by(name, pipeline_rank, "tp", "activations") == (layers + again) * backward


def test_a_hybrid_rank_sums_its_shard_over_nodes() -> None:
    """FSDP does not count this message; it has the size of the shard's gradients."""
    spec = CASES["fsdp, hybrid"][1].spec()
    found = [m for m in rank_traffic(spec, 0) if m.axis == "nodes"]
    scattered = [m for m in rank_traffic(spec, 0) if m.operation == "reduce_scatter"]
    assert [(m.num_ranks, m.stride) for m in found] == [(2, 2)]
    assert found[0].handed == scattered[0].handed / 2


def test_bytes_on_the_wire_are_those_of_ring_algorithms() -> None:
    def sent(operation: Any, handed: int) -> float:
        return Message(axis="tp", operation=operation, what="x", handed=handed, num_ranks=4).on_wire

    assert sent("all_reduce", 400) == sent("reduce_scatter", 400) + sent("all_gather", 100) == 600
    assert sent("send", 400) == 400


@pytest.mark.parametrize(
    ("shape", "tp", "dp", "in_bf16", "in_fp8"),
    [((32, 4096), 1, 32, 37.2, 13.9), ((40, 5120), 2, 16, 34.3, 12.4)],
)
@pytest.mark.parametrize("level", ["BF16", "O3"])
def test_weights_and_gradients_of_fp8_lms_table_5(
    level: str, shape: tuple[int, int], tp: int, dp: int, in_bf16: float, in_fp8: float
) -> None:
    """The rows of GPT-7B and 13B (arXiv 2310.18313), within 1 %: 6 bytes a parameter in BF16, 2 for
    the weights of linears in FP8.
    """
    layers, hidden = shape
    storage = O2 if level == "O3" else StorageSpec()
    model = gpt_spec(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=hidden // 128,
        position_embedding_type="rope",
        vocab_size=100_352,
    )
    spec = run_spec(
        compute="bf16",
        model=model,
        fp8=Fp8Recipe(params_in_fp8=True) if level == "O3" else None,
        optim=optim_spec(name="distributed_fused_adam", storage=storage),
        parallel=ParallelSpec(num_nodes=4, devices_per_node=8, tp=tp, sequence_parallel=tp > 1),
    )
    assert spec.parallel.dp == dp
    spec = replace(spec, train=replace(spec.train, global_batch_size=2048))
    sent = sum(m.on_wire for m in rank_traffic(spec, 0) if m.axis == "data")
    expected = in_fp8 if level == "O3" else in_bf16
    assert sent / 2**30 == pytest.approx(expected, rel=0.01)
