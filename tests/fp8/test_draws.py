"""The random bytes of stochastic rounding follow from the place of an element alone."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fp8_numerics import philox
from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.kernels.compile import library
from fp8_numerics.philox import Key, Rows, philox4x32, random_bytes
from megafp8 import fp8
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.draws import WHOLE, Draw, Draws, Moment, Part, TokenOrder, Tokens, columns_of
from megafp8.fp8.probe import values
from megafp8.fp8.scaling import ScalingState
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import ModuleRule
from megafp8.specs.recipes import register_recipe
from tests.copies import Copies
from tests.fp8.models import mlp
from tests.fp8.quantized import quantized
from tests.fp8.test_linear import make, noise
from tests.fp8.test_own_recipes import settings_of
from tests.spec import draws as spec
from tests.spec import nvfp4

PUBLISHED = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
"""The known answers of Random123 (tests/kat_vectors, `philox4x32 10`)."""


@pytest.fixture(params=["C", "torch"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "torch":
        monkeypatch.setattr(philox, "library_for", lambda x: None)
    elif library().lib is None:
        pytest.skip("no C compiler")
    yield request.param


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_the_generator_has_the_published_answers(
    counter: tuple[int, ...], key: Key, expected: tuple[int, ...]
) -> None:
    assert spec.philox(counter, key) == expected
    words = [torch.tensor([word]) for word in counter]
    assert [int(word) for word in philox4x32(words, key)] == list(expected)


def test_draws_in_torch_operations_copy_nothing_from_the_host() -> None:
    device, seen = torch.device("cpu"), []
    rows = Rows(*torch.arange(6, device=device).reshape(2, 3))
    with pytest.MonkeyPatch.context() as patch, Copies(device, seen.append):
        patch.setattr(philox, "library_for", lambda x: None)
        random_bytes((4, 5), rows, [range(40)])
    assert seen == []


def test_each_byte_is_the_specified_one(engine: str) -> None:
    samples = torch.tensor([0, 3, 2**33 + 5])
    positions = torch.tensor([7, 0, 2**31 + 1])
    key = spec.key_of(4, 5, "a.grad_output.last")
    for columns in ([range(40)], [range(5, 9), range(30, 33), range(1021, 2050)]):
        found = random_bytes(key, Rows(samples, positions), columns)
        numbers = [number for each in columns for number in each]
        expected = [
            [spec.byte_of(key, sample, position, number) for number in numbers]
            for sample, position in zip(samples.tolist(), positions.tolist(), strict=True)
        ]
        assert found.tolist() == expected


def test_many_rows_are_divided_over_threads(engine: str) -> None:
    rows = Rows(torch.arange(200) % 7, torch.arange(200))
    key = 1, 2
    found = random_bytes(key, rows, [range(3, 1003)])
    for row in range(200):
        one = Rows(rows.samples[row : row + 1], rows.positions[row : row + 1])
        assert torch.equal(found[row : row + 1], random_bytes(key, one, [range(3, 1003)]))


SAMPLES, SEQ, FEATURES = 4, 8, 64


def drawn(
    tokens: Tokens, part: Part = WHOLE, *, rows: int, columns: int, turned: bool = False
) -> torch.Tensor:
    """Return the bytes of a tensor [rows, columns], drawn for one of its products."""
    draws = Draws(seed=11)
    draws.at = Moment(5, tokens)
    sizes = (columns, rows) if turned else (rows, columns)
    draw = Draw(draws, "a.grad_output.last", part, sizes, sizes, torch.device("cpu"), turned)
    return draw(sizes).t() if turned else draw(sizes)


def whole() -> torch.Tensor:
    """Return the bytes [SAMPLES, SEQ, FEATURES] of four samples in one microbatch."""
    key = spec.key_of(11, 5, "a.grad_output.last")
    elements = [
        [[spec.byte_of(key, b, s, o) for o in range(FEATURES)] for s in range(SEQ)]
        for b in range(SAMPLES)
    ]
    return torch.tensor(elements, dtype=torch.uint8)


ALL = Tokens(tuple(range(SAMPLES)), (range(SEQ),))


@pytest.mark.parametrize("turned", [False, True])
def test_divisions_draw_what_the_whole_draws(engine: str, turned: bool) -> None:
    whole_BSO = whole()

    def check(tokens: Tokens, part: Part, expected_BSO: torch.Tensor) -> None:
        expected = expected_BSO.flatten(0, 1)
        rows, columns = expected.shape
        found = drawn(tokens, part, rows=rows, columns=columns, turned=turned)
        assert torch.equal(found, expected)

    check(ALL, WHOLE, whole_BSO)
    check(replace(ALL, positions=None), WHOLE, whole_BSO)
    check(Tokens((2, 3), (range(SEQ),)), WHOLE, whole_BSO[2:])  # a microbatch, or a replica
    part = Part(columns=(range(8, 16), range(40, 48)))  # gate and up of one rank of four
    check(ALL, part, torch.cat([whole_BSO[..., 8:16], whole_BSO[..., 40:48]], 2))
    ring = Tokens(ALL.samples, (range(2, 4), range(4, 6)))  # the second of two parts of a ring
    check(ring, WHOLE, whole_BSO[:, 2:6])
    ring = Tokens(ALL.samples, (range(2), range(6, 8)))
    check(ring, WHOLE, whole_BSO[:, [0, 1, 6, 7]])
    own = Part(tokens=TokenOrder("own", 1, 4))
    check(ALL, own, whole_BSO[:, 2:4])
    check(replace(ALL, positions=None), own, whole_BSO[:, 2:4])  # as evaluations have them
    by_rank = Part(tokens=TokenOrder("by_rank", 1, 4))
    check(ALL, by_rank, torch.cat([whole_BSO[:, at : at + 2] for at in (0, 2, 4, 6)]))
    check(ring, Part(tokens=TokenOrder("own", 1, 2)), whole_BSO[:, [6, 7]])


def test_a_weight_has_its_own_rows_and_draws_alike_in_a_step() -> None:
    def of(tokens: Tokens, part: Part, rows: int, columns: int) -> torch.Tensor:
        draws = Draws(seed=11)
        draws.at = Moment(5, tokens)
        sizes, cpu = (rows, columns), torch.device("cpu")
        draw = Draw(draws, "a.weight.last", part, sizes, sizes, cpu, is_weight=True)
        return draw(sizes)

    key = spec.key_of(11, 5, "a.weight.last", use=None)
    expected = torch.tensor([[spec.byte_of(key, 0, o, i) for i in range(32)] for o in range(8)])
    assert torch.equal(of(ALL, WHOLE, 8, 32), expected.byte())
    assert torch.equal(of(Tokens((2,)), WHOLE, 8, 32), expected.byte())
    part = Part((range(1, 3), range(5, 7)), (range(16, 32),))
    assert torch.equal(of(ALL, part, 4, 16), expected[[1, 2, 5, 6], 16:].byte())


def test_a_matrix_that_was_filled_up_draws_as_it_was() -> None:
    draws = Draws(seed=11)
    sizes, seen = (3, 20), (16, 32)
    for is_turned in (False, True):
        of, in_all = (sizes, seen) if not is_turned else (sizes[::-1], seen[::-1])
        cpu = torch.device("cpu")
        plain = Draw(draws, f"a{is_turned}.input.last", WHOLE, of, of, cpu, is_turned)(of)
        draws.at = Moment(1, Tokens())  # another step begins, so that both are first casts
        draws.begin("other", is_weight=False)
        draws.at = Moment(0, Tokens())
        filled = Draw(draws, f"a{is_turned}.input.last", WHOLE, of, in_all, cpu, is_turned)(in_all)
        assert torch.equal(filled[: of[0], : of[1]], plain)
        assert filled.shape == in_all


def test_neighbouring_columns_are_one_range() -> None:
    assert columns_of([range(4), range(4, 8), range(12, 16)]) == (range(8), range(12, 16))


def test_an_evaluation_leaves_the_draws_of_training_alone_and_repeats_its_own() -> None:
    state = ScalingState(Fp8Recipe(name="nvfp4"))
    linear = linear_quantizer(state, "a")
    assert linear is not None
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))

    def code() -> bytes:
        found = quantized(linear, "grad_output", x)[0].along_last
        assert isinstance(found, Fp8Tensor)
        return codes(found)

    state.begin_microbatch(0, 1, Tokens((5,)))
    undisturbed = [code() for _ in range(3)]
    state.begin_microbatch(0, 2)
    code()
    state.begin_microbatch(0, 1, Tokens((5,)))
    found, evaluated = [code()], []
    for _ in range(2):
        with state.evaluation():
            evaluated.append(code())
        found.append(code())
    assert found == undisturbed and evaluated[0] == evaluated[1]
    assert len({*found, *evaluated}) == 4


def test_a_recomputation_draws_again_what_its_pass_drew() -> None:
    """Also while another microbatch is the present one, whose own draws go on undisturbed."""
    state = ScalingState(Fp8Recipe(name="nvfp4"))
    linear = linear_quantizer(state, "a")
    assert linear is not None
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))

    def code() -> bytes:
        return codes(quantized(linear, "grad_output", x)[0].along_last)

    undisturbed = []
    for sample in (5, 6):
        state.begin_microbatch(0, 1, Tokens((sample,)))
        undisturbed.append([code() for _ in range(3)])
    state.begin_microbatch(0, 2)
    code()
    state.begin_microbatch(0, 1, Tokens((5,)))
    code()
    again = state.recomputation()
    code()
    state.begin_microbatch(1, 1, Tokens((6,)))
    found = [code()]
    with again:
        repeated = [code(), code()]
    found += [code(), code()]
    assert repeated == undisturbed[0][1:] and found == undisturbed[1]


def casts_of(
    layer_of: torch.Tensor, microbatches: Sequence[tuple[slice, Sequence[int] | None]]
) -> list[bytes]:
    """Return the codes of each microbatch's output gradient in a converted model.

    The gradient is a function of the input `layer_of` [B, S, I].
    """
    torch.manual_seed(1)
    layer = torch.nn.Linear(32, 32)
    state, found = fp8.convert(layer, "nvfp4"), list[bytes]()

    def observe(name: str, x: torch.Tensor, last: Any, first: Any) -> None:
        if name.endswith("grad_output"):
            found.append(codes(last))

    state.scaling.observers.append(observe)
    for index, (which, samples) in enumerate(microbatches):
        x = layer_of[which].clone().requires_grad_()
        with state.microbatch(first=index == 0, samples=samples):
            layer(x).backward(x.detach().sin())
    return found


def codes(operand: Fp8Tensor) -> bytes:
    return bytes(operand.payload.contiguous().view(torch.uint8).flatten().tolist())


def test_samples_of_a_converted_model_draw_alike_in_each_division() -> None:
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0)).clamp_(-1, 1)
    x[:, 0, 0] = 1.5  # all samples have the same amax, so that codes can be compared
    one = casts_of(x, [(slice(4), range(4))])
    two = casts_of(x, [(slice(2), range(2)), (slice(2, 4), (2, 3))])
    assert b"".join(two) == one[0]
    assert casts_of(x, [(slice(2, 4), (2, 3))]) == two[1:]  # the second of two replicas
    counted = casts_of(x, [(slice(2), None), (slice(2, 4), None)])
    assert counted != two and counted == casts_of(x, [(slice(2), None), (slice(2, 4), None)])
    single = [slice(0, 1), slice(1, 2)]
    numbered = casts_of(x, [(single[0], (0,)), (single[1], (1,))])
    assert casts_of(x, [(each, None) for each in single]) == numbered
    with pytest.raises(fp8.Fp8Error, match="64 rows, which are not the tokens of 3 samples"):
        casts_of(x, [(slice(4), range(3))])


def gradient_numbers(layer: torch.nn.Module, state: fp8.Fp8State | None, grad: torch.Tensor) -> Any:
    """Return the numbers that a step casts the output gradient to, along its last dim."""
    found = []

    def observe(name: str, x: torch.Tensor, last: Any, first: Any) -> None:
        if name.endswith("grad_output"):
            found.append(last.payload.float().numpy())

    observers = layer.fp8.quantizer.state.observers
    observers.append(observe)
    with state.microbatch() if state is not None else contextlib.nullcontext():
        layer(torch.ones(16, 32)).backward(grad)
    observers.remove(observe)
    (numbers,) = found
    return numbers


def specified(grad: torch.Tensor, step: int) -> Any:
    key = spec.key_of(0, step, "linear.grad_output.last")
    byte = [[spec.byte_of(key, 0, row, number) for number in range(32)] for row in range(16)]
    codes = nvfp4.quantize_blocks(grad.numpy(), byte=np.array(byte, dtype=np.uint8)).codes
    return np.where(codes & 8, -1, 1) * nvfp4.MAGNITUDES[codes & 7]


def test_each_step_of_a_converted_model_draws_bytes_of_its_own() -> None:
    """One gradient in two steps becomes the codes that the specification has for these steps."""
    grad = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    layer = torch.nn.Linear(32, 32)
    state = fp8.convert(layer, "nvfp4")
    for step in (1, 2, 3):
        assert np.array_equal(gradient_numbers(layer, state, grad), specified(grad, step))
        with state.evaluation(), torch.no_grad():
            layer(grad)
    assert not np.array_equal(specified(grad, 1), specified(grad, 2))


def test_steps_outside_of_a_microbatch_do_not_draw_alike() -> None:
    grad = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    layer = torch.nn.Linear(32, 32)
    fp8.convert(layer, "nvfp4")
    found = []
    for _ in range(3):
        found.append(gradient_numbers(layer, None, grad).tobytes())
        with torch.no_grad():
            layer(grad)
    assert len(set(found)) == 3


class Rounded(fp8.Recipe):
    """Gradients are rounded up or down at random."""

    traits = fp8.Traits(
        input=fp8.alike(fp8.TENSOR),
        weight=fp8.alike(fp8.TENSOR),
        grad_output=fp8.Casts(fp8.TENSOR, fp8.TENSOR, is_random=True),
        power_2="never",
        is_simulated=True,
    )

    def cast(self, x_MK: torch.Tensor, cast: fp8.Cast) -> torch.Tensor:
        unit = x_MK.float().abs().amax().clamp(min=1e-30) / 127
        if cast.role != "grad_output":
            return (x_MK / unit).round() * unit
        return (x_MK / unit + cast.draw(tuple(x_MK.shape)) / 256).floor() * unit


RANDOM = ("nvfp4", "nvfp4-no_rht", "of our own")


def two_steps(model: torch.nn.Module, state: fp8.Fp8State, begin: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in (begin, begin + 1):
        for index in range(2):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(2 * step + index))
            with state.microbatch(first=index == 0):
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("recipe", RANDOM)
@pytest.mark.parametrize("way", ["saved", "copied"])
def test_a_continued_run_draws_what_one_that_was_not_interrupted_draws(
    way: str, recipe: Any
) -> None:
    """Two and two steps have all bits of four."""
    recipe = Rounded if recipe == "of our own" else recipe
    whole, part = mlp(), mlp()
    state = fp8.convert(whole, recipe)
    two_steps(whole, state, 0)
    two_steps(whole, state, 2)
    part_state = fp8.convert(part, recipe)
    two_steps(part, part_state, 0)
    if way == "saved":
        again = mlp()
        again.load_state_dict(part.state_dict())
        again_state = fp8.convert(again, recipe)
        again_state.load_state_dict(part_state.state_dict())
    else:
        again, again_state = copy.deepcopy((part, part_state))
    two_steps(again, again_state, 2)
    for mine, theirs in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert state.state_dict().keys() == {"step"} and int(state.state_dict()["step"]) == 4


SHUFFLED = torch.randperm(32, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("recipe", [*RANDOM, "nvfp4-no_2d"])
@pytest.mark.parametrize("tokens", [Tokens((4, 9), (range(16),)), Tokens((4, 9)), Tokens((7,))])
def test_a_token_draws_alike_in_whichever_row_it_is(tokens: Tokens, recipe: str) -> None:
    """An expert gets tokens in an order of its own; another microbatch begins before backward."""
    name = register_recipe(Rounded) if recipe == "of our own" else recipe
    x, weight, grad = (noise(32, 32, seed=n, dtype=torch.float32) for n in range(3))
    found: list[torch.Tensor] = []
    for order in (None, torch.arange(32), SHUFFLED):
        layer = make(weight, None, settings_of(name))
        assert layer.state is not None
        layer.state.begin_microbatch(0, 1, tokens)
        rows = layer.state.draws.rows_of(32, TokenOrder(), torch.device("cpu"))
        in_order = slice(None) if order is None else order
        out = layer.linear(x[in_order], None if order is None else rows.take(order))
        layer.state.begin_microbatch(1, 1, Tokens((99,)))
        layer.state.return_to(1, tokens)
        layer.state.observers.append(lambda _, x, last, first: found.append(values(last)))
        out.backward(grad[in_order])
    plain, same, moved = found
    assert torch.equal(plain, same) and torch.equal(plain[SHUFFLED], moved)


def test_a_part_of_the_tokens_draws_what_the_whole_draws() -> None:
    """In every order, and where the tokens of the microbatch are divided over ranks."""
    whole_BSO, draws = whole(), Draws(seed=11)
    draws.at = Moment(5, ALL)
    for order, of_rank in ((TokenOrder(), slice(None)), (TokenOrder("own", 1, 4), slice(2, 4))):
        expected = whole_BSO[:, of_rank].flatten(0, 1)
        cpu, some = torch.device("cpu"), torch.tensor([5, 1, 7])
        rows = draws.rows_of(len(expected), order, cpu).take(some)
        draws.at = Moment(5, ALL)
        sizes = 3, FEATURES
        draw = Draw(draws, "a.grad_output.last", WHOLE, sizes, sizes, cpu)
        draws._uses.clear()
        with draws.of_rows(rows):
            assert torch.equal(draw(sizes), expected[some])


def test_a_recipe_says_in_which_linears_it_draws() -> None:
    for name, draws in (("nvfp4", True), ("nvfp4-no_sr", False), ("delayed", False)):
        assert settings_of(name).draws_in(["a", "b"]) == draws
        elsewhere = replace(settings_of("delayed"), modules=(ModuleRule("b", name),))
        assert elsewhere.draws_in(["a", "b"]) == draws and not elsewhere.draws_in(["a"])


def test_what_fills_a_rotated_tensor_draws_after_all_tokens() -> None:
    """The samples keep their own positions; without a rotation it is zero, and draws nothing."""
    tokens, count = Tokens((2, 0), (range(3, 8),)), 10
    key = spec.key_of(11, 5, "a.grad_output.first")
    places = [(sample, at) for sample in (2, 0) for at in range(3, 8)]
    places += [(0, at) for at in range(8, 14)]
    expected = torch.tensor(
        [[spec.byte_of(key, *place, number) for number in range(FEATURES)] for place in places]
    )
    for is_rotated in (True, False):
        draws = Draws(seed=11)
        draws.at = Moment(5, tokens)
        sizes, seen, cpu = (FEATURES, count), (FEATURES, 16), torch.device("cpu")
        turned = {"is_turned": True, "is_rotated": is_rotated}
        drawn = Draw(draws, "a.grad_output.first", WHOLE, sizes, seen, cpu, **turned)(seen).t()
        assert torch.equal(drawn[:count].long(), expected[:count])
        assert torch.equal(drawn[count:].long(), expected[count:] * is_rotated)


def test_tokens_of_samples_that_are_filled_up_keep_their_draws() -> None:
    tokens, found = Tokens((4, 9), (range(17),)), []
    x = noise(34, 32, seed=1, dtype=torch.float32)
    samples = torch.tensor([4] * 17 + [9] * (17 + 14))
    filled = Rows(samples, torch.cat([torch.arange(17), torch.arange(17 + 14)]))
    for rows, tensor in ((None, x), (filled, torch.cat([x, torch.zeros(14, 32)]))):
        layer = make(torch.ones(32, 32), None, settings_of("nvfp4"))
        assert layer.state is not None and layer.linear.quantizer is not None
        layer.state.begin_microbatch(0, 1, tokens)
        operands, _ = layer.linear.quantizer.operands("grad_output", tensor, rows=rows)
        found.append([values(operand) for operand in operands])
    (last, first), (of_filled, first_of_filled) = found
    assert torch.equal(last, of_filled[:34]) and torch.equal(first, first_of_filled)
