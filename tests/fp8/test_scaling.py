"""`ScalingState` against the specification of delayed scaling, bit for bit after every event."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.formats import E4M3
from fp8_numerics.gemm import GemmCounter
from megafp8.fp8 import rule
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.grad_sink import AutogradSink
from megafp8.fp8.linear import Linear, LinearComm
from megafp8.fp8.quantizer import LinearQuantizer, Role
from megafp8.fp8.scaling import ScaleTable, ScalingState
from megafp8.specs import Fp8Recipe
from tests.fp8.quantized import quantized
from tests.spec import formats as spec_formats
from tests.spec.delayed import DelayedScalingModel, Quantized, Recipe

LAYERS = ("first", "second", "third")
LENGTHS = (1, 2, 3, 16)
FLT_MAX = float(np.finfo(np.float32).max)


def spec_recipe(recipe: Fp8Recipe) -> Recipe:
    return Recipe(
        forward_format=recipe.forward_format,
        backward_format=recipe.backward_format,
        margin=recipe.margin,
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_compute_algo,
        fp8_interval=recipe.interval,
    )


class Pair:
    """The same events for the product and for the specification; compared after each."""

    def __init__(self, recipe: Fp8Recipe) -> None:
        self.state = ScalingState(recipe)
        self.linears = {name: self._linear(name) for name in LAYERS}
        kinds = ("input", "weight", "grad_output")
        self.model = DelayedScalingModel(
            {f"{name}.{kind}": kind for name in LAYERS for kind in kinds}, spec_recipe(recipe)
        )

    def _linear(self, name: str) -> Linear:
        return Linear(
            nn.Parameter(torch.zeros(1, 3)),
            None,
            name=name,
            quantizer=linear_quantizer(self.state, name),
            comm=LinearComm(),
            sink=AutogradSink(),
            counter=GemmCounter(),
        )

    def begin_microbatch(self, index: int) -> None:
        self.state.begin_microbatch(index)
        self.model.begin_microbatch(index)
        self.compare()

    def end(self, direction: str) -> None:
        getattr(self.state, f"end_{direction}")()
        getattr(self.model, f"end_{direction}")()
        self.compare()

    def set_weight(self, name: str, values: list[float]) -> None:
        self.linears[name].weight.data = torch.tensor([values])

    def cast_weight(self, name: str) -> None:
        linear = self.linears[name]
        ours = linear.weight_form.operands(linear.weight, torch.float32, 0).along_last
        self._compare_cast(ours, self.model.quantize(f"{name}.weight", linear.weight.data.numpy()))

    def cast(self, name: str, kind: Role, values: list[float]) -> None:
        x = torch.tensor(values, dtype=torch.float32)
        quantizer = self.linears[name].quantizer
        assert quantizer is not None
        ours = quantized(quantizer, kind, x)[0].along_last
        self._compare_cast(ours, self.model.quantize(f"{name}.{kind}", x.numpy()))

    def _compare_cast(self, ours: object, theirs: Quantized) -> None:
        assert isinstance(ours, Fp8Tensor)
        codes = ours.payload.view(torch.uint8).numpy()
        assert spec_formats.same_codes(codes, theirs.codes, theirs.fmt)
        assert ours.dequant_scale.item() == theirs.dequant_scale
        self.compare()

    def compare(self) -> None:
        for table in self.state.tables.values():
            for row, name in enumerate(table.names):
                assert_row_is_specified(table, row, self.model.states[name])


def assert_row_is_specified(table: ScaleTable, row: int, state: Any) -> None:
    """The specification keeps the staged amax in the history's slot 0, we keep it apart."""
    name = table.names[row]
    ours = np.concatenate([table.amax[row : row + 1].numpy(), table.history[row].numpy()])
    np.testing.assert_array_equal(ours, state.history, err_msg=f"{name} amax and history")
    assert table.quant_scale[row].item() == state.scale, f"{name} scale"
    assert table.num_updates[row].item() == state.num_updates, f"{name} num_updates"
    assert table.num_nonfinite[row].item() == state.num_nonfinite, f"{name} num_nonfinite"


