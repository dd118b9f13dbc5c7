"""Utilization against arithmetic by hand, against counted products, and against data sheets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megafp8.observe.flops import gemm_flops_per_token
from megafp8.observe.utilization import (
    Peak,
    peak_of_gpu,
    recomputed_flops_per_token,
    utilization,
)
from megafp8.parallel.mesh import single_rank
from megafp8.plan.hardware import KNOWN
from megafp8.plan.time import model_flops_utilization
from megafp8.specs import ParallelSpec, PipelineSpec, RunSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.train.build import build
from megafp8.train.step import forward_backward
from tests.tiny import SEQ, gpt_spec, microbatch, run_spec


def recomputes(granularity: Any, method: Any, num_layers: int) -> RecomputeSpec:
    return RecomputeSpec(granularity=granularity, method=method, num_layers=num_layers)


PEAK = Peak(device="d", tflops=2.0, products="BF16", fp8_tflops=4.0, source="by hand")
RECOMPUTED = {
    "nothing": (None, 0, 0),
    "attention": (recomputes("selective", "uniform", 1), 0, 4),
    "attention of two layers": (recomputes("selective", "block", 2), 0, 2),
    "all layers": (recomputes("full", "uniform", 2), 4, 4),
    "three layers": (recomputes("full", "block", 3), 3, 3),
}
"""For each setting: of how many of four layers backward repeats linears, and attention's core."""


def spec_of(recompute: RecomputeSpec | None, **more: Any) -> RunSpec:
    return run_spec(model=gpt_spec(num_layers=4, recompute=recompute), **more)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_by_hand(name: str) -> None:
    recompute, linears, cores = RECOMPUTED[name]
    spec = spec_of(recompute)
    found = utilization(spec, 1e6, PEAK)
    flops = gemm_flops_per_token(spec.model, seq_length=SEQ)
    again = (linears * flops.linear + cores * flops.attention) / 4 / 3
    assert found.mfu_causal == pytest.approx(flops.total * 1e6 / 2e12)
    assert found.hfu_causal == pytest.approx((flops.total + again) * 1e6 / 2e12)
    full = gemm_flops_per_token(spec.model, "full", seq_length=SEQ)
    assert full.attention == 2 * flops.attention and full.linear == flops.linear
    assert found.mfu_full == pytest.approx(full.total * 1e6 / 2e12)
    again = (linears * full.linear + cores * full.attention) / 4 / 3
    assert found.hfu_full == pytest.approx((full.total + again) * 1e6 / 2e12)


def test_the_peak_is_that_of_all_ranks() -> None:
    one, four = spec_of(None), spec_of(None, parallel=ParallelSpec(devices_per_node=4))
    mfu = utilization(one, 1e6, PEAK).mfu_causal
    assert utilization(four, 1e6, PEAK).mfu_causal == pytest.approx(mfu / 4)


def test_block_counts_the_layers_of_each_stage() -> None:
    """Two layers of each of two ranks, or one of each of four stages, are all four layers."""
    two = recomputes("full", "block", 2)
    layout = ParallelSpec(devices_per_node=2, pp=2)
    whole = recomputed_flops_per_token(spec_of(recomputes("full", "uniform", 1)))
    assert recomputed_flops_per_token(spec_of(two, parallel=layout)) == pytest.approx(whole)
    pipeline = PipelineSpec(schedule="Interleaved1F1B", stages_per_rank=2)
    layout = replace(layout, pipeline=pipeline)
    one = recomputes("full", "block", 1)
    assert recomputed_flops_per_token(spec_of(one, parallel=layout)) == pytest.approx(whole)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_they_are_the_products_that_run(name: str) -> None:
    """The counter adds up the products of a step where they are called."""
    recompute, *_ = RECOMPUTED[name]
    spec = spec_of(recompute)
    state = build(spec, single_rank())
    forward_backward(state, [microbatch(0), microbatch(1)])
    counted = sum(state.counter.flops.values()) / (2 * 2 * SEQ)
    planned = gemm_flops_per_token(spec.model, seq_length=SEQ).total
    assert counted == pytest.approx(planned + recomputed_flops_per_token(spec), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H20", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA B200", "B200 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_names_of_gpus(name: str, device: str | None) -> None:
    found = peak_of_gpu(name)
    assert (found and found.device) == device
    known = {hardware.name: hardware for hardware in KNOWN.values()}
    if found is not None and device in known:
        assert (found.tflops, found.fp8_tflops) == (
            known[device].bf16_tflops,
            known[device].fp8_tflops,
        )


def test_the_plan_counts_alike() -> None:
    spec, h200 = spec_of(None), KNOWN["h200"]
    tokens = spec.train.global_batch_size * spec.data.seq_length
    peak = peak_of_gpu("NVIDIA H200")
    assert peak is not None
    planned = model_flops_utilization(spec, 0.5, h200)
    assert utilization(spec, tokens / 0.5, peak).mfu_causal == pytest.approx(planned)


def test_the_text_names_fp8_where_it_runs() -> None:
    assert PEAK.text(fp8=False) == "2 TFLOP/s BF16 a rank (d, by hand)"
    assert PEAK.text(fp8=True) == "2 TFLOP/s BF16 and 4 FP8 a rank (d, by hand)"
    cpu = replace(PEAK, fp8_tflops=None)
    assert cpu.text(fp8=True) == cpu.text(fp8=False)
