"""What Transformer Engine's sources showed to be traps: its own amaxes, groups, versions and sizes,
each against the double, which falls into them as Transformer Engine does."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megafp8.backends import choose
from megafp8.backends.te import environment as te_environment
from megafp8.backends.te import names as te_names
from megafp8.backends.te import parts as te_parts
from megafp8.backends.te.state import TeScaling
from megafp8.backends.te.trace import RecordedTeScaling
from megafp8.models.init import pieces_of
from megafp8.observe.health import HEALTH_FILE, read_health
from megafp8.precision.traces import replay
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import HIGH_PRECISION, ModuleRule
from megafp8.train import state_dict
from megafp8.train.state import TrainState
from megafp8.train.step import train_step
from megafp8.train.validate import evaluate
from tests.backends.te.te_double import VERSIONS, Double
from tests.backends.te.test_te import (
    DELAYED,
    MODEL,
    NEWEST,
    RECIPES,
    double,
    native_run,
    no_notice,
    save,
    spec_of,
    step,
    tables_of,
    te_run,
)
from tests.ranks import run_ranks
from tests.tiny import microbatch
from tests.train.test_health import run as health_run

__all__ = ["double"]  # the fixture


# --- weights in FP8 alone ------------------------------------------------------------------------


@pytest.mark.parametrize("double", VERSIONS, indirect=True)
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_fp8_params(double: Double, compute: str) -> None:
    """Made inside the init context; masters keep the FP32 initialization; updates go back."""
    state = te_run(dataclasses.replace(DELAYED, params_in_fp8=True), compute)
    init = "fp8_model_init" if double.version == "2.4.0" else "quantized_model_init"
    assert len(double.named(init)) == 2
    assert all(call.arguments["enabled"] for call in double.named(init))
    native = native_run(None, compute)
    both = zip(native.masters.params, native.masters.masters, strict=True)
    ours = {pieces_of(p)[0].name: m for p, m in both}
    in_fp8 = 0
    for param, master in zip(state.masters.params, state.masters.masters, strict=True):
        assert torch.equal(master, ours[pieces_of(param)[0].name])
        in_fp8 += te_parts.is_kept_in_fp8(param)
    assert in_fp8 == 8
    losses = [step(state, number) for number in range(12)]
    assert losses[-1] < losses[0] - 0.1
    for param, master in zip(state.masters.params, state.masters.masters, strict=True):
        if te_parts.is_kept_in_fp8(param):
            scale = param.quant_scale
            scaled = (master.to(param.dtype).float() * scale).clamp(-448, 448)
            rounded = scaled.to(torch.float8_e4m3fn).float() / scale
            assert torch.equal(param, rounded.to(param.dtype))
            assert scale != 1


def weights_in_fp8(seed: int) -> TrainState:
    """Transformer Engine draws the weights that are thrown away from torch's own generator."""
    torch.manual_seed(seed)
    return te_run(dataclasses.replace(DELAYED, params_in_fp8=True), "bf16")


def steps_alone(double: Double, state: TrainState, numbers: range) -> list[float]:
    """Losses of steps; an update reaches all modules that ran, so those of other runs are left out,
    as by FP8GlobalStateManager.reset."""
    double.modules.clear()
    return [step(state, number) for number in numbers]


def test_its_own_initialization_leaves_no_amax(double: Double) -> None:
    """The amaxes that wait for the first update are those of our weights alone, as in our engine;
    so the generator's state before a run is made does not matter."""
    native = native_run(dataclasses.replace(DELAYED, params_in_fp8=True), "bf16")
    one, other = weights_in_fp8(1), weights_in_fp8(2)
    ours = native.scaling.tables["forward"]
    is_weight = torch.tensor([name.endswith("weight") for name in ours.names])
    for state in (one, other):
        staged = state.scaling.tables["forward"].amax
        assert torch.equal(staged[is_weight], ours.amax[is_weight]) and staged[is_weight].min() > 0
    assert steps_alone(double, one, range(3)) == steps_alone(double, other, range(3))
    for name, tensor in tables_of(one).items():
        assert torch.equal(tensor, tables_of(other)[name]), name


def test_a_run_with_weights_in_fp8_continues_bit_for_bit(double: Double, tmp_path: Path) -> None:
    whole, begun = weights_in_fp8(1), weights_in_fp8(1)
    steps_alone(double, whole, range(4))
    steps_alone(double, begun, range(2))
    path, continued = save(begun, tmp_path), weights_in_fp8(3)
    state_dict.load(path, continued, no_notice)
    steps_alone(double, continued, range(2, 4))
    for name, tensor in tables_of(whole).items():
        assert torch.equal(tensor, tables_of(continued)[name]), name
    for one, other in zip(whole.masters.masters, continued.masters.masters, strict=True):
        assert torch.equal(one, other)


