"""Transformer Engine itself, on a GPU with FP8 tensor cores. Skipped elsewhere, with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.te_trace import RecordedTeScaling, cast_sample
from benchmarks.traces import replay
from fp8_numerics.formats import E4M3
from megafp8.backends.te import names as te_names
from megafp8.backends.te.state import TeScaling
from megafp8.models.init import pieces_of
from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, RunSpec
from megafp8.train import state_dict
from megafp8.train.build import build
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from megafp8.train.validate import evaluate
from tests.tiny import gpt_spec, microbatch, run_spec

pytestmark = pytest.mark.gpu
MODEL = gpt_spec(activation="gelu-tanh", hidden_size=64, ffn_hidden_size=128, num_attention_heads=2)
DELAYED = Fp8Recipe(amax_history_len=8)


@pytest.fixture(autouse=True)
def _needs_transformer_engine() -> None:
    reason = te_names.why_te_cannot(torch.device("cuda"), "DelayedScaling")
    if reason is not None:
        pytest.skip(reason)


def run(backend: str, fp8: Fp8Recipe | None) -> TrainState:
    spec: RunSpec = run_spec(compute="bf16", fp8=fp8, model=MODEL)
    precision = dataclasses.replace(spec.precision, backend=backend)
    mesh = single_rank(torch.device("cuda", 0))
    return build(dataclasses.replace(spec, precision=precision), mesh)


def step(state: TrainState, number: int) -> float:
    result = train_step(state, [microbatch(2 * number), microbatch(2 * number + 1)])
    state.step += 1
    return result.loss


@pytest.mark.parametrize("fp8", [None, DELAYED, Fp8Recipe(name="tensorwise")])
def test_it_trains_beside_our_own(fp8: Fp8Recipe | None) -> None:
    """Twenty steps: the first loss within 0.2 %, later ones within 2 %, and it learns."""
    te, native = run("te", fp8), run("native", fp8)
    pairs = [(step(te, number), step(native, number)) for number in range(20)]
    assert pairs[0][0] == pytest.approx(pairs[0][1], rel=2e-3)
    assert all(one == pytest.approx(other, rel=2e-2) for one, other in pairs)
    assert pairs[-1][0] < pairs[0][0] - 0.2


def test_its_scales_follow_our_rule_bit_for_bit() -> None:
    state = run("te", DELAYED)
    assert isinstance(state.scaling, TeScaling)
    recorded = RecordedTeScaling(state.scaling, history_every=5)
    state.scaling = recorded  # type: ignore[assignment]
    for number in range(30):
        step(state, number)
        if number % 10 == 0:
            evaluate(state, [microbatch(99)])
    recorded.close()
    assert replay(recorded.trace) == []
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(64, 64, device="cuda", generator=generator).bfloat16()
    x[0, :4] = torch.tensor([0.0, 448.0, -1e4, 1e-9])
    name = "layers.0.mlp.fc1.input"
    recorded.trace.samples.append(cast_sample(recorded.trace, name, x, E4M3))
    recorded.trace.samples[-1].input = x.cpu()
    recorded.trace.samples[-1].payload = recorded.trace.samples[-1].payload.cpu()
    assert replay(recorded.trace) == []


@pytest.mark.parametrize("order", [("te", "native"), ("native", "te")])
def test_a_checkpoint_moves_between_the_backends(order: tuple[str, str], tmp_path: Path) -> None:
    source, target = (run(backend, DELAYED) for backend in order)
    for number in range(4):
        step(source, number)
    saver = Saver(tmp_path, 1, {"config": {}, "data_fingerprint": ""})
    notify: Callable[[str], None] = print
    state_dict.load_checkpoint(saver.save(source), target, notify)
    for direction, table in source.scaling.tables.items():
        for field, tensor in table.tensors().items():
            other = target.scaling.tables[direction].tensors()[field]
            assert torch.equal(tensor.cpu(), other.cpu()), f"{direction} {field}"
    assert step(target, 4) == pytest.approx(step(source, 4), rel=1e-2)


def test_weights_in_fp8_alone() -> None:
    state = run("te", dataclasses.replace(DELAYED, params_in_fp8=True))
    reference = run("native", None)
    both = zip(reference.masters.params, reference.masters.masters, strict=True)
    ours = {pieces_of(p)[0].name: m for p, m in both}
    for param, master in zip(state.masters.params, state.masters.masters, strict=True):
        assert torch.equal(master, ours[pieces_of(param)[0].name])
    losses = [step(state, number) for number in range(20)]
    assert losses[-1] < losses[0] - 0.2
