"""A run without `megatron_amp_O2` computes what torch.autocast does of a plain FP32 model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, LossScaleSpec
from megafp8.train.build import build
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, train_step
from tests.tiny import gpt_spec, microbatch, run_spec
from tests.train.runs import Place

HISTORY = "model.fp8_amax_history_len=1024"  # the default, without FP8

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def without_o2(compute: str, **choices: Any) -> TrainState:
    spec = run_spec(compute=compute, **choices)
    scale = LossScaleSpec(init_scale=2.0**10) if compute == "fp16" else None
    precision = replace(spec.precision, half_weights=False, loss_scale=scale)
    return build(replace(spec, precision=precision), single_rank())


@pytest.mark.parametrize("form", ["pre_ln", "post_ln"])
@pytest.mark.parametrize("compute", DTYPES)
def test_loss_and_gradients_are_autocasts(compute: str, form: Any) -> None:
    """Gradients differ by a few roundings; with O2, norms and residual stream would differ more."""
    batch, model = microbatch(3), gpt_spec(transformer_block_type=form)
    tokens, targets = torch.from_numpy(batch.tokens_BS), torch.from_numpy(batch.targets_BS)
    plain = GPT(Parts(model, torch.float32, 1234, RandomStreams(1234)))
    with torch.autocast("cpu", DTYPES[compute]):
        hidden = plain.hidden(tokens)
        logits = hidden @ plain.embedding.word.t()
    loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
    )
    (loss * 16).backward()  # FP16 gradients must not vanish

    state = without_o2(compute, model=model)
    state.model.head_loss.grad_scale = 16.0
    ours, _ = forward_backward(state, [batch])
    assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
    named = {pieces_of(p)[0].name: p.grad for p in plain.parameters()}
    limit = {"bf16": 0.01, "fp16": 1e-3}[compute]
    for param, grad in zip(state.masters.params, state.masters.grads, strict=True):
        expected = named[pieces_of(param)[0].name]
        assert expected is not None
        assert (grad - expected).norm() <= limit * expected.norm(), pieces_of(param)[0].name


def test_embeddings_and_norms_are_fp32_the_linears_weights_are_not() -> None:
    state = without_o2("bf16")
    for param, master in zip(state.masters.params, state.masters.masters, strict=True):
        is_linear = pieces_of(param)[0].name.split(".")[2:3] in (["attention"], ["mlp"])
        assert param.dtype == (torch.bfloat16 if is_linear else torch.float32)
        assert (master is param) != is_linear and master.dtype == torch.float32


def test_it_learns_in_fp8_too() -> None:
    state = without_o2("bf16", fp8=Fp8Recipe(amax_history_len=4))
    losses = []
    for step in range(20):
        losses.append(train_step(state, [microbatch(step)]).loss)
        state.step += 1
    assert losses[-1] < losses[0] - 0.2


def test_a_run_without_o2(place: Place) -> None:
    flags = ["model.fp8=False", HISTORY, "trainer.max_steps=4", "model.megatron_amp_O2=False"]
    done = place.run(*flags)
    assert done.code == 0, done.output
    assert "precision: BF16 GEMMs over FP32 weights and residual stream" in done.output
    mine = [row["loss"] for row in place.metrics() if "lr" in row]
    done = place.run(*flags[:3], "exp_manager.name=with")
    assert done.code == 0, done.output
    theirs = [row["loss"] for row in place.metrics("with") if "lr" in row]
    assert mine != theirs and mine == pytest.approx(theirs, rel=1e-2)
    done = place.run(*flags[:3])
    assert done.code == 2 and "model.megatron_amp_O2=True" in done.output
