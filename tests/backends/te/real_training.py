"""Training with Transformer Engine's own classes beside our own engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.te_trace import RecordedTeScaling, cast_sample
from benchmarks.traces import replay
from fp8_numerics.formats import E4M3
from megafp8.backends import choose
from megafp8.backends.te.layer import TeLayer
from megafp8.backends.te.state import TeScaling
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.models.gpt import GPT
from megafp8.models.init import pieces_of
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.parallel.mesh import Mesh, simulated_rank, single_rank
from megafp8.specs import Fp8Recipe, RunSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.precision import AutoBackend, ModuleRule
from megafp8.specs.recipes import HIGH_PRECISION
from megafp8.train import state_dict
from megafp8.train.build import build
from megafp8.train.generate import sample
from megafp8.train.report.fp8 import share_of
from megafp8.train.report.header import precision_of
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.step import StepResult, forward_backward, train_step
from megafp8.train.validate import evaluate
from te_cpu.tensors import is_quantized
from tests.backends.te.real import (
    DELAYED,
    VERSION,
    need_head_norms,
    run_of,
    spec_of,
    step,
    tables_of,
    te,
)
from tests.backends.te.real import forget_other_models as forget_other_models
from tests.backends.te.same_codes import (
    IN_BF16,
    IN_FP32,
    OF_A_FLIP,
    Bounds,
    check_together,
    run,
)
from tests.tiny import microbatch

PRESETS = Path(__file__).parents[3] / "conf/model"


RECIPES = {
    "max": DELAYED,
    "most recent, margin": Fp8Recipe(
        amax_history_len=3, amax_compute_algo="most_recent", margin=1, backward_format="e4m3"
    ),
    "length 1": Fp8Recipe(amax_history_len=1),
    "weights in fp8": dataclasses.replace(DELAYED, params_in_fp8=True),
    "second layer out": dataclasses.replace(
        DELAYED, modules=(ModuleRule("layers.1.*", HIGH_PRECISION),)
    ),
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"num_query_groups": 2, "bias": False, "activation": "swiglu",
              "normalization": "rmsnorm"},
    "qwen3": {"num_query_groups": 2, "bias": False, "activation": "swiglu", "kv_channels": 16,
              "normalization": "rmsnorm", "position_embedding_type": "rope",
              "qk_layernorm": True},
    "normalized queries and keys": {"qk_layernorm": True},
    "rope": {"position_embedding_type": "rope"},
    "rope in part, interpolated": {"position_embedding_type": "rope", "rotary_percentage": 0.5,
                                   "rotary_base": 500.0, "seq_len_interpolation_factor": 2.0},
    "alibi": {"position_embedding_type": "alibi"},
    "alibi, six heads": {"position_embedding_type": "alibi", "num_attention_heads": 6,
                         "kv_channels": 8},
    "layernorm1p": {"layernorm_zero_centered_gamma": True},
    "zero-centered rmsnorm": {"layernorm_zero_centered_gamma": True, "normalization": "rmsnorm"},
    "geglu": {"activation": "geglu-tanh"},
    "squared relu, wide heads": {"activation": "squared-relu", "kv_channels": 16},
}  # fmt: skip


def assert_same_tables(te_state: TrainState, native: TrainState, rtol: float) -> None:
    theirs, ours = tables_of(te_state), tables_of(native)
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(tensor, ours[name], rtol=rtol, atol=1e-30, msg=name)


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [*((recipe, "gpt") for recipe in RECIPES), *(("max", shape) for shape in list(SHAPES)[1:])],
)
def test_the_first_update_is_ours(recipe: str, shape: str) -> None:
    """FP32, with the same codes: loss, gradient norm, every scale and history of a step of two
    microbatches; what is counted at the products equals ours, operation by operation."""
    changes = SHAPES[shape]
    if changes.get("qk_layernorm"):
        need_head_norms()
    theirs, ours = (run_of(backend, RECIPES[recipe], **changes) for backend in ("te", "native"))
    check_together(theirs, ours, 1, IN_FP32)
    assert isinstance(theirs.scaling, TeScaling)
    assert dict(theirs.counter.flops) == dict(ours.counter.flops)


@pytest.mark.parametrize(("compute", "bounds"), [("fp32", IN_FP32), ("bf16", IN_BF16)])
def test_ten_steps_stay_together(compute: str, bounds: Bounds) -> None:
    """With the same codes; in BF16 its fused kernels take amax and cast from FP32 where ours round
    to BF16 first."""
    check_together(*(run_of(each, DELAYED, compute) for each in ("te", "native")), 10, bounds)


def test_the_first_step_stays_near_with_codes_of_its_own() -> None:
    theirs, ours = (run(run_of(each, DELAYED), 1) for each in ("te", "native"))
    OF_A_FLIP.check(theirs, ours)


def scale_is_off(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 3 %, of one tensor's gradients, from the start on."""
    state.scaling.tables["backward"].quant_scale[2] *= 1.03
    assert isinstance(state.scaling, TeScaling)
    state.scaling.push()