# --- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_only", [True, False])
def test_amaxes_are_reduced_over_the_ranks_that_were_asked_for(tp_only: bool) -> None:
    """Two replicas with other samples. `tp_only_amax_red` leaves each its own amaxes, also where
    the tensor-parallel group is one rank; without it they are the same on both. As in our engine
    in either case: a tenth of a percent, where replicas' own differ by several."""
    work = "tests.backends.te.te_rank_work:histories"
    zero, one = run_ranks(work, 2, {"tp_only_amax_red": tp_only})
    assert torch.equal(zero["te"], one["te"]) is not tp_only
    for found in (zero, one):
        torch.testing.assert_close(found["te"], found["native"], rtol=1e-3, atol=0)


# --- traces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [DELAYED, RECIPES["most recent, margin"]])
def test_a_trace_of_it_replays(double: Double, recipe: Fp8Recipe) -> None:
    """What the recorder reads out of its tensors runs through our tables bit for bit."""
    state = te_run(recipe)
    assert isinstance(state.scaling, TeScaling)
    recorded = RecordedTeScaling(state.scaling, history_every=2)
    state.scaling = recorded  # type: ignore[assignment]
    for number in range(4):
        step(state, number)
        evaluate(state, [microbatch(99)])
    trace = recorded.trace
    assert (trace.engine, trace.version) == ("transformer_engine", NEWEST)
    assert {d: len(a) for d, a in trace.amax.items()} == {"forward": 8, "backward": 8}
    weight = trace.names["forward"].index("layers.1.mlp.fc2.weight")
    assert [bool(amax[weight] > 0) for amax in trace.amax["forward"]] == [True, False] * 4
    assert replay(trace) == []
    trace.amax["backward"][3][0] *= 1.01
    assert replay(trace)
    update = vars(double.global_state)["reduce_and_update_fp8_tensors"]
    recorded.close()
    assert isinstance(vars(double.global_state)["reduce_and_update_fp8_tensors"], classmethod)
    assert not isinstance(update, classmethod)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_an_amax_that_comes_again_is_recorded(double: Double, length: int) -> None:
    """One microbatch again and again at a learning rate of 0: every window is soon full of one
    amax and no longer moves, and each update is given that amax."""
    state = te_run(dataclasses.replace(DELAYED, amax_history_len=length))
    state.scaling = recorded = RecordedTeScaling(state.scaling, history_every=1)  # type: ignore[assignment, arg-type]
    for _ in range(6):
        with torch.no_grad():
            before = [master.clone() for master in state.masters.masters]
        train_step(state, [microbatch(0), microbatch(0)])
        for master, old in zip(state.masters.masters, before, strict=True):
            master.data.copy_(old)
        state.masters.write_back()
    recorded.close()
    trace = recorded.trace
    weights = [name.endswith("weight") for name in trace.names["forward"]]
    for update, amax in enumerate(trace.amax["forward"]):
        expected = [not is_weight or update % 2 == 0 for is_weight in weights]
        assert amax.gt(0).tolist() == expected, update
    assert all(amax.gt(0).all() for amax in trace.amax["backward"])
    assert replay(trace) == []


def test_an_update_that_was_not_seen_is_no_zero(double: Double) -> None:
    """A version that updates by another method must not be recorded as amaxes of 0."""
    state = te_run(DELAYED)
    assert isinstance(state.scaling, TeScaling)
    recorded = RecordedTeScaling(state.scaling)
    recorded.close()
    state.scaling = recorded  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no forward update"):
        step(state, 0)


@pytest.mark.parametrize("length", [1, 4])
def test_health_reads_the_tables(double: Double, length: int, tmp_path: Path) -> None:
    """The amax of a step's two microbatches, and the smallest of the scales that it met."""
    recipe = dataclasses.replace(DELAYED, amax_history_len=length)
    health_run(tmp_path, "scales", steps=2, state=(state := te_run(recipe)))
    first, second = read_health(tmp_path / HEALTH_FILE)
    table = state.scaling.tables["forward"]
    row = table.names.index("layers.0.mlp.fc1.input")
    health = second.tensors["layers.0.mlp.fc1.input"]
    if length == 1:
        assert health.amax == pytest.approx(448 / table.quant_scale[row].item(), rel=1e-6)
    else:
        assert health.amax == table.history[row, -2:].max().item() > 0
    assert health.quant_scale <= table.quant_scale[row].item()
    assert first.tensors["layers.0.mlp.fc1.input"].quant_scale > 0
    assert set(second.tensors) == {name for t in state.scaling.tables.values() for name in t.names}


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"activation": "gelu"}, "tanh"),
        ({"activation": "geglu"}, "geglu"),
        ({"transformer_block_type": "post_ln"}, "pre-norm"),
        ({"fp32_residual_connection": True}, "residual"),
        ({"apply_query_key_layer_scaling": True}, "scaling"),
        ({"ffn_dropout": 0.1}, "dropout"),
    ],
)  # fmt: skip
def test_models_that_its_layers_do_not_make(changes: dict[str, Any], word: str) -> None:
    assert word in str(te_parts.why_not(dataclasses.replace(MODEL, **changes), DELAYED))


