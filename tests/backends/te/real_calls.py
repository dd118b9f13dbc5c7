"""How Transformer Engine's own classes are called, and what its sources showed to be traps."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from benchmarks.te_trace import RecordedTeScaling
from fp8_numerics.gemm import GemmCounter
from megafp8.backends import choose
from megafp8.backends.te import names as te_names
from megafp8.backends.te import parts as te_parts
from megafp8.backends.te.state import TeEvents, TeRegion, TeScaling
from megafp8.config.te_environment import UNFUSED_UPDATE
from megafp8.errors import ConfigError
from megafp8.fp8.grad_sink import MainGradSink
from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.random import RandomStreams
from megafp8.observe.health import HEALTH_FILE, read_health
from megafp8.parallel.collectives import Axis
from megafp8.parallel.parts import NativeParts, PartsArgs
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import ModuleRule
from megafp8.specs.recipes import HIGH_PRECISION
from megafp8.train import state_dict
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, train_step
from megafp8.train.validate import evaluate
from te_cpu.tensors import is_quantized
from tests.backends.te.real import DELAYED, VERSION, recipes, run_of, spec_of, step, tables_of, te
from tests.backends.te.real import forget_other_models as forget_other_models
from tests.documents import borders_of
from tests.tiny import gpt_spec, microbatch, precision_share
from tests.train.test_health import run as health_run

MODEL = gpt_spec(activation="gelu-tanh")
MANAGER = te.module.base.FP8GlobalStateManager
NUMBERS = te_names.release_of(VERSION)
MOST_RECENT = Fp8Recipe(
    amax_history_len=3, amax_compute_algo="most_recent", margin=1, backward_format="e4m3"
)


class Call(NamedTuple):
    """One call of Transformer Engine's Python, and its arguments by name."""

    name: str
    arguments: dict[str, Any]


class Calls(list[Call]):
    """All calls in their order."""

    def named(self, name: str) -> list[dict[str, Any]]:
        return [call.arguments for call in self if call.name == name]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Regions, updates, and layers as they are made and run, recorded and passed on."""
    found, names = Calls(), te_names.import_te()

    @contextmanager
    def region(**given: Any) -> Iterator[None]:
        found.append(Call("region", given))
        with names._autocast(**given):
            yield
        found.append(Call("region exit", {}))

    @contextmanager
    def model_init(**given: Any) -> Iterator[None]:
        found.append(Call("init", given))
        with names._model_init(**given):
            yield

    class Layer(te.TransformerLayer):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            found.append(Call("make", given))
            super().__init__(**given)

        def forward(self, *args: Any, **given: Any) -> Any:
            found.append(Call("layer", given))
            return super().forward(*args, **given)

    update = vars(MANAGER)["reduce_and_update_fp8_tensors"]

    def noting(cls: Any, forward: bool = True) -> None:
        found.append(Call("update forward" if forward else "update backward", {}))
        update.__func__(cls, forward)

    monkeypatch.setattr(MANAGER, "reduce_and_update_fp8_tensors", classmethod(noting))
    recorded = dataclasses.replace(
        names, transformer_layer=Layer, _autocast=region, _model_init=model_init
    )
    monkeypatch.setattr(te_names, "import_te", lambda: recorded)
    return found


def te_run(fp8: Fp8Recipe | None, compute: str = "fp32", **changes: Any) -> TrainState:
    return run_of("te", fp8, compute, **changes)


def native_run(fp8: Fp8Recipe | None, compute: str = "fp32") -> TrainState:
    return run_of("native", fp8, compute)


# --- calls ---------------------------------------------------------------------------------------


def test_the_order_of_a_step(calls: Calls) -> None:
    """Two microbatches: a region each, from which the forward update comes at its exit and the
    backward one after it; weights are cast in the first alone."""
    state = te_run(DELAYED)
    calls.clear()
    forward_backward(state, [microbatch(0), microbatch(1)])
    one = ["region", "layer", "layer", "update forward", "region exit", "update backward"]
    assert [call.name for call in calls] == 2 * one
    firsts = [given["is_first_microbatch"] for given in calls.named("layer")]
    assert firsts == [True, True, False, False]
    recipe, group = ("fp8_recipe", "fp8_group") if NUMBERS < (2, 9) else (
        "recipe", "amax_reduction_group")  # fmt: skip
    for given in calls.named("region"):
        assert given["enabled"] is True and given[group] is None
        assert type(given[recipe]).__name__ == "DelayedScaling"


def test_a_pass_that_raises_leaves_nothing_to_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its region would keep the scales of all later runs of the process from being updated, and
    update them whenever Python frees it."""
    alone = te_run(DELAYED)
    for number in range(2):
        step(alone, number)
    te.module.base.FP8GlobalStateManager.reset()
    failed = te_run(DELAYED)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(failed.model.layers[1], "forward", raise_memory_error)
        step(failed, 0)
    later = te_run(DELAYED)
    step(later, 0)
    del failed
    gc.collect()
    step(later, 1)
    wanted = tables_of(alone)
    for name, tensor in tables_of(later).items():
        assert torch.equal(tensor, wanted[name]), name