numbers = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1e-45, 1e-40, 3e-38, FLT_MAX, math.inf, -math.inf, math.nan]),
    st.floats(-10, 10, width=32),
)
tensors = st.lists(numbers, min_size=3, max_size=3)
layer_sets = st.sets(st.sampled_from(LAYERS))


@dataclass
class MicrobatchPlan:
    """What occurs: a layer that is not in `backward` gets no gradient."""

    inputs: dict[str, list[float]] = field(default_factory=dict)
    grads: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class StepPlan:
    weights: dict[str, list[float]]
    microbatches: list[MicrobatchPlan]
    forwards_first: bool  # as pipelines do: all forwards, then all backwards
    evaluated: dict[str, list[float]]  # inputs of an evaluation after the step


def by_layer() -> st.SearchStrategy[dict[str, list[float]]]:
    return st.dictionaries(st.sampled_from(LAYERS), tensors)


microbatches = st.builds(MicrobatchPlan, by_layer(), by_layer())
steps = st.builds(
    StepPlan,
    weights=by_layer(),
    microbatches=st.lists(microbatches, min_size=1, max_size=3),
    forwards_first=st.booleans(),
    evaluated=by_layer(),
)
recipes = st.builds(
    Fp8Recipe,
    margin=st.sampled_from([0, 1, 5, 10]),
    interval=st.sampled_from([1, 1, 2, 3]),
    amax_history_len=st.sampled_from(LENGTHS),
    amax_compute_algo=st.sampled_from(["max", "most_recent"]),
    forward_format=st.sampled_from(["e4m3", "e5m2"]),
    backward_format=st.sampled_from(["e4m3", "e5m2"]),
)
GROWING = [
    StepPlan({"first": [float(i), 0.0, 0.0]}, [MicrobatchPlan({"first": [5.0 - i] * 3})], False, {})
    for i in range(5)
]


@given(recipes, st.lists(steps, min_size=1, max_size=6))
@example(Fp8Recipe(amax_history_len=3), GROWING)
@example(Fp8Recipe(amax_history_len=3, interval=2), GROWING)
@example(Fp8Recipe(amax_history_len=3, amax_compute_algo="most_recent"), GROWING)
@settings(max_examples=80)
def test_any_sequence_of_events_is_the_specification(
    recipe: Fp8Recipe, plan: list[StepPlan]
) -> None:
    """Several layers and microbatches, tensors that do not occur, NaN and infinite amaxes,
    evaluations between steps, all forwards before all backwards or in turn."""
    pair = Pair(recipe)
    for step in plan:
        for name, values in step.weights.items():
            pair.set_weight(name, values)
        backwards = []
        for index, microbatch in enumerate(step.microbatches):
            pair.begin_microbatch(index)
            for name in step.weights:
                pair.cast_weight(name)
            for name, values in microbatch.inputs.items():
                pair.cast(name, "input", values)
            pair.end("forward")
            backwards.append(microbatch.grads)
            if not step.forwards_first or index == len(step.microbatches) - 1:
                for grads in backwards:
                    for name, values in grads.items():
                        pair.cast(name, "grad_output", values)
                    pair.end("backward")
                backwards.clear()
        evaluate(pair, step.evaluated)


def evaluate(pair: Pair, inputs: dict[str, list[float]]) -> None:
    """Weights are cast with today's scales, nothing is recorded."""
    with pair.state.evaluation(), pair.model.evaluation():
        for name, values in inputs.items():
            pair.cast_weight(name)
            pair.cast(name, "input", values)


def run_inputs(recipe: Fp8Recipe, amaxes: list[float]) -> tuple[ScalingState, list[float]]:
    """One input tensor, one amax an update; the scale after each."""
    state = ScalingState(recipe)
    slot = state.forward.register("x")
    scales = []
    for amax in amaxes:
        slot.table.amax[slot.index] = amax
        state.end_forward()
        scales.append(slot.table.quant_scale[slot.index].item())
    return state, scales


