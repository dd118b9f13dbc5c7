"""Check what FP8 linears did on ranks: codes and scales by the specification of the whole tensors,
results by float64 products of what the ranks should have read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megafp8.fp8.quantizer import Role
from megafp8.specs import Fp8Recipe
from tests.fp8.test_recipes import groups_of, rule_of
from tests.kit.cases import Case
from tests.kit.tensors import assembled
from tests.parallel.linear_records import Fed, Parameter, Pass, Step, Watched
from tests.spec import current, mxfp8, nvfp4
from tests.spec.formats import E4M3, FORMATS, Floats64, dequantize, quantize

Array = Any  # of NumPy
Tensors = dict[str, torch.Tensor]
ROLES: tuple[Role, ...] = ("input", "weight", "grad_output")
SHARED_TOKENS = {("column", "input"), ("row", "grad_output")}
"""The tensors whose tokens sequence parallelism divides."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Read:
    """A rank's tensor as a product should read it; `codes` None: not in FP8."""

    values: Floats64
    codes: Array | None = None
    scale: Array | None = None
    outer: np.float32 | None = None

    @classmethod
    def of(cls, scaled: current.Scaled) -> Read:
        return cls(scaled.values, scaled.codes, scaled.dequant_scale)

    @classmethod
    def plain(cls, x: torch.Tensor) -> Read:
        return cls(x.double().numpy())

    def rounded(self, dtype: torch.dtype) -> Read:
        """The values, rounded to FP32 and then to the dtype."""
        return Read.plain(torch.from_numpy(self.values).float().to(dtype))

    @property
    def turned(self) -> Read:
        """The same tensor, transposed."""
        return self._each(lambda array: array.T)

    def split(self, ranks: int) -> list[Read]:
        """The tokens of each rank."""
        parts = np.split(np.arange(len(self.values)), ranks)
        return [self._each(lambda array, rows=rows: array[rows]) for rows in parts]  # type: ignore[misc]

    def _each(self, change: Callable[[Array], Array]) -> Read:
        arrays = self.values, self.codes, self.scale
        return Read(*(None if a is None else change(a) for a in arrays), self.outer)  # type: ignore[arg-type]


def together(parts: Sequence[Read]) -> Read:
    """The tokens of all ranks, rank by rank."""
    fields = zip(*((part.values, part.codes, part.scale) for part in parts), strict=True)
    found = (None if f[0] is None else np.concatenate(f) for f in fields)
    outers = {part.outer for part in parts}
    assert len(outers) == 1, "the factor of the whole tensor is the same on all ranks"
    return Read(*found, outers.pop())  # type: ignore[arg-type]


