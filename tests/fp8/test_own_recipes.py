"""Recipes that are a rule alone: the bits of built-in ones, and what a wrong rule is told."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_numerics import block_casts
from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.gemm import GemmCounter, gemm
from megafp8 import fp8
from megafp8.errors import UserError
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.draws import Tokens
from megafp8.fp8.probe import values
from megafp8.fp8.quantizer import Role
from megafp8.fp8.rule import RuleError
from megafp8.fp8.scaling import ScaleTable, ScalingState
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import ModuleRule
from megafp8.specs.recipe import Cast, Recipe, Scaled
from megafp8.specs.recipes import load_recipe, register_recipe
from megafp8.specs.traits import ROLES, ROW, TENSOR, Scales, Traits, alike
from tests.fp8.quantized import quantized
from tests.fp8.test_recipes import awkward

OWN = Path(__file__).parents[1] / "own_recipes"
LINE, OUTER = alike(ROW), alike(Scales(1, None, has_outer=True))
AS_BUILT_IN = {"tensorwise": "Tensorwise", "rowwise": "Rowwise", "blockwise": "Blockwise"}


def own(file: str, name: str = "") -> str:
    """Return the name of a recipe of tests/own_recipes, which is imported."""
    path = f"{OWN / file}.py{name and ':'}{name}"
    load_recipe(path)
    return path


def settings_of(name: str, **changes: Any) -> Fp8Recipe:
    traits = load_recipe(name).traits
    given = {"backward_format": traits.backward_formats[0], "power_2_scale": traits.power_2_default}
    return Fp8Recipe(name=name, **(given | changes))


def operands(name: str, role: Role, x: torch.Tensor, **changes: Any) -> list[Fp8Tensor]:
    quantizer = linear_quantizer(ScalingState(settings_of(name, **changes)), "linear")
    assert quantizer is not None
    (last, first), _ = quantized(quantizer, role, x)
    assert isinstance(last, Fp8Tensor) and isinstance(first, Fp8Tensor)
    return [last, first]


@pytest.mark.parametrize("built_in", AS_BUILT_IN)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize("shape", [(9, 33), (1, 1), (130, 3), (3, 130), (0, 4), (4, 0)])
def test_a_rule_gives_the_bits_of_the_built_in_recipe_with_its_traits(
    built_in: str, role: Role, power_2: bool, shape: tuple[int, int]
) -> None:
    x = awkward(*shape, torch.bfloat16)
    name = own("as_built_in", AS_BUILT_IN[built_in])
    ours = operands(name, role, x, power_2_scale=power_2)
    theirs = operands(built_in, role, x, power_2_scale=power_2)
    for rule, known in zip(ours, theirs, strict=True):
        assert torch.equal(rule.payload.view(torch.uint8), known.payload.view(torch.uint8))
        if x.numel():
            assert torch.equal(rule.dequant_scale, known.dequant_scale)
        assert (rule.block is None) == (known.block is None)


class RowsInC(Recipe):
    """Name the blocks that it is asked for, instead of quantizing."""

    traits = Traits(input=LINE, weight=LINE, grad_output=LINE)
    blocks: ClassVar[list[tuple[int, int]]] = []

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Any:
        """Fail: the tensor is to be cast in C."""
        raise AssertionError("the rule in torch operations ran")

    def in_c(self, x_MN: torch.Tensor, block: tuple[int, int], cast: Cast) -> Scaled:
        """Return zeros with a scale for each block."""
        self.blocks.append(block)
        rows, cols = (size // part for size, part in zip(x_MN.shape, block, strict=True))
        return Scaled(torch.zeros(x_MN.shape, dtype=cast.fmt.dtype), torch.ones(rows, cols))


def test_c_is_asked_for_the_blocks_of_the_traits() -> None:
    x = torch.randn(16, 32)
    if not block_casts.runs_in_c(x):
        pytest.skip("the C kernels are not built")
    last, first = operands(register_recipe(RowsInC), "input", x)
    assert RowsInC.blocks == [(1, 32), (16, 1)] == [last.block, first.block]


def test_a_simulated_rule_is_multiplied_by_its_values() -> None:
    x, w = torch.randn(6, 64), torch.randn(10, 64)
    name = own("simulated_int8")
    a, b = operands(name, "input", x)[0], operands(name, "weight", w)[0]
    counter = GemmCounter()
    product = gemm(a, b, work=torch.float32, counter=counter, place="output", transpose_b=True)
    rule = load_recipe(name)
    exact = [rule.cast(t, None).double() for t in (x, w)]  # type: ignore[arg-type,union-attr]
    torch.testing.assert_close(product.double(), exact[0] @ exact[1].t(), rtol=1e-5, atol=1e-4)
    assert not torch.equal(exact[0].float(), x)


@pytest.mark.parametrize("rows", [16, 32, 0])
def test_rotation_two_levels_and_a_product_that_cancels_them(rows: int) -> None:
    """FP4 with a rotation loses precision, and a lost factor or rotation would lose all of it."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 32, generator=generator) * 50
    g = torch.randn(rows, 48, generator=generator) * 1e-3
    name = own("four_bits")
    kept, grad = operands(name, "input", x)[1], operands(name, "grad_output", g)[1]
    assert kept.outer is not None and kept.rotation == grad.rotation == "hadamard"
    again = kept.factory()(*kept.tensors)
    arguments = {"work": torch.float32, "counter": GemmCounter(), "place": "grad_weight"}
    product = gemm(grad, again, transpose_a=True, **arguments)  # type: ignore[arg-type]
    exact = g.double().t() @ x.double()
    if rows:
        assert float((product - exact).norm() / exact.norm()) < 0.25
    with pytest.raises(AssertionError, match="was not kept"):
        kept.factory()(kept.payload, kept.dequant_scale)