def update_is_skipped(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of forward amaxes, after the third microbatch."""
    manager = te.module.base.FP8GlobalStateManager
    update, calls = vars(manager)["reduce_and_update_fp8_tensors"], []

    def third_is_none(cls: Any, forward: bool = True) -> None:
        calls.append(forward)
        if not forward or calls.count(True) != 3:
            update.__func__(cls, forward)

    monkeypatch.setattr(manager, "reduce_and_update_fp8_tensors", classmethod(third_is_none))


@pytest.mark.parametrize("plant", [scale_is_off, update_is_skipped])
def test_a_wrong_scale_and_a_missing_update_are_found(
    plant: Callable[[TrainState, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = run_of("te", DELAYED), run_of("native", DELAYED)
    plant(theirs, monkeypatch)
    with pytest.raises(AssertionError):
        check_together(theirs, ours, 3, IN_FP32)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_model_is_the_exact_one(shape: str) -> None:
    """FP32 without FP8 against the plain parts in FP64: the loss within 1e-6, and every gradient
    within 1e-5 of its largest number."""
    if SHAPES[shape].get("qk_layernorm"):
        need_head_norms()
    state = run_of("te", None, **SHAPES[shape])
    spec = spec_of("te", None, **SHAPES[shape]).model
    exact = GPT(Parts(spec, torch.float64, 1234, RandomStreams(1234)))
    ours = {}
    for param in state.model.parameters():
        for piece in pieces_of(param):
            ours[piece.name] = (param, piece.local)
    with torch.no_grad():
        for param in exact.parameters():
            for piece in pieces_of(param):
                source, local = ours[piece.name]
                param[piece.local] = source.detach()[local].double()
    batch = microbatch(0)
    tokens, targets = torch.from_numpy(batch.tokens_BS), torch.from_numpy(batch.targets_BS)
    exact_loss = exact(tokens, targets)
    exact_loss.backward()
    loss, _ = forward_backward(state, [batch])
    assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-6)
    state.masters.collect_grads()
    found = dict(zip(state.masters.params, state.masters.param_grads, strict=True))
    for param in exact.parameters():
        assert param.grad is not None
        for piece in pieces_of(param):
            source, local = ours.pop(piece.name)
            wanted, got = param.grad[piece.local], found[source][local].double()
            bound = 1e-5 * wanted.abs().max() + 1e-8  # that of the keys' bias is 0
            assert (got - wanted).abs().max() <= bound, piece.name
    assert not ours


EXPERTS = {"moe_tiny", "mixtral_8x7b", "qwen3_30b_a3b"}  # Transformer Engine's layers have none


@pytest.mark.parametrize("preset", sorted({path.stem for path in PRESETS.glob("*.yaml")} - EXPERTS))
def test_presets_build(preset: str) -> None:
    """Every preset in full width on the meta device, in FP8, with as many parameters as ours.

    Layers that are built alike are eleven at most: a number of two digits is among them.
    """
    if preset.startswith("qwen3"):
        need_head_norms()
    counts = []
    for backend in ("te", "native"):
        loaded = load(
            [
                f"model={preset}",
                "model.fp8=True",
                f"model.fp8_backend={backend}",
                "trainer.accelerator=cpu",
                *([f"model.te_version={VERSION}"] if backend == "te" else []),
                "model.tensor_model_parallel_size=1",
            ]
        )
        spec = resolve(loaded, lambda: False)
        layers = min(11, spec.model.num_layers)
        model = dataclasses.replace(spec.model, vocab_size=1024, num_layers=layers)
        spec = dataclasses.replace(spec, model=model)
        choose.check_backend(spec, torch.device("cpu"))
        with simulated_rank(spec.parallel, 0) as mesh:
            state = build(spec, mesh)
        pieces = [piece for param in state.model.parameters() for piece in pieces_of(param)]
        counts.append({(piece.name, piece.global_shape) for piece in pieces})
        layers = [module for module in state.model.modules() if isinstance(module, TeLayer)]
        assert len(layers) == (spec.model.num_layers if backend == "te" else 0)
    assert counts[0] == counts[1]


RECOMPUTED = {
    "core": RecomputeSpec(granularity="selective", method="uniform", num_layers=1),
    "core of one layer": RecomputeSpec(granularity="selective", method="block", num_layers=1),
    "layers": RecomputeSpec(granularity="full", method="uniform", num_layers=1),
    "both layers as one": RecomputeSpec(granularity="full", method="uniform", num_layers=2),
    "one layer": RecomputeSpec(granularity="full", method="block", num_layers=1),
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
ROTATED: dict[str, Any] = DROPOUT | {"position_embedding_type": "rope"}


@contextmanager
def counted_updates() -> Iterator[list[str]]:
    """The name of each kernel that updates histories and scales, as it is called."""
    manager = te.module.base.FP8GlobalStateManager
    found, update = [], vars(manager)["reduce_and_update_fp8_tensors"]

    def counted(cls: Any, forward: bool = True) -> None:
        found.append("forward" if forward else "backward")
        update.__func__(cls, forward)

    manager.reduce_and_update_fp8_tensors = classmethod(counted)
    try:
        yield found
    finally:
        manager.reduce_and_update_fp8_tensors = update


class Kept(NamedTuple):
    """What three steps of a run that keeps its activations have made."""

    results: list[StepResult]
    tables: dict[str, Any]
    masters: list[torch.Tensor]
    updates: list[str]
    flops: dict[Any, int]


@cache
def kept_activations(shape: str) -> Kept:
    te.module.base.FP8GlobalStateManager.reset()
    kept = run_of("te", DELAYED, "bf16", **SHAPES[shape], **ROTATED)
    with counted_updates() as updates:
        results = [step(kept, number) for number in range(3)]
    masters = [m.detach().clone() for m in kept.masters.masters]
    te.module.base.FP8GlobalStateManager.reset()
    return Kept(results, tables_of(kept), masters, updates, dict(kept.counter.flops))


@pytest.mark.parametrize("recompute", RECOMPUTED.values(), ids=RECOMPUTED)
@pytest.mark.parametrize("shape", ["gpt", "llama"])
def test_recomputation_changes_no_bit(shape: str, recompute: RecomputeSpec) -> None:
    """BF16 with dropout and rotary positions: losses, norms, weights, scales and histories are
    those of a run that keeps its activations. Amaxes are reduced as often as without, but for
    Transformer Engine's own recomputation of attention's core, which asks for one forward update
    more a layer, in which nothing is staged."""
    kept = kept_activations(shape)
    again = run_of("te", DELAYED, "bf16", recompute=recompute, **(SHAPES[shape] | ROTATED))
    with counted_updates() as updates_again:
        assert [step(again, number) for number in range(3)] == kept.results
    for name, tensor in tables_of(again).items():
        assert torch.equal(tensor, kept.tables[name]), name
    assert all(map(torch.equal, again.masters.masters, kept.masters))
    layers = 1 if recompute.method == "block" else 2
    more = 6 * layers if recompute.granularity == "selective" else 0
    assert kept.updates == ["forward", "backward"] * 6
    assert updates_again.count("backward") == 6 and updates_again.count("forward") == 6 + more
    counted, counted_again = kept.flops, again.counter.flops
    assert counted_again["bf16", "attention"] > counted["bf16", "attention"]
    is_full = recompute.granularity == "full"
    assert (counted_again["fp8", "output"] > counted["fp8", "output"]) is is_full
    assert counted_again["fp8", "grad_input"] == counted["fp8", "grad_input"]


@pytest.mark.parametrize(
    ("fp8", "changes"),
    [
        (None, SHAPES["llama"]),
        (Fp8Recipe(name="tensorwise"), {}),
        (RECIPES["second layer out"], SHAPES["llama"]),
    ],
    ids=["bf16", "tensorwise", "second layer out"],
)
def test_recomputation_of_other_recipes(fp8: Fp8Recipe | None, changes: dict[str, Any]) -> None:
    changes = changes | DROPOUT
    kept = run_of("te", fp8, "bf16", **changes)
    again = run_of("te", fp8, "bf16", recompute=RECOMPUTED["layers"], **changes)
    wanted = []
    for state in (kept, again):
        te.module.base.FP8GlobalStateManager.reset()
        wanted.append([step(state, number) for number in range(2)])
    assert wanted[0] == wanted[1]


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_recipes_without_a_state(name: str) -> None:
    """Power-of-two scales: no product's scale is rounded, so the first step agrees but for codes at
    a tie. With the same codes three steps do; columns of blocks are cast transposed there."""
    if name == "blockwise" and VERSION.startswith("2.4"):
        pytest.skip("sizes that are no multiple of 128 are not taken")
    recipe = Fp8Recipe(name=name, backward_format="e4m3" if name == "blockwise" else "e5m2",
                       power_2_scale=True)  # fmt: skip
    recipe = dataclasses.replace(recipe, fast_accumulation=frozenset())
    OF_A_FLIP.check(*(run(run_of(each, recipe), 1) for each in ("te", "native")))
    if name == "tensorwise":
        check_together(run_of("te", recipe), run_of("native", recipe), 3, IN_FP32)


@pytest.mark.parametrize("fp8", [None, DELAYED], ids=["BF16", "FP8"])
@pytest.mark.parametrize("recompute", [False, True])
def test_products_add_gradients_to_fp32_sums(fp8: Fp8Recipe | None, recompute: bool) -> None:
    """The sums of two microbatches have what BF16 cannot hold. Gradients that autograd returns in
    BF16, of which each is rounded once, are near them: within 2**-8 of each of the two."""
    full = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    changes = {"recompute": full} if recompute else {}
    sums = []
    for in_products in (True, False):
        te.module.base.FP8GlobalStateManager.reset()
        state = run_of("te", fp8, "bf16", **changes)
        if not in_products:
            for layer in (
                module for module in state.model.modules() if isinstance(module, TeLayer)
            ):
                layer.summed_in_products = []
                for module in layer.modules():
                    if hasattr(module, "fuse_wgrad_accumulation"):
                        module.fuse_wgrad_accumulation = False
        forward_backward(state, [microbatch(0), microbatch(1)])
        weights = [
            param
            for name, param in state.model.named_parameters()
            if name.startswith("layers.") and param.dim() == 2
        ]
        assert len(weights) == 8
        sums.append([state.sink.main_grads[weight].total.clone() for weight in weights])
    for exact, rounded in zip(*sums, strict=True):
        assert not torch.equal(exact, exact.bfloat16().float())
        bound = 2**-7 * exact.abs().max()
        assert float((exact - rounded).abs().max()) <= float(bound)
        assert not torch.equal(exact, rounded)


def test_the_share_that_is_planned_is_counted() -> None:
    state = run_of("te", DELAYED)
    step(state, 0)
    share = share_of(spec_of("te", DELAYED), state)
    flops = state.counter.flops
    gemms = sum(n for (_, place), n in flops.items() if place != "attention")
    fp8 = sum(n for (precision, _), n in flops.items() if precision == "fp8")
    assert share is not None and share.share == pytest.approx(fp8 / gemms, rel=1e-12)
    assert 0 < fp8 < gemms


def test_what_does_not_run_in_fp8_is_not_counted_as_such() -> None:
    """A region that is closed although FP8 was asked for: the products tell."""
    state = run_of("te", DELAYED)
    state.scaling.begin_microbatch = lambda *numbers: None  # type: ignore[method-assign]
    step(state, 0)
    assert {precision for precision, _ in state.counter.flops} == {"fp32"}


@pytest.mark.parametrize("in_fp8", [True, False])
def test_evaluation_is_counted_as_it_runs(in_fp8: bool) -> None:
    state = run_of("te", dataclasses.replace(DELAYED, fp8_in_evaluation=in_fp8))
    evaluate(state, [microbatch(9)])
    assert (("fp8", "output") in state.counter.flops) is in_fp8


def test_bf16_layers_are_counted_as_bf16() -> None:
    state = run_of("te", None, "bf16")
    step(state, 0)
    assert {precision for precision, _ in state.counter.flops} == {"bf16"}


def save(state: TrainState, root: Path) -> Path:
    return Saver(root, 1, {"config": {}, "data_fingerprint": ""}).save(state)


def no_notice(text: str) -> None:
    raise AssertionError(text)


def run_alone(recipe: Fp8Recipe, compute: str, seed: int) -> TrainState:
    """A run whose scales no other run of this process updates any more.

    Transformer Engine draws initial weights from torch's own generator and throws them away.
    """
    te.module.base.FP8GlobalStateManager.reset()
    torch.manual_seed(seed)
    return run_of("te", recipe, compute)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("recipe", [DELAYED, RECIPES["weights in fp8"]], ids=["", "fp8_params"])
def test_a_run_continues_bit_for_bit(recipe: Fp8Recipe, compute: str, tmp_path: Path) -> None:
    whole = run_alone(recipe, compute, seed=1)
    losses = [step(whole, number).loss for number in range(5)]
    tables = tables_of(whole)
    begun = run_alone(recipe, compute, seed=2)
    assert [step(begun, number).loss for number in range(3)] == losses[:3]
    path = save(begun, tmp_path)
    continued = run_alone(recipe, compute, seed=3)
    state_dict.load_checkpoint(path, continued, no_notice)
    assert [step(continued, number).loss for number in (3, 4)] == losses[3:]
    for name, tensor in tables_of(continued).items():
        assert torch.equal(tensor, tables[name]), name
    for one, other in zip(whole.masters.masters, continued.masters.masters, strict=True):
        assert torch.equal(one, other)


def test_its_own_initialization_leaves_no_amax() -> None:
    """With weights in FP8, Transformer Engine casts its own initial weights, and their amaxes would
    enter the histories. Those that wait for the first update are those of our weights alone."""
    recipe = RECIPES["weights in fp8"]
    native, state = run_of("native", recipe, "bf16"), run_alone(recipe, "bf16", seed=1)
    assert sum(map(is_quantized, state.masters.params)) == 8
    ours, theirs = (each.scaling.tables["forward"] for each in (native, state))
    is_weight = torch.tensor([name.endswith("weight") for name in ours.names])
    assert ours.names == theirs.names and theirs.amax[is_weight].min() > 0
    assert torch.equal(theirs.amax, ours.amax)


@pytest.mark.parametrize("name", ["max", "most recent, margin", "weights in fp8"])
def test_a_trace_of_it_replays(name: str) -> None:
    """What the recorder reads out of Transformer Engine's own tensors runs through our tables bit
    for bit, and its quantizer's bytes are those of our cast."""
    state = run_of("te", RECIPES[name])
    assert isinstance(state.scaling, TeScaling)
    state.scaling = recorded = RecordedTeScaling(state.scaling, history_every=2)  # type: ignore[assignment]
    for number in range(4):
        step(state, number)
        evaluate(state, [microbatch(99)])
    recorded.close()
    trace = recorded.trace
    assert (trace.engine, trace.version) == ("transformer_engine", VERSION)
    assert {d: len(a) for d, a in trace.amax.items()} == {"forward": 8, "backward": 8}
    weight = trace.names["forward"].index("layers.1.mlp.fc2.weight")
    assert [bool(amax[weight] > 0) for amax in trace.amax["forward"]] == [True, False] * 4
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    x[0, :4] = torch.tensor([0.0, 448.0, -1e4, 1e-9])
    trace.samples.append(cast_sample(trace, "layers.0.mlp.fc1.input", x, E4M3))
    assert replay(trace) == []
    trace.amax["backward"][3][0] *= 1.01
    assert replay(trace)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_an_amax_that_comes_again_is_recorded(length: int) -> None:
    """One microbatch again and again at a learning rate of 0: windows are soon full of one amax and
    no longer move, and each update is given that amax all the same."""
    state = run_of("te", dataclasses.replace(DELAYED, amax_history_len=length))
    optim = state.optimizer.spec
    still = dataclasses.replace(optim.schedule, min_lr=0.0)
    state.optimizer.spec = dataclasses.replace(optim, lr=0.0, schedule=still)
    assert isinstance(state.scaling, TeScaling)
    state.scaling = recorded = RecordedTeScaling(state.scaling, history_every=1)  # type: ignore[assignment]
    for _ in range(6):
        train_step(state, [microbatch(0), microbatch(0)])
    recorded.close()
    trace = recorded.trace
    weights = [name.endswith("weight") for name in trace.names["forward"]]
    for update, amax in enumerate(trace.amax["forward"]):
        expected = [not is_weight or update % 2 == 0 for is_weight in weights]
        assert amax.gt(0).tolist() == expected, update
    assert all(amax.gt(0).all() for amax in trace.amax["backward"])
    before, after = (trace.history["forward"][update] for update in (10, 11))
    first = trace.names["forward"].index("layers.0.attention.qkv.input")
    assert torch.equal(before[first], after[first]), "its window no longer moves"
    assert replay(trace) == []


@pytest.mark.parametrize(
    "sizes", [{"ffn_hidden_size": 72}, {"ffn_hidden_size": 68}, {"hidden_size": 40}]
)
def test_sizes_that_the_configuration_refuses_end_in_its_assertion(sizes: dict[str, Any]) -> None:
    """Asked for without the configuration: a last dim that is no multiple of 16."""
    with pytest.raises((AssertionError, ValueError), match="FP8 execution requires"):
        step(run_of("te", DELAYED, **sizes), 0)


def test_a_checkpoint_goes_to_our_engine_and_back(tmp_path: Path) -> None:
    """te → native → te without a step in between: all that is saved is the same, and so is the
    next step."""
    first = run_of("te", DELAYED, "bf16")
    for number in range(3):
        step(first, number)
    native, last = run_of("native", DELAYED, "bf16"), run_of("te", DELAYED, "bf16")
    state_dict.load_checkpoint(save(first, tmp_path / "te"), native, no_notice)
    state_dict.load_checkpoint(save(native, tmp_path / "native"), last, no_notice)
    assert_same_tables(first, native, 0)
    assert_same_tables(first, last, 0)
    assert step(first, 3) == step(last, 3)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Mesh:
    """The mesh of a process that has a GPU, as far as the choice of a backend asks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return dataclasses.replace(single_rank(), device=torch.device("cuda"))


def auto_spec(fp8: Fp8Recipe | None, why_not_te: str | None = None, **changes: Any) -> RunSpec:
    spec = spec_of("native", fp8, **changes)
    precision = dataclasses.replace(spec.precision, auto=AutoBackend(why_not_te))
    return dataclasses.replace(spec, precision=precision)


@pytest.mark.parametrize("fp8", [None, DELAYED, Fp8Recipe(name="tensorwise")])
def test_auto_takes_it_where_it_can_run(
    fp8: Fp8Recipe | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; the header says what runs and why. FP8 health is off where casts are not seen."""
    spec = choose.settle(auto_spec(fp8), on_a_gpu(monkeypatch))
    assert spec.precision.backend == "te"
    state = build(spec, single_rank())
    assert any(isinstance(module, TeLayer) for module in state.model.modules())
    text = precision_of(spec, state)
    assert f"Transformer Engine {VERSION}" in text
    assert text.endswith("chosen by model.fp8_backend=auto")
    assert (spec.observe.health.mode == "off") is (fp8 is not None and fp8.name == "tensorwise")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (auto_spec(None, activation="gelu"), "model.openai_gelu=False: Transformer Engine's GELU"),
        (
            auto_spec(Fp8Recipe(name="rowwise")),
            "model.fp8_recipe=rowwise: Transformer Engine has no",
        ),
        (auto_spec(DELAYED, "model.fp8_interval=4 scales"), "model.fp8_interval=4 scales"),
    ],
)
def test_auto_stays_native_and_says_why(
    spec: RunSpec, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = choose.settle(spec, on_a_gpu(monkeypatch))
    assert settled.precision.backend == "native"
    text = precision_of(settled, build(settled, single_rank()))
    assert f"; not Transformer Engine: {reason}" in text


def test_auto_needs_an_fp8_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = on_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    settled = choose.settle(auto_spec(DELAYED), mesh)
    assert settled.precision.backend == "native"
    assert "compute capability 8.9" in precision_of(settled, build(settled, single_rank()))
    assert choose.settle(auto_spec(None), mesh).precision.backend == "te"


def test_check_loads_it_and_says_what_runs() -> None:
    spec = spec_of("te", DELAYED)
    spec = dataclasses.replace(
        spec, precision=dataclasses.replace(spec.precision, te_version=VERSION)
    )
    device = torch.device("cpu")
    choose.check_backend(spec, device)
    backend = build(spec, single_rank()).backend
    assert (
        backend.describe()
        == f"Transformer Engine {VERSION}, its own Python; kernels emulated on the CPU"
    )
    assert backend.kernel() == "te emulated"


@pytest.mark.parametrize("window", [12, 16])
def test_a_run_ends_with_a_sample_whatever_its_length(window: int) -> None:
    """Transformer Engine takes multiples of 8 tokens; one sequence of 12 is none."""
    state = run_of("te", DELAYED, max_position_embeddings=window)
    drawn = sample(state, [1, 2, 3], 4, vocab_size=96, temperature=1.0, seed=1)
    assert len(drawn) == 4 and all(0 <= token < 96 for token in drawn)
