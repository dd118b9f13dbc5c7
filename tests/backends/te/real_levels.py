"""FP8-LM's levels over Transformer Engine's own layers: gradients, updates, bytes, checkpoints.

The oracle of the gradients is a run of the same layers whose products add to FP32 sums: what these
give for a microbatch, quantized by the slow specification, is what a level must store.

Bounds against our own engine follow from rounding. A gradient x of a tensor with the amax A, stored
in E4M3 with the largest power of two as scale, is off by at most 2^-4 |x|, or by 2^-10 A / 224
where its number is not normal. Two engines whose FP32 gradients differ by e so store numbers that
differ by at most e and twice that.
"""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megafp8.backends.te.layer import TeLayer, layers_in
from megafp8.backends.te.quantized import is_quantized, memory_of
from megafp8.backends.te.stored_weights import ParameterData
from megafp8.models.init import pieces_of
from megafp8.optim.masters import Masters
from megafp8.parallel.mesh import single_rank
from megafp8.plan.dryrun import held_bytes, rank_share, simulated
from megafp8.specs import Fp8Recipe, RunSpec, StorageSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.precision import ModuleRule
from megafp8.specs.recipes import HIGH_PRECISION
from megafp8.train import state_dict
from megafp8.train.build import build
from megafp8.train.generate import sample
from megafp8.train.nonfinite import first_nonfinite
from megafp8.train.report.header import storage_lines
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, train_step
from megafp8.train.validate import evaluate
from tests.backends.te.real import DELAYED, spec_of, step, tables_of, te
from tests.backends.te.real import forget_other_models as forget_other_models
from tests.backends.te.same_codes import IN_FP32, OF_A_FLIP, run, with_same_codes
from tests.kit.tensors import stored_states
from tests.spec import scaled as spec
from tests.tiny import microbatch

LEVELS = {
    "O1": StorageSpec(main_grads="fp8", main_params="fp16"),
    "O2": StorageSpec(main_grads="fp8", main_params="fp16", exp_avg="fp8", exp_avg_sq="fp16"),
    "O3": StorageSpec(main_grads="fp8", main_params="fp16", exp_avg="fp8", exp_avg_sq="fp16"),
}
BYTES = {"O1": 11, "O2": 6, "O3": 8}  # at O3 it keeps a weight's FP8 bytes in two orientations
TENSORWISE = Fp8Recipe(name="tensorwise", power_2_scale=True)
RECIPES: dict[str, Fp8Recipe | None] = {"delayed": DELAYED, "tensorwise": TENSORWISE}
RECIPES["high precision"] = None


def at_level(
    level: str,
    backend: str = "te",
    fp8: Fp8Recipe | None = DELAYED,
    compute: str = "bf16",
    storage: dict[str, Any] | None = None,
    **changes: Any,
) -> TrainState:
    te.module.base.FP8GlobalStateManager.reset()
    return build(spec_at(level, backend, fp8, compute, storage, **changes), single_rank())


def spec_at(
    level: str,
    backend: str = "te",
    fp8: Fp8Recipe | None = DELAYED,
    compute: str = "bf16",
    storage: dict[str, Any] | None = None,
    **changes: Any,
) -> RunSpec:
    if level == "O3" and fp8 is not None:
        fp8 = replace(fp8, params_in_fp8=True)
    run = spec_of(backend, fp8, compute, **changes)
    few = LEVELS[level] if level in LEVELS else StorageSpec()
    return replace(run, optim=replace(run.optim, storage=replace(few, **(storage or {}))))


def masters_of(state: TrainState) -> Masters:
    return state.masters


def name_of(param: nn.Parameter) -> str:
    return pieces_of(param)[0].name


def grads_of(state: TrainState) -> dict[str, torch.Tensor]:
    """The stored gradients of the linears' weights, in FP32."""
    return {name_of(param): grad.values() for param, grad in masters_of(state).scaled_grads()}


def stored(values: torch.Tensor, name: str) -> torch.Tensor:
    """Values as the specification stores them."""
    return torch.from_numpy(spec.stored(values.numpy(), name))


