"""The Transformer Engine backend against a recording double with the real versions' signatures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.backends.te import names as te_names
from megafp8.backends.te import parts as te_parts
from megafp8.backends.te.state import TeEvents, TeRegion, TeScaling
from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.random import RandomStreams
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import single_rank
from megafp8.parallel.parts import NativeParts
from megafp8.precision.gemm import GemmCounter
from megafp8.precision.grad_sink import MainGradSink
from megafp8.specs import Fp8Recipe, RunSpec
from megafp8.specs.precision import HIGH_PRECISION, ModuleRule
from megafp8.train import state_dict
from megafp8.train.build import build
from megafp8.train.report.fp8 import precision_share
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, train_step
from megafp8.train.validate import evaluate
from tests.backends.te.te_double import VERSIONS, Double, signature
from tests.ranks import run_ranks
from tests.tiny import gpt_spec, microbatch, optim_spec, run_spec

EACH_VERSION = pytest.mark.parametrize("version", VERSIONS)
MODEL = gpt_spec(activation="gelu-tanh")
DELAYED = Fp8Recipe(amax_history_len=4)
NEWEST = VERSIONS[-1]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Double:
    """Stands in for the package; of the newest version unless a test is given another."""
    version = getattr(request, "param", NEWEST)
    made = Double(version)
    names = te_names.names_in(made.pytorch, made.recipe, made.extension, version)
    monkeypatch.setattr(te_names, "load", lambda: names)
    return made


def spec_of(fp8: Fp8Recipe | None, compute: str = "fp32", **changes: Any) -> RunSpec:
    model = dataclasses.replace(MODEL, **changes)
    return run_spec(compute=compute, fp8=fp8, model=model, optim=optim_spec(eps=1e-2))


def te_run(fp8: Fp8Recipe | None, compute: str = "fp32", **changes: Any) -> TrainState:
    spec = spec_of(fp8, compute, **changes)
    precision = dataclasses.replace(spec.precision, backend="te")
    return build(dataclasses.replace(spec, precision=precision), single_rank())


def native_run(fp8: Fp8Recipe | None, compute: str = "fp32", **changes: Any) -> TrainState:
    return build(spec_of(fp8, compute, **changes), single_rank())


def step(state: TrainState, number: int) -> float:
    result = train_step(state, [microbatch(2 * number), microbatch(2 * number + 1)])
    state.step += 1
    return result.loss


# --- calls ---------------------------------------------------------------------------------------


def names_of(double: Double) -> list[str]:
    return [call.name for call in double.calls]


@pytest.mark.parametrize("double", VERSIONS, indirect=True)
def test_the_order_of_a_step(double: Double) -> None:
    """Two microbatches: a region each, from which the forward update comes at its exit and the
    backward one after it; weights are cast in the first alone."""
    state = te_run(DELAYED)
    double.calls.clear()
    forward_backward(state, [microbatch(0), microbatch(1)])
    region = "fp8_autocast" if double.version == "2.4.0" else "autocast"
    layer = "TransformerLayer.forward"
    microbatch_calls = [region, layer, layer, "update scaling_fwd", f"{region} exit",
                        "update scaling_bwd"]  # fmt: skip
    assert names_of(double) == 2 * microbatch_calls
    firsts = [call.arguments["is_first_microbatch"] for call in double.named(layer)]
    assert firsts == [True, True, False, False]
    for call in double.named(region):
        recipe, group = (("fp8_recipe", "fp8_group") if region == "fp8_autocast"
                         else ("recipe", "amax_reduction_group"))  # fmt: skip
        assert call.arguments["enabled"] is True and call.arguments["calibrating"] is False
        assert type(call.arguments[recipe]).__name__ == "DelayedScaling"
        assert call.arguments[group] is None


def test_evaluation_opens_a_region_and_leaves_no_trace(double: Double) -> None:
    state = te_run(DELAYED)
    step(state, 0)
    before = {d: {k: t.clone() for k, t in table.tensors().items()}
              for d, table in state.scaling.tables.items()}  # fmt: skip
    double.calls.clear()
    evaluate(state, [microbatch(9)])
    assert names_of(double) == [
        *["get_fp8_meta_tensors"] * 6, "autocast", *["TransformerLayer.forward"] * 2,
        "autocast exit", *["reset_fp8_meta_tensors"] * 6,
    ]  # fmt: skip
    forward = double.named("TransformerLayer.forward")
    assert [call.arguments["is_first_microbatch"] for call in forward] == [None, None]
    for direction, table in state.scaling.tables.items():
        for name, tensor in table.tensors().items():
            assert torch.equal(tensor, before[direction][name]), f"{direction} {name}"


@pytest.mark.parametrize("in_fp8", [True, False])
def test_evaluation_in_high_precision_if_asked(double: Double, in_fp8: bool) -> None:
    state = te_run(dataclasses.replace(DELAYED, fp8_in_evaluation=in_fp8))
    double.calls.clear()
    loss, _ = evaluate(state, [microbatch(9)])
    assert double.named("autocast")[0].arguments["enabled"] is in_fp8
    plain, _ = evaluate(native_run(None), [microbatch(9)])
    assert (loss == pytest.approx(plain, rel=1e-6)) is not in_fp8


def test_bf16_layers_need_no_region(double: Double) -> None:
    state = te_run(None, "bf16")
    step(state, 0)
    assert isinstance(state.scaling, TeEvents)
    assert not double.named("autocast", "init_fp8_meta_tensors")
    layers = double.named("TransformerLayer.forward")
    assert {call.arguments["is_first_microbatch"] for call in layers} == {None}


def test_a_layer_out_of_fp8_runs_in_a_region_of_its_own(double: Double) -> None:
    rules = (ModuleRule("layers.1.*", HIGH_PRECISION),)
    state = te_run(dataclasses.replace(DELAYED, modules=rules))
    double.calls.clear()
    step(state, 0)
    regions = [call.arguments["enabled"] for call in double.named("autocast")]
    assert regions == [True, False, True, False]
    assert {name.split(".")[1] for name in state.scaling.tables["forward"].names} == {"0"}
    share = precision_share(state.model, MODEL, DELAYED)
    assert any("layers.1 (output, grad_input, grad_weight, chosen" in t for t in share.higher)


@pytest.mark.parametrize("double", VERSIONS, indirect=True)
def test_what_a_layer_is_made_with(double: Double) -> None:
    te_run(DELAYED)
    calls = double.named("TransformerLayer.__init__")
    assert [call.arguments["layer_number"] for call in calls] == [1, 2]
    wanted = {
        "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_gqa_groups": 4,
        "kv_channels": 8, "layernorm_epsilon": 1e-5, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "self_attn_mask_type": "causal", "tp_group": None, "tp_size": 1,
        "set_parallel_mode": False, "sequence_parallel": False, "params_dtype": torch.float32,
        "fuse_qkv_params": True, "qkv_weight_interleaved": False, "bias": True,
        "activation": "gelu", "normalization": "LayerNorm", "attn_input_format": "bshd",
        "fuse_wgrad_accumulation": False, "apply_residual_connection_post_layernorm": False,
    }  # fmt: skip
    assert {key: calls[0].arguments[key] for key in wanted} == wanted


@EACH_VERSION
def test_the_double_refuses_what_the_version_does_not_have(version: str) -> None:
    with pytest.raises(TypeError):
        signature(version, "TransformerLayer.__init__").bind(32, 64, 4, qkv_interleaved=False)
    assert ("autocast" in vars(Double(version).pytorch)) is (version != "2.4.0")


# --- numbers -------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "groups of heads": {"num_query_groups": 2},
    "swiglu, rmsnorm": {"activation": "swiglu", "normalization": "rmsnorm"},
    "wide heads": {"kv_channels": 16},
    "squared relu": {"activation": "squared-relu"},
    "no bias": {"bias": False},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_it_is_the_same_model(double: Double, changes: dict[str, Any]) -> None:
    """FP32, three steps against our own parts: losses 1e-6, weights 1e-5. QKV in another order,
    gate and up exchanged, a norm elsewhere: each would be another model."""
    te, native = te_run(None, **changes), native_run(None, **changes)
    for number in range(3):
        assert step(te, number) == pytest.approx(step(native, number), rel=1e-6)
    ours = {pieces_of(p)[0].name: p for p in native.masters.params}
    for param in te.masters.params:
        reference = ours.pop(pieces_of(param)[0].name)
        assert pieces_of(param) == pieces_of(reference)
        torch.testing.assert_close(param, reference, rtol=1e-5, atol=1e-6)
    assert not ours


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_weights_begin_as_ours(double: Double, compute: str) -> None:
    te, native = te_run(DELAYED, compute), native_run(DELAYED, compute)
    both = zip(native.masters.params, native.masters.masters, strict=True)
    ours = {pieces_of(p)[0].name: (p, m) for p, m in both}
    for param, master in zip(te.masters.params, te.masters.masters, strict=True):
        reference, reference_master = ours[pieces_of(param)[0].name]
        assert torch.equal(param, reference) and torch.equal(master, reference_master)


RECIPES = {
    "max": DELAYED,
    "most recent, margin": Fp8Recipe(
        amax_history_len=3, amax_compute_algo="most_recent", margin=1, backward_format="e4m3"
    ),
    "length 1": Fp8Recipe(amax_history_len=1),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_scales_follow_the_same_rule(double: Double, recipe: Fp8Recipe) -> None:
    """Six steps of two microbatches beside our own engine: same tensors, scales and histories.

    The engines add up in different orders, so a payload may fall on the other side of a rounding
    and amaxes follow: 2 % for scales and histories, 1e-3 for losses.
    """
    te, native = te_run(recipe), native_run(recipe)
    for number in range(6):
        assert step(te, number) == pytest.approx(step(native, number), rel=1e-3)
    for direction, ours in native.scaling.tables.items():
        theirs = te.scaling.tables[direction]
        assert theirs.names == ours.names
        torch.testing.assert_close(theirs.quant_scale, ours.quant_scale, rtol=2e-2, atol=0)
        torch.testing.assert_close(theirs.history, ours.history, rtol=2e-2, atol=1e-7)
        assert torch.equal(theirs.num_updates, ours.num_updates)
        assert torch.equal(theirs.amax, ours.amax)


# --- checkpoints ---------------------------------------------------------------------------------


def save(state: TrainState, root: Path) -> Path:
    meta = {"config": {}, "data_fingerprint": ""}
    return Saver(root, 1, meta).save(state)


def tables_of(state: TrainState) -> dict[str, torch.Tensor]:
    return {
        f"{direction}/{name}": tensor.clone()
        for direction, table in state.scaling.tables.items()
        for name, tensor in table.tensors().items()
    }


def no_notice(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.parametrize("from_te", [True, False], ids=["te to native", "native to te"])
def test_a_checkpoint_moves_between_the_backends(
    double: Double, tmp_path: Path, from_te: bool
) -> None:
    """Weights, moments and scaling state bit for bit; the next step's loss then agrees too."""
    make = (te_run, native_run) if from_te else (native_run, te_run)
    source, target = (run(DELAYED, "bf16") for run in make)
    for number in range(3):
        step(source, number)
    state_dict.load(save(source, tmp_path), target, no_notice)
    assert tables_of(source).keys() == tables_of(target).keys()
    for name, tensor in tables_of(source).items():
        assert torch.equal(tensor, tables_of(target)[name]), name
    assert tables_of(target)["forward/quant_scale"].ne(1).all()
    ours = {p.name: t for p, t in pieces(source)}
    for piece, tensor in pieces(target):
        assert torch.equal(tensor, ours[piece.name]), piece.name
    assert step(target, 3) == pytest.approx(step(source, 3), rel=1e-2)


