"""Quantize by the `cast` of a recipe, a rule that keeps nothing, in torch operations or in C."""

# M, N the tensor's own dims   K the dim that a product sums over

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
import torch.nn.functional as F

from fp8_numerics import block_casts
from fp8_numerics.cast import Fp8Tensor, column_sums
from fp8_numerics.formats import E2M1
from megafp8.errors import UserError
from megafp8.fp8.draws import Draw
from megafp8.fp8.quantizer import (
    Operands,
    SavedForm,
    TensorQuantizer,
    WantsFp8,
    operands_of,
    values_dtype,
)
from megafp8.specs.recipe import Cast, Recipe, Scaled, Seen
from megafp8.specs.recipes import is_interrupt, raised
from megafp8.specs.traits import Scales

if TYPE_CHECKING:
    from megafp8.fp8.scaling import ScalingState

Along = Literal["last", "first"]
LAST: Along = "last"
FIRST: Along = "first"
Result = TypeVar("Result")


class RuleError(UserError):
    """Report that a recipe's rule failed, or that it does not return what its traits say.

    `trait` names the trait that is refuted; `runs` stands for a rule that cannot be used at all.
    """

    def __init__(self, text: str, trait: str = "runs") -> None:
        super().__init__(text)
        self.trait = trait


class CastRule(Recipe):
    """Make operands of a tensor by a recipe's `cast`: one for each product, or one for both.

    On a CPU the recipe's `in_c` does the same, and on a GPU its `in_triton`, if it has them.
    """

    def __init__(self, recipe: Recipe, given: TensorQuantizer) -> None:
        self.recipe, self.given = recipe, given
        self._casts = casts = recipe.traits.casts[given.role]
        # An operand that is rotated, or packed with two numbers in a byte, cannot be cut off inside
        # a block of rows. Rows of zeros fill the block, which add nothing to the product.
        self._fill = recipe.traits.multiple if casts.rotation is not None else 1
        self._fill_packed = recipe.traits.multiple if given.fmt is E2M1 else self._fill

    def operands(
        self, tensor: TensorQuantizer, x_MN: torch.Tensor, need: WantsFp8, *, with_sum: bool = False
    ) -> tuple[Operands, torch.Tensor | None]:
        casts, last, first, (rows, cols) = self._casts, None, None, x_MN.shape
        in_triton = tensor.state.engine.uses_triton and bool(x_MN.numel())
        packed = in_triton and self._packs(tensor)
        fill, filled_MN = self._fill_packed if packed else self._fill, x_MN
        if in_triton:
            if need.first and rows % fill:
                filled_MN = F.pad(x_MN, (0, 0, 0, -rows % fill))
            seen = filled_MN.shape[0]
            asked = (
                self._asked(casts.last, LAST, (rows, cols), (seen, cols)),
                self._asked(casts.first, FIRST, (cols, rows), (cols, seen)),
            )
            made = self.recipe.in_triton(
                filled_MN.contiguous(), need, asked, packed=packed, with_sum=with_sum
            )
            if made is not None:
                last, first = (
                    None if x is None else self._of_kernel(x, along, filled_MN.shape, packed)
                    for x, along in ((made.last, LAST), (made.first, FIRST))
                )
                first = last if made.first is made.last and last is not None else first
                if last is not None and seen > rows:
                    last = _first_rows(last, rows)
                return operands_of(x_MN, last, first), made.sums
        if need.last or (need.first and casts.serves_both):
            last = self._cast(x_MN, casts.last, "last", (rows, cols))
        if need.first:
            first = last if casts.serves_both else self._along_first(filled_MN, (cols, rows))
        last = last if need.last else None
        return operands_of(x_MN, last, first), column_sums(x_MN) if with_sum else None

    def saved_form(self, tensor: TensorQuantizer) -> SavedForm:
        casts, dtype = self._casts, self.given.fmt.dtype
        if tensor.state.engine.uses_triton and self.recipe.has_casts_in_triton():
            packed = self._packs(tensor)
            dtype = torch.float4_e2m1fn_x2 if packed and self.given.fmt is E2M1 else dtype
            fill = self._fill_packed if packed else self._fill
            return SavedForm(casts.first, dtype, is_transposed=packed, is_packed=packed, fill=fill)
        # C leaves the bytes in the tensor's own order; the table lies on the tensor's device.
        is_in_c = self.recipe.has_casts_in_c() and block_casts.runs_in_c(tensor.state.forward.amax)
        is_transposed = not casts.serves_both and not is_in_c
        return SavedForm(casts.first, dtype, is_transposed=is_transposed, fill=self._fill)

    def _packs(self, tensor: TensorQuantizer) -> bool:
        packs = self.recipe.traits.packs
        return packs is not None and tensor.state.engine.orients(packs)

    def _of_kernel(
        self, made: Scaled, along: Along, shape: torch.Size, packed: bool = False
    ) -> Fp8Tensor:
        """Return what C or Triton kernels made of a tensor of this shape."""
        is_last, casts = along == LAST, self._casts
        scales = casts.last if is_last else casts.first
        block = _block(scales, *(shape if is_last else shape[::-1]))
        block = (1, block[1]) if packed else block  # those of squares are repeated
        traits = self.recipe.traits
        return Fp8Tensor(
            made.payload,
            made.dequant_scale,
            self.given.fmt,
            made.values,
            block=block if is_last else block[::-1],
            is_exact_in_bf16=True,
            layout=(traits.packs if packed else scales.layout) or "other",
            outer=made.outer,
            rotation=None if is_last else casts.rotation,
        )

    def store_scale(self, tensor: TensorQuantizer, amax: torch.Tensor) -> torch.Tensor:
        asked = self._asked(self._casts.last, "last", (0, 0))
        scale: torch.Tensor = self._run(lambda: self.recipe.scale_of_amax(amax, asked))
        if scale.shape != () or scale.dtype != torch.float32:
            raise self._wrong(f"scale_of_amax gave {_described(scale)}, not a 0-d FP32 tensor")
        return scale

    def _along_first(self, x_MN: torch.Tensor, sizes: tuple[int, int]) -> Fp8Tensor:
        """Cast the transposed tensor, and turn the result back: its bytes stay where they are.

        `sizes` are those of the transposed tensor before it was filled.
        """
        if (by_kernel := self._in_c(x_MN, self._casts.first, "first", sizes)) is not None:
            return by_kernel
        if missing := -len(x_MN) % self._fill:
            x_MN = F.pad(x_MN, (0, 0, 0, missing))
        turned = self._cast(x_MN.t().contiguous(), self._casts.first, "first", sizes)
        if turned.block is None:
            return replace(turned, payload=turned.payload.t())
        return replace(
            turned,
            payload=turned.payload.t(),
            dequant_scale=turned.dequant_scale.t(),
            block=turned.block[::-1],
        )

    def _cast(
        self, x_MK: torch.Tensor, scales: Scales, along: Along, sizes: tuple[int, int]
    ) -> Fp8Tensor:
        """Run the rule over whole blocks, and check that it returns what the traits say.

        `sizes` are those of the matrix before it was filled.
        """
        by_kernel = self._in_c(x_MK, scales, along, sizes) if along == "last" else None
        if by_kernel is not None:
            return by_kernel
        rows, inner = x_MK.shape
        block = _block(scales, rows, inner)
        # A rank whose part is empty gets a block of zeros: the rule then asks for the maxima that
        # the other ranks wait for, and need not know what the amax of nothing is.
        missing = (0, _missing(inner, block[1]), 0, _missing(rows, block[0]))
        rotation = self._casts.rotation if along == "first" else None
        whole_MK = F.pad(x_MK, missing) if any(missing) else x_MK
        result = self._result(whole_MK, scales, along, sizes)
        self._check(result, whole_MK, scales)
        payload, dequant_scale = result.payload, result.dequant_scale
        if any(missing):
            payload = payload[:rows, :inner].contiguous()
        if not scales.is_one:
            down, right = scales.shape(rows, inner)
            dequant_scale = dequant_scale[:down, :right]
        # Scales on a GPU are not looked at, as the host would wait; products are then in FP32.
        is_known = self.given.power_2 and payload.device.type == "cpu"
        is_plain = not scales.is_one and not scales.has_outer
        return Fp8Tensor(
            payload,
            dequant_scale,
            self.given.fmt,
            block=None if scales.is_one else block,
            is_exact_in_bf16=is_known and is_plain,
            layout=scales.layout or "other",
            outer=result.outer,
            rotation=rotation,
        )

    def _in_c(
        self, x_MN: torch.Tensor, scales: Scales, along: Along, sizes: tuple[int, int]
    ) -> Fp8Tensor | None:
        """Return what the recipe's C kernels make of the tensor; None where the rule runs."""
        if not x_MN.numel() or not block_casts.runs_in_c(x_MN):
            return None
        is_last = along == "last"
        rows, cols = x_MN.shape
        seen = (rows, cols) if is_last else (cols, rows + -rows % self._fill)  # as the kernel fills
        block = _block(scales, *seen)
        block = block if is_last else block[::-1]
        values = values_dtype(self.given, x_MN, along_first=not is_last)
        asked = self._asked(scales, along, sizes, seen)._replace(values=values)
        result = self.recipe.in_c(x_MN, block, asked)
        missing = [_missing(size, step) for size, step in zip(x_MN.shape, block, strict=True)]
        if result is None and any(missing):
            whole_MN = F.pad(x_MN, (0, missing[1], 0, missing[0]))
            asked = self._asked(scales, along, sizes, seen=_turned(whole_MN, is_last))
            result = self.recipe.in_c(whole_MN, block, asked)
            if result is not None:  # the blocks are those of the tensor; its numbers end inside
                payload = result.payload[: x_MN.shape[0], : x_MN.shape[1]].contiguous()
                result = result._replace(payload=payload, values=None)
        return None if result is None else self._of_kernel(result, along, x_MN.shape)

    def _result(
        self, x_MK: torch.Tensor, scales: Scales, along: Along, sizes: tuple[int, int]
    ) -> Scaled:
        """Return what the rule makes of whole blocks; `sizes` are those before it was filled."""
        rows, inner = x_MK.shape
        asked = self._asked(scales, along, sizes, seen=(rows, inner))
        result = self._run(lambda: self.recipe.cast(x_MK, asked))
        if self.recipe.traits.is_simulated and isinstance(result, torch.Tensor):
            ones = torch.ones(scales.shape(*x_MK.shape), dtype=torch.float32, device=x_MK.device)
            return Scaled(result.float(), ones)
        if not isinstance(result, Scaled):
            wanted = "a tensor of values" if self.recipe.traits.is_simulated else "Scaled(...)"
            raise self._wrong(f"its cast gave {_described(result)}, not {wanted}")
        return result

    def _asked(
        self,
        scales: Scales,
        along: Along,
        sizes: tuple[int, int],
        seen: tuple[int, int] | None = None,
    ) -> Cast:
        """Return what is asked of the rule for a matrix of `sizes`, filled up to `seen`."""
        given = self.given
        draw = Draw(
            given.state.draws,
            f"{given.name}.{given.role}.{along}",
            given.part,
            sizes,
            seen or sizes,
            given.state.forward.amax.device,
            is_turned=along == "first",
            is_weight=given.role == "weight",
            is_rotated=along == "first" and self._casts.rotation is not None,
        )
        return Cast(given.role, scales, given.fmt, given.power_2, along, given.reduce_max, draw)

    def _check(self, result: Scaled, x_MK: torch.Tensor, scales: Scales) -> None:
        """Raise `RuleError` unless a cast has the shapes, dtypes and scales that the traits say."""
        payload, dequant_scale, outer, _ = result
        fmt, shape = self.given.fmt, scales.shape(*x_MK.shape)
        gave = f"its cast of {list(x_MK.shape)} gave"
        if payload.shape != x_MK.shape or payload.dtype != fmt.dtype:
            expected = f"a payload of {list(x_MK.shape)} in {fmt.dtype}"
            raise self._wrong(f"{gave} a payload of {_described(payload)}, not {expected}")
        if dequant_scale.shape != shape or dequant_scale.dtype != torch.float32:
            expected = f"{list(shape)} in FP32, as its traits say"
            raise self._wrong(f"{gave} scales of {_described(dequant_scale)}, not {expected}")
        if (outer is not None) != scales.has_outer:
            says = "has" if scales.has_outer else "does not have"
            raise self._wrong(f"{gave} another `outer` than its traits, whose tensor {says} one")
        if outer is not None and (outer.shape != () or outer.dtype != torch.float32):
            raise self._wrong(f"{gave} an `outer` of {_described(outer)}, not [] in FP32")
        if self.given.power_2 and dequant_scale.device.type == "cpu":
            self._check_powers(dequant_scale)

    def _check_powers(self, scale: torch.Tensor) -> None:
        """Raise unless all scales are powers of two, which BF16 products of values rest on."""
        mantissa, _ = torch.frexp(scale[scale.isfinite() & (scale != 0)])
        if not bool((mantissa.abs() == 0.5).all()):
            raise self._wrong(
                "its cast gave scales that are not powers of two, as its traits say. Declare "
                "power_2='never', or round them",
                trait="power_2",
            )

    def _run(self, rule: Callable[[], Result]) -> Result:
        return _run(rule, self.given.state, self._where)

    def _wrong(self, reason: str, trait: str = "runs") -> RuleError:
        return RuleError(f"{self._where}: {reason}", trait)

    @property
    def _where(self) -> str:
        return f"{self.recipe.name}: {self.given.name}.{self.given.role}"