# --- gradients -----------------------------------------------------------------------------------


def gradients_by_microbatch(state: TrainState, count: int) -> dict[str, list[torch.Tensor]]:
    """Each microbatch's FP32 gradients of the linears, apart: a sum begins anew after each."""
    found: dict[str, list[torch.Tensor]] = {}
    sink, add = state.sink, state.sink.add

    def apart(weight: nn.Parameter, compute: Any) -> torch.Tensor | None:
        added = add(weight, compute)
        if weight in masters_of(state).linears:
            found.setdefault(name_of(weight), []).append(sink.main_grads[weight].total.clone())
            sink.main_grads[weight].is_first = True
        return added

    for layer in layers_in(state.model):
        layer.sink = sink
    sink.add = apart  # type: ignore[method-assign]
    forward_backward(state, [microbatch(index) for index in range(count)])
    return found


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_transformer_engines_by_the_specification(
    recipe: str, recompute: bool
) -> None:
    """Three microbatches: read, add, quantize with a new scale, one rounding each, bit for bit."""
    full = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    changes: dict[str, Any] = {"recompute": full} if recompute else {}
    changes |= {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32}
    fp8 = RECIPES[recipe]
    exact = at_level("O2", fp8=fp8, storage={"main_grads": "fp32"}, **changes)
    by_microbatch = gradients_by_microbatch(exact, 3)
    state = at_level("O2", fp8=fp8, **changes)
    forward_backward(state, [microbatch(index) for index in range(3)])
    found = grads_of(state)
    assert len(found) == 4 and found.keys() == by_microbatch.keys()
    for name, grads in by_microbatch.items():
        assert len(grads) == 3 and grads[0].abs().max() > 0
        expected = stored(grads[0], "fp8")
        for grad in grads[1:]:
            expected = stored(expected + grad, "fp8")
        assert torch.equal(found[name], expected), name


def test_sums_in_fp32_are_quantized_once() -> None:
    sizes = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32}
    batches = [microbatch(index) for index in range(3)]
    exact = at_level("O2", storage={"main_grads": "fp32"}, **sizes)
    forward_backward(exact, batches)
    state = at_level("O2", storage={"sums_in_fp32": True}, **sizes)
    forward_backward(state, batches)
    sums = {name_of(param): grad.total for param, grad in exact.sink.main_grads.items()}
    for name, grad in grads_of(state).items():
        assert torch.equal(grad, stored(sums[name], "fp8")), name


def test_the_update_is_the_specifications_of_transformer_engines_gradients() -> None:
    """Three steps of one weight at O2, from the values that the run has stored at first: its
    gradients, which the optimizer has divided and clipped by their scales, master and moments."""
    state = at_level("O2", num_layers=1, hidden_size=16, ffn_hidden_size=32)
    masters, optimizer = masters_of(state), state.optimizer
    row = next(i for i, param in enumerate(masters.params) if param in masters.linears)
    kinds = ("fp16", "fp8", "fp16")
    used: list[torch.Tensor] = []
    run = optimizer.step

    def noting(number: int) -> None:
        used.append(masters.stored_grads[row].values())
        run(number)

    optimizer.step = noting  # type: ignore[method-assign]
    slow = [masters.stored[row].values().numpy()]
    slow += [np.zeros_like(slow[0])] * 2
    for number in range(3):
        result = step(state, number)
        given = optimizer.spec
        assert used[-1].abs().max() > 0 and result.is_finite
        constants = spec.Adam(result.lr, *given.betas, given.eps, given.weight_decay, False,
                              number + 1)  # fmt: skip
        fresh = spec.adam(slow, used[-1].numpy(), constants)
        slow = [spec.stored(x, kind) for x, kind in zip(fresh, kinds, strict=True)]
        ours = [masters.stored[row], *(stored_states(optimizer, n)[row] for n in
                                       ("exp_avg", "exp_avg_sq"))]  # fmt: skip
        for one, other in zip(ours, slow, strict=True):
            assert torch.equal(one.values(), torch.from_numpy(other))


# --- beside our own engine -----------------------------------------------------------------------


