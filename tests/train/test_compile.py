"""Layers that torch compiled against the eager ones; how often it compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.errors import ConfigError
from megafp8.specs import Fp8Recipe
from megafp8.specs.model import RecomputeSpec
from megafp8.train import compile as compile_module
from megafp8.train.compile import unavailable
from megafp8.train.evaluate import evaluate
from megafp8.train.generate import sample
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, train_step
from tests.tiny import VOCAB, build_run, gpt_spec, microbatch

if reason := unavailable(torch.device("cpu")):
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


def gradients(choice: str, **choices: Any) -> tuple[TrainState, float, torch.Tensor]:
    """Loss and gradients of one step."""
    state = build_run(compile=choice, **choices)
    loss, count = forward_backward(state, [microbatch(0), microbatch(1)])
    return state, (loss / count).item(), state.masters.flat_grad.clone()


@pytest.mark.parametrize("compute", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_compiled_layer_is_the_eager_one(compute: str) -> None:
    """FP32: another order of sums. With FP8 a last bit of BF16 may move a code to its neighbour,
    2**-4 of it; gradients are compared by their norm."""
    fp8 = Fp8Recipe(amax_history_len=3) if compute == "bf16" else None
    spec = gpt_spec(num_layers=3, activation="swiglu", normalization="rmsnorm",
                    position_embedding_type="rope")  # fmt: skip
    _, eager_loss, eager = gradients("off", compute=compute, fp8=fp8, model=spec)
    state, loss, grads = gradients("block", compute=compute, fp8=fp8, model=spec)
    assert loss == pytest.approx(eager_loss, rel=1e-6 if fp8 is None else 1e-3)
    error = ((grads - eager).norm() / eager.norm()).item()
    assert error < (1e-5 if fp8 is None else 0.05)
    assert state.compiled is not None and state.compiled.graphs > 0


def test_layers_share_graphs_and_nothing_is_compiled_again() -> None:
    """Twice the layers need no more graphs; later microbatches, steps, evaluation and generation
    need none."""
    counts = {}
    for layers in (2, 4):
        torch._dynamo.reset()
        state = build_run(
            compute="bf16", fp8=Fp8Recipe(), compile="block", model=gpt_spec(num_layers=layers)
        )
        assert state.compiled is not None
        train_step(state, [microbatch(0)])
        counts[layers] = state.compiled.graphs
        for step in range(1, 3):
            train_step(state, [microbatch(2 * step), microbatch(2 * step + 1)])
        evaluate(state, [microbatch(99)])
        sample(state, [1, 2, 3], 4, vocab_size=VOCAB, temperature=1.0, seed=0)
        train_step(state, [microbatch(9)])
        assert state.compiled.graphs == counts[layers]
        assert state.compiled.recompilations == 0
    assert 0 < counts[2] == counts[4]


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_with_dropout_and_recomputation(granularity: Any) -> None:
    """Masks are keyed by their place: compiled and eager layers draw the same."""
    model = gpt_spec(
        hidden_dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1,
        recompute=RecomputeSpec(granularity=granularity, method="uniform", num_layers=1),
    )  # fmt: skip
    _, eager_loss, eager = gradients("off", model=model)
    _, loss, grads = gradients("block", model=model)
    assert loss == pytest.approx(eager_loss, rel=1e-6)
    assert ((grads - eager).norm() / eager.norm()).item() < 1e-5


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"model\.compile.*C\+\+ compiler"):
        build_run(compile="block")
