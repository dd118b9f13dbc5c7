"""The predicted time of a step: its parts follow the counts, and its ratio the audit's estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megafp8.errors import ConfigError
from megafp8.plan.hardware import KNOWN, hardware_of
from megafp8.plan.search import layouts, search
from megafp8.plan.time import (
    Achieved,
    model_flops_utilization,
    step_time,
    tokens_per_step,
    why_fp8_pays_little,
    without_fp8,
)
from megafp8.specs import Fp8Recipe, ParallelSpec, RunSpec
from tests.tiny import gpt_spec, run_spec

H200 = KNOWN["h200"]
NO_HOST = Achieved(launch_microseconds=0.0)


def job(
    micro: int = 4, *, batch: int = 64, ranks: int = 1, width: int = 4096, **layout: Any
) -> RunSpec:
    model = gpt_spec(
        num_layers=8,
        hidden_size=width,
        ffn_hidden_size=4 * width,
        num_attention_heads=width // 128,
        max_position_embeddings=2048,
        vocab_size=4096,
    )
    spec = run_spec(
        compute="bf16",
        fp8=Fp8Recipe(),
        model=model,
        parallel=ParallelSpec(devices_per_node=ranks, accelerator="gpu", **layout),
    )
    train = replace(spec.train, micro_batch_size=micro, global_batch_size=batch)
    return replace(spec, train=train, data=replace(spec.data, seq_length=2048))


def ratio(spec: RunSpec) -> float:
    def layers(run: RunSpec) -> float:
        time = step_time(run, H200, NO_HOST)
        return time.linears + time.attention + time.passes + time.weights

    return layers(without_fp8(spec)) / layers(spec)


@pytest.mark.parametrize(("micro", "estimate"), [(1, 1.19), (2, 1.26), (4, 1.35), (8, 1.38)])
def test_the_ratio_to_bf16_is_near_the_estimate_from_counted_passes(
    micro: int, estimate: float
) -> None:
    """Layers of width 4096 and 2,048 tokens a sequence; both figures are predictions.

    The estimate took other bandwidths for FP8's passes than for BF16's, so that it is lower.
    """
    assert estimate * 0.97 < ratio(job(micro, batch=micro)) < estimate * 1.16


def test_fp8_pays_less_for_a_small_model_and_a_long_sequence() -> None:
    wide, narrow = job(), job(width=512)
    longer = replace(wide, data=replace(wide.data, seq_length=32768))
    assert ratio(narrow) < ratio(wide) and ratio(longer) < ratio(wide)
    bf16, fp8 = (step_time(run, H200, NO_HOST) for run in (without_fp8(narrow), narrow))
    reasons = why_fp8_pays_little(narrow, bf16, fp8)
    assert any("width 512 is small" in reason for reason in reasons)
    reasons = why_fp8_pays_little(
        longer, step_time(without_fp8(longer), H200), step_time(longer, H200)
    )
    assert "attention stays in BF16" in reasons[0]


def test_products_take_their_flops_over_the_rate() -> None:
    spec = without_fp8(job())
    time = step_time(spec, H200, Achieved(bf16=1.0))
    flops = 6 * 64 * 2048 * 8 * 12 * 4096**2
    assert time.linears == pytest.approx(flops / 989.4e12)
    assert time.head == pytest.approx(6 * 64 * 2048 * 4096 * 4096 / 989.4e12)
    perfect = time.linears + time.head
    expected = (flops + 6 * 64 * 2048 * 4096 * 4096) / 989.4e12 / perfect
    half = 64 * 2048 * 6 * 8 * 2048 * 4096
    mfu = model_flops_utilization(spec, perfect, H200)
    assert mfu == pytest.approx(expected + half / 989.4e12 / perfect)
    assert tokens_per_step(spec) == 64 * 2048


def test_the_bubble_of_1f1b_is_the_pipelines_filling() -> None:
    """(p - 1) / m of the passes, with equal stages (Narayanan et al. 2021)."""
    spec = job(ranks=4, pp=4)
    time = step_time(spec, H200, NO_HOST)
    passes = time.linears + time.head + time.attention + time.passes
    assert time.bubble == pytest.approx(passes * 3 / 16, rel=1e-9)


def test_a_slow_host_is_seen() -> None:
    time = step_time(job(micro=1, width=512), H200)
    assert time.host > 0 and step_time(job(micro=1, width=512), H200, NO_HOST).host == 0


def test_a_search_lists_layouts_that_fit_with_the_fastest_first() -> None:
    spec = job(ranks=8)
    found = search(spec, H200)
    assert found == sorted(found, key=lambda layout: (layout.time.total, layout.num_bytes))
    assert len(found) > 10 and all(f.num_bytes <= 0.9 * H200.memory_bytes for f in found)
    small = hardware_of("small", {key: 10.0 for key in (
        "bf16_tflops", "fp8_tflops", "memory_gb", "memory_gb_s")})  # fmt: skip
    few = search(spec, small)
    assert len(few) < len(found)
    for layout in layouts(spec):
        parallel = layout.parallel
        assert parallel.dp * parallel.tp * parallel.pp == 8
        assert 64 % (layout.train.micro_batch_size * parallel.dp) == 0


def test_hardware_is_named_or_given_by_its_figures() -> None:
    assert hardware_of("H200", {}) is H200 or hardware_of("H200", {}) == H200
    assert hardware_of("h200", {"memory_gb": 94.0}).memory_bytes == 94_000_000_000
    with pytest.raises(ConfigError, match="hardware=mi300: is not known"):
        hardware_of("mi300", {"bf16_tflops": 1000.0})
    with pytest.raises(ConfigError, match=r"hardware\.tflops=1\.0: is not a figure"):
        hardware_of("h200", {"tflops": 1.0})
    with pytest.raises(ConfigError, match=r"hardware\.memory_gb=-1\.0: must be positive"):
        hardware_of("h200", {"memory_gb": -1.0})