@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_a_rotated_tensor_is_filled_with_zeros_to_whole_blocks(role: Role) -> None:
    """What fills it is rotated with the rest, and rounded at random as the rows after it."""
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    filled = torch.cat([x, torch.zeros(8, 32)])
    (last, first), (of_filled, whole) = (operands(own("four_bits"), role, t) for t in (x, filled))
    assert torch.equal(values(last), values(of_filled)[:24])
    assert torch.equal(values(first), values(whole)) and values(first)[24:].any()


class E5Alone(Recipe):
    traits = Traits(
        input=alike(ROW), weight=alike(ROW), grad_output=alike(ROW), backward_formats=("e5m2",)
    )

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        raise AssertionError("only the format is asked for")


@pytest.mark.parametrize(
    ("settings", "of_rule", "fmt"),
    [
        ({"name": "mxfp8"}, "delayed", "e5m2"),
        ({"name": "mxfp8"}, "tensorwise", "e5m2"),
        ({"name": "mxfp8", "modules_backward_format": "e4m3"}, "delayed", "e4m3"),
        ({"name": "mxfp8", "modules_backward_format": "e5m2"}, "blockwise", "e4m3"),
        ({"name": "delayed"}, "mxfp8", "e4m3"),
        ({"name": "delayed", "backward_format": "e4m3"}, "tensorwise", "e4m3"),
        ({"name": "mxfp8"}, "E5Alone", "e5m2"),
        ({"name": "delayed", "backward_format": "e4m3"}, "E5Alone", "e5m2"),
    ],
)
def test_a_rule_of_linears_has_gradients_in_its_recipes_own_format(
    settings: dict[str, Any], of_rule: str, fmt: str
) -> None:
    """Not in that of a main recipe which has no choice; tables of histories have it too."""
    chosen = register_recipe(E5Alone) if of_rule == "E5Alone" else of_rule
    state = ScalingState(Fp8Recipe(**settings, modules=(ModuleRule("*.fc2", chosen),)))
    quantizer = linear_quantizer(state, "layers.0.mlp.fc2")
    assert quantizer is not None
    formats = {role: tensor.fmt.name for role, tensor in quantizer.tensors.items()}
    assert formats == {"input": "e4m3", "weight": "e4m3", "grad_output": fmt}
    if (slot := quantizer.tensors["grad_output"].slot) is not None:
        assert slot.table.fmt.name == fmt


def test_histories_of_two_formats_are_refused() -> None:
    class OfE5(Recipe):
        traits = replace(load_recipe(own("smoothed")).traits, backward_formats=("e5m2",))

    rules = (ModuleRule("*.fc2", register_recipe(OfE5)),)
    state = ScalingState(Fp8Recipe(backward_format="e4m3", modules=rules))
    assert linear_quantizer(state, "layers.0.mlp.fc1") is not None
    with pytest.raises(UserError, match=r"fc2: OfE5 .* in e5m2, and another .* e4m3, while all"):
        linear_quantizer(state, "layers.0.mlp.fc2")


