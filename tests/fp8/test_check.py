"""Check that `fp8.check` refutes a planted lie for each trait, and no recipe without a lie."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_gather, is_initialized

from fp8_numerics.cast import Fp8Tensor
from fp8_numerics.formats import E4M3
from megafp8 import fp8
from megafp8.cli.recipe import main
from megafp8.fp8 import ROW, TENSOR, Cast, Casts, Recipe, Scaled, Scales, Traits, alike, blocks
from megafp8.fp8.probe import Probe, same_scales
from megafp8.specs import Fp8Recipe
from megafp8.specs.gpus import GPUS, ways
from megafp8.specs.recipes import RECIPES, find_recipe
from tests.c_kernels import need_kernels
from tests.own_recipes.four_bits import FourBits, rotated

ROOT = Path(__file__).parents[2]
OWN = ROOT / "tests" / "own_recipes"
OWN_NAMES = (
    "blocks_of_32.py",
    "four_bits.py",
    "smoothed.py",
    "simulated_int8.py",
    "as_built_in.py:Tensorwise",
    "as_built_in.py:Rowwise",
    "as_built_in.py:Blockwise",
)


@pytest.mark.parametrize("name", RECIPES)
def test_no_trait_of_a_built_in_recipe_is_refuted(name: str) -> None:
    report = fp8.check(name)
    assert report.ok, str(report)
    assert report.refutations == () and "values close" in report.held


@pytest.mark.parametrize("name", OWN_NAMES)
def test_no_trait_of_a_recipe_from_a_file_is_refuted(name: str) -> None:
    report = fp8.check(str(OWN / name))
    assert report.ok, str(report)


def traits(scales: Scales = ROW, **more: Any) -> Traits:
    """Return traits with the same scales for all tensors."""
    both = alike(scales, serves_both=scales.across == scales.along)
    given: dict[str, Any] = {"input": both, "weight": both, "grad_output": both, "multiple": 32}
    return Traits(**(given | more))


def block_of(x_MK: torch.Tensor, cast: Cast) -> tuple[int, int]:
    return cast.scales.across or x_MK.shape[0], cast.scales.along or x_MK.shape[1]


def amaxes(x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
    """Return the amax of each block; a NaN and an infinity do not count."""
    down, right = block_of(x_MK, cast)
    tiles = x_MK.float().nan_to_num(0.0, 0.0, 0.0).abs()
    return tiles.unflatten(0, (-1, down)).unflatten(2, (-1, right)).amax((1, 3)).clamp(min=1e-30)


def spread(scale: torch.Tensor, x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
    down, right = block_of(x_MK, cast)
    return scale.repeat_interleave(down, 0).repeat_interleave(right, 1)


class Honest(Recipe):
    """Scale each block by the power of two above its amax; the lies change one method."""

    traits = traits()

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Any:
        """Quantize each block."""
        amax = self.agreed(amaxes(x_MK, cast), cast)
        scale = self.scale(amax, x_MK, cast)
        numbers = self.numbers(x_MK.float() / spread(scale, x_MK, cast), cast)
        codes = numbers.clamp(-cast.fmt.max, cast.fmt.max).to(cast.fmt.dtype)
        return Scaled(codes, scale[0, 0] if cast.scales.is_one else scale)

    def agreed(self, amax: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Take the maximum over ranks."""
        if cast.reduce_max is not None:
            cast.reduce_max(amax)
        return amax

    def scale(self, amax: torch.Tensor, x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Return the scales."""
        return torch.exp2(torch.log2(amax / cast.fmt.max).ceil()).clamp(2.0**-100)

    def numbers(self, numbers: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Return the numbers before they are rounded."""
        return numbers

    def scale_of_amax(self, amax: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Return the scale that a weight of this amax is multiplied by."""
        amax = amax.nan_to_num(0.0, 0.0, 0.0).clamp(min=1e-30)
        return self.scale(amax, amax, cast).reciprocal()


TRUTHS = {
    "blocks": traits(blocks(32), commutes=True),
    "rows": traits(),
    "tensor": traits(TENSOR, agrees=True, commutes=True, shares_weight=True),
    "squares": traits(blocks(32, 32), commutes=True),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_the_rule_that_the_lies_change_is_not_refuted(name: str) -> None:
    class Truth(Honest):
        traits = TRUTHS[name]

    report = fp8.check(Truth)
    assert report.ok, str(report)


def lie(about: Traits = TRUTHS["rows"], **methods: Callable[..., Any]) -> type[Recipe]:
    """Return the honest rule with other traits and some other methods."""
    return type("Lie", (Honest,), {"traits": about, "__module__": __name__, **methods})


def after(change: Callable[[Any, torch.Tensor, Cast], Any]) -> Callable[..., Any]:
    """Return a `cast` that changes the honest result."""

    def cast(self: Honest, x_MK: torch.Tensor, cast: Cast) -> Any:
        return change(Honest.cast(self, x_MK, cast), x_MK, cast)

    return cast


def before(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Return a `cast` that changes the tensor first."""
    return lambda self, x_MK, cast: Honest.cast(self, change(x_MK), cast)


def numbers(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Callable[..., Any]]:
    return {"numbers": lambda self, numbers, cast: change(numbers)}


def zeroes_its_input(result: Scaled, x_MK: torch.Tensor, cast: Cast) -> Scaled:
    x_MK.zero_()
    return result


def as_it_lies(x_MK: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x_MK, x_MK.shape, (x_MK.shape[1], 1))


class Remembers(Honest):
    """Keep the largest amax that was ever seen."""

    traits = TRUTHS["rows"]
    largest = torch.zeros(())

    def scale(self, amax: torch.Tensor, x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Return one scale from all amaxes so far."""
        self.largest = torch.maximum(self.largest, amax.amax())
        return super().scale(self.largest.expand(amax.shape), x_MK, cast).contiguous()


def asks_if_large(self: Honest, amax: torch.Tensor, cast: Cast) -> torch.Tensor:
    if cast.reduce_max is not None and float(amax) > 1e-20:
        cast.reduce_max(amax)
    return amax


def always_asks(self: Honest, amax: torch.Tensor, cast: Cast) -> torch.Tensor:
    assert cast.reduce_max is not None, "there must be other ranks"
    cast.reduce_max(amax)
    return amax


def dithered(part: float) -> Callable[..., torch.Tensor]:
    """Return a rounding to integers with random bytes; an honest part is 1."""

    def cast(self: Recipe, x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
        scale = x_MK.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7
        return (x_MK / scale + part * cast.draw(tuple(x_MK.shape)) / 256).floor() * scale

    return cast


def partly_dithered(self: Recipe, x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
    """Round to nearest, with a little noise: other bytes change some numbers, without a trend."""
    scale = x_MK.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7
    noise = (cast.draw(tuple(x_MK.shape)) / 255 - 0.5) / 4
    return (x_MK / scale + noise).round() * scale


def by_first_row(self: Honest, amax: torch.Tensor, x: torch.Tensor, cast: Cast) -> torch.Tensor:
    """Double the scale of squares whose first row is larger than their first column."""
    tiles = x.float().abs().nan_to_num(0.0, 0.0, 0.0).unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    is_larger = tiles[:, 0].amax(-1) > tiles[..., 0].amax(1)
    return Honest.scale(self, amax, x, cast) * torch.where(is_larger, 2.0, 1.0)


RANDOM = Casts(ROW, ROW, is_random=True)
SIMULATED_RANDOM = traits(is_simulated=True, input=RANDOM, weight=RANDOM, grad_output=RANDOM)


class WrongHalf(FourBits):
    """Rotate one of two operands alone."""

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Turn the rotation of the input back; the matrix is its own inverse."""
        if cast.along == "first" and cast.role == "input":
            x_MK = rotated(x_MK)
        return super().cast(x_MK, cast)


class NotRotated(FourBits):
    """Rotate neither."""

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Turn each rotation back."""
        if cast.along == "first" and cast.role != "weight":
            x_MK = rotated(x_MK)
        return super().cast(x_MK, cast)


class OwnFactors(FourBits):
    """Ranks do not agree on the factor of the whole tensor."""

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Ask no other rank."""
        return super().cast(x_MK, cast._replace(reduce_max=None))


def sends(amax: torch.Tensor, how: str) -> torch.Tensor:
    if how == "at once":
        dist.all_reduce(amax)
    elif how == "where there are ranks" and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(amax, 0)
    elif how == "by an imported name" and is_initialized():
        all_gather([amax, amax], amax)
    return amax


def sending(how: str) -> type[Recipe]:
    return lie(agreed=lambda self, amax, cast: sends(amax, how))


ONE = TRUTHS["tensor"]
LIES: dict[str, tuple[str, type[Recipe]]] = {
    "it takes no FP16": (
        "runs",
        lie(cast=before(lambda x: x[:, ::2] if x.dtype == torch.float16 else x)),
    ),
    "large numbers overflow": (
        "runs",
        lie(traits(is_simulated=True), cast=lambda self, x, cast: x.half().float()),
    ),
    "it reads memory and not the tensor": ("any memory layout", lie(cast=before(as_it_lies))),
    "it writes into its input": ("input unchanged", lie(cast=after(zeroes_its_input))),
    "the scale is the wrong way round": (
        "values close",
        lie(cast=after(lambda r, x, c: r._replace(dequant_scale=r.dequant_scale.reciprocal()))),
    ),
    "rows get each other's scales": (
        "values close",
        lie(cast=after(lambda r, x, c: r._replace(dequant_scale=r.dequant_scale.flip(0)))),
    ),
    "it cuts large numbers off": (
        "max_saturated",
        lie(
            traits(blocks(32), power_2="never"),
            scale=lambda self, amax, x, cast: amax * 0.9 / cast.fmt.max,
        ),
    ),
    "zeros become small numbers": (
        "zero stays zero",
        lie(**numbers(lambda n: n + (n == 0) * 0.02)),
    ),
    "a NaN becomes zero": ("NaN visible", lie(**numbers(lambda n: n.nan_to_num(nan=0.0)))),
    "an infinity becomes zero": (
        "infinity visible",
        lie(**numbers(lambda n: torch.where(n.isinf(), 0.0, n))),
    ),
    "it draws from torch": (
        "deterministic",
        lie(**numbers(lambda n: n * (1 + 0.02 * torch.rand(n.shape)))),
    ),
    "it draws and does not say so": (
        "deterministic",
        lie(numbers=lambda self, n, c: n * (1 + c.draw(tuple(n.shape)) / 2**13)),
    ),
    "it keeps what it has seen": ("deterministic", Remembers),
    "scales are as they come": (
        "power_2",
        lie(scale=lambda self, amax, x, cast: amax / cast.fmt.max),
    ),
    "a square's first row counts twice": (
        "serves_both",
        lie(traits(blocks(32, 32)), scale=by_first_row),
    ),
    "rows are cut": ("commutes", lie(traits(commutes=True))),
    "a part has the whole tensor's scale": (
        "commutes",
        lie(
            traits(blocks(32), commutes=True),
            scale=lambda self, amax, x, cast: Honest.scale(
                self, amax.amax().expand(amax.shape).contiguous(), x, cast
            ),
        ),
    ),
    "it asks no other rank": ("agrees", lie(ONE, agreed=lambda self, amax, cast: amax)),
    "it asks only sometimes": ("agrees", lie(ONE, agreed=asks_if_large)),
    "one of two factors is a rank's own": ("agrees", OwnFactors),
    "it cannot be alone": ("runs", lie(ONE, agreed=always_asks)),
    "it asks and does not say so": (
        "runs",
        lie(traits(TENSOR), agreed=lambda self, amax, cast: cast.reduce_max(amax)),
    ),
    "a shared weight has another scale": (
        "shares_weight",
        lie(ONE, scale_of_amax=lambda self, amax, c: Honest.scale_of_amax(self, amax, c) / 2),
    ),
    "a shared weight has other numbers": (
        "shares_weight",
        lie(ONE, **numbers(lambda n: n.sign() * n.abs().sub(0.01).clamp(min=0))),
    ),
    "its random bytes are not used": ("is_random", lie(replace(TRUTHS["rows"], input=RANDOM))),
    "it rounds down too often": ("is_random", lie(SIMULATED_RANDOM, cast=dithered(0.8))),
    "it rounds to nearest with noise": ("is_random", lie(SIMULATED_RANDOM, cast=partly_dithered)),
    "one of two operands is rotated": ("rotation", WrongHalf),
    "no operand is rotated": ("rotation", NotRotated),
    "numbers and scales are no values": (
        "is_simulated",
        lie(
            traits(is_simulated=True),
            cast=lambda self, x, cast: Scaled(x.float() / 2, torch.full((len(x), 1), 2.0)),
        ),
    ),
    "it sends at once": ("no undeclared message", sending("at once")),
    "it sends where it can": ("no undeclared message", sending("where there are ranks")),
    "it sends by an imported name": ("no undeclared message", sending("by an imported name")),
}


CLAIMED = {trait for trait, _ in LIES.values()}


@pytest.mark.parametrize("name", LIES)
def test_a_planted_lie_is_found(name: str) -> None:
    trait, recipe = LIES[name]
    report = fp8.check(recipe)
    assert not report.ok
    assert trait in [one.trait for one in report.refutations], str(report)
    assert trait not in report.held
    assert f"refuted: {trait} (" in str(report)


def test_an_unbiased_rule_is_not_called_biased() -> None:
    report = fp8.check(lie(SIMULATED_RANDOM, cast=dithered(1.0)))
    assert "is_random" in report.held, str(report)


class Saturates(FourBits):
    """Clip the largest numbers of each block, whose errors are then far from 0 on average."""

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Quantize numbers of at most eight tenths of their block's amax."""
        if cast.along == "last" and cast.role == "grad_output":
            tiles = x_MK.float().unflatten(1, (-1, 16))
            most = 0.8 * tiles.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True)
            x_MK = tiles.clamp(-most, most).flatten(1)
        return super().cast(x_MK, cast)


def test_saturated_numbers_of_two_levels_of_scales_are_no_bias() -> None:
    report = fp8.check(Saturates)
    assert "is_random" in report.held, str(report)


def test_every_claim_has_a_planted_lie() -> None:
    claims = {*fp8.check("rowwise").held, *fp8.check("rowwise").not_declared}
    assert claims == CLAIMED


def test_the_recipes_of_the_page_hold(tmp_path: Path) -> None:
    """Each class of the page that has traits is a file of its own, as a reader copies it."""
    page = (ROOT / "docs/guide/own_recipe.md").read_text("utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    checked = {}
    for number, program in enumerate(text for text in programs if "traits = " in text):
        file = tmp_path / f"recipe_{number}.py"
        file.write_text(program, "utf-8")
        report = fp8.check(str(file))
        assert report.ok, str(report)
        checked[report.recipe.partition(" ")[0]] = set(report.held)
    assert checked.keys() == {"BlocksOf32", "Stochastic"}
    assert "is_random" in checked["Stochastic"]


def test_the_functions_of_torch_come_back_after_a_check() -> None:
    functions = dist.all_reduce, dist.is_initialized, all_gather
    state = torch.random.get_rng_state()
    fp8.check(sending("at once"))
    assert functions == (dist.all_reduce, dist.is_initialized, all_gather)
    assert torch.equal(state, torch.random.get_rng_state())


def test_what_is_no_recipe_cannot_be_checked() -> None:
    for wrong in ("delayd", "no/such/file.py", Recipe):
        with pytest.raises(fp8.Fp8Error):
            fp8.check(wrong)


def test_the_command_checks_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "lab.py"
    source = (OWN / "blocks_of_32.py").read_text("utf-8")
    file.write_text(source, "utf-8")
    assert main(["check", f"{file}:BlocksOf32"]) == 0
    assert "BlocksOf32 (lab.py): nothing is refuted" in capsys.readouterr().out
    wrong = tmp_path / "wrong.py"
    wrong.write_text(source.replace("(numbers.flatten(1).to(", "(numbers.abs().flatten(1).to("))
    assert main(["check", str(wrong)]) == 2
    assert "refuted: values close (input, float32)" in capsys.readouterr().out


def test_a_rule_that_leaves_is_refuted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    need_kernels()
    source = (OWN / "simulated_int8.py").read_text("utf-8")
    file = tmp_path / "leaving.py"
    file.write_text(f"{source}\n    def in_c(self, x_MN, block, cast): raise SystemExit(0)\n")
    assert main(["check", str(file)]) == 2
    assert "refuted: runs" in (out := capsys.readouterr().out) and "SystemExit: 0" in out


@pytest.mark.parametrize(
    ("gpu", "recipe", "generation"),
    [
        (["h100"], "tensorwise", "Hopper"), (["NVIDIA", "H200-SXM"], "tensorwise", "Hopper"),
        (["rtx", "4090"], "tensorwise", "Ada"), (["L40S"], "tensorwise", "Ada"),
        (["gb200"], "mxfp8", "Blackwell (B200"), (["10.0"], "mxfp8", "Blackwell (B200"),
        (["RTX", "PRO", "6000"], "mxfp8", "Blackwell (RTX"), (["5090"], "mxfp8", "Blackwell (RTX"),
    ],
)  # fmt: skip
def test_a_gpu_has_one_recipe_in_one_line_with_the_reason(
    gpu: list[str], recipe: str, generation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["for", *gpu]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"model.fp8_recipe={recipe} on {generation}")
    assert "Not timed by us" in line


def test_advice_is_a_recipe_that_runs_on_the_tensor_cores() -> None:
    every = [find_recipe(name).traits for name in RECIPES]
    advised = [(capability, traits) for traits in every for capability in traits.advised]
    assert sorted(capability for capability, _ in advised) == sorted(GPUS.values())
    for capability, traits in advised:
        assert "native" in ways(traits, capability)
    page = (ROOT / "docs/guide/fp8.md").read_text("utf-8")
    assert "take `tensorwise`, which" in page and "`mxfp8` is the recipe of these GPUs" in page


@pytest.mark.parametrize("gpu", ["a100", "RTX 3090", "v100", "cpu"])
def test_a_device_without_tensor_cores_for_fp8_is_said_to_emulate(
    gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["for", gpu]) == 0
    assert capsys.readouterr().out.startswith("any recipe on a ")


@pytest.mark.parametrize(("gpu", "hint"), [("mi300x", "No kernel is"), ("h1000", "such as h100")])
def test_an_unknown_gpu_is_an_error(
    gpu: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["for", gpu]) == 2
    assert f"error: GPU={gpu}" in (said := capsys.readouterr().err) and hint in said


def test_the_table_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and all(sum(n in x for x in lines) >= 2 for n in RECIPES)
    assert not any("|" in line for line in lines)


def test_the_page_has_the_table_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table"]) == 0
    printed = capsys.readouterr().out
    assert printed in (ROOT / "docs/guide/fp8.md").read_text("utf-8"), (
        "copy the table into docs/guide/fp8.md"
    )
    assert [row.split("`")[1] for row in printed.splitlines()[2:]] == list(RECIPES)


@pytest.mark.parametrize(
    ("name", "capability", "backends"),
    [
        ("delayed", (8, 6), ()),
        ("delayed", (8, 9), ("native", "te")),
        ("rowwise", (8, 9), ()),
        ("rowwise", (10, 0), ("native",)),
        ("blockwise", (8, 9), ()),
        ("blockwise", (9, 0), ("native", "te")),
        ("blockwise", (10, 0), ("te",)),
    ],
)
def test_what_runs_a_recipe_on_a_gpu(
    name: str, capability: tuple[int, int], backends: tuple[str, ...]
) -> None:
    assert ways(find_recipe(name).traits, capability) == backends


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["check", "delayd"], ["NAME=delayd", "there is no such recipe"]),
        (["check", "none.py"], ["NAME=none.py", "there is no file"]),
        (["check"], ["NAME"]),
        (["look", "delayed"], ["look"]),
        ([], ["check"]),
    ],
)
def test_what_the_command_cannot_read(
    given: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and all(word in error for word in words)


def test_help_and_a_wrong_name_load_no_torch() -> None:
    program = (
        "import sys; from megafp8.cli.recipe import main; assert main(['check', 'x.py']) == 2;"
    )
    program += "assert 'torch' not in sys.modules; main(['--help'])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "check NAME" in done.stdout


def test_a_rule_that_fails_says_so_once_for_a_tensor() -> None:
    report = fp8.check(LIES["it cannot be alone"][1])
    assert [one.trait for one in report.refutations] == ["runs", "runs"]
    assert [one.where.split(",")[0] for one in report.refutations] == ["input", "weight"]
    assert "in always_asks: AssertionError" in report.refutations[0].reason
    assert report.held == ("no undeclared message",)
    lines = str(report).splitlines()
    assert lines[0].endswith(": 1 of its claims is refuted")
    (not_tried,) = (line for line in lines if line.startswith("  not tried because of it: "))
    tried = {*report.held, "runs", *report.not_declared}
    assert set(not_tried.partition(": ")[2].split(", ")) == CLAIMED - tried


@pytest.mark.parametrize("name", ["it cannot be alone", "it sends at once", list(LIES)[0]])
def test_each_claim_is_in_one_list(name: str) -> None:
    report = fp8.check(LIES[name][1])
    refuted = {one.trait for one in report.refutations}
    lists = [refuted, set(report.held), set(report.not_declared), set(report.not_tried)]
    assert set.union(*lists) == CLAIMED and sum(map(len, lists)) == len(CLAIMED)


def test_one_matrix_has_a_row_and_a_column_of_zeros() -> None:
    is_zero = Probe(Fp8Recipe(), "input").wide == 0
    assert is_zero.all(1).nonzero().tolist() == [[3]]
    assert is_zero.all(0).nonzero().tolist() == [[5]]


def test_operands_of_other_scales_or_factors_are_not_the_same() -> None:
    one = Fp8Tensor(
        torch.zeros(2, 2).to(torch.float8_e4m3fn), torch.ones(2, 1), E4M3, outer=torch.tensor(1.0)
    )
    changes = (
        {"dequant_scale": torch.full((2, 1), 2.0)},
        {"outer": torch.tensor(2.0)},
        {"outer": None},
    )
    assert same_scales(one, replace(one)) and same_scales(
        replace(one, outer=None), replace(one, outer=None)
    )
    for change in changes:
        other = replace(one, **change)  # type: ignore[arg-type]
        assert not same_scales(one, other) and not same_scales(other, one)