def raise_memory_error(*args: object, **kwargs: object) -> None:
    raise MemoryError


def test_evaluation_opens_a_region_and_leaves_no_trace(calls: Calls) -> None:
    state = te_run(DELAYED)
    step(state, 0)
    before = tables_of(state)
    calls.clear()
    evaluate(state, [microbatch(9)])
    assert [call.name for call in calls] == ["region", "layer", "layer", "region exit"]
    assert {given["is_first_microbatch"] for given in calls.named("layer")} == {None}
    for name, tensor in tables_of(state).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("in_fp8", [True, False])
def test_evaluation_in_high_precision_if_asked(calls: Calls, in_fp8: bool) -> None:
    state = te_run(dataclasses.replace(DELAYED, fp8_in_evaluation=in_fp8))
    calls.clear()
    loss, _ = evaluate(state, [microbatch(9)])
    assert calls.named("region")[0]["enabled"] is in_fp8
    plain, _ = evaluate(native_run(None), [microbatch(9)])
    assert (loss == pytest.approx(plain, rel=1e-6)) is not in_fp8


def test_bf16_layers_need_no_region(calls: Calls) -> None:
    state = te_run(None, "bf16")
    step(state, 0)
    assert isinstance(state.scaling, TeEvents) and not calls.named("region")
    assert {given["is_first_microbatch"] for given in calls.named("layer")} == {None}


def test_a_layer_out_of_fp8_runs_in_a_region_of_its_own(calls: Calls) -> None:
    recipe = dataclasses.replace(DELAYED, modules=(ModuleRule("layers.1.*", HIGH_PRECISION),))
    state = te_run(recipe)
    calls.clear()
    step(state, 0)
    assert [given["enabled"] for given in calls.named("region")] == [True, False, True, False]
    assert {name.split(".")[1] for name in state.scaling.tables["forward"].names} == {"0"}
    share = precision_share(state, MODEL)
    assert any("layers.1 (output, grad_input, grad_weight, chosen" in t for t in share.higher)


def test_what_a_layer_is_made_with(calls: Calls) -> None:
    te_run(DELAYED)
    made = calls.named("make")
    assert [given["layer_number"] for given in made] == [1, 2]
    wanted = {
        "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_gqa_groups": 4,
        "kv_channels": 8, "layernorm_epsilon": 1e-5, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "self_attn_mask_type": "causal", "tp_group": None, "tp_size": 1,
        "set_parallel_mode": False, "sequence_parallel": False, "params_dtype": torch.float32,
        "fuse_qkv_params": True, "qkv_weight_interleaved": False, "bias": True,
        "activation": "gelu", "normalization": "LayerNorm", "attn_input_format": "bshd",
        "fuse_wgrad_accumulation": True, "ub_tp_comm_overlap": False,
    }  # fmt: skip
    assert {key: made[0][key] for key in wanted} == wanted