@dataclass
class Checker:
    """Checks one case, pass after pass; `amaxes` are those of earlier steps, for `delayed`."""

    case: Case
    ranks: list[Watched]
    amaxes: dict[tuple[str, str], list[np.float32]] = field(default_factory=dict)

    @property
    def recipe(self) -> Fp8Recipe:
        assert self.case.fp8 is not None
        return self.case.fp8

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.case.compute]

    @property
    def unit(self) -> float:
        """Half a unit in the last place of a result."""
        return 2.0**-24 if self.case.compute == "fp32" else 2.0**-8

    def kind(self, name: str) -> str:
        """How ranks share the linear: by its out features, its in features, or its tokens."""
        parameter = self.ranks[0].weights[name]
        place = parameter.places[0]
        rows, columns = (s.stop - s.start for s in place.local)
        if rows < place.global_shape[0]:
            return "column"
        return "row" if columns < place.global_shape[1] else "tokens"

    def check(self) -> None:
        for number, _ in enumerate(self.ranks[0].steps):
            steps = [rank.steps[number] for rank in self.ranks]
            self.check_step(steps, f"step {number}")
        self.check_step([rank.evaluation for rank in self.ranks], "evaluation")

    def check_step(self, steps: list[Step], when: str) -> None:
        masters = assembled([step.masters for step in steps])
        trains = bool(steps[0].gradients)
        gradients = assembled([step.gradients for step in steps]) if trains else {}
        for name in steps[0].passes:
            passes = [step.passes[name] for step in steps]
            params = [self.params(rank, name, masters, gradients) for rank in self.ranks]
            try:
                self.check_linear(name, passes, params)
            except AssertionError as error:
                raise AssertionError(f"{when}, {name}: {error}") from error

    def params(
        self, rank: Watched, name: str, masters: Tensors, gradients: Tensors
    ) -> dict[str, torch.Tensor]:
        """A rank's parameters, rounded to the compute dtype, and their gradients."""
        weight, bias = rank.weights[name], rank.biases[name]
        found = {
            "weight": local(weight, masters).to(self.dtype).float(),
            "bias": local(bias, masters).to(self.dtype).float(),
        }
        if gradients:
            found |= {"grad_weight": local(weight, gradients), "grad_bias": local(bias, gradients)}
        return found

    def check_linear(
        self, name: str, passes: list[Pass], params: list[dict[str, torch.Tensor]]
    ) -> None:
        kind, sp = self.kind(name), self.case.parallel.sequence_parallel
        trains = passes[0].grad_output is not None
        inputs = self.read(name, "input", [p.input for p in passes], kind, trains=trains)
        weights = self.read(name, "weight", [p["weight"] for p in params], kind)
        if not trains and not self.recipe.fp8_in_evaluation:
            weights = [self.without_fp8(*both) for both in zip(weights, params, strict=True)]
            inputs = [(Read.plain(p.input),) * 2 for p in passes]
        if sp and kind == "column":
            inputs = [gathered(inputs)] * len(passes)
        outputs = []
        for given, (input, _), (weight, _) in zip(passes, inputs, weights, strict=True):
            assert_fed(given.fed["output"], input, weight, "output")
            outputs.append(product(input.values, weight.values.T))
        bias = [p["bias"].double().numpy() for p in params]
        got = [p.output for p in passes]
        self.assert_results(got, outputs, "output", kind == "row", sp, bias=bias)
        if trains:
            self.check_backward(name, passes, params, inputs, weights)

    def without_fp8(
        self, weight: tuple[Read, Read], params: dict[str, torch.Tensor]
    ) -> tuple[Read, Read]:
        """A weight as evaluation without FP8 reads it: what its bytes mean, where it has no other
        values."""
        plain = Read.plain(params["weight"])
        return (weight[0].rounded(self.dtype) if self.recipe.params_in_fp8 else plain,) * 2

    def check_backward(
        self,
        name: str,
        passes: list[Pass],
        params: list[dict[str, torch.Tensor]],
        inputs: list[tuple[Read, Read]],
        weights: list[tuple[Read, Read]],
    ) -> None:
        kind, sp = self.kind(name), self.case.parallel.sequence_parallel
        found = [p.grad_output for p in passes if p.grad_output is not None]
        grads = self.read(name, "grad_output", found, kind, drawn=[p.drawn for p in passes])
        if sp and kind == "row":
            grads = [gathered(grads)] * len(passes)
        grad_inputs, grad_weights = [], []
        for given, (_, input), (_, weight), (last, first) in zip(
            passes, inputs, weights, grads, strict=True
        ):
            assert_fed(given.fed["grad_input"], last, weight, "grad_input")
            assert_fed(given.fed["grad_weight"], first, input, "grad_weight")
            grad_inputs.append(product(last.values, weight.values))
            grad_weights.append(product(first.values.T, input.values))
        got = [p.grad_input for p in passes]
        self.assert_results(got, grad_inputs, "grad_input", kind == "column", sp)
        got = [p["grad_weight"] for p in params]
        self.assert_results(got, grad_weights, "grad_weight", kind == "tokens", False)
        sums = [column_sums(grad.double().numpy()) for grad in found]
        # FSDP's gradients are in the bias' dtype before they are summed, all others in FP32.
        unit = self.unit if self.case.parallel.fsdp is not None else 2.0**-24
        got = [p["grad_bias"] for p in params]
        is_summed = kind == "tokens" or (sp and kind == "row")
        self.assert_results(got, sums, "grad_bias", is_summed, False, unit)
        tensors = [p.input for p in passes], [p["weight"] for p in params], found
        for role, parts in zip(ROLES, tensors, strict=True):
            amax = max(current.amax_of(part.numpy()) for part in parts)
            self.amaxes.setdefault((name, role), []).append(amax)

    def read(
        self,
        name: str,
        role: Role,
        parts: list[torch.Tensor],
        kind: str,
        *,
        trains: bool = True,
        drawn: list[Tensors] | None = None,
    ) -> list[tuple[Read, Read]]:
        """Each rank's part as the products along its last and its first dim should read it.

        `trains` says that the second product follows. `drawn` are each rank's random bytes.
        """
        recipe = self.recipe
        fmt = FORMATS[recipe.backward_format if role == "grad_output" else recipe.forward_format]
        arrays = [part.numpy() for part in parts]
        if recipe.name in ("delayed", "tensorwise"):
            found = []
            for array in arrays:
                amaxes = [current.amax_of(a) for a in ([array] if kind == "tokens" else arrays)]
                if recipe.name == "delayed":
                    amaxes = self.amaxes.get((name, role), [np.float32(0)])  # 0: a scale of 1
                scale = current.scale_of(max(amaxes), fmt, "te", recipe.power_2_scale)
                found.append((Read.of(quantized(array, scale, fmt)),) * 2)
            return found
        # Ranks that divide the tokens of a tensor quantize it as one that has all of them.
        shares = self.case.parallel.sequence_parallel and (kind, role) in SHARED_TOKENS
        wholes = [np.concatenate(arrays)] if shares else arrays
        if recipe.name == "nvfp4":
            every = wholes if kind != "tokens" else None  # the ranks' parts have one amax
            draws = [self.draws_of(role, drawn, shares, rank) for rank in range(len(wholes))]
            found = [
                read_nvfp4(x, role, every or [x], draw, trains=trains)
                for x, draw in zip(wholes, draws, strict=True)
            ]
        elif recipe.name == "mxfp8":
            found = [read_mxfp8(x, trains=trains) for x in wholes]
        else:
            found = [self.read_groups(x, role, fmt) for x in wholes]
        if shares:
            ((last, first),) = found
            found = list(zip(last.split(len(parts)), first.split(len(parts)), strict=True))
        return found

    def read_groups(self, x: Array, role: Role, fmt: Any) -> tuple[Read, Read]:
        recipe = self.recipe
        rule = rule_of(recipe.name)
        last, first = (
            Read.of(current.quantize_groups(x, group, fmt, rule, recipe.power_2_scale))
            for group in groups_of(recipe.name, role)
        )
        is_plain = "grad_weight" in recipe.high_precision_gemms and role != "weight"
        return last, Read(x.astype(np.float64)) if is_plain else first

    def draws_of(
        self, role: Role, drawn: list[Tensors] | None, shares: bool, rank: int
    ) -> dict[str, Array]:
        """The random bytes of one tensor: [T, N] for the sum along the last dim, [N, T] else."""
        if drawn is None:
            return {}
        ranks = drawn if shares else [drawn[rank]]
        return {
            along: np.concatenate([d[f"{role}.{along}"].numpy() for d in ranks], axis)
            for along, axis in (("last", 0), ("first", 1))
        }

    def assert_results(
        self,
        got: Sequence[Any],
        parts: list[tuple[Floats64, Floats64, int]],
        what: str,
        is_summed: bool,
        is_scattered: bool,
        unit: float | None = None,
        bias: list[Floats64] | None = None,
    ) -> None:
        """Compare results of all ranks, given each rank's (product, magnitudes, terms).

        Each rank's result is rounded, then the sum of all ranks, if they sum, then that with the
        bias.
        """
        unit = self.unit if unit is None else unit
        for rank, ours in enumerate(got):
            chosen = parts if is_summed else [parts[rank]]
            exact = np.sum([p for p, _, _ in chosen], axis=0)
            errors = [
                (k + 6) * 2.0**-24 * m + unit * np.abs(p) + k * 2.0**-149 for p, m, k in chosen
            ]
            bound = np.sum(errors, axis=0) + (unit * np.abs(exact) if is_summed else 0)
            if bias is not None:
                exact = exact + bias[rank]
                bound = bound + unit * np.abs(exact)
            if is_summed and is_scattered:
                exact, bound = (np.split(x, len(got))[rank] for x in (exact, bound))
            error, bound = np.abs(ours.double().numpy() - exact), bound * (1 + 2 * unit)
            worst = np.max(error - bound)
            assert worst <= 0, f"{what} of rank {rank} is {worst} outside of its bound"