@dataclass(frozen=True)
class RuleUpdate:
    """Run the `update` of a recipe over its rows of a table, and check what it returns."""

    recipe: Recipe
    state: ScalingState

    def __call__(self, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the history and the scales of the next microbatch."""
        where = f"{self.recipe.name}: its update"
        result = _run(lambda: self.recipe.update(seen), self.state, where)
        got = result if isinstance(result, tuple) else (result,)
        expected = [_described(seen.history), _described(seen.quant_scale)]
        if [_described(value) for value in got] != expected:
            shapes = " and ".join(_described(value) for value in got)
            raise RuleError(f"{where} gave {shapes}, not {' and '.join(expected)}")
        if seen.amax.device.type == "cpu":  # a GPU would have to be waited for
            scales = result[1][seen.amax.isfinite() & (seen.amax > 0)]
            if not bool((scales.isfinite() & (scales > 0)).all()):
                raise RuleError(f"{where} gave scales that are not above zero and finite")
        return result


def _run(rule: Callable[[], Result], state: ScalingState, where: str) -> Result:
    """Run a recipe's rule; name its own line where it fails."""
    began = time.perf_counter()
    try:
        return rule()
    except UserError:
        raise
    except BaseException as error:  # a rule of somebody else can raise anything, also SystemExit
        if is_interrupt(error):
            raise
        reason = raised(error).partition("\n")[0]
        raise RuleError(f"{where}: {_place_of(error)}: {reason}") from error
    finally:
        state.rule_seconds += time.perf_counter() - began


def _block(scales: Scales, rows: int, inner: int) -> tuple[int, int]:
    """Return the rows and columns of an operand [rows, inner] that share a scale."""
    return scales.across or max(1, rows), scales.along or max(1, inner)


def _first_rows(x: Fp8Tensor, rows: int) -> Fp8Tensor:
    """Return an operand without the rows that fill its last block.

    Packed scales lie in tiles of 128 rows, which are as many with these rows.
    """
    assert x.block is not None
    scale = x.dequant_scale if x.is_packed else x.dequant_scale[: -(-rows // x.block[0])]
    return replace(x, payload=x.payload[:rows], dequant_scale=scale)


def _turned(x_MN: torch.Tensor, is_last: bool) -> tuple[int, int]:
    """Return the sizes of a matrix, those of the transposed one if the sum is along the first."""
    m, n = x_MN.shape
    return (m, n) if is_last else (n, m)


def _missing(size: int, block: int) -> int:
    """Return how many elements lack to the next whole number of blocks, from one."""
    return -size % block if size else block


def _described(value: object) -> str:
    """Return shape and dtype of a tensor, and the type of anything else."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} in {value.dtype}"
    return f"a {type(value).__name__}"


def _place_of(error: BaseException) -> str:
    """Return the last line outside of libraries that an exception passed through."""
    lines = traceback.extract_tb(error.__traceback__)
    outside = [line for line in lines if "site-packages" not in line.filename]
    line = (outside or lines)[-1]
    return f"{Path(line.filename)}, line {line.lineno}, in {line.name}"
