"""The planned messages against what ranks hand to collectives in a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megafp8.plan.traffic import Message, rank_traffic
from megafp8.specs import Fp8Recipe, ParallelSpec, PipelineSpec, RunSpec, StorageSpec
from megafp8.specs.parallel import FsdpSpec
from tests.parallel.rank_work import Case
from tests.ranks import run_ranks
from tests.tiny import gpt_spec, optim_spec, run_spec

FP8 = Fp8Recipe(amax_history_len=4)
MODEL = gpt_spec(num_layers=4)
INTERLEAVED = PipelineSpec(schedule="Interleaved1F1B", stages_per_rank=2)
O2 = StorageSpec(main_grads="fp8", main_params="fp16", exp_avg="fp8", exp_avg_sq="fp16")
CASES: dict[str, dict[str, Any]] = {
    "tp": {"layout": {"tp": 2}},
    "tp, FP8": {"layout": {"tp": 2}, "fp8": FP8},
    "sequence": {"layout": {"tp": 2, "sequence_parallel": True}},
    "sequence, FP8": {"layout": {"tp": 2, "sequence_parallel": True}, "fp8": FP8},
    "dp": {"layout": {}},
    "zero": {"layout": {}, "optim": optim_spec(name="distributed_fused_adam")},
    "O2": {"layout": {}, "fp8": FP8, "optim": optim_spec(storage=O2)},
    "O2, summed in FP8": {
        "layout": {},
        "fp8": FP8,
        "optim": optim_spec(storage=replace(O2, reduction="auto")),
    },
    "O2, zero": {
        "layout": {},
        "fp8": FP8,
        "optim": optim_spec(storage=O2, name="distributed_fused_adam"),
    },
    "O3, zero": {
        "layout": {},
        "fp8": replace(FP8, params_in_fp8=True),
        "optim": optim_spec(storage=O2, name="distributed_fused_adam"),
    },
    "cp": {"layout": {"cp": 2}},
    "pp": {"layout": {"pp": 2}},
    "pp, interleaved": {"layout": {"pp": 2, "pipeline": INTERLEAVED}},
    "fsdp": {"layout": {"fsdp": FsdpSpec()}},
    "fsdp, grad": {"layout": {"fsdp": FsdpSpec(strategy="grad")}},
}
OPERATION = {
    "all_reduce_sum": "all_reduce",
    "all_reduce_max": "all_reduce",
    "reduce_scatter_sum": "reduce_scatter",
}
AXIS = {"dp": "data", "ends": "tied"}


def planned(case: dict[str, Any], rank: int) -> Counter[tuple[str, str]]:
    choices = {key: value for key, value in case.items() if key != "layout"}
    layout = ParallelSpec(devices_per_node=2, **case["layout"])
    spec: RunSpec = run_spec(compute="bf16", model=MODEL, parallel=layout, **choices)
    spec = replace(spec, train=replace(spec.train, global_batch_size=8))
    sums: Counter[tuple[str, str]] = Counter()
    for message in rank_traffic(spec, rank if layout.pp == 2 else 0):
        sums[message.axis, message.operation] += message.handed
    return sums


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_plan_has_the_bytes_that_ranks_send(name: str) -> None:
    """To the byte, without the FP64 sums of losses; ZeRO-1 pads parameters of this tiny model."""
    case = CASES[name]
    choices = {key: value for key, value in case.items() if key != "layout"}
    layout = ParallelSpec(devices_per_node=2, **case["layout"])
    real = Case(compute="bf16", model=MODEL, num_microbatches=4, parallel=layout, **choices)
    ranks = run_ranks("tests.parallel.plan_traffic_work:measure", 2, {"cases": {name: real}})
    for rank, outcome in enumerate(ranks):
        counted: Counter[tuple[str, str]] = Counter()
        for (axis, operation, dtype), num_bytes in outcome[name].items():
            if dtype != "float64":
                counted[AXIS.get(axis, axis), OPERATION.get(operation, operation)] += num_bytes
        expected = planned(case, rank)
        assert set(counted) == set(expected)
        for key, num_bytes in counted.items():
            assert expected[key] == pytest.approx(num_bytes, rel=0.03 if name == "zero" else 0)


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