def rounding(x: torch.Tensor) -> torch.Tensor:
    """The most that storing a gradient in E4M3 moves each of its elements."""
    return torch.maximum(x.abs() * 2.0**-4, x.abs().max() * 2.0**-10 / 224)


@pytest.mark.parametrize(
    ("level", "recipe"),
    [(level, recipe) for level in LEVELS for recipe in RECIPES if (level, RECIPES[recipe]) !=
     ("O3", None)],
)  # fmt: skip
def test_the_first_step_is_ours(level: str, recipe: str) -> None:
    """FP32, with the same codes: the loss within 1e-6, and each stored gradient of the first
    microbatch within the roundings of both engines; FP32 gradients agree within 1e-5 of their
    largest."""
    fp8 = RECIPES[recipe]
    theirs, ours = (at_level(level, backend, fp8, "fp32") for backend in ("te", "native"))
    one, other = (partial(forward_backward, each, [microbatch(0)]) for each in (theirs, ours))
    results = (one(), other()) if fp8 is None else with_same_codes(one, other, IN_FP32)
    losses = [loss.item() for loss, _ in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    grads, own = grads_of(theirs), grads_of(ours)
    assert grads.keys() == own.keys() and len(grads) == 8
    for name, grad in grads.items():
        bound = rounding(grad) + rounding(own[name]) + 1e-5 * grad.abs().max()
        assert bool(((grad - own[name]).abs() <= bound * (1 + 2.0**-3)).all()), name


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_blockwise_trains_as_ours_does(level: str) -> None:
    """Its power-of-two scales round nothing, but codes at a tie may be others."""
    recipe = Fp8Recipe(name="blockwise", power_2_scale=True, backward_format="e4m3",
                       fast_accumulation=frozenset())  # fmt: skip
    sizes = {"num_layers": 1, "hidden_size": 128, "ffn_hidden_size": 128}
    theirs, ours = (at_level(level, each, recipe, "fp32", **sizes) for each in ("te", "native"))
    OF_A_FLIP.check(run(theirs, 2), run(ours, 2))


@pytest.mark.parametrize("level", LEVELS)
def test_ten_steps_stay_near_ours(level: str) -> None:
    """Roundings to FP8 may fall the other way: losses within 1e-3, norms within 2 %; and the loss
    falls."""
    theirs, ours = (at_level(level, backend, compute="fp32") for backend in ("te", "native"))
    losses = []
    for number in range(10):
        one, other = step(theirs, number), step(ours, number)
        losses.append(one.loss)
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=2e-2)
    assert losses[-1] < losses[0] - 0.03


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_o3_trains_as_o2_bit_for_bit(recipe: str) -> None:
    """O3 keeps the FP8 weights that O2 makes of its masters in each step."""
    found = []
    for level in ("O2", "O3"):
        state = at_level(level, fp8=RECIPES[recipe])
        assert (sum(map(is_quantized, state.masters.params)) == 8) is (level == "O3")
        found.append([step(state, number) for number in range(4)])
    assert found[0] == found[1]


# --- memory --------------------------------------------------------------------------------------


def live_bytes() -> int:
    """The bytes of all tensors of this process that are alive, each memory once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):  # asking the object may warn
            for memory in memory_of(found):
                storage = memory.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def made_at(level: str, recipe: Fp8Recipe) -> tuple[TrainState, int]:
    """A run after one step, and the bytes of the tensors that it has made and that are alive."""
    before = live_bytes()
    state = at_level(level, fp8=recipe, hidden_size=64, ffn_hidden_size=256)
    step(state, 0)
    return state, live_bytes() - before


@pytest.mark.parametrize("level", LEVELS)
def test_bytes_a_linear_parameter_are_the_tables(level: str) -> None:
    """What the header counts, and what all live tensors of the process show after a step: the
    difference from Transformer Engine's own memory at O0, for linears and for the rest."""
    recipe = replace(DELAYED, params_in_fp8=level == "O3")
    made_at("O0", recipe)  # Transformer Engine makes its workspace once
    state, few = made_at(level, recipe)
    (line,) = storage_lines(spec_at(level), state)
    assert line.endswith(f" {BYTES[level]}.0 bytes a parameter of the linears")
    linear = sum(param.numel() for param in masters_of(state).linears)
    rest = sum(param.numel() for param in state.masters.params) - linear
    _, whole = made_at("O0", recipe)
    # FP32 masters, gradients and moments, and a weight in BF16 or in two orientations of FP8
    less = (18 - BYTES[level]) * linear + (0 if level == "O1" else 5 * rest)
    assert whole - few == pytest.approx(less, abs=2048)  # scales take 4 bytes a tensor


