"""The header of a run says what a user must know before the first step."""

from __future__ import annotations

import os

import pytest

from megafp8.specs import MoESpec
from megafp8.train.report.header import experts_of, sharing
from tests.tiny import gpt_spec, moe_spec, run_spec


def test_ranks_that_share_cores_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    one = run_spec()
    assert one.parallel.devices_per_node == 1 and sharing(one, "cpu") == ""
    three = run_spec(world=3)
    assert sharing(three, "cpu") == "; 3 ranks share 2 cores, so a step takes longer"
    assert sharing(three, "cuda") == "" and sharing(run_spec(world=2), "cpu") == ""


@pytest.mark.parametrize(
    ("moe", "line"),
    [
        (moe_spec(layers=(True, True)),
         "4 of width 32 in each of 2 layers, 2 for a token; router: softmax after top-k"),
        (moe_spec(pre_softmax=True, router_loss="aux_loss", router_loss_coeff=0.01,
                  z_loss_coeff=1e-3),
         "4 of width 32 in 1 layer of 2, 2 for a token; router: softmax before top-k, "
         "aux_loss x 0.01, z-loss x 0.001"),
        (moe_spec(score_function="sigmoid", scaling_factor=2.5, has_expert_bias=True,
                  shared_ffn_hidden_size=48),
         "4 of width 32 in 1 layer of 2, 2 for a token; an MLP of width 48 for all tokens; router: "
         "sigmoid, weights x 2.5, a bias that moves by 0.001"),
    ],
)  # fmt: skip
def test_experts_have_a_line(moe: MoESpec, line: str) -> None:
    assert experts_of(gpt_spec(moe=moe)) == [f"experts: {line}"]
    assert experts_of(gpt_spec()) == []
