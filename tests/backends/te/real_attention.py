"""The scales of Transformer Engine's attention in FP8, without the kernels that compute it.

Attention itself runs in high precision here, as a CPU has no such kernels. Its scales and histories
are allocated, updated and saved by the same Python as on a GPU; the tests put amaxes into them.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.backends.te import backend as te_backend
from megafp8.backends.te import recipe as te_recipe
from megafp8.backends.te.names import import_te
from megafp8.specs.precision import AttentionInFp8
from megafp8.train import state_dict
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from tests.backends.te.real import DELAYED, recipes, run_of, step, te
from tests.backends.te.real import forget_other_models as forget_other_models

MANAGER = te.module.base.FP8GlobalStateManager
FUSED: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
# Our name, and Transformer Engine's own constant for the column.
CORE = {
    "forward": {"qkv": "META_QKV", "output": "META_O", "scores": "META_S"},
    "backward": {"grad_qkv": "META_DQKV", "grad_output": "META_DO", "grad_scores": "META_DP"},
}
KEYS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
OUTPUT_OF_QKV, GRAD_OF_PROJECTION = "forward/{}.qkv.output", "backward/{}.projection.grad_input"


def run_with(attention: AttentionInFp8, monkeypatch: pytest.MonkeyPatch) -> TrainState:
    """A run whose attention has scales, and whose recipe object does not ask for its kernels."""
    MANAGER.reset()
    made = te_recipe.make_te_recipe
    with monkeypatch.context() as patch:
        patch.setattr(te_backend, "attention_in_fp8", lambda spec, device: attention)
        patch.setattr(te_recipe, "make_te_recipe", lambda recipe, module, _: made(recipe, module))
        return run_of("te", DELAYED)


def core(state: TrainState, layer: int = 0) -> Any:
    return state.model.get_submodule(f"layers.{layer}.layer.self_attention.core_attention")


def names_of(state: TrainState) -> set[str]:
    tables = state.scaling.tables
    return {f"{direction}/{name}" for direction in KEYS for name in tables[direction].names}  # type: ignore[index]


def both_layers(row: str) -> set[str]:
    return {row.format(f"layers.{layer}.attention") for layer in range(2)}


def test_the_recipe_object_asks_for_it() -> None:
    wanted: dict[AttentionInFp8, tuple[bool, bool]] = {
        "none": (False, False), "core": (True, False), "whole": (True, True),
    }  # fmt: skip
    for attention, flags in wanted.items():
        made = te_recipe.make_te_recipe(DELAYED, recipes, attention)
        assert (made.fp8_dpa, made.fp8_mha) == flags


def test_each_tensor_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, with_core, whole = (
        names_of(run_with(asked, monkeypatch)) for asked in ("none", "core", "whole")
    )
    of_core = {
        f"{direction}/layers.{layer}.attention.core.{role}"
        for direction, roles in CORE.items()
        for role in roles
        for layer in range(2)
    }
    assert with_core - plain == of_core | both_layers(GRAD_OF_PROJECTION)
    assert whole - with_core == both_layers(OUTPUT_OF_QKV)


class AskedError(Exception):
    """Attention's linears were asked; the rest of the step needs cuDNN."""