@pytest.mark.parametrize("level", LEVELS)
def test_a_dry_run_holds_the_bytes_of_a_run(level: str) -> None:
    """All but the scales; at O1 and O2 also as our own engine holds them."""
    run = spec_at(level)
    held = held_bytes(at_level(level))
    ours = held_bytes(at_level(level, "native"))
    with simulated(run, 0) as state:
        dry = held_bytes(state)
    for kind in ("weights", "masters", "moments", "gradients"):
        live = getattr(held, kind)
        assert getattr(dry, kind) == live > 0, kind
        if level != "O3" or kind != "weights":
            assert getattr(ours, kind) == live, kind


def test_a_run_after_a_dry_run_updates_its_scales() -> None:
    """A region that the dry run left open would count as one around those of the run."""
    found = []
    run = spec_at("O2")  # on a CPU Transformer Engine keeps a mask with values, of another run
    on_gpu = replace(run, parallel=replace(run.parallel, accelerator="gpu"))
    for _ in range(2):
        state = at_level("O2")
        found.append((step(state, 0), step(state, 1), tables_of(state)["forward/quant_scale"]))
        rank_share(on_gpu, 0)
    assert found[0][:2] == found[1][:2]
    assert found[0][2].equal(found[1][2]) and not found[0][2].eq(1).all()