def test_rotary_positions_that_begin_again_are_refused() -> None:
    """It has one position for each place of a sequence, and this is told before it is loaded."""
    spec = spec_of(DELAYED, position_embedding_type="rope")
    precision = dataclasses.replace(spec.precision, backend="te")
    data = dataclasses.replace(spec.data, reset_position_ids=True)
    spec = dataclasses.replace(spec, precision=precision, data=data)
    with pytest.raises(choose.ConfigError, match="begin again at 0"):
        choose.check(spec, torch.device("cpu"))


def test_a_layer_is_in_fp8_as_a_whole_or_not_at_all() -> None:
    part = dataclasses.replace(DELAYED, modules=(ModuleRule("*.mlp.fc2", HIGH_PRECISION),))
    assert "layer 0 is in FP8 in part" in str(te_parts.why_not(MODEL, part))
    assert te_parts.why_not(MODEL, DELAYED) is None


@pytest.mark.parametrize(("version", "is_new_enough"), [
    ("1.13.0", False), ("2.2.0", False), ("2.3.0", False), ("2.4.0", True), ("2.20.2", True),
    ("2.31.0", True), ("3.0.0", False),
])  # fmt: skip
def test_versions_with_other_columns_are_refused(
    double: Double, monkeypatch: pytest.MonkeyPatch, version: str, is_new_enough: bool
) -> None:
    """2.2 and 2.3 keep the MLP's gradient quantizers elsewhere: scales would be others'."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = te_names.why_not(torch.device("cuda"), fp8=True)
    assert (reason is None) is is_new_enough
    old, new = f"{version} is too old: it must be 2.4 or later", f"{version} is too new to be known"
    assert is_new_enough or any(text in str(reason) for text in (old, new))
    assert ("newer than 2.20" in te_names.describe(version)) is (version in ("2.31.0", "3.0.0"))


@pytest.mark.parametrize(("asked", "is_refused"), [(None, False), ("0", False), ("1", True)])
def test_the_unfused_update_is_refused(
    double: Double, monkeypatch: pytest.MonkeyPatch, asked: str | None, is_refused: bool
) -> None:
    """It is another rule: two microbatches, of which the second casts no weight. It is refused with
    delayed scaling alone: other recipes have no update."""
    monkeypatch.delenv(te_environment.UNFUSED_UPDATE, raising=False)
    if asked is not None:
        monkeypatch.setenv(te_environment.UNFUSED_UPDATE, asked)
    state = te_run(DELAYED)
    step(state, 0)
    table = state.scaling.tables["forward"]
    newest = table.history[table.names.index("layers.0.mlp.fc1.weight"), -1]
    assert bool(newest == 0) is is_refused
    monkeypatch.setattr(te_names, "why_not", lambda device, fp8: None)
    for recipe in (DELAYED, Fp8Recipe(name="tensorwise")):
        spec = spec_of(recipe)
        spec = dataclasses.replace(
            spec, precision=dataclasses.replace(spec.precision, backend="te")
        )
        if is_refused and recipe is DELAYED:
            with pytest.raises(choose.ConfigError, match="NVTE_UNFUSED_FP8_UPDATE=1"):
                choose.check(spec, torch.device("cuda"))
        else:
            choose.check(spec, torch.device("cuda"))


def test_the_double_dies_of_sizes_and_overrides_as_transformer_engine_does(double: Double) -> None:
    """What the configuration refuses, here asked for without it."""
    with pytest.raises(AssertionError, match="other dims"):
        step(te_run(DELAYED, ffn_hidden_size=72), 0)
    state = te_run(Fp8Recipe(name="tensorwise"))
    recipe = double.recipe.Float8CurrentScaling(backward_override="high_precision")
    state.scaling.region.recipe = recipe
    with pytest.raises(AssertionError, match="not implemented in LayerNormMLP"):
        step(state, 0)


def test_a_mask_never_goes_unseen(double: Double) -> None:
    """Documents are refused before; without that a step fails, under `python -O` too."""
    batch = microbatch(0)
    documents = batch.tokens_BS // 50
    with pytest.raises(RuntimeError, match="got a mask"):
        train_step(te_run(None), [dataclasses.replace(batch, document_ids_BS=documents)])


def test_modules_of_a_layer_are_all_known(double: Double) -> None:
    """A parameter that a later version adds must not be trained unseen by checkpoints."""
    real = double.pytorch.TransformerLayer

    class WithMore(real):  # type: ignore[misc, valid-type]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.extra = nn.Parameter(torch.ones(3))

    double.pytorch.TransformerLayer = WithMore
    names = te_names.names_in(double.pytorch, double.recipe, double.extension, "x")
    object.__setattr__(te_names.load(), "transformer_layer", names.transformer_layer)
    with pytest.raises(RuntimeError, match="extra"):
        te_run(None)


def test_torchao_without_fp8_is_refused() -> None:
    """The configuration refuses it; a program that makes its own specs meets this."""
    spec = spec_of(None)
    spec = dataclasses.replace(
        spec, precision=dataclasses.replace(spec.precision, backend="torchao")
    )
    with pytest.raises(choose.ConfigError, match="FP8 alone"):
        choose.check(spec, torch.device("cpu"))