def test_scales_by_hand() -> None:
    """History of 2: an amax counts for two updates after its own (Transformer Engine's window
    includes the entry that leaves)."""
    recipe = Fp8Recipe(amax_history_len=3)
    state, scales = run_inputs(recipe, [4.0, 2.0, 1.0, 1.0])
    assert scales == [448 / 4, 448 / 4, 448 / 4, 448 / 2]
    assert state.forward.history.tolist() == [[1.0, 1.0]]
    _, scales = run_inputs(Fp8Recipe(amax_history_len=1), [4.0, 2.0, 8.0])
    assert scales == [448 / 4, 448 / 2, 448 / 8]
    _, scales = run_inputs(Fp8Recipe(amax_compute_algo="most_recent"), [4.0, 2.0, 8.0])
    assert scales == [448 / 4, 448 / 2, 448 / 8]
    _, scales = run_inputs(Fp8Recipe(margin=2, forward_format="e5m2"), [4.0])
    assert scales == [57344 / 16]


def test_amax_too_small_for_a_scale_gives_flt_max() -> None:
    _, scales = run_inputs(Fp8Recipe(), [1e-45])
    assert scales == [FLT_MAX]


def test_reciprocals_follow_what_is_written_into_scales() -> None:
    """What is written in place (a loaded checkpoint), an update, and a new tensor of scales."""
    table = ScaleTable(Fp8Recipe(), E4M3)
    slot = table.register("x")
    assert table.dequant_scale.tolist() == [1.0]
    kept = table.dequant_scale
    assert table.dequant_scale is kept, "one tensor serves until scales change"
    table.quant_scale[0] = 4.0
    assert table.dequant_scale.tolist() == [0.25]
    slot.table.amax[slot.index] = 7.0
    table.update(None)
    assert (
        slot.table.quant_scale[slot.index].item() == 64.0
        and slot.table.dequant_scale[slot.index].item() == 1 / 64
    )
    table.quant_scale = torch.tensor([8.0])
    assert table.dequant_scale.item() == 0.125


def test_nonfinite_amax_is_counted_and_otherwise_ignored() -> None:
    state, scales = run_inputs(Fp8Recipe(amax_history_len=4), [2.0, math.inf, math.inf, 4.0])
    assert scales == [224.0, 224.0, 224.0, 112.0]
    assert state.forward.num_nonfinite.tolist() == [2]
    assert state.forward.history.tolist() == [[0.0, 2.0, 4.0]]