def test_user_buffers_are_asked_for_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is on GPUs; how Transformer Engine is asked for it is seen here."""
    base, asked = te.module.base, []

    def initialize_ub(*args: Any, **kwargs: Any) -> None:
        asked.append((args, kwargs))

    monkeypatch.setattr(base, "initialize_ub", initialize_ub)
    names, bf16 = te_names.import_te(), torch.bfloat16
    names.initialize_user_buffers(64, 32, 2, bf16, in_fp8=[True])
    kinds = te_parts.kinds_of_layers(gpt_spec(), FIRST_IN_HIGH_PRECISION)
    assert kinds == [True, False] and te_parts.kinds_of_layers(gpt_spec(), None) == [False]
    (args, kwargs), modes = asked[0], getattr(base, "UserBufferQuantizationMode", None)
    assert args == ([64, 32], 2) and kwargs.pop("dtype") == bf16
    if modes is None:
        assert kwargs == {"use_fp8": True}
        with pytest.raises(ConfigError, match="ub_tp_comm_overlap"):
            names.initialize_user_buffers(64, 32, 2, bf16, in_fp8=kinds)
    else:
        assert kwargs == {"quantization_modes": [modes.FP8]}
        names.initialize_user_buffers(64, 32, 2, bf16, in_fp8=kinds)
        assert asked[1][1]["quantization_modes"] == [modes.FP8, modes.NONE]


FIRST_IN_HIGH_PRECISION = dataclasses.replace(
    DELAYED, modules=(ModuleRule("layers.0.*", HIGH_PRECISION),)
)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_weights_begin_as_ours(compute: str) -> None:
    one, native = te_run(DELAYED, compute), native_run(DELAYED, compute)
    both = zip(native.masters.params, native.masters.masters, strict=True)
    ours = {pieces_of(p)[0].name: (p, m) for p, m in both}
    for param, master in zip(one.masters.params, one.masters.masters, strict=True):
        reference, reference_master = ours[pieces_of(param)[0].name]
        assert pieces_of(param) == pieces_of(reference)
        assert torch.equal(param, reference) and torch.equal(master, reference_master)


def test_transformer_engine_s_slots() -> None:
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_share_is_ours(calls: Calls, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own arguments are filled, and each parameter holds the pieces that ours holds."""
    group: Any = object()
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine") and "get_distributed_world_size" in vars(module):
            monkeypatch.setattr(module, "get_distributed_world_size", lambda group=None: 2)
    axis = Axis("tp", size=2, rank=rank, group=group)
    parts_args = PartsArgs(
        spec=MODEL, dtype=torch.float32, seed=1234, streams=RandomStreams(1234, rank), tp=axis,
        sink=MainGradSink(), counter=GemmCounter(),
    )  # fmt: skip
    in_sequence = dataclasses.replace(parts_args, sequence_parallel=True)
    parts = te_parts.TransformerEngineParts(
        in_sequence, region=TeRegion(te_names.import_te(), None, None), te_scaling=None,
        device=torch.device("cpu"), recipe=None,
    )  # fmt: skip
    model, native = GPT(parts), GPT(NativeParts(parts_args))
    arguments = calls.named("make")[0]
    assert arguments["tp_group"] is group and arguments["tp_size"] == 2
    assert arguments["set_parallel_mode"] and arguments["sequence_parallel"]
    ours = {pieces_of(p)[0].name: p for p in native.parameters()}
    for param in model.parameters():
        reference = ours.pop(pieces_of(param)[0].name)
        assert pieces_of(param) == pieces_of(reference) and torch.equal(param, reference)
    assert not ours


# --- weights in FP8 alone ------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_fp8_params(calls: Calls, compute: str) -> None:
    """Made inside the init context; masters keep the FP32 initialization; updates go back."""
    state = te_run(dataclasses.replace(DELAYED, params_in_fp8=True), compute)
    assert [given["enabled"] for given in calls.named("init")] == [True, True]
    native = native_run(None, compute)
    both = zip(native.masters.params, native.masters.masters, strict=True)
    ours = {pieces_of(p)[0].name: m for p, m in both}
    in_fp8 = 0
    for param, master in zip(state.masters.params, state.masters.masters, strict=True):
        assert torch.equal(master, ours[pieces_of(param)[0].name])
        in_fp8 += is_quantized(param)
    assert in_fp8 == 8
    losses = [step(state, number).loss for number in range(12)]
    assert losses[-1] < losses[0] - 0.1
    for param, master in zip(state.masters.params, state.masters.masters, strict=True):
        if is_quantized(param):
            scale = param._quantizer.scale
            scaled = (master.to(param.dtype).float() * scale).clamp(-448, 448)
            assert torch.equal(param._data, scaled.to(torch.float8_e4m3fn).view(torch.uint8))
            assert scale != 1


def weights_in_fp8(seed: int) -> TrainState:
    """Transformer Engine draws the weights that are thrown away from torch's own generator."""
    torch.manual_seed(seed)
    return te_run(dataclasses.replace(DELAYED, params_in_fp8=True), "bf16")


def save(state: TrainState, root: Path) -> Path:
    return Saver(root, 1, {"config": {}, "data_fingerprint": ""}).save(state)