@pytest.mark.parametrize("positions", ["none", "rope"])
@pytest.mark.parametrize("attention", ["none", "core", "whole"])
def test_linears_that_are_asked_for_fp8_have_a_row(
    attention: AttentionInFp8, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine's own code asks its QKV linear for an FP8 output and the projection for an
    FP8 gradient. What it quantizes so has a row in our tables. With rotary positions it does not
    ask the first, for which reason settings with both are refused."""
    MANAGER.reset()
    with monkeypatch.context() as patch:
        patch.setattr(te_backend, "attention_in_fp8", lambda spec, device: attention)
        state = run_of("te", DELAYED, position_embedding_type=positions)
    module: Any = state.model.get_submodule("layers.0.layer.self_attention")
    if "fp8_output" not in inspect.signature(module.core_attention.forward).parameters:
        pytest.skip("this version's kernel decides about the output of attention")
    asked, inputs, qkv = {}, [], module.layernorm_qkv.forward

    def of_qkv(x: torch.Tensor, *args: Any, fp8_output: bool, **kwargs: Any) -> Any:
        asked[OUTPUT_OF_QKV] = fp8_output
        inputs.append(x)
        return qkv(x, *args, **kwargs)

    def of_core(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros_like(inputs[-1])

    def of_projection(*args: Any, fp8_grad: bool, **kwargs: Any) -> None:
        asked[GRAD_OF_PROJECTION] = fp8_grad
        raise AskedError

    monkeypatch.setattr(module.layernorm_qkv, "forward", of_qkv)
    monkeypatch.setattr(module.core_attention, "forward", of_core)
    monkeypatch.setattr(module.proj, "forward", of_projection)
    with pytest.raises(AskedError):
        step(state, 0)
    MANAGER.reset()
    assert asked[OUTPUT_OF_QKV] == (attention == "whole" and positions != "rope")
    assert asked[GRAD_OF_PROJECTION] == (attention != "none")
    for row, is_fp8 in asked.items():
        assert not is_fp8 or both_layers(row) <= names_of(state), row


def test_amaxes_of_attention_reach_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Transformer Engine's own update, in the columns that its own constants name. The largest
    number of E4M3 is 448, that of E5M2 57344."""
    state = run_with("core", monkeypatch)
    largest = {"forward": 448.0, "backward": 57344.0}
    staged = {}
    for direction, roles in CORE.items():
        for place, (role, constant) in enumerate(roles.items()):
            meta = core(state).fp8_meta[KEYS[direction]]
            staged[direction, role] = amax = 2.0 ** (place + 1)
            meta.amax_history[0, int(getattr(FUSED, constant))] = amax
    step(state, 0)
    for (direction, role), amax in staged.items():
        table = state.scaling.tables[direction]  # type: ignore[index]
        row = table.names.index(f"layers.0.attention.core.{role}")
        assert table.history[row].max() == amax
        assert table.quant_scale[row] == largest[direction] / amax
        assert table.num_updates[row] == 2  # of two microbatches
        other = table.names.index(f"layers.1.attention.core.{role}")
        assert table.history[other].max() == 0 and table.quant_scale[other] == 1


def test_scales_of_attention_are_in_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each used column comes back, of scales and histories; those that no tensor uses do not."""
    saved = run_with("whole", monkeypatch)
    step(saved, 0)
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        for key in KEYS.values():
            meta = core(saved, layer).fp8_meta[key]
            meta.scale.copy_(torch.rand(meta.scale.shape, generator=generator))
            meta.amax_history.copy_(torch.rand(meta.amax_history.shape, generator=generator))
            meta.amax_history[0] = 0  # nothing is staged when a step has ended
    path = Saver(tmp_path, 2, {"config": {}, "data_fingerprint": ""}).save(saved)
    loaded = run_with("whole", monkeypatch)

    def no_notice(text: str) -> None:
        raise AssertionError(text)

    state_dict.load_checkpoint(path, loaded, no_notice)
    for layer in range(2):
        for direction, roles in CORE.items():
            columns = [int(getattr(FUSED, constant)) for constant in roles.values()]
            wanted, found = (core(s, layer).fp8_meta[KEYS[direction]] for s in (saved, loaded))
            assert torch.equal(found.scale[columns], wanted.scale[columns])
            assert torch.equal(found.amax_history[:, columns], wanted.amax_history[:, columns])
            assert (found.scale[columns] != 1).all()
    of_linear = import_te().forward_index.GEMM1_OUTPUT
    module = saved.model.get_submodule("layers.0.layer.self_attention.layernorm_qkv")
    assert module.fp8_meta["scaling_fwd"].scale[int(of_linear)] == 1  # no kernel wrote an amax


def test_products_of_attention_count_as_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for asked in ("none", "core"):
        state = run_with(asked, monkeypatch)  # type: ignore[arg-type]
        step(state, 0)
        flops = state.counter.flops
        found[asked] = {dtype: n for (dtype, place), n in flops.items() if place == "attention"}
    assert found["core"] == {"fp8": found["none"]["fp32"]}
