"""Layers that torch compiles are compared with eager ones, and compilations are counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from megafp8.errors import ConfigError
from megafp8.fp8.health import HealthProbe
from megafp8.fp8.scaling import ScalingState
from megafp8.ops import torch_private
from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, GPTSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.precision import RecipeName
from megafp8.specs.recipes import RECIPES
from megafp8.train import compile as compile_module
from megafp8.train.build import build
from megafp8.train.compile import CompileCounter, cannot_trace, why_not_compilable
from megafp8.train.generate import sample
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, train_step
from megafp8.train.validate import evaluate
from tests.documents import borders_of
from tests.tiny import SEQ, VOCAB, build_run, gpt_spec, microbatch, run_spec

if reason := why_not_compilable(torch.device("cpu")):
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

needs_tracing = pytest.mark.skipif(cannot_trace() is not None, reason=cannot_trace() or "")


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()
    counters.clear()


def gradients(choice: str, **choices: Any) -> tuple[TrainState, float, torch.Tensor]:
    """Return loss and gradients of one step."""
    state = build_run(compile=choice, **choices)
    loss, count = forward_backward(state, [microbatch(0), microbatch(1)])
    return state, (loss / count).item(), state.masters.own_grads[0].clone()


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_compiled_layer_is_the_eager_one(compute: str) -> None:
    """Results in FP32 differ by the order of sums.

    With FP8, a last bit of BF16 may change an FP8 code to its neighbour, which differs by 2**-4 of
    the value. Gradients are therefore compared by their norm.
    """
    fp8 = Fp8Recipe(amax_history_len=3) if compute == "bf16" else None
    spec = gpt_spec(num_layers=3, activation="swiglu", normalization="rmsnorm",
                    position_embedding_type="rope")  # fmt: skip
    _, eager_loss, eager = gradients("off", compute=compute, fp8=fp8, model=spec)
    state, loss, grads = gradients("block", compute=compute, fp8=fp8, model=spec)
    assert loss == pytest.approx(eager_loss, rel=1e-6 if fp8 is None else 1e-3)
    error = ((grads - eager).norm() / eager.norm()).item()
    assert error < (1e-5 if fp8 is None else 0.05)
    assert state.compiled is not None and state.compiled.graphs > 0


def recipe_of(name: RecipeName, **changes: Any) -> Fp8Recipe:
    by_tensor = name in ("delayed", "tensorwise")
    return Fp8Recipe(
        name=name,
        amax_history_len=3,
        backward_format="e5m2" if by_tensor else "e4m3",
        power_2_scale=not by_tensor,
        **changes,
    )


def without_inductor(self: CompileCounter, graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """The graphs of forward and backward run operation by operation.

    Without fusion, they have no rounding that the eager layer does not have.
    """
    self.graphs += 1
    return lookup_backend("aot_eager")(graph, inputs)


@needs_tracing
@pytest.mark.parametrize(
    "choices",
    [
        *[{"compute": "bf16", "fp8": recipe_of(name)} for name in RECIPES],
        {"compute": "bf16", "fp8": recipe_of("delayed", params_in_fp8=True)},
        {"compute": "bf16"},
        {"compute": "fp32", "fp8": recipe_of("delayed")},
    ],
    ids=lambda choices: " ".join(getattr(v, "name", str(v)) for v in choices.values()),
)
def test_a_layer_is_one_graph_that_does_what_the_eager_one_does(
    choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers share a graph; losses, gradients, weights and scaling are the same bits."""
    monkeypatch.setattr(CompileCounter, "backend", without_inductor)
    model = gpt_spec(
        num_layers=3, activation="swiglu", normalization="rmsnorm", num_query_groups=1,
        position_embedding_type="rope", hidden_dropout=0.1, ffn_dropout=0.1,
    )  # fmt: skip
    eager, compiled = (build_run(compile=c, model=model, **choices) for c in ("off", "block"))
    for step in range(4):
        batches = [microbatch(2 * step), microbatch(2 * step + 1)]
        one, other = train_step(eager, batches), train_step(compiled, batches)
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm), f"step {step}"
        assert evaluate(eager, [batches[0]]) == evaluate(compiled, [batches[0]])
    assert compiled.compiled is not None
    assert compiled.compiled.graphs == 1 and compiled.compiled.breaks == []
    assert dict(counters["graph_break"]) == {}
    assert eager.counter.flops == compiled.counter.flops
    assert eager.counter.fp8_backends == compiled.counter.fp8_backends
    for mine, theirs in zip(eager.masters.params, compiled.masters.params, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    for direction, table in eager.scaling.tables.items():
        for field, tensor in table.tensors().items():
            assert torch.equal(compiled.scaling.tables[direction].tensors()[field], tensor), field


@needs_tracing
def test_observers_see_what_they_see_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompileCounter, "backend", without_inductor)
    found = []
    for choice in ("off", "block"):
        state = build_run(compute="bf16", fp8=recipe_of("delayed"), compile=choice)
        train_step(state, [microbatch(0)])
        assert isinstance(state.scaling, ScalingState)
        probe = HealthProbe(state.scaling, "full")
        probe.attach()  # after the graph was made: nothing is compiled again
        train_step(state, [microbatch(1), microbatch(2)])
        found.append(probe.detach())
    assert found[0] == found[1]
    assert state.compiled is not None and state.compiled.graphs == 1