def no_notice(text: str) -> None:
    raise AssertionError(text)


def test_a_run_with_weights_in_fp8_continues_bit_for_bit(tmp_path: Path) -> None:
    whole = weights_in_fp8(1)
    for number in range(2):
        step(whole, number)
    path = save(whole, tmp_path)
    for number in range(2, 4):
        step(whole, number)
    wanted, masters = tables_of(whole), [m.detach().clone() for m in whole.masters.masters]
    MANAGER.reset()
    continued = weights_in_fp8(3)
    state_dict.load_checkpoint(path, continued, no_notice)
    for number in range(2, 4):
        step(continued, number)
    for name, tensor in tables_of(continued).items():
        assert torch.equal(tensor, wanted[name]), name
    assert all(map(torch.equal, continued.masters.masters, masters))


# --- traces and health ---------------------------------------------------------------------------


def test_an_update_that_was_not_seen_is_no_zero() -> None:
    """A version that updates by another method must not be recorded as amaxes of 0."""
    state = te_run(DELAYED)
    assert isinstance(state.scaling, TeScaling)
    recorded = RecordedTeScaling(state.scaling)
    recorded.close()
    state.scaling = recorded  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no forward update"):
        step(state, 0)


@pytest.mark.parametrize("length", [1, 4])
def test_health_reads_the_tables(length: int, tmp_path: Path) -> None:
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


# --- what is refused, and why --------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "is_other"), [(None, False), ("0", False), ("1", True)])
def test_the_unfused_update_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, is_other: bool
) -> None:
    """It is another rule: two microbatches, of which the second casts no weight. It is refused with
    delayed scaling alone: other recipes have no update."""
    monkeypatch.delenv(UNFUSED_UPDATE, raising=False)
    if asked is not None:
        monkeypatch.setenv(UNFUSED_UPDATE, asked)
    state = te_run(DELAYED)
    step(state, 0)
    table = state.scaling.tables["forward"]
    newest = table.history[table.names.index("layers.0.mlp.fc1.weight"), -1]
    assert bool(newest == 0) is is_other
    for recipe in (DELAYED, Fp8Recipe(name="tensorwise")):
        spec = spec_of("te", recipe)
        precision = dataclasses.replace(spec.precision, te_version=VERSION)
        spec = dataclasses.replace(spec, precision=precision)
        if is_other and recipe is DELAYED:
            with pytest.raises(ConfigError, match="NVTE_UNFUSED_FP8_UPDATE=1"):
                choose.check_backend(spec, torch.device("cpu"))
        else:
            choose.check_backend(spec, torch.device("cpu"))


if NUMBERS >= (2, 15):

    def test_it_dies_of_overrides_that_the_configuration_refuses() -> None:
        state = te_run(Fp8Recipe(name="tensorwise"))
        override = recipes.Float8CurrentScaling(backward_override="high_precision")
        state.scaling.region.recipe = override
        with pytest.raises(AssertionError, match="not implemented in LayerNormMLP"):
            step(state, 0)


def test_a_mask_never_goes_unseen() -> None:
    """Documents are refused before; without that a step fails, under `python -O` too."""
    batch = microbatch(0)
    borders = borders_of(batch.tokens_BS // 50)
    with pytest.raises(RuntimeError, match="got a mask"):
        train_step(te_run(None), [dataclasses.replace(batch, cu_seqlens_N1=borders)])


def test_an_input_without_gradients_never_goes_unseen() -> None:
    """The layer's weights would not be announced, and the end of the step would zero their
    gradients. Without gradients, as in an evaluation, nothing is announced."""
    layer: Any = run_of("te", DELAYED).model.get_submodule("layers.0")
    assert layer.summed_in_products
    x_BSD = torch.ones(2, 16, 32)
    with pytest.raises(AssertionError, match="the layer's input says"):
        layer(x_BSD)
    with torch.no_grad():
        layer(x_BSD)
        assert layer(x_BSD.requires_grad_()) is not None and not x_BSD._backward_hooks


def test_modules_of_a_layer_are_all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that a later version adds must not be trained unseen by checkpoints."""

    class WithMore(te.TransformerLayer):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.extra = nn.Parameter(torch.ones(3))

    names = dataclasses.replace(te_names.import_te(), transformer_layer=WithMore)
    monkeypatch.setattr(te_names, "import_te", lambda: names)
    with pytest.raises(RuntimeError, match="extra"):
        te_run(None)