class OtherRank:
    """Has seen an amax of ten everywhere; notes when it is asked and when it is waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, amax: torch.Tensor) -> Reduction:
        self.events.append(f"start {amax.numel()}")
        return Reduction(self, amax)


@dataclass
class Reduction:
    other: OtherRank
    amax: torch.Tensor

    def wait(self) -> None:
        self.other.events.append("wait")
        self.amax.clamp_(min=10.0)


@pytest.mark.parametrize("reduce_amax", [True, False])
def test_amaxes_are_reduced_once_per_update_and_only_if_asked(reduce_amax: bool) -> None:
    other = OtherRank()
    state = ScalingState(Fp8Recipe(reduce_amax=reduce_amax), other.start)
    for name in "abc":
        state.forward.register(name)
    state.backward.register("d")
    state.forward.amax[0] = 1.0
    state.end_forward()
    state.end_backward()
    assert other.events == (["start 3", "start 1"] if reduce_amax else [])
    expected = np.float32(448) / np.float32(10 if reduce_amax else 1)
    scales = state.tables["forward"].quant_scale
    assert scales[0].item() == expected
    assert scales[1].item() == (expected if reduce_amax else 1.0)


def test_a_reduction_is_waited_for_when_a_scale_is_read_and_not_before() -> None:
    """What is recorded meanwhile belongs to the next update."""
    other = OtherRank()
    state = ScalingState(Fp8Recipe(amax_history_len=4), other.start)
    table = state.forward.register("a").table
    table.amax.fill_(20.0)
    state.end_forward()
    table.amax.fill_(40.0)
    assert other.events == ["start 1"]
    assert table.settled().quant_scale.item() == np.float32(448) / np.float32(20)
    assert other.events == ["start 1", "wait"]
    state.end_forward()
    assert other.events == ["start 1", "wait", "start 1"]
    state.end_forward()  # of nothing: it waits for the one before
    assert other.events == ["start 1", "wait"] * 2 + ["start 1"]
    assert state.tables["forward"].history.tolist() == [[20.0, 40.0, 10.0]]
    assert other.events == ["start 1", "wait"] * 3


READS: dict[str, Callable[[ScalingState, LinearQuantizer], object]] = {
    "a cast": lambda state, linear: linear.operands("input", torch.full((2, 2), 3.0)),
    "the scale of a stored weight": lambda _, linear: linear.store_scale(torch.tensor(3.0)),
    "the tables": lambda state, _: state.tables,
    "a checkpoint": lambda state, _: state.forward.tensors(),
    "reciprocals": lambda state, _: state.forward.dequant_scale,
    "a recomputation": lambda state, _: state.recomputation(),
}


@pytest.mark.parametrize("what", READS)
def test_the_first_reader_after_an_update_waits_for_it(what: str) -> None:
    other = OtherRank()
    state = ScalingState(Fp8Recipe(amax_history_len=1), other.start)
    linear = linear_quantizer(state, "x")
    assert linear is not None
    for role in ("input", "weight"):
        linear.operands(role, torch.full((2, 2), 20.0))
    state.end_forward()
    assert other.events == ["start 2"]
    READS[what](state, linear)
    assert other.events == ["start 2", "wait"]
    (seen, _), _ = linear.operands("weight", torch.full((2, 2), 20.0))
    assert isinstance(seen, Fp8Tensor)
    assert seen.dequant_scale.item() == pytest.approx(20 / 448)
    assert other.events == ["start 2", "wait"], "once, for all casts that follow"


def test_recipe_chooses_the_formats_by_direction() -> None:
    state = ScalingState(Fp8Recipe())
    assert state.forward.fmt.name == "e4m3" and state.backward.fmt.name == "e5m2"
    state = ScalingState(Fp8Recipe(backward_format="e4m3"))
    assert state.backward.fmt.name == "e4m3"


def test_a_name_is_registered_once() -> None:
    state = ScalingState(Fp8Recipe())
    state.forward.register("x")
    with pytest.raises(AssertionError, match="registered twice"):
        state.forward.register("x")


def test_a_table_gets_memory_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts have thousands of rows, so that memory for each new row would take minutes."""
    make, counts = ScaleTable._rows, []

    def counted(table: ScaleTable, *args: float) -> torch.Tensor:
        counts.append(len(table.names))
        return make(table, *args)

    monkeypatch.setattr(ScaleTable, "_rows", counted)
    state = ScalingState(Fp8Recipe(amax_history_len=3))
    for number in range(5):
        state.forward.register(f"linear {number}.weight")
    assert state.forward.history.shape == (5, 2) and state.forward.quant_scale.tolist() == [1] * 5
    assert state.forward.num_updates.dtype == torch.int64
    state.forward.register("one more")
    assert state.forward.amax.tolist() == [0] * 6 and counts == [5, 5, 5, 6]


def test_evaluation_ends_also_when_it_fails() -> None:
    state = ScalingState(Fp8Recipe())
    with pytest.raises(KeyError), state.evaluation():
        assert not state.recording
        raise KeyError
    assert state.recording


def test_the_time_of_rules_is_that_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two calls takes two ticks of a clock; one in an evaluation does not count."""
    ticks = itertools.count(step=2.0)
    monkeypatch.setattr(rule, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    state = ScalingState(Fp8Recipe())
    result = torch.ones(1), torch.ones(1)
    for _ in range(2):
        assert rule._run(lambda: result, state, "a rule") is result
    with state.evaluation():
        rule._run(lambda: result, state, "a rule")
    assert state.rule_seconds == 4.0