def read_mxfp8(x: Array, *, trains: bool) -> tuple[Read, Read]:
    def of(x: Array) -> Read:
        made = mxfp8.quantize_rows(x)
        return Read(made.values, made.codes, made.dequant_scale.astype(np.float32))

    last = of(x)
    return last, of(x.T).turned if trains else last


def read_nvfp4(
    x: Array, role: Role, parts: list[Array], draws: dict[str, Array], *, trains: bool
) -> tuple[Read, Read]:
    """`parts` are those of all ranks that share one amax."""

    def of(x: Array, parts: list[Array], along: str) -> Read:
        rows = nvfp4.BLOCK if role == "weight" else 1
        amax = max(nvfp4.amax_of(part) for part in parts)
        made = nvfp4.quantize_blocks(x, rows, amax, draws.get(along))
        signs = np.where(made.codes & 8, -1.0, 1.0)
        numbers = signs * nvfp4.MAGNITUDES[made.codes & 7]
        scales = dequantize(made.scale_codes, E4M3)
        scales = np.repeat(np.repeat(scales, rows, axis=0), nvfp4.BLOCK, axis=1)
        outer = np.float32(amax) / nvfp4.LARGEST
        codes = quantize(numbers.astype(np.float32), np.float32(1), E4M3)
        return Read(made.unscaled * float(outer), codes, scales.astype(np.float32), outer)

    def rotated(x: Array) -> Array:
        return torch.from_numpy(nvfp4.rotate(x.T)).float().bfloat16().float().numpy()

    last = of(x, parts, "last")
    if role == "weight" or not trains:
        return last, last
    return last, of(rotated(x), [rotated(part) for part in parts], "first").turned