def pieces(state: TrainState) -> list[tuple[Any, torch.Tensor]]:
    return [
        (piece, master.detach()[piece.local])
        for param, master in zip(state.masters.params, state.masters.masters, strict=True)
        for piece in pieces_of(param)
    ]


def test_a_run_continues_bit_for_bit(double: Double, tmp_path: Path) -> None:
    whole, begun = te_run(DELAYED, "bf16"), te_run(DELAYED, "bf16")
    for number in range(5):
        step(whole, number)
    for number in range(3):
        step(begun, number)
    path, continued = save(begun, tmp_path), te_run(DELAYED, "bf16")
    state_dict.load(path, continued, no_notice)
    for number in range(3, 5):
        step(continued, number)
    for name, tensor in tables_of(whole).items():
        assert torch.equal(tensor, tables_of(continued)[name]), name
    for one, other in zip(whole.masters.masters, continued.masters.masters, strict=True):
        assert torch.equal(one, other)


def test_transformer_engine_s_slots(double: Double) -> None:
    """Its slot 0 is our staged amax, slots 1 and on our history, oldest first."""
    state = te_run(DELAYED)
    scaling = state.scaling
    assert isinstance(scaling, TeScaling)
    module = state.model.layers[0].layer.layernorm_mlp
    meta = module.fp8_meta["scaling_fwd"]
    meta.amax_history.copy_(torch.arange(24.0).view(4, 6))
    meta.scale.copy_(torch.arange(1.0, 7.0))
    table = scaling.tables["forward"]
    for name, column in (("fc1.input", 0), ("fc1.weight", 1), ("fc2.input", 3), ("fc2.weight", 4)):
        row = table.names.index(f"layers.0.mlp.{name}")
        assert table.amax[row] == column and table.quant_scale[row] == 1 + column
        assert table.history[row].tolist() == [6.0 + column, 12.0 + column, 18.0 + column]
    before = meta.amax_history.clone()
    table.quant_scale += 1
    scaling.push()
    assert torch.equal(meta.amax_history, before)
    assert meta.scale.tolist() == [2, 3, 3, 5, 6, 6]  # outputs (columns 2 and 5) are not ours