@needs_tracing
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (gpt_spec(attention_dropout=0.1), "attention: its dropout depends on its position"),
        (
            gpt_spec(
                recompute=RecomputeSpec(granularity="selective", method="uniform", num_layers=1)
            ),
            "attention: the backward pass recomputes it",
        ),
    ],
    ids=["attention's dropout", "selective recomputation"],
)
def test_breaks_of_the_graph_are_named(
    model: GPTSpec, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompileCounter, "backend", without_inductor)
    eager, compiled = (build_run(compile=c, model=model) for c in ("off", "block"))
    for step in range(2):
        one, other = (train_step(state, [microbatch(step)]) for state in (eager, compiled))
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert compiled.compiled is not None
    assert compiled.compiled.breaks == [reason] and compiled.compiled.graphs > 1
    assert eager.counter.flops == compiled.counter.flops


@needs_tracing
def test_documents_of_each_microbatch_compile_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CompileCounter, "backend", without_inductor)
    model = gpt_spec(position_embedding_type="rope")
    spec = run_spec(model=model)
    spec = dataclasses.replace(spec, data=dataclasses.replace(spec.data, reset_attention_mask=True))
    eager, compiled = (
        build(
            dataclasses.replace(spec, train=dataclasses.replace(spec.train, compile=c)),
            single_rank(),
        )
        for c in ("off", "block")
    )
    graphs = 0
    for step in range(4):
        ids_BS = np.tile(np.arange(SEQ), (2, 1)) // (step + 3)
        batch = dataclasses.replace(microbatch(step), cu_seqlens_N1=borders_of(ids_BS))
        one, other = (train_step(state, [batch]) for state in (eager, compiled))
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
        assert compiled.compiled is not None
        graphs = graphs or compiled.compiled.graphs
    assert compiled.compiled is not None
    assert compiled.compiled.breaks == ["attention: each microbatch has documents of its own"]
    assert compiled.compiled.graphs == graphs
    assert eager.counter.flops == compiled.counter.flops


def test_a_torch_that_cannot_trace_linears_runs_them_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_private, "has_objects_in_graphs", lambda: False)
    monkeypatch.setattr(CompileCounter, "backend", without_inductor)
    eager, compiled = (
        build_run(compile=c, compute="bf16", fp8=recipe_of("delayed")) for c in ("off", "block")
    )
    one, other = (train_step(state, [microbatch(0)]) for state in (eager, compiled))
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert compiled.compiled is not None and compiled.compiled.graphs > 1
    assert [entry.partition(":")[0] for entry in compiled.compiled.breaks] == [
        "linears", "attention"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_layers_share_graphs_and_nothing_is_compiled_again(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the layers need no more graphs.

    Later microbatches and steps, evaluation and generation compile nothing. Graphs are counted as
    they are made, before either compiler gets one.
    """
    if compiler == "aot_eager":
        monkeypatch.setattr(torch_private, "inductor", lookup_backend(compiler))
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
    assert counts[2] == 1 or cannot_trace() is not None


@needs_tracing
def test_inductor_compiles_a_layer_with_fp8_linears_once() -> None:
    """A second step compiles nothing; the first loss is the eager one but for roundings to FP8."""
    fp8 = Fp8Recipe(amax_history_len=3)
    _, eager_loss, _ = gradients("off", compute="bf16", fp8=fp8)
    state, loss, _ = gradients("block", compute="bf16", fp8=fp8)
    assert loss == pytest.approx(eager_loss, rel=1e-3)
    train_step(state, [microbatch(2)])
    assert state.compiled is not None
    assert state.compiled.graphs == 1 and state.compiled.recompilations == 0


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_with_dropout_and_recomputation(granularity: Any) -> None:
    """Masks depend on their position in the run: compiled and eager layers draw the same."""
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