def quantized(x: Array, scale: np.float32, fmt: Any) -> current.Scaled:
    codes = current.quantize(x, scale, fmt)
    dequant = np.full(x.shape, current.dequant_scale_of(scale), np.float32)
    return current.Scaled(codes, fmt, np.full(x.shape, scale, np.float32), dequant)


def product(a: Floats64, b: Floats64) -> tuple[Floats64, Floats64, int]:
    """The exact product, that of the magnitudes, and the number of terms of a sum."""
    return a @ b, np.abs(a) @ np.abs(b), a.shape[1]


def column_sums(grad: Floats64) -> tuple[Floats64, Floats64, int]:
    """The sums of each column, as `product` has them."""
    return grad.sum(0), np.abs(grad).sum(0), grad.shape[0]


def gathered(parts: list[tuple[Read, Read]]) -> tuple[Read, Read]:
    return together([last for last, _ in parts]), together([first for _, first in parts])


def assert_fed(fed: tuple[Fed, Fed], left: Read, right: Read, what: str) -> None:
    """The product read these very codes and scales."""
    for given, expected in zip(fed, (left, right), strict=True):
        is_fp8 = given.scale is not None
        assert is_fp8 == (expected.codes is not None), f"{what}: is an operand in FP8?"
        if not is_fp8:
            np.testing.assert_array_equal(given.values.double().numpy(), expected.values, what)
            continue
        np.testing.assert_array_equal(given.values.numpy(), expected.codes, f"{what}: codes")
        np.testing.assert_array_equal(given.scale.numpy(), expected.scale, f"{what}: scales")  # type: ignore[union-attr]
        outer = None if given.outer is None else given.outer.numpy()
        assert outer == expected.outer, f"{what}: the factor of the whole tensor"


def local(parameter: Parameter, whole: dict[str, torch.Tensor]) -> torch.Tensor:
    """A rank's parameter, from the logical tensors."""
    found = torch.full(parameter.shape, torch.nan)
    for place in parameter.places:
        sizes = [s.stop - s.start for s in place.local]
        at = tuple(slice(o, o + size) for o, size in zip(place.offset, sizes, strict=True))
        found[place.local] = whole[place.name][at]
    return found


def problem_of(check: Callable[[], None]) -> str | None:
    """The message of a failed check."""
    try:
        check()
    except AssertionError as error:
        return str(error)
    return None