class Drawing(Recipe):
    """Keep the random bytes that each cast is given."""

    traits = Traits(input=LINE, weight=LINE, grad_output=LINE, is_simulated=True)
    drawn: ClassVar[list[bytes]] = []

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Draw 16 bytes."""
        self.drawn.append(bytes(cast.draw((16,)).tolist()))
        return x_MK


def drawn(
    *, seed: int = 3, step: int = 5, sample: int = 7, name: str = "a", role: Role = "input"
) -> list[bytes]:
    """Return what two casts of one tensor draw, each for the two products."""
    state = ScalingState(settings_of(register_recipe(Drawing)))
    state.draws.seed = seed
    quantizer = linear_quantizer(state, name)
    assert quantizer is not None
    state.begin_microbatch(0, step, Tokens((sample,)))
    Drawing.drawn.clear()
    for _ in range(2):
        quantized(quantizer, role, torch.ones(4, 16))
    return Drawing.drawn.copy()


def test_draws_differ_by_all_that_they_depend_on_and_repeat_after_a_resume() -> None:
    found = [*drawn(), *drawn(seed=4), *drawn(step=6), *drawn(sample=8)]
    found += [*drawn(name="b")]
    assert len({*found}) == len(found) == 20
    weight = drawn(role="weight")  # the same in all of a step's microbatches
    assert weight[:2] == weight[2:] == drawn(role="weight", sample=8)[:2]
    assert len({*found, *weight}) == 22
    assert drawn() == found[:4]
    state = ScalingState(settings_of(own("four_bits")))
    state.begin_microbatch(0, 1)
    again = state.recomputation()
    first = state.draws.begin("x", is_weight=False)
    with again:
        assert state.draws.begin("x", is_weight=False) == first
    assert state.draws.begin("x", is_weight=False) != first
    assert state.draws.snapshot().uses == {"x": 2}


def cast_to(scale_shape: tuple[int, ...], dtype: torch.dtype = torch.float8_e4m3fn) -> type[Recipe]:
    class Wrong(Recipe):
        traits = Traits(input=LINE, weight=LINE, grad_output=LINE)

        def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
            return Scaled(x_MK.to(dtype), torch.ones(scale_shape))

    return Wrong


class Raises(Recipe):
    """Fail inside the rule."""

    traits = Traits(input=LINE, weight=LINE, grad_output=LINE)

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Divide by zero."""
        return Scaled(x_MK, torch.ones(1) * (1 // 0))


class NoPower(Recipe):
    """Return scales that are not powers of two, against its traits."""

    traits = Traits(input=LINE, weight=LINE, grad_output=LINE)

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Scale by three."""
        return Scaled(x_MK.to(cast.fmt.dtype), torch.full((4, 1), 3.0))


class NoOuter(Recipe):
    """Forget the factor of the whole tensor."""

    traits = Traits(input=OUTER, weight=OUTER, grad_output=OUTER, power_2="never")

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Return scales of one level."""
        return Scaled(x_MK.to(cast.fmt.dtype), torch.ones(4, 1))


class UndeclaredOuter(NoPower):
    """Return a factor of the whole tensor, against its traits."""

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Add one."""
        return Scaled(x_MK.to(cast.fmt.dtype), torch.ones(4, 1), torch.ones(()))


class Nothing(Recipe):
    """Return nothing."""

    traits = Traits(input=LINE, weight=LINE, grad_output=LINE)

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Any:
        """Forget the result."""


class Leaves(Nothing):
    """Ask Python to exit."""

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Leave as if all were done."""
        raise SystemExit(0)


class Interrupts(Nothing):
    """Raise what Ctrl-C raises."""

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Interrupt."""
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Leaves, ["test_own_recipes.py, line ", "in cast", "SystemExit: 0"]),
        (Interrupts, ["in cast", "KeyboardInterrupt"]),
        (cast_to((4,)), ["scales of [4]", "[4, 1] in FP32"]),
        (cast_to((4, 1), torch.float16), ["a payload of [4, 16] in torch.float16"]),
        (Raises, ["test_own_recipes.py, line ", "in cast", "ZeroDivisionError"]),
        (NoPower, ["not powers of two", "power_2='never'"]),
        (NoOuter, ["another `outer`", "has one"]),
        (UndeclaredOuter, ["another `outer`", "does not have one"]),
        (Nothing, ["gave a NoneType, not Scaled(...)"]),
    ],
)
def test_a_wrong_rule_is_named_with_tensor_and_line(wrong: type[Recipe], words: list[str]) -> None:
    name = register_recipe(wrong)
    with pytest.raises(RuleError) as found:
        operands(name, "weight", torch.ones(4, 16))
    assert all(word in str(found.value) for word in [name, "linear.weight", *words])


def test_the_scale_of_a_shared_weight_is_the_rules() -> None:
    name = own("as_built_in", "Tensorwise")
    for recipe in (name, "tensorwise"):
        quantizer = linear_quantizer(ScalingState(settings_of(recipe)), "linear")
        assert quantizer is not None
        scale, fmt = quantizer.store_scale(torch.tensor(3.0))
        assert scale.item() == pytest.approx(448 / 3) and fmt.name == "e4m3"
    assert math.isfinite(scale.item())
    assert alike(TENSOR) != LINE


def table_after(name: str, amaxes: list[float], modules: tuple[ModuleRule, ...] = ()) -> ScaleTable:
    """Return the table of inputs and weights after a microbatch of each amax."""
    state = ScalingState(settings_of(name, amax_history_len=3, modules=modules))
    for linear in ("a", "b"):
        assert linear_quantizer(state, linear) is not None
    for amax in amaxes:
        state.forward.amax.fill_(amax)
        state.end_forward()
    return state.forward


def test_a_history_of_its_own_follows_its_update() -> None:
    """A tensor that did not occur, or was not finite, keeps what it has."""
    found = table_after(own("smoothed"), [4.0, 1.0, 0.0, math.inf, 8.0, 2.0])
    assert found.history[0].tolist() == pytest.approx([8.0, 7.2], rel=1e-6)
    assert found.quant_scale[0].item() == pytest.approx(448 / 7.2, rel=1e-6)
    assert found.num_updates.tolist() == [4] * 4 and found.num_nonfinite.tolist() == [1] * 4


def test_another_history_leaves_that_of_delayed_alone() -> None:
    amaxes = [4.0, 1.0, 3.0]
    mixed = table_after(
        "delayed", amaxes, modules=(ModuleRule("b", own("smoothed"), "fp8_modules"),)
    )
    delayed, smoothed = table_after("delayed", amaxes), table_after(own("smoothed"), amaxes)
    for field, value in mixed.tensors().items():
        assert torch.equal(value[:2], delayed.tensors()[field][:2])
        assert torch.equal(value[2:], smoothed.tensors()[field][2:])


class Indices(TorchDispatchMode):
    """Keep the tensors that others are indexed by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            self.seen += args[1]
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_wait_for_a_history_of_its_own() -> None:
    """Rows go to the device once, and no mask is read: a meta tensor cannot say what is set."""
    state = ScalingState(settings_of(own("smoothed"), amax_history_len=3))
    assert linear_quantizer(state, "a") is not None
    state.to(torch.device("meta"))
    with Indices() as indices:
        for _ in range(2):
            state.end_forward()
    assert len(indices.seen) == 10 and len(set(map(id, indices.seen))) == 1


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("seen.quant_scale", ["gave [4] in torch.float32, not [4, 2]"]),
        ("(seen.history, seen.quant_scale[:1])", ["and [1] in torch.float32, not"]),
        ("(seen.history, seen.quant_scale * 0)", ["not above zero and finite"]),
        ("1 // 0", ["in update: ZeroDivisionError"]),
    ],
)
def test_a_wrong_update_is_named(tmp_path: Path, result: str, words: list[str]) -> None:
    text = (OWN / "smoothed.py").read_text("utf-8").partition("    def update")[0]
    file = tmp_path / "lab.py"
    file.write_text(f"{text}    def update(self, seen):\n        return {result}\n", "utf-8")
    load_recipe(str(file))
    with pytest.raises(RuleError) as found:
        table_after(str(file), [1.0])
    assert all(word in str(found.value) for word in [str(file), "update", *words])