def test_one_layers_fp32_gradients_are_held_at_a_time() -> None:
    state = at_level("O2", num_layers=3)
    weights = [weight for layer in layers_in(state.model) for weight in layer.weights]
    seen = []

    def held() -> list[int]:
        lent = [weight.main_grad.untyped_storage().nbytes() for weight in weights]
        return [index // 4 for index, size in enumerate(lent) if size]

    for layer in layers_in(state.model):
        begin = layer.begin_products

        def noting(begin: Any = begin) -> None:
            begin()
            seen.append(held())

        layer.begin_products = noting
    step(state, 0)
    assert seen == 2 * [[2] * 4, [1] * 4, [0] * 4]
    assert held() == []


def test_values_are_there_where_they_are_read() -> None:
    """In FP8 for the first microbatch of a step alone; in high precision for both passes; and a
    parameter has its stored bits otherwise."""
    rules = (ModuleRule("layers.1.*", HIGH_PRECISION),)
    state = at_level("O2", fp8=replace(DELAYED, modules=rules))
    in_fp8, in_bf16 = layers_in(state.model)
    found: dict[int, list[ParameterData]] = {0: [], 1: []}
    for layer in (in_fp8, in_bf16):
        put = layer.stored.hold

        def noting(what: ParameterData, layer: TeLayer = layer, put: Any = put) -> None:
            put(what)
            found[layer.index].append(what)

        layer.stored.hold = noting  # type: ignore[method-assign]
    forward_backward(state, [microbatch(0), microbatch(1)])
    values, shape, nothing = ParameterData.VALUES, ParameterData.SHAPE, ParameterData.STORED_BITS
    assert found[0] == [values, nothing, *3 * [shape, nothing]]
    assert found[1] == 4 * [values, nothing]
    for param, own in masters_of(state).own_weights.items():
        assert param.data_ptr() == own.payload.data_ptr() and param.dtype == torch.float16


# --- runs ----------------------------------------------------------------------------------------


def save(state: TrainState, root: Path) -> Path:
    return Saver(root, 1, {"config": {}, "data_fingerprint": ""}).save(state)


def no_notice(text: str) -> None:
    raise AssertionError(text)


def stored_tensors(state: TrainState) -> list[torch.Tensor]:
    optimizer = state.optimizer
    kinds = [
        masters_of(state).stored,
        *(stored_states(optimizer, n) for n in ("exp_avg", "exp_avg_sq")),
    ]
    return [tensor.values() for each in kinds for tensor in each]


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_continues_bit_for_bit(level: str, tmp_path: Path) -> None:
    dither = {"stochastic_rounding": True}
    whole = at_level(level, storage=dither)
    losses = [step(whole, number).loss for number in range(5)]
    tables, tensors = tables_of(whole), stored_tensors(whole)
    begun = at_level(level, storage=dither)
    assert [step(begun, number).loss for number in range(3)] == losses[:3]
    path = save(begun, tmp_path)
    torch.manual_seed(7)  # Transformer Engine draws weights that are never used
    continued = at_level(level, storage=dither)
    state_dict.load_checkpoint(path, continued, no_notice)
    assert [step(continued, number).loss for number in (3, 4)] == losses[3:]
    for name, tensor in tables_of(continued).items():
        assert torch.equal(tensor, tables[name]), name
    assert all(map(torch.equal, stored_tensors(continued), tensors))


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_goes_to_our_level_and_back(level: str, tmp_path: Path) -> None:
    """te → native → te without a step in between: all that is saved is the same, nothing is
    converted, and the next step is the same."""
    first = at_level(level)
    for number in range(3):
        step(first, number)
    tables, path = tables_of(first), save(first, tmp_path / "te")
    names = [name_of(param) for param in first.masters.params]
    payloads = [own.payload.clone() for own in masters_of(first).stored]
    expected = step(first, 3)
    native = at_level(level, "native")
    state_dict.load_checkpoint(path, native, no_notice)
    last = at_level(level)
    state_dict.load_checkpoint(save(native, tmp_path / "native"), last, no_notice)
    by_name = dict(zip(names, payloads, strict=True))
    for each in (native, last):
        for name, tensor in tables_of(each).items():
            assert torch.equal(tensor, tables[name]), name
        for param, found in zip(each.masters.params, masters_of(each).stored, strict=True):
            assert torch.equal(found.payload, by_name[name_of(param)])
    assert step(last, 3) == expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_changes_no_bit(recipe: str) -> None:
    """Of one layer, and of two as one, with dropout."""
    found = []
    for num_layers in (0, 1, 2):
        full = RecomputeSpec(granularity="full", method="uniform", num_layers=num_layers)
        changes: dict[str, Any] = {"recompute": full} if num_layers else {}
        state = at_level("O2", fp8=RECIPES[recipe], hidden_dropout=0.1, **changes)
        found.append([step(state, number) for number in range(3)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("in_fp8", [True, False], ids=["FP8", "BF16"])
def test_evaluation_leaves_training_alone(in_fp8: bool) -> None:
    recipe = replace(DELAYED, fp8_in_evaluation=in_fp8)
    found = []
    for evaluates in (False, True):
        state = at_level("O2", fp8=recipe)
        results = []
        for number in range(3):
            results.append(step(state, number))
            if evaluates:
                evaluate(state, [microbatch(9)])
                sample(state, [1, 2, 3], 2, vocab_size=96, temperature=1.0, seed=1)
        found.append(results)
    assert found[0] == found[1]


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_that_is_not_finite_skips_the_step_and_is_named(level: str) -> None:
    state = at_level(level)
    step(state, 0)
    before = stored_tensors(state)
    layer = layers_in(state.model)[0]
    victim, begin = layer.weights[2], layer.begin_products

    def spoiled() -> None:
        """The first microbatch's product overwrites it, and the second one's adds to it."""
        begin()
        victim.main_grad[0, 0] = math.nan

    layer.begin_products = spoiled
    batches = [microbatch(2), microbatch(3)]
    assert not train_step(state, batches).is_finite
    layer.begin_products = begin
    assert first_nonfinite(state, batches) == f"gradient of {name_of(victim)}"
    assert all(map(torch.equal, stored_tensors(state), before))
    assert train_step(state, batches).is_finite