# --- tensor parallelism --------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_share_is_ours(double: Double, rank: int) -> None:
    """Its own arguments are filled, and each parameter holds the pieces that ours holds."""
    group: Any = object()
    axis = Axis("tp", size=2, rank=rank, group=group)
    names = te_names.load()
    given = (MODEL, torch.float32, 1234, RandomStreams(1234, rank))
    shared: Any = {"tp": axis, "sink": MainGradSink(), "counter": GemmCounter()}
    region = TeRegion(names, None, None)
    parts = te_parts.TransformerEngineParts(
        *given, region=region, te_scaling=None, device=torch.device("cpu"), recipe=None,
        sequence_parallel=True, **shared,
    )  # fmt: skip
    model, native = GPT(parts), GPT(NativeParts(*given, scaling=None, **shared))
    arguments = double.named("TransformerLayer.__init__")[0].arguments
    assert arguments["tp_group"] is group and arguments["tp_size"] == 2
    assert arguments["set_parallel_mode"] and arguments["sequence_parallel"]
    ours = {pieces_of(p)[0].name: p for p in native.parameters()}
    for param in model.parameters():
        reference = ours.pop(pieces_of(param)[0].name)
        assert pieces_of(param) == pieces_of(reference) and torch.equal(param, reference)
    assert not ours


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranks_train_as_ours_do(sequence_parallel: bool) -> None:
    """Whole runs in FP32, where the stand-in's linears gather and sum as Transformer Engine's."""
    arguments = {"backends": ["native", "te"], "sequence_parallel": sequence_parallel, "steps": 4}
    work = "tests.backends.te.te_rank_work:losses_and_norms"
    for found in run_ranks(work, 2, arguments):
        for ours, theirs in zip(found["native"], found["te"], strict=True):
            assert theirs == pytest.approx(ours, rel=2e-5)


def test_attention_dropout_differs_by_rank_and_leaves_the_generator(double: Double) -> None:
    """What Transformer Engine forks around attention's dropout under tensor parallelism."""
    draws = []
    for rank in (0, 1):
        streams = RandomStreams(1234, rank)
        tracker = te_parts.HeadDropout(streams, "site", torch.device("cpu"))
        with streams.keyed("layers.0.dropout", torch.device("cpu")):
            with tracker.fork():
                inside = torch.rand(4)
            draws.append((inside, torch.rand(4)))
    assert not torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])