def small_step(state: fp8.Fp8State, model: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    with state.microbatch():
        model(x).square().mean().backward()
    assert model.weight.grad is not None
    return model.weight.grad.clone()


@pytest.mark.parametrize("by", ["class", "file"])
def test_a_model_of_ones_own_is_converted_by_a_class_or_a_file(by: str) -> None:
    path = own("as_built_in", "Rowwise")
    given: Any = path if by == "file" else type(load_recipe(path))
    gradients = []
    for recipe in (given, "rowwise"):
        torch.manual_seed(1)
        model = torch.nn.Linear(32, 48)
        gradients.append(small_step(fp8.convert(model, recipe), model, torch.randn(16, 32)))
    assert torch.equal(*gradients)


def test_a_random_recipe_goes_on_with_the_bytes_of_an_undisturbed_run() -> None:
    torch.manual_seed(1)
    model, x = torch.nn.Linear(32, 48), torch.randn(16, 32)
    state = fp8.convert(model, own("four_bits"))
    small_step(state, model, x)
    saved = state.state_dict()
    second = small_step(state, model, x)
    resumed_model = torch.nn.Linear(32, 48)
    resumed_model.load_state_dict(model.state_dict())
    resumed = fp8.convert(resumed_model, own("four_bits"))
    resumed.load_state_dict(saved)
    assert torch.equal(small_step(resumed, resumed_model, x), second)
    assert not torch.equal(small_step(resumed, resumed_model, x), second)


def test_a_wrong_class_or_file_of_a_recipe_is_an_fp8_error(tmp_path: Path) -> None:
    class Empty(Recipe):
        pass

    for given in (Empty, str(tmp_path / "none.py")):
        with pytest.raises(fp8.Fp8Error):
            fp8.convert(torch.nn.Linear(32, 32), given)


def test_only_scales_of_one_level_count_as_powers_of_two() -> None:
    """BF16 products of values rest on it: a second factor of any size would be rounded."""
    x = torch.randn(16, 32)
    assert operands(own("blocks_of_32"), "input", x)[0].is_exact_in_bf16
    assert not operands(own("four_bits"), "input", x)[0].is_exact_in_bf16
    assert not operands(own("as_built_in", "Rowwise"), "input", x, power_2_scale=False)[
        0
    ].is_exact_in_bf16


def test_a_rule_that_agrees_gets_the_maximum_over_ranks() -> None:
    """The fake maximum stands for a rank whose part has a larger amax."""

    def maximum(amax: torch.Tensor) -> torch.Tensor:
        return amax.fill_(1000.0)

    state = ScalingState(settings_of(own("as_built_in", "Tensorwise")))
    quantizer = linear_quantizer(state, "linear", lambda role: maximum)
    assert quantizer is not None
    (last, _), _ = quantized(quantizer, "input", torch.randn(4, 16))
    assert isinstance(last, Fp8Tensor)
    assert last.dequant_scale.item() == pytest.approx(1000 / 448)


@pytest.mark.parametrize("name", ["blocks_of_32", "four_bits", "as_built_in:Tensorwise"])
def test_the_form_in_which_an_input_is_kept_is_that_of_its_operand(name: str) -> None:
    """A compiled layer makes tensors of this form before there is an operand."""
    file, _, cls = name.partition(":")
    quantizer = linear_quantizer(ScalingState(settings_of(own(file, cls))), "linear")
    assert quantizer is not None
    (_, first), _ = quantized(quantizer, "input", torch.randn(32, 64))
    assert isinstance(first, Fp8Tensor)
    form = quantizer.saved_form()
    kept = first.payload.t() if form.is_transposed else first.payload
    assert kept.is_contiguous() and list(kept.shape) == form.payload_shape(32, 64)
    assert kept.dtype == form.dtype
    scales = list(first.dequant_scale.shape)
    if first.outer is not None:  # a flat tensor has the scales of both levels
        scales = [first.dequant_scale.numel() + 1]
    assert scales == form.scale_shape(32, 64)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (0, 1), (3, 0)])
def test_a_block_of_a_row_is_as_long_as_the_row(shape: tuple[int, int]) -> None:
    """A row of one element has one; an empty one counts as one block of one element."""
    last, first = operands(own("as_built_in", "Rowwise"), "input", torch.ones(shape))
    assert last.block == (1, max(1, shape[1]))
    assert first.block == (max(1, shape[0]), 1)
